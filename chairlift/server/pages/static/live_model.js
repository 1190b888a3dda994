"use strict";
// State built from the lines of a step stream, for the last `most` steps. It does not use the page.

const MOST_STEPS = 24000, CHECKPOINT_STEPS = 256, RATE_SECONDS = 60, MOST_LOADS = 120;
const LEAST_SECONDS = 0.5, LEAST_ENDED = 20;  // fewer make no rate
const PAUSE_SECONDS = 300, MOST_PAUSES = 512;  // a longer pause is probably the end of its conversation
const TURN_CACHE = { kept: "all of its cache was there", no_lease: "a part of its cache was evicted; it had no lease",
  expired: "a part of its cache was evicted after its lease had ended",
  over_budget: "a part of its cache was evicted; it lost its lease because too many blocks had one",
  displaced: "a part of its cache was evicted during its lease: requests needed the blocks" };

class Model {
  constructor() {
    this.most = MOST_STEPS;
    this.reset(null);
  }

  reset(about) {
    this.about = about;
    this.past = !!about?.past;  // only rows are known until the snapshot arrives
    this.first = 0;  // index of the oldest stored step; steps are counted from 0 in the order of arrival
    this.numbers = []; this.starts = []; this.ends = []; this.rows = []; this.tokens = []; this.states = [];
    this.saved = [];  // per step: fraction of the decodes' context that the step reads only for another row
    this.requests = new Map();
    this.on = new Map();  // slot -> the request that decodes there
    this.runs = [];  // per slot: {n, phase, a, b}, steps a to b
    this.seats = [];  // per slot: {n, a, b}: request n has the row in steps a to b; b is null for the present
    this.away = [];  // {n, how, a, b}: preempted, and not yet back
    this.marks = [];  // {i, t, kind, n, slot}: before step i
    this.changes = [];  // {i, n, group, from, blocks, known} of block tables, before step i
    this.checkpoints = [];
    this.watchedFrom = Infinity;
    this.cached = (about?.pools ?? []).map(() => new Set());
    this.state = [0, "", 0, 0, 0];
    this.finished = [];  // {t, preempted}
    this.experts = [];  // {i, loads}: tokens of each expert over the mean, a list per layer, as known after step i
    this.images = [];  // {i, state}: state of the images from step i on; empty if the model reads no images
    this.cacheStates = [];  // {i, state}: state of the prefix cache from step i on
    this.pauses = [];  // {n, id, t, tools, tokens, until, a, b}: the conversation of request n pauses from step a to b (null: now)
    this.names = new Map();
  }

  get count() { return this.first + this.numbers.length; }  // index of the step to come
  get lastEnd() { return this.ends.at(-1) ?? 0; }
  get slots() { return Math.max(this.runs.length, this.seats.length, Math.min(8, this.about?.max_num_seqs ?? 8)); }

  take(line) {
    if (line.key) this.snapshot(line.key);
    if (line.names) this.name(line.names);
    for (const change of line.do ?? []) this.happened(change);
    if (line.images) this.images.push({ i: this.count, state: line.images });
    if (line.cache) this.cacheStates.push({ i: this.count, state: line.cache });
    if (line.step !== undefined) this.step(line);
    else if (line.state) this.state = line.state;
  }

  snapshot(key) {
    const follows = this.about && key.run === this.about.run && key.after === (this.numbers.at(-1) ?? this.about.after);
    if (follows && !this.past) return;
    const past = this.past && follows;
    if (!past) this.reset(key);
    if (key.past) return;
    this.about = key;
    this.past = false;
    const i = this.count;
    for (const [n, id, arrival, prompt, most, cls, status, slot, started, cached, tokens, preempted, tables] of key.requests) {
      const r = this.request(n);
      Object.assign(r, { id, arrival, prompt, most, cls, cached, tokens, preemptions: preempted, slot });
      if (started !== null) r.started ??= started;
      r.tables = key.pools.map((_, group) => [...tables[group] ?? []]);
      if (slot >= 0) this.sit(r, slot, i);
      if (status === "swapped" || status === "preempted") this.leave(r, status === "swapped" ? "swap" : "recompute", i);
    }
    if (!past) this.on = new Map(key.on);
    this.state = key.state;
    this.watchedFrom = i;
    this.cached = key.cached.map((blocks) => new Set(blocks));
    if (key.images) this.images.push({ i, state: key.images });
    if (key.cache) this.cacheStates.push({ i, state: key.cache });
    for (const [n, t, tools, tokens, until, id] of key.pauses ?? []) this.pause(n, t, tools, tokens, until, id);
    this.checkpoint(i - 1);
  }

