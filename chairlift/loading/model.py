"""Loads a model and makes its executor, from settings. Every engine, in any kind of process, is started with these
functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import BUNDLED_MODEL, EngineConfig
from chairlift.engine.info import EngineInfo
from chairlift.errors import ConfigError, RequestError
from chairlift.loading.loaded import LoadedExecutor, identified, serving_facts
from chairlift.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from chairlift.executor.backends.backend import Backend
    from chairlift.executor.drafters.runner import DraftRunner
    from chairlift.executor.drafters.source import DraftSource
    from chairlift.executor.image_bank import ImageBank
    from chairlift.executor.kv_tensors import KVPlan
    from chairlift.executor.local import LocalExecutor, ModelRunner
    from chairlift.executor.parallel.processes import RankProcesses
    from chairlift.models.causal_lm import CausalLM
    from chairlift.models.context import LayerCache, LayerState
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.fallback.model import TransformersLM
    from chairlift.models.hf_config import NetworkConfig
    from chairlift.models.step_cost import ModelCost
    from chairlift.models.vision.processor import ImageProcessor

__all__ = [
    "Progress",
    "device_name",
    "find_device",
    "kv_plan",
    "load_executor",
    "model_directory",
    "read_images",
    "read_tokenizer",
]

Progress = Callable[[str, float], None]
"""Function that is called with (label, fraction done from 0 to 1) while a model loads."""


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
    from chairlift.models.formats.gguf_projector import NONE
    from chairlift.models.registry import named_family
    from chairlift.models.vision.vision_files import read_processor

    named_family(config.model.model_impl)  # this process may know the family only by the setting
    if not model_dir or config.model.mmproj == NONE:
        return None
    return read_processor(Path(model_dir), tokenizer, config.model.mmproj)


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
    network = read_network(model_dir, config.model.model_impl, config.model.mmproj)
    uses_generation_config = config.model.generation_config == "auto"
    sampling = dict(network.sampling_defaults) if uses_generation_config else {}
    _check_sampling(sampling, model_dir)
    max_model_len = _max_model_len(config.model.max_model_len, network.max_model_len, network.usual_model_len)
    network = network.for_length(max_model_len)
    device = find_device(config.model.device)
    dtype = choose_dtype(network, config.model.dtype, device)
    backend = _choose_backend(config, network, dtype, device)
    _check_sizes(config, network, dtype, device, max_model_len, backend)
    ranks = _start_ranks(config, network, backend, max_model_len)
    model = _load_weights(config, model_dir, network, dtype, device, backend, progress, ranks)
    recurrent = any(isinstance(layer, LayerState) for layer in model.kv_cache_spec())
    refuse_for_states(config, recurrent)
    images = load_images(config, model_dir, network, dtype, backend)
    drafting = load_drafts(config, model_dir, network, dtype, backend, progress)
    memory = config.cache.kv_cache_memory_bytes
    plan = _plan(
        config,
        [*_whole_spec(model, network, ranks), *([] if drafting is None else drafting.layers)],
        dtype,
        max_model_len,
        _cache_memory(config, network, dtype, device, backend) if memory is None else memory,
    )
    check_fits(plan, device, memory)
    executor = _make_executor(model, plan, config, dtype, device, backend, max_model_len, drafting, images, ranks)
    approximations = _approximations(config, model, network, dtype, plan, images)
    equal_bits = backend.abilities.equal_bits and not executor.calls
    info = EngineInfo(
        **serving_facts(config, executor, max_model_len),
        **_computing_facts(network, model, backend, dtype, device, plan, 0 if ranks is None else ranks.weight_bytes),
        model_dir=str(model_dir),
        vocab_size=network.vocab_size,
        eos_token_ids=tuple(network.eos_token_ids),
        shortest_prompt=network.shortest_prompt,
        takes_images=images is not None,
        sampling_defaults=sampling,
        notes=(
            *network.notes(uses_generation_config),
            *_notes(config, network, dtype, executor, backend, model, model_dir),
        ),
        memory_plan=plan.describe(max_model_len),
        approximations=approximations(),
        threads=backend.num_threads(config),
        graphs=executor.describe_graphs(),
        deterministic=equal_bits or config.model.batch_invariant,
    )
    return LoadedExecutor(
        executor=executor,
        info=identified(info, config, equal_bits=equal_bits),
        adapters=executor.adapters,
        approximations=approximations,
        step_cost=_step_cost(network, backend, dtype, model.quantization, plan.dtype),
    )


def _computing_facts(
    network: NetworkConfig | TransformersConfig,
    model: CausalLM | TransformersLM,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    plan: KVPlan,
    other_bytes: int,
) -> dict[str, Any]:
    """Name -> value, for the fields of :class:`EngineInfo` about how the model is stored and computed. ``other_bytes``:
    size of the weights that other processes have."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "model_impl": network.model_impl,
        "quantization": model.quantization,
        "weight_bytes": model.weight_bytes + other_bytes,
        "kernels": backend.kernels,
        "records_graphs": backend.abilities.graphs,
        "device": device_name(device),
        "block_bytes": sum(plan.block_bytes) // len(plan.block_bytes),
        "kv_cache_dtype": None if plan.dtype == dtype else str(plan.dtype).removeprefix("torch."),
    }


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


