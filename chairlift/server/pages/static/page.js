"use strict";
let entries = [], from = 0, model = "", room = Infinity, stopping = null, polling = 0, saved = 0, results = null, left = false;
// entries: the shown messages, with details of each answer. The messages from index `from` on are sent.

// Requests

class Refusal extends Error {
  constructor(message, status = 0, code = "") { super(message); Object.assign(this, { status, code }); }
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const { error = {} } = await response.json().catch(() => ({}));
  const wait = Number(response.headers.get("Retry-After"));
  const hint = wait > 0 ? `; try again in ${wait} s` : "";
  if (response.status === 401) lock(key ? "This key is not accepted." : "");
  throw new Refusal((error.message || `The server responded with status ${response.status}.`) + hint, response.status, error.code);
}

function lock(reason) {
  sessionStorage.removeItem("key");
  $("refused").textContent = reason;
  $("door").hidden = false;
  $("bottom").hidden = $("chat").hidden = $("api").hidden = true;
  $("corner").textContent = "";
  $("key").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  $("door").hidden = true;
  begin();
});

// The corner: model and load, fetched only while the page is visible

async function look() {
  clearTimeout(polling);
  if (document.hidden || !$("door").hidden) return;
  try {
    if (room === Infinity) {  // unknown until the model is loaded
      const { data } = await (await ask("/v1/models")).json();
      showModel(data);
    }
    const load = await (await ask("/load")).json();
    const { running = load.server_load, waiting = 0 } = load;
    const busy = `${running} running` + (waiting ? `, ${waiting} waiting` : ""), name = make("span", model);
    name.title = model;  // a long one is cut off
    $("corner").replaceChildren(...($("models").hidden ? [name, make("span", ` · ${busy}`)] : [make("span", busy)]));
  } catch (error) {
    if (error.status === 401) return;
    $("corner").textContent = error.status === 503 ? "the server is not ready" : "no connection";
  }
  clearTimeout(polling);
  polling = setTimeout(look, 2000);
}

// Storage: conversation and settings, in this tab only, like the key

const SETTINGS = ["system", "temperature", "tokens", "effort", "functions", "form"];

function save() {
  if (left) return;  // an answer that breaks off because the page is left keeps what it had
  saved = performance.now();
  const settings = Object.fromEntries(SETTINGS.map((id) => [id, $(id).value]));
  try {
    sessionStorage.setItem("settings", JSON.stringify(settings));
    sessionStorage.setItem("conversation", JSON.stringify({ entries, from }));
    $("unkept").hidden = true;
  } catch {  // the browser keeps some five million characters
    sessionStorage.removeItem("conversation");
    $("unkept").hidden = false;
  }
}

function stored(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name)) ?? {};
  } catch {
    return {};
  }
}

function restore() {
  for (const [id, value] of Object.entries(stored("settings"))) if (SETTINGS.includes(id)) $(id).value = value;
  ({ entries = [], from = 0 } = stored("conversation"));
  const last = entries.at(-1);
  if (last?.role === "assistant" && !last.note) {
    if (isEmpty(last)) entries.pop();
    else last.note = "the page was closed before the answer ended";
  }
  if (entries.at(-1)?.role === "user") {
    const { content: given } = entries.pop();
    $("text").value = textOf(given);
    pictures = imagesOf(given);
    offerPictures();
  }
  from = Math.min(from, entries.length);
  drawAll();
}

function isEmpty(entry) { return !entry.content && !entry.reasoning_content && !entry.tool_calls; }

// The conversation

function json(id, name) {  // value of a settings field that contains JSON
  const text = $(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Refusal(`${name} in the settings is not valid JSON: ${error.message}`);
  }
}

function asked() {  // fields that the settings add to a request
  const heat = $("temperature").valueAsNumber, schema = json("form", "The JSON schema");
  const given = json("functions", "The tools");
  const tools = given && [].concat(given).map((tool) => tool.function ? tool : { type: "function", function: tool });
  return {
    model,
    system: $("system").value.trim(),
    fields: {
      ...((room < Infinity || $("tokens").value) && { max_tokens: most() }),
      ...(Number.isFinite(heat) && { temperature: heat }),
      ...($("effort").value && { reasoning_effort: $("effort").value }),
      ...(tools && { tools }),
      ...(schema && { response_format: { type: "json_schema", json_schema: { name: "form", schema } } }),
    },
  };
}

