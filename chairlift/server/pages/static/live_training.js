"use strict";
// Training beside the steps: who trains, who samples, and the tokens of the newest passes by training run.

const TRAINING_SECONDS = 2;

// A session id is long, and the name of a key is not.
function shortOwner(owner) { return owner.length > 24 ? `${owner.slice(0, 8)}…` : owner; }
function runName(run, owner) { return `${shortOwner(owner)} / ${run.slice(run.lastIndexOf(":") + 1)}`; }
function count(number, word) { return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`; }

// Cells of each row of the table: the runs, then the samplers that are in use
function trainingRows({ runs, samplers }) {
  const trained = runs.map(({ run, owner, rank, tokens, steps, loss, waiting_calls: waiting, is_computed: busy }) => [
    runName(run, owner), `trains, rank ${rank}`, count(tokens, "token"), count(steps, "step"), loss === null ? "" : `loss ${loss.toPrecision(4)}`,
    busy ? "is computed" : waiting ? `${count(waiting, "call")} wait${waiting === 1 ? "s" : ""}` : "idle",
  ]);
  const drawn = samplers.filter(({ running }) => running).map(({ sampler, owner, running, samples, tokens }) => [
    runName(sampler, owner), "samples", count(tokens, "token"), count(samples, "sample"), "", `${running} running`,
  ]);
  return [...trained, ...drawn];
}

// Text for a pack or a step: its time, and the tokens of each run
function workText({ kind, seconds, runs, tokens }, owners) {
  const named = (run) => runName(run, owners.get(run) ?? run);
  const parts = runs.map((run) => (tokens[run] ? `${named(run)}: ${tokens[run].toLocaleString("en")}` : named(run)));
  return `${kind} of ${seconds.toFixed(2)} s: ${parts.join(", ")}`;
}

function showTraining(found) {
  const rows = trainingRows(found), owners = new Map(found.runs.map(({ run, owner }) => [run, owner]));
  $("trainingbox").hidden = !rows.length;
  $("training").replaceChildren(...rows.map((cells) => {
    const row = make("tr");
    row.append(...cells.map((text) => make("td", text)));
    return row;
  }));
  $("trainingwork").replaceChildren(...found.work.slice(-5).reverse().map((each) => make("li", workText(each, owners))));
}

async function watchTraining() {
  for (;; await new Promise((done) => setTimeout(done, 1000 * TRAINING_SECONDS))) {
    if (!live) { $("trainingbox").hidden = true; return; }
    if (document.hidden || !$("door").hidden) continue;
    try {
      const key = sessionStorage.getItem("key");
      const reply = await fetch("/live/training", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
      if (reply.status === 404) return;  // nobody trains on this server
      if (reply.ok) showTraining(await reply.json());
    } catch { /* no connection; the stream of steps shows the error */ }
  }
}