def kv_plan(config: EngineConfig, network: NetworkConfig | TransformersConfig) -> tuple[int, int]:
    """(Bytes of unquantised weights, bytes of KV cache and swap space in memory) of a model, without its weights. For a
    model that transformers implements: 0, and the memory that the settings allow. Raises ConfigError."""
    import torch

    from chairlift.executor.select import choose_dtype
    from chairlift.models.causal_lm import CausalLM
    from chairlift.models.hf_config import NetworkConfig

    device = find_device(config.model.device)
    dtype = choose_dtype(network, config.model.dtype, device)
    memory = config.cache.kv_cache_memory_bytes or _cache_memory(config, network, dtype, device)
    if not isinstance(network, NetworkConfig):
        return 0, memory
    max_model_len = _max_model_len(config.model.max_model_len, network.max_model_len, network.usual_model_len)
    with torch.device("meta"):  # shapes only
        model = CausalLM(network.for_length(max_model_len))
    model.tie_weights()
    plan = _plan(config, model.kv_cache_spec(), dtype, max_model_len, memory)
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return weights, plan.total_bytes + (plan.host_bytes if plan.swap_directory is None else 0)


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
        # Even without weights, a step must leave memory for the KV cache.
        _cache_memory(config, network, dtype, device, backend)
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
    ranks: RankProcesses | None,
) -> LocalExecutor:
    """Allocate the caches and the buffers of a step. Raises ConfigError if there is not enough memory."""
    import torch

    from chairlift.executor.local import LocalExecutor

    scheduler = config.scheduler
    rows = scheduler.max_num_seqs
    max_tokens = scheduler.max_num_batched_tokens
    try:
        runner: ModelRunner
        if ranks is None:
            runner = backend.make_runner(model, plan, config, dtype, device, max_model_len, drafting, images)
        else:
            runner = ranks.make_runner(cast("CausalLM", model), plan, config, dtype, max_model_len, backend.kernels)
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
    ranks: RankProcesses | None,
) -> CausalLM | TransformersLM:
    """Load the weights in the format of the backend: those of this process, if the model is divided."""
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.loader import load_model

    if isinstance(network, TransformersConfig):
        from chairlift.models.fallback.loading import load_transformers_model  # imports transformers

        return load_transformers_model(model_dir, network, dtype, device, progress)
    weight_format = backend.weight_format(config.model.quantization, config.model.dtype)
    if ranks is None:
        return load_model(model_dir, network, dtype, device, progress, weight_format=weight_format)
    from chairlift.executor.parallel.processes import on_processors
    from chairlift.executor.parallel.shares import divide_model

    divide = functools.partial(divide_model, share=ranks.share)
    with on_processors(ranks.processors[0]):
        model = load_model(model_dir, network, dtype, device, progress, weight_format=weight_format, divide=divide)
    ranks.wait_until_loaded()
    return model


def _start_ranks(
    config: EngineConfig, network: NetworkConfig | TransformersConfig, backend: Backend, max_model_len: int
) -> RankProcesses | None:
    """Start the other processes of a model that is divided; None for a model on one process. Raises ConfigError for
    what cannot be divided."""
    if config.model.tensor_parallel_size == 1:
        return None
    from chairlift.executor.parallel.processes import RankProcesses
    from chairlift.executor.parallel.shares import refuse_division

    refuse_division(config, network, backend)
    return RankProcesses(config, max_model_len)


