"""Chairlift: continuous batching for language models.

``from chairlift import LLM, SamplingParams`` is all that offline use needs. A heavy module is imported when one of its
names is first used: ``import chairlift`` alone does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from chairlift.base.lora_request import LoRARequest
from chairlift.base.outputs import CompletionOutput, FinishReason, Logprob, OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.errors import ChairliftError, ConfigError, EngineDeadError, ModelLoadError, OverloadedError, RequestError
from chairlift.version import __version__

if TYPE_CHECKING:
    from chairlift.async_llm import AsyncLLM
    from chairlift.config import EngineConfig
    from chairlift.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChairliftError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "LoRARequest",
    "Logprob",
    "ModelLoadError",
    "OutputKind",
    "OverloadedError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_LAZY = {"LLM": "chairlift.llm", "AsyncLLM": "chairlift.async_llm", "EngineConfig": "chairlift.config"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
