"""A recording says what happened, and its exports keep to the formats that they claim."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from chairlift.engine.step_export import read_recording, to_perfetto
from chairlift.engine.step_recorder import FORMAT
from chairlift.errors import ConfigError
from chairlift_lab.sim.simulator import Simulation
from chairlift_lab.sim.world import make_world
from tests.server.watched import Tables, Truth, make_truth

MODES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "host": 60},
    "ahead": {"num_lookahead_steps": 1},
    "two ahead": {"num_lookahead_steps": 2, "preemption_mode": "swap", "host": 30},
    "windows": {"windows": (None, 8), "num_blocks": 44},
    "apart": {"prefill_mode": "separate"},
    "prompts first": {"prefill_mode": "prefill_first"},
    "static": {"batching": "static", "num_blocks": 200},
    "dynamic": {"batching": "dynamic", "num_blocks": 200},
}

IMAGE_SEEDS = 14, 374, 1032, 3774
"""Seeds of simulated worlds with images, most of which give up rows and encode them again."""

HEAD = json.dumps(
    {
        "key": {
            "format": FORMAT,
            **dict.fromkeys(
                ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "block_bytes"), 8
            ),
            "pools": [14],
            "settings": {},
        }
    },
    separators=(",", ":"),
).encode()


class Reader:
    """The lines as docs/live-view.md describes them, read in the plainest way."""

    def __init__(self) -> None:
        self.ids: dict[int, str] = {}
        self.tables: Tables = {}
        self.decodes: dict[int, str] = {}
        self.rows: dict[str, list[tuple[int, int, int, str]]] = {}
        self.at: dict[int, Tables] = {}
        self.cached: list[set[int]] = []
        """Blocks that were left with something in them, per pool: some may have an owner again."""
        self.slots: dict[int, str] = {}
        self.problems: list[str] = []
        self.known = False

    def take(self, line: dict[str, Any]) -> None:
        if "key" in line and not line["key"].get("past"):
            self.known = True
            for fields in line["key"]["requests"]:
                self.ids[fields[0]] = fields[1]
                self.tables[fields[1]] = [list(table) for table in fields[-1]]
                if fields[7] >= 0:
                    self.slots[fields[7]] = fields[1]
            self.decodes = {slot: self.ids.get(number, "gone") for slot, number in line["key"]["on"]}
            self.cached = [set(blocks) for blocks in line["key"]["cached"]]
        for change in line.get("do", ()):
            self.change(*change)
        if "step" in line:
            self.step(line)

    def change(self, what: str, number: int, *fields: Any) -> None:
        if what == "add":
            self.ids[number] = fields[1]
        elif what == "seen":
            self.ids[number] = fields[0]
        name = self.ids[number]
        if what == "table":
            group, first, blocks, known = fields
            if self.known:
                self.cached[group] = self.cached[group] - set(blocks) | set(known)
            own = self.tables.setdefault(name, [])
            while len(own) <= group:
                own.append([])
            table = own[group]
            if first < 0:
                table[:-first] = [0] * -first
            else:
                del table[first:]
                table += blocks
        elif what == "join":
            if fields[1] in self.slots:
                self.problems.append(f"{name} joins in the row of {self.slots[fields[1]]}")
            self.slots[fields[1]] = name
        elif what == "end" or (what == "preempt" and fields[1] in ("swap", "recompute")):
            self.slots = {slot: other for slot, other in self.slots.items() if other != name}
            if what == "end":
                self.tables.pop(name, None)

    def step(self, line: dict[str, Any]) -> None:
        step = line["step"]
        for slot in line.get("off", ()):
            del self.decodes[slot]
        for slot, number in line.get("on", ()):
            self.decodes[slot] = self.ids[number]
        for slot, name in () if line.get("rest") else self.decodes.items():
            self.rows.setdefault(name, []).append((step, slot, 1, "decode"))
        for number, slot, _, count, _, why in line.get("chunks", ()):
            self.rows.setdefault(self.ids[number], []).append((step, slot, count, why))
        if self.known:
            self.at[step] = {name: [list(t) for t in own] for name, own in self.tables.items() if any(map(any, own))}


def owned(tables: Tables) -> Tables:
    return {name: own for name, own in tables.items() if any(map(any, own))}


def kept(truth: Truth) -> list[set[int]]:
    """Blocks that nobody owns and that the prefix cache would give to a prompt that begins alike, per pool."""
    return [
        {block for block, node in enumerate(pool.nodes) if node is not None and not pool.ref_counts[block]}
        for pool in truth.core.kv.pools
    ]


def watched(truth: Truth, before: int = 0, **load: Any) -> bytes:
    """A run of which the first steps were not watched, taken in pieces."""
    pieces = []
    if before:
        truth.burst(7)
        for _ in range(before):
            truth.step()
    truth.core.watch(True)
    recorder = truth.core.recorder
    assert recorder is not None
    step = truth.step

    def step_and_take() -> None:
        step()
        if truth.core.scheduler.step % 7 == 0:
            pieces.append(recorder.take())

    truth.step = step_and_take  # type: ignore[method-assign]
    truth.run(**{"bursts": 5, **load})
    return b"\n".join(piece for piece in [*pieces, recorder.take(), recorder.take()] if piece)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [0, 23])
def test_a_reader_of_the_lines_knows_the_true_rows(mode: str, before: int) -> None:
    truth = make_truth(seed=len(mode) + before, **MODES[mode])
    reader = Reader()
    for line in watched(truth, before).splitlines():
        reader.take(json.loads(line))
    assert reader.rows == truth.rows
    assert reader.problems == []
    assert not reader.slots and not owned(reader.tables)
    assert any(reader.cached) and reader.cached == kept(truth)
    assert len(reader.at) > 50
    late = 2 * truth.core.num_lookahead_steps  # what was in flight at the beginning is told once more
    for step in sorted(reader.at)[late:]:
        assert reader.at[step] == owned(truth.tables[step]), f"step {step}"
    assert truth.aborted
    truth.engine.check_invariants()


def test_the_test_worlds_contain_every_kind_of_event() -> None:
    for mode, how in (("recompute", "recompute"), ("swap", "swap"), ("ahead", "tail")):
        kinds: set[str] = set()
        for seed in range(3, 9):  # what costs least is measured: a busy machine prefers another way now and then
            lines = [json.loads(line) for line in watched(make_truth(seed=seed, **MODES[mode]), bursts=8).splitlines()]
            kinds |= {change[3] for line in lines for change in line.get("do", ()) if change[0] == "preempt"}
            if how in kinds:
                break
        assert how in kinds, mode
    static = watched(make_truth(seed=3, **MODES["static"])).decode()
    assert '["hold",' in static


def test_a_recorder_that_is_closed_leaves_no_trace() -> None:
    truth = make_truth()
    truth.core.watch(True)
    truth.burst(5)
    truth.step()
    truth.core.watch(False)
    assert truth.core.recorder is None and truth.core.kv.tables.journal is None
    truth.run(2)
    truth.core.watch(False)
    assert truth.core.recorder is None
    truth.core.watch(True)
    recorder = truth.core.recorder
    truth.core.watch(True)
    assert recorder is not None and truth.core.recorder is recorder


def test_a_snapshot_says_when_it_was_and_what_is_set() -> None:
    truth = make_truth(preemption_mode="swap")
    truth.burst(3)
    truth.step()
    before = time.time()
    truth.core.watch(True)
    recorder = truth.core.recorder
    assert recorder is not None
    for line in recorder.take().splitlines():
        if about := json.loads(line).get("key"):
            now = about["unix"] + truth.core.clock.now()
            assert before - 0.001 <= now <= time.time() + 0.001
            assert about["settings"] == {"max_num_seqs": 5, "max_num_batched_tokens": 24, "preemption_mode": "swap"}
    assert truth.core.clock.now() > 0.004


def test_steady_steps_are_short_whatever_their_rows() -> None:
    sizes = []
    for rows in (4, 64):
        truth = make_truth(num_blocks=4000, max_num_seqs=rows, max_num_batched_tokens=4096)
        truth.burst(rows)
        for _ in range(3):
            truth.engine.step()
        truth.core.watch(True)
        recorder = truth.core.recorder
        assert recorder is not None
        recorder.take()
        truth.engine.step()
        lines = [line for line in recorder.take().splitlines() if b'"do"' not in line]
        sizes += [len(line) for line in lines]
    assert max(sizes, default=0) < 120


def test_lines_that_nobody_takes_are_bounded_and_start_again_with_a_snapshot() -> None:
    truth = make_truth(num_blocks=60)
    truth.core.watch(True)
    recorder = truth.core.recorder
    assert recorder is not None
    recorder._most_bytes = 20_000
    most = 0
    for _ in range(12):
        truth.run(1)
        most = max(most, recorder.num_bytes)
    assert most < 40_000
    lines = recorder.take().splitlines()
    first = json.loads(lines[0])["key"]
    assert not first.get("past") and first["after"] > 100
    reader = Reader()
    for line in lines:
        reader.take(json.loads(line))
    assert all(reader.at[step] == owned(truth.tables[step]) for step in reader.at)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_reader_may_begin_at_every_snapshot(depth: int) -> None:
    truth = make_truth(num_blocks=50, preemption_mode="recompute", num_lookahead_steps=depth)
    truth.core.watch(True)
    recorder = truth.core.recorder
    assert recorder is not None
    pieces = []
    for _ in range(6):
        truth.burst(9)
        for _ in range(30):
            truth.step()
        recorder._since_key = 1 << 30  # as if much had been told: a snapshot is due
        pieces.append(recorder.take())
    later = pieces[3:]
    assert later[0].startswith(b'{"key":') and b'"past"' not in later[0].partition(b"\n")[0]
    reader = Reader()
    first = json.loads(later[0].partition(b"\n")[0])["key"]
    for line in b"\n".join(later).splitlines():
        reader.take(json.loads(line))
    for name, rows in reader.rows.items():
        assert rows == [row for row in truth.rows[name] if first["after"] < row[0] <= max(reader.at)]
    recording = read_recording(b"\n".join(later))
    ended = [each for each in recording.requests.values() if each.reason == "length"]
    ended = [each for each in ended if each.request_id in truth.answers]  # not one whose twin goes on
    assert len(ended) > 5
    assert all(each.output_tokens == truth.answers[each.request_id] for each in ended)
    steps = [event for event in check_trace_events(to_perfetto(b"\n".join(later))) if event["name"] == "step"]
    for event in steps:
        rows = [row for own in truth.rows.values() for row in own if row[0] == event["args"]["step"]]
        assert event["args"]["decodes"] == sum(row[3] == "decode" for row in rows)
    # A snapshot shows block tables as they are now, which steps in flight may have begun with others.
    keys = [json.loads(piece.partition(b"\n")[0])["key"]["after"] for piece in later]
    exact = [step for step in reader.at if not any(key < step <= key + depth for key in keys)]
    assert len(exact) > 80 and all(reader.at[step] == owned(truth.tables[step]) for step in exact)


# --- reading and exporting -------------------------------------------------------------------------------------------


def test_a_recording_knows_its_requests() -> None:
    truth = make_truth(seed=5, preemption_mode="recompute")
    recording = read_recording(watched(truth))
    by_id = {each.request_id: each for each in recording.requests.values()}
    assert set(by_id) >= set(truth.rows)
    for name, tokens in truth.answers.items():
        if name.split("#")[0] not in truth.aborted:
            assert by_id[name].output_tokens == tokens
            assert by_id[name].reason == "length"
    assert {name.split("#")[0] for name, each in by_id.items() if each.reason == "abort"} <= truth.aborted
    assert [each.arrival for each in recording.arrivals] == sorted(each.arrival for each in recording.arrivals)
    assert len(recording.steps) == len(truth.tables)
    assert all(features.num_decodes + features.prefill_tokens > 0 for features, _ in recording.steps)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "its first line must be a snapshot"),
        (b"{}", "its first line must be a snapshot"),
        (b"[1]", "line 1 of the recording is not a JSON object"),
        (b"\xff\xfe{", "line 1 of the recording is not a JSON object"),
        (b"[" * 100_000, "line 1 of the recording is not a JSON object"),
        (b'{"key":{"format":"other-2"}}', "the recording is in the format 'other-2'"),
        (b'{"key":5}', "its first line must be a snapshot"),
        (f'{{"key":{{"format":"{FORMAT}"}}}}'.encode(), "first line must have settings and max_num_seqs"),
        (HEAD.replace(b'"pools":[14]', b'"pools":[]'), "first line must have settings and max_num_seqs"),
        (HEAD.replace(b'"pools":[14]', b'"pools":14'), "first line must have settings and max_num_seqs"),
        (HEAD.replace(b'"pools":[14]', b'"pools":[1e9]'), "first line must have settings and max_num_seqs"),
        (HEAD + b'\n{"step":1}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"do":[["end"]]}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"do":5}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"step":1,"t":["a","b"]}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"step":1,"t":[0,1],"ctx":null}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"step":1,"t":[0,1],"ctx":1e400}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"step":1,"t":[0,1],"ctx":-5}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"at":1,"images":[1,0,0,-5,0,0]}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"step":1,"t":[0,1],"images":[1,0,0,5,0]}', "line 2 of the recording cannot be read"),
        (HEAD + b'\n{"step":1,"t":[0,1],"images":[1,0,0,5,0,"no"]}', "line 2 of the recording cannot be read"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(data: bytes, message: str) -> None:
    for read in (read_recording, to_perfetto):
        with pytest.raises(ConfigError, match=message):
            read(data)


def check_trace_events(data: bytes) -> list[dict[str, Any]]:
    """Chrome's Trace Event Format, JSON object form, as documented: every field of every kind of event."""
    trace = json.loads(data)
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData", "metadata"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[str, int, int]] = set()
    for event in trace["traceEvents"]:
        kind = event["ph"]
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["name"], str)
        fields = {"ph", "pid", "tid", "name"}
        if kind == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert set(event) == fields | {"args"} and set(event["args"]) == {"name"}
            named.add((event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0))
            continue
        assert type(event["ts"]) in (int, float) and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if kind == "X":
            assert set(event) == fields | {"ts", "dur", "args"}
            assert type(event["dur"]) in (int, float) and event["dur"] >= 0
            assert ("thread_name", event["pid"], event["tid"]) in named
        elif kind == "C":
            assert set(event) == fields | {"ts", "args"}
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())
        elif kind == "i":
            assert set(event) == fields | {"ts", "s", "args"} and event["s"] in ("g", "p", "t")
        else:
            raise AssertionError(f"an event of kind {kind!r}")
        assert ("process_name", event["pid"], 0) in named
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def overlaps(events: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Complete events of one thread that overlap without one holding the other, which the format forbids."""
    found = []
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        lane.sort(key=lambda event: event["ts"])
        for one, other in itertools.pairwise(lane):
            if other["ts"] < one["ts"] + one["dur"] - 0.01:
                found.append((one, other))
    return found


@pytest.mark.parametrize("mode", ["recompute", "ahead", "apart", "static"])
def test_trace_events_keep_to_their_format_and_to_the_truth(mode: str) -> None:
    truth = make_truth(seed=11, **MODES[mode])
    events = check_trace_events(to_perfetto(watched(truth)))
    assert overlaps(events) == []
    steps = [event for event in events if event["ph"] == "X" and event["name"] == "step"]
    assert [event["args"]["step"] for event in steps] == sorted(truth.tables)
    for event in steps:
        rows = [row for own in truth.rows.values() for row in own if row[0] == event["args"]["step"]]
        assert event["args"]["decodes"] == sum(row[3] == "decode" for row in rows)
        assert event["args"]["prompt_tokens"] == sum(row[2] for row in rows if row[3] != "decode")
    chunks = [event for event in events if event["ph"] == "X" and event["name"] in ("prefill", "recompute", "stalled")]
    assert len(chunks) == sum(row[3] != "decode" for own in truth.rows.values() for row in own)
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")
    decoding = {event["args"]["request"] for event in events if event["name"] == "decode"}
    assert decoding == {name for name, own in truth.rows.items() if any(row[3] == "decode" for row in own)}
    arrivals = [event["args"]["request"] for event in events if event["name"] == "arrival"]
    assert len(arrivals) == len(set(arrivals)) >= len(truth.rows)


def test_a_recording_contains_no_token_of_a_request() -> None:
    truth = make_truth(seed=2)
    fields = set()
    for line in watched(truth).splitlines():
        fields |= json.loads(line).keys()
    assert fields <= {"key", "step", "t", "do", "on", "off", "rest", "ctx", "chunks", "state", "at", "cache"}


def watched_images(seed: int, pieces: int = 7) -> tuple[Simulation, list[bytes]]:
    """A simulated engine that has read images, and its lines, taken every few steps."""
    simulation, found = Simulation(make_world(seed)), list[bytes]()
    core = simulation.engine.core
    core.watch(True)
    recorder = core.recorder
    assert recorder is not None
    step = simulation.engine.step

    def step_and_take() -> Any:
        outputs = step()
        if simulation.num_steps % pieces == 0:
            found.append(recorder.take())
        return outputs

    simulation.engine.step = step_and_take  # type: ignore[method-assign]
    simulation.run()
    return simulation, [piece for piece in [*found, recorder.take(), recorder.take()] if piece]


@pytest.mark.parametrize("seed", IMAGE_SEEDS)
def test_records_and_lines_count_tiles(seed: int) -> None:
    simulation, pieces = watched_images(seed)
    images, log = simulation.engine.core.preparers.images, list(simulation.engine.step_log)
    end = images.state()
    counted = [
        sum(getattr(record, f"num_tiles_{name}") for record in log) for name in ("encoded", "given_up", "reencoded")
    ]
    later = images.since_step()  # the encoder may have worked after the last step
    assert [one + other for one, other in zip(counted, later, strict=False)] == list(end[:3])
    assert end[:4] == (images.num_encoded, images.num_given_up, images.num_reencoded, images.num_bytes)
    lines = [json.loads(line) for piece in pieces for line in piece.splitlines()]
    after = {record.step: record.image_bytes for record in log}
    state = next(line["key"]["images"] for line in lines if "images" in line.get("key", {}))
    assert all(
        line["key"]["max_image_bytes"] == (images.limit or 0) for line in lines if "images" in line.get("key", {})
    )
    for line in lines:
        if "images" in line:
            assert line["images"] != state, "only changes are written"
        state = line.get("images", state)
        if "step" in line:
            assert state[3] == after[line["step"]]
    assert tuple(state) == end


def test_the_worlds_with_images_encode_again() -> None:
    """What the test above compares is not 0 everywhere."""
    ends = [watched_images(seed)[0].engine.core.preparers.images.state() for seed in IMAGE_SEEDS]
    assert all(any(end[at] for end in ends) for at in range(3)), ends


def test_requests_whose_images_are_not_encoded_are_waiting() -> None:
    """The page shows the reason only if requests wait."""
    pieces = [piece for seed in IMAGE_SEEDS for piece in watched_images(seed)[1]]
    lines = [json.loads(line) for piece in pieces for line in piece.splitlines()]
    reasons = [(line["state"][1], line["state"][0]) for line in lines if "state" in line and line["state"][1]]
    assert any(why == "image" for why, _ in reasons)
    assert all(num_waiting for _, num_waiting in reasons)
    assert any("step" not in line and line.get("state", ("", ""))[1] == "image" for line in lines), "no step runs"


def test_a_new_recorder_begins_with_the_state_of_images() -> None:
    simulation, _ = watched_images(374)
    core = simulation.engine.core
    core.watch(False)
    core.watch(True)
    recorder = core.recorder
    assert recorder is not None
    lines = [json.loads(line) for line in recorder.take().splitlines()]
    assert [line["key"]["images"] for line in lines if "images" in line.get("key", {})] == [
        list(core.preparers.images.state())
    ]
    assert not any("images" in line for line in lines), "of earlier steps only the rows are known"


def test_the_trace_and_the_reader_know_the_images() -> None:
    simulation, pieces = watched_images(374)
    data, end = b"\n".join(pieces), simulation.engine.core.preparers.images.state()
    assert read_recording(data).lines
    counters: dict[str, dict[str, int]] = {}
    for event in check_trace_events(to_perfetto(data)):
        if event["ph"] == "C":
            counters[event["name"]] = event["args"]
    assert counters["image tiles"] == {"encoded": end[0], "given up": end[1], "encoded again": end[2]}
    assert counters["image memory"] == {"bytes": end[3]}
    assert counters["image tiles in the queue"] == {"tiles": end[4]}


@pytest.mark.parametrize("seed", IMAGE_SEEDS)
def test_recordings_without_images_in_their_lines_still_load(seed: int) -> None:
    """Recordings of earlier versions have no such fields."""
    _, pieces = watched_images(seed)
    lines = [json.loads(line) for piece in pieces for line in piece.splitlines()]
    new = read_recording(b"\n".join(pieces))
    for line in lines:
        line.pop("images", None)
        for name in ("images", "max_image_bytes"):
            line.get("key", {}).pop(name, None)
    data = b"\n".join(json.dumps(line).encode() for line in lines)
    old = read_recording(data)
    assert (old.requests, old.steps, old.end) == (new.requests, new.steps, new.end)
    assert not any("image" in event["name"] for event in check_trace_events(to_perfetto(data)))


def test_a_text_model_writes_nothing_of_images() -> None:
    assert b"image" not in watched(make_truth(seed=3))