def _whole_spec(
    model: CausalLM | TransformersLM, network: NetworkConfig | TransformersConfig, ranks: RankProcesses | None
) -> Sequence[LayerCache | LayerState]:
    """Shapes of the caches of all processes together."""
    if ranks is None:
        return model.kv_cache_spec()
    import torch

    from chairlift.models.causal_lm import CausalLM

    with torch.device("meta"):
        return CausalLM(cast("NetworkConfig", network)).kv_cache_spec()


def _notes(
    config: EngineConfig,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    executor: LocalExecutor,
    backend: Backend,
    model: CausalLM | TransformersLM,
    model_dir: Path,
) -> list[str]:
    """Notes for the user on how this model is run, one per line."""
    from chairlift.models.fallback.config import TransformersConfig
    from chairlift.models.formats.gguf.files import is_gguf
    from chairlift.models.formats.gguf.reader import GGUFModel
    from chairlift.models.formats.gguf_projector import open_projector
    from chairlift.models.formats.quantized_checkpoints import quantization_notes

    notes = [] if isinstance(network, TransformersConfig) else [*quantization_notes(model_dir)]
    if is_gguf(model_dir):
        notes += open_projector(GGUFModel(model_dir), config.model.mmproj)[1]
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
    return [*notes, *_thread_notes(config), *_call_notes(executor.calls), *executor.notes()]


def _expands(config: EngineConfig, model: CausalLM | TransformersLM, backend: Backend) -> bool:
    """Whether integers of the checkpoint became floats only because of the setting ``dtype``."""
    from chairlift.models.layers.linear import Matrix

    if config.model.dtype != "float32" or config.model.quantization is not None:
        return False
    kept = backend.weight_format("stored")
    layers = [layer for layer in model.modules() if isinstance(layer, Matrix)]
    return any(kept.kind_of(layer.shape) != layer.format.kind_of(layer.shape) for layer in layers)


def _load_hashlm(config: EngineConfig, delay: float) -> LoadedExecutor:
    if config.model.quantization is not None:
        quantization = config.model.quantization
        raise ConfigError(f"quantization is {quantization!r}, but HashLM has no weights; leave quantization out")
    if config.cache.kv_cache_dtype != "auto":
        raise ConfigError("kv_cache_dtype is 'int8', but HashLM's cache holds no K and V; leave kv_cache_dtype out")
    if config.lora.enable_lora:
        raise ConfigError("enable_lora is on, but HashLM has no weights to adapt; leave enable_lora out")
    if config.model.tensor_parallel_size != 1:
        size = config.model.tensor_parallel_size
        raise ConfigError(f"tensor_parallel_size is {size}, but HashLM has no layers to divide; leave it out")
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
    info = EngineInfo(
        **serving_facts(config, executor, served.max_model_len),
        model_dir="",
        vocab_size=served.vocab_size,
        eos_token_ids=served.eos_token_ids,
        memory_plan=served.memory_plan,
        dtype="uint64",
        device="cpu",
        kernels="hashlm",
        threads=1,
        deterministic=True,
    )
    return LoadedExecutor(executor=executor, info=identified(info, config, equal_bits=True))


def _max_model_len(setting: int | None, trained: int, usual: int) -> int:
    if setting is not None and setting > trained:
        raise ConfigError(f"max_model_len is {setting}, but the model was made for {trained} positions; lower it")
    return setting or usual


def _cache_memory(
    config: EngineConfig,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend | None = None,
) -> int:
    """Bytes for the KV cache when no setting gives them. Call it after the weights are loaded. Without ``backend``,
    matmuls are assumed to need no memory of their own."""
    import torch

    from chairlift.executor.backends.triton.step_graph import MAX_RECORDED_TOKENS
    from chairlift.executor.kv_tensors import DEFAULT_SHARE, available_memory, gpu_cache_memory
    from chairlift.kernels.triton.launch import ANY_ROWS_BLOCK, num_multiprocessors
    from chairlift.models.hf_config import NetworkConfig

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
    if backend is not None:
        step += backend.weight_format(config.model.quantization, config.model.dtype).scratch_bytes
        step += backend.adapter_bytes(config, network, dtype) if isinstance(network, NetworkConfig) else 0
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
