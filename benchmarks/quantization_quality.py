"""Measures the loss of quality by rounding weights and KV: perplexity, divergence and agreement over texts.

    python -m benchmarks.quantization_quality MODEL [--formats int8,int4] [--models DIR,...] [--texts DIR]

Every format scores the same texts as the base, which has float weights in float32 (``--base`` for another dtype). The
log-probability of each token of a text is used. Without ``--texts``, a directory of text files, the texts are forty
topics of Python's own ``help()``, in English. For the bundled model they are the guide's chats; with ``--answers`` only
the tokens of the answers are scored. ``--models`` are directories and GGUF files of the same model, for example
from ``chairlift quantize`` and from llama.cpp, each served as it is stored. The divergence is the Kullback-Leibler
divergence from the base to the format. It is a lower bound, because it covers the 20 most likely ids at each position,
and all other ids as a single one.

``--calibration FILE`` only writes the guide's chats with which the bundled model was trained, for ``chairlift quantize
bundled OUT --calibrate FILE``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
"""Name of a format -> engine settings. ``stored`` serves a quantised checkpoint as it is."""


Prompt = tuple[list[int], int]
"""(token ids, index of the first token that is scored)."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities at all scored positions of all prompts, in order."""

    logprobs: list[float]
    """Log-probability of the actual token at each position."""
    likeliest: list[dict[int, float]]
    """One entry per position: token id -> log-probability, for the most likely ids."""

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


@dataclasses.dataclass(frozen=True)
class Cost:
    """Loss of quality of a format relative to the base."""

    perplexity: float
    growth: float
    """Relative growth of the perplexity (0.01 is 1 %)."""
    divergence: float
    """Mean divergence over the positions, in nats."""
    agreement: float
    """Fraction of positions at which the format and the base have the same most likely id."""


def default_texts() -> list[str]:
    """Texts of forty topics of Python's ``help()`` that are long enough."""
    topics = pydoc_data.topics.topics
    return [text for _, text in sorted(topics.items()) if len(text) > 1500][:40]


def guide_chats(llm: LLM, questions: Sequence[tuple[str, str]]) -> list[Prompt]:
    """Token ids of each answer after its question, as in the training of the bundled model, and the index at which the
    answer begins."""
    assert llm.tokenizer is not None
    asked = [llm.encode_chat([{"role": "user", "content": question}]) for question, _ in questions]
    answers = [llm.tokenizer.encode(answer, add_special_tokens=False) for _, answer in questions]
    return [(one + two, len(one)) for one, two in zip(asked, answers, strict=True)]


def write_calibration(path: Path) -> None:
    """Write the guide's chats with which the bundled model was trained, as JSON lines with the template's special
    tokens."""
    llm = LLM(BUNDLED_MODEL)
    assert llm.tokenizer is not None
    trained = [(question, entry.answer) for entry in read_guide() for question in entry.questions]
    with path.open("w", encoding="utf-8") as file:
        for ids, _ in guide_chats(llm, trained):
            text = llm.tokenizer.backend.decode(ids, skip_special_tokens=False)
            file.write(json.dumps({"text": text}) + "\n")


def make_prompts(model: str, texts: Sequence[str], most_tokens: int, answers: bool) -> list[Prompt]:
    """The first ``most_tokens`` tokens of each text, or of the guide's chats for the bundled model. With ``answers``,
    only answers are scored."""
    llm = LLM(model)
    assert llm.tokenizer is not None
    if model == BUNDLED_MODEL:
        chats = guide_chats(llm, held_back_questions(read_guide()))
        return [(ids[:most_tokens], first if answers else 1) for ids, first in chats]
    return [(llm.tokenizer.encode(text)[:most_tokens], 1) for text in texts]


def score(model: str, prompts: Sequence[Prompt], **settings: Any) -> Scores:
    """Log-probabilities of a model at all scored positions of the prompts."""
    llm = LLM(model, max_num_seqs=16, kv_cache_memory_bytes=1 << 30, **settings)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)
    scores = Scores([], [])
    for (prompt, first), output in zip(prompts, llm.generate([ids for ids, _ in prompts], params), strict=True):
        for token, entries in list(zip(prompt, output.prompt_logprobs or [], strict=True))[first:]:
            if entries:
                scores.logprobs.append(entries[token].logprob)
                ranked = {i: e.logprob for i, e in entries.items() if e.rank is not None and e.rank <= TOP}
                scores.likeliest.append(ranked)
    return scores


def compare(base: Scores, other: Scores) -> Cost:
    """Loss of quality of ``other`` relative to ``base``."""
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
    parser.add_argument(
        "--formats", default=",".join(FORMATS), help="names of formats, separated by commas; may be empty"
    )
    parser.add_argument("--models", default="", help="directories and GGUF files, separated by commas")
    parser.add_argument(
        "--calibration", type=Path, help="only write the texts for calibrating the bundled model to this file"
    )
    parser.add_argument("--base", default="float32")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="maximum number of tokens used of each text")
    parser.add_argument("--answers", action="store_true", help="in chats, score only the tokens of answers")
    args = parser.parse_args()
    if args.calibration:
        write_calibration(args.calibration)
        return
    texts = default_texts()
    if args.texts:
        texts = [path.read_text(encoding="utf-8") for path in sorted(args.texts.rglob("*.md"))]
    prompts = make_prompts(args.model, texts, args.tokens, args.answers)
    base = score(args.model, prompts, dtype=args.base, quantization="none")
    print(
        f"{len(prompts)} texts, {len(base.logprobs):,} tokens; perplexity of {args.base} weights {base.perplexity:.4f}"
    )
    print(f"{'format':18} {'perplexity':>10} {'growth':>8} {'divergence':>10} {'same top':>8}")
    others = [(name, args.model, FORMATS[name]) for name in args.formats.split(",") if name]
    others += [(Path(name).name, name, FORMATS["stored"]) for name in args.models.split(",") if name]
    for name, model, settings in others:
        cost = compare(base, score(model, prompts, **settings))
        print(
            f"{name:18} {cost.perplexity:10.4f} {cost.growth:+8.2%} {cost.divergence:10.5f} {cost.agreement:8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
