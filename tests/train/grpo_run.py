"""The GRPO example with checkpoints, in a process that kills itself at a given point.

::

    python -m tests.train.grpo_run DIRECTORY step 2       # SIGKILL after the 2nd step of this process
    python -m tests.train.grpo_run DIRECTORY rollout 5    # SIGKILL after the 5th step of the engine for rollouts
    python -m tests.train.grpo_run DIRECTORY never 0
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from chairlift import LLM

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
POINTS = ("rollout", "step", "written", "flushed", "renamed")


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(directory: Path, point: str = "never", count: int = 0) -> dict[str, Any]:
    """Train. The process kills itself when it reaches ``point`` for the ``count``-th time."""
    seen: Counter[str] = Counter()
    step_for = LLM.step_for

    def at(name: str) -> None:
        seen[name] += 1
        if (name, seen[name]) == (point, count):
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: LLM, requests: Any) -> Any:
        outputs = step_for(self, requests)
        at("rollout")
        return outputs

    LLM.step_for = counted  # type: ignore[method-assign]
    torch.set_num_threads(1)
    try:
        result: dict[str, Any] = example().train(
            ROOT / "chairlift" / "assets", steps=STEPS, seed=0, shuffle=False, output=directory, every=2, at=at
        )
    finally:
        LLM.step_for = step_for  # type: ignore[method-assign]
    return result


if __name__ == "__main__":
    print(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
