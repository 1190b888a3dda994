"""Texts for vectors are requests of the engine like any other: their steps are logged, counted and announced, and an
error ends the texts of its step only.

Changes that must make these fail: the dropped token is delivered; a text ends before its vector has come; its start is
told only after its step; a step that fails ends later texts too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.base.outputs import FinishReason, RequestOutput
from chairlift.base.pooled_row import PooledRow
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import SchedulerConfig
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import CoreOutputs
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits, PooledText
from chairlift.engine.output_processor import OutputProcessor
from chairlift.engine.process.messages import Add, Step, decode, encode
from chairlift.executor.pooled_runner import PooledExecutor
from chairlift.metrics.stats import EngineStats, RequestStats

BROKEN, FULL = 13, 14


class Scripted(PooledExecutor):
    """The vector of a text is its length, its sum and the sum of its types. Token 13 makes a vector that is not finite,
    token 14 a step that fails."""

    def __init__(self) -> None:
        self.cache_groups, self.block_bytes, self.steps = [], [], list[list[int]]()

    def run(self, token_ids: Any, token_types: Any) -> list[npt.NDArray[np.float32] | None]:
        self.steps.append([len(each) for each in token_ids])
        if any(FULL in each for each in token_ids):
            raise MemoryError("no room")
        every = zip(token_ids, token_types, strict=True)
        found = [np.array([len(ids), sum(ids), sum(types or ())], dtype=np.float32) for ids, types in every]
        return [None if BROKEN in ids else vector for ids, vector in zip(token_ids, found, strict=True)]


def make() -> tuple[Engine, Scripted]:
    executor = Scripted()
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, policy_share=1.0)
    return Engine(executor, ModelLimits(20, 64), config, clock=VirtualClock()), executor


def drain(engine: Engine) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        found |= {output.request_id: output for output in engine.step()}
        engine.check_invariants()
    return found


def values(output: RequestOutput) -> list[float]:
    assert output.vector is not None and output.error is None
    return np.frombuffer(output.vector, dtype="<f4").tolist()


def test_a_text_ends_with_its_vector_and_without_tokens() -> None:
    engine, executor = make()
    engine.add_text(PooledText("a", [5] * 7))
    engine.add_text(PooledText("b", [6] * 9, PooledRow([0] * 4 + [1] * 5)))
    engine.add_text(PooledText("c", [7] * 40))
    engine.add_text(PooledText("d", [8]))
    found = drain(engine)
    assert {name: values(output) for name, output in found.items()} == {
        "a": [7, 35, 0],
        "b": [9, 54, 5],
        "c": [40, 280, 0],
        "d": [1, 8, 0],
    }
    assert executor.steps == [[7, 9], [40], [1]]
    assert [entry.features.prefill_tokens for entry in engine.step_log] == [16, 40, 1]
    answer = found["a"].outputs[0]
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", FinishReason.STOP)


def test_an_error_ends_the_texts_that_it_concerns_and_no_others() -> None:
    engine, _ = make()
    for name, ids in {"a": [5] * 8, "nan": [BROKEN] * 8, "b": [5] * 8, "full": [FULL] * 8, "c": [5] * 8}.items():
        engine.add_text(PooledText(name, ids))
    found = drain(engine)
    assert values(found["a"]) == values(found["c"]) == [8, 40, 0]
    assert found["nan"].error == "the model computed numbers that are not finite for this text"
    assert found["full"].error == found["b"].error == "the pass with this text failed (MemoryError: no room)"
    assert found["full"].vector is None and found["full"].outputs[0].finish_reason is FinishReason.ERROR


def test_the_start_of_a_text_is_told_before_its_step() -> None:
    engine, executor = make()
    told: list[tuple[list[str], int]] = []

    def on_joined(outputs: CoreOutputs) -> None:
        assert engine.core.stats().num_running == len(outputs.joined)
        told.append(([name for name, _, _ in outputs.joined], len(executor.steps)))

    engine.core.on_joined = on_joined
    for name in "abc":
        engine.add_text(PooledText(name, [5] * 8))
    drain(engine)
    assert told == [(["a", "b"], 0), (["c"], 1)]


def test_a_text_is_counted_as_a_request_without_generated_tokens() -> None:
    engine, _ = make()
    prepared = engine._inputs.prepare_text(PooledText("a", [5] * 8), SamplingParams(), 1.0)
    stats = RequestStats()
    outputs = OutputProcessor(None, (), stats)
    state = outputs.add(prepared, stream=False)
    outputs.take(CoreOutputs(joined=[("a", 0, 3.0)]), 3.0)
    engine.core.add(prepared)
    step = engine.core.step()
    assert step is not None and not step.token_ids
    outputs.take(step, 7.0)
    assert [each.request_id for each in outputs.finish(step.finished, 7.0)] == ["a"]
    assert (stats.prompt_tokens, stats.generation_tokens, dict(stats.finished)) == (8, 0, {"stop": 1})
    record = state.record(7.0)
    assert (record.queue_seconds, record.prefill_seconds, record.decode_seconds) == (2.0, 4.0, None)


def test_texts_and_vectors_cross_the_border_between_the_processes() -> None:
    engine, _ = make()
    prepared = engine._inputs.prepare_text(PooledText("a", [5, 6], PooledRow([0, 1])), SamplingParams(), 1.0, "tenant")
    sent = decode(encode(Add.of(prepared))[4:])
    assert isinstance(sent, Add)
    (request,) = sent.request().make_sequences()
    assert request.sampling == PooledRow([0, 1]) and request.service.tenant == "tenant"
    first, later = CoreOutputs(vectors=[("a", b"\0\0\x80?")]), CoreOutputs(vectors=[("b", b"")])
    first.merge(later)
    step = decode(encode(Step(first, EngineStats()))[4:])
    assert isinstance(step, Step) and step.outputs.vectors == [("a", b"\0\0\x80?"), ("b", b"")]
