"""Every setting of the engine: frozen dataclasses, a docstring under each field, one flat name space.

Names are vLLM's where vLLM has the setting. Command-line flags and help texts are generated from here.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
import textwrap
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from chairlift.errors import ConfigError
from chairlift.quantities import reader_of
from chairlift.rerankers import RERANKERS
from chairlift.service_class import ServiceClass, parse_service_classes, parse_tenant_weights
from chairlift.tool_calls.formats import NONE, REASONING_FORMATS, TOOL_FORMATS
from chairlift.vllm_names import translate

__all__ = [
    "BUNDLED_MODEL",
    "CacheConfig",
    "CacheGroup",
    "EngineConfig",
    "Flag",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "flat_fields",
    "server_fields",
]

BUNDLED_MODEL = "bundled"
"""Stands for the small model that comes with the package."""

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "model_impl": ("auto", "native", "transformers"),
    "runner": ("auto", "generate", "pooling"),
    "pooling_type": ("LAST", "CLS", "MEAN"),
    "reranker": tuple(RERANKERS),
    "kernels": ("auto", "amx", "avx512_bf16", "avx512", "avx2", "torch", "triton"),
    "cuda_graphs": ("lazy", "start", "off"),
    "quantization": ("int8", "int4", "fp8", "none"),
    "generation_config": ("auto", "vllm"),
    "kv_cache_dtype": ("auto", "int8"),
    "batching": ("continuous", "static", "dynamic"),
    "late_requests": ("downgrade", "drop"),
    "preemption_mode": ("auto", "recompute", "swap", "none"),
    "prefill_mode": ("mixed", "prefill_first", "decode_first", "separate", "auto"),
    "metrics_prefix": ("chairlift", "vllm"),
    "log_format": ("text", "json"),
    "tool_call_parser": ("auto", *TOOL_FORMATS, NONE),
    "reasoning_parser": ("auto", *REASONING_FORMATS, NONE),
}
_RANGES: dict[str, tuple[float, float]] = {
    "threads": (1, 256),
    "max_model_len": (2, 2**24),
    "seed": (-(2**63), 2**63 - 1),
    "block_size": (1, 256),
    "kv_cache_memory_bytes": (1, 2**50),
    "gpu_memory_utilization": (0.01, 1),
    "num_kv_blocks": (2, 2**31),
    "swap_space_bytes": (0, 2**50),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**24),
    "ageing_seconds": (0.001, 10**6),
    "batch_wait_ms": (0, 3_600_000),
    "num_lookahead_steps": (0, 2),
    "admission_watermark": (0, 0.5),
    "governor_ttft_ms": (0.001, 10**9),
    "governor_tpot_ms": (0.001, 10**9),
    "port": (0, 65535),
    "max_num_queued_reqs": (0, 2**31),
    "max_num_queued_tokens": (0, 2**40),
    "queue_timeout": (0.001, 10**6),
    "request_timeout": (0.001, 10**6),
    "stall_timeout": (0.001, 10**6),
    "health_timeout": (0.001, 10**6),
    "shutdown_timeout": (0, 10**6),
    "status_interval": (0, 10**6),
    "max_body_bytes": (1024, 2**30),
    "max_connections": (1, 2**20),
    "batch_max_in_flight": (1, 2**16),
    "max_batch_file_bytes": (1024, 2**40),
    "max_stored_responses": (0, 2**20),
    "max_stored_response_bytes": (0, 2**40),
}
"""Least and most, inclusive."""
_TEXTS = {
    *("model", "revision", "tokenizer", "swap_directory"),
    *("host", "api_key_file", "chat_template", "otlp_traces_endpoint", "batch_dir"),
}
"""Settings that are a text as it stands; the texts of others have a form of their own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is served."""

    model: str = BUNDLED_MODEL
    """Directory with config.json and safetensors, a Hugging Face Hub id, or 'bundled' for the demo model inside."""
    revision: str | None = None
    """Branch, tag or commit, when the model comes from the Hub."""
    tokenizer: str | None = None
    """Directory with tokenizer.json, when it is not the model's own."""
    skip_tokenizer_init: bool = False
    """Take and return token ids only."""
    dtype: str = "auto"
    """auto (what the model says), float32, bfloat16 or float16; for weights, activations and KV cache."""
    quantization: str | None = None
    """Round weights as they are loaded. int8: to 8 bits in groups of 32, by the native CPU kernels; int4: those of the
    layers to 4 bits in groups of 32, which costs quality: better take a checkpoint that was calibrated. fp8: those of
    the layers to 8 bits, on a GPU of compute capability 8.9 or higher. none: in dtype, also where the checkpoint is
    quantised. None: as the checkpoint has them."""
    device: str = "cpu"
    """cpu or cuda (cuda:0, ...)."""
    threads: int | None = None
    """CPU threads. None: all the processors this process may use."""
    model_impl: str = "auto"
    """Whose code the layers are: native (Chairlift's own), transformers (the class in transformers, run by PyTorch
    around our attention, several times slower: docs/models.md), or auto: native where there is one, else transformers
    where the family has been seen right."""
    kernels: str = "auto"
    """Who computes: auto picks the best this processor or GPU has; a name forces that path (triton: on a GPU); torch is
    the reference."""
    cuda_graphs: str = "lazy"
    """Steps recorded as CUDA graphs: lazy (when first needed), start (all at the start), or off (vLLM's
    enforce_eager)."""
    batch_invariant: bool = False
    """Answers have the same bits whatever else is in the batch, at a cost in speed on a GPU; on the CPU's native
    kernels they always have."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together, in tokens. None: what the model was made for."""
    generation_config: str = "auto"
    """Temperature, top_p, top_k, min_p and repetition_penalty where nobody gives one: auto takes those in the model's
    generation_config.json; vllm takes none from there."""
    runner: str = "auto"
    """What the model is for: auto (by its files), generate (texts) or pooling (embeddings, scores and classes)."""
    pooling_type: str | None = None
    """Which hidden state becomes a text's embedding: LAST (of its last token), CLS (of its first) or MEAN. None: as the
    files of sentence-transformers say, else LAST for decoders and CLS for encoders."""
    pooling_normalize: bool | None = None
    """Whether embeddings have length 1. None: as the model's files say, else yes."""
    is_matryoshka: bool | None = None
    """Whether an embedding may be cut to its first dimensions. None: as config.json says, else no."""
    reranker: str | None = None
    """The model says yes or no to a query and a document, and scores pairs: qwen3 for Qwen3-Reranker in its original
    form. None: the model is what its files say."""
    reranker_instruction: str | None = None
    """What such a model is told to look for. None: passages that answer a web search, as its authors wrote it."""
    seed: int | None = None
    """Seeds the requests that bring no seed of their own, in order of arrival. None: fresh seeds each time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = 16
    """Tokens per block: a power of two from 1 to 256."""
    kv_cache_dtype: str = "auto"
    """What K and V are kept in: auto (the model's dtype), or int8, in which almost twice as many tokens fit as in
    bfloat16 (the CPU's native kernels only)."""
    kv_cache_memory_bytes: int | None = None
    """Memory for the KV cache. None: 40 % of what the machine and its control group allow, or what
    gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that may be in use, by weights, steps and KV cache together (GPU only)."""
    num_kv_blocks: int | None = None
    """Exact number of blocks per cache group, instead of a size in bytes."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prompt beginnings between requests."""
    prefix_offload: bool = False
    """Keep what the prefix cache evicts in the swap space, as far as preempted requests leave room there."""
    swap_space_bytes: int | None = None
    """Host memory for the KV of preempted requests. None: a tenth of the KV cache; 0: none."""
    swap_directory: str | None = None
    """Directory for a file that holds it instead of memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding. Names are vLLM's."""

    method: str
    """ngram."""
    num_speculative_tokens: int = 8
    """Most drafts of a row in one step."""
    prompt_lookup_min: int = 3
    """Tokens that must be equal for a draft."""

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> SpeculativeConfig:
        """From a JSON object. Raises ConfigError that names the key."""
        given = value
        if isinstance(value, str):
            try:
                given = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"speculative_config is not JSON ({error}): {value!r:.200}") from None
        if not isinstance(given, Mapping):
            raise ConfigError(f'speculative_config must be an object like {{"method": "ngram"}}, got {value!r:.200}')
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in given if key not in known)
        if unknown:
            raise ConfigError(f"speculative_config has unknown keys {unknown}; known: {sorted(known)}")
        if given.get("method") != "ngram":
            raise ConfigError(f"speculative_config: method must be ngram, got {given.get('method')!r:.80}")
        for name, most in (("num_speculative_tokens", 64), ("prompt_lookup_min", 16)):
            number = given.get(name, 1)
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
                raise ConfigError(
                    f"speculative_config: {name} must be a whole number from 1 to {most}, got {number!r:.80}"
                )
        return cls(**given)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who computes when."""

    max_num_seqs: int = 256
    """Most requests in a step."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step. Lower keeps decodes smooth, higher speeds prompts up."""
    scheduling_policy: str = "fcfs"
    """Who is next: fcfs (first come, first served), priority (reservations, deadlines, priorities, fairness between
    tenants), or module:Class, a policy of one's own."""
    service_classes: str = ""
    """JSON object of classes of service and what they promise, for the policy priority."""
    tenant_weights: str = ""
    """JSON object of tenants whose share of the engine is not 1, for the policy priority."""
    ageing_seconds: float = 30.0
    """A waiting request gains one level of priority per this time, when nobody like it was let in meanwhile."""
    late_requests: str = "downgrade"
    """What happens to a request that cannot keep its deadline any more: downgrade (it goes on without) or drop."""
    prefill_mode: str = "mixed"
    """What a step computes: mixed (decodes, and prompts with the rest of the budget), prefill_first, decode_first,
    separate (steps of one kind), or auto (by what is predicted to take less time)."""
    preemption_mode: str = "auto"
    """How running work gives way: recompute, swap (its KV waits in host memory), auto (what costs less), or none
    (a request joins only with room for its longest answer)."""
    batching: str = "continuous"
    """continuous (rebuilt at every step), or a baseline: static (a batch ends as one), dynamic (fires like it)."""
    batch_wait_ms: float = 0.0
    """How long a static or dynamic batch waits to fill before it fires."""
    preferred_batch_sizes: str = ""
    """Sizes, like 4,8, at which a static or dynamic batch fires without waiting to fill."""
    policy_share: float = 0.75
    """Share of a step's prompt tokens that is handed out in the policy's order; the rest goes to the smallest requests,
    so that short prompts do not wait for long ones. From 0.25 to 1; 1 hands out all of it in the policy's order."""
    num_lookahead_steps: int | None = None
    """Steps scheduled ahead of the newest known tokens: 0, 1 or 2. None: 1 where Triton's kernels run on a GPU, else
    0."""
    speculative_config: str = ""
    """JSON object that turns speculative decoding on, like {"method": "ngram"}. ngram drafts what followed the last few
    tokens where they stood before. num_speculative_tokens (8) is the most drafts of a row, prompt_lookup_min (3) the
    tokens that must be equal. How many are computed follows from what a step costs; answers stay the same, bit for bit.
    Steps are not scheduled ahead then."""
    admission_watermark: float = 0.01
    """Share of the blocks kept free when a request joins a running batch."""
    governor: str = "off"
    """Who moves max_num_seqs, max_num_batched_tokens and admission_watermark at run time, within what is set here: off,
    rules, shadow (the rules' decisions are logged and not applied), or module:Class, a governor of one's own."""
    governor_ttft_ms: float | None = None
    """Time to the first token that the governor aims at. None: as it comes."""
    governor_tpot_ms: float | None = None
    """Time per output token that the governor aims at. None: as it comes."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The preferred batch sizes, ascending. Raises ConfigError."""
        sizes = self.preferred_batch_sizes
        given = [part.strip() for part in sizes.split(",")] if isinstance(sizes, str) and sizes.strip() else []
        if (sizes and not given) or not all(re.fullmatch("[1-9][0-9]{0,4}", part) for part in given):
            raise ConfigError(f"preferred_batch_sizes must be whole numbers above 0, like 4,8; got {sizes!r}")
        return tuple(sorted({int(part) for part in given}))

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None where none are. Raises ConfigError."""
        return SpeculativeConfig.parse(self.speculative_config) if self.speculative_config else None

    @property
    def most_running(self) -> int:
        """Rows: every running request must be able to take one token in every step, or decodes could starve."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def promises(self) -> dict[str, ServiceClass] | None:
        """The classes of service; None where the policy does not look at promises."""
        return None if self.scheduling_policy == "fcfs" else parse_service_classes(self.service_classes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of it. Raises ConfigError when a value is out of range."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        model, cache, scheduler = self.model, self.cache, self.scheduler
        for part in (model, cache, scheduler):
            _check(part)
        if not isinstance(model.device, str) or not re.fullmatch("cpu|cuda(:(0|[1-9][0-9]{0,2}))?", model.device):
            raise ConfigError(f"device must be cpu, cuda or cuda:N, got {model.device!r}")
        if cache.block_size & (cache.block_size - 1):
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {cache.block_size!r}")
        _known_or_class("governor", scheduler.governor, ("off", "shadow", "rules"))
        _policy(scheduler)
        if scheduler.batch_sizes and scheduler.batching == "continuous":
            raise ConfigError("preferred_batch_sizes are for batching static or dynamic; continuous never waits")

    def without_effect(self) -> list[str]:
        """What was set and does nothing beside the other settings, in a sentence each. Nothing is refused for it: who
        compares settings sets the same for all of them."""
        scheduler, given = self.scheduler, self.to_flat()
        plain, ungoverned = scheduler.scheduling_policy == "fcfs", scheduler.governor == "off"
        swaps = scheduler.preemption_mode in ("swap", "auto") and self.cache.swap_space_bytes != 0
        offloads = self.cache.enable_prefix_caching and self.cache.swap_space_bytes != 0
        for_priority = "fcfs looks at no deadlines and priorities; choose scheduling_policy priority"
        for_governor = "the governor is off; choose governor rules or shadow"
        idle = {
            "batch_wait_ms": (scheduler.batching == "continuous", "a continuous batch never waits"),
            "speculative_config": (scheduler.batching != "continuous", "only continuous batches have drafts"),
            "num_lookahead_steps": (
                bool(scheduler.num_lookahead_steps) and scheduler.speculation is not None,
                "steps with drafts are not scheduled ahead; leave speculative_config out",
            ),
            "late_requests": (plain, for_priority),
            "ageing_seconds": (plain, for_priority),
            "governor_ttft_ms": (ungoverned, for_governor),
            "governor_tpot_ms": (ungoverned, for_governor),
            "preemption_mode": (
                scheduler.preemption_mode == "swap" and not swaps,
                "there is nowhere to swap to, and all is recomputed; raise swap_space_bytes",
            ),
            "swap_directory": (not swaps and not (offloads and self.cache.prefix_offload), "nothing is swapped"),
            "prefix_offload": (not offloads, "it needs enable_prefix_caching, and swap space"),
        }
        return [f"{name} has no effect: {why}" for name, (is_idle, why) in idle.items() if is_idle and name in given]

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from ``{"max_num_seqs": 64, ...}``; an unknown name is refused together with the nearest known one.

        Amounts may be texts (``"4GB"``, ``"32k"``). Names that only vLLM has are translated, or refused with what to
        use (:mod:`chairlift.vllm_names`).
        """
        parts: dict[str, dict[str, Any]] = {"model": {}, "cache": {}, "scheduler": {}}
        owners = {flag.name: flag.part for flag in flat_fields()}
        for name, value in translate(settings).items():
            if name not in owners:
                near = difflib.get_close_matches(str(name), list(owners), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(owners)}"
                raise ConfigError(f"unknown setting {name!r}; {hint}")
            read = reader_of(name) if isinstance(value, str) else None
            parts[owners[name]][name] = value if read is None else read(value)
        return cls(
            model=ModelConfig(**parts["model"]),
            cache=CacheConfig(**parts["cache"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
        )

    def to_flat(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as keywords of plain data for :meth:`from_flat`."""
        given = {flag.name: (getattr(getattr(self, flag.part), flag.name), flag.default) for flag in flat_fields()}
        settings = {name: value for name, (value, default) in given.items() if value != default}
        return {name: str(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What ``chairlift serve`` needs to know besides the engine. Raises ConfigError when a value is out of range."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs an API key, or insecure."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients ask for; the first is the one that answers carry. None: the model's own."""
    api_key: tuple[str, ...] = ()
    """Key that clients must send as a bearer token; may be repeated. Others can see the command line: prefer a file."""
    api_key_file: str | None = None
    """File with one API key per line."""
    insecure: bool = False
    """Listen beyond loopback without an API key."""
    allowed_host: tuple[str, ...] = ()
    """Host name that clients may use in the Host header, besides the loopback names and this machine's."""
    chat_template: str | None = None
    """File with a chat template, instead of the model's own."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls. auto: the one that its chat template prints. none: requests with tools are
    refused."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning. auto: as its chat template does. none: reasoning is part of the answer."""
    max_num_queued_reqs: int | None = None
    """Most requests that wait; more are answered 429. None: 4 x max_num_seqs, at least 64."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that wait. None: 32 x max_num_batched_tokens."""
    queue_timeout: float | None = None
    """Seconds a request may wait for its first step, unless it says queue_timeout itself. None: as long as it takes."""
    request_timeout: float = 600.0
    """Seconds a request may take in all."""
    stall_timeout: float = 60.0
    """Seconds a reader may leave its answer unread before it is cut off."""
    shutdown_timeout: float = 30.0
    """Seconds that running answers get to finish when the server is told to stop."""
    health_timeout: float = 30.0
    """Seconds without a step, while there is work, after which the engine counts as stuck."""
    restart: bool = True
    """Start the engine again when it dies; without, the server exits."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Longest request body."""
    max_connections: int = 2048
    """Most connections at a time."""
    max_stored_responses: int = 1024
    """Most responses that are kept in memory for clients that send store: true to /v1/responses; 0 keeps none."""
    max_stored_response_bytes: int = 64 * 1024 * 1024
    """Most bytes of them, conversations included."""
    metrics_prefix: str = "chairlift"
    """Beginning of the metrics' names: chairlift, or vllm for dashboards made for it."""
    log_format: str = "text"
    """text or json (one object per line)."""
    log_requests: bool = False
    """Log each request's id, sizes and times. Prompts are never logged."""
    status_interval: float = 10.0
    """Seconds between status lines while there is traffic; 0 is none."""
    otlp_traces_endpoint: str | None = None
    """Send OpenTelemetry traces to this URL (OTLP over HTTP), as http://127.0.0.1:4318/v1/traces; never a text."""
    batch_dir: str | None = None
    """Directory in which files and batches are kept; without, /v1/files and /v1/batches are off. It holds prompts."""
    batch_max_in_flight: int | None = None
    """Most requests of batches in the engine at a time. None: half of max_num_seqs."""
    max_batch_file_bytes: int = 200 * 1024 * 1024
    """Longest file that may be uploaded for a batch."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose pages may ask this server from a browser, as https://app.example.org; may be repeated. *: any."""

    def __post_init__(self) -> None:
        _check(self)
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", origin):
                raise ConfigError(
                    "cors_origin must be scheme, host and port as browsers send them, such as https://app.example.org"
                    f" or http://localhost:3000, in lower case and without a path, or *; got {origin!r}"
                )
        for model_name in self.served_model_name:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}", model_name):
                raise ConfigError(f"served_model_name must be of letters, digits and ._/:-, got {model_name!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same positions."""

    num_blocks: int
    """Blocks in the group's pool, the null block included."""
    window: int | None = None
    """None keeps every position (``full``); W keeps the last W (``window(W)``)."""
    num_host_blocks: int = 0
    """Blocks in host memory that can hold the KV of preempted requests."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One setting, as the command line needs to know it."""

    name: str
    part: str
    """``model``, ``cache``, ``scheduler`` or ``server``."""
    kind: type
    """bool, int, float, str or list; a setting that may be None has the type it has otherwise."""
    default: Any
    help: str
    choices: tuple[str, ...] | None


@functools.cache
def flat_fields() -> tuple[Flag, ...]:
    """Every setting of the engine with type, default and help, in the order in which it is declared."""
    parts: dict[str, type[Any]] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
    return tuple(flag for part, owner in parts.items() for flag in _fields_of(part, owner))


@functools.cache
def server_fields() -> tuple[Flag, ...]:
    """The same for the settings of the server."""
    return tuple(_fields_of("server", ServerConfig))


def _fields_of(part: str, owner: type[Any]) -> list[Flag]:
    hints, docs = get_type_hints(owner), _field_docs(owner)
    flags = []
    for field in dataclasses.fields(owner):
        hint = hints[field.name]
        kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
        kind = list if get_origin(hint) is tuple else kinds[0]
        flags.append(Flag(field.name, part, kind, field.default, docs[field.name], _CHOICES.get(field.name)))
    return flags


def _field_docs(owner: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    docs: dict[str, str] = {}
    name = None
    for node in getattr(body, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(str(node.value.value).split())
            name = None
    return docs


def _check(settings: Any) -> None:
    """Raise ConfigError for a setting of the wrong type, out of its range or none of its choices."""
    for field in dataclasses.fields(settings):
        name, value = field.name, getattr(settings, field.name)
        if value is None and field.default is None:
            continue
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigError(f"{name} must be one of {', '.join(_CHOICES[name])}; got {value!r}")
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        if field.default == () and (isinstance(value, str) or not all(isinstance(x, str) and x for x in value)):
            raise ConfigError(f"{name} must be a list of names, got {value!r}")
        if name in _TEXTS:
            _check_text(name, value)
        if name in _RANGES:
            _check_range(name, value, "int" in field.type)


def _known_or_class(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known and not (isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value)):
        raise ConfigError(f"{name} must be {', '.join(known)} or module:Class; got {value!r}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be text, got {value!r}")
    if re.search("[\0\ud800-\udfff]", str(value)):  # open() would say so, but not of what
        raise ConfigError(f"{name} must be UTF-8 text without NUL, got {str(value)!a}; rename what it names")


def _check_range(name: str, value: Any, whole: bool) -> None:
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} must be a{' whole' if whole else ''} number from {low} to {high}, got {value!r}")


def _policy(scheduler: SchedulerConfig) -> None:
    name = scheduler.scheduling_policy
    _known_or_class("scheduling_policy", name, ("fcfs", "priority"))
    classes = parse_service_classes(scheduler.service_classes)
    weights = parse_tenant_weights(scheduler.tenant_weights)
    if name == "fcfs" and (scheduler.service_classes or weights):
        raise ConfigError("service_classes and tenant_weights need scheduling_policy 'priority'; 'fcfs' ignores them")
    rows, most = sum(each.min_seqs for each in classes.values()), scheduler.most_running
    if rows and rows >= most:
        raise ConfigError(
            f"service classes reserve {rows} rows, but of the {most} that max_num_seqs and max_num_batched_tokens"
            " allow, one must stay free for everybody; reserve less"
        )
    tokens = sum(each.min_step_tokens for each in classes.values())
    if tokens > scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"service classes reserve {tokens} tokens per step of max_num_batched_tokens"
            f" {scheduler.max_num_batched_tokens}; reserve less"
        )
