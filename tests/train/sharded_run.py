"""One process of a test of sharded weights: ``python -m tests.train.sharded_run DIRECTORY CASE``, under a launcher.

Rank 0 writes the gradients and the results of two steps of three packs, which two ranks cannot share evenly.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chairlift.train.config import TrainerConfig
from chairlift.train.layout import Pack
from chairlift.train.parallel import process_group
from chairlift.train.stream import PackStream
from chairlift.train.trainer import Trainer
from tests.train.test_trainer import examples, tiny_model


def steps() -> list[list[Pack]]:
    """The data of two steps, with three packs each."""
    return list(PackStream(examples(30), 64, pool=8, step="packs:3").steps())[:2]


def trainer_of(case: str, ranks: int = 1) -> Trainer:
    """The trainer of a case: ``native`` or ``foreign``, and ``-recomputed`` if layers are computed again."""
    from chairlift.train.hf_network import TransformersNetwork
    from tests.train.test_hf_network import tiny_model as foreign_model

    family, _, recomputes = case.partition("-")
    model: Any = tiny_model() if family == "native" else TransformersNetwork(foreign_model("olmo").eval())
    config = TrainerConfig(
        steps=2,
        warmup_steps=0,
        max_grad_norm=0.5,
        sharding="fsdp" if ranks > 1 else "none",
        gradient_checkpointing=bool(recomputes),
    )
    return Trainer(model, config)


def main() -> None:
    torch.set_num_threads(1)
    directory, case = Path(sys.argv[1]), sys.argv[2]
    with process_group() as ranks:
        trainer = trainer_of(case, ranks.size)
        assert trainer.is_sharded
        results, found = [], {}
        for packs in steps():
            result = trainer.step(packs[:2] if ranks.rank == 0 else packs[2:])
            results.append([result.loss, result.grad_norm, float(result.num_packs)])
            named = trainer._parameters.items()
            found |= {f"step {result.step}.{name}": p.grad.full_tensor() for name, p in named}  # type: ignore[union-attr]
            found |= {f"weights.{name}": p.detach().full_tensor() for name, p in named}  # type: ignore[attr-defined]
            local = sum(p.to_local().numel() for _, p in named)  # type: ignore[attr-defined]
            assert local < 0.6 * sum(p.numel() for _, p in named)
        if ranks.rank == 0:
            save_file(
                {**{name: value.contiguous() for name, value in found.items()}, "results": torch.tensor(results)},
                directory / "found.safetensors",
            )


if __name__ == "__main__":
    main()
