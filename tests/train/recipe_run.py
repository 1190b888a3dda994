"""A recipe of ``examples/`` on a few records, and a process that kills itself at a given point.

::

    python -m tests.train.recipe_run DIRECTORY train forward 3    # SIGKILL within the 3rd forward pass of this process
    python -m tests.train.recipe_run DIRECTORY pretrain flushed 1 # at the 1st time a save of it gets to that point
    python -m tests.train.recipe_run DIRECTORY train never 0
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from chairlift_train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
STEPS = 44
POINTS = ("forward", "backward", "step", "written", "flushed", "renamed")
_WORDS = ("a", "request", "waits", "until", "its", "row", "is", "free", "and", "then", "joins", "the", "batch")


def write_data(directory: Path) -> None:
    """Write the data of the recipes: chats for ``train``, and Parquet files of texts for ``pretrain``."""
    import pyarrow
    from pyarrow import parquet

    rng = random.Random(0)

    def text(most: int) -> str:
        return " ".join(rng.choices(_WORDS, k=rng.randint(3, most)))

    chats = [
        {"messages": [{"role": "user", "content": text(12)}, {"role": "assistant", "content": text(30)}]}
        for _ in range(40)
    ]
    (directory / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for name, count in (("train-0", 25), ("train-1", 15), ("held-out", 4)):
        texts = [text(120) for _ in range(count)]
        parquet.write_table(pyarrow.table({"text": texts}), directory / f"{name}.parquet")


def config_of(recipe: str, directory: Path) -> TrainConfig:
    """The recipe's file, with the data of ``directory`` and steps of a size for tests."""
    overrides = {
        "model.path": str(ROOT / "chairlift" / "assets"),
        "output": str(directory / recipe),
        "packing.capacity": 96,
        "packing.pool": 8,
        "training.steps": STEPS,
        "training.warmup_steps": 2,
        "checkpoints.every": 1,
        "threads": 1,
    }
    if recipe == "train":
        overrides |= {"data.files": str(directory / "chats.jsonl"), "packing.step": "sequences:4"}
    else:
        overrides |= {"data.files": str(directory / "train-*.parquet"), "packing.step": "tokens:192"}
        overrides["data.eval_files"] = "{held-out: [" + str(directory / "held-out.parquet") + "]}"
    path = ROOT / "examples" / f"{recipe}.yaml"
    return TrainConfig.from_file(path, [f"{key}={value}" for key, value in overrides.items()])


def run(recipe: str, directory: Path, point: str = "never", count: int = 0) -> Path:
    """Train. The process kills itself when it reaches ``point`` for the ``count``-th time. Returns the last
    checkpoint."""
    import torch

    from chairlift_train.networks import NativeNetwork
    from chairlift_train.run import train

    seen: Counter[str] = Counter()

    def at(name: str) -> None:
        seen[name] += 1
        if (name, seen[name]) == (point, count):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_start(network: Any) -> None:
        assert isinstance(network, NativeNetwork)
        layers = list(network.model.model.layers)
        middle = layers[len(layers) // 2]
        middle.register_forward_hook(lambda *_: at("forward"))
        middle.register_full_backward_hook(lambda *_: at("backward"))

    torch.set_num_threads(1)
    config = config_of(recipe, directory)
    return train(config, on_start=on_start, on_save=at, on_step=lambda *_: at("step")).directory


if __name__ == "__main__":
    run(sys.argv[2], Path(sys.argv[1]), sys.argv[3], int(sys.argv[4]))
