"use strict";
// The live page: receives the stream of steps, updates the view, and shows details under the pointer.

const $ = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
const CAUSES = {  // docs/why-slow.md explains them
  front_door: "request checks, tokenizing, transfer to the engine", waiting_step: "a step was running when it arrived", waiting_slots: "all rows were taken",
  waiting_blocks: "the KV cache was full", waiting_tokens: "other requests used the token budget", waiting_reservation: "free rows were reserved for another class",
  waiting_batch: "its static batch had not begun, or had not ended", waiting_grammar: "its grammar was being compiled",
  waiting_image: "its images were being encoded", waiting_prefix: "another request was computing the beginning of its prompt", waiting_kv_load: "its KV was being read from disk",
  waiting_policy: "the scheduling policy let no further request join",
  waiting_adapter: "its adapter did not fit into the steps, or was being read",
  preempted: "it was preempted", prefill: "computing its prompt", decode: "generating its tokens",
  stretched: "work for other requests in its steps", host: "between two steps", delivery: "from its last token to the client",
  waiting: "before its first step", "first token": "from its first step to its first token", writing: "from its first token on, pauses included",
};
const WAITS_FOR = { slots: "a row", blocks: "KV memory", tokens: "the token budget", reservation: "a reserved row", batch: "their batch",
  grammar: "their grammar", adapter: "their adapter", image: "their images", prefix: "another request that computes the same beginning", kv_load: "their KV from disk" };
const model = new Model(), line = new Timeline($("timeline"), model);
const view = { mode: "steps", left: 0, right: 400, chosen: undefined };
let span = Math.max(120, Math.min(400, innerWidth / 3));
let held = null;  // right edge of the view while it shows the past, otherwise null
let moment = null;  // step that gauges and blocks show, if it is not the step at the right edge
let live = true, source = "", heard = -Infinity, connected = false, followText = "";
let dirty = true, colours = null, shownMap = null, shownExperts = null, beat = 0;
let second = null, playing = null;  // the other timeline of a comparison

function make(tag, text = "", kind = "") {
  const node = document.createElement(tag);
  node.textContent = text;  // all that is shown goes through here: nothing can be markup
  node.className = kind;
  return node;
}

// The stream

async function ask(path) {
  const key = sessionStorage.getItem("key");
  const response = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (response.ok) return response;
  const { error = {} } = await response.json().catch(() => ({}));
  if (response.status === 401 || response.status === 403) lock(key ? error.message ?? "This key is not accepted." : "");
  throw Object.assign(new Error(error.message || `The server answered ${response.status}.`), { status: response.status });
}

function lock(reason) {
  sessionStorage.removeItem("key");
  $("refused").textContent = reason;
  $("door").hidden = false;
  $("view").hidden = true;
  $("corner").textContent = "";
  $("key").focus();
}

async function listen() {
  for (let pause = 500; ; pause = Math.min(10000, 2 * pause)) {
    try {
      const response = await ask(`/live/events${which("")}`);
      let kind = "";
      say("");
      connected = true;
      for await (const text of textLines(response)) {
        if (text.startsWith("event: ")) kind = text.slice(7);
        else if (text === "") kind = "";
        else if (text.startsWith("data: ") && kind === "") { take(JSON.parse(text.slice(6))); pause = 500; }
        else if (kind === "skipped") say("This page was too slow and has skipped some steps.");
        else if (kind === "end") { say("The server has closed the view."); if (response.headers.get("x-recording")) { say(""); still("a recording"); return; } }
      }
    } catch (error) {
      if (error.status === 401 || error.status === 403) return;
      say(`${error.status ? error.message : "No connection to the server."} Trying again …`);
    }
    connected = false;
    dirty = true;
    await new Promise((done) => setTimeout(done, pause));
  }
}

function take(each) {
  model.take(each);
  if (each.step !== undefined || each.key) heard = performance.now();
  dirty = true;
}

async function load(path, into) {  // into: comparison -> model that takes the next line
  const response = await ask(path);
  let compare = null;
  for await (const text of textLines(response)) {
    if (!text) continue;
    const each = JSON.parse(text);
    if (each.compare) compare = each.compare; else into(compare).take(each);
  }
  dirty = true;
  return compare;
}

