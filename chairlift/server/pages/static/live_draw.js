"use strict";
// Draws the timeline of one model on a canvas, and the map of KV blocks. Colours come from the style sheet.

const PHASES = {
  prefill: "prefill", decode: "decode", recompute: "recompute", stalled: "decode after waiting for a block", verify: "decode with drafts",
  held: "ended, but its static batch still runs", seat: "has a row, but is not in this step", away: "preempted: recompute", swap: "preempted: swapped out",
};
const MARKS = { add: "arrives", join: "joins or resumes", end: "ends", preempt: "is preempted", abort: "is aborted" };
const STRIP = 46, AXIS = 18, AWAY_LANE = 5, MOST_AWAY = 6, LEFT = 44;

function palette() {
  const colours = {};
  for (const name of ["front", "soft", "panel", "line", "accent", "bad", ...Object.keys(PHASES)]) {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;  // light-dark() is only resolved on an element
    document.body.append(probe);
    colours[name] = getComputedStyle(probe).color;
    probe.remove();
  }
  colours.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return colours;
}

function ownerColour(n, dark) { return `hsl(${(n * 137.508) % 360} ${dark ? "45% 58%" : "50% 52%"})`; }

function prepare(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return [ctx, width];
}

class Timeline {
  constructor(canvas, model) { this.canvas = canvas; this.model = model; this.zero = 0; }

