"""Loads a model and makes its executor, from settings. Every engine, in any kind of process, is started with these
functions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import BUNDLED_MODEL, CacheGroup, EngineConfig
from chairlift.engine.info import EngineInfo
from chairlift.errors import ConfigError, RequestError
from chairlift.executor.executor import AdapterMemory, Executor
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift.version import __version__

if TYPE_CHECKING:
    import torch

    from chairlift.core.scheduler.cost_model import StepFeatures
    from chairlift.executor.backends.backend import Backend
    from chairlift.executor.drafters.runner import DraftRunner
    from chairlift.executor.drafters.source import DraftSource
    from chairlift.executor.image_bank import ImageBank
    from chairlift.executor.kv_tensors import KVPlan
    from chairlift.executor.local import LocalExecutor
    from chairlift.models.causal_lm import CausalLM
    from chairlift.models.context import LayerCache, LayerState
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.fallback.model import TransformersLM
    from chairlift.models.hf_config import NetworkConfig
    from chairlift.models.step_cost import ModelCost
    from chairlift.models.vision.processor import ImageProcessor

__all__ = [
    "LoadedExecutor",
    "Progress",
    "device_name",
    "find_device",
    "fingerprint",
    "load_executor",
    "model_directory",
    "pool_tokens",
    "read_images",
    "read_tokenizer",
]

Progress = Callable[[str, float], None]
"""Function that is called with (label, fraction done from 0 to 1) while a model loads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedExecutor:
    """A model in memory with its KV cache, and facts about it."""

    executor: Executor
    model_dir: str
    """Directory of the model's files; empty for a model without files."""
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    memory_plan: str
    dtype: str
    kernels: str
    threads: int
    device: str = "cpu"
    """``cpu``, or the name of the GPU."""
    equal_bits: bool = False
    """Whether the bits of a row depend on no other row, without any setting."""
    records_graphs: bool = False
    """Whether steps can be recorded as CUDA graphs."""
    graphs: str = ""
    """Text about the CUDA graphs that were recorded at the start."""
    adapters: AdapterMemory | None = None
    """Memory for the adapters; None if no adapters are served."""
    takes_images: bool = False
    """Whether requests may have images."""
    sampling_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Notes for the user on how the model is served, one per line."""
    model_impl: str = "native"
    """Implementation of the model's layers: ``native`` or ``transformers``."""
    calls: tuple[str, ...] = ()
    """Names of the model's operations without a kernel. PyTorch computes these operations between the kernels."""
    block_bytes: int = 0
    """Size in bytes of one KV block in all layers of its cache group. With several cache groups, the mean of their
    sizes."""
    quantization: str | None = None
    """Formats of the quantised weights, such as ``int4+int8``; None if all weights have the model's data type."""
    approximations: Callable[[], tuple[str, ...]] = tuple
    """Function that returns the roundings and approximations beyond arithmetic in ``dtype``, in words. New weights may
    change them."""
    weight_bytes: int = 0
    kv_cache_dtype: str | None = None
    """Data type of K and V, if it differs from the model's data type."""
    step_cost: ModelCost | None = None
    """Minimum cost of the model's steps (bytes to read, operations to compute), if the native CPU kernels run the
    model; otherwise None."""

    def least_step_seconds(self) -> Callable[[StepFeatures, int], float] | None:
        """Measure the limits of this machine (takes about 100 ms), and return a function for the minimum duration of a
        step in seconds.

        The function takes (features of the step, number of rows that the step samples from). Returns None unless the
        native CPU kernels run the model.
        """
        cost = self.step_cost
        if cost is None:
            return None
        import torch

        from chairlift.kernels.cpu.library import ThreadPool
        from chairlift.kernels.roof import quick_roof

        pool = ThreadPool(self.threads)
        try:
            roof = quick_roof(pool, self.kernels, torch.int8 if self.quantization else getattr(torch, self.dtype))
        finally:
            pool.close()

        def least_seconds(step: StepFeatures, sampled: int) -> float:
            rows = step.num_decodes
            kv_bytes = rows * cost.kv_read(step.context_tokens // rows) if rows else 0
            return cost.least_seconds(roof, rows + step.prefill_tokens, sampled, kv_bytes)

        return least_seconds

    def info(self, config: EngineConfig, capacity_tokens: int) -> EngineInfo:
        """Facts about the model and its engine, for other processes. ``capacity_tokens`` comes from the engine, because
        it depends on how long a sliding window keeps its blocks."""
        groups = self.executor.cache_groups
        size = self.executor.block_size
        approximations = self.approximations()
        how = ["batch_invariant"] if config.model.batch_invariant and not self.equal_bits else []
        how += [self.quantization] if self.quantization else []
        how += [f"kv {self.kv_cache_dtype}"] if self.kv_cache_dtype else []
        how += [] if self.model_impl == "native" else [self.model_impl]
        how += approximations
        return EngineInfo(
            model=config.model.model,
            model_dir=self.model_dir,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            capacity_tokens=capacity_tokens,
            pool_tokens=pool_tokens(groups, size, self.max_model_len),
            block_size=size,
            num_blocks=sum(group.num_blocks - 1 for group in groups),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            dtype=self.dtype,
            model_impl=self.model_impl,
            quantization=self.quantization,
            approximations=approximations,
            weight_bytes=self.weight_bytes,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            kernels=self.kernels,
            threads=self.threads,
            graphs=self.graphs,
            memory_plan=self.memory_plan,
            held=config.scheduler.batching == "static",
            deterministic=self.equal_bits or config.model.batch_invariant,
            records_graphs=self.records_graphs,
            fingerprint=fingerprint(self.model_dir, config.model.model, self.dtype, self.kernels, *how),
            block_bytes=self.block_bytes,
            preset=config.scheduler.preset,
            **self._speculation(config),
            takes_images=self.takes_images,
            sampling_defaults=self.sampling_defaults,
            notes=self.notes,
        )

    def _speculation(self, config: EngineConfig) -> dict[str, Any]:
        """Name -> value, for the fields of :class:`EngineInfo` about speculative decoding."""
        has_states = any(group.state_span is not None for group in self.executor.cache_groups)
        verifies = config.scheduler.takes_drafts(self.executor.num_lookahead_steps, has_states)
        speculation = config.scheduler.speculation if verifies else None
        method = {} if speculation is None else {"speculative_method": speculation.method}
        num_tokens = 0 if speculation is None else speculation.num_speculative_tokens
        drafter = getattr(self.executor, "drafter", None)
        if drafter is not None:  # Medusa has as many drafts as heads
            num_tokens = min(num_tokens, drafter.most)
        return {**method, "num_speculative_tokens": num_tokens, "takes_predictions": verifies}


def pool_tokens(groups: Sequence[CacheGroup], block_size: int, max_model_len: int) -> int:
    """Number of positions that fit into the smallest cache group. If all groups hold recurrent states: the number of
    positions of the longest texts that fit."""
    tokens = [(group.num_blocks - 1) * block_size for group in groups if group.state_span is None]
    states = [(group.num_blocks - 1) * min(group.state_span, max_model_len) for group in groups if group.state_span]
    return min(tokens or states)


def read_tokenizer(config: EngineConfig, model_dir: str) -> Tokenizer:
    """The model's tokenizer. Raises ModelLoadError."""
    if not model_dir and config.model.tokenizer is None:
        from chairlift.models.hashlm_served import HASHLM_TEMPLATE
        from chairlift.text.tokenizer.byte_level import byte_tokenizer

        special = ("<|im_start|>", "<|im_end|>", "<|bos|>")
        return byte_tokenizer(special, eos="<|im_end|>", chat_template=HASHLM_TEMPLATE)
    return Tokenizer.from_dir(config.model.tokenizer or model_dir)


def read_images(config: EngineConfig, model_dir: str, tokenizer: Tokenizer) -> ImageProcessor | None:
    """The image reader of a model; None for a model that reads only texts. Raises ModelLoadError."""
    from chairlift.models.registry import named_family
    from chairlift.models.vision.vision_files import read_processor

    named_family(config.model.model_impl)  # this process may know the family only by the setting
    return read_processor(Path(model_dir), tokenizer) if model_dir else None


def load_executor(config: EngineConfig, progress: Progress | None = None) -> LoadedExecutor:
    """Load the weights and size the KV cache. Raises ConfigError and ModelLoadError."""
    from chairlift.models.hashlm_served import parse_hashlm

    delay = parse_hashlm(config.model.model)
    if delay is not None:
        return _load_hashlm(config, delay)
    # These modules import torch, which takes almost a second, so they are imported only here.

    from chairlift.executor.kv_tensors import check_fits
    from chairlift.executor.select import choose_dtype, load_images, refuse_for_states
    from chairlift.loading.draft import load_drafts
    from chairlift.models.context import LayerState
    from chairlift.models.model_files import read_network

    model_dir = model_directory(config)
    network = read_network(model_dir, config.model.model_impl)
    uses_generation_config = config.model.generation_config == "auto"
    sampling = dict(network.sampling_defaults) if uses_generation_config else {}
    _check_sampling(sampling, model_dir)
    max_model_len = _max_model_len(config.model.max_model_len, network.max_model_len)
    network = network.for_length(max_model_len)
    device = find_device(config.model.device)
    dtype = choose_dtype(network, config.model.dtype, device)
    backend = _choose_backend(config, network, dtype, device)
    _check_sizes(config, network, dtype, device, max_model_len, backend)
    model = _load_weights(config, model_dir, network, dtype, device, backend, progress)
    recurrent = any(isinstance(layer, LayerState) for layer in model.kv_cache_spec())
    refuse_for_states(config, recurrent)
    images = load_images(config, model_dir, network, dtype, backend)
    drafting = load_drafts(config, model_dir, network, dtype, backend, progress)
    memory = config.cache.kv_cache_memory_bytes
    plan = _plan(
        config,
        [*model.kv_cache_spec(), *([] if drafting is None else drafting.layers)],
        dtype,
        max_model_len,
        _cache_memory(config, network, dtype, device) if memory is None else memory,
    )
    check_fits(plan, device, memory)
    executor = _make_executor(model, plan, config, dtype, device, backend, max_model_len, drafting, images)
    return LoadedExecutor(
        executor=executor,
        model_dir=str(model_dir),
        vocab_size=network.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(network.eos_token_ids),
        adapters=executor.adapters,
        takes_images=images is not None,
        sampling_defaults=sampling,
        calls=executor.calls,
        notes=(*network.notes(uses_generation_config), *_notes(config, network, dtype, executor, backend, model)),
        memory_plan=plan.describe(max_model_len),
        dtype=str(dtype).removeprefix("torch."),
        model_impl=network.model_impl,
        quantization=model.quantization,
        approximations=_approximations(config, model, network, dtype, plan, images),
        weight_bytes=model.weight_bytes,
        kernels=backend.kernels,
        threads=backend.num_threads(config),
        equal_bits=backend.abilities.equal_bits and not executor.calls,
        records_graphs=backend.abilities.graphs,
        device=device_name(device),
        graphs=executor.describe_graphs(),
        block_bytes=sum(plan.block_bytes) // len(plan.block_bytes),
        kv_cache_dtype=None if plan.dtype == dtype else str(plan.dtype).removeprefix("torch."),
        step_cost=_step_cost(network, backend, dtype, model.quantization, plan.dtype),
    )


def _approximations(
    config: EngineConfig,
    model: CausalLM | TransformersLM,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    plan: KVPlan,
    images: ImageBank | None,
) -> Callable[[], tuple[str, ...]]:
    """Function that returns the approximations of the model with its weights at the time of the call."""
    from chairlift.models.approximations import approximations_of
    from chairlift.models.hf_config import NetworkConfig

    ropes = (network.rope, network.window_rope) if isinstance(network, NetworkConfig) else ()
    return functools.partial(
        approximations_of,
        model,
        dtype,
        plan.dtype,
        [rope.rope_type for rope in ropes if rope is not None],
        rounds_encoder=images is not None and images.rounds_floats,
        lora=config.lora.enable_lora,
    )


def _check_sampling(sampling: dict[str, Any], model_dir: Path) -> None:
    """Raise ConfigError if the sampling defaults in the model's files are not valid sampling parameters."""
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        where = model_dir / "generation_config.json"
        raise ConfigError(f"{where}: {error}; correct it, or set generation_config to vllm") from None


def _plan(
    config: EngineConfig,
    spec: Sequence[LayerCache | LayerState],
    dtype: torch.dtype,
    max_model_len: int,
    memory_bytes: int,
) -> KVPlan:
    """Sizes of the KV cache. Raises ConfigError if too few blocks fit into ``memory_bytes``."""
    import torch

    from chairlift.executor.kv_tensors import plan_kv_cache

    scheduler = config.scheduler
    return plan_kv_cache(
        spec,
        dtype=dtype,
        kv_dtype=torch.int8 if config.cache.kv_cache_dtype == "int8" else None,
        block_size=config.cache.block_size,
        memory_bytes=memory_bytes,
        num_blocks=config.cache.num_kv_blocks,
        swap_bytes=config.cache.swap_space_bytes,
        swap_directory=config.cache.swap_directory,
        most_tokens=scheduler.max_num_seqs * max_model_len,
        rows=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        caching=config.cache.enable_prefix_caching,
        snapshot_interval=config.cache.state_snapshot_interval,
    )


def _check_sizes(
    config: EngineConfig,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    backend: Backend,
) -> None:
    """Raise ConfigError for steps that are too large, and for a KV cache of a given size that is too small or too
    large, before weights are read.

    Without a given size, and for models that transformers implements, the KV cache is known only after the weights are
    loaded.
    """
    import torch

    from chairlift.executor.kv_tensors import available_memory, check_fits, check_step_fits
    from chairlift.models.causal_lm import CausalLM
    from chairlift.models.hf_config import NetworkConfig

    memory = config.cache.kv_cache_memory_bytes
    num_blocks = config.cache.num_kv_blocks
    if memory is None and num_blocks is None and device.type != "cpu":
        _cache_memory(config, network, dtype, device)  # even without weights, a step must leave memory for the KV cache
    else:
        scheduler = config.scheduler
        logits = 0 if backend.abilities.fused_head else network.vocab_size * (dtype.itemsize + 4)
        tokens = scheduler.max_num_batched_tokens
        token_bytes = network.step_bytes(dtype.itemsize)
        check_step_fits(scheduler, tokens, token_bytes, logits, device, "max_num_batched_tokens")
    if (memory is None and num_blocks is None) or not isinstance(network, NetworkConfig):
        return
    with torch.device("meta"):
        spec = CausalLM(network).kv_cache_spec()
    available = available_memory(device) if memory is None else memory
    check_fits(_plan(config, spec, dtype, max_model_len, available), device, memory)


def _make_executor(
    model: CausalLM | TransformersLM,
    plan: KVPlan,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    max_model_len: int,
    drafting: DraftSource | None,
    images: ImageBank | None,
) -> LocalExecutor:
    """Allocate the caches and the buffers of a step. Raises ConfigError if there is not enough memory."""
    import torch

    from chairlift.executor.local import LocalExecutor

    scheduler = config.scheduler
    rows = scheduler.max_num_seqs
    max_tokens = scheduler.max_num_batched_tokens
    try:
        runner = backend.make_runner(model, plan, config, dtype, device, max_model_len, drafting, images)
    except (MemoryError, torch.OutOfMemoryError):
        message = f"no memory for {plan.total_bytes:,} bytes of KV cache (num_kv_blocks, kv_cache_memory_bytes)"
        raise ConfigError(f"{message} and steps of {max_tokens:,} tokens (max_num_batched_tokens); lower one") from None
    try:
        sizes = {"num_slots": rows, "max_model_len": max_model_len, "block_size": plan.block_size}
        drafter = None
        if drafting is not None:
            # Runners of backends with the ability draft_models are DraftRunners; others load no drafts.
            drafter = drafting.make(cast("DraftRunner", runner), max_tokens=max_tokens, **sizes)
        executor = LocalExecutor(runner, **sizes, drafter=drafter)
    except MemoryError:  # the length comes from the model's files, and may be far too large
        message = f"no memory for {rows} rows (max_num_seqs) of {max_model_len:,} tokens (max_model_len); lower one"
        raise ConfigError(message) from None
    return executor


def _step_cost(
    network: NetworkConfig | TransformersConfig,
    backend: Backend,
    dtype: torch.dtype,
    quantization: str | None,
    kv_dtype: torch.dtype,
) -> ModelCost | None:
    from chairlift.kernels.weights import QUANTIZED
    from chairlift.models.hf_config import NetworkConfig
    from chairlift.models.step_cost import ModelCost

    if not backend.abilities.floors or not isinstance(network, NetworkConfig):
        return None
    if quantization is not None and quantization.partition("+")[0] not in QUANTIZED:
        return None  # formats that exist in files only (MXFP4), for a part of the model
    return ModelCost.of(network, dtype, quantization, kv_dtype)


def model_directory(config: EngineConfig) -> Path:
    """Directory of the model's files, from the settings. Raises ModelLoadError."""
    from chairlift.models.loader import resolve_model_dir

    name = config.model.model
    bundled = Path(__file__).parents[1] / "assets"
    return bundled if name == BUNDLED_MODEL else resolve_model_dir(name, config.model.revision)


def _choose_backend(
    config: EngineConfig, network: NetworkConfig | TransformersConfig, dtype: torch.dtype, device: torch.device
) -> Backend:
    from chairlift.executor.select import choose_backend, choose_transformers
    from chairlift.models.fallback.config import TransformersConfig

    if isinstance(network, TransformersConfig):
        return choose_transformers(config, network)
    return choose_backend(config, network, dtype, device)


def _load_weights(
    config: EngineConfig,
    model_dir: Path,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    progress: Progress | None,
) -> CausalLM | TransformersLM:
    """Load the weights in the format of the backend."""
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.loader import load_model

    if isinstance(network, TransformersConfig):
        from chairlift.models.fallback.loading import load_transformers_model  # imports transformers

        return load_transformers_model(model_dir, network, dtype, device, progress)
    weight_format = backend.weight_format(config.model.quantization, config.model.dtype)
    return load_model(model_dir, network, dtype, device, progress, weight_format=weight_format)


def _notes(
    config: EngineConfig,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    executor: LocalExecutor,
    backend: Backend,
    model: CausalLM | TransformersLM,
) -> list[str]:
    """Notes for the user on how this model is run, one per line."""
    from chairlift.models.fallback.config import TransformersConfig

    notes = []
    if config.model.dtype == "auto" and network.dtype == "float16" and str(dtype) == "torch.bfloat16":
        notes.append(
            "the checkpoint is in float16, and the CPU computes in bfloat16, which has three bits of precision less; "
            "set dtype to float32 to keep the full precision"
        )
    if not isinstance(network, TransformersConfig) and network.vision is not None and not backend.abilities.images:
        notes.append(
            f"images are refused: {backend.kernels} kernels run this model, and only the CPU's native ones take them"
        )
    if _expands(config, model, backend):
        notes.append(
            "dtype is float32, so the checkpoint's integers are computed as float32, exactly, which takes"
            f" {model.weight_bytes / 2**20:,.0f} MiB; with quantization stored they stay integers, and activations are"
            " rounded to 8 bits"
        )
    if config.model.quantization == "int4":
        notes.append(
            "weights are rounded to 4 bits without calibration, which costs quality: in a model of 135M parameters the "
            "most likely token then changes at one position in three; use a calibrated checkpoint, or int8"
        )
    has_states = any(group.state_span is not None for group in executor.cache_groups)
    if None not in (config.cache.num_kv_blocks, config.cache.kv_cache_memory_bytes) and not has_states:
        notes.append("kv_cache_memory_bytes has no effect: num_kv_blocks says how many blocks there are")
    return [*notes, *_thread_notes(config), *_call_notes(executor.calls)]


def _expands(config: EngineConfig, model: CausalLM | TransformersLM, backend: Backend) -> bool:
    """Whether integers of the checkpoint became floats only because of the setting ``dtype``."""
    from chairlift.models.layers.linear import Matrix

    layers = [layer for layer in model.modules() if isinstance(layer, Matrix)]
    asked = config.model.dtype == "float32" and config.model.quantization is None
    return asked and backend.keeps_integers() and any(layer.shape.kind is not None for layer in layers)


def _load_hashlm(config: EngineConfig, delay: float) -> LoadedExecutor:
    if config.model.quantization is not None:
        quantization = config.model.quantization
        raise ConfigError(f"quantization is {quantization!r}, but HashLM has no weights; leave quantization out")
    if config.cache.kv_cache_dtype != "auto":
        raise ConfigError("kv_cache_dtype is 'int8', but HashLM's cache holds no K and V; leave kv_cache_dtype out")
    if config.lora.enable_lora:
        raise ConfigError("enable_lora is on, but HashLM has no weights to adapt; leave enable_lora out")
    if config.model.model_impl not in ("auto", "native"):
        raise ConfigError(f"model_impl is {config.model.model_impl!r}, but HashLM has no layers; leave model_impl out")
    from chairlift.executor.host_memory import host_memory
    from chairlift.executor.local import LocalExecutor
    from chairlift.models.hashlm_served import hashlm_runner

    served = hashlm_runner(config, delay, lambda nbytes: host_memory(nbytes, config.cache.swap_directory))
    executor = LocalExecutor(
        served.runner,
        num_slots=config.scheduler.max_num_seqs,
        max_model_len=served.max_model_len,
        block_size=config.cache.block_size,
    )
    return LoadedExecutor(
        executor=executor,
        model_dir="",
        vocab_size=served.vocab_size,
        max_model_len=served.max_model_len,
        eos_token_ids=served.eos_token_ids,
        memory_plan=served.memory_plan,
        dtype="uint64",
        kernels="hashlm",
        threads=1,
        equal_bits=True,
    )


def _max_model_len(setting: int | None, trained: int) -> int:
    if setting is not None and setting > trained:
        raise ConfigError(f"max_model_len is {setting}, but the model was made for {trained} positions; lower it")
    return setting or trained


def _cache_memory(
    config: EngineConfig, network: NetworkConfig | TransformersConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes for the KV cache when no setting gives them. Call it after the weights are loaded."""
    import torch

    from chairlift.executor.backends.triton.step_graph import MAX_RECORDED_TOKENS
    from chairlift.executor.kv_tensors import DEFAULT_SHARE, available_memory, gpu_cache_memory
    from chairlift.kernels.triton.launch import ANY_ROWS_BLOCK, num_multiprocessors

    if device.type == "cpu" or config.cache.num_kv_blocks is not None:
        return int(available_memory(device) * DEFAULT_SHARE)
    # Memory for the activations of the widest layer, the logits and their copies in sampling, and the copies that CUDA
    # graphs make.
    token = network.step_bytes(dtype.itemsize)
    if config.model.batch_invariant:  # float32 parts of a split sum, for as many programs as there are multiprocessors
        token += num_multiprocessors(device) * ANY_ROWS_BLOCK * 4
    rows = config.scheduler.max_num_seqs
    tokens = config.scheduler.max_num_batched_tokens
    step = (tokens + max(rows, min(tokens, MAX_RECORDED_TOKENS))) * token + 2 * rows * network.vocab_size * (
        dtype.itemsize + 4
    )
    torch.cuda.empty_cache()  # memory that loading used and released
    return gpu_cache_memory(*torch.cuda.mem_get_info(device), config.cache.gpu_memory_utilization, step)


def find_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:N`` as a torch device. Raises ConfigError if torch finds no such GPU."""
    import torch

    number = int(name.partition(":")[2] or 0)
    if name != "cpu" and number >= (count := torch.cuda.device_count()):
        if not count:
            raise ConfigError(f"device is {name!r}, but this torch finds no CUDA device; use device='cpu'")
        message = f"device is {name!r}, but this torch finds {count} CUDA device(s); use cuda:{count - 1} or lower"
        raise ConfigError(message)
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """``cpu``, or the name of the GPU."""
    if device.type == "cpu":
        return str(device)
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})"