  name(names) {
    for (const [id, name] of Object.entries(names)) this.names.set(id, name);
    for (const r of this.requests.values()) r.name ||= this.nameOf(r.id);
  }

  nameOf(id) {
    const name = this.names.get(id.split("#")[0]);
    return name ? name + (id.includes("#") ? ` #${id.split("#")[1]}` : "") : "";
  }

  request(n) {
    let r = this.requests.get(n);
    if (!r) {
      r = { n, id: `#${n}`, name: "", arrival: null, prompt: 0, most: 0, cls: "", slot: -1, started: null, cached: 0,
        tokens: 0, chunks: 0, computed: 0, preemptions: 0, firstToken: null, lastToken: null, ended: null, reason: "", causes: {},
        by: [], held: false, tables: this.cached.map(() => []), from: this.count, until: this.count };
      this.requests.set(n, r);
    }
    return r;
  }

  happened([kind, n, t, ...rest]) {
    const i = this.count;
    if (kind === "pause") return this.pause(n, t, ...rest);
    const r = this.request(n);
    r.until = i;
    if (kind === "table") return this.table(i, n, t, ...rest);
    if (kind === "seen") { r.id = t; return; }
    if (kind === "add") {
      Object.assign(r, { arrival: t, id: rest[0], prompt: rest[1], most: rest[2], cls: rest[3] });
      r.name = this.nameOf(r.id);
    } else if (kind === "join") {
      const [slot, cached, again, host, disk] = rest;
      r.started ??= t;
      if (!again) Object.assign(r, { cached, host, disk });
      this.comeBack(r, i);
      this.sit(r, slot, i);
      kind = again ? "back" : "join";
    } else if (kind === "resume") {
      const [earlier, gap, cache] = rest, pause = this.pauses.findLast((each) => each.n === earlier && each.b === null);
      if (pause) pause.b = i;
      r.resumed = { gap, cache, tools: pause?.tools ?? [] };
      return;
    } else if (kind === "preempt") {
      const [how, by] = rest;
      r.preemptions++;
      if (by >= 0) r.by.push(by);
      this.mark(i, t, kind, r);
      if (how && how !== "tail") { this.stand(r, i); this.leave(r, how, i); }
      return;
    } else if (kind === "hold") {
      r.held = true;
    } else if (kind === "end") {
      const [reason, tokens, preemptions, causes, by] = rest;
      Object.assign(r, { ended: t, reason, causes });
      if (tokens || !this.past) Object.assign(r, { tokens, preemptions });
      if (by.length) r.by = by;
      this.finished.push({ t, preempted: r.preemptions > 0 });
      this.mark(i, t, reason === "abort" ? "abort" : "end", r);
      this.comeBack(r, i);
      this.stand(r, i);
      this.table(i, n, -1, 0, [], []);
      return;
    }
    this.mark(i, t, kind, r);
  }

  pause(n, t, tools, tokens, until, id = this.requests.get(n)?.id ?? `#${n}`) {
    this.pauses.push({ n, id, t, tools, tokens, until, a: this.count, b: null });
    if (this.pauses.length > MOST_PAUSES) this.pauses.shift();
  }

  mark(i, t, kind, r) { this.marks.push({ i, t, kind, n: r.n, slot: r.slot }); }
  sit(r, slot, i) {
    r.slot = slot;
    const seats = this.seats[slot] ??= [];
    seats.push({ n: r.n, a: i, b: null });
  }
  stand(r, i) {
    const seat = this.seats[r.slot]?.at(-1);
    if (seat && seat.n === r.n && seat.b === null) seat.b = i - 1;
    r.slot = -1;
  }
  leave(r, how, i) { this.away.push({ n: r.n, how, a: i, b: null }); }
  comeBack(r, i) {
    const entry = this.away.findLast((each) => each.n === r.n && each.b === null);
    if (entry) entry.b = i - 1;
  }

  table(i, n, group, from, blocks, known) {  // group -1: all of them end
    this.changes.push({ i, n, group, from, blocks, known });
    changeTable(this.request(n).tables, this.cached, group, from, blocks, known);
  }

