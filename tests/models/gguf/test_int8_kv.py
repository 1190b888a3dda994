"""K and V in 8 bits cost little: the perplexity of a real model over texts in the public domain and our own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import pytest

from chairlift import LLM, SamplingParams
from tests.models.gguf.make import real_gguf
from tests.native import needs_kernels

pytestmark = [needs_kernels, pytest.mark.nightly]

MOST_LOSS: Final = 0.003
"""Largest growth of the perplexity."""
GUIDE: Final = Path(__file__).parents[3] / "docs" / "guide"
CLASSICS: Final = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in"
    " Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil"
    " war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on"
    " a great battle-field of that war. We have come to dedicate a portion of that field, as a final resting place"
    " for those who here gave their lives that that nation might live. It is altogether fitting and proper that we"
    " should do this.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once"
    " or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it,"
    " and what is the use of a book, thought Alice, without pictures or conversations? So she was considering in her"
    " own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of"
    " making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White"
    " Rabbit with pink eyes ran close by her.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and"
    " nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of"
    " the world. It is a way I have of driving off the spleen and regulating the circulation.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"
    " a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood,"
    " this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful"
    " property of some one or other of their daughters.",
)


def texts() -> list[str]:
    return [*CLASSICS, *(path.read_text(encoding="utf-8") for path in sorted(GUIDE.glob("*.md"))[:10])]


def perplexity(dtype: str, kv_cache_dtype: str) -> float:
    """Over all tokens of all texts: of short ones alone, rounding to bf16 changes it by more than is allowed here."""
    formats: dict[str, Any] = {"dtype": dtype, "quantization": "stored", "kv_cache_dtype": kv_cache_dtype}
    llm = LLM(str(real_gguf()), **formats, max_model_len=2048, num_kv_blocks=2000)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(text)[:2000] for text in texts()]
    logprobs: list[float] = []
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        entries = zip(prompt, output.prompt_logprobs or [], strict=True)
        logprobs += [entry[token].logprob for token, entry in entries if entry]
    assert len(logprobs) == sum(map(len, prompts)) - len(prompts) > 5000
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_perplexity_hardly_grows(dtype: str) -> None:
    plain, codes = (perplexity(dtype, kept) for kept in ("auto", "int8"))
    print(f"{dtype}: perplexity {plain:.4f}, with K and V in int8 {codes:.4f}, {codes / plain - 1:+.3%}")
    assert plain != codes <= (1 + MOST_LOSS) * plain
