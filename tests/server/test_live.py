"""The live view's side of the server: one ring for all viewers, bounded, and shown to those only who may see it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.requests import Request

from chairlift.base.presets import PRESETS
from chairlift.cli.commands import LIVE_COMPARISON
from chairlift.engine.step_export import read_recording
from chairlift.metrics.stats import ReplicaStats
from chairlift.server.http.app import make_app
from chairlift.server.pages import live, live_feed
from chairlift.server.pages.live_feed import LiveFeed, as_event
from tests.colours import LEAST, least_difference, light_and_dark
from tests.engine.test_step_export import check_trace_events, watched
from tests.server.harness import PATIENCE, Client, Connection, make_state, run, serving, until
from tests.server.watched import WatchedEngine, make_truth

KEY = b'{"key":{"run":"1","after":0}}'
REPLICA = ReplicaStats(
    index=0, pid=None, state="ready", unstarted=0, started=0, unstarted_tokens=0, kv_cache_usage=0, sent=0, restarts=0
)
PAST = b'{"key":{"run":"1","after":0,"past":true}}'


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def feed_of(**settings: Any) -> tuple[LiveFeed, WatchedEngine]:
    engine: Any = WatchedEngine()
    return LiveFeed(engine, **settings), engine


# --- the page --------------------------------------------------------------------------------------------------------

HTML = live.live_page()
SCRIPTS = re.findall("<script>(.*?)</script>", HTML, re.DOTALL)
STATIC = Path(live.__file__).parent / "static"


def test_the_page_has_all_of_itself_inside_and_asks_for_nothing_from_elsewhere() -> None:
    assert len(SCRIPTS) == 7 and HTML.count("<style>") == 1
    assert "data-file" not in HTML
    without_the_namespace = HTML.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|url\(|@import|<link(?! rel=\"icon\" href=\"data:)|<iframe", without_the_namespace)
    bare = re.sub("<(script|style)>.*?</\\1>", "", HTML, flags=re.DOTALL)
    assert not re.search(r"\s(src|on[a-z]+|style)=", bare)


def test_the_chart_comes_before_the_controls() -> None:
    places = [
        HTML.index(f' id="{name}"')
        for name in ("gauges", "timeline", "timeline2", "scrub", "legend", "tools", "words", "blocks")
    ]
    assert places == sorted(places)


def test_the_colours_of_the_picture_differ_for_everybody() -> None:
    phases = re.search(r"^const PHASES = \{(.*?)^\};", "".join(SCRIPTS), re.S | re.M)
    assert phases is not None
    names = re.findall(r"(\w+): \"", phases[1])
    assert len(names) == 9
    found = [re.search(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", HTML) for name in names]
    for colours in light_and_dark((pair[1], pair[2]) for pair in found if pair is not None):
        assert len(colours) == 9
        difference, words = least_difference(colours)
        assert difference > LEAST, words


_LEGEND = """
const model = new Model(), line = new Timeline(null, model), view = { mode: "steps", left: 0, right: 4 };
model.reset({ pools: [4], max_num_seqs: 2 });
const run = (phase, a, b) => ({ n: 7, phase, a, b });
model.runs[0] = [run("prefill", 0, 0), run("decode", 1, 1), run("held", 6, 7)];
model.seats[0] = [{ n: 7, a: 0, b: 1 }];
for (let step = 1; step <= 8; step++) model.numbers.push(step);
const shown = (left, right) => {
  Object.assign(line, { view, low: left, high: right, shownAway: [], marks: new Set(left ? [] : ["join"]) });
  return line.shown();
};
const all = [shown(0, 3), shown(5, 8), shown(3, 4)];
model.seats[0][0].b = 3;
all.push(shown(0, 3));
console.log(JSON.stringify(all));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_the_legend_names_what_the_picture_shows() -> None:
    script = (STATIC / "live_model.js").read_text() + (STATIC / "live_draw.js").read_text() + _LEGEND
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert json.loads(done.stdout) == [
        ["prefill", "decode", "join"],
        ["held"],
        [],
        ["prefill", "decode", "seat", "join"],
    ]


