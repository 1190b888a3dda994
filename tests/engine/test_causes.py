"""Where the time of a request went: each cause is provoked and found, and together they are all of its time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from chairlift.base.outputs import FinishReason, OutputKind, RequestMetrics
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.step_batch import StepBatch
from chairlift.config import CacheConfig, CacheGroup, EngineConfig, SchedulerConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.causes import CAUSES, causes_until
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import InputProcessor, ModelLimits
from chairlift.engine.process.messages import FrameReader, Step, encode
from chairlift.executor.local import LocalExecutor
from chairlift.loading.model import read_tokenizer
from chairlift.metrics.stats import EngineStats
from chairlift.models.hashlm import HashLM
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import simulated_core
from tests.engine.make import BLOCK, LENGTH, VOCAB, greedy

STEP, TOKEN, HOST = 0.010, 0.001, 0.002
"""Seconds: of a step, of each token in it, and between two steps."""


class Timed(HashLM):
    """Its steps take time on the engine's clock."""

    clock: VirtualClock
    failing = False
    repeats = False

    def forward(self, batch: StepBatch) -> list[int]:
        self.clock.advance(STEP + TOKEN * len(batch.token_ids))
        if self.failing:
            raise RuntimeError("it was told to fail")
        return super().forward(batch)


class Timeline:
    """An engine on a virtual clock, and what became of its requests."""

    def __init__(self, num_blocks: int = 65, **config: Any) -> None:
        self.clock = VirtualClock(1000.0)
        settings = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **config})
        self.model = Timed([CacheGroup(num_blocks)], BLOCK, VOCAB, LENGTH)
        self.model.clock = self.clock
        sizes = {"num_slots": settings.max_num_seqs, "max_model_len": LENGTH, "block_size": BLOCK}
        executor = LocalExecutor(self.model, **sizes)
        limits = ModelLimits(VOCAB, LENGTH, (), settings.promises)
        self.engine = Engine(
            executor, limits, settings, clock=self.clock, cache=CacheConfig(enable_prefix_caching=False)
        )
        self.ended: dict[str, RequestMetrics] = {}

    def add(self, name: str, num_tokens: int, max_tokens: int, **params: Any) -> None:
        prompt = [(ord(name[0]) + i) % VOCAB for i in range(num_tokens)]
        self.engine.add_request(prompt, greedy(max_tokens, **params), request_id=name)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                if output.finished and output.metrics is not None:
                    self.ended[output.request_id] = output.metrics
            self.clock.advance(HOST)

    def run(self) -> dict[str, dict[str, float]]:
        """Until everybody has ended: what each was charged, which is all of its time."""
        for _ in range(500):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished
        assert len(self.engine.core.causes) == 0
        charged = {}
        for name, metrics in self.ended.items():
            assert metrics.causes is not None and metrics.finished_time is not None
            assert set(metrics.causes) <= set(CAUSES) and min(metrics.causes.values()) >= 0
            assert sum(metrics.causes.values()) == pytest.approx(metrics.finished_time - metrics.arrival_time, abs=1e-9)
            charged[name] = {cause: round(seconds, 9) for cause, seconds in metrics.causes.items() if seconds > 1e-9}
        return charged

    def held_up_by(self) -> set[str]:
        return {record.held_up_by for record in self.engine.step_log}


def test_a_request_alone_is_charged_computing_and_host_time_only() -> None:
    line = Timeline()
    line.add("a", 10, 5)
    # The chunk, four decodes, and four times between steps.
    wanted = {"prefill": STEP + 10 * TOKEN, "decode": 4 * (STEP + TOKEN), "host": 4 * HOST}
    assert line.run() == {"a": pytest.approx(wanted)}
    assert line.held_up_by() == {""}


def running_ahead(depth: int) -> tuple[dict[str, dict[str, float]], float]:
    """Charges of two requests whose steps run beside the engine, and the duration of the step in which one joins."""
    flat = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_kv_blocks": 200, "num_lookahead_steps": depth}
    core, limits = simulated_core(deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), EngineConfig.from_flat(flat))
    door = InputProcessor(limits, None, core.kv, seed=0)
    charged: dict[str, dict[str, float]] = {}
    for name, num_tokens in {"a": 10, "b": 150}.items():
        core.add(door.prepare(name, [5] * num_tokens, SamplingParams(max_tokens=30, ignore_eos=True), core.clock.now()))
        until = core.scheduler.step + 10 if name == "a" else 10_000
        while core.has_work and core.scheduler.step < until:
            core.clock.wait_until(core.clock.now() + HOST)
            outputs = core.step()
            for ended in outputs.finished if outputs is not None else ():
                assert ended.causes is not None
                charged[ended.sequence_id] = ended.causes
    record = next(record for record in core.step_log if record.step == 10)
    return charged, record.end - record.start


