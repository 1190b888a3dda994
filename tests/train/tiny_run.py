"""A small training run, and a process that kills itself at a given point.

::

    python -m tests.train.tiny_run DIRECTORY step 3         # SIGKILL when the 3rd step of the run is done
    python -m tests.train.tiny_run DIRECTORY written 2      # at the 2nd time a save of this process gets to that point
    python -m tests.train.tiny_run DIRECTORY never 0

A file ``DIRECTORY/settings.json`` replaces the settings of the run.
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

VOCAB = 61
STEPS = 12
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_records(path: Path, count: int = 60, seed: int = 0) -> Path:
    """Write random sequences of 2 to 40 token ids. Some tokens have no weight in the loss."""
    rng = random.Random(seed)
    records = []
    for _ in range(count):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))]
        mask = [int(rng.random() < 0.7) for _ in ids[1:]]
        records.append({"input_ids": ids, "loss_weight": [0, *mask[:-1], 1]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings(directory: Path, **training: Any) -> dict[str, Any]:
    """Settings of a training run in ``directory``, whose data is ``directory/data.jsonl``."""
    return {
        "model": {"config": MODEL, "dtype": "float32"},
        "data": {"files": [str(directory / "data.jsonl")]},
        "packing": {"capacity": 64, "pool": 16, "step": "sequences:10"},
        "training": {"steps": STEPS, "warmup_steps": 2, "learning_rate": 0.01, "dropout": 0.1, **training},
        "checkpoints": {"every": 2, "keep": 2},
        "output": str(directory / "out"),
        "threads": 1,
    }


def main() -> None:
    import torch

    from chairlift_train.run import train
    from chairlift_train.trainer import Trainer, TrainingStepResult

    torch.set_num_threads(1)
    directory, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    seen: Counter[str] = Counter()

    def on_save(name: str) -> None:
        seen[name] += 1
        if (name, seen[name]) == (point, count):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(result: TrainingStepResult, _trainer: Trainer) -> None:
        if (point, result.step) == ("step", count):
            os.kill(os.getpid(), signal.SIGKILL)

    own = directory / "settings.json"
    raw = json.loads(own.read_text()) if own.is_file() else settings(directory)
    train(TrainConfig.from_mapping(raw), on_step=on_step, on_save=on_save)


if __name__ == "__main__":
    main()
