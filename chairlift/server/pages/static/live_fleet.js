"use strict";
// Several models: a list to choose from. Several replicas: a card for each, and the length of the shared queue. The rest
// of the page shows one model or one replica.

const FLEET_SECONDS = 1;
const chosen = new URLSearchParams(globalThis.location?.search ?? "");
const replica = Number(chosen.get("replica")) || 0;

// Query string of a request for steps. `source` is "?source=demo" for the example.
function which(source) {
  if (source) return source;
  const query = new URLSearchParams();
  if (chosen.get("model")) query.set("model", chosen.get("model"));  // of a server with many models
  if (replica) query.set("replica", replica);
  return query.toString() ? `?${query}` : "";
}

// Names of a server with many models, the loaded ones first; empty on a server with one model, which has no states.
function modelNames(served) {
  const loaded = served.filter(({ state }) => state === "loaded"), others = served.filter(({ state }) => state && state !== "loaded");
  return [...loaded, ...others].map(({ id }) => id);
}

async function chooseModel() {
  const names = modelNames((await (await ask("/v1/models")).json()).data), choice = $("models");
  if (names.length < 2) return;
  if (!names.includes(chosen.get("model"))) chosen.set("model", names[0]);
  choice.replaceChildren(...names.map((name) => make("option", name)));
  choice.value = choice.title = chosen.get("model");
  choice.hidden = false;
  choice.onchange = () => {
    asked.set("model", choice.value);
    location.search = asked;
  };
}

// Contents of one card: {title, state, work, kv}
function card(each) {
  const { index, state, started, unstarted, unstarted_tokens: tokens, kv_cache_usage: kv, restarts } = each;
  const next = unstarted ? `${unstarted} next (${tokens.toLocaleString("en")} tokens)` : "none next";
  return { title: `replica ${index}`, state: state + (restarts ? `, restarts: ${restarts}` : ""), work: `${started} running, ${next}`, kv };
}

// Text for the length of the shared queue
function queue(waiting) { return waiting ? `${waiting} ${waiting === 1 ? "request waits" : "requests wait"} for a replica` : "no request waits for a replica"; }

// Text about autoscaling; empty if the number of replicas is fixed
function scaling(state) {
  if (!state) return "";
  const { wanted_replicas: wanted, min_replicas: least, max_replicas: most, starting_replicas: starting, last_change: change } = state;
  const now = `autoscaling wants ${wanted} of ${least} to ${most} replicas${starting ? `, ${starting} starting` : ""}`;
  return `; ${now}${change ? `; last change: ${change}` : ""}`;
}

function showFleet({ waiting_at_door: waiting, replicas, autoscaling }) {
  $("fleet").hidden = replicas.length === 0;
  $("doorqueue").textContent = queue(waiting) + scaling(autoscaling);
  while ($("cards").children.length > replicas.length) $("cards").lastElementChild.remove();
  replicas.forEach((each, at) => {
    const { title, state, work, kv } = card(each);
    let box = $("cards").children[at];
    if (!box) {
      const bar = make("meter");
      bar.setAttribute("aria-label", "KV blocks in use");
      box = make("button");
      box.append(make("b"), make("span"), make("small"), bar);
      box.addEventListener("click", () => turnTo(at));
      $("cards").append(box);
    }
    [title, state, work].forEach((text, part) => { if (box.children[part].textContent !== text) box.children[part].textContent = text; });
    box.children[1].className = ["ready", "off"].includes(each.state) ? "" : "bad";
    box.lastElementChild.value = kv;
    box.setAttribute("aria-pressed", at === replica);
    box.title = `KV cache: ${Math.round(100 * kv)} % in use`;
  });
}

function turnTo(index) {  // the server stores the steps of all replicas, so the page can reload
  if (index === replica) return;
  asked.set("replica", index);
  location.search = asked;
}

async function watchFleet() {
  for (;; await new Promise((done) => setTimeout(done, 1000 * FLEET_SECONDS))) {
    if (!live) { $("fleet").hidden = true; return; }
    if (document.hidden || !$("door").hidden) continue;
    try {
      const key = sessionStorage.getItem("key");
      const reply = await fetch("/v1/replicas", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
      if (!reply.ok) continue;
      const found = await reply.json();
      showFleet(found);
      if (!found.replicas.length && model.count) return;  // a server with one engine, which has loaded
    } catch {  // no connection; the stream of steps shows the error
      $("doorqueue").textContent = "";
      $("cards").replaceChildren();
    }
  }
}
