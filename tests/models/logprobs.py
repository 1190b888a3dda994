"""Compares an engine's greedy outputs with transformers: tokens and log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams
from tests.models.tiny import hf_logits

__all__ = ["PROMPTS", "check_logprobs"]

PROMPTS = [[5, 9, 77, 3, 21, 64, 8, 100, 41, 2, 90, 13, 55, 6, 31, 70], [7], [3] * 40]


def check_logprobs(
    model_dir: Path, model: Any, tolerance: float, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> list[str]:
    """Fail unless each token is the best one according to transformers, with the same log-probability. Returns the
    notes that the model's config produces."""
    llm = LLM(model_dir, num_kv_blocks=60, max_num_batched_tokens=24, skip_tokenizer_init=True, **settings)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        expected = hf_logits(model, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
        for place, token in enumerate(answer.token_ids):
            best, found = float(expected[place].max()), answer.logprobs[place][token].logprob
            assert expected[place, token] >= best - tolerance, "another token is more likely"
            assert abs(found - float(expected[place, token])) <= tolerance, "its log-probability is another"
    return list(llm.notes)
