"""Chooses the implementation of the kernels: native CPU kernels or Triton kernels if possible, otherwise PyTorch."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import torch

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.backends.torch.model_runner import TorchModelRunner
from chairlift.executor.image_bank import ImageBank
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.local import ModelRunner
from chairlift.executor.pooled_runner import NativePooledRunner, PooledExecutor, TorchPooledRunner
from chairlift.kernels.cpu.library import BUILD_ALL, Pool, best_isa, built_isas, load, supported_isas, why_unavailable
from chairlift.kernels.cpu.packing import NATIVE_DTYPES
from chairlift.kernels.triton.launch import MAX_GROUP
from chairlift.kernels.weights import NATIVE, ONEDNN, PLAIN, QUANTIZED, WeightFormat
from chairlift.models.causal_lm import CausalLM
from chairlift.models.eagle3 import Eagle3
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.fallback.model import TransformersLM
from chairlift.models.hf_config import ModelConfig
from chairlift.models.loader import resolve_dtype
from chairlift.models.pooled_network import PooledNetwork
from chairlift.models.vision.vision_config import PatchConfig, PooledConfig
from chairlift.models.vision.vision_files import load_tower

__all__ = [
    "choose_dtype",
    "choose_format",
    "choose_isa",
    "choose_kernels",
    "choose_pooled_kernels",
    "choose_transformers",
    "load_images",
    "make_pooled_executor",
    "make_runner",
    "refuse_for_states",
    "why_not_int8_kv",
    "why_not_isa",
    "why_not_native",
    "why_not_quantized",
    "why_not_triton",
]

_log = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)
"""Lowest compute capability of a GPU (Ampere). The kernels need asynchronous copies, and bfloat16 in the tensor
cores."""
_MIN_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability for fp8 matrix multiplication and conversion (Ada)."""


def why_not_native(
    network: ModelConfig | EncoderConfig, dtype: torch.dtype, device: torch.device, block_size: int
) -> str:
    """Reason why the native kernels cannot run a model, with the remedy; empty if they can."""
    if device.type != "cpu":
        return f"they run on the CPU, and device is {device}; use device='cpu'"
    if load() is None:
        return why_unavailable()
    if dtype not in NATIVE_DTYPES:
        return (
            f"they compute in bfloat16 and float32, and dtype is {str(dtype).removeprefix('torch.')}; use one of those"
        )
    if block_size % 16:
        return f"they need block_size to be a multiple of 16, and it is {block_size}; leave it out"
    if isinstance(network, EncoderConfig) or not network.attends:  # an encoder's attention runs in PyTorch
        return ""
    if network.head_dim % 16 or not 16 <= network.head_dim <= 256:
        return f"they need a head size that is a multiple of 16 from 16 to 256, and this model's is {network.head_dim}"
    return ""