_AXIS = """
const ticks = [], model = { first: 0, numbers: [...Array(COUNT).keys()].map((i) => i + 1) };
model.count = model.numbers.length;
const line = new Timeline(null, model);
Object.assign(line, { width: 1000, view: { mode: "steps", left: COUNT - 400, right: COUNT } });
line.drawAxis({ fillRect() {}, fillText(text, x) { ticks.push([text, x]); } }, {}, 100);
console.log(JSON.stringify(ticks));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
@pytest.mark.parametrize(
    ("count", "numbers"), [(0, []), (1, [1]), (5, [5]), (30, [1, 30]), (60, [1, 60]), (120, [50, 100])]
)
def test_the_axis_has_numbers_also_when_there_are_few_steps(count: int, numbers: list[int]) -> None:
    script = (STATIC / "live_draw.js").read_text() + _AXIS.replace("COUNT", str(count))
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    ticks = json.loads(done.stdout)
    assert [text for text, _ in ticks] == numbers
    assert all(44 <= x <= 984 for _, x in ticks)


_EXPERTS = """
const model = new Model();
const sizes = { run: "1", after: 0, max_num_seqs: 1, pools: [4] };
model.take({ key: { ...sizes, requests: [], on: [], state: [0, "", 3, 0, 0], cached: [[]] } });
for (let step = 1; step <= 5; step++) {
  model.take({ step, t: [step, step + 1], ...(step % 2 ? {} : { experts: [[step, 0]] }) });
}
const squares = [];
const ctx = { setTransform() {}, clearRect() {}, fillRect(x, y) { squares.push([x, y, this.globalAlpha]); } };
const canvas = { clientWidth: 52, style: {}, getContext: () => ctx };
globalThis.devicePixelRatio = 1;
const drawn = drawExperts(canvas, [[1, 0], [0.5, 1.5]], { seat: "grey", accent: "blue", bad: "red" });
const known = [0, 1, 3, 9].map((i) => model.loadsAt(i) ?? null);
console.log(JSON.stringify([known, squares, drawn.at(30, 30), drawn.at(200, 7) ?? null]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_the_page_shows_the_load_of_experts_as_it_was() -> None:
    script = (STATIC / "live_model.js").read_text() + (STATIC / "live_draw.js").read_text() + _EXPERTS
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    known, squares, pointed, outside = json.loads(done.stdout)
    assert known == [None, [[2, 0]], [[4, 0]], [[4, 0]]]
    assert [square[2] for square in squares[1::2]] == [0.5, 0, 0.25, 0.75]
    assert (pointed, outside) == ({"layer": 1, "expert": 1, "load": 1.5}, None)


_RATES = """
const model = new Model();
model.reset({ pools: [], max_num_seqs: 4 });
model.on.set(0, 7);
const found = [];
for (let step = 0; step < 100; step++) {
  model.step({ step, t: [step / 100, (step + 1) / 100] });
  if (step % 5 === 0) model.finished.push({ t: (step + 1) / 100, preempted: step === 0 });
  const { speed, rate, few } = model.gauges();
  if ([0, 20, 99].includes(step)) found.push([speed === null ? null : Math.round(speed), rate, few]);
}
for (const late of [50, 61]) found.push([late, model.gauges(undefined, late).rate, model.gauges(undefined, late).few]);
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_the_page_shows_no_rate_of_less_than_half_a_second() -> None:
    script = (STATIC / "live_model.js").read_text() + _RATES
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert json.loads(done.stdout) == [
        *([None, 0, "1 of 1"], [None, 0, "1 of 5"], [100, 0.05, ""]),
        *([50, 0.05, ""], [61, 0, "–"]),  # seconds without a step: nothing has ended in the last minute
    ]


def test_the_script_writes_text_as_text_only() -> None:
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert not any(name in script for script in SCRIPTS)


def test_every_element_the_scripts_name_is_there_and_every_field_has_a_label() -> None:
    ids = re.findall(r' id="([a-z0-9]+)"', HTML)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([a-z0-9]+)"\)', "".join(SCRIPTS))) <= set(ids)
    for field in re.findall(r"<(?:input|select)[^>]*>", HTML):
        before = HTML[: HTML.index(field)]
        assert "aria-label" in field or before.rfind("<label") > before.rfind("</label>")
    assert all("aria-label" in field for field in re.findall(r"<(?:meter|canvas)[^>]*>", HTML))


def test_the_page_is_open_and_its_policy_allows_its_scripts_only() -> None:
    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine(), api_key=("sk-1",)))) as client:
            reply = await client.get("/live")
            assert (reply.status, reply.body.decode()) == (200, HTML)
            policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
            digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in SCRIPTS]
            assert policy["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
            assert policy["default-src"] == "'none'"
            reply = await client.get("/live/")
            assert (reply.status, reply.headers["location"]) == (307, "../live")
            for path in ("/live/live.js", "/static/live.js", "/LIVE", "/%6cive"):
                assert (await client.get(path)).status in (401, 404), path

    run(test())


def test_files_are_small_enough_to_read() -> None:
    for path in sorted(STATIC.glob("live*")):
        name, lines = path.name, path.read_text().splitlines()
        assert len(lines) < 500
        assert not name.endswith(".js") or max(map(len, lines)) < 180


# --- who may look ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/live/events", "/live/export", "/live/compare", "/live/demo"])
def test_the_live_view_needs_the_key_of_the_admin(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice sk-alice\nadmin sk-admin\n")

    async def test() -> None:
        state = make_state(WatchedEngine(), api_key_file=str(keys))
        async with serving(make_app(state)) as client:
            assert (await client.get(path)).status == 401
            refused = await client.get(path, "Authorization: Bearer sk-alice")
            assert (refused.status, refused.error["code"]) == (403, "admin_key_needed")
            assert "admin" in refused.error["message"]
            connection = await client.connect()
            connection.get("/live/events", "Authorization: Bearer sk-admin")
            assert (await connection.head())[0] == 200

    run(test())


def test_one_key_or_none_is_enough_where_keys_do_not_tell_tenants_apart() -> None:
    async def test() -> None:
        for settings, header in (({}, ()), ({"api_key": ("sk-1",)}, ("Authorization: Bearer sk-1",))):
            async with serving(make_app(make_state(WatchedEngine(), **settings))) as client:
                connection = await client.connect()
                connection.get("/live/events", *header)
                status, headers = await connection.head()
                assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")

    run(test())


def test_only_the_headers_are_asked_for() -> None:
    """The connection is free for what comes next, and nobody is counted as looking."""

    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine()))) as client:
            reply = await client.get("/live/events", method="HEAD")
            assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")

    run(test())


# --- the stream ------------------------------------------------------------------------------------------------------


async def open_events(client: Client, state: Any) -> Connection:
    connection = await client.connect()
    connection.get("/live/events")
    assert (await connection.head())[0] == 200
    assert (await connection.chunk()).startswith(b"retry:")
    engine = state.engine
    await until(lambda: engine.events.wants("steps"))
    return connection


def test_all_viewers_get_the_same_and_one_that_comes_late_gets_the_past() -> None:
    async def test() -> None:
        state = make_state(WatchedEngine())
        async with serving(make_app(state)) as client:
            first = await open_events(client, state)
            state.engine.events.tell("steps", KEY)
            state.engine.events.tell("steps", b'{"step":1}\n{"step":2}')
            late = await open_events(client, state)
            state.engine.events.tell("steps", b'{"step":3}')
            for connection in (first, late):
                assert await connection.chunk() == as_event(KEY)
                assert await connection.chunk() == b'data: {"step":1}\ndata: {"step":2}\n\n'
                assert await connection.chunk() == b'data: {"step":3}\n\n'
            assert state.live is not None and state.live.num_viewers == 2
            await first.close()
            await until(lambda: state.live.num_viewers == 1)
            state.draining = True
            state.engine.events.tell("steps", b'{"step":4}')
            assert b"event: end" in (await late.chunk()) + (await late.chunk())

    run(test())


def test_the_engine_is_watched_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "_LINGER_SECONDS", 0.0)

    async def test() -> None:
        feed, engine = feed_of()
        with feed.viewing():
            assert feed in engine.events.subscribers.values()
            with feed.viewing():
                assert feed.num_viewers == 2
            await asyncio.sleep(0)
            assert engine.events.wants("steps")
        assert engine.events.wants("steps")  # it lingers, for a page that is loaded again
        with feed.viewing():
            await asyncio.sleep(0.001)
            assert engine.events.wants("steps")
        await until(lambda: not engine.events.wants("steps"))
        assert not engine.events.subscribers

    run(test())


def test_the_number_of_viewers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MAX_VIEWERS", 1)

    async def test() -> None:
        state = make_state(WatchedEngine())
        async with serving(make_app(state)) as client:
            await open_events(client, state)
            refused = await client.get("/live/events")
            assert refused.status == 503 and "1 viewers look already" in refused.error["message"]

    run(test())


def test_every_replica_has_steps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "_MAX_NAMES", 3)

    class Stream:
        def __init__(self, number: int) -> None:
            self.request_id, self.name = f"r{number}", f"mine-{number}"

    async def read(client: Client, path: str) -> tuple[Connection, list[bytes]]:
        connection = await client.connect()
        connection.get(path)
        assert (await connection.head())[0] == 200 and (await connection.chunk()).startswith(b"retry:")
        return connection, [await connection.chunk() for _ in range(2)]

    async def test() -> None:
        state = make_state(WatchedEngine())
        engine: Any = state.engine
        engine.replicas.known = [REPLICA, REPLICA]
        state.live = feed = LiveFeed(state.engine, max_bytes=1000)
        async with serving(make_app(state)) as client:
            with feed.viewing():
                engine.events.tell("steps", KEY, 1)
                engine.events.tell("steps", KEY, 0)
                engine.events.tell("steps", b'{"step":7}', 1)
                engine.events.tell("steps", b'{"step":2}', 0)
                assert (await read(client, "/live/events"))[1] == [as_event(KEY), as_event(b'{"step":2}')]
                second, entries = await read(client, "/live/events?replica=1")
                assert entries == [as_event(KEY), as_event(b'{"step":7}')]
                assert (await client.get("/live/export?replica=1")).body == KEY + b'\n{"step":7}\n'
                for number in range(5):
                    engine.events.tell("began", Stream(number))
                engine.events.tell("steps", b'{"step":8}', 1)
                names = {f"r{number}": f"mine-{number}" for number in (2, 3, 4)}
                lines = (await second.chunk()).split(b"\n")
                assert json.loads(lines[1].removeprefix(b"data: ")) == {"names": names}
                for number in range(30):  # what one replica tells does not push out what the other told
                    engine.events.tell("steps", KEY.replace(b"0", b"%d" % number), 1)
                assert feed[feed.first] == as_event(KEY) and feed.ring(1).num_bytes <= 500 + 50
            for wrong in ("2", "-1", "x", "٣", "9" * 30):
                refused = await client.get(f"/live/export?replica={quote(wrong)}")
                assert (refused.status, refused.error["param"]) == (400, "replica")
                assert "from 0 to 1" in refused.error["message"]
            engine.replicas.known = []
            refused = await client.get("/live/compare?replica=1")
            assert refused.status == 400 and "has one engine" in refused.error["message"]

    run(test())


_CARDS = """
const [ready, down] = [
  { index: 1, state: "ready", started: 5, unstarted: 2, unstarted_tokens: 4096, kv_cache_usage: 0.5, restarts: 0 },
  { index: 0, state: "down", started: 0, unstarted: 0, unstarted_tokens: 0, kv_cache_usage: 0, restarts: 3 },
];
const queues = [0, 1, 7].map(queue), paths = ["", "?source=demo"].map(which);
const limits = { min_replicas: 1, max_replicas: 4 };
const state = { ...limits, wanted_replicas: 2, starting_replicas: 1, last_change: "from 1 to 2" };
const texts = [null, state, { ...state, starting_replicas: 0, last_change: "" }].map(scaling);
console.log(JSON.stringify([card(ready), card(down), ...queues, replica, ...paths, texts]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_the_page_has_a_card_for_each_replica() -> None:
    script = 'globalThis.location = { search: "?replica=1" };' + (STATIC / "live_fleet.js").read_text() + _CARDS
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    ready, down, nobody, one, seven, chosen, query, example, texts = json.loads(done.stdout)
    work = "5 running, 2 next (4,096 tokens)"
    assert ready == {"title": "replica 1", "state": "ready", "work": work, "kv": 0.5}
    assert (down["state"], down["work"]) == ("down, restarts: 3", "0 running, none next")
    assert (nobody, one) == ("no request waits for a replica", "1 request waits for a replica")
    assert seven == "7 requests wait for a replica"
    assert (chosen, query, example) == (1, "?replica=1", "?source=demo")
    assert texts == [
        "",
        "; autoscaling wants 2 of 1 to 4 replicas, 1 starting; last change: from 1 to 2",
        "; autoscaling wants 2 of 1 to 4 replicas",
    ]


_MODELS = """
const served = [["a", "unloaded"], ["b", "loaded"], ["c", "failed"]].map(([id, state]) => ({ id, state }));
const lists = [served, [{ id: "one" }, { id: "adapter", state: null }]].map(modelNames), before = which("");
const elements = { models: { replaceChildren(...nodes) { this.nodes = nodes; } } };
const asked = new URLSearchParams("follow=x"), $ = (id) => elements[id], make = (tag, text) => text;
const ask = async () => ({ json: async () => ({ data: served }) });
chooseModel().then(() => {
  const after = which("");
  $("models").value = "c";
  $("models").onchange();
  const { nodes, hidden } = $("models");
  console.log(JSON.stringify([...lists, before, nodes, hidden, after, String(location.search)]));
});
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_the_page_shows_one_of_many_models_and_offers_the_others() -> None:
    script = 'globalThis.location = { search: "" };' + (STATIC / "live_fleet.js").read_text() + _MODELS
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    names, none, *rest = json.loads(done.stdout)
    assert (names, none) == (["b", "a", "c"], [])
    assert rest == ["", ["b", "a", "c"], False, "?model=b", "follow=x&model=c"]


_TRAINING = """
const owner = "0123456789abcdef0123456789abcdef", run = `${owner}:train:3`;
const mine = { run, owner, rank: 8, tokens: 1200, steps: 1, loss: 12.34567, waiting_calls: 2, is_computed: false };
const idle = { ...mine, run: "s:train:0", owner: "ann", loss: null, waiting_calls: 0 };
const busy = { ...idle, is_computed: true };
const sampler = { sampler: "s:sample:1", owner: "ann", follows: "", running: 4, samples: 9, tokens: 70 };
const samplers = [sampler, { ...sampler, running: 0 }];
const rows = trainingRows({ runs: [mine, idle, busy], samplers });
const owners = new Map([[run, owner], ["s:train:0", "ann"]]);
const work = { kind: "pass", seconds: 0.414, runs: [run, "s:train:0"], tokens: { [run]: 1200, "s:train:0": 64 } };
const step = { kind: "optim_step", seconds: 0.02, runs: ["s:train:0"], tokens: {} };
console.log(JSON.stringify([rows, workText(work, owners), workText(step, owners)]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_the_page_shows_who_trains_and_who_samples() -> None:
    script = (STATIC / "live_training.js").read_text() + _TRAINING
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    rows, work, step = json.loads(done.stdout)
    assert rows == [
        ["01234567… / 3", "trains, rank 8", "1,200 tokens", "1 step", "loss 12.35", "2 calls wait"],
        ["ann / 0", "trains, rank 8", "1,200 tokens", "1 step", "", "idle"],
        ["ann / 0", "trains, rank 8", "1,200 tokens", "1 step", "", "is computed"],
        ["ann / 1", "samples", "70 tokens", "9 samples", "", "4 running"],
    ]
    assert work == "pass of 0.41 s: 01234567… / 3: 1,200, ann / 0: 64"
    assert step == "optim_step of 0.02 s: ann / 0"


def test_a_viewer_that_cannot_keep_up_is_skipped_ahead_and_told() -> None:
    async def test() -> None:
        state = make_state(WatchedEngine())
        state.live = feed = LiveFeed(state.engine, max_bytes=200)
        events = live._follow(feed, feed, state)
        await anext(events)
        feed.steps(KEY)
        assert await anext(events) == as_event(KEY)
        for number in range(20):
            feed.steps(KEY.replace(b"after", b"after%d" % number) + b'\n{"step":%d}' % number)
        assert await anext(events) == b"event: skipped\ndata: {}\n\n"
        assert await anext(events) == as_event(KEY.replace(b"after", b"after19") + b'\n{"step":19}')
        await events.aclose()
        assert feed.num_viewers == 0

    run(test())


# --- the ring --------------------------------------------------------------------------------------------------------


def test_the_ring_is_bounded_and_begins_with_a_snapshot() -> None:
    async def test() -> None:
        feed, _ = feed_of(max_bytes=5000)
        for number in range(3000):
            feed.steps(KEY if number % 10 == 0 else b'{"step":%d}' % number)
            assert feed[feed.first] == as_event(KEY)
            assert feed.num_bytes == sum(len(feed[i]) for i in range(feed.first, feed.end)) <= 5000 + 600
            assert feed[feed.newest_key] == as_event(KEY)
        assert feed.end == 3000 and feed.first > 2600
        assert feed[feed.first + 1] is feed[feed.first + 1]

    run(test())


def test_the_ring_forgets_with_time_but_never_all_of_it() -> None:
    async def test() -> None:
        clock = Clock()
        feed, _ = feed_of(max_seconds=60.0, clock=clock)
        for _ in range(10):
            feed.steps(KEY)
            clock.now += 10.0
        assert feed.end - feed.first == 8  # the last 60 s, and what is needed to begin there
        clock.now += 1000.0
        feed.steps(KEY)
        assert feed.end - feed.first == 2

    run(test())


def test_another_recorder_begins_another_ring() -> None:
    async def test() -> None:
        feed, _ = feed_of()
        feed.steps(KEY)
        feed.steps(b'{"step":1}')
        feed.steps(PAST + b'\n{"step":1}')
        assert feed.lines() == PAST + b'\n{"step":1}'
        assert (feed.first, feed.end, feed.newest_key) == (2, 3, 2)

    run(test())


def test_requests_have_the_names_that_their_callers_gave() -> None:
    class Stream:
        def __init__(self, request_id: str, name: str) -> None:
            self.request_id, self.name = request_id, name

    async def test() -> None:
        feed, engine = feed_of()
        engine.streams = [Stream("a1", "mine-1"), Stream("b2", "")]
        with feed.viewing():
            feed.steps(KEY)
            feed.steps(b'{"step":1}')
            engine.streams.append(Stream("c3", "mine-3"))
            for stream in (
                engine.streams[-1],
                Stream("d4", "mine-4"),
                Stream("e5", ""),
            ):  # d4 ends before it is told of
                engine.events.tell("began", stream)
            feed.steps(b'{"step":2}')
            feed.steps(KEY)
        lines = [json.loads(line) for line in feed.lines().splitlines()]
        named = [line["names"] for line in lines if "names" in line]
        assert named == [{"a1": "mine-1"}, {"c3": "mine-3", "d4": "mine-4"}, {"a1": "mine-1", "c3": "mine-3"}]

    run(test())


def test_a_recording_is_shown_from_its_beginning_and_ends() -> None:
    lines = watched(make_truth(seed=1))

    async def test() -> None:
        state = make_state(WatchedEngine())
        state.live = LiveFeed(None, recording=lines + b"\n")
        assert state.live.lines() == lines
        async with serving(make_app(state)) as client:
            for _ in range(2):
                reply = await client.get("/live/events")
                assert reply.headers["x-recording"] == "1"
                data = b"\n".join(line[6:] for line in reply.body.splitlines() if line.startswith(b"data: {"))
                assert data == lines + b"\n{}"
            assert not state.engine.events.wants("steps")

    run(test())


# --- what can be taken away ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording() -> bytes:
    return watched(make_truth(seed=8, max_num_seqs=4), bursts=4)


@pytest.fixture
def shown(recording: bytes) -> Any:
    state = make_state(WatchedEngine())
    state.live = LiveFeed(None, recording=recording)
    return state


def test_exports_are_files_in_the_formats_they_claim(shown: Any, recording: bytes) -> None:
    async def test() -> None:
        async with serving(make_app(shown)) as client:
            lines = await client.get("/live/export?format=jsonl")
            assert lines.body == recording + b"\n"
            assert re.fullmatch(
                r'attachment; filename="chairlift-steps-\d+\.jsonl"', lines.headers["content-disposition"]
            )
            trace = await client.get("/live/export?format=perfetto")
            assert trace.headers["content-type"] == "application/json"
            assert check_trace_events(trace.body)
            refused = await client.get("/live/export?format=xml")
            assert (refused.status, refused.error["param"]) == (400, "format")

    run(test())


def test_a_new_line_reaches_viewers_at_once() -> None:
    async def test() -> None:
        feed, _ = feed_of()
        waiting = asyncio.ensure_future(feed.wait_for_entry(3600))
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.steps(KEY)
        await asyncio.wait_for(waiting, 10)
        assert feed.end > 0

    run(test())


def test_an_export_waits_for_the_first_lines_of_an_engine_that_nobody_has_looked_at() -> None:
    async def test() -> None:
        feed, engine = feed_of()
        state = make_state(engine)
        state.live = feed
        async with serving(make_app(state)) as client:
            connection = await client.connect()
            connection.get("/live/export")
            await until(lambda: engine.events.wants("steps"))
            feed.steps(KEY)
            assert (await connection.reply()).body == KEY + b"\n"

    run(test())


def test_the_live_view_compares_with_static_batching_of_the_same_requests(shown: Any, recording: bytes) -> None:
    async def test() -> None:
        async with serving(make_app(shown)) as client:
            reply = await client.get("/live/compare")
            assert reply.status == 200, reply.body
            first, _, lines = reply.body.partition(b"\n")
            compare = json.loads(first)["compare"]
            known = read_recording(recording).arrivals
            static = read_recording(lines)
            assert compare["requests"] == len(known) == len(static.arrivals)
            assert compare["begin"] == known[0].arrival
            for real, simulated in zip(known, static.arrivals, strict=True):
                assert simulated.arrival == pytest.approx(real.arrival - known[0].arrival, abs=1e-5)
                assert simulated.prompt_tokens == real.prompt_tokens
                assert simulated.output_tokens == real.output_tokens
            one, other = compare["upper"], compare["lower"]
            assert one["tokens_per_second"] > other["tokens_per_second"]
            assert one["whole_p50"] < other["whole_p50"]
            assert other["held_share"] > 0.1 and one["held_share"] == 0
            held = {change[1] for line in static.lines for change in line.get("do", ()) if change[0] == "hold"}
            assert held

    run(test())


def test_the_live_view_compares_two_presets_on_the_same_requests(shown: Any, recording: bytes) -> None:
    async def test() -> None:
        async with serving(make_app(shown)) as client:
            reply = await client.get("/live/compare?upper=orca&lower=tgi")
            assert reply.status == 200, reply.body
            first, *lines = reply.body.split(b"\n")
            compare = json.loads(first)["compare"]
            assert compare["sides"] == ["orca", "tgi"]
            assert compare["about"]["tgi"]["does"] == PRESETS["tgi"].does
            assert not compare["words"][0].startswith("Measured")
            known, cut = read_recording(recording).arrivals, compare["upper_lines"]
            separate = []
            for part in (lines[:cut], lines[cut:]):
                side = read_recording(b"\n".join(part))
                assert [each.output_tokens for each in side.arrivals] == [each.output_tokens for each in known]
                separate.append(any(line.get("rest") for line in side.lines))
            assert separate == [False, True]  # TGI's decodes pause while a prompt is computed

    run(test())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("upper=orka", "upper must be one of recorded, static, .*, lightllm; got 'orka'"),
        ("lower=recorded", "lower must be one of static, .*, lightllm; got 'recorded'"),
        ("upper=tgi&lower=tgi", "upper and lower are both 'tgi'; choose two"),
        ("upper=static", "upper and lower are both 'static'"),
    ],
)
def test_sides_that_do_not_exist_are_refused_with_the_list(query: str, message: str) -> None:
    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine()))) as client:
            for source in ("", "&source=demo"):
                refused = await client.get(f"/live/compare?{query}{source}")
                assert (refused.status, refused.error["code"]) == (400, "invalid_value")
                assert re.match(message, refused.error["message"])

    run(test())


def test_the_page_offers_all_presets() -> None:
    for place, extra in (("upper", ["recorded"]), ("lower", [])):
        options = re.search(f'<select id="{place}">(.*?)</select>', live.live_page())
        assert options is not None
        values = re.findall(r'<option(?: value="(\w+)")?(?: selected)?>([^<]+)</option>', options[1])
        assert [value or name for value, name in values] == extra + list(PRESETS)
    assert "<option selected>static</option>" in live.live_page()


def test_only_few_comparisons_of_the_example_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def simulate(request: Request, what: str, lines: bytes, *sides: str) -> bytes:
        return b"{}"

    monkeypatch.setattr(live, "_made", {})
    monkeypatch.setattr(live, "_simulate", simulate)

    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine()))) as client:
            for upper, lower in itertools.permutations(list(PRESETS)[:5], 2):
                assert (await client.get(f"/live/compare?source=demo&upper={upper}&lower={lower}")).status == 200
        assert len(live._made) == live._MOST_MADE
        assert ("demo",) in live._made and ("compare", upper, lower) in live._made

    run(test())


