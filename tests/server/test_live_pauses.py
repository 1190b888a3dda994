"""The live view shows which conversations pause for their tools, the leases of their blocks, and what a turn found."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.clock import VirtualClock
from chairlift.engine.step_export import read_recording, to_perfetto
from tests.server.test_live_images import told
from tests.server.watched import make_truth

node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")

_READ = """
const model = new Model(), text = require("fs").readFileSync(0, "utf8");
for (const line of text.split("\\n").filter(Boolean)) model.take(JSON.parse(line));
const open = model.pausesAt(Infinity, model.lastEnd).map(({ id, tools, tokens }) => [id, tools, tokens]);
const resumed = [...model.requests.values()].filter((r) => r.resumed).map((r) => [r.id, r.resumed]);
console.log(JSON.stringify([open, resumed, model.cacheAt(Infinity), model.pausesAt(Infinity, model.lastEnd + 301)]));
"""


class Recorded:
    """An engine whose conversations pause, and the pieces of its recording."""

    def __init__(self, eviction: str, num_blocks: int = 40) -> None:
        self.truth = make_truth(cache_eviction=eviction, num_blocks=num_blocks)
        clock = self.truth.core.clock
        assert isinstance(clock, VirtualClock)
        self.clock = clock
        self.truth.core.watch(True)
        self.pieces: list[bytes] = []
        self.take()

    def take(self) -> None:
        recorder = self.truth.core.recorder
        assert recorder is not None
        if piece := recorder.take():
            self.pieces.append(piece)

    def run(self, name: str, prompt: list[int], tools: list[str] | None = None) -> list[int]:
        """Serve a request, whose answer calls ``tools``. Returns prompt and answer."""
        engine = self.truth.engine
        engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True, seed=1), request_id=name)
        answer: list[int] = []
        while engine.has_unfinished:
            for output in engine.step():
                answer = list(output.outputs[0].token_ids) if output.finished else answer
            self.take()
        self.truth.core.paused(name, tools or [])
        self.take()
        self.clock.advance(2.0)
        return prompt + answer


@pytest.fixture
def recorded() -> Recorded:
    made = Recorded("lease")
    said = made.run("first", [*range(17)], ["search", "read"])
    made.run("second", [5] * 14, ["run"])
    made.run("next", [*said, 1, 2, 3])
    return made


@node
def test_the_page_knows_the_pauses_and_what_a_turn_found(recorded: Recorded) -> None:
    open_pauses, resumed, (leased, budget, *times), none = told(_READ, b"\n".join(recorded.pieces))
    assert open_pauses == [["second", ["run"], 18]]
    assert none == [], "a pause of more than five minutes is over"
    ((name, found),) = resumed
    assert (name, found["tools"], found["cache"]) == ("next", ["search", "read"], "kept")
    assert found["gap"] == pytest.approx(4.0, abs=0.1)
    kv = recorded.truth.core.kv
    leases = kv.eviction.leases()
    assert leases is not None
    assert [leased, budget] == [sum(leases.num_by_level.values()), leases.budget] == [4, 19]
    assert times[:2] == [5, pytest.approx(20.0, abs=0.5)], "five blocks were used again, each after four seconds"


@node
def test_a_page_that_is_opened_later_knows_the_open_pauses(recorded: Recorded) -> None:
    recorded.truth.core.watch(False)
    recorded.truth.core.watch(True)
    recorded.pieces = []
    recorded.take()
    open_pauses, resumed, (leased, *_), _ = told(_READ, b"\n".join(recorded.pieces))
    assert (open_pauses, resumed, leased) == ([["second", ["run"], 18]], [], 4)


@node
def test_a_turn_whose_cache_was_evicted_shows_the_reason() -> None:
    made = Recorded("lru", num_blocks=15)
    said = made.run("first", [*range(17)], ["search"])
    made.run("flood", [7] * 44)
    made.run("next", [*said, 1])
    _, resumed, (_, budget, _, _, evicted, _), _ = told(_READ, b"\n".join(made.pieces))
    assert [found["cache"] for _, found in resumed] == ["no_lease"]
    assert budget == 0 and evicted


_TEXTS = """
const pause = { tools: ["search", "read"], t: 10, tokens: 2040, until: 30 };
console.log(JSON.stringify([pauseText(pause, 22.5), pauseText(pause, 31), pauseText({ ...pause, until: 0 }, 11),
  cacheText([4, 20, 10, 32, 3, 60]), cacheText([0, 0, 0, 0, 0, 0])]));
"""


@node
def test_the_texts_name_times_and_leases() -> None:
    assert told(_TEXTS) == [
        "waits for search, read, 13 s so far; 2,040 tokens, its lease ends in 7.5 s",
        "waits for search, read, 21 s so far; 2,040 tokens, its lease has ended",
        "waits for search, read, 1.0 s so far; 2,040 tokens, no lease",
        "Leases hold 4 of at most 20 unused blocks. Blocks were used again 10 times, on average 3.2 s after their last"
        " use. 3 blocks were evicted, on average 20 s after their last use.",
        "",
    ]


def test_a_recording_with_pauses_can_be_read_and_exported(recorded: Recorded) -> None:
    data = b"\n".join(recorded.pieces)
    requests = read_recording(data).requests.values()
    assert [each.request_id for each in requests] == ["first", "second", "next"]
    events: list[dict[str, Any]] = json.loads(to_perfetto(data))["traceEvents"]
    found = {each["name"]: each["args"] for each in events if each["name"] in ("pause", "resume")}
    assert found["pause"]["tools"] == ["run"]
    assert found["pause"]["lease_seconds"] > 0
    assert (found["resume"]["request"], found["resume"]["cache"]) == ("next", "kept")
