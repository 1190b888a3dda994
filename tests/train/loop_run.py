"""One process of a test of other loops: ``python -m tests.train.loop_run DIRECTORY CASE SHARE [MUTANT]``.

The first step has learning rate 0 and the second step a large one. The change of the weights is then the gradient of
the second step at the first weights. Each step has three packs, and rank 0 has the first SHARE of them: 2, or 3 so that
rank 1 has none. Rank 0 writes this gradient and the losses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chairlift_train.layout import Pack
from chairlift_train.loop_adapters import accelerate_step, deepspeed_step
from chairlift_train.loss import StepLoss
from chairlift_train.varlen import patch_hf
from tests.train.families import tiny
from tests.train.sharded_run import steps
from tests.train.training_mutants import plant

RATE = 1000.0


def zero_config(stage: int) -> dict[str, Any]:
    """Settings of DeepSpeed for ZeRO stage ``stage`` with float32 weights on the CPU."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
    }


def loop(case: str, model: Any) -> tuple[Callable[[list[Pack]], float], Any, Any]:
    """For a case, returns (function that runs one step, optimiser, context that gathers parameters or None)."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.0), StepLoss()
    family, _, kind = case.partition("-")
    if family == "deepspeed":
        import deepspeed

        engine, used, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_config(int(kind)))
        return lambda packs: deepspeed_step(engine, loss, packs), used, deepspeed.zero.GatheredParameters
    from accelerate import Accelerator, DeepSpeedPlugin

    if kind.isdigit():
        import deepspeed

        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config(int(kind))))
        gathered = deepspeed.zero.GatheredParameters
    else:
        accelerator = Accelerator(cpu=True)
        gathered = None
    prepared, used = accelerator.prepare(model, optimizer)
    return lambda packs: accelerate_step(accelerator, prepared, used, loss, packs), used, gathered


def main() -> None:
    torch.set_num_threads(1)
    directory, case, share, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(os.environ["RANK"])
    plant(sys.argv[4:])
    model = tiny("llama")
    patch_hf(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    run, optimizer, gathered = loop(case, model)
    losses = []
    for packs, rate in zip(steps(), (0.0, RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(run(packs[:share] if rank == 0 else packs[share:]))
    found = {}
    for name, parameter in model.named_parameters():
        if gathered is None:
            found[name] = (before[name] - parameter.detach()) / RATE
        else:
            with gathered([parameter]):
                found[name] = (before[name] - parameter.detach()) / RATE
    if rank == 0:
        found["losses"] = torch.tensor(losses)
        save_file({name: value.contiguous() for name, value in found.items()}, directory / "found.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