function say(text) {
  $("note").textContent = text;
  $("note").hidden = !text;
}

// The view

function head() { return view.mode === "steps" ? line.model.count : line.model.lastEnd - line.zero; }
function tail() { return view.mode === "steps" ? line.model.first : (line.model.starts[0] ?? 0) - line.zero; }
function least() { return view.mode === "steps" ? 20 : 0.2; }
function most() { return Math.max(least(), view.mode === "steps" ? 24000 : second ? view.whole : head() - tail()); }

function place() {
  const right = held ?? head();
  view.right = Math.max(right, tail() + Math.min(span, 1));
  view.left = view.right - span;
  const first = tail(), range = Math.max(1e-9, head() - first);
  if (document.activeElement !== $("scrub") || held === null) $("scrub").value = held === null ? 1 : (right - first) / range;
}

function hold(right) {  // shows the past; null returns to the present
  const low = tail() + span * 0.2, high = second ? view.whole * 1.02 : head();
  moment = null;
  held = right === null || (right >= high && !second) ? null : Math.max(Math.min(low, high), Math.min(high, right));
  $("pause").setAttribute("aria-pressed", held !== null);
  $("pause").textContent = held !== null ? "Resume" : "Pause";
  dirty = true;
}

function zoom(factor, at = view.right) {
  const old = span, share = (view.right - at) / old;
  span = Math.max(least(), Math.min(most() * 1.05, span * factor));
  if (held !== null) hold(at + share * span);
  dirty = true;
}

function still(what) {  // there are no more steps: show all of them
  live = false;
  $("corner").textContent = what;
  span = Math.max(least(), (head() - tail()) * 1.02);
  moment = Math.round(line.model.first + 0.6 * line.model.numbers.length);
  dirty = true;
}

function across(mode) {
  if (mode === view.mode) return;
  const i = held === null ? null : line.stepOf(held), steps = Math.max(1, Math.min(span, line.model.numbers.length));
  const seconds = line.model.lastEnd - (line.model.starts[0] ?? 0);
  const rate = line.model.numbers.length / Math.max(1e-9, seconds);
  view.mode = mode;
  span = mode === "time" ? Math.max(0.5, steps / rate) : Math.max(20, span * rate);
  if (i !== null) hold(line.close(i));
  $("across").value = mode;
  dirty = true;
}

function choose(n, wanted = true) {
  view.chosen = n;
  const r = line.model.requests.get(n);
  if (wanted) $("follow").value = r ? label(r) : "";
  followText = $("follow").value;
  dirty = true;
}

function follow(text) {
  followText = text;
  const r = line.model.find(text);
  view.chosen = r?.n;
  if (r && r.ended !== null && r.until < line.low) hold(line.close(r.until) + span / 3);
  say(text && !r ? `No request ${text} so far. The page will show it when it arrives.` : "");
  dirty = true;
}

// Texts and gauges

