"""The engine's side of the process border, with a reader who takes nothing for as long as there is work."""

from __future__ import annotations

import json
from typing import cast

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.core_outputs import CoreOutputs, TokenRecord
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.process import core_process
from chairlift.engine.process.core_process import Connection, CoreProcess
from chairlift.engine.process.messages import (
    Add,
    FrameReader,
    Leave,
    Log,
    Message,
    Ready,
    Refused,
    Step,
    Watch,
    Watched,
)
from chairlift.errors import EngineDeadError
from tests.engine.make import alone, greedy, make_engine
from tests.server.fake_engine import INFO

PROMPT = [1, 2, 3]


class SlowReader:
    """A connection that has no room after a message until the core has nothing to do. Then it takes one each turn, and
    closes. One that is not ``slow`` always has room."""

    def __init__(self, core: EngineCore, messages: list[Message], slow: bool, turns: int) -> None:
        self.closed = False
        self.backlog = 0
        self.frames = FrameReader()
        self.sent: list[Message] = []
        self._core = core
        self._messages = messages
        self._slow = slow
        self._turns = turns

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.backlog = int(self._slow)

    def receive(self, timeout: float | None) -> list[Message]:
        messages, self._messages = self._messages, []
        if not messages and not self._core.has_work:
            self._turns -= 1
            self.closed, self.backlog = not self._turns, 0
        return messages


def serve(*messages: Message, max_num_seqs: int = 4, slow: bool = True, turns: int = 3) -> SlowReader:
    core = make_engine(max_num_seqs=max_num_seqs).core
    reader = SlowReader(core, list(messages), slow, turns)
    CoreProcess(cast(Connection, reader), core, INFO, None, lambda label, share: None).run()
    return reader


def asked(name: str, params: SamplingParams) -> Add:
    return Add.of(PreparedRequest(name, None, PROMPT, params, params.seed or 0, params.max_tokens or 0))


def test_outputs_that_the_socket_refused_are_sent_later_in_one_frame() -> None:
    params = {"a": greedy(5), "b": greedy(9), "c": greedy(7)}
    ready, *steps = serve(*(asked(name, each) for name, each in params.items()), max_num_seqs=2).sent
    assert isinstance(ready, Ready)
    (step,) = steps
    assert isinstance(step, Step) and step.forecast is not None  # somebody had to wait
    outputs = step.outputs
    for name, each in params.items():
        of_it = [token for of, token in zip(outputs.sequence_ids, outputs.token_ids, strict=True) if of == name]
        assert of_it == alone(PROMPT, each)
    assert {ended.sequence_id for ended in outputs.finished} == set(params)
    assert sorted(name for name, _, _ in outputs.joined) == sorted(params)
    assert step.stats.num_finished_sequences == 3


@pytest.mark.parametrize(("most", "frames"), [(0, 6), (4, 2), (6, 1)])
def test_much_waiting_output_is_sent_in_several_frames(monkeypatch: pytest.MonkeyPatch, most: int, frames: int) -> None:
    monkeypatch.setattr(core_process, "_MAX_MERGED", most)
    sent = serve(*(asked(name, greedy(2)) for name in "abc"), max_num_seqs=1, turns=9).sent
    steps = [step.outputs for step in sent if isinstance(step, Step)]
    assert len(steps) == frames
    assert [name for step in steps for name in step.sequence_ids] == [*"aabbcc"]
    assert [token for step in steps for token in step.token_ids] == alone(PROMPT, greedy(2)) * 3
    assert [ended.sequence_id for step in steps for ended in step.finished] == [*"abc"]


@pytest.mark.parametrize("messages", [0, 1])
def test_the_other_processes_of_a_model_are_looked_at_also_without_work(messages: int) -> None:
    core = make_engine().core
    looks: list[bool] = []

    def check_processes() -> None:
        looks.append(core.has_work)
        if not core.has_work:
            raise EngineDeadError("one of them ended")

    core.executor.heartbeat = 0.0  # type: ignore[attr-defined]
    core.executor.check_processes = check_processes  # type: ignore[attr-defined]
    reader = SlowReader(core, [asked("a", greedy(5))] * messages, True, 9)
    with pytest.raises(EngineDeadError, match="one of them ended"):
        CoreProcess(cast(Connection, reader), core, INFO, None, lambda label, share: None).run()
    assert looks[-1] is False
    assert len(looks) == 1 + 5 * messages  # before each step, and once without work


def test_most_of_what_waits_is_log_probabilities() -> None:
    record = TokenRecord([5, 6, 7], [-0.5, -1.0, -2.0], 1)
    outputs = CoreOutputs(["a", "b"], [5, 8], [record, None], prompt_logprobs=[("b", 1, [record] * 4)])
    assert core_process._num_values(outputs) == 2 + 5 * 3


def test_stopped_and_aborted_requests_end_at_once() -> None:
    names = ["a", "b", "c"]
    leave = [Leave(["a"], stopped=True), Leave(["b"], stopped=False)]
    reader = serve(*(asked(name, greedy(5)) for name in names), *leave)
    ended = [each for step in reader.sent if isinstance(step, Step) for each in step.outputs.finished]
    assert [(each.sequence_id, each.finish_reason) for each in ended] == [
        ("a", FinishReason.STOP),
        ("b", FinishReason.ABORT),
        ("c", FinishReason.LENGTH),
    ]


def test_the_last_step_is_shown_though_none_follows() -> None:
    """The clock stands still, so no line is due before there is nothing left to do."""
    sent = serve(Watch(True), asked("a", greedy(5)), slow=False).sent
    (watched,) = [each for each in sent if isinstance(each, Watched)]
    changes = [change for line in watched.lines.splitlines() for change in json.loads(line).get("do", ())]
    assert [change[0] for change in changes if change[0] in ("add", "join", "end")] == ["add", "join", "end"]


def test_an_impossible_message_is_answered_or_counted() -> None:
    reader = serve(asked("a", greedy(5)), asked("a", greedy(5)), Log(20, "chairlift", "not for an engine"))
    (refused,) = [each for each in reader.sent if isinstance(each, Refused)]
    assert refused.request_id == "a" and not refused.too_long and "already" in refused.message
    assert reader.frames.num_bad == 1