  // view: {mode: "steps" | "time", left, right, chosen, until}; time is counted from this.zero
  draw(view, colours) {
    const { model, canvas } = this;
    this.view = view;
    this.lane = Math.max(4, Math.min(22, Math.floor((innerHeight * view.share) / Math.max(1, model.slots))));
    const away = this.placeAway(view);
    const top = STRIP, bottom = top + model.slots * this.lane + 6;
    this.awayTop = bottom;
    const height = bottom + away * AWAY_LANE + (away ? 6 : 0) + AXIS;
    const [ctx, width] = prepare(canvas, height);
    this.width = width;
    this.lanesTop = top;
    this.low = this.stepOf(view.left);
    this.high = this.stepOf(view.right);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    this.drawLabels(ctx, colours);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, Math.max(0, Math.min(width, view.until === undefined ? width : this.x(view.until)) - LEFT), height);
    ctx.clip();
    this.drawDoor(ctx, colours);
    for (let slot = 0; slot < model.slots; slot++) this.drawLane(ctx, colours, slot);
    this.drawAway(ctx, colours);
    this.marks = this.drawMarks(ctx, colours);
    ctx.restore();
    this.drawAxis(ctx, colours, height);
    if (view.moment !== null && view.moment !== undefined) {
      ctx.fillStyle = colours.soft;
      ctx.fillRect(this.x(this.close(view.moment)), 0, 1, height - AXIS);
    }
    if (view.until !== undefined && view.until < view.right) {
      ctx.fillStyle = colours.accent;
      ctx.fillRect(this.x(view.until), 0, 2, height - AXIS);
    }
  }

  x(value) { return LEFT + (value - this.view.left) / (this.view.right - this.view.left) * (this.width - LEFT); }
  value(x) { return this.view.left + (x - LEFT) / (this.width - LEFT) * (this.view.right - this.view.left); }
  begin(i) { return this.view.mode === "steps" ? i : (this.model.starts[i - this.model.first] ?? this.model.lastEnd) - this.zero; }
  close(i) { return this.view.mode === "steps" ? i + 1 : (this.model.ends[i - this.model.first] ?? this.model.lastEnd) - this.zero; }
  stepOf(value) { return this.view.mode === "steps" ? Math.floor(value) : this.model.stepAt(value + this.zero); }
  laneY(slot) { return this.lanesTop + slot * this.lane; }

  visible(list, draw) {  // runs are in order: from the newest back to the first that is out of sight
    for (let at = (list?.length ?? 0) - 1; at >= 0; at--) {
      const each = list[at], b = each.b ?? this.model.count - 1;
      if (b < this.low - 1) return;
      if (each.a > this.high + 1) continue;
      draw(each, this.x(this.begin(Math.max(each.a, this.model.first))), this.x(this.close(b)));
    }
  }

  drawLabels(ctx, colours) {
    const { model, lane } = this;
    ctx.fillStyle = colours.soft;
    ctx.textAlign = "right";
    ctx.fillText("queue", LEFT - 5, STRIP / 2);
    const every = lane >= 12 ? 1 : Math.ceil(12 / lane);
    for (let slot = 0; slot < model.slots; slot++) {
      if (slot % every === 0) ctx.fillText(slot, LEFT - 5, this.laneY(slot) + lane / 2);
      ctx.fillStyle = colours.line;
      ctx.globalAlpha = 0.5;
      ctx.fillRect(LEFT, this.laneY(slot) + lane - 1, this.width, 1);
      ctx.globalAlpha = 1;
      ctx.fillStyle = colours.soft;
    }
  }

  drawDoor(ctx, colours) {  // how many wait, as an area, and a tick per arrival
    const { model } = this, found = model.states.slice(Math.max(0, this.low - model.first), this.high - model.first + 1).map((s) => s[0]);
    const longest = Math.max(0, ...found), most = Math.max(4, longest);
    const stride = Math.max(1, Math.floor((this.high - this.low) / 2000)), floor = STRIP - 7;
    ctx.fillStyle = colours.away;
    ctx.globalAlpha = 0.35;
    ctx.beginPath();
    ctx.moveTo(this.x(this.begin(Math.max(this.low, model.first))), floor);
    for (let i = Math.max(this.low, model.first); i <= Math.min(this.high, model.count - 1); i += stride) {
      const y = floor - (model.states[i - model.first]?.[0] ?? 0) / most * (floor - 12);
      ctx.lineTo(this.x(this.begin(i)), y);
      ctx.lineTo(this.x(this.close(Math.min(i + stride, model.count) - 1)), y);
    }
    ctx.lineTo(this.x(this.close(Math.min(this.high, model.count - 1))), floor);
    ctx.fill();
    ctx.globalAlpha = 1;
    ctx.fillStyle = colours.soft;
    ctx.textAlign = "left";
    if (longest) ctx.fillText(`up to ${longest} waiting`, LEFT + 6, 9);
  }

  drawLane(ctx, colours, slot) {
    const { model, lane, view } = this, y = this.laneY(slot), h = lane - 2;
    ctx.fillStyle = colours.seat;
    this.visible(model.seats[slot], (seat, x1, x2) => { this.fade(ctx, seat.n); ctx.fillRect(x1, y, x2 - x1, h); });
    this.visible(model.runs[slot], (run, x1, x2) => {
      this.fade(ctx, run.n);
      ctx.fillStyle = colours[run.phase] ?? colours.decode;
      ctx.fillRect(x1, y, Math.max(0.7, x2 - x1), h);
      if (run.phase === "held") hatch(ctx, x1, y, x2 - x1, h, colours.panel);
      else if (run.n % 2) { ctx.fillStyle = colours.panel; ctx.globalAlpha *= 0.14; ctx.fillRect(x1, y, x2 - x1, h); this.fade(ctx, run.n); }
      if (view.chosen === run.n) { ctx.fillStyle = colours.front; ctx.fillRect(x1, y + h - 2, Math.max(1, x2 - x1), 2); }
    });
    ctx.globalAlpha = 1;
    ctx.textAlign = "left";
    ctx.fillStyle = colours.panel;
    this.visible(model.seats[slot], (seat, x1, x2) => ctx.fillRect(x2 - 1, y, 1.5, h));  // tells two that follow each other apart
    if (lane >= 12) this.visible(model.runs[slot], (run, x1, x2) => {
      const from = Math.max(x1, LEFT), room = Math.min(x2, this.width) - from - 8;
      if (run.phase !== "decode" || room < 28) return;
      const faded = view.chosen !== undefined && view.chosen !== run.n;
      ctx.fillStyle = faded ? colours.soft : colours.dark ? "#000c" : "#fffe";
      ctx.fillText(fitting(label(model.requests.get(run.n)), Math.floor(room / 6)), from + 7, y + h / 2 + 0.5);
    });
  }

  fade(ctx, n) { ctx.globalAlpha = this.view.chosen === undefined || this.view.chosen === n ? 1 : 0.3; }

  placeAway(view) {  // lanes below the rows for preempted requests
    this.view = view;
    const ends = [], shown = [];
    const low = this.stepOf(view.left), high = this.stepOf(view.right);
    for (const each of this.model.away) {
      const b = each.b ?? this.model.count;
      if (b < low || each.a > high) continue;
      let at = ends.findIndex((end) => end < each.a);
      if (at < 0) at = ends.length;
      if (at >= MOST_AWAY) continue;
      ends[at] = b;
      shown.push([each, at]);
    }
    this.shownAway = shown;
    return ends.length;
  }

  drawAway(ctx, colours) {
    for (const [each, at] of this.shownAway) {
      const x1 = this.x(this.begin(each.a)), x2 = this.x(this.close(each.b ?? this.model.count - 1));
      this.fade(ctx, each.n);
      ctx.fillStyle = each.how === "swap" ? colours.swap : colours.away;
      ctx.fillRect(x1, this.awayTop + at * AWAY_LANE, Math.max(2, x2 - x1), AWAY_LANE - 2);
    }
    ctx.globalAlpha = 1;
  }

  drawMarks(ctx, colours) {  // returns the kinds of marks that it has drawn
    const drawn = new Set();
    const { model, lane, view } = this, from = lowest(model.marks, (mark) => mark.i >= this.low - 1);
    const low = Math.max(this.low, model.first), high = Math.min(this.high, model.count - 1);
    const close = this.x(this.close(high)) - this.x(this.begin(low)) > 1.2 * (high - low);
    for (let at = from; at < model.marks.length && model.marks[at].i <= this.high + 1; at++) {
      const { i, t, kind, n, slot } = model.marks[at];
      const x = this.x(view.mode === "time" ? t - this.zero : i), y = slot >= 0 ? this.laneY(slot) : STRIP - 6;
      this.fade(ctx, n);
      if (kind === "add") {
        ctx.fillStyle = colours.front;
        ctx.fillRect(x, STRIP - 6, 1, 5);
        drawn.add("add");
      } else if (kind === "preempt" || kind === "abort") {
        cross(ctx, x, y + lane / 2 - 1, Math.min(4, lane / 2), kind === "abort" ? colours.front : colours.bad);
        drawn.add(kind);
      } else if (close && slot >= 0 && (kind === "join" || kind === "back")) {
        triangle(ctx, x, y, Math.min(6, lane - 2), colours.front);
        drawn.add("join");
      } else if (close && slot >= 0 && kind === "end") {
        ctx.fillStyle = colours.front;
        ctx.fillRect(x - 1.5, y, 1.5, lane - 2);
        drawn.add("end");
      }
    }
    ctx.globalAlpha = 1;
    return drawn;
  }

  // Names of the phases and marks in the picture, in the order of the legend
  shown() {
    const { model } = this, found = new Set(this.marks);
    if (this.high === undefined) return [];
    const last = Math.min(this.high, model.count - 1), low = Math.max(this.low, model.first);
    const inside = (list) => (list ?? []).filter((each) => each.a <= last && (each.b ?? last) >= low);
    for (let slot = 0; slot < model.slots; slot++) {
      const runs = inside(model.runs[slot]), steps = (each) => Math.min(each.b ?? last, last) - Math.max(each.a, low) + 1;
      const sum = (list) => list.reduce((all, each) => all + steps(each), 0);
      for (const run of runs) found.add(PHASES[run.phase] ? run.phase : "decode");
      if (sum(inside(model.seats[slot])) > sum(runs)) found.add("seat");
    }
    for (const [each] of this.shownAway) found.add(each.how === "swap" ? "swap" : "away");
    return Object.keys({ ...PHASES, ...MARKS }).filter((name) => found.has(name));
  }

  drawAxis(ctx, colours, height) {
    const { view } = this, span = view.right - view.left, rough = span / Math.max(2, (this.width - LEFT) / 90);
    const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    ctx.fillStyle = colours.soft;
    ctx.textAlign = "center";
    const shift = view.mode === "steps" ? (this.model.numbers[0] ?? 0) - this.model.first : 0;  // so that numbers are round
    let ticks = [];
    for (let value = Math.ceil((view.left + shift) / step) * step - shift; value <= view.right; value += step) {
      const x = this.x(value);
      if (x >= LEFT + 10 && x <= this.width - 16 && this.axisText(value, step) !== "") ticks.push(value);
    }
    if (view.mode === "steps" && ticks.length < 2) ticks = this.ends();  // a server that has made few steps
    for (const value of ticks) {
      const x = this.x(value);
      ctx.fillRect(x, height - AXIS, 1, 3);
      ctx.fillText(this.axisText(value, step), Math.max(LEFT + 10, Math.min(x, this.width - 16)), height - 7);
    }
  }

  ends() {  // the first and the last step in sight; only the last where both have no room
    const first = Math.max(Math.ceil(this.view.left), this.model.first), last = Math.min(Math.ceil(this.view.right), this.model.count) - 1;
    return last < first ? [] : this.x(last) - this.x(first) < 50 ? [last] : [first, last];
  }

  axisText(value, step) {
    if (this.view.mode === "steps") return this.model.numbers[Math.round(value) - this.model.first] ?? "";
    if (this.view.relative) return `${value.toFixed(step < 1 ? 1 : 0)} s`;
    const date = new Date((value + this.zero + (this.model.about?.unix ?? 0)) * 1000);
    return date.toLocaleTimeString([], { hour12: false }) + (step < 1 ? `.${String(date.getMilliseconds()).padStart(3, "0")}` : "");
  }

  hit(x, y) {  // what is there: {n, i, phase}
    if (!this.view || x < LEFT) return undefined;
    const i = this.stepOf(this.value(x)), slot = Math.floor((y - this.lanesTop) / this.lane);
    if (slot >= 0 && slot < this.model.slots) {
      const { run, seat } = this.model.at(slot, i);
      const n = run?.n ?? seat?.n;
      return { i, slot, n, phase: run?.phase ?? (seat && "seat") };
    }
    const at = Math.floor((y - this.awayTop) / AWAY_LANE);
    const found = this.shownAway.find(([each, lane]) => lane === at && each.a <= i && (each.b ?? Infinity) >= i);
    return { i, slot: -1, n: found?.[0].n, phase: found && (found[0].how === "swap" ? "swap" : "away") };
  }
}

