"""Greedy answers are compared with llama.cpp's up to the first difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.llama_cpp_answers import Difference, compare
from chairlift import LLM, SamplingParams
from tests.models.tiny import tiny_hf_model

PROMPTS = [[5, 9, 77, 3], [7, 21]]
TOKENS = 6


def test_the_first_difference_has_a_place_and_two_margins(tmp_path: Path) -> None:
    llm = LLM(tiny_hf_model(tmp_path, "llama"), num_kv_blocks=16, skip_tokenizer_init=True, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    answers: list[dict[str, Any]] = [{"tokens": list(each.token_ids), "margins": [0.25] * TOKENS} for each in outputs]
    assert compare(llm, PROMPTS, answers, TOKENS) == [Difference(TOKENS, True, 0.0, 0.0)] * 2
    logprobs = outputs[1].logprobs
    assert logprobs is not None
    second = sorted(logprobs[3], key=lambda token: -logprobs[3][token].logprob)[1]
    answers[1]["tokens"][3] = second
    found = compare(llm, PROMPTS, answers, TOKENS)[1]
    assert (found.place, found.equal, found.their_margin) == (3, False, 0.25)
    chosen = outputs[1].token_ids[3]
    assert found.our_margin == logprobs[3][chosen].logprob - logprobs[3][second].logprob > 0
    answers[1]["tokens"][3] = next(token for token in range(128) if token not in logprobs[3])
    assert compare(llm, PROMPTS, answers, TOKENS)[1].our_margin == float("inf")