def test_a_client_that_waits_for_the_simulator_holds_no_recording(shown: Any) -> None:
    async def test() -> None:
        copied = []
        shown.live.lines = lambda: copied.append(1) or b"no recording"
        async with serving(make_app(shown)) as client:
            await shown.live.working.acquire()
            waiting = [await client.connect() for _ in range(8)]
            for connection in waiting:
                connection.get("/live/compare")
            await until(lambda: shown.live.num_callers == 8)
            refused = await client.get("/live/compare")
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            for connection in waiting[1:]:
                await connection.close()
            await until(lambda: shown.live.num_callers == 1)
            assert not copied
            shown.live.working.release()
            assert (await waiting[0].reply()).status == 422
            assert copied == [1] and not shown.live.working.locked()

    run(test())


def test_one_key_cannot_take_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MAX_VIEWERS_OF_ONE", 1)
    (tmp_path / "keys").write_text("admin sk-1\nadmin sk-2\nalice sk-3\n")
    first, second = ("Authorization: Bearer sk-1",), ("Authorization: Bearer sk-2",)

    async def test() -> None:
        state = make_state(WatchedEngine(), api_key_file=str(tmp_path / "keys"))
        state.live = LiveFeed(None, recording=b"no recording")
        async with serving(make_app(state)) as client:
            await state.live.working.acquire()
            waiting = [await client.connect() for _ in range(3)]
            for number, connection in enumerate(waiting):
                connection.get("/live/export?format=perfetto" if number else "/live/compare", *first)
            await until(lambda: state.live is not None and state.live.num_callers == 3)
            refused = await client.get("/live/compare", *first)
            assert (refused.status, refused.error["code"]) == (429, "too_many_of_one_key")
            other = await client.connect()
            other.get("/live/compare", *second)
            await until(lambda: state.live is not None and state.live.num_callers == 4)
            for connection in (*waiting, other):
                await connection.close()
            await until(lambda: state.live is not None and not state.live.num_callers)
            state.live.working.release()
            assert not +state.live.num_uses

            state.live = LiveFeed(state.engine)
            viewers = [await client.connect() for _ in range(2)]
            viewers[0].get("/live/events", *first)
            await until(lambda: state.live is not None and state.live.num_viewers == 1)
            refused = await client.get("/live/events", *first)
            assert (refused.status, refused.error["code"]) == (429, "too_many_of_one_key")
            viewers[1].get("/live/events", *second)
            await until(lambda: state.live is not None and state.live.num_viewers == 2)

    run(test())


