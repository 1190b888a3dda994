"""Random adapters that PEFT itself writes, and the logits that PEFT computes with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from tests.models.tiny import hf_logits, hf_model

__all__ = ["peft_logits", "random_adapter"]


def random_adapter(model_dir: Path, target: Path, *, seed: int = 0, std: float = 0.15, **settings: Any) -> Path:
    """Write an adapter for the model in a directory, with values of standard deviation ``std``. Returns ``target``."""
    given = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(hf_model(model_dir), LoraConfig(**given))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "lora_magnitude" in name:
                    parameter.copy_(parameter * (1.0 + 0.5 * noise))
                elif "lora_" in name:
                    parameter.copy_(std * noise)
                elif parameter.requires_grad:  # modules_to_save, biases and rows of tokens
                    parameter.add_(std * noise)
        model.save_pretrained(str(target))
    return target


def peft_logits(model_dir: Path, adapter: Path | None, sequences: list[list[int]]) -> list[Tensor]:
    """Logits [n, vocab] of whole sequences, computed by transformers and PEFT in float32."""
    base = hf_model(model_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = base if adapter is None else PeftModel.from_pretrained(base, str(adapter)).eval()
    return [hf_logits(model, tokens) for tokens in sequences]
