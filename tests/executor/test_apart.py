"""A step that fails for one row is computed again in parts: only the request of this row ends with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.outputs import FinishReason, RequestOutput
from chairlift.base.step_batch import PromptLogprobs, SampledTokens, StepBatch
from chairlift.executor.backends.native.sampling_rows import NativeRows
from chairlift.executor.sampling.sampler import Sampler
from chairlift.kernels.cpu.program import StepProgram
from chairlift.models.causal_lm import CausalLM

SHORT = [[7, 9, 11], [300, 20, 41, 9]]
LONG = [5 + i % 200 for i in range(300)]
CALM = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
WANTING = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True, logprobs=4)
Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", params=["auto", "torch"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(kernels=request.param, enable_prefix_caching=False)


def refuse(patch: pytest.MonkeyPatch, owner: Any, name: str, refused: Callable[..., bool]) -> None:
    """Make a method raise MemoryError for the arguments that ``refused`` accepts."""
    original = getattr(owner, name)

    def called(self: Any, *args: Any, **more: Any) -> Any:
        if refused(self, *args):
            raise MemoryError("no room")
        return original(self, *args, **more)

    patch.setattr(owner, name, called)


def sampling_has_no_memory(patch: pytest.MonkeyPatch) -> None:
    refuse(patch, NativeRows, "make_room", lambda rows: bool((rows.records["num_logprobs"] >= 0).any()))
    refuse(patch, Sampler, "__call__", lambda _, logits, rows, *rest: any(row.params.logprobs for row in rows))


def long_chunks_have_no_memory(patch: pytest.MonkeyPatch) -> None:
    def is_long(lengths: Any) -> bool:
        return bool(np.max(np.diff(lengths)) > 200)

    refuse(patch, StepProgram, "run", lambda _, step, *rest: is_long(step.cu_seqlens))
    refuse(patch, CausalLM, "__call__", lambda _, tokens, positions, ctx: is_long(ctx.cu_seqlens))


def run(llm: LLM) -> list[RequestOutput]:
    return llm.generate([SHORT[0], LONG, SHORT[1]], [CALM, WANTING, CALM], use_tqdm=False)


@pytest.mark.parametrize("fault", [sampling_has_no_memory, long_chunks_have_no_memory])
def test_only_the_request_without_memory_ends_with_an_error(
    llm: LLM, fault: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = run(llm)
    with monkeypatch.context() as patch:
        fault(patch)
        first, starved, last = run(llm)
    for found, expected in ((first, truth[0]), (last, truth[2])):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.error is None
    assert starved.outputs[0].finish_reason is FinishReason.ERROR
    assert "MemoryError" in (starved.error or "")
    assert [each.outputs[0].token_ids for each in run(llm)] == [each.outputs[0].token_ids for each in truth]


def test_joined_parts_keep_the_order_of_tokens_errors_and_log_probabilities() -> None:
    report = PromptLogprobs(3, 0, [], "no memory")
    parts = [SampledTokens([4, 5]), SampledTokens([], prompt_logprobs=[report]), SampledTokens([-1], ["x"], {0: "why"})]
    whole = SampledTokens.joined(parts)
    assert whole == SampledTokens([4, 5, -1], [None, None, "x"], {2: "why"}, [report])


def test_a_part_of_a_step_has_the_same_rows_as_the_step() -> None:
    int32 = np.int32
    batch = StepBatch(
        token_ids=np.arange(10, 16, dtype=int32),
        positions=np.array([4, 7, 0, 1, 2, 3], dtype=int32),
        cu_seqlens=np.array([0, 1, 2, 6], dtype=int32),
        seq_lens=np.array([5, 8, 4], dtype=int32),
        block_tables=np.arange(6, dtype=int32).reshape(1, 3, 2),
        slot_mapping=np.arange(6, dtype=np.int64).reshape(1, 6),
        image_rows=[(2, 1, b"a", 0), (4, 2, b"b", 1)],
        slots=np.array([8, 6, 9], dtype=int32),
        sampling=["x", "y", "z"],
        sample_rows=np.array([0, 1, 2, 2], dtype=int32),
        sample_tokens=np.array([0, 1, 4, 5], dtype=int32),
        prompt_rows=[(2, 0, np.arange(4, dtype=int32))],
    )
    part = batch.part(1, 3)
    assert part.token_ids.tolist() == [11, 12, 13, 14, 15]
    assert part.cu_seqlens.tolist() == [0, 1, 5]
    assert part.block_tables.tolist() == [[[2, 3], [4, 5]]]
    assert part.slot_mapping.tolist() == [[1, 2, 3, 4, 5]]
    assert part.image_rows == [(1, 1, b"a", 0), (3, 2, b"b", 1)]
    assert (part.sampling, part.slots.tolist()) == (["y", "z"], [6, 9])
    assert (part.sample_rows.tolist(), part.sample_tokens.tolist()) == ([0, 1, 1], [0, 3, 4])
    assert [row for row, *_ in part.prompt_rows] == [1]