@pytest.mark.parametrize("depth", [1, 2])
def test_with_look_ahead_requests_wait_for_steps_in_flight_and_not_between_steps(depth: int) -> None:
    (in_turns, step), (ahead, _) = running_ahead(0), running_ahead(depth)
    for name in "ab":
        computing = [
            sum(each[name][cause] for cause in ("prefill", "decode", "stretched")) for each in (in_turns, ahead)
        ]
        assert computing[0] == pytest.approx(computing[1])
        assert in_turns[name]["host"] > 25 * HOST and ahead[name].get("host", 0.0) == pytest.approx(0.0, abs=1e-9)
    assert in_turns["b"]["waiting_step"] == pytest.approx(HOST)
    assert ahead["b"]["waiting_step"] == pytest.approx(depth * step, rel=0.2)


def test_a_long_prompt_waits_for_its_turns_between_its_chunks() -> None:
    """A request that is alone in its steps does not stretch another's."""
    line = Timeline()
    line.add("a", 40, 1)
    assert line.run() == {"a": pytest.approx({"prefill": 3 * STEP + 40 * TOKEN, "host": 2 * HOST})}


def test_a_request_that_comes_while_all_rows_are_taken_waits_for_slots() -> None:
    line = Timeline(max_num_seqs=1)
    line.add("a", 4, 8)
    line.add("b", 4, 2)
    line.add("c", 4, 2)
    charged = line.run()
    first = (STEP + 4 * TOKEN) + 7 * (STEP + TOKEN) + 8 * HOST
    assert charged["b"]["waiting_slots"] == pytest.approx(first)
    assert charged["c"]["waiting_slots"] == pytest.approx(first + (STEP + 4 * TOKEN) + (STEP + TOKEN) + 2 * HOST)
    assert "waiting_slots" not in charged["a"] and line.held_up_by() == {"", "slots"}


def test_a_request_that_does_not_fit_into_memory_waits_for_blocks() -> None:
    line = Timeline(num_blocks=9)
    line.add("a", 16, 8)
    line.add("b", 16, 8)
    charged = line.run()
    assert charged["b"]["waiting_blocks"] > 7 * STEP
    assert "waiting_blocks" not in charged["a"] and "blocks" in line.held_up_by()


def test_prompts_that_fill_the_budget_make_others_wait_for_tokens() -> None:
    line = Timeline()
    line.add("a", 48, 1)
    line.add("b", 48, 1)  # a smaller one would share the budget
    charged = line.run()
    assert charged["b"]["waiting_tokens"] == pytest.approx(3 * (STEP + 16 * TOKEN) + 3 * HOST)
    assert "tokens" in line.held_up_by()


def test_rows_kept_for_another_class_are_a_reservation() -> None:
    line = Timeline(
        max_num_seqs=2,
        scheduling_policy="priority",
        service_classes=json.dumps({"chat": {"min_seqs": 1}}),
        preemption_mode="none",  # nobody could be asked to give a row that was lent back
    )
    line.add("a", 4, 6)
    line.add("b", 4, 6)
    charged = line.run()
    assert charged["b"]["waiting_reservation"] > 6 * STEP
    assert "waiting_slots" not in charged["b"] and "reservation" in line.held_up_by()


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_batch_that_waits_for_more_is_waited_for(batching: str) -> None:
    line = Timeline(batching=batching, batch_wait_ms=500)
    line.add("a", 4, 3)
    line.add("b", 4, 9)
    assert line.engine.core.step() is None
    line.clock.advance(0.125)
    line.add("c", 4, 3)  # in time to join them
    charged = line.run()
    assert line.held_up_by() == {""}  # no step ran while they waited
    assert charged["b"]["waiting_batch"] == pytest.approx(0.5 + HOST)
    # A request that has ended stays in a static batch until the longest answer has ended.
    until_the_end = 6 * (STEP + 3 * TOKEN) + 5 * HOST if batching == "static" else 0.0
    assert charged["a"]["waiting_batch"] == pytest.approx(0.5 + HOST + until_the_end)
    assert charged["c"]["waiting_batch"] == pytest.approx(0.375 + HOST + until_the_end)


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_request_that_misses_a_static_batch_waits_for_its_end(batching: str) -> None:
    line = Timeline(batching=batching)
    line.add("a", 4, 9)
    line.step(2)
    line.add("b", 4, 3)
    assert line.run()["b"]["waiting_batch"] == pytest.approx(7 * (STEP + TOKEN) + 7 * HOST)
    assert "batch" in line.held_up_by()