def test_the_example_is_simulated_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[str] = []

    async def simulate(request: Request, what: str, lines: bytes, *sides: str) -> bytes:
        simulated.append(what)
        await asyncio.sleep(0)
        return what.encode()

    monkeypatch.setattr(live, "_made", {})
    monkeypatch.setattr(live, "_simulate", simulate)

    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine()))) as client:
            paths = ["/live/compare?source=demo", "/live/demo"] * 4
            replies = await asyncio.gather(*(client.get(path) for path in paths))
            assert [reply.body for reply in replies] == [b"compare", b"demo"] * 4
            assert sorted(simulated) == ["compare", "demo"]

    run(test())


def test_a_key_that_may_not_see_the_live_view_may_not_see_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_made", {("demo",): b"{}", ("compare", "recorded", "static"): b"{}"})
    (tmp_path / "keys").write_text("admin sk-1\nalice sk-2\n")

    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine(), api_key_file=str(tmp_path / "keys")))) as client:
            for path in ("/live/demo", "/live/compare?source=demo", "/live/export?source=demo"):
                assert (await client.get(path, "Authorization: Bearer sk-1")).status == 200
                assert (await client.get(path, "Authorization: Bearer sk-2")).status == 403

    run(test())


def test_the_simulator_ends_with_the_server() -> None:
    """Before it reads: what it was to simulate would take it a minute."""
    command = [sys.executable, "-m", LIVE_COMPARISON, str(os.getppid())]  # who is not its parent
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PATIENCE).returncode == 1


