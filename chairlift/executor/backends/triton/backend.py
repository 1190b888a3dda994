"""The backend of the Triton kernels, for one GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Final

import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvariantError
from chairlift.executor.backends.backend import Abilities, Backend
from chairlift.executor.drafters.source import DraftSource
from chairlift.executor.image_bank import ImageBank
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.local import ModelRunner
from chairlift.executor.pooled_runner import PooledExecutor
from chairlift.kernels.recurrent import panel_width
from chairlift.kernels.triton.launch import MAX_GROUP, MAX_STATE_TILE, power_of_2
from chairlift.kernels.triton.operations import CELLS, OPERATIONS
from chairlift.kernels.weights import CODED, DEVICE_QUANTIZED, PLAIN, WeightFormat
from chairlift.lora.device_bank import POOL_KINDS, pool_layout
from chairlift.lora.sites import sites_in
from chairlift.models.causal_lm import CausalLM
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.fallback.model import TransformersLM
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.mixers import CellConfig, DeltaNetConfig, Mamba2Config, MixerConfig
from chairlift.models.pooled_network import PooledNetwork

__all__ = ["TritonBackend"]

_MIN_CAPABILITY: Final = (8, 0)
"""Lowest compute capability of a GPU (Ampere). The kernels need asynchronous copies, and bfloat16 in the tensor
cores."""
_MIN_FP8_CAPABILITY: Final = (8, 9)
"""Lowest compute capability for fp8 matrix multiplication and conversion (Ada)."""

_ABILITIES: Final = Abilities(
    weights=frozenset({"fp8", "int8", "int4", "stored"}),
    int8_kv=True,
    adapters=POOL_KINDS,
    batch_invariant=True,
    graphs=True,
)


class TritonBackend(Backend):
    """Runs a model as a list of kernel launches, or as one CUDA graph. On the CPU the kernels run only in Triton's
    interpreter, which is for tests: it is slow, and correct only for float32."""

    abilities = _ABILITIES
    home = "cuda"
    settings = ("triton",)
    kernel_words = "the Triton kernels"
    whose = "Triton's"
    rounded = DEVICE_QUANTIZED
    remedy = "device='cuda' and kernels='triton'"

    @classmethod
    def why_not(
        cls, network: NetworkConfig | EncoderConfig | None, dtype: torch.dtype, device: torch.device, block_size: int
    ) -> str:
        if (reason := _why_not_here(dtype, device)) or network is None:
            return reason
        if isinstance(network, EncoderConfig):
            return "they run no encoders; use kernels='torch', or device='cpu'"
        return cls.lacks(network)

    @classmethod
    def lacks(cls, network: NetworkConfig) -> str:
        return _why_not_model(network)

    @classmethod
    def operations(cls) -> Mapping[object, str]:
        return dict.fromkeys((*OPERATIONS, *CELLS), "kernel")

    @classmethod
    def choose(cls, setting: str) -> Backend:
        return cls("triton")

    def why_not_weights(self, quantization: str, dtype: torch.dtype, device: torch.device) -> str:
        if quantization != "fp8":
            return ""
        # fp8 matrix multiplication exists only for bfloat16. In Triton's interpreter, PyTorch computes it.
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _MIN_FP8_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return (
                f"it needs a GPU of compute capability 8.9 or higher, and {name} has {found[0]}.{found[1]}; use another"
            )
        if device.type == "cuda" and dtype != torch.bfloat16:
            return f"dtype is {str(dtype).removeprefix('torch.')}; use dtype='bfloat16'"
        return ""

    def weight_format(self, quantization: str | None, dtype: str = "auto") -> WeightFormat:
        # Activations are not rounded, so arithmetic with codes is exact in float32.
        return PLAIN if quantization == "none" else super().weight_format(quantization)

    def float_format(self, *, exact: bool) -> WeightFormat:
        return CODED

    def adapter_bytes(self, config: EngineConfig, network: NetworkConfig, dtype: torch.dtype) -> int:
        lora = config.lora.active
        return (
            0 if lora is None else lora.max_loras * pool_layout(sites_in(network), lora.max_lora_rank, dtype).slot_bytes
        )

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
        from chairlift.executor.backends.triton.triton_runner import TritonModelRunner  # Triton may not be installed

        if not isinstance(model, CausalLM):
            raise InvariantError(f"the Triton kernels do not run {type(model).__name__}")
        if config.model.threads is not None:
            torch.set_num_threads(config.model.threads)
        return TritonModelRunner(
            model,
            plan,
            dtype,
            device,
            num_slots=config.scheduler.max_num_seqs,
            max_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            graphs=config.model.cuda_graphs,
            batch_invariant=config.model.batch_invariant,
            lora=config.lora.active,
        )

    def make_pooled_executor(
        self, model: PooledNetwork, config: EngineConfig, dtype: torch.dtype, device: torch.device, max_tokens: int
    ) -> PooledExecutor:
        raise InvariantError("the Triton kernels run no models for embeddings or classes")


def _why_not_here(dtype: torch.dtype, device: torch.device) -> str:
    """Reason why the kernels cannot run on this machine, with the remedy; empty if they can."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "they run on a GPU, and device is cpu; use device='cuda', or set TRITON_INTERPRET=1 in the environment to "
            "try them in Triton's interpreter, which is very slow"
        )
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; install it, or a build of PyTorch for CUDA, which brings it"
    if device.type == "cpu" and dtype != torch.float32:
        return "in Triton's interpreter they compute in float32 only; use dtype='float32'"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"they need a GPU of compute capability 8.0 or higher, and {name} has {found[0]}.{found[1]}"
    if device.type == "cuda" and (error := _launch_error()):
        return f"Triton cannot compile what launches them; install a C compiler and Python's headers ({error})"
    return ""


def _launch_error() -> str:
    """Text of the error in the C module that Triton compiles before its first launch; empty if the module works."""
    try:
        importlib.import_module("triton.runtime").driver.active  # noqa: B018
    except Exception as error:  # no compiler, no headers, no writable directory: each raises another, undocumented type
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _why_not_model(network: NetworkConfig) -> str:
    """Reason why the kernels cannot run this model, with the remedy; empty if they can."""
    for mixer in network.mixers:
        if mixer is not None and (reason := _why_not_mixer(mixer)):
            return f"{reason}; use kernels='torch', or device='cpu'"
    if not network.attends:
        return ""
    if network.head_dim % 2 or not 16 <= network.head_dim <= 256:
        return f"they need an even head size from 16 to 256, and this model's is {network.head_dim}"
    if (group := network.num_attention_heads // network.num_key_value_heads) > MAX_GROUP:
        return f"they need at most {MAX_GROUP} query heads for each KV head, and this model has {group}"
    return ""


def _why_not_mixer(mixer: MixerConfig) -> str:
    """Reason why the kernels cannot run a recurrent layer; empty if they can."""
    if isinstance(mixer, CellConfig):
        return f"they have no kernel for the recurrent layers of this model, {mixer.kind.upper()}"
    if isinstance(mixer, Mamba2Config):
        rows, columns = mixer.state_size, mixer.head_dim
    elif isinstance(mixer, DeltaNetConfig):
        rows, columns = mixer.key_dim, mixer.value_dim
    else:
        return ""
    panel = panel_width(columns)
    if power_of_2(rows) * power_of_2(panel) <= MAX_STATE_TILE:
        return ""
    return (
        f"they hold {panel} columns of a head's recurrent state in registers, at most {MAX_STATE_TILE:,} numbers, and"
        f" this model's have {rows} rows"
    )
