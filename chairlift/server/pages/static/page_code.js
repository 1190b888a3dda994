"use strict";
// Shows a request as a program, and the causes of the time of an answer.

function inPython(value, indent = "") {
  const deeper = indent + "    ";
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const parts = list ? value.map((each) => inPython(each, deeper))
    : Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${inPython(each, deeper)}`);
  const [open, close] = list ? "[]" : "{}";
  const line = open + parts.join(", ") + close;
  if (line.length < 80 && !line.includes("\n")) return line;
  return `${open}\n${parts.map((part) => `${deeper}${part},\n`).join("")}${indent}${close}`;
}

const PROGRAMS = {
  curl(body, url, locked) {
    const quoted = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
    const key = locked ? '  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n' : "";
    return `curl ${url}/chat/completions \\\n${key}  -H "Content-Type: application/json" \\\n  -d '${quoted}'\n`;
  },
  Python(body, url, locked) {
    const fields = Object.entries(body).map(([name, value]) => `    ${name}=${inPython(value, "    ")},\n`).join("");
    const [first, key] = locked ? ["import os\n\n", 'os.environ["OPENAI_API_KEY"]'] : ["", '"none"'];
    return `${first}from openai import OpenAI\n\nclient = OpenAI(base_url="${url}", api_key=${key})\n`
      + `reply = client.chat.completions.create(\n${fields})\nprint(reply.choices[0].message.to_json())\n`;
  },
  JavaScript(body, url, locked) {
    const key = locked ? "\n    Authorization: `Bearer ${process.env.OPENAI_API_KEY}`," : "";
    const given = JSON.stringify(body, null, 2).replaceAll("\n", "\n  ");
    return `const response = await fetch("${url}/chat/completions", {\n  method: "POST",\n`
      + `  headers: {\n    "Content-Type": "application/json",${key}\n  },\n  body: JSON.stringify(${given}),\n});\n`
      + "const reply = await response.json();\nconsole.log(response.ok ? reply.choices[0].message : reply.error);\n";
  },
};

function programs(body) {
  const box = make("div", "", "programs"), tabs = make("div", "", "tabs"), pre = make("pre");
  const locked = !!sessionStorage.getItem("key");
  for (const [name, write] of Object.entries(PROGRAMS)) {
    tabs.append(button(name, (event) => {
      for (const tab of tabs.children) tab.setAttribute("aria-pressed", tab === event.currentTarget);
      pre.textContent = write(body, `${location.origin}/v1`, locked);
    }));
  }
  box.append(tabs, codeBox(pre));
  tabs.firstElementChild.click();
  return box;
}

const CAUSES = {
  front_door: "request checks, tokenizing, transfer to the engine",
  waiting_step: "a step was running when it arrived",
  waiting_slots: "all rows of the batch were taken",
  waiting_blocks: "the KV cache was full",
  waiting_tokens: "other requests used the token budget",
  waiting_reservation: "free rows were reserved for another class",
  waiting_batch: "its static batch had not begun, or had not ended",
  waiting_grammar: "its grammar was being compiled",
  waiting_image: "its images were being encoded",
  waiting_prefix: "another request was computing the beginning of its prompt",
  waiting_kv_load: "its KV was being read from disk",
  waiting_policy: "the scheduling policy let no further request join",
  waiting_adapter: "its adapter was being read, or did not fit into the steps",
  preempted: "preempted, until it was back at its position",
  prefill: "computing its prompt",
  decode: "generating its tokens",
  stretched: "work for other requests in its steps",
  host: "between two steps",
  delivery: "from its last token to this page",
};

function why(timing) {
  const causes = Object.entries(timing.causes_ms).filter(([, time]) => time >= 0.05).sort(([, a], [, b]) => b - a);
  const whole = causes.reduce((sum, [, time]) => sum + time, 0);
  if (!whole) return null;
  const box = make("details", "", "why"), [most, time] = causes[0];
  box.append(make("summary", `Where the time went: ${Math.round(100 * time / whole)} % ${CAUSES[most] ?? most}`));
  const table = make("table");
  for (const [cause, spent] of causes) {
    const row = table.insertRow(), bar = make("meter");
    bar.value = spent / whole;
    bar.setAttribute("aria-label", "Fraction of the time");
    row.insertCell().textContent = CAUSES[cause] ?? cause;
    row.insertCell().textContent = spent >= 1000 ? `${(spent / 1000).toFixed(2)} s` : `${spent.toFixed(1)} ms`;
    row.insertCell().append(bar);
  }
  const scroll = make("div", "", "scroll");
  scroll.append(table);
  box.append(scroll);
  return box;
}