def _thread_notes(config: EngineConfig) -> list[str]:
    from chairlift.kernels.cpu.library import default_threads

    threads = config.model.threads
    processors = default_threads()
    if threads is None or threads <= processors or config.model.device != "cpu":
        return []
    return [
        f"threads is {threads}, but this process may use {processors} processors (by its affinity and the quotas of its"
        " control groups): threads that wait for one another make steps slower; lower threads, or leave it out"
    ]


def _call_notes(calls: Sequence[str]) -> list[str]:
    if not calls:
        return []
    return [
        f"the kernels lack {', '.join(calls)}: PyTorch computes these operations, more slowly, and the generated text"
        " may depend on the batch where two tokens are almost equally likely"
    ]


_PIECES_OF_WEIGHTS: Final = 256


def fingerprint(model_dir: str, *parts: str) -> str:
    """Name that changes when the weights, precision, kernels or version change, because then the generated text may
    change."""
    digest = hashlib.sha256("\0".join((__version__, *parts)).encode())
    files: list[Path] = []
    if model_dir.endswith(".gguf"):
        files = [Path(model_dir)]
    elif model_dir:
        files = list(Path(model_dir).glob("*"))
    for path in sorted(files):
        # Only regular files are read: reading a pipe or a device might never end, and a link may be broken.
        if path.suffix in (".json", ".safetensors", ".gguf") and path.is_file():
            with path.open("rb") as file:  # only a part of each file, because reading all weights would take too long
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name}:{size}".encode())
                for at in range(0, size, 4096 if path.suffix == ".json" else max(1, size // _PIECES_OF_WEIGHTS)):
                    file.seek(at)
                    digest.update(file.read(4096))
    return "fp_" + digest.hexdigest()[:10]