def test_a_long_prompt_stretches_the_steps_of_decoding_requests() -> None:
    line = Timeline(max_num_batched_tokens=64)
    for _ in range(40):  # until the cost model knows what a token costs
        line.add("w", 30, 3)
        line.add("v", 30, 3)
        line.run()
    line.ended.clear()
    line.add("a", 4, 12)
    line.step(3)
    line.add("b", 50, 1)
    charged = line.run()
    assert charged["a"]["stretched"] == pytest.approx(50 * TOKEN, rel=0.2)
    assert charged["a"]["decode"] == pytest.approx(11 * (STEP + TOKEN), rel=0.2)
    own = STEP + 51 * TOKEN
    assert charged["b"]["prefill"] == pytest.approx(own * 50 / 51) and charged["b"]["stretched"] > 0


@pytest.mark.parametrize("prefill_mode", ["prefill_first", "separate"])
def test_a_step_without_decodes_stretches_all_decoding_requests(prefill_mode: str) -> None:
    line = Timeline(prefill_mode=prefill_mode)
    line.add("a", 4, 12)
    line.step(3)
    line.add("b", 16, 1)
    assert line.run()["a"]["stretched"] == pytest.approx(STEP + 16 * TOKEN)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_names_the_requests_it_was_preempted_for(mode: str, depth: int) -> None:
    line = Timeline(num_blocks=7, preemption_mode=mode, num_lookahead_steps=depth)
    line.engine.scheduler.batch.max_preemptions = 2
    line.add("a", 8, 10)
    line.add("b", 8, 10)
    charged = line.run()
    assert charged["b"]["preempted"] > 0
    assert line.ended["b"].preempted_by == ["a"]
    assert "preempted" not in charged["a"] and line.ended["a"].preempted_by == []


def test_only_the_last_three_preemptors_are_named() -> None:
    line = Timeline(scheduling_policy="priority", max_num_seqs=1)
    line.add("last", 4, 12)
    for number in range(5):
        line.step(2)
        line.add(f"p{number}", 4, 1, priority=-1)
        while f"p{number}" not in line.ended:
            line.step()
    charged = line.run()
    assert line.ended["last"].preempted_by == ["p2", "p3", "p4"]
    assert charged["last"]["preempted"] > 5 * STEP


def test_the_last_eight_preemptions_are_kept() -> None:
    line = Timeline(scheduling_policy="priority", max_num_seqs=1)
    line.engine.scheduler.batch.max_preemptions = 20
    line.add("last", 4, 40)
    away = []
    for number in range(11):
        line.step(2)
        begin = line.clock.now()
        line.add(f"p{number}", 4, 1, priority=-1)
        while f"p{number}" not in line.ended:
            line.step()
        away.append((begin, line.clock.now()))
    line.run()
    told = line.ended["last"].preempted_during
    assert len(told) == 8
    for (begin, end), (earliest, ended) in zip(told, away[-8:], strict=True):
        assert earliest <= begin <= ended - HOST <= end


def test_a_request_preempted_between_steps_names_no_other() -> None:
    line = Timeline()
    line.add("a", 8, 12)
    line.step(3)
    assert line.engine.scheduler.preempt("a")
    charged = line.run()
    assert charged["a"]["preempted"] == pytest.approx(STEP + 11 * TOKEN)
    assert line.ended["a"].preempted_by == []


@pytest.mark.parametrize("depth", [1, 2])
def test_with_look_ahead_steps_follow_each_other_without_a_gap(depth: int) -> None:
    line = Timeline(num_lookahead_steps=depth)
    line.add("a", 4, 20)
    charged = line.run()["a"]
    assert charged["decode"] > 15 * (STEP + TOKEN)
    assert charged.get("host", 0.0) < 3 * HOST


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_several_answers_share_what_their_prompt_went_through(batching: str) -> None:
    line = Timeline(max_num_seqs=3, batching=batching)
    line.add("a", 4, 6)
    line.step()
    line.add("b", 20, 5, n=3)
    charged = line.run()["b"]
    assert charged["prefill"] > 20 * TOKEN and charged["decode"] > 0


def test_the_door_and_the_delivery_are_charged() -> None:
    line = Timeline()
    line.add("a", 4, 2)
    state = line.engine._outputs.state_of("a")
    assert state is not None
    core = line.engine.core
    prepared = state.prepared
    core.abort(["a"])
    line.clock.advance(0.25)  # tokenizing
    core.add(prepared)
    outputs = core.step()
    assert outputs is not None and not outputs.finished
    outputs = core.step()
    assert outputs is not None
    (ended,) = outputs.finished
    assert ended.causes is not None and ended.causes["front_door"] == pytest.approx(0.25)
    line.clock.advance(0.125)
    (done,) = line.engine._outputs.finish([ended], line.clock.now())
    assert done.metrics.causes is not None and done.metrics.causes["delivery"] == pytest.approx(0.125)
    assert done.metrics.finished_time is not None
    assert sum(done.metrics.causes.values()) == pytest.approx(done.metrics.finished_time - 1000.0)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", range(6))
