"""Measures the cost of grammars: decode steps of 32 rows with a grammar against 32 rows without, and the time that
compiling a grammar adds to running steps.

python benchmarks/grammar_cost.py [MODEL] [--rows 32] [--tokens 24] [--rounds 3] [--json FILE]

MODEL is a model's directory (make_random_model.py writes a model of a real shape). Each round has three parts: rows
without a grammar, rows with a grammar, and rows without a grammar while a thread compiles one new schema after another,
as the engine's own thread does. The tokenizer's tables are built before the measurement. The time of a step is from its
start to its end in the step log.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import LLM, SamplingParams
from chairlift.base.structured_outputs import StructuredOutputsParams

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "maxItems": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 1000},
        "kind": {"enum": ["small", "large", "none"]},
    },
    "required": ["name", "tags", "size", "kind"],
    "additionalProperties": False,
}
_LIST = {"type": "array", "items": _ITEM, "minItems": 50}
"""Schema of a long list. No output that satisfies it ends early, so all rows stay in the batch."""
_PAUSE = 0.25
"""Seconds between two compilations."""


class Compiling:
    """While used as a context manager, compiles a new schema every ``_PAUSE`` seconds on its own thread."""

    def __init__(self, llm: LLM, number: int) -> None:
        self._compiler = llm.engine.core.preparers.grammars._compiler_of()
        self._number = number
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []
        """Processor seconds of each compilation."""

    def _run(self) -> None:
        while not self._over.wait(_PAUSE):
            self._number += 1
            names = [f"field_{i}" for i in range(200)]
            schema = {**_ITEM, "title": str(self._number), "properties": {**_ITEM["properties"]}}
            schema["properties"] |= {name: {"type": "string", "maxLength": 100} for name in names}
            begin = time.thread_time()
            self._compiler.compile(StructuredOutputsParams(json=schema).value)
            self.seconds.append(time.thread_time() - begin)

    def __enter__(self) -> Compiling:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def steps(llm: LLM, rows: int, tokens: int, form: dict[str, Any] | None, seed: int) -> list[float]:
    """Seconds of each decode step in which all rows decode."""
    fields: dict[str, Any] = {"ignore_eos": True} if form is None else {"structured_outputs": {"json": form}}
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, **fields)
    before = len(llm.engine.step_log)
    llm.generate([f"Item {i} of round {seed}" for i in range(rows)], params)
    records = list(llm.engine.step_log)[before:]
    return [each.end - each.start for each in records if len(each.rows) == rows and not each.chunks]


def told(name: str, taken: list[float]) -> dict[str, float]:
    """Print and return the median, the p99 and the number of steps. Times are in milliseconds."""
    p50, p99 = (1e3 * float(value) for value in np.quantile(taken, [0.5, 0.99]))
    print(f"{name}: {len(taken)} steps, median {p50:.2f} ms, p99 {p99:.2f} ms")
    return {"steps": len(taken), "p50_ms": p50, "p99_ms": p99}


def main() -> int:
    """Measure steps without a grammar, with a grammar and during compilation in turns, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    sizes = {"max_num_seqs": settings.rows, "max_model_len": 512}
    llm = LLM(settings.model, **sizes) if settings.model else LLM(**sizes)
    steps(llm, settings.rows, 4, _LIST, 0)
    taken: dict[str, list[float]] = {"free": [], "held": [], "beside": []}
    ratios, compiles, added = [], [], 0.0
    for number in range(1, settings.rounds + 1):
        free = steps(llm, settings.rows, settings.tokens, None, number)
        held = steps(llm, settings.rows, settings.tokens, _LIST, number)
        with Compiling(llm, 1000 * number) as beside:
            during = steps(llm, settings.rows, settings.tokens, None, number)
        again = steps(llm, settings.rows, settings.tokens, None, number)
        quiet = [*free, *again]
        ratios.append(float(np.median(held) / np.median(quiet)))
        added += float(np.sum(during) - len(during) * np.mean(quiet))
        compiles += beside.seconds
        taken["free"] += quiet
        taken["held"] += held
        taken["beside"] += during
    names = ("without a grammar", "with a grammar", "without, while schemas are compiled")
    figures = {key: told(name, taken[key]) for key, name in zip(taken, names, strict=True)}
    spread = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"a step with {settings.rows} held rows / without: {np.median(ratios):.3f} ({spread})")
    share = added / sum(compiles)
    print(
        f"{len(compiles)} compiles, {1e3 * np.median(compiles):.1f} ms of processor time each (worst"
        f" {1e3 * max(compiles):.1f}); they added {share:.2f} s to all steps per second of their own"
    )
    if settings.json:
        found = {"figures": figures, "ratios": ratios, "compiles": len(compiles), "added_per_second": share}
        settings.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
