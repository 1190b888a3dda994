"use strict";
// The API page, made from /openapi.json

function resolve(spec, schema = {}) {
  const name = schema.$ref?.split("/").pop();
  return name ? spec.components?.schemas?.[name] ?? {} : schema;
}

function type(spec, schema) {
  if (schema.$ref) return resolve(spec, schema).title ?? schema.$ref.split("/").pop();
  const options = (schema.anyOf ?? schema.oneOf)?.filter((option) => option.type !== "null");
  if (options) return [...new Set(options.map((option) => type(spec, option)))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${type(spec, schema.items ?? {})}`;
  const [low, high] = [schema.minimum ?? schema.exclusiveMinimum, schema.maximum]
    .map((bound) => bound === undefined || Math.abs(bound) >= 2 ** 31 - 1 ? "" : bound);
  const range = low === "" && high === "" ? "" : high === "" ? ` ≥ ${low}` : ` ${low}…${high}`;
  return ([].concat(schema.type ?? "any").join(" or ")) + range;
}

function fields(spec, schema) {
  const table = make("table"), head = table.createTHead().insertRow(), { properties = {}, required = [] } = schema;
  for (const title of ["field", "type", "default"]) head.append(make("th", title));
  const rows = table.createTBody();
  for (const [name, field] of Object.entries(properties)) {
    const row = rows.insertRow();
    row.insertCell().append(make("code", name));
    row.insertCell().append(type(spec, field), make("div", field.description, "hint"));
    const value = (field.default ?? null) === null ? "" : JSON.stringify(field.default);
    row.insertCell().textContent = required.includes(name) ? "required" : value;
  }
  for (const at of [2, 1]) {  // remove empty columns
    if (![...rows.rows].some((row) => row.cells[at].textContent)) for (const row of table.rows) row.deleteCell(at);
  }
  const box = make("div", "", "scroll");
  box.append(table);
  return box;
}

function endpoint(spec, path, verb, about) {
  const box = make("details"), title = make("summary");
  title.append(make("span", verb.toUpperCase(), "verb"), make("code", path), ` ${about.summary ?? ""}`);
  box.append(title, make("p", about.description));
  const schema = about.requestBody?.content?.["application/json"]?.schema;
  if (schema) box.append(fields(spec, resolve(spec, schema)));
  const codes = Object.entries(about.responses ?? {}).map(([code, { description = "" }]) => `${code} ${description}`);
  box.append(make("p", `Responses: ${codes.join(", ")}`, "hint"));
  return box;
}

async function describe() {
  const example = { model, messages: [{ role: "user", content: "Hello" }], stream: true };
  const key = sessionStorage.getItem("key") ? ' -H "Authorization: Bearer $KEY"' : "";
  const curl = `curl -N ${location.origin}/v1/chat/completions${key} \\\n  -H "Content-Type: application/json" \\\n  -d '${JSON.stringify(example)}'`;
  const parts = [make("pre", curl)];
  try {
    const spec = await (await ask("/openapi.json")).json();
    for (const [path, verbs] of Object.entries(spec.paths)) {
      for (const [verb, about] of Object.entries(verbs)) parts.push(endpoint(spec, path, verb, about));
    }
  } catch (error) {
    parts.push(make("p", error.message, "bad"));
  }
  $("api").replaceChildren(...parts);
}
