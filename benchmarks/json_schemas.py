"""Checks grammars against a folder of JSON schemas with valid and invalid instances, and measures their times.

python benchmarks/json_schemas.py FOLDER DIRECTORY [--most 500] [--seed 0] [--show 5]

FOLDER has one JSON file per schema with the keys ``schema`` and ``tests`` (a list with ``data`` and ``valid``), as in
maskbench/data of JSONSchemaBench. DIRECTORY has a model's tokenizer.json. Each schema is compiled as in the server, and
each instance is fed to its grammar token by token, with a mask before each token. The exit code is 1 if an invalid
instance was accepted, or if a valid instance was refused for another reason than a limit. Times are processor times of
this thread, so that other work on the machine matters less.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.errors import RequestError
from chairlift.text.grammar.compiler import GrammarCompiler
from chairlift.text.tokenizer.tokenizer import Tokenizer

_LIMIT = re.compile("allowed; make the grammar simpler|Current row has|too many items|limit")
"""Errors that mean that a limit of time or size was reached."""


class Run:
    """Counts and times over all schemas so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = tokenizer.eos_token_ids or (0,)
        self._compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, self._ends)
        self.compiling: list[float] = []
        self.masks: list[float] = []
        self.refused: Counter[str] = Counter()
        self.limited: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._compiler.compile(StructuredOutputsParams(choice=["x"]).value)

    def follow(self, path: Path) -> None:
        """Compile one schema, and check each of its instances."""
        case = json.loads(path.read_text(encoding="utf-8"))
        begin = time.thread_time()
        try:
            made = self._compiler.compile(StructuredOutputsParams(json=case["schema"]).value)
        except (RequestError, ValueError) as error:
            self.refused[_kind(str(error))] += 1
            return
        finally:
            self.compiling.append(time.thread_time() - begin)
        for number, test in enumerate(case["tests"]):
            text = json.dumps(test["data"], ensure_ascii=False)
            accepted, reason = self._accepts(made, text)
            kind = "valid" if test["valid"] else "invalid"
            if test["valid"] and not accepted and _LIMIT.search(reason):
                self.counts["valid, ended by a limit"] += 1
                self.limited[_kind(reason)] += 1
                continue
            self.counts[f"{kind}, {'accepted' if accepted else 'refused'}"] += 1
            if accepted != test["valid"]:
                self.wrong.append(f"{path.name} test {number}: {kind} instance {text[:120]} {reason[:200]}")

    def _accepts(self, made, text: str) -> tuple[bool, str]:
        """(whether the grammar accepts ``text`` as a complete output, error of the matcher)."""
        matcher = made.matcher()
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            begin = time.thread_time()
            mask = matcher.mask()
            self.masks.append(time.thread_time() - begin)
            if mask is None or not mask[token // 32] >> token % 32 & 1 or not matcher.consume(token):
                return False, matcher.error
        mask = matcher.mask()
        return mask is not None and any(mask[end // 32] >> end % 32 & 1 for end in self._ends), matcher.error


def _kind(error: str) -> str:
    """Type of an error: its message without the part that is specific to a schema."""
    named = re.search(r'keywords? (".*?"), and no answer', error)
    text = error.split("followed: ", 1)[-1]
    return f"keyword {named[1]}" if named else re.sub(r"[\"'`].*?[\"'`]|\d+", "..", text)[:70]


def main() -> int:
    """Check all schemas, and print counts and times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--most", type=int, default=0, help="number of schemas, drawn at random (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=5, help="wrong verdicts to print")
    asked = parser.parse_args()
    paths = sorted(asked.folder.glob("*.json"))
    if asked.most:
        paths = random.Random(asked.seed).sample(paths, min(asked.most, len(paths)))
    if not paths:
        parser.error(f"{asked.folder} has no JSON files")
    tokenizer = Tokenizer.from_dir(asked.tokenizer)
    run = Run(tokenizer)
    for path in paths:
        run.follow(path)
    print(f"{len(paths):,} schemas, {tokenizer.vocab_size:,} ids")
    print(f"refused: {run.refused.total():,}")
    for reason, count in run.refused.most_common(12):
        print(f"  {count:5,}  {reason}")
    for name, count in sorted(run.counts.items()):
        print(f"{name}: {count:,}")
    for reason, count in run.limited.most_common():
        print(f"  {count:5,}  {reason}")
    for name, times in (("compile", run.compiling), ("mask", run.masks)):
        p50, p99, worst = (1e3 * value for value in np.quantile(times, [0.5, 0.99, 1]))
        print(f"{name}: {len(times):,}, p50 {p50:.3f} ms, p99 {p99:.3f} ms, worst {worst:.1f} ms")
    for line in run.wrong[: asked.show]:
        print("WRONG", line)
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
