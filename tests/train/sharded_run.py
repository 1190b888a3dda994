"""One process of a test of several ranks: ``python -m tests.train.sharded_run DIRECTORY CASE [MUTANT]``.

Rank 0 writes the gradients and the results of two steps of three packs, which two ranks cannot share evenly. It also
writes the weights and moments as a checkpoint contains them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from chairlift_train import sharding
from chairlift_train.config import TrainerConfig
from chairlift_train.layout import Pack
from chairlift_train.parallel import process_group
from chairlift_train.sharding import whole
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer
from tests.train.test_trainer import examples, tiny_model
from tests.train.training_mutants import plant


def steps() -> list[list[Pack]]:
    """The data of two steps, with three packs each."""
    return list(PackStream(examples(30), 64, pool=8, step="packs:3").steps())[:2]


def trainer_of(case: str, ranks: int = 1) -> Trainer:
    """The trainer of a case: ``native`` or ``foreign``, and ``-recomputed`` if layers are computed again. With several
    ranks its weights are sharded, except with ``-whole``."""
    from chairlift_train.hf_network import TransformersNetwork
    from tests.train.test_hf_network import tiny_model as foreign_model

    family, _, kind = case.partition("-")
    model: Any = tiny_model() if family == "native" else TransformersNetwork(foreign_model("olmo").eval())
    config = TrainerConfig(
        steps=2,
        warmup_steps=0,
        max_grad_norm=0.5,
        sharding="fsdp" if ranks > 1 and kind != "whole" else "none",
        gradient_checkpointing=kind == "recomputed",
    )
    return Trainer(model, config)


def main() -> None:
    torch.set_num_threads(1)
    directory, case = Path(sys.argv[1]), sys.argv[2]
    plant(sys.argv[3:])
    with process_group() as ranks:
        trainer = trainer_of(case, ranks.size)
        assert trainer.is_sharded == (not case.endswith("-whole"))
        results, found = [], {}
        for packs in steps():
            result = trainer.step(packs[:2] if ranks.rank == 0 else packs[2:])
            results.append([result.loss, result.grad_norm, float(result.num_packs)])
            named = trainer._parameters.items()
            found |= {f"step {result.step}.{name}": whole(p.grad) for name, p in named}
            found |= {f"weights.{name}": whole(p.detach()) for name, p in named}
            if trainer.is_sharded:
                local = sum(p.to_local().numel() for _, p in named)  # type: ignore[attr-defined]
                assert local < 0.6 * sum(p.numel() for _, p in named)
        found |= saved(trainer)
        if ranks.rank == 0:
            save_file(
                {**{name: value.clone() for name, value in found.items()}, "results": torch.tensor(results)},
                directory / "found.safetensors",
            )


def saved(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and first moments in the trainer's state, and the weights while the model is written."""
    state = trainer.state_dict()
    found = {f"state.{name}": value for name, value in state["model"].items()}
    found |= {f"moment.{name}": moments["exp_avg"] for name, moments in state["optimizer"].items()}
    with sharding.together(trainer.model):
        return found | {f"model.{name}": value.detach().clone() for name, value in trainer.model.named_parameters()}


if __name__ == "__main__":
    main()
