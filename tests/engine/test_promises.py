"""Promises are counted as kept, missed or dropped, and each tenant's share of the engine is measured."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from chairlift.base.outputs import FinishReason, OutputKind
from chairlift.base.sampling_params import SHAPED_REASONS, SamplingParams
from chairlift.config import ServerConfig
from chairlift.core.request import Service
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence, TokenRecord
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.output_processor import OutputProcessor
from chairlift.engine.output_stream import OutputStream
from chairlift.errors import QueueFullError
from chairlift.metrics.stats import RequestStats
from chairlift.server.http.auth import Caller
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import submit_all
from chairlift.server.openai.protocol import CompletionRequest
from chairlift_lab.sim.oracle import byte_tokenizer
from tests.engine.make import drain, greedy, make_engine
from tests.engine.test_async_engine import LONG, collect, quiet, run, running

INF = math.inf


def ended(
    service: Service,
    times: list[float],
    end: float,
    reason: FinishReason | None = FinishReason.STOP,
    n: int = 1,
    error: str | None = None,
) -> RequestStats:
    """A request of time 0, with a token of its first answer at each of ``times``; without a reason it is cancelled."""
    stats = RequestStats()
    outputs = OutputProcessor(None, (), stats)
    prepared = PreparedRequest("r", None, [1, 2], SamplingParams(n=n), 0, 10, service=service)
    outputs.add(prepared, stream=False)
    first, *others = prepared.sequence_ids
    for time in times:
        outputs.take(CoreOutputs(sequence_ids=[first], token_ids=[3], joined=[(first, 0, 0.0)]), time)
    if reason is None:
        outputs.remove("r", end)
    else:
        finished = [FinishedSequence(name, FinishReason.STOP) for name in others]
        outputs.finish([FinishedSequence(first, reason, error=error), *finished], end)
    return stats


def promise(ttft: float = INF, deadline: float = INF, tpot: float = INF) -> Service:
    return Service("chat", "", ttft, deadline, tpot)


def cases() -> Iterator[Any]:
    stop, late = FinishReason.STOP, FinishReason.DEADLINE
    yield "no promise", promise(), [1.0, 9.0], 9.0, stop, (0, 0), []
    yield "all kept", promise(1.0, 4.0, 1.0), [1.0, 2.0, 3.0], 3.0, stop, (1, 1), []
    yield "first token late", promise(1.0, 9.0), [1.5], 2.0, stop, (1, 0), ["ttft"]
    yield "end late", promise(1.0, 3.0), [1.0, 2.0, 3.5], 3.5, stop, (1, 0), ["deadline"]
    yield "tokens slow", promise(9.0, 9.0, 0.5), [1.0, 2.0, 3.0], 3.0, stop, (1, 0), ["tpot"]
    yield "one token has no rate", promise(tpot=0.1), [1.0], 5.0, stop, (1, 1), []
    yield "dropped before it began", promise(5.0, 9.0), [], 2.0, late, (1, 0), ["ttft", "deadline"]
    yield "dropped on the way", promise(5.0, 9.0), [1.0], 2.0, late, (1, 0), ["deadline"]
    yield "another answer dropped", promise(5.0), [1.0], 2.0, late, (1, 0), ["ttft"]
    yield "cancelled in time", promise(5.0, 9.0), [], 2.0, None, (0, 0), []
    yield "cancelled when it was late", promise(5.0, 9.0), [], 6.0, None, (1, 0), ["ttft"]
    yield "failed", promise(5.0, 9.0), [1.0], 2.0, FinishReason.ERROR, (0, 0), []


@pytest.mark.parametrize(
    ("service", "times", "end", "reason", "kept", "missed"), [pytest.param(*c, id=i) for i, *c in cases()]
)
def test_kept_and_missed_latency_targets_are_counted(
    service: Service, times: list[float], end: float, reason: Any, kept: tuple[int, int], missed: list[str]
) -> None:
    stats = ended(service, times, end, reason)
    assert (stats.with_deadline["chat"], stats.within_deadline["chat"]) == kept
    assert stats.deadline_misses == {("chat", kind): 1 for kind in missed}
    assert stats.classes == {"chat": 1}


def test_a_request_is_dropped_if_one_of_its_answers_is() -> None:
    stats = ended(promise(5.0), [1.0], 2.0, FinishReason.DEADLINE, n=3)
    assert stats.finished == {"deadline": 1}


@pytest.mark.parametrize(
    ("why", "counted"), [*((why, "abort") for why in SHAPED_REASONS), ("the model's logits contain NaN", "error")]
)
def test_settings_that_leave_no_token_count_as_no_fault_of_ours(why: str, counted: str) -> None:
    assert ended(Service(), [], 1.0, FinishReason.ERROR, error=why).finished == {counted: 1}


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    """Several may come at once, and rows of a static batch go on."""
    stats = RequestStats()
    tokenizer = byte_tokenizer()
    first, second, *others = tokenizer.encode("abcde")
    outputs = OutputProcessor(tokenizer, (), stats)
    params = SamplingParams(max_tokens=9, stop=["b"], logprobs=0)
    state = outputs.add(PreparedRequest("r", None, [1, 2], params, 0, 10), stream=True)
    (name,), frame = state.prepared.sequence_ids, CoreOutputs()
    for token in (first, second, *others):
        frame.merge(CoreOutputs([name], [token], [TokenRecord([token], [-1.0], 1)]))
    assert outputs.take(frame, 1.0) == [name]
    assert outputs.take(CoreOutputs([name], [first], [TokenRecord([first], [-1.0], 1)]), 2.0) == []
    outputs.finish([FinishedSequence(name, FinishReason.STOP)], 3.0)
    (answer,) = state.output().outputs
    assert (answer.text, answer.token_ids, answer.cumulative_logprob) == ("a", [first, second], -2.0)
    assert (stats.generation_tokens, stats.overrun_tokens) == (2, 4)


def put(engine: Engine, *services: Service) -> None:
    """The limits of these engines have no classes, so the door gives no promises: they are put in behind it."""
    for index, service in enumerate(services):
        prepared = PreparedRequest(f"r{index}", None, [1, 2, 3], greedy(), 0, 8, (), service=service)
        engine._outputs.add(prepared, False)
        engine.core.add(prepared)


def test_rows_of_classes_with_reservations_are_counted() -> None:
    classes = {"chat": {"min_seqs": 2}, "batch": {"min_seqs": 1}}
    engine = make_engine(scheduling_policy="priority", service_classes=classes)
    assert engine.core.stats().rows_by_class == {"chat": 0, "batch": 0}
    put(engine, Service("chat"), Service("chat"), Service())
    engine.step()
    assert engine.core.stats().rows_by_class == {"chat": 2, "batch": 0}
    drain(engine)
    assert engine.core.stats().rows_by_class == {"chat": 0, "batch": 0}


def test_the_gap_between_tenants_is_the_difference_of_their_counters() -> None:
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    put(engine, Service(tenant="a"), Service(tenant="a"), Service(tenant="b"))
    engine.step()
    assert engine.core.stats().tenant_gap == 3.0  # a prompt of three tokens more
    drain(engine)
    assert engine.core.stats().tenant_gap == 0.0


def test_first_come_first_served_has_no_gap_between_tenants() -> None:
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy())
    engine.step()
    assert (engine.core.stats().rows_by_class, engine.core.stats().tenant_gap) == ({}, 0.0)
    drain(engine)


def test_a_request_dropped_during_its_first_step_counts_as_scheduled() -> None:
    engine = make_engine(scheduling_policy="priority", late_requests="drop", num_lookahead_steps=2)
    put(engine, Service(), Service(first_token_by=0.5))
    assert engine.step() == [] and engine.num_in_flight == 1
    engine.clock.wait_until(1.0)
    (late,) = engine.step()
    assert engine.num_in_flight == 2 and late.outputs[0].finish_reason is FinishReason.DEADLINE
    assert late.metrics is not None and late.metrics.first_scheduled_time == 0.0
    drain(engine)


@pytest.mark.parametrize("late", ["drop", "downgrade"])
def test_a_request_that_comes_too_late_is_dropped_or_goes_on(late: str) -> None:
    settings = {"max_num_seqs": 1, "scheduling_policy": "priority", "late_requests": late}

    async def test() -> None:
        async with running("hashlm:5ms", settings) as engine:
            # It has a deadline too, or it would have to make room.
            slow = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1, deadline_ms=100_000)
            block = await engine.submit([1, 2], slow)
            while block.request_id in engine.intake:
                await asyncio.sleep(0.001)
            hurried = SamplingParams(max_tokens=5, seed=1, ignore_eos=True, service_tier="flex", deadline_ms=50)
            asked = asyncio.create_task(collect(engine, [1, 2, 3], hurried, OutputKind.FINAL))
            while not (engine.stats.engine.num_late_dropped or engine.stats.engine.num_late_downgraded):
                await asyncio.sleep(0.001)
            block.abort()
            (output,) = await asked
            await quiet(engine)
            (answer,) = output.outputs
            stats = engine.stats
            if late == "drop":
                assert answer.finish_reason is FinishReason.DEADLINE
                assert output.error == "the request could not be answered by its deadline"
            else:
                assert (answer.finish_reason, len(answer.token_ids)) == (FinishReason.LENGTH, 5)
            late_ones = (stats.engine.num_late_dropped, stats.engine.num_late_downgraded)
            assert late_ones == ((1, 0) if late == "drop" else (0, 1))
            assert (stats.with_deadline["flex"], stats.within_deadline["flex"]) == (1, 0)
            assert stats.deadline_misses["flex", "deadline"] == 1

    run(test)


@pytest.mark.parametrize("bounds", [{"max_queued_requests": 4}, {"max_queued_tokens": 9}])
def test_prompts_of_one_call_are_not_in_each_others_way(bounds: dict[str, int]) -> None:
    """A client would send such a call again and again, to an idle server."""

    async def test() -> None:
        async with running("hashlm:5ms", {"max_num_seqs": 1}, **bounds) as engine:
            state = ServerState(ServerConfig(), engine, ("hashlm",))

            def call(count: int) -> Awaitable[list[OutputStream]]:
                asked = CompletionRequest(prompt="")
                return submit_all(state, [[1, 2]] * count, LONG, asked, stream=True, caller=Caller())

            streams = await call(7)
            with pytest.raises(QueueFullError, match="wait already"):
                await call(1)
            assert sum(engine.stats.rejected.values()) == 1
            for stream in streams:
                stream.abort()

    run(test)


def test_the_queue_reserves_places_for_urgent_classes() -> None:
    settings = {"max_num_seqs": 1, "scheduling_policy": "priority"}

    async def test() -> None:
        async with running("hashlm:5ms", settings, max_queued_requests=4) as engine:
            flex, urgent = SamplingParams(service_tier="flex"), SamplingParams(service_tier="priority")
            first = await engine.submit([1, 2], LONG)
            while first.request_id in engine.intake:
                await asyncio.sleep(0.001)
            streams = [first, *[await engine.submit([1, 2], flex) for _ in range(2)]]
            for ask in (engine.submit([1, 2], flex), asyncio.to_thread(engine.check_room, 1, "flex")):
                with pytest.raises(QueueFullError, match="2 may before one of class flex is taken") as full:
                    await ask
                assert 1 <= full.value.retry_after <= 60
            engine.check_room(2, "priority")
            streams.append(await engine.submit([1, 2], urgent, tenant="alice"))
            assert engine.stats.rejected == {"queue_requests": 2}
            for stream in streams:
                stream.abort()
            await quiet(engine)

    run(test)
