"use strict";
// Comparison: the same requests in static batches, simulated by the server.

const COMPARED = ["title", "title2", "timeline2", "verdict", "words"];

async function compare() {
  if (second) return uncompare();
  $("compare").disabled = true;
  say("The server is simulating the same requests …");
  try {
    const other = new Model();
    const found = await load(`/live/static${which(source)}`, other);
    say("");
    second = new Timeline($("timeline2"), other);
    across("time");
    line.zero = found.begin;
    second.zero = Math.min(...[...other.requests.values()].map((r) => r.arrival));
    view.relative = true;
    view.whole = Math.max(model.lastEnd - line.zero, other.lastEnd - second.zero);
    span = view.whole * 1.02;
    hold(view.whole * 1.01);
    verdict(found);
    choose(undefined);
    for (const id of COMPARED) $(id).hidden = false;
    $("verdict").scrollIntoView({ block: "nearest" });
    $("compare").setAttribute("aria-pressed", "true");
  } catch (error) {
    say(error.message);
  } finally {
    $("compare").disabled = false;
    dirty = true;
  }
}

function uncompare() {
  second = playing = null;
  line.zero = 0;
  view.relative = false;
  view.until = undefined;
  for (const id of COMPARED) $(id).hidden = true;
  $("compare").setAttribute("aria-pressed", "false");
  span = Math.min(span, most());
  hold(null);
}

function verdict({ measured, static: other, words, validity, requests }) {
  const versus = make("div", "", "versus"), box = $("verdict"), button = make("button", "▶ Play both", "main");
  const figure = (name, one, two) => {
    const each = make("div", name), value = make("b", one);
    value.append(make("small", " against ~"), make("s", two));
    each.prepend(value);
    versus.append(each);
  };
  versus.append(make("h3", source ? "Continuous (the example) against static (~ simulated)" : "Continuous (measured) against static (~ simulated)"));
  figure("tokens per second", Math.round(measured.tokens_per_second).toLocaleString("en"), Math.round(other.tokens_per_second).toLocaleString("en"));
  figure("time to the first token (median)", seconds(measured.first_p50), seconds(other.first_p50));
  figure("time of a whole answer (median)", seconds(measured.whole_p50), seconds(other.whole_p50));
  figure("total time", seconds(measured.seconds), seconds(other.seconds));
  button.addEventListener("click", () => { playing = { since: null, pace: view.whole / Math.min(20, Math.max(6, view.whole)) }; dirty = true; });
  const upper = source ? "The example is simulated too." : "The upper timeline and the first number of each pair are measured.";
  const note = `${requests} requests. ${upper} ~ means simulated with a cost model ${validity}.`;
  box.replaceChildren(versus, button);
  const told = source ? words.map((text) => text.replace(/^Measured:/, "The example:")) : words;
  $("words").replaceChildren(...told.map((text) => make("p", text)), make("p", note, "hint"));
}

function play(time) {
  playing.since ??= time;
  view.until = (time - playing.since) / 1000 * playing.pace;
  if (view.until >= view.whole) { view.until = undefined; playing = null; }
  dirty = true;
}
