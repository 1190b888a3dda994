"""The backend of PyTorch's own operations, for models and machines that no other backend can run."""

from __future__ import annotations

from typing import Final

import torch

from chairlift.config import EngineConfig
from chairlift.executor.backends.backend import Abilities, Backend
from chairlift.executor.backends.torch.model_runner import TorchModelRunner
from chairlift.executor.drafters.source import DraftSource
from chairlift.executor.image_bank import ImageBank
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.local import ModelRunner
from chairlift.executor.pooled_runner import PooledExecutor, TorchPooledRunner
from chairlift.kernels.weights import ONEDNN, WeightFormat
from chairlift.lora.kinds import ALL_KINDS
from chairlift.models.causal_lm import CausalLM
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.fallback.model import TransformersLM
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.pooled_network import PooledNetwork

__all__ = ["TorchBackend"]

_ABILITIES: Final = Abilities(adapters=ALL_KINDS, processed_logprobs=True, drafts=True, texts=True)


class TorchBackend(Backend):
    """Runs a model's layers as PyTorch operations, on a CPU or a GPU."""

    abilities = _ABILITIES
    home = ""
    settings = ("torch",)
    kernel_words = "PyTorch's kernels"
    whose = "PyTorch's"

    @classmethod
    def why_not(
        cls, network: NetworkConfig | EncoderConfig | None, dtype: torch.dtype, device: torch.device, block_size: int
    ) -> str:
        return ""

    @classmethod
    def choose(cls, setting: str) -> Backend:
        return cls("torch")

    def float_format(self, *, exact: bool) -> WeightFormat:
        return ONEDNN

    def num_threads(self, config: EngineConfig) -> int:
        return torch.get_num_threads()

    def make_runner(
        self,
        model: CausalLM | TransformersLM,
        plan: KVPlan,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        drafts: DraftSource | None = None,
        images: ImageBank | None = None,
    ) -> ModelRunner:
        if config.model.threads is not None:
            torch.set_num_threads(config.model.threads)
        return TorchModelRunner(
            model, plan, dtype, device, config.lora.active, logprobs_mode=config.model.logprobs_mode
        )

    def make_pooled_executor(
        self, model: PooledNetwork, config: EngineConfig, dtype: torch.dtype, device: torch.device, max_tokens: int
    ) -> PooledExecutor:
        if config.model.threads is not None:
            torch.set_num_threads(config.model.threads)
        return PooledExecutor(model, TorchPooledRunner(model, device))