def _launch_error() -> str:
    """Text of the error in the C module that Triton compiles before its first launch; empty if the module works."""
    try:
        importlib.import_module("triton.runtime").driver.active  # noqa: B018
    except Exception as error:  # no compiler, no headers, no writable directory: each raises another, undocumented type
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def why_not_triton(network: ModelConfig | None, dtype: torch.dtype, device: torch.device) -> str:
    """Reason why the Triton kernels cannot run a model, with the remedy; empty if they can. With ``network`` None, the
    reason why they cannot run any model. On the CPU they run only in Triton's interpreter, which is for tests: it is
    slow, and correct only for float32."""
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
    if network is not None and (network.head_dim % 2 or not 16 <= network.head_dim <= 256):
        return f"they need an even head size from 16 to 256, and this model's is {network.head_dim}"
    if network is not None and (network.score_cap is not None or network.sinks):
        lacks = "cap attention's scores" if network.score_cap is not None else "have sinks in attention's softmax"
        return f"they do not {lacks}, as this model needs; use kernels='torch', or device='cpu'"
    if network is not None and network.recurrent:
        return "they have no recurrent layers, as this model needs; use kernels='torch', or device='cpu'"
    if network is not None and (group := network.num_attention_heads // network.num_key_value_heads) > MAX_GROUP:
        return f"they need at most {MAX_GROUP} query heads for each KV head, and this model has {group}"
    return ""


def why_not_quantized(quantization: str, kernels: str, dtype: torch.dtype, device: torch.device) -> str:
    """Reason why ``kernels`` cannot run a model with the weight format ``quantization``, with the remedy; empty if they
    can.

    fp8 matrix multiplication exists only for bfloat16. Triton's interpreter supports only float32, so there PyTorch
    computes fp8 multiplications.
    """
    if quantization == "none":
        return ""
    who = {"torch": "PyTorch's kernels", "triton": "Triton's kernels"}.get(kernels, f"the CPU's {kernels} kernels")
    if quantization != "fp8":
        can = kernels not in ("torch", "triton")
        return "" if can else f"{who} would run this model, and the native CPU kernels alone know it; use device='cpu'"
    if kernels != "triton":
        return f"{who} would run this model, and Triton's alone know it; use device='cuda' and kernels='triton'"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _MIN_FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"it needs a GPU of compute capability 8.9 or higher, and {name} has {found[0]}.{found[1]}; use another"
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"dtype is {str(dtype).removeprefix('torch.')}; use dtype='bfloat16'"
    return ""


def choose_dtype(
    network: ModelConfig | EncoderConfig | TransformersConfig, setting: str, device: torch.device
) -> torch.dtype:
    """Data type in which a model runs. On a CPU, ``auto`` replaces float16 by bfloat16: the native kernels do not
    support float16, and PyTorch's float16 kernels are ten times slower."""
    dtype = resolve_dtype(network, setting)
    return torch.bfloat16 if setting == "auto" and dtype == torch.float16 and device.type == "cpu" else dtype


def why_not_int8_kv(
    kernels: str, config: EngineConfig, network: ModelConfig, dtype: torch.dtype, device: torch.device
) -> str:
    """Reason why ``kernels`` cannot store K and V in 8 bits, with the remedy; empty if they can."""
    if kernels not in ("torch", "triton"):
        return ""
    who = "PyTorch's" if kernels == "torch" else "Triton's"
    refused = f"{who} kernels would run this model, and only the CPU's native ones read K and V in 8 bits"
    if config.model.kernels in ("torch", "triton"):
        return f"{refused}; use kernels='auto' on device='cpu'"
    return f"{refused}: {why_not_native(network, dtype, device, config.cache.block_size)}"


def choose_kernels(config: EngineConfig, network: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Kernels for a model: ``triton``, ``torch``, or an instruction set of the native kernels.

    If PyTorch is chosen automatically, the reason is logged. Raises ConfigError if the setting ``kernels`` is
    impossible.
    """
    kernels, chosen = config.model.kernels, "triton"
    if kernels != "triton" and (kernels != "auto" or device.type == "cpu"):
        chosen = choose_isa(config, network, dtype, device) or "torch"
    elif reason := why_not_triton(network, dtype, device):
        if kernels == "triton":
            raise ConfigError(f"kernels is 'triton', but the Triton kernels cannot run this model: {reason}")
        _log.warning("PyTorch runs this model, more slowly than the Triton kernels would: %s", reason)
        chosen = "torch"
    if chosen == "torch" and config.model.batch_invariant:
        raise ConfigError(
            "batch_invariant is on, but PyTorch would run this model, and promises no equal bits; leave it off"
        )
    quantization = config.model.quantization
    if quantization is not None and (reason := why_not_quantized(quantization, chosen, dtype, device)):
        raise ConfigError(f"quantization is {quantization!r}, but {reason}, or leave quantization out")
    if chosen == "triton" and config.lora.active:
        raise ConfigError(
            "enable_lora is on, but the Triton kernels cannot add adapters yet; leave it out, or take kernels='torch'"
        )
    if chosen == "triton" and config.scheduler.speculation is not None:
        raise ConfigError(
            "speculative_config is set, but the Triton kernels keep the newest token of a row on the GPU, where drafts"
            " are not verified yet; leave it out, or take kernels='torch'"
        )
    kv_dtype = config.cache.kv_cache_dtype
    if kv_dtype != "auto" and (reason := why_not_int8_kv(chosen, config, network, dtype, device)):
        raise ConfigError(f"kv_cache_dtype is {kv_dtype!r}, but {reason}, or leave kv_cache_dtype out")
    return chosen


def choose_transformers(config: EngineConfig, network: TransformersConfig) -> str:
    """Kernels for a model from transformers: always ``torch``. Raises ConfigError for settings that need other
    kernels."""
    model, kv_dtype = config.model, config.cache.kv_cache_dtype
    refused = {
        "kernels": model.kernels not in ("auto", "torch"),
        "quantization": model.quantization not in (None, "none"),
        "batch_invariant": model.batch_invariant,
        "kv_cache_dtype": kv_dtype != "auto",
        "enable_lora": config.lora.enable_lora,
    }
    others = {"kv_cache_dtype": kv_dtype, "enable_lora": config.lora.enable_lora}
    for name, is_refused in refused.items():
        if is_refused:
            value = others[name] if name in others else getattr(model, name)
            raise ConfigError(
                f"{name} is {value!r}, but model_type {network.model_type!r} runs through transformers, by PyTorch's"
                f" kernels, which cannot do that; leave {name} out"
            )
    return "torch"


def refuse_for_states(config: EngineConfig, recurrent: bool) -> None:
    """Raise ConfigError for settings that do not work with recurrent states, or that need recurrent states."""
    if recurrent and config.scheduler.speculation is not None:
        raise ConfigError(
            "speculative_config is set, but this model keeps recurrent states, which a wrong draft would change and"
            " nothing can change back; leave speculative_config out"
        )
    if not recurrent and config.cache.state_snapshot_interval is not None:
        raise ConfigError(
            f"state_snapshot_interval is {config.cache.state_snapshot_interval}, but this model keeps no recurrent"
            " states; leave it out"
        )


def choose_format(kernels: str, quantization: str | None, dtype: str = "auto") -> WeightFormat:
    """Weight format for the kernels that :func:`choose_kernels` returned. ``quantization`` and ``dtype`` are settings:
    the dtype float32 asks for exact arithmetic, which integers with 8-bit activations are not."""
    if quantization in QUANTIZED:
        return QUANTIZED[quantization]
    exact = quantization == "none" or (quantization is None and dtype == "float32")
    native = dataclasses.replace(NATIVE, floats=exact)
    return {"torch": ONEDNN, "triton": PLAIN}.get(kernels, native)


def choose_isa(
    config: EngineConfig, network: ModelConfig | EncoderConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Instruction set of the native kernels for a model, or None for PyTorch.

    If PyTorch is chosen automatically, the reason is logged. Raises ConfigError if the setting ``kernels`` names an
    instruction set that this processor does not have, or that cannot run this model.
    """
    kernels = config.model.kernels
    if kernels == "torch":
        return None
    reason = why_not_native(network, dtype, device, config.cache.block_size)
    if kernels == "auto":
        if reason and device.type == "cpu":
            _log.warning("PyTorch runs this model, more slowly than the native CPU kernels would: %s", reason)
        return None if reason else best_isa()
    if reason:
        raise ConfigError(f"kernels is {kernels!r}, but the native kernels cannot run this model: {reason}")
    if kernels not in supported_isas():
        raise ConfigError(why_not_isa(kernels))
    return kernels


def why_not_isa(kernels: str) -> str:
    """Why this machine does not run the instruction set ``kernels``, and what to do about it."""
    if kernels in built_isas():
        runs = ", ".join(supported_isas())
        return f"kernels is {kernels!r}, but this processor runs {runs}; use one of them, or auto"
    return (
        f"kernels is {kernels!r}, but Chairlift was compiled only for {', '.join(built_isas())}; use auto, or compile "
        f"the kernels of all instruction sets: {BUILD_ALL}"
    )


def load_images(
    config: EngineConfig,
    model_dir: Path,
    network: ModelConfig | TransformersConfig,
    dtype: torch.dtype,
    kernels: str,
) -> ImageBank | None:
    """Load the model's image encoder; None for a model without one, and if the kernels cannot use images.

    Raises ConfigError and ModelLoadError.
    """
    if isinstance(network, TransformersConfig) or network.vision is None or kernels in ("torch", "triton"):
        return None
    if config.lora.active:
        raise ConfigError("enable_lora is on, but a model that reads images is served without adapters; leave it out")
    scheduler = config.scheduler
    if isinstance(network.vision, PooledConfig):  # its images are computed in one step, beside all decode rows
        rows = network.vision.rows_per_tile
        if scheduler.max_num_batched_tokens < rows + scheduler.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, but an image of this model has {rows}"
                f" tokens that are computed in one step, beside max_num_seqs {scheduler.max_num_seqs}; set it to"
                f" {rows + scheduler.max_num_seqs} or more, or lower max_num_seqs"
            )
    levels = network.vision.levels if isinstance(network.vision, PatchConfig) else ()
    row_bytes = (1 + len(levels)) * network.hidden_size * dtype.itemsize
    return ImageBank(load_tower(model_dir, network, dtype), row_bytes)


def make_runner(
    model: CausalLM | TransformersLM,
    plan: KVPlan,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    max_model_len: int,
    draft: CausalLM | Eagle3 | None = None,
    images: ImageBank | None = None,
) -> ModelRunner:
    """Runner for the kernels that :func:`choose_kernels` returned. ``model`` has its weights in the right format.
    ``draft`` is a small model or a layer for drafts, and ``images`` holds encoded images; both need the native
    kernels."""
    threads, max_tokens = config.model.threads, config.scheduler.max_num_batched_tokens
    if kernels in ("torch", "triton") and threads is not None:
        torch.set_num_threads(threads)
    if kernels == "torch" or isinstance(model, TransformersLM):
        return TorchModelRunner(model, plan, dtype, device, config.lora.active)
    if kernels == "triton":
        from chairlift.executor.backends.triton.triton_runner import TritonModelRunner  # Triton may not be installed

        return TritonModelRunner(
            model,
            plan,
            dtype,
            device,
            num_slots=config.scheduler.max_num_seqs,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            graphs=config.model.cuda_graphs,
            batch_invariant=config.model.batch_invariant,
        )
    try:
        pool = Pool(threads)
    except OSError as error:
        raise ConfigError(f"threads is {threads}: {error}") from None
    lora = config.lora.active
    sizes: dict[str, Any] = {"isa": kernels, "max_tokens": max_tokens}
    return NativeModelRunner(model, plan, dtype, pool, **sizes, draft=draft, lora=lora, images=images)


def choose_pooled_kernels(
    config: EngineConfig, network: ModelConfig | EncoderConfig, dtype: torch.dtype, device: torch.device
) -> str:
    """Kernels for a model of embeddings or classes, as in :func:`choose_kernels`, but never Triton's."""
    if config.model.kernels == "triton":
        raise ConfigError("kernels is 'triton', but models for embeddings and classes run on 'auto' or 'torch'")
    chosen = choose_isa(config, network, dtype, device) or "torch"
    if chosen == "torch" and config.model.batch_invariant:
        raise ConfigError(
            "batch_invariant is on, but PyTorch would run this model, and promises no equal bits; leave it off"
        )
    quantization = config.model.quantization
    if quantization is not None and (reason := why_not_quantized(quantization, chosen, dtype, device)):
        raise ConfigError(f"quantization is {quantization!r}, but {reason}, or leave quantization out")
    return chosen


def make_pooled_executor(
    model: PooledNetwork, config: EngineConfig, dtype: torch.dtype, device: torch.device, kernels: str, max_tokens: int
) -> PooledExecutor:
    """Executor for the kernels that :func:`choose_pooled_kernels` returned. Raises ConfigError for too many threads."""
    threads = config.model.threads
    if threads is not None:
        torch.set_num_threads(threads)  # an encoder's attention runs in PyTorch
    if kernels == "torch":
        return PooledExecutor(model, TorchPooledRunner(model, device))
    try:
        pool = Pool(threads)
    except OSError as error:
        raise ConfigError(f"threads is {threads}: {error}") from None
    rows = config.scheduler.max_num_seqs
    runner = NativePooledRunner(model, dtype, pool, isa=kernels, max_tokens=max_tokens, max_rows=rows)
    return PooledExecutor(model, runner)
