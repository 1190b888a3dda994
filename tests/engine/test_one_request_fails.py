"""Output that cannot be made ends its own request with an error, in whichever process; the others do not notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from chairlift.base.outputs import FinishReason, OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.step_batch import PromptLogprobs, SampledTokens, StepBatch
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence, TokenRecord
from chairlift.engine.detokenizer import IncrementalDetokenizer
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.output_processor import OutputProcessor, RequestState
from chairlift.engine.output_stream import OutputStream
from chairlift.engine.process.core_process import Connection, CoreProcess
from chairlift.engine.process.messages import Message, Refused, Step
from chairlift.errors import OverloadedError
from chairlift.metrics.stats import RequestStats
from chairlift.models.hashlm import HashLM
from chairlift.models.hashlm_served import logprobs_of
from tests.e2e.oracle import expected_hashlm
from tests.engine.make import alone, drain, greedy, make_engine
from tests.engine.test_async_engine import LONG, collect, quiet, running
from tests.engine.test_core_process import SlowReader, asked
from tests.server.fake_engine import INFO

PROMPT = [1, 2, 3]
FAULTS = (MemoryError, RuntimeError, ValueError)


class BrokenText(IncrementalDetokenizer):
    """Raises wherever it is asked for one of ``breaks``."""

    def __init__(self, fault: type[Exception], breaks: str) -> None:
        self._fault, self._breaks = fault, breaks

    def _may(self, what: str) -> None:
        if what == self._breaks:
            raise self._fault("no room for this text")

    def update(self, token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        self._may("update")
        return None

    def finish(self) -> str | None:
        self._may("finish")
        return None

    @property
    def text(self) -> str:
        self._may("text")
        return ""

    def take_delta(self, finished: bool) -> str:
        self._may("delta")
        return ""


class BrokenList(list[Any]):
    def append(self, value: Any) -> None:
        raise MemoryError


def break_text(state: RequestState, fault: type[Exception], breaks: str) -> None:
    for answer in state.answers:
        answer.detokenizer = BrokenText(fault, breaks)


def ended_badly(outputs: Sequence[RequestOutput], fault: type[Exception]) -> bool:
    last = outputs[-1]
    return (
        last.finished
        and all(answer.finish_reason is FinishReason.ERROR for answer in last.outputs)
        and fault.__name__ in (last.error or "")
        and "no room" not in (last.error or "")  # what the exception says is for the log
    )


# --- the front --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("breaks", ["update", "finish", "text"])
@pytest.mark.parametrize("membership", ["continuous", "static"])
def test_text_that_cannot_be_made_ends_its_own_request(fault: type[Exception], breaks: str, membership: str) -> None:
    engine = make_engine(text=True, batching=membership)
    for name in "abc":
        engine.add_request(PROMPT, greedy(6, stop=["never there"]), request_id=name)
    break_text(engine._outputs._states["b"], fault, breaks)
    outputs = drain(engine)
    assert ended_badly(outputs["b"], fault)
    for name in "ac":
        assert outputs[name][-1].outputs[0].token_ids == alone(PROMPT, greedy(6))
    engine.add_request(PROMPT, greedy(3), request_id="b")  # nothing is left of it
    assert drain(engine)["b"][-1].outputs[0].token_ids == alone(PROMPT, greedy(3))


def test_a_request_that_cannot_be_taken_in_is_refused_and_nothing_of_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, greedy(6), request_id="a")

    def full(*_: Any) -> None:
        raise MemoryError

    for seam in (engine._outputs, engine.core.causes):
        with monkeypatch.context() as patch:
            patch.setattr(seam, "add" if seam is engine._outputs else "added", full)
            with pytest.raises(MemoryError):
                engine.add_request(PROMPT, greedy(6, n=2), request_id="b")
    engine.add_request(PROMPT, greedy(6), request_id="b")
    outputs = drain(engine)
    assert {name: outputs[name][-1].outputs[0].token_ids for name in "ab"} == dict.fromkeys(
        "ab", alone(PROMPT, greedy(6))
    )


def front() -> tuple[OutputProcessor, RequestStats]:
    stats = RequestStats()
    outputs = OutputProcessor(None, (), stats)
    for name in "abc":
        params = SamplingParams(logprobs=1, prompt_logprobs=1)
        outputs.add(PreparedRequest(name, None, PROMPT, params, 0, 10, arrival_time=100.0), stream=True)
    return outputs, stats


RECORD = TokenRecord([5, 6], [-0.5, -1.0], 1)
UNEVEN = TokenRecord([5, 6], [-0.5], 1)
"""Fewer log-probabilities than ids: it cannot be read."""


@pytest.mark.parametrize(
    "step",
    [
        CoreOutputs(["a", "b", "c"], [5, 5, 5], [RECORD, UNEVEN, RECORD]),
        CoreOutputs(["a", "b", "c"], [5, 5, 5], [RECORD] * 3, prompt_logprobs=[("b", 1, [UNEVEN]), ("c", 1, [RECORD])]),
    ],
)
def test_log_probabilities_that_cannot_be_made_end_their_own_request(step: CoreOutputs) -> None:
    outputs, stats = front()
    assert outputs.take(step, 101.0) == []
    ((broken, sequences),) = outputs.take_broken()
    assert (broken.request_id, sequences, broken.failure) == ("b", ["b"], FinishReason.ERROR)
    assert broken.output().outputs[0].token_ids == []  # a token and what was asked about it, or neither
    assert outputs.take_broken() == [] and outputs.ids() == ["a", "c"]
    outputs.finish([FinishedSequence("a", FinishReason.LENGTH), FinishedSequence("b", FinishReason.LENGTH)], 102.0)
    assert outputs.ids() == ["c"]
    assert stats.finished == {FinishReason.ERROR: 1, FinishReason.LENGTH: 1}


def test_an_end_that_cannot_be_counted_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, stats = front()
    outputs.take(CoreOutputs(["a"], [5], [RECORD]), 101.0)
    monkeypatch.setattr(stats, "request_finished", lambda record: [].append(record.no_such_field))
    (state,) = outputs.finish([FinishedSequence("a", FinishReason.LENGTH)], 102.0)
    assert state.finished and state.failure is None and outputs.ids() == ["b", "c"]


# --- the core ---------------------------------------------------------------------------------------------------------


class NoRoom:
    """Ids of which no list can be made."""

    def tolist(self) -> list[int]:
        raise MemoryError


class LogprobsFail(HashLM):
    """Reports log-probabilities; those of the prompt [4, 4, 4] cannot be made, or handed on."""

    where = ""

    def sample(self, hidden: Any, batch: StepBatch, masks: Any = None) -> SampledTokens:
        tokens = super().sample(hidden, batch, masks)
        counts = [batch.sampling[row].params.logprobs for row in batch.sample_rows.tolist()]
        pairs = zip(tokens.token_ids, counts, strict=True)
        entries: list[Any] = [None if count is None else logprobs_of(token, count) for token, count in pairs]
        for index, row in enumerate(batch.sample_rows.tolist()):
            if self.where == "token" and batch.tokens[batch.slots[row], 0] == 4:
                entries[index] = type("Entry", (), {"token_ids": NoRoom(), "logprobs": NoRoom(), "rank": 1})
        tokens.logprobs = entries
        for row, first, known in batch.prompt_rows:
            count = int(batch.cu_seqlens[row + 1] - batch.cu_seqlens[row])
            of_prompt: list[Any] = [logprobs_of(int(token), 1) for token in known[first + 1 : first + 1 + count]]
            error = ""
            if known[0] == 4 and self.where == "prompt":
                of_prompt = [type("Entry", (), {"token_ids": NoRoom(), "logprobs": NoRoom(), "rank": 1})]
            elif known[0] == 4 and self.where == "runner":
                of_prompt, error = [], "MemoryError in the runner"
            tokens.prompt_logprobs.append(PromptLogprobs(int(batch.slots[row]), first + 1, of_prompt, error))
        return tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["token", "prompt", "runner"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_output_that_the_core_cannot_pass_on_ends_its_own_request(where: str, depth: int, n: int) -> None:
    engine = make_engine(model=type("Fails", (LogprobsFail,), {"where": where}), num_lookahead_steps=depth)
    params = greedy(6, logprobs=1, prompt_logprobs=1)
    for name, prompt in {"a": PROMPT, "b": [4, 4, 4], "c": PROMPT}.items():
        engine.add_request(
            prompt, params if name != "b" else greedy(6, logprobs=1, prompt_logprobs=1, n=n), request_id=name
        )
    outputs = drain(engine)
    assert FinishReason.ERROR in [answer.finish_reason for answer in outputs["b"][-1].outputs]
    assert "MemoryError" in (outputs["b"][-1].error or "")
    for name in "ac":
        answer = outputs[name][-1].outputs[0]
        assert answer.token_ids == alone(PROMPT, greedy(6)) and len(answer.logprobs or ()) == 6


class NoRoomFor(SlowReader):
    """A connection that can make no frame with log-probabilities of ``b`` in it."""

    def send(self, message: Message) -> None:
        if isinstance(message, Step):
            outputs = message.outputs
            records = dict(
                zip(outputs.sequence_ids, outputs.logprobs or [None] * len(outputs.sequence_ids), strict=True)
            )
            if records.get("b") is not None or any(name == "b" for name, _, _ in outputs.prompt_logprobs):
                raise MemoryError
        super().send(message)


def test_a_frame_that_cannot_be_made_costs_the_request_that_makes_it_large() -> None:
    core = make_engine(model=LogprobsFail).core
    messages: list[Message] = [
        asked("a", greedy(5)),
        asked("b", greedy(5, logprobs=2)),
        asked("c", greedy(5, logprobs=1)),
    ]
    reader = NoRoomFor(core, messages, slow=False, turns=3)
    CoreProcess(cast(Connection, reader), core, INFO, None, lambda label, share: None).run()
    steps = [each.outputs for each in reader.sent if isinstance(each, Step)]
    ended = {each.sequence_id: each for step in steps for each in step.finished}
    expected = {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    assert {name: each.finish_reason for name, each in ended.items()} == expected
    assert "MemoryError" in (ended["b"].error or "")
    tokens = [token for step in steps for of, token in zip(step.sequence_ids, step.token_ids, strict=True) if of == "a"]
    assert tokens == alone(PROMPT, greedy(5))


def test_a_request_that_the_core_has_no_room_for_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_engine().core
    add = core.scheduler.add

    def full(request: Any) -> None:
        if request.request_id == "b#1":
            raise MemoryError
        add(request)

    monkeypatch.setattr(core.scheduler, "add", full)
    reader = SlowReader(core, [asked("a", greedy(5)), asked("b", greedy(5, n=2))], slow=False, turns=3)
    CoreProcess(cast(Connection, reader), core, INFO, None, lambda label, share: None).run()
    (refused,) = [each for each in reader.sent if isinstance(each, Refused)]
    assert refused.request_id == "b" and refused.failed and "later" in refused.message
    ended = [each for step in reader.sent if isinstance(step, Step) for each in step.outputs.finished]
    assert [(each.sequence_id, each.finish_reason) for each in ended] == [("a", FinishReason.LENGTH)]
    core.scheduler.check_invariants()


def test_a_record_of_steps_that_fails_ends_and_the_engine_goes_on() -> None:
    engine = make_engine()
    engine.core.watch(True)
    recorder = engine.core.recorder
    assert recorder is not None
    recorder._write = BrokenList().append  # type: ignore[method-assign]
    engine.add_request(PROMPT, greedy(6), request_id="a")
    assert drain(engine)["a"][-1].outputs[0].token_ids == alone(PROMPT, greedy(6))
    assert engine.core.recorder is None


# --- both processes ---------------------------------------------------------------------------------------------------


class FailingWatcher:
    def began(self, stream: OutputStream) -> None:
        raise MemoryError

    def ended(self, stream: OutputStream, cut_off: FinishReason | None, now: float) -> None:
        raise MemoryError


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_the_server_s_other_requests_are_answered_by_the_same_engine() -> None:
    async def test() -> None:
        async with running("hashlm:2ms") as engine:
            engine.events.subscribe("broken", FailingWatcher())
            pid = engine.replicas.engine_pid
            stops = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1, stop=["never there, so never found"])
            short = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
            neighbours = [asyncio.create_task(collect(engine, "abc", short, kind)) for kind in OutputKind]
            ends = []
            for params, breaks, kind in (
                (stops, "update", OutputKind.DELTA),  # found while a step is taken
                (LONG, "delta", OutputKind.DELTA),  # found by its reader
                (LONG, "update", OutputKind.CUMULATIVE),
                (short, "finish", OutputKind.FINAL),
                (short, "text", OutputKind.FINAL),  # when it has left the engine
            ):
                stream = await engine.submit("abc", params, kind=kind)
                break_text(stream.state, MemoryError, breaks)
                ends.append(stream)
            for stream in ends:
                assert ended_badly([output async for output in stream], MemoryError)
            for outputs, kind in zip(await asyncio.gather(*neighbours), OutputKind, strict=True):
                told = [o.outputs[0].token_ids for o in outputs]
                tokens = [token for each in told for token in each] if kind is OutputKind.DELTA else told[-1]
                assert tokens == expected_hashlm(list(b"abc"), short).token_ids
            await quiet(engine)
            assert engine.num_requests == 0 and engine.replicas.engine_pid == pid and engine.stats.num_restarts == 0

    run(test)


def test_a_request_that_the_engine_has_no_room_for_may_come_again() -> None:
    async def test() -> None:
        async with running() as engine:
            stream = await engine.submit("abc", LONG)
            engine.on_refused(Refused(stream.request_id, False, "no room; send it again later", failed=True))
            with pytest.raises(OverloadedError, match="again later"):
                await anext(stream)
            began = time.monotonic()
            await quiet(engine)
            assert time.monotonic() - began < 30

    run(test)