function wire({ role, content, reasoning_content, tool_calls, tool_call_id }) {
  const more = { reasoning_content, tool_calls, tool_call_id };
  return { role, content: content || !tool_calls ? content : null, ...JSON.parse(JSON.stringify(more)) };
}

function body({ model, system, fields, from, end }) {
  const messages = entries.slice(from, end).map(wire);
  return { model, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages], ...fields };
}

async function start(how, signal) {
  if (!model) await look();
  how.model ||= model;
  for (;;) {
    Object.assign(how, { from, end: entries.length });
    const more = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, return_timing: true };
    try {
      const headers = { "Content-Type": "application/json" };
      return await ask("/v1/chat/completions", {
        method: "POST", headers, body: JSON.stringify({ ...body(how), ...more }), signal,
      });
    } catch (error) {
      const next = entries.findIndex((entry, at) => at > from && entry.role === "user");
      if (error.code !== "context_length_exceeded" || next < 0) throw error;
      from = next;  // the oldest message and what answered it make room
    }
  }
}

async function* events(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    let next;
    try {
      next = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      next = { done: true };
    }
    if (next.done) throw new Refusal("The connection was lost before the answer ended.");
    const lines = (rest + next.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      if (line.slice(5).trim() === "[DONE]") return;
      const event = JSON.parse(line.slice(5));
      if (event.error) throw new Refusal(event.error.message || "The answer failed.");
      yield event;
    }
  }
}

function figures(sent, first, last, { completion_tokens: tokens, completion_tokens_details: details }) {
  const speed = tokens > 1 && last > first ? ` · ${((tokens - 1) / (last - first) * 1000).toFixed(1)} tokens/s` : "";
  const count = tokens === 1 ? "1 token" : `${tokens} tokens`;
  const thought = details?.reasoning_tokens ? `, ${details.reasoning_tokens} of them reasoning` : "";
  return `first token ${((first - sent) / 1000).toFixed(2)} s${speed} · ${count}${thought}`;
}

// An answer on the page: reasoning, text, calls, measured times and buttons

class Answer {
  constructor(entry) {
    const scroll = document.querySelector("main");
    const drawn = () => { if (this.follows) scroll.scrollTop = scroll.scrollHeight; };
    this.entry = entry;
    this.node = make("article");
    this.text = make("div", "", "answer");
    this.calls = make("div");
    this.note = make("p", entry.note ?? "…", "figures");
    this.more = make("div", "", "more");
    this.node.append(this.text, this.calls, this.note, this.more);
    this.prose = new Prose(this.text, drawn);
    this.thoughts = null;
    this.follows = false;
  }

  take({ choices: [choice = {}], usage, timing }) {  // adds an event of the stream; returns whether it contained a part of the answer
    const { entry } = this, { delta = {} } = choice;
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.think(entry.reasoning_content = (entry.reasoning_content ?? "") + thought, thought);
    if (delta.content) {
      if (!entry.content && this.thoughts) this.thoughts.box.open = false;
      entry.content += delta.content;
      this.prose.add(delta.content);
    }
    for (const { index, id, type = "function", function: { name, arguments: text = "" } = {} } of delta.tool_calls ?? []) {
      entry.tool_calls ??= [];
      entry.tool_calls[index] ??= { id, type, function: { name, arguments: "" } };
      entry.tool_calls[index].function.arguments += text;
    }
    if (choice.tool_call_errors) entry.errors = choice.tool_call_errors;
    if (choice.finish_reason === "length") entry.ending = ` · cut at the limit of ${number(entry.asked.fields.max_tokens)} tokens`;
    if (timing) entry.timing = timing;
    if (usage) entry.usage = usage;
    return !!(thought || delta.content || delta.tool_calls);
  }