function label(r) { return r ? r.name || r.id : ""; }
function fitting(text, most) { return text.length <= most ? text : most > 7 ? `${text.slice(0, most - 1)}…` : ""; }

function hatch(ctx, x, y, w, h, colour) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, h);
  ctx.clip();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.2;
  ctx.beginPath();
  for (let at = x - h - ((x - h) % 5); at < x + w; at += 5) { ctx.moveTo(at, y + h); ctx.lineTo(at + h, y); }
  ctx.stroke();
  ctx.restore();
}

function cross(ctx, x, y, size, colour) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.8;
  ctx.beginPath();
  ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
  ctx.moveTo(x - size, y + size); ctx.lineTo(x + size, y - size);
  ctx.stroke();
}

function triangle(ctx, x, y, size, colour) {
  ctx.fillStyle = colour;
  ctx.beginPath();
  ctx.moveTo(x, y); ctx.lineTo(x + size, y); ctx.lineTo(x, y + size);
  ctx.fill();
}

// Blocks in the order of their ids, coloured by owner. Shared blocks are hatched.
function drawBlocks(canvas, pools, memory, chosen, colours) {
  const total = pools.reduce((sum, blocks) => sum + blocks - 1, 0), inside = Math.max(100, canvas.clientWidth - 12);
  const size = Math.max(3, Math.min(20, Math.floor(Math.sqrt(inside * 130 / Math.max(1, total)))));
  const columns = Math.floor(inside / size), each = Math.max(1, Math.ceil(total / (columns * 90)));
  const rows = Math.ceil(Math.ceil(total / each) / columns);
  const [ctx] = prepare(canvas, rows * size + 12);
  const owners = memory.cached.map(() => new Map());
  for (const [n, tables] of memory.tables) {
    tables.forEach((table, group) => {
      for (const block of table) if (block) owners[group].set(block, [...owners[group].get(block) ?? [], n]);
    });
  }
  let cell = 0;
  pools.forEach((blocks, group) => {
    for (let block = 1; block < blocks; block += each, cell++) {
      const own = owners[group].get(block), x = 6 + (cell % columns) * size, y = 6 + Math.floor(cell / columns) * size, s = size - 1;
      ctx.globalAlpha = own && chosen !== undefined && !own.includes(chosen) ? 0.25 : 1;
      ctx.fillStyle = own ? ownerColour(own.includes(chosen) ? chosen : own[0], colours.dark) : colours.seat;
      ctx.fillRect(x, y, s, s);
      if (own?.length > 1) hatch(ctx, x, y, s, s, colours.panel);
      else if (!own && memory.cached[group].has(block)) { ctx.fillStyle = colours.soft; ctx.fillRect(x + s / 2 - 1, y + s / 2 - 1, 2, 2); }
    }
  });
  ctx.globalAlpha = 1;
  return { owners, each, at: (px, py) => {
    const column = Math.floor((px - 6) / size), row = Math.floor((py - 6) / size);
    let place = (row * columns + column) * each;
    if (column < 0 || column >= columns || row < 0) return undefined;
    for (let group = 0; group < pools.length; place -= pools[group++] - 1) {
      if (place < pools[group] - 1) return { group, block: place + 1, owners: owners[group].get(place + 1) ?? [], cached: memory.cached[group].has(place + 1) };
    }
    return undefined;
  } };
}

// One square per layer (down) and expert (across). More tokens give a stronger colour; the mean of a layer has half the strength.
function drawExperts(canvas, loads, colours) {
  const columns = Math.max(...loads.map((row) => row.length)), inside = Math.max(100, canvas.clientWidth - 12);
  const size = Math.max(2, Math.min(20, Math.floor(inside / columns)));
  const [ctx] = prepare(canvas, loads.length * size + 12);
  loads.forEach((row, layer) => row.forEach((load, expert) => {
    const x = 6 + expert * size, y = 6 + layer * size, s = Math.max(1, size - 1);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colours.seat;
    ctx.fillRect(x, y, s, s);
    ctx.globalAlpha = Math.min(1, load / 2);
    ctx.fillStyle = load > 2 ? colours.bad : colours.accent;
    ctx.fillRect(x, y, s, s);
  }));
  ctx.globalAlpha = 1;
  return { at: (px, py) => {
    const layer = Math.floor((py - 6) / size), expert = Math.floor((px - 6) / size), load = loads[layer]?.[expert];
    return load === undefined ? undefined : { layer, expert, load };
  } };
}
