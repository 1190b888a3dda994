"use strict";
// Comparison: the same requests under two sets of rules, simulated by the server.

const COMPARED = ["title", "title2", "timeline2", "verdict", "words"];

async function compare() {
  if (second) return uncompare();
  for (const id of ["compare", "upper", "lower"]) $(id).disabled = true;
  say("The server is simulating the same requests …");
  try {
    const upper = new Model(), lower = new Model(), query = new URLSearchParams(which(source));
    query.set("upper", $("upper").value);
    query.set("lower", $("lower").value);
    let left = null;
    const found = await load(`/live/compare?${query}`, (compare) => { left ??= compare.upper_lines; return left-- > 0 ? upper : lower; });
    say("");
    if (found.upper_lines) line.model = upper;  // else the upper timeline is the recording, as before
    second = new Timeline($("timeline2"), lower);
    across("time");
    line.zero = found.upper_lines ? begins(upper) : found.begin;
    second.zero = begins(lower);
    view.relative = true;
    view.whole = Math.max(line.model.lastEnd - line.zero, lower.lastEnd - second.zero);
    span = view.whole * 1.02;
    hold(view.whole * 1.01);
    verdict(found);
    choose(undefined);
    for (const id of COMPARED) $(id).hidden = false;
    $("verdict").scrollIntoView({ block: "nearest" });
  } catch (error) {
    say(error.message);
  } finally {
    for (const id of ["compare", "upper", "lower"]) $(id).disabled = false;
    $("compare").setAttribute("aria-pressed", second !== null);
    $("compare").textContent = second ? "End comparison" : "Compare";
    dirty = true;
  }
}

function wanted() {  // the address may name the sides: ?compare=LOWER or ?compare=UPPER,LOWER
  const names = (asked.get("compare") ?? "").split(",").filter(Boolean);
  if (names.length > 2) throw new Error("compare names one or two sides, as in ?compare=orca,static.");
  for (const [id, name] of [["lower", names.at(-1)], ["upper", names.at(-2)]]) {
    const known = [...$(id).options].map((option) => option.value);
    if (name !== undefined && !known.includes(name)) throw new Error(`No comparison with ${name}. Choose one of ${known.join(", ")}.`);
    if (name !== undefined) $(id).value = name;
  }
}

function begins(of) { return Math.min(...[...of.requests.values()].map((r) => r.arrival)); }

function uncompare() {
  second = playing = null;
  line.model = model;
  line.zero = 0;
  view.relative = false;
  view.until = undefined;
  for (const id of COMPARED) $(id).hidden = true;
  $("compare").setAttribute("aria-pressed", "false");
  $("compare").textContent = "Compare";
  span = Math.min(span, most());
  choose(undefined);
  hold(null);
}

async function recompare() {  // another choice while a comparison is shown
  if (!second) return;
  uncompare();
  await compare();
}

function verdict({ measured, upper, lower, sides, about, words, validity, requests }) {
  const versus = make("div", "", "versus"), box = $("verdict"), button = make("button", "▶ Play both", "main");
  const recorded = sides[0] === "recorded", known = recorded && !source, shown = recorded ? measured : upper;
  const own = source ? "the example" : "this engine", names = sides.map((name) => about[name] ? name : own);
  const figure = (name, one, two) => {
    const each = make("div", name), value = make("b", known ? one : `~${one}`);
    value.append(make("small", " against ~"), make("s", two));
    each.prepend(value);
    versus.append(each);
  };
  versus.append(make("h3", `${names[0]} against ${names[1]}`));
  figure("tokens per second", Math.round(shown.tokens_per_second).toLocaleString("en"), Math.round(lower.tokens_per_second).toLocaleString("en"));
  figure("time to the first token (median)", seconds(shown.first_p50), seconds(lower.first_p50));
  figure("time of a whole answer (median)", seconds(shown.whole_p50), seconds(lower.whole_p50));
  figure("total time", seconds(shown.seconds), seconds(lower.seconds));
  button.addEventListener("click", () => { playing = { since: null, pace: view.whole / Math.min(20, Math.max(6, view.whole)) }; dirty = true; });
  const title = (name) => about[name] ? `${name}: ${about[name].system}, simulated` : source ? "The example" : "This engine, recorded";
  [$("title").textContent, $("title2").textContent] = sides.map(title);
  const upperNote = known ? "The upper timeline and the first number of each pair are measured. " : "";
  const note = `${requests} requests. ${upperNote}~ means simulated with a cost model ${validity}.`;
  box.replaceChildren(versus, button);
  const told = source ? words.map((text) => text.replace(/^Measured: the engine/, "The example").replaceAll("the engine", own)) : words;
  const rules = sides.filter((name) => about[name]).map((name) => make("p", `${name}: ${about[name].does}`));
  $("words").replaceChildren(...told.map((text) => make("p", text)), ...rules, make("p", note, "hint"));
}

function play(time) {
  playing.since ??= time;
  view.until = (time - playing.since) / 1000 * playing.pace;
  if (view.until >= view.whole) { view.until = undefined; playing = null; }
  dirty = true;
}