def test_the_time_of_an_aborted_request_is_charged_too(steps: int, depth: int) -> None:
    line = Timeline(num_blocks=9, num_lookahead_steps=depth)
    for name in "abc":
        line.add(name, 12, 6)
    line.add("n", 12, 6, n=2)
    line.step(steps)
    core = line.engine.core
    names = list(core.scheduler.requests)
    line.clock.advance(0.5)
    for name in reversed(names):
        (ended,) = core.abort([name])
        assert ended.causes is not None and min(ended.causes.values()) >= 0
        assert sum(ended.causes.values()) == pytest.approx(line.clock.now() - 1000.0)
    assert len(core.causes) == 0


def test_a_step_that_fails_is_charged() -> None:
    line = Timeline()
    line.add("a", 8, 6)
    line.step(2)
    line.model.failing = True
    line.step()
    assert line.run()["a"] == pytest.approx(
        {"prefill": STEP + 8 * TOKEN, "decode": 2 * (STEP + TOKEN), "host": 2 * HOST}
    )


def test_an_answer_ended_by_a_stop_string_is_charged_up_to_the_last_frame() -> None:
    assert causes_until({"prefill": 1.0, "host": 0.5}, (1.0, 2.0, 3.0), (1.5, 2.0, 3.25)) == {
        "prefill": 1.0,
        "decode": 0.5,
        "stretched": 0.0,
        "host": 0.75,
    }


def test_causes_are_equal_on_both_sides_of_the_process_border() -> None:
    ended = FinishedSequence("a", FinishReason.STOP, causes={"decode": 1.5, "host": 0.25}, preempted_by=["b", "c"])
    outputs = CoreOutputs(
        finished=[ended], decoding=[("d", {"prefill": 0.5}, (1.0, 2.0, 3.0))], decode_seconds=(4.0, 5.0, 6.0)
    )
    (message,) = FrameReader().feed(encode(Step(outputs, EngineStats())))
    assert isinstance(message, Step) and message.outputs == outputs
    message.outputs.merge(CoreOutputs(decoding=[("e", {}, (5.0, 5.0, 7.0))], decode_seconds=(7.0, 7.0, 7.0)))
    assert [name for name, _, _ in message.outputs.decoding] == ["d", "e"]
    message.outputs.merge(CoreOutputs())  # of an abort: no step has landed
    assert message.outputs.decode_seconds == (7.0, 7.0, 7.0)


def test_across_processes_the_causes_are_all_of_the_time() -> None:
    async def test() -> None:
        config = EngineConfig.from_flat({"model": "hashlm:2ms", "max_num_seqs": 2, "num_kv_blocks": 200})
        engine = AsyncEngine.start(config, read_tokenizer=read_tokenizer)
        try:
            await engine.wait_ready()
            params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, temperature=0.0)
            plain = [output async for output in await engine.submit("abc", params, kind=OutputKind.FINAL)]
            text = plain[0].outputs[0].text
            stopped = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, temperature=0.0, stop=[text[40:44]])
            os.kill(engine.replicas.engine_pid or 0, signal.SIGSTOP)  # so that the third finds the first two there
            jobs = [await engine.submit("abc", each, kind=OutputKind.FINAL) for each in (params, stopped, params)]
            os.kill(engine.replicas.engine_pid or 0, signal.SIGCONT)
            gone = await engine.submit("abc", params)
            outputs = plain + [output for job in jobs for output in [each async for each in job]]
            gone.abort()
            for output in outputs:
                metrics = output.metrics
                assert metrics is not None and metrics.causes is not None and metrics.finished_time is not None
                spent = metrics.finished_time - metrics.arrival_time
                assert sum(metrics.causes.values()) == pytest.approx(spent, rel=0.01)
                assert min(metrics.causes.values()) >= 0
                # A step takes 2 ms at least, and there are 40 of them.
                assert metrics.causes["decode"] + metrics.causes.get("stretched", 0.0) > 0.06
            assert outputs[2].outputs[0].stop_reason == text[40:44]
            third = outputs[3].metrics
            assert third is not None and third.causes is not None and third.causes["waiting_slots"] > 0.05
            while engine.stats.engine.num_running or engine.stats.engine.num_waiting:
                await asyncio.sleep(0.005)
            assert engine.stats.cause_seconds["waiting_slots"] >= third.causes["waiting_slots"]
            assert set(engine.stats.cause_seconds) == set(CAUSES)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(test(), 180))
