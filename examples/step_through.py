"""Runs three requests on the bundled model, one call at a time: schedule, execute, sample, update.

    python examples/step_through.py              # prints the SchedulerOutput and the StepBatch of each step
    python examples/step_through.py --steps 2    # only the first steps
    python examples/step_through.py --debug      # stops at the first line of each call, in Python's debugger

In the debugger, `c` goes to the next of the four calls, `s` steps into a function, `n` to the next line, `p out` prints
a variable, `w` shows where you are, and `q` ends. The loop is the one of `EngineCore.step` in chairlift/engine/core.py,
without its bookkeeping.
"""

from __future__ import annotations

import argparse
import dataclasses
import pdb
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from chairlift import LLM, SamplingParams

QUESTIONS = ("What is a KV cache?", "What is preemption?", "What is continuous batching?")


class _Debugger(pdb.Pdb):
    """Python's debugger. Its ``q`` ends the program, not only the call."""

    def set_quit(self) -> None:
        sys.exit()


def show(title: str, record: Any) -> None:
    """Print the fields of a dataclass that are not empty."""
    print(title)
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray) and field.name != "tokens":
            print(f"    {field.name} {list(value.shape)} = {' '.join(str(value).split())}")
        elif field.name == "tokens":  # all rows of the InputBatch in full length
            print(f"    tokens {list(value.shape)}")
        elif field.name == "sampling":
            print(f"    sampling = parameters of {len(value)} rows")
        elif field.name == "joined":
            for row in value:
                print(f"    joined: {dataclasses.replace(row, sampling='(its parameters)')}")
        elif value:
            print(f"    {field.name} = {value}")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and run the steps."""
    parser = argparse.ArgumentParser(description="One step of the engine, call by call.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--debug", action="store_true", help="stop at the first line of each call")
    arguments = parser.parse_args(argv)

    # Two rows and a small budget: the first steps show a chunk, a decode row beside it, and a waiting request.
    llm = LLM(max_num_seqs=2, max_num_batched_tokens=12, block_size=16, num_kv_blocks=64)
    engine = llm.engine
    for name, question in zip("ABC", QUESTIONS, strict=True):
        engine.add_request(question, SamplingParams(temperature=0.0, max_tokens=4), request_id=name)
    scheduler, executor = engine.scheduler, engine.core.executor

    def call(function: Any, *args: Any) -> Any:
        """Call a function; with --debug, stop at its first line."""
        return _Debugger().runcall(function, *args) if arguments.debug else function(*args)

    for _ in range(arguments.steps):
        if not scheduler.has_unfinished:
            break
        now = engine.clock.now()
        out = call(scheduler.schedule, now)
        show(f"\nstep {out.step}: schedule returns a SchedulerOutput", out)
        hidden, batch = call(executor.execute, out)
        show("execute makes a StepBatch from it, and runs the model", batch)
        tokens = call(executor.sample, (hidden, batch)).result()
        print(f"sample returns {tokens.token_ids}")
        result = call(scheduler.update, out, tokens.token_ids, engine.clock.now())
        print(f"update stores the tokens; finished: {[request.request_id for request in result.finished]}")


if __name__ == "__main__":
    main()