  step(line) {
    const i = this.count, [start, end] = line.t;
    for (const slot of line.off ?? []) this.on.delete(slot);
    for (const [slot, n] of line.on ?? []) this.on.set(slot, n);
    if (line.state) this.state = line.state;
    let rows = 0, tokens = 0;
    if (!line.rest) {
      for (const [slot, n] of this.on) {
        const r = this.request(n);
        rows++;
        if (!r.held) this.token(r, end);
        tokens += !r.held;
        this.run(slot, n, r.held ? "held" : "decode", i);
        r.until = i;
      }
    }
    for (const [n, slot, at, count, samples, why] of line.chunks ?? []) {
      const r = this.request(n);
      rows++;
      r.chunks++;
      r.computed = at + (why === "verify" ? Number(samples) : count);
      for (let k = 0; k < samples; k++) { this.token(r, end); tokens++; }
      this.run(slot, n, why, i);
      r.until = i;
    }
    for (const [list, value] of [[this.numbers, line.step], [this.starts, start], [this.ends, end], [this.rows, rows],
      [this.tokens, tokens], [this.states, this.state], [this.saved, line.ctx ? (line.shared ?? 0) / line.ctx : 0]]) list.push(value);
    if (line.experts) this.experts.push({ i, loads: line.experts });
    if (this.experts.length > MOST_LOADS) this.experts.splice(0, this.experts.length - MOST_LOADS);
    const often = this.about.pools.some((blocks) => blocks > 20000) ? 8 * CHECKPOINT_STEPS : CHECKPOINT_STEPS;
    if (!this.past && i % often === 0) this.checkpoint(i);
    if (this.numbers.length > this.most) this.forget(this.first + Math.ceil(this.most / 6));
  }

  token(r, t) {
    if (r.ended !== null) return;
    r.tokens++;
    r.firstToken ??= t;
    r.lastToken = t;
    r.timed = (r.timed ?? 0) + 1;
  }

  run(slot, n, phase, i) {
    const runs = this.runs[slot] ??= [], last = runs.at(-1);
    if (last && last.n === n && last.phase === phase && last.b === i - 1) last.b = i;
    else runs.push({ n, phase, a: i, b: i });
  }

  loadsAt(i) { return this.experts.findLast((each) => each.i <= i)?.loads; }

  cacheAt(i) { return this.cacheStates.findLast((each) => each.i <= i)?.state; }

  pausesAt(i, now) {  // those that are not over in step i, the newest first
    return this.pauses.filter((each) => each.a <= i && (each.b === null || each.b > i) && now - each.t <= PAUSE_SECONDS).reverse();
  }

  imagesAt(i) { return this.images.findLast((each) => each.i <= i)?.state; }

  checkpoint(i) {
    const tables = new Map();
    for (const [n, r] of this.requests) if (r.tables.some((table) => table.length)) tables.set(n, r.tables.map((table) => [...table]));
    this.checkpoints.push({ i, tables, cached: this.cached.map((set) => new Set(set)) });
  }

  forget(first) {  // everything before this step
    const drop = first - this.first;
    for (const list of [this.numbers, this.starts, this.ends, this.rows, this.tokens, this.states, this.saved]) list.splice(0, drop);
    this.first = first;
    for (const list of [this.images, this.cacheStates]) list.splice(0, Math.max(0, list.findLastIndex((each) => each.i <= first)));
    const keep = (list) => list.filter((each) => each.b === null || each.b >= first);
    this.runs = Array.from(this.runs, (list) => keep(list ?? []));
    this.seats = Array.from(this.seats, (list) => keep(list ?? []));
    this.away = keep(this.away);
    this.pauses = keep(this.pauses);
    this.marks = this.marks.filter((mark) => mark.i >= first);
    this.finished = this.finished.filter((each) => each.t > this.ends[0] - RATE_SECONDS).slice(-5000);
    const base = this.checkpoints.findLastIndex((each) => each.i <= first);
    this.checkpoints.splice(0, Math.max(0, base));
    this.changes = this.changes.filter((each) => each.i > (this.checkpoints[0]?.i ?? -1));
    for (const [n, r] of this.requests) if (r.until < first && (r.ended !== null || r.arrival === null)) this.requests.delete(n);
    const ids = new Set([...this.requests.values()].map((r) => r.id.split("#")[0]));
    for (const id of this.names.keys()) if (!ids.has(id)) this.names.delete(id);
  }

  memoryNow() { return { tables: new Map([...this.requests].filter(([, r]) => r.ended === null).map(([n, r]) => [n, r.tables])), cached: this.cached }; }

  // Block tables in step i: {tables: Map(n -> tables), cached: [Set]}; undefined before the first viewer
  memoryAt(i) {
    const base = this.checkpoints.findLast((each) => each.i <= i);
    if (!base || i < this.watchedFrom) return undefined;
    const tables = new Map([...base.tables].map(([n, own]) => [n, own.map((table) => [...table])]));
    const cached = base.cached.map((set) => new Set(set));
    for (let at = lowest(this.changes, (each) => each.i > base.i); at < this.changes.length; at++) {
      const { i: when, n, group, from, blocks, known } = this.changes[at];
      if (when > i) break;
      if (!tables.has(n)) tables.set(n, cached.map(() => []));
      changeTable(tables.get(n), cached, group, from, blocks, known);
    }
    return { tables, cached };
  }

