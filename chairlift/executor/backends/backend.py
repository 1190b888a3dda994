"""What a backend is: one way to run models, with what it can do as data.

A model is loaded for one backend. Its :class:`Abilities` are read once, at load: :mod:`chairlift.executor.select`
refuses the settings that need an ability that the backend lacks. Nothing outside this folder compares a backend's name.
A new accelerator is a folder with a subclass, and a line in :data:`chairlift.executor.select.BACKENDS`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from chairlift.config import EngineConfig
from chairlift.kernels.weights import WeightFormat

if TYPE_CHECKING:
    from chairlift.executor.drafters.source import DraftSource
    from chairlift.executor.image_bank import ImageBank
    from chairlift.executor.kv_tensors import KVPlan
    from chairlift.executor.local import ModelRunner
    from chairlift.executor.pooled_runner import PooledExecutor
    from chairlift.models.causal_lm import CausalLM
    from chairlift.models.encoder_config import EncoderConfig
    from chairlift.models.fallback.model import TransformersLM
    from chairlift.models.hf_config import NetworkConfig
    from chairlift.models.pooled_network import PooledNetwork

__all__ = ["Abilities", "Backend"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What the kernels of a backend can do."""

    weights: frozenset[str] = frozenset()
    """Values of the setting ``quantization`` whose weights the kernels multiply with."""
    int8_kv: bool = False
    """K and V in 8 bits."""
    adapters: tuple[str, ...] = ()
    """Kinds of adapters; see :mod:`chairlift.lora.kinds`. An adapter of another kind is refused when it is read."""
    processed_logprobs: bool = False
    """Log-probabilities of the distribution from which tokens are drawn."""
    drafts: bool = False
    """Drafts are verified."""
    draft_models: bool = False
    """Small models, layers and heads make drafts."""
    images: bool = False
    """Rows may have images."""
    texts: bool = False
    """Models for embeddings, scores and classes."""
    divides: bool = False
    """Several processes may share a model."""
    equal_bits: bool = False
    """The bits of a row never depend on other rows, if all of the model's operations have kernels."""
    batch_invariant: bool = False
    """The bits of a row do not depend on other rows with the setting ``batch_invariant``."""
    fused_head: bool = False
    """Tokens are drawn without keeping the logits of a whole step."""
    graphs: bool = False
    """Steps are recorded as CUDA graphs."""
    floors: bool = False
    """The minimum time of a step is known from the limits of the machine."""


class Backend(abc.ABC):
    """One way to run models. ``kernels`` is its name for users: the value of the setting ``kernels`` that asks for
    it."""

    abilities: ClassVar[Abilities]
    home: ClassVar[str]
    """Type of the devices for which the backend is chosen without being asked; empty if it only replaces others."""
    settings: ClassVar[tuple[str, ...]]
    """Values of the setting ``kernels`` that ask for this backend."""
    kernel_words: ClassVar[str]
    """The kernels in a sentence, such as ``the Triton kernels``."""
    whose: ClassVar[str]
    """Owner of the kernels in the possessive, such as ``Triton's``."""
    rounded: ClassVar[Mapping[str, WeightFormat]] = {}
    """Value of the setting ``quantization`` that rounds weights -> their format."""
    remedy: ClassVar[str] = ""
    """Settings that get this backend, for users whose weights another backend cannot run."""

    def __init__(self, kernels: str) -> None:
        self.kernels = kernels

    @property
    def owner(self) -> str:
        """The kernels in a sentence about what they lack, such as ``PyTorch's kernels``."""
        return f"{self.whose} kernels"

    @classmethod
    @abc.abstractmethod
    def why_not(
        cls, network: NetworkConfig | EncoderConfig | None, dtype: torch.dtype, device: torch.device, block_size: int
    ) -> str:
        """Reason why the kernels cannot run a model, with the remedy; empty if they can. With ``network`` None, the
        reason why they cannot run any model."""

    @classmethod
    def lacks(cls, network: NetworkConfig) -> str:
        """Reason why the kernels can run no model of this shape on any machine, with the remedy; empty if they can."""
        return ""

    @classmethod
    def operations(cls) -> Mapping[object, str]:
        """Operation, or type of a recurrent cell -> words that say when a kernel computes it. PyTorch computes all
        others. ``ops.linear`` stands for a linear layer in the backend's own format of weights."""
        return {}

    @classmethod
    @abc.abstractmethod
    def choose(cls, setting: str) -> Backend:
        """The backend for a value of the setting ``kernels``, which may be ``auto``. Raises ConfigError if this machine
        lacks what the setting names."""

    def why_not_weights(self, quantization: str, dtype: torch.dtype, device: torch.device) -> str:
        """Reason why quantised weights that are among the abilities cannot be computed on this device or in this dtype,
        with the remedy; empty if they can."""
        return ""

    def weight_format(self, quantization: str | None, dtype: str = "auto") -> WeightFormat:
        """Format of the weights in memory. ``quantization`` and ``dtype`` are settings: the dtype float32 asks for
        exact arithmetic, which integers with 8-bit activations are not."""
        if quantization is not None and quantization in self.rounded:
            return self.rounded[quantization]
        return self.float_format(exact=quantization == "none" or (quantization is None and dtype == "float32"))

    @abc.abstractmethod
    def float_format(self, *, exact: bool) -> WeightFormat:
        """Format of weights that no setting quantises. ``exact``: integers of a checkpoint become floats."""

    def adapter_bytes(self, config: EngineConfig, network: NetworkConfig, dtype: torch.dtype) -> int:
        """Bytes on the device that are reserved for adapters, besides weights, KV cache and steps."""
        return 0

    @abc.abstractmethod
    def num_threads(self, config: EngineConfig) -> int:
        """Number of CPU threads that the kernels use."""

    @abc.abstractmethod
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
        """The runner of a model whose weights have the backend's format. ``drafts`` is what
        makes drafts, and ``images`` holds encoded images; both are given only to a backend with these abilities. With
        the ability ``draft_models``, the runner is a :class:`~chairlift.executor.drafters.runner.DraftRunner`. Raises
        ConfigError for settings that this machine cannot have."""

    @abc.abstractmethod
    def make_pooled_executor(
        self, model: PooledNetwork, config: EngineConfig, dtype: torch.dtype, device: torch.device, max_tokens: int
    ) -> PooledExecutor:
        """The executor of a model for embeddings, scores or classes. Raises ConfigError for too many threads."""