  think(text, piece) {
    if (!this.thoughts) {
      const box = make("details", "", "thoughts"), content = make("div", "", "thought");
      box.append(make("summary", "Reasoning"), content);
      box.open = !this.entry.note && !this.entry.content;
      this.node.prepend(box);
      this.thoughts = { box, prose: new Prose(content, this.prose.drawn) };
    }
    this.thoughts.prose.add(piece);
  }

  end() {  // draws the complete answer
    const { entry } = this;
    if (entry.reasoning_content && !this.thoughts) this.think(entry.reasoning_content, entry.reasoning_content);
    this.thoughts?.prose.end();
    if (this.thoughts && !isEmpty({ ...entry, reasoning_content: "" })) this.thoughts.box.open = false;
    this.prose.text = entry.content;
    this.prose.end();
    this.text.hidden = !entry.content;
    this.calls.replaceChildren(...(entry.tool_calls ?? []).map(showCall));
    for (const error of entry.errors ?? []) this.calls.append(make("p", `Not a valid call: ${error}`, "hint"));
    this.note.textContent = entry.note;
    const bar = make("div", "", "bar"), code = button("Code", () => {
      if (this.programs) { this.programs.remove(); this.programs = null; }
      else this.node.append(this.programs = programs(body(entry.asked)));
      code.setAttribute("aria-expanded", !!this.programs);
    });
    bar.append(copier(() => entry.content || JSON.stringify(entry.tool_calls ?? "", null, 1)));
    if (entry.asked) bar.append(code);
    bar.append(button("Regenerate", () => again(entry), "small again"));
    this.more.replaceChildren(...[entry.timing && why(entry.timing), bar].filter(Boolean));
  }
}

function showCall({ function: { name, arguments: text } }) {
  const box = make("details", "", "call"), title = make("summary", "calls "), value = parsed(text);
  title.append(make("code", name));
  box.open = true;
  box.append(title, value ? twoWays(value, text) : make("pre", text, "plain"));
  return box;
}

function draw(entry) {
  if (entry.role === "assistant") {
    const shown = new Answer(entry);
    shown.end();
    return shown.node;
  }
  if (entry.role !== "tool") {
    const mine = make("div", textOf(entry.content), "mine");
    mine.prepend(...imagesOf(entry.content).map(picture));
    return mine;
  }
  const box = make("details", "", "result"), value = parsed(entry.content);
  box.append(make("summary", "result"), value ? twoWays(value, entry.content) : make("pre", entry.content, "plain"));
  return box;
}

function drawAll() {
  const hello = $("hello");
  hello.hidden = entries.length > 0;
  $("chat").replaceChildren(hello, ...entries.map(draw));
  offerResults();
  markDropped();
  showLimit();
  const scroll = document.querySelector("main");
  scroll.scrollTop = scroll.scrollHeight;
}

function offerResults() {  // shows fields for the results of the called functions, under the newest answer
  results?.remove();
  const last = entries.at(-1);
  if (last?.role !== "assistant" || !last.tool_calls || stopping) return;
  const form = results = make("form", "", "results");
  for (const { id, function: { name } } of last.tool_calls) {
    const label = make("label", `Result of ${name}`), field = make("textarea");
    field.rows = 1;
    field.dataset.call = id;
    label.append(field);
    form.append(label);
  }
  form.append(make("button", "Send results", "main"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const fields = [...form.querySelectorAll("textarea")];
    send(fields.map((field) => ({ role: "tool", tool_call_id: field.dataset.call, content: field.value })));
  });
  $("chat").append(form);
}

async function send(messages) {  // whether an answer came, or a part of one
  let how;
  try {
    how = asked();
  } catch (error) {
    show(error.message);
    return false;
  }
  $("hello").hidden = true;
  results?.remove();
  const nodes = messages.map(draw), scroll = document.querySelector("main");
  entries.push(...messages);
  $("chat").append(...nodes);
  const came = await respond(how);
  if (!came) {  // nothing came: the messages go back to where they were written
    entries.splice(entries.length - messages.length);
    for (const node of nodes) node.remove();
  }
  $("hello").hidden = entries.length > 0;
  offerResults();
  markDropped();
  showLimit();
  save();
  scroll.scrollTop = scroll.scrollHeight;
  return came;
}