  at(slot, i) {  // the run and the seat there
    const hit = (list) => list?.find((each) => each.a <= i && (each.b === null || each.b >= i));
    return { run: hit(this.runs[slot]), seat: hit(this.seats[slot]) };
  }

  stepAt(t) { return this.first + Math.min(this.numbers.length - 1, lowest(this.ends, (end) => end >= t)); }

  // Values of the gauges for step i, or for the present if i is undefined. `late`: seconds since the newest step's end
  gauges(step, late = 0) {
    const i = step ?? this.count, at = Math.min(i, this.count - 1) - this.first, end = this.ends[at] ?? this.lastEnd;
    const [waiting, why, free, used, cached] = step === undefined ? this.state : this.states[at] ?? this.state;
    const from = lowest(this.ends, (t) => t > end - 2), seconds = end - (this.starts[from] ?? end);
    const tokens = this.tokens.slice(from, at + 1).reduce((sum, each) => sum + each, 0);
    const ended = this.finished.filter((each) => each.t <= end && each.t > end + late - RATE_SECONDS);
    const preempted = ended.filter((each) => each.preempted).length;
    const seated = this.seats.reduce((sum, list) => sum + !!list?.some((seat) => seat.a <= i && (seat.b === null || seat.b >= i)), 0);
    return { waiting, why, running: seated, used: used / (free + used + cached || 1), speed: seconds >= LEAST_SECONDS ? tokens / seconds : null,
      perStep: at > from ? seconds / (at + 1 - from) : 0, rate: ended.length < LEAST_ENDED ? 0 : preempted / ended.length,
      few: !ended.length ? "–" : ended.length < LEAST_ENDED ? `${preempted} of ${ended.length}` : "" };
  }

  find(text) {
    const wanted = text.trim().toLowerCase();
    const all = [...this.requests.values()].reverse(), names = (r) => [r.id, r.name].map((name) => name.toLowerCase());
    return wanted ? all.find((r) => names(r).includes(wanted)) ?? all.find((r) => names(r).some((name) => name.startsWith(wanted))) : undefined;
  }
}

function changeTable(tables, cached, group, from, blocks, known) {
  if (group < 0) { for (const table of tables) table.length = 0; return; }
  const table = tables[group];
  if (from < 0) table.fill(0, 0, -from);
  else { table.length = Math.min(table.length, from); table.push(...blocks); }
  for (const block of blocks) cached[group].delete(block);
  for (const block of known) cached[group].add(block);
}

function imageText([encoded, givenUp, again, bytes, queued, lacksRoom], most) {
  const size = (number) => `${(number / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1 })} MiB`;
  const tiles = (number) => `${number.toLocaleString("en")} ${number === 1 ? "tile" : "tiles"}`;
  return `Encoded images use ${size(bytes)}${most ? ` of ${size(most)}` : ""}. The encoder's queue has ${tiles(queued)}${lacksRoom ? "; the next tile waits for room" : ""}.`
    + ` Since the start: ${tiles(encoded)} encoded, ${givenUp.toLocaleString("en")} given up for other images, ${again.toLocaleString("en")} encoded again.`;
}

function cacheText([leased, budget, reused, reuseSeconds, evicted, idleSeconds]) {
  const mean = (sum, count) => `${(sum / count).toLocaleString("en", { maximumSignificantDigits: 2 })} s`, number = (count) => count.toLocaleString("en");
  const found = budget ? [`Leases hold ${number(leased)} of at most ${number(budget)} unused blocks.`] : [];
  if (reused) found.push(`Blocks were used again ${number(reused)} times, on average ${mean(reuseSeconds, reused)} after their last use.`);
  if (evicted) found.push(`${number(evicted)} blocks were evicted, on average ${mean(idleSeconds, evicted)} after their last use.`);
  return found.join(" ");
}

function resumedText({ gap, cache, tools }) {
  return `of ${gap.toFixed(gap < 9.95 ? 1 : 0)} s${tools.length ? ` for ${tools.join(", ")}` : ""}: ${TURN_CACHE[cache] ?? cache}`;
}

function pauseText({ tools, t, tokens, until }, now) {
  const span = (value) => `${Math.max(0, value).toFixed(value < 9.95 ? 1 : 0)} s`;
  const lease = !until ? "no lease" : until > now ? `its lease ends in ${span(until - now)}` : "its lease has ended";
  return `waits for ${tools.join(", ")}, ${span(now - t)} so far; ${tokens.toLocaleString("en")} tokens, ${lease}`;
}

function lowest(list, holds) {  // index of the first entry for which it holds; it holds for all after it
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(list[middle])) high = middle; else low = middle + 1;
  }
  return low;
}

async function* textLines(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) { if (rest) yield rest; return; }
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}
