"""Creates the optimiser of a training run: AdamW of PyTorch, or AdamW of bitsandbytes with moments in 8 bits."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from chairlift.errors import ConfigError
from chairlift_train.config import TrainerConfig

__all__ = ["make_optimizer"]


def make_optimizer(config: TrainerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Create AdamW (Loshchilov and Hutter, 2019) for float32 parameters. Weight decay applies only to matrices.
    ``adamw8bit`` stores both moments as 8-bit codes with a float32 scale per 256 numbers (Dettmers et al., 2022). The
    moments of parameters with fewer than 4,096 numbers stay in float32. Raises ConfigError if bitsandbytes is not
    installed.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    try:
        with _quiet("bitsandbytes"):
            made = importlib.import_module("bitsandbytes").optim.AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"training.optimizer adamw8bit needs bitsandbytes ({error}); pip install 'chairlift[adamw8bit]', or take"
            " adamw"
        ) from None
    optimizer: torch.optim.Optimizer = made(groups, lr=config.learning_rate, betas=config.betas)
    return optimizer


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Context that hides log messages of a library while it is imported. The messages are about kernels that are not
    used here."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