function seconds(value) {
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} s`;
}

function facts(r, phase) {
  const list = make("dl"), now = r.ended ?? line.model.lastEnd;
  const row = (name, value) => list.append(make("dt", name), make("dd", value));
  if (phase) row("now", PHASES[phase]);
  if (r.slot >= 0) row("row", r.slot);
  if (r.arrival !== null && (r.started ?? 0) >= 0) row("in the queue", seconds((r.started ?? now) - r.arrival) + (r.started === null ? " so far" : ""));
  const came = [[r.host, "host memory"], [r.disk, "disk"]].filter(([count]) => count).map(([count, where]) => `, ${count} of them from ${where}`);
  if (r.prompt) row("prompt", `${r.prompt} tokens, ${r.cached} from the cache${came.join("")}`);
  if (r.chunks) row("computed in", `${r.chunks} ${r.chunks === 1 ? "chunk" : "chunks"}`);
  row("answer", `${r.tokens}${r.most ? ` of at most ${r.most}` : ""} tokens`);
  if (r.timed > 1) row("between tokens", seconds((r.lastToken - r.firstToken) / (r.timed - 1)));
  if (r.preemptions) row("preempted", `${r.preemptions} ×`);
  if (r.resumed) row("after a pause", resumedText(r.resumed));
  if (r.ended !== null) row("ended", r.reason || "yes");
  return list;
}

function causesOf(r) {
  if (Object.keys(r.causes).length) return [Object.entries(r.causes), "Where its time went"];
  const now = line.model.lastEnd, found = [];
  if (r.arrival !== null && (r.started === null || r.started >= 0)) found.push(["waiting", (r.started ?? now) - r.arrival]);
  if (r.started > 0) found.push(["first token", (r.firstToken ?? now) - r.started]);
  if (r.firstToken) found.push(["writing", now - r.firstToken]);
  return [found, "Where its time went so far"];
}

function detail() {
  const r = line.model.requests.get(view.chosen), box = $("detail");
  const shown = r ? JSON.stringify([r.n, r.ended, r.slot, r.tokens, r.preemptions, r.resumed]) : "";
  if (box.dataset.shown === shown) return;
  box.dataset.shown = shown;
  if (!r) { box.replaceChildren(); return; }
  const columns = make("div", "", "columns"), right = make("div"), [causes, title] = causesOf(r);
  const found = causes.filter(([, spent]) => spent >= 5e-5).sort((one, other) => other[1] - one[1]);
  const all = found.reduce((sum, [, spent]) => sum + spent, 0) || 1, bar = make("div", "", "split"), list = make("ul", "", "causes");
  found.forEach(([name, spent], at) => {
    const part = make("i"), item = make("li"), dot = make("i"), colour = `hsl(${165 + at * 47} 45% ${colours.dark ? 58 : 46}%)`;
    part.style.width = `${100 * spent / all}%`;
    part.style.background = dot.style.background = colour;
    bar.append(part);
    item.append(dot, make("span", seconds(spent)), make("span", `${name.replace("_", " ")}: ${CAUSES[name] ?? ""}`));
    list.append(item);
  });
  right.append(make("h3", found.length ? title : "No times are known: the request arrived before the first viewer"), bar, list);
  const names = r.by.map((by) => label(line.model.requests.get(by)) || by).join(", ");
  if (names) right.append(make("p", `Preempted by ${names}.`, "hint"));
  const left = make("div");
  const pause = line.model.pausesAt(Infinity, line.model.lastEnd).find((each) => each.n === r.n);
  if (pause) right.append(make("p", `Its conversation pauses for ${pause.tools.join(", ")}.`, "hint"));
  left.append(make("h3", label(r)), facts(r));
  columns.append(left, right);
  box.replaceChildren(columns);
}

function shownStep() {
  const now = held === null ? Infinity : line.stepOf(view.right);
  return Math.max(line.model.first, Math.min(line.model.count - 1, view.until !== undefined ? line.stepOf(view.until) : moment ?? now));
}

function blockMap() {
  const now = live && held === null, i = shownStep();
  const memory = now ? line.model.memoryNow() : line.model.memoryAt(i);
  const known = memory && line.model.about && !line.model.past;
  $("blocks").hidden = !known;
  $("blocktitle").textContent = `KV memory ${now && !connected ? "before the connection was lost" : now ? "now" : `at step ${line.model.numbers[i - line.model.first] ?? ""}`}`;
  if (!known) { $("blocknote").textContent = line.model.count ? "The owners of the blocks are unknown before the first viewer." : ""; return; }
  shownMap = drawBlocks($("blocks"), line.model.about.pools, memory, view.chosen, colours);
  const shared = shownMap.owners.reduce((sum, owners) => sum + [...owners.values()].filter((own) => own.length > 1).length, 0);
  const saved = line.model.saved[i - line.model.first];
  const few = shownMap.each > 1 ? ` One square is ${shownMap.each} blocks.` : "";
  const owned = shownMap.owners.some((owners) => owners.size) ? " Each colour is a request." : "", hatched = shared ? ` Hatched: shared (${shared}).` : "";
  const dots = memory.cached.some((blocks) => blocks.size) ? " Dot: unused, in the prefix cache." : "";
  const together = saved ? ` Rows that share blocks read ${Math.round(100 * saved)} % of the context together.` : "";
  $("blocknote").textContent = `A block holds ${line.model.about.block_size} tokens.${owned}${hatched}${dots}${few}${together}`;
  $("blocks").setAttribute("aria-label", `KV blocks: ${shownMap.owners.reduce((sum, owners) => sum + owners.size, 0)} in use, ${shared} shared`);
}

function draw(time) {
  requestAnimationFrame(draw);
  if (playing) play(time);
  if (!dirty || document.hidden) return;
  dirty = false;
  colours ??= palette();
  if (followText && view.chosen === undefined) { const r = line.model.find(followText); if (r) { view.chosen = r.n; say(""); } }
  place();
  view.share = second ? 0.28 : 0.5;
  view.moment = moment;
  line.draw(view, colours);
  second?.draw({ ...view, chosen: undefined, moment: null }, colours);
  const pause = line.model.about?.pools.some((blocks) => blocks > 20000) ? 1000 : 200;
  if (time - beat > pause || held !== null) {  // texts need not follow every frame
    beat = time;
    gauges(live && held === null ? undefined : shownStep());
    $("empty").hidden = line.model.count > 0 || source !== "" || !line.model.about;
    blockMap();
    pauseList();
    imageMemory();
    expertMap();
    drawLegend();
    detail();
  } else dirty = true;
}

// Pointer and keyboard

function tip(event, title, body) {
  const box = $("tip");
  box.hidden = !title;
  if (!title) return;
  box.replaceChildren(make("b", title), body);
  const { innerWidth: w, innerHeight: h } = window, { offsetWidth, offsetHeight } = box;
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, w - offsetWidth - 8))}px`;
  box.style.top = `${event.clientY + 18 + offsetHeight > h ? Math.max(4, event.clientY - offsetHeight - 12) : event.clientY + 18}px`;
}

