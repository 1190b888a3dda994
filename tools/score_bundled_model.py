"""Asks the bundled model every held-back wording of the guide, and counts the correct answers.

::

    python -m tools.score_bundled_model [--model DIR] [--show]

An answer is correct if it equals the guide's answer after :func:`tools.guide.normalise`. Decoding is greedy. The exit
code is 1 if the fraction of correct answers is below ``--minimum``, or if a training wording is too close to a
held-back wording.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path

from chairlift import LLM, SamplingParams
from tools.guide import MAX_JACCARD, Entry, HeldBack, normalise, read_guide, violations
from tools.train_bundled_model import ASSETS_DIR, Curriculum, train_tokenizer

__all__ = ["Answer", "ask", "held_back_questions"]

MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one wording."""

    question: str
    expected: str
    text: str

    @property
    def right(self) -> bool:
        return normalise(self.text) == normalise(self.expected)


def held_back_questions(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """(held-back wording, expected answer) for all entries."""
    return [(question, entry.answer) for entry in entries for question in entry.held_back]


def ask(llm: LLM, questions: Sequence[tuple[str, str]]) -> list[Answer]:
    """Send each (wording, expected answer) to the model through its chat template, all in one continuous batch."""
    conversations = [[{"role": "user", "content": question}] for question, _ in questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    texts = [output.outputs[0].text for output in outputs]
    return [Answer(question, expected, text) for (question, expected), text in zip(questions, texts, strict=True)]


def nearest_variation(entries: Sequence[Entry], count: int) -> float:
    """Largest Jaccard index between a held-back wording and ``count`` variations that are drawn as in training."""
    held_back = HeldBack(question for question, _ in held_back_questions(entries))
    rng = random.Random(12345)
    curriculum = Curriculum(entries, train_tokenizer(entries), rng)
    return max(held_back.nearest(curriculum.wording(rng.choice(entries))) for _ in range(count))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ASSETS_DIR, help="directory of the model")
    parser.add_argument("--minimum", type=float, default=0.8, help="minimum fraction of correct answers")
    parser.add_argument("--variations", type=int, default=20_000, help="training variations to check for distance")
    parser.add_argument("--show", action="store_true", help="print wrong answers")
    args = parser.parse_args()
    entries = read_guide()
    began = time.perf_counter()
    answers = ask(LLM(args.model), held_back_questions(entries))
    seconds = time.perf_counter() - began
    right = sum(answer.right for answer in answers)
    for answer in answers:
        if args.show and not answer.right:
            print(f"? {answer.question}\n  expected: {answer.expected}\n  got:      {answer.text}")
    close, nearest = violations(entries), nearest_variation(entries, args.variations)
    print(f"{right} of {len(answers)} held-back wordings right: {right / len(answers):.1%} ({seconds:.1f} s)")
    print(f"nearest of {args.variations} training variations: Jaccard {nearest:.3f} (must be below {MAX_JACCARD})")
    for line in close:
        print("too close to a held-back wording:", line)
    return 0 if right / len(answers) >= args.minimum and not close and nearest < MAX_JACCARD else 1


if __name__ == "__main__":
    raise SystemExit(main())
