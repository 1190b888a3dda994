"use strict";
// The numbers above the picture, its legend, and the load of experts and images. Nothing shows a value that has passed.

const LOAD_SECONDS = 10;  // span of the loads of experts
const MOST_SHOWN = 12;  // pauses in the list

function silence() { return live && held === null ? (performance.now() - heard) / 1000 : 0; }  // seconds since the newest step, for the present

function set(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }

function noGauges() {  // the last values would look like those of the present
  for (const id of ["running", "waiting", "kv", "speed", "preempted"]) set(id, "–");
  for (const id of ["heldup", "perstep"]) set(id, "");
  for (const id of ["runningbar", "kvbar"]) $(id).value = 0;
  $("ratebar").firstElementChild.style.width = 0;
  $("ratebar").removeAttribute("aria-valuenow");
  $("timeline").setAttribute("aria-label", "Timeline: no connection");
  if (line.model.about) set("corner", "no connection");
}

function gauges(i) {
  if (live && held === null && !(connected && line.model.about)) return noGauges();
  const late = silence(), seats = line.model.about?.max_num_seqs ?? 1;
  const { waiting, why, running, used, speed, perStep, rate, few } = line.model.gauges(i, Math.min(late, 1e6));
  const idle = late > 2 && !running;
  set("running", `${running} / ${seats}`);
  $("runningbar").value = running / seats;
  set("waiting", String(waiting));
  set("heldup", waiting && why ? `for ${WAITS_FOR[why] ?? why}` : "");
  set("kv", `${Math.round(100 * used)} %`);
  $("kvbar").value = used;
  set("speed", late > 2 || speed === null ? "–" : Math.round(speed).toLocaleString("en"));
  set("perstep", idle ? "idle" : late > 2 ? `in a step for ${seconds(late)}` : perStep ? `${seconds(perStep)} per step` : "");
  set("preempted", few || `${(100 * rate).toFixed(1)} %`);
  $("ratebar").firstElementChild.style.width = `${Math.min(100, 1000 * rate)}%`;
  $("ratebar").firstElementChild.className = rate > 0.05 ? "bad" : rate > 0.02 ? "high" : "";
  $("ratebar").setAttribute("aria-valuenow", (100 * rate).toFixed(1));
  $("timeline").setAttribute("aria-label", `Timeline: ${running} of ${seats} rows busy, ${waiting} waiting, ${Math.round(100 * used)} percent of KV memory in use`);
  if (live && line.model.about) set("corner", held !== null ? "paused" : idle ? "live · idle" : `live · ${running} running`);
}

// Minimum time of the steps divided by their measured time. Only a server has this value; recordings do not.
async function watchFloor() {
  for (;; await new Promise((done) => setTimeout(done, 2000))) {
    let share = null, waits = null;
    try {
      const key = sessionStorage.getItem("key");
      const reply = live ? await fetch("/metrics", { headers: key ? { Authorization: `Bearer ${key}` } : {} }) : null;
      const text = reply?.ok ? await reply.text() : "";
      [share, waits] = ["floor_share", "collective_share"].map((name) => {
        const found = new RegExp(`:${name}\\{[^}]*\\} (\\S+)`).exec(text);
        return found ? Number(found[1]) : null;
      });
    } catch { /* no connection, or the key may not read metrics */ }
    $("floorbox").hidden = share === null;
    const known = share !== null && silence() <= 2;  // the server keeps the value of the last steps
    set("floor", known ? `${Math.round(100 * share)} %` : "–");
    $("floorbar").value = known ? share : 0;
    set("processes", known && waits !== null ? `${Math.round(100 * waits)} % waiting for processes` : "");
  }
}

function expertMap() {
  const loads = line.model.loadsAt(live && held === null ? Infinity : shownStep()), idle = silence() > LOAD_SECONDS;
  $("expertbox").hidden = !loads;
  $("experts").hidden = idle;
  if (!loads || idle) {
    shownExperts = null;
    set("expertnote", `No step has run in the last ${LOAD_SECONDS} s.`);
    return;
  }
  shownExperts = drawExperts($("experts"), loads, colours);
  const most = loads.map((row) => Math.max(...row)), worst = most.indexOf(Math.max(...most)), unused = loads.flat().filter((load) => load === 0).length;
  const text = `A line is a layer, a square is an expert. A stronger colour means more tokens in about the last 10 s. Busiest: ${most[worst].toFixed(1)} × the mean of its layer`
    + ` (layer ${worst}, expert ${loads[worst].indexOf(most[worst])}). Idle: ${unused} of ${loads.flat().length}. Red: more than twice the mean.`;
  $("expertnote").textContent = text;
  $("experts").setAttribute("aria-label", `Load of experts: the busiest has ${most[worst].toFixed(1)} times the mean of its layer, ${unused} are idle`);
}

function imageMemory() {
  const state = line.model.imagesAt(live && held === null ? Infinity : shownStep()), most = line.model.about?.max_image_bytes;
  $("imagebox").hidden = !state;
  if (!state) return;
  $("imagebar").hidden = !most;
  $("imagebar").value = most ? state[3] / most : 0;
  $("imagenote").textContent = imageText(state, most);
}

function pauseList() {
  const now = live && held === null, i = now ? Infinity : shownStep(), end = line.model.ends[i - line.model.first] ?? line.model.lastEnd;
  const at = now ? line.model.lastEnd + Math.min(silence(), 1e6) : end;
  const pauses = line.model.pausesAt(i, at), state = line.model.cacheAt(i), text = state ? cacheText(state) : "";
  $("cachebox").hidden = !text && !pauses.length;
  if (!$("cachebox").hidden) set("cachenote", text);
  const shown = pauses.slice(0, MOST_SHOWN).map((each) => [each.n, label(line.model.requests.get(each.n)) || each.id, pauseText(each, at)]);
  if (pauses.length > shown.length) shown.push([-1, "", `and ${(pauses.length - shown.length).toLocaleString("en")} more`]);
  set("pausetitle", pauses.length ? `${pauses.length.toLocaleString("en")} ${pauses.length === 1 ? "conversation pauses" : "conversations pause"}` : "");
  const key = JSON.stringify(shown);
  if ($("pauses").dataset.shown === key) return;
  $("pauses").dataset.shown = key;
  $("pauses").replaceChildren(...shown.map(([, name, words]) => {
    const item = make("li");
    item.append(...name ? [make("b", name), " "] : [], words);
    return item;
  }));
}

function drawLegend() {  // what the picture shows, and nothing else
  const names = [...new Set([line, second].flatMap((each) => each?.shown() ?? []))], key = `${colours.dark} ${names}`;
  if ($("legend").dataset.shown === key) return;
  $("legend").dataset.shown = key;
  $("legend").replaceChildren(...names.map((name) => {
    const item = make("li"), swatch = make("canvas");
    item.append(swatch, PHASES[name] ?? MARKS[name]);
    swatch.width = 32;
    swatch.height = 26;
    const ctx = swatch.getContext("2d");
    ctx.scale(2, 2);
    ctx.fillStyle = colours.front;
    if (name === "add") ctx.fillRect(7, 4, 1, 6);
    else if (name === "end") ctx.fillRect(7, 1, 2, 11);
    else if (name === "join") triangle(ctx, 4, 2, 9, colours.front);
    else if (MARKS[name]) cross(ctx, 8, 6, 4, name === "abort" ? colours.front : colours.bad);
    else {
      ctx.fillStyle = colours[name];
      ctx.fillRect(0, 0, 16, 13);
      if (name === "held") hatch(ctx, 0, 0, 16, 13, colours.panel);
    }
    return item;
  }));
}