function watchCanvas(timeline, own) {
  const { canvas } = timeline, fingers = new Map();
  let moved = 0, apart = 0;
  const spread = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a.x - b.x, a.y - b.y); };
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    moved = 0;
    if (fingers.size === 2) apart = spread();
  });
  canvas.addEventListener("pointermove", (event) => {
    const finger = fingers.get(event.pointerId);
    if (finger && fingers.size === 1) {
      const dx = event.offsetX - finger.x;
      moved += Math.abs(dx);
      if (moved > 4) { canvas.setPointerCapture(event.pointerId); hold((held ?? view.right) - dx / (timeline.width - LEFT) * span); }
    }
    if (finger) Object.assign(finger, { x: event.offsetX, y: event.offsetY });
    if (fingers.size === 2) { const now = spread(); zoom(apart / now, view.left + span / 2); apart = now; moved = 9; return; }
    const found = timeline.hit(event.offsetX, event.offsetY);
    if (found && own && (held !== null || !live)) { moment = found.i; dirty = true; }  // blocks and gauges as they were then
    const r = timeline.model.requests.get(found?.n);
    if (r && moved <= 4) tip(event, label(r), facts(r, found.phase)); else tip(event, "");
  });
  const up = (event) => {
    fingers.delete(event.pointerId);
    if (event.type === "pointerup" && moved <= 4 && own) choose(timeline.hit(event.offsetX, event.offsetY)?.n);
  };
  for (const type of ["pointerup", "pointercancel", "pointerleave"]) canvas.addEventListener(type, up);
  canvas.addEventListener("pointerleave", (event) => tip(event, ""));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) hold((held ?? view.right) + (event.deltaX || event.deltaY) / timeline.width * span);
    else zoom(Math.exp(event.deltaY * 0.0015), timeline.value(event.offsetX));
  }, { passive: false });
}

$("blocks").addEventListener("pointermove", (event) => {
  const found = shownMap?.at(event.offsetX, event.offsetY);
  const who = found?.owners.map((n) => label(line.model.requests.get(n))) ?? [];
  const owners = who.length > 1 ? `shared by ${who.join(", ")}` : who[0];
  tip(event, found ? `block ${found.block}` : "", make("span", owners ?? (found?.cached ? "kept for the next prompt that begins alike" : "free")));
});
$("blocks").addEventListener("pointerleave", (event) => tip(event, ""));
$("experts").addEventListener("pointermove", (event) => {
  const found = shownExperts?.at(event.offsetX, event.offsetY);
  tip(event, found ? `layer ${found.layer}, expert ${found.expert}` : "", make("span", found ? `${found.load.toFixed(2)} × the mean` : ""));
});
$("experts").addEventListener("pointerleave", (event) => tip(event, ""));
$("blocks").addEventListener("click", (event) => choose(shownMap?.at(event.offsetX, event.offsetY)?.owners[0]));