def test_a_recording_that_cannot_be_simulated_is_refused_with_the_reason() -> None:
    async def test() -> None:
        state = make_state(WatchedEngine())
        state.live = LiveFeed(None, recording=watched(make_truth(), bursts=0))
        async with serving(make_app(state)) as client:
            refused = await client.get("/live/compare")
            assert (refused.status, refused.error["code"]) == (422, "cannot_simulate")
            assert "record for longer" in refused.error["message"]

    run(test())


def test_the_example_can_be_compared_before_anybody_has_seen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is simulated first; both take the one turn that there is."""
    monkeypatch.setattr("chairlift.server.pages.live._made", {})

    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine()))) as client:
            reply = await client.get("/live/compare?source=demo")
            assert (reply.status, len(read_recording(reply.body.partition(b"\n")[2]).steps) > 300) == (200, True)

    run(test())


def test_the_example_is_a_recording_with_all_there_is_to_see() -> None:
    async def test() -> None:
        async with serving(make_app(make_state(WatchedEngine()))) as client:
            reply = await client.get("/live/demo")
            assert reply.status == 200, reply.body
            example = read_recording(reply.body)
            kinds = {change[0] for line in example.lines for change in line.get("do", ())}
            assert kinds >= {"add", "join", "preempt", "table", "end"}
            assert len(example.steps) > 300
            assert any(each.cached_tokens for each in example.arrivals)
            again = await client.get("/live/export?source=demo")
            assert again.body == reply.body + b"\n"

    run(test())
