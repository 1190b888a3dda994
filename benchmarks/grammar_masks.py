"""Measures the cost of grammar masks: the time of one row's mask, and the time that masks add to a step of 32 rows.

python benchmarks/grammar_masks.py [DIRECTORY WITH tokenizer.json]
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import numpy as np

import chairlift
from chairlift import LLM, SamplingParams
from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.text.grammar.compiler import GrammarCompiler
from chairlift.text.tokenizer.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "maxItems": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 1000},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x"],
        },
    },
    "required": ["name", "tags", "size", "place"],
    "additionalProperties": False,
}


def masks(folder: str) -> None:
    """Compile grammars, then follow random outputs and time each mask."""
    tokenizer = Tokenizer.from_dir(folder)
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids or (0,))
    times, compiling, rng = [], [], random.Random(0)
    compiler.compile(StructuredOutputsParams(choice=["x"]).value)
    for seed in range(20):
        begin = time.perf_counter()
        made = compiler.compile(StructuredOutputsParams(json=SCHEMA | {"title": str(seed)}).value)
        compiling.append(time.perf_counter() - begin)
        matcher = made.matcher()
        for _ in range(200):
            begin = time.perf_counter()
            mask = matcher.mask()
            times.append(time.perf_counter() - begin)
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")) if mask is not None else []
            if not len(ids) or matcher.stopped or not matcher.consume(int(ids[rng.randrange(len(ids))])):
                break
    p50, p99, worst = (1e6 * value for value in np.quantile(times, [0.5, 0.99, 1]))
    print(f"{tokenizer.vocab_size:,} ids: compile {1e3 * np.median(compiling):.1f} ms; {len(times)} masks,", end=" ")
    print(f"p50 {p50:.0f} us, p99 {p99:.0f} us, longest {worst:.0f} us")


def steps() -> None:
    """Print the milliseconds per decode step of the bundled model with 32 rows, with and without a schema."""
    llm = LLM(max_num_seqs=32)
    for name, asked in (("free", None), ("held", {"json": SCHEMA})) * 2:
        fields = {"ignore_eos": True} if asked is None else {"structured_outputs": asked}
        params = SamplingParams(max_tokens=100, seed=1, temperature=1.0, **fields)
        before = len(llm.engine.step_log)
        llm.generate([f"Item {i}" for i in range(32)], params)
        records = [each for each in list(llm.engine.step_log)[before:] if len(each.rows) == 32 and not each.chunks]
        taken = [each.end - each.start for each in records]
        print(
            f"{name}: {len(taken)} steps of 32 rows, median {1e3 * float(np.median(taken)):.2f} ms" if taken else name
        )


if __name__ == "__main__":
    masks(sys.argv[1] if len(sys.argv) > 1 else str(Path(chairlift.__file__).parent / "assets"))
    steps()