const KEYS = {
  ArrowLeft: () => hold((held ?? view.right) - span / 10), ArrowRight: () => hold(held === null ? null : held + span / 10),
  Home: () => hold(tail() + span * 0.9), End: () => hold(null), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4),
  " ": () => hold(held === null ? head() - 1e-6 : null), Escape: () => choose(undefined),
  ArrowDown: () => next(1), ArrowUp: () => next(-1),
};
function next(by) {  // the request in the next busy row
  const i = Math.min(line.model.count - 1, line.stepOf(view.right)), seated = [];
  for (let slot = 0; slot < line.model.slots; slot++) { const { run, seat } = line.model.at(slot, i); if (run || seat) seated.push((run ?? seat).n); }
  if (!seated.length) return;
  choose(seated[(seated.indexOf(view.chosen) + by + seated.length) % seated.length]);
  const r = line.model.requests.get(view.chosen);
  $("spoken").textContent = `${label(r)}: ${facts(r).innerText.replaceAll("\n", " ")}`;
}
$("timeline").addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key]();
});

$("pause").addEventListener("click", () => hold(held === null ? head() - 1e-6 : null));
$("narrow").addEventListener("click", () => zoom(1.5));
$("widen").addEventListener("click", () => zoom(1 / 1.5));
$("across").addEventListener("change", (event) => { if (second) event.target.value = "time"; else across(event.target.value); });
$("follow").addEventListener("input", (event) => follow(event.target.value));
$("scrub").addEventListener("input", (event) => hold(event.target.value >= 1 ? null : tail() + event.target.value * (head() - tail())));
$("compare").addEventListener("click", compare);
for (const id of ["upper", "lower"]) $(id).addEventListener("change", recompare);
$("example").addEventListener("click", () => { location.search = "?demo"; });
for (const id of ["perfetto", "jsonl"]) $(id).addEventListener("click", () => save(id));
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  $("door").hidden = true;
  $("view").hidden = false;
  begin();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours = null; dirty = true; });
addEventListener("resize", () => { dirty = true; });
setInterval(() => { dirty = true; }, 1000);  // to notice that nothing comes
document.addEventListener("visibilitychange", () => { dirty = true; });

async function save(kind) {
  try {
    const response = await ask(`/live/export?format=${kind}${which(source).replace("?", "&")}`);
    const link = make("a");
    link.href = URL.createObjectURL(await response.blob());
    link.download = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "")?.[1] ?? `chairlift.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  } catch (error) { say(error.message); }
}

async function begin() {
  try {
    if (asked.has("demo")) {
      source = "?source=demo";
      await load("/live/demo", () => model);
      still("a simulated example");
    } else {
      try {
        await chooseModel();
      } catch (error) {  // the stream of steps shows other errors
        if (error.status === 401 || error.status === 403) return;
      }
      const listening = listen();
      watchFloor();
      watchFleet();
      watchTraining();
      if (asked.has("static") || asked.has("compare")) await Promise.race([listening, new Promise((done) => setTimeout(done, 1500))]);
    }
    if (!asked.has("static") && !asked.has("compare")) return;
    wanted();
    if ($("door").hidden) await compare();
  } catch (error) { say(error.message); }
}

if (asked.get("follow")) { $("follow").value = followText = asked.get("follow"); }
watchCanvas(line, true);
watchCanvas({ get canvas() { return $("timeline2"); }, get width() { return second.width; }, get model() { return second.model; },
  hit: (x, y) => second?.hit(x, y), value: (x) => second.value(x) }, false);
begin();
requestAnimationFrame(draw);
window.chairlift = {  // for tests and the console
  model,
  requests() {
    const runs = model.runs.flatMap((list, slot) => (list ?? []).map((run) => ({ slot, ...run })));
    return [...model.requests.values()].map((r) => ({ ...r, runs: runs.filter((run) => run.n === r.n) }));
  },
  memory: (i) => { const m = model.memoryAt(i); return m && { tables: Object.fromEntries(m.tables), cached: m.cached.map((set) => [...set]) }; },
  view: () => ({ ...view, span, held }),
};