async function respond(how) {
  const scroll = document.querySelector("main");
  const entry = { role: "assistant", content: "", asked: how }, shown = new Answer(entry), sent = performance.now();
  let first = 0, last = 0, pieces = 0, failure = null;
  $("chat").append(shown.node);
  shown.node.ariaBusy = true;
  scroll.scrollTop = scroll.scrollHeight;
  stopping = new AbortController();
  show();
  try {
    const response = await start(how, stopping.signal);
    entries.push(entry);
    for await (const event of events(response)) {
      shown.follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
      if (!shown.take(event)) continue;
      last = performance.now();
      first ||= last;
      pieces += 1;
      shown.note.textContent = figures(sent, first, last, entry.usage ?? { completion_tokens: pieces });
      if (last - saved > 2000) save();
    }
  } catch (error) {
    failure = error;
  }
  const stopped = failure?.name === "AbortError";
  stopping = null;
  if (failure && !first) {
    if (entries.at(-1) === entry) entries.pop();
    shown.node.remove();
  } else {
    const told = first ? figures(sent, first, last, entry.usage ?? { completion_tokens: pieces }) : "an empty answer";
    entry.note = told + (stopped ? " · stopped" : failure ? " · interrupted" : entry.ending ?? "");
    shown.node.ariaBusy = false;
    shown.end();
  }
  showLimit();
  show(failure && !stopped ? failure.message : "");
  return !!first || !failure;
}

async function again(entry) {  // the same request, with the settings as they are now; what came after it goes
  if (stopping) return;
  const before = entries, kept = from, at = entries.indexOf(entry);
  try {
    const how = asked();
    entries = entries.slice(0, at);
    from = Math.min(from, at);
    if (entries[from]?.role !== "user") from = 0;
    drawAll();
    results?.remove();
    if (!await respond(how)) throw null;
    offerResults();
  } catch (error) {
    if (error) show(error.message);
    entries = before;
    from = kept;
    drawAll();
  }
  save();
}

function show(problem = "") {
  $("problem").textContent = problem;
  $("problem").hidden = !problem;
  $("send").hidden = !!stopping;
  $("stop").hidden = !stopping;
  $("reset").disabled = !!stopping;
  $("chat").classList.toggle("busy", !!stopping);
}

$("say").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value.trim(), sent = pictures;
  if (!(text || sent.length) || stopping) return;
  const message = { role: "user", content: content(text) };
  $("text").value = "";
  pictures = [];
  offerPictures();
  if (await send([message])) return;
  $("text").value ||= text;
  pictures = [...sent, ...pictures];
  offerPictures();
});
$("text").addEventListener("paste", async (event) => {
  const { files } = event.clipboardData;
  if (!files.length) return;
  event.preventDefault();
  show(await takeImages([...files]));
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, async (event) => {
    if (!event.dataTransfer?.types.includes("Files") || $("bottom").hidden) return;
    event.preventDefault();  // otherwise the browser leaves the page for the file
    if (name === "drop") show(await takeImages([...event.dataTransfer.files]));
  });
}
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("say").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (stopping) stopping.abort();
  else if ($("settings").open) closeSettings();
});
$("stop").addEventListener("click", () => { stopping?.abort(); $("text").focus(); });
$("reset").addEventListener("click", () => {
  entries = [];
  from = 0;
  drawAll();
  save();
  show();
  $("text").focus();
});

// Switching between chat and API

function begin() {
  const api = location.hash === "#api" || (location.pathname === "/docs" && location.hash !== "#chat");
  for (const link of document.querySelectorAll("nav a")) {
    link.toggleAttribute("aria-current", link.hash && (link.hash === "#api") === api);
  }
  $("api").hidden = !api;
  $("chat").hidden = $("bottom").hidden = api;
  look().then(() => { if (api && $("door").hidden) describe(); });
  if (!api && matchMedia("(hover: hover)").matches) $("text").focus();  // on a phone that would open the keyboard
}

addEventListener("hashchange", () => { if ($("door").hidden) begin(); });
addEventListener("pagehide", () => { save(); left = true; });
addEventListener("pageshow", () => { left = false; });
document.addEventListener("visibilitychange", look);
restore();
begin();
