"""What rounding weights and KV costs in quality: perplexity, divergence and agreement over texts.

    python -m benchmarks.quantization_quality MODEL [--formats int8,int4] [--texts DIR]

Every format answers the same prompts as the base does, weights as floats in float32 (``--base`` for another dtype):
whole texts, of which each token's log-probability is asked for. Without ``--texts``, a directory of text files, they
are forty topics of Python's own ``help()``, in English; for the bundled model they are the guide's chats. The
divergence is that of Kullback and Leibler from the base to the format, of the 20 likeliest ids at each position and all
others together, so it is a lower bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams
from chairlift.config import BUNDLED_MODEL
from tools.guide import read_guide
from tools.score_bundled_model import held_back_questions

TOP = 20
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "stored": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
"""Settings by name; ``stored`` takes a quantised checkpoint as it is."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of every position of all texts but the first of each."""

    logprobs: list[float]
    """Of the token that is there."""
    likeliest: list[dict[int, float]]
    """Log-probabilities of the likeliest ids."""

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


@dataclasses.dataclass(frozen=True)
class Cost:
    """A format against the base."""

    perplexity: float
    growth: float
    """Of the perplexity, as a fraction."""
    divergence: float
    """Mean over positions, in nats."""
    agreement: float
    """Share of positions where the likeliest id is the same."""


def default_texts() -> list[str]:
    """Forty topics of some length."""
    topics = pydoc_data.topics.topics
    return [text for _, text in sorted(topics.items()) if len(text) > 1500][:40]


def guide_chats(llm: LLM) -> list[list[int]]:
    """What the bundled model knows: each answer of the guide behind a wording of its question that it never saw."""
    assert llm.tokenizer is not None
    return [
        llm.encode_chat([{"role": "user", "content": question}]) + llm.tokenizer.encode(answer)
        for question, answer in held_back_questions(read_guide())
    ]


def score(model: str, texts: Sequence[str], most_tokens: int, **settings: Any) -> Scores:
    """Log-probabilities of the first ``most_tokens`` of each text, or of the guide's chats for the bundled model."""
    llm = LLM(model, max_num_seqs=16, kv_cache_memory_bytes=1 << 30, **settings)
    assert llm.tokenizer is not None
    tokenized = [llm.tokenizer.encode(text) for text in texts] if model != BUNDLED_MODEL else guide_chats(llm)
    prompts = [ids[:most_tokens] for ids in tokenized]
    scores = Scores([], [])
    for prompt, output in zip(
        prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)), strict=True
    ):
        for token, entries in zip(prompt, output.prompt_logprobs or [], strict=True):
            if entries:
                scores.logprobs.append(entries[token].logprob)
                ranked = {i: e.logprob for i, e in entries.items() if e.rank is not None and e.rank <= TOP}
                scores.likeliest.append(ranked)
    return scores


def compare(base: Scores, other: Scores) -> Cost:
    """The cost of ``other``."""
    divergence, agreed = 0.0, 0
    for one, two in zip(base.likeliest, other.likeliest, strict=True):
        both = one.keys() & two.keys()
        rest = [max(1e-9, 1 - sum(math.exp(each[i]) for i in both)) for each in (one, two)]
        divergence += sum(math.exp(one[i]) * (one[i] - two[i]) for i in both) + rest[0] * math.log(rest[0] / rest[1])
        agreed += max(one, key=one.__getitem__) == max(two, key=two.__getitem__)
    count = len(base.likeliest)
    growth = other.perplexity / base.perplexity - 1
    return Cost(other.perplexity, growth, divergence / count, agreed / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--base", default="float32")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="most of each text")
    args = parser.parse_args()
    texts = default_texts()
    if args.texts:
        texts = [path.read_text(encoding="utf-8") for path in sorted(args.texts.rglob("*.md"))]
    base = score(args.model, texts, args.tokens, dtype=args.base, quantization="none")
    print(f"{len(texts)} texts, {len(base.logprobs):,} tokens; perplexity of {args.base} weights {base.perplexity:.4f}")
    print(f"{'format':12} {'perplexity':>10} {'growth':>8} {'divergence':>10} {'same top':>8}")
    for name in args.formats.split(","):
        cost = compare(base, score(args.model, texts, args.tokens, **FORMATS[name]))
        print(
            f"{name:12} {cost.perplexity:10.4f} {cost.growth:+8.2%} {cost.divergence:10.5f} {cost.agreement:8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
