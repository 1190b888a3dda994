"""All settings of the engine, as frozen dataclasses with a docstring under each field. No two settings have the same
name.

Settings that vLLM also has use vLLM's names. Command-line flags and help texts are generated from this module.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import ipaddress
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final, get_args, get_origin, get_type_hints

from chairlift.base.draft_methods import DRAFT_METHODS
from chairlift.base.field_docs import field_docs
from chairlift.base.foreign_names import answer_to
from chairlift.base.plugin_names import PLUGIN_NAMES
from chairlift.base.plugins import is_plugin
from chairlift.base.presets import PRESETS, with_preset
from chairlift.base.quantities import reader_of
from chairlift.base.rerankers import RERANKERS
from chairlift.base.service_class import ServiceClass, parse_service_classes, parse_tenant_weights
from chairlift.base.vllm_names import translate, translate_speculative
from chairlift.errors import ConfigError
from chairlift.text.tool_calls.formats import NONE, REASONING_FORMATS, TOOL_FORMATS

__all__ = [
    "BUNDLED_MODEL",
    "CLOSED_BATCHING",
    "CPU_CACHE_SHARE",
    "ONE_STATE",
    "CacheConfig",
    "CacheGroup",
    "EngineConfig",
    "Flag",
    "LoRAConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "flat_fields",
    "known_values",
    "server_fields",
]

ONE_STATE: Final = 1 << 30
"""Value of ``state_span`` when one block of recurrent states covers a whole sequence, however long. The block never
becomes full."""
CPU_CACHE_SHARE: Final = 0.4
"""Default fraction of the machine's memory that the KV cache takes on a CPU."""
BUNDLED_MODEL = "bundled"
"""Name of the small model that comes with the package."""

CLOSED_BATCHING = tuple(PLUGIN_NAMES["batching"])
"""Values of ``batching`` with which requests join an empty batch only."""
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "runner": ("auto", "generate", "pooling"),
    "pooling_type": ("LAST", "CLS", "MEAN"),
    "reranker": tuple(RERANKERS),
    "kernels": ("auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon", "neon_i8mm", "torch", "triton"),
    "cuda_graphs": ("lazy", "start", "off"),
    "quantization": ("int8", "int4", "fp8", "stored", "none"),
    "generation_config": ("auto", "vllm"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "kv_cache_dtype": ("auto", "int8"),
    "kv_store_mode": ("rw", "ro"),
    "preset": tuple(PRESETS),
    "late_requests": ("downgrade", "drop"),
    "preemption_mode": ("auto", "recompute", "swap", "none"),
    "metrics_prefix": ("chairlift", "vllm"),
    "routing": ("rr", "p2c", "least", "prefix", "forecast"),
    "log_format": ("text", "json"),
    "training_in_flight": ("keep", "follow"),
}
_EXTENSIBLE = {
    "model_impl": (("auto", "native", "transformers"), "module:FAMILY"),
    "scheduling_policy": (("fcfs", "priority"), "module:Class"),
    "cache_eviction": (("auto", "asked", "lease", "lru", *PLUGIN_NAMES["cache_eviction"]), "module:Class"),
    "batching": (("continuous", *PLUGIN_NAMES["batching"]), "module:Class"),
    "prefill_mode": (("mixed", *PLUGIN_NAMES["prefill_mode"]), "module:Class"),
    "governor": (("off", "rules"), "module:Class"),
    "tool_call_parser": (("auto", *TOOL_FORMATS, NONE), "module:FORMAT"),
    "reasoning_parser": (("auto", *REASONING_FORMATS, NONE), "module:FORMAT"),
}
"""Setting -> (its values, form of further values). A value of this form names code outside the package."""
_RANGES: dict[str, tuple[float, float]] = {
    "threads": (1, 256),
    "tensor_parallel_size": (1, 64),
    "tensor_parallel_timeout": (0.1, 86_400),
    "max_model_len": (2, 2**24),
    "seed": (-(2**63), 2**63 - 1),
    "block_size": (1, 256),
    "kv_cache_memory_bytes": (1, 2**50),
    "gpu_memory_utilization": (0.01, 1),
    "num_kv_blocks": (2, 2**31),
    "state_snapshot_interval": (1, ONE_STATE - 1),
    "swap_space_bytes": (0, 2**50),
    "kv_store_bytes": (2**20, 2**60),
    "kv_store_write_rate": (2**10, 2**40),
    "image_memory_bytes": (1, 2**50),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**24),
    "ageing_seconds": (0.001, 10**6),
    "batch_wait_ms": (0, 3_600_000),
    "num_lookahead_steps": (0, 2),
    "max_loras": (1, 4096),
    "max_lora_rank": (1, 1024),
    "max_cpu_loras": (1, 65536),
    "admission_watermark": (0, 0.5),
    "usual_mask_ms": (0, 1000),
    "max_mask_seconds": (0.001, 10**6),
    "max_tenant_mask_share": (0.001, 256),
    "governor_ttft_ms": (0.001, 10**9),
    "governor_tpot_ms": (0.001, 10**9),
    "port": (0, 65535),
    "replicas": (1, 64),
    "min_replicas": (1, 64),
    "max_replicas": (1, 64),
    "autoscale_wait": (0.01, 3600),
    "autoscale_goodput": (0.01, 1),
    "autoscale_delay": (1, 10**6),
    "models_memory_bytes": (1, 2**50),
    "model_keep_alive": (0, 10**9),
    "max_num_loading_reqs": (0, 2**20),
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
    "max_batch_dir_bytes": (2**20, 2**50),
    "max_training_dir_bytes": (2**20, 2**50),
    "max_training_bytes_per_key": (2**20, 2**50),
    "max_training_adapters_per_key": (1, 64),
    "training_result_seconds": (60, 10**8),
    "training_memory_bytes": (2**20, 2**50),
    "training_pack_tokens": (16, 2**20),
    "training_gap_ms": (0.1, 10**6),
    "training_share": (0.01, 0.99),
    "max_stored_responses": (0, 2**20),
    "max_stored_response_bytes": (0, 2**40),
}
"""Setting -> (lowest, highest) allowed value, both inclusive."""
_TEXTS = {
    *("model", "mmproj", "revision", "tokenizer", "swap_directory", "kv_store"),
    *(
        "models",
        "host",
        "ray_address",
        "api_key_file",
        "chat_template",
        "otlp_traces_endpoint",
        "batch_dir",
        "training_dir",
        "lora_dir",
    ),
    *("allowed_local_media_path", "models"),
}
"""Settings that are free text. All other text settings have a fixed form, which is checked."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, and how it is run."""

    model: str = BUNDLED_MODEL
    """Directory with config.json and safetensors, a Hugging Face Hub id, or 'bundled' for the demo model in the
    package."""
    revision: str | None = None
    """Branch, tag or commit of a model from the Hub."""
    mmproj: str = "auto"
    """Image encoder: auto (that of the model's files; for a GGUF model a file beside it that is named mmproj and fits),
    none (texts only), or the path of a GGUF model's mmproj file."""
    tokenizer: str | None = None
    """Directory with tokenizer.json, if it differs from the model's directory."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: take and return token ids only."""
    plain_text_messages: bool = False
    """Encode text of chat messages, tools and template variables that spells a control token (<|im_end|>) as plain
    text, so that only the chat template writes control tokens. False: such text becomes the token."""
    dtype: str = "auto"
    """Data type of weights, activations and KV cache: auto (the model's own), float32, bfloat16 or float16. float32
    makes all arithmetic exact to float32, also that of a quantised checkpoint, unless quantization says otherwise."""
    quantization: str | None = None
    """Rounding of the weights at load. int8: 8 bits in groups of 32. int4: the layers' weights in 4 bits in groups of
    32; it costs quality, and a calibrated checkpoint is better. fp8: the layers' weights in 8 bits, on a GPU of compute
    capability 8.9 or higher. stored: a quantised checkpoint's integers stay integers; the native CPU kernels multiply
    them by activations of 8 bits, the Triton kernels do not round activations. none: everything in dtype, even if the
    checkpoint is quantised. None: none with dtype float32 on a CPU, otherwise stored where the kernels can."""
    device: str = "cpu"
    """cpu or cuda (cuda:0, ...)."""
    threads: int | None = None
    """CPU threads, of all processes of the model together. None: all processors that this process may use."""
    tensor_parallel_size: int = 1
    """Number of processes among which the CPU's native kernels divide a model, for machines with several sockets. Each
    has a part of every layer and of the KV cache. The tokens are those of one process, bit for bit
    (docs/capacity.md)."""
    tensor_parallel_timeout: float = 60.0
    """Seconds after which a process of a divided model counts as hanging: if it lets the others wait for so long within
    a step, or shows no sign of life for so long between steps. The engine then ends with an error."""
    model_impl: str = "auto"
    """Implementation of the layers: native (Chairlift's own), transformers (the class in transformers, run by PyTorch
    with Chairlift's attention, several times slower: docs/models.md), auto (native if there is one, otherwise
    transformers if the family was checked), or module:FAMILY, a family of your own (docs/adding-a-model.md)."""
    kernels: str = "auto"
    """Implementation of the kernels. auto: the best for this processor or GPU. A name forces one: triton needs a GPU,
    torch is the reference."""
    cuda_graphs: str = "lazy"
    """Steps recorded as CUDA graphs: lazy (when first needed), start (all at the start), or off (vLLM's
    enforce_eager)."""
    batch_invariant: bool = False
    """Answers have the same bits, whatever other requests are in the batch. On a GPU this costs speed; the native CPU
    kernels always compute so."""
    max_model_len: int | None = None
    """Maximum length of a sequence, prompt and answer together, in tokens. None: the model's own limit."""
    generation_config: str = "auto"
    """Defaults of sampling parameters, such as temperature. auto: those in the model's generation_config.json. vllm:
    none from that file."""
    logprobs_mode: str = "raw_logprobs"
    """Distribution of the log-probabilities of generated tokens. raw_logprobs: of the raw logits, before bias,
    penalties, temperature and masks. processed_logprobs: the one from which tokens are drawn; ids that cannot be drawn
    have -inf. It costs a second product with the output head for requests with logprobs."""
    runner: str = "auto"
    """Use of the model: auto (decided by its files), generate (texts) or pooling (embeddings, scores and classes)."""
    pooling_type: str | None = None
    """Hidden state that becomes the embedding: LAST (last token), CLS (first token) or MEAN. None: as the files of
    sentence-transformers say, otherwise LAST for decoders and CLS for encoders."""
    pooling_normalize: bool | None = None
    """Whether embeddings have length 1. None: as the model's files say, otherwise yes."""
    is_matryoshka: bool | None = None
    """Whether an embedding may be cut to its first dimensions. None: as config.json says, otherwise no."""
    reranker: str | None = None
    """Use a decoder that answers yes or no as a scorer of pairs (query, document): qwen3 for Qwen3-Reranker in its
    original form. None: as the model's files say."""
    reranker_instruction: str | None = None
    """Task that the prompt of a reranker states. None: passages that answer a web search, the default of its
    authors."""
    seed: int | None = None
    """Seed from which seeds are drawn for requests without one, in order of arrival. None: different seeds in each
    run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = 16
    """Tokens per block: a power of two from 1 to 256."""
    kv_cache_dtype: str = "auto"
    """Data type of K and V: auto (the model's dtype), or int8, which holds almost twice as many tokens as bfloat16
    (native CPU kernels, and Triton's)."""
    kv_cache_memory_bytes: int | None = None
    """Memory for the KV cache. None: 40 % of the memory that the machine and its control group allow; on a GPU, what
    weights and steps leave of gpu_memory_utilization."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory for weights, steps and KV cache together (GPU only)."""
    num_kv_blocks: int | None = None
    """Exact number of blocks per cache group, instead of a size in bytes."""
    enable_prefix_caching: bool = True
    """Reuse the KV of equal beginnings of prompts in several requests."""
    cache_eviction: str = "auto"
    """Rule that says which unused block of the prefix cache is evicted next: lru (the least recently used), asked (the
    same, but last the blocks for which clients ask, such as by cache_control), lease (as asked, and the conversations
    whose tools run have leases, too), tlru (first the ends of conversations that can be computed again within the
    target for the first token), or module:Class, a rule of your own. auto: lease if a class of service has a retention
    level, otherwise asked."""
    state_snapshot_interval: int | None = None
    """Number of tokens between two snapshots of a recurrent model's state that the prefix cache keeps: a multiple of
    block_size. None: chosen so that snapshots take no more memory than K and V (1,024 for models without K and V)."""
    prefix_offload: bool = False
    """Save evicted blocks of the prefix cache in the part of the swap space that preempted requests do not use."""
    kv_events_endpoint: str | None = None
    """ZeroMQ address on which routers learn which blocks the prefix cache holds, such as tcp://127.0.0.1:5557. Whoever
    can connect can read the tokens of all prompts. Needs chairlift[kv-events]. None: nothing is published."""
    swap_space_bytes: int | None = None
    """Host memory for the KV of preempted requests. None: a tenth of the KV cache; 0: no swap space."""
    swap_directory: str | None = None
    """Directory for a file that holds the swap space, instead of memory."""
    kv_store: str | None = None
    """Directory in which the KV of prompts and answers outlives the process, so that a conversation goes on after a
    restart or a crash without being computed again (docs/kv-store.md). None: KV ends with the process."""
    kv_store_bytes: int = 8 << 30
    """Most bytes that all files in kv_store take. The least recently used blocks are overwritten."""
    kv_store_mode: str = "rw"
    """rw: read and write kv_store. ro: only read it."""
    kv_store_write_rate: int = 64 << 20
    """Most bytes per second that are written to kv_store. Blocks that come faster wait, or are not stored."""
    image_memory_bytes: int = 1 << 30
    """Memory for encoded images. When it is full, images wait, or others are encoded again later, whichever costs less
    time."""


_SPECULATIVE_NUMBERS: Final[tuple[tuple[str, type, float, float], ...]] = (
    ("num_speculative_tokens", int, 1, 64),
    ("prompt_lookup_min", int, 1, 16),
    ("suffix_decoding_max_tree_depth", int, 2, 64),
    ("suffix_decoding_max_cached_requests", int, 0, 1_000_000),
    ("suffix_decoding_max_spec_factor", float, 0.1, 64.0),
    ("suffix_decoding_min_token_prob", float, 0.0, 1.0),
)
"""(key of ``speculative_config``, type, minimum, maximum)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding. Names are vLLM's."""

    method: str
    """Method that makes the drafts: ngram, suffix, draft_model, medusa or eagle3."""
    num_speculative_tokens: int = 8
    """Maximum number of drafts for one row in one step."""
    prompt_lookup_min: int = 3
    """Number of tokens that must match before the methods ngram and suffix make a draft."""
    suffix_decoding_max_tree_depth: int = 24
    """Method suffix: maximum number of last tokens that are compared."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Method suffix: maximum number of earlier answers that later requests use, at most 200,000 tokens in all. 0: a
    request uses only its own tokens."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Method suffix: maximum number of drafts per matching token."""
    suffix_decoding_min_token_prob: float = 0.1
    """Method suffix: minimum probability of a draft, by the number of times that its tokens followed the match."""
    model: str = ""
    """Small model for method draft_model, heads for medusa, or layer for eagle3: a directory, or a name on the Hugging
    Face Hub. The bundled model comes with heads and a layer."""

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> SpeculativeConfig:
        """Parse a JSON object. Raises ConfigError with the name of a bad key."""
        settings = value
        if isinstance(value, str):
            try:
                settings = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"speculative_config is not JSON ({error}): {value!r:.200}") from None
        if not isinstance(settings, Mapping):
            raise ConfigError(f'speculative_config must be an object like {{"method": "ngram"}}, got {value!r:.200}')
        settings = translate_speculative(settings)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in settings if key not in known)
        if unknown:
            raise ConfigError(f"speculative_config has unknown keys {unknown}; known: {sorted(known)}")
        method = settings.get("method")
        model = settings.get("model", "")
        *first, last = "ngram", "suffix", *DRAFT_METHODS
        if not isinstance(method, str) or method not in (*first, last):
            raise ConfigError(f"speculative_config: method must be {', '.join(first)} or {last}, got {method!r:.80}")
        _check_draft_files(method, model)
        for key in settings:
            owners = ("suffix",) if key.startswith("suffix_") else ("ngram", "suffix") if "lookup" in key else (method,)
            if method not in owners:
                raise ConfigError(
                    f"speculative_config: {key} is for method {' and '.join(owners)}, not {method}; leave it out"
                )
        for name, kind, least, most in _SPECULATIVE_NUMBERS:
            number: Any = settings.get(name, most)
            fits = type(number) in ((int,) if kind is int else (int, float))
            if not fits or not least <= number <= most:
                what = "whole number" if kind is int else "number"
                raise ConfigError(
                    f"speculative_config: {name} must be a {what} from {least} to {most}, got {number!r:.80}"
                )
        return cls(**settings)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of scheduling: order of requests, and contents of steps."""

    preset: str | None = None
    """Settings that schedule like another system (docs/presets.md). Settings that are given win over those of the
    preset. Applied by EngineConfig.from_flat; here it is only a name. None: the defaults."""
    max_num_seqs: int = 256
    """Maximum number of requests in a step."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step. A lower budget keeps decoding smooth, a higher one speeds up prompts."""
    scheduling_policy: str = "fcfs"
    """Order of requests: fcfs (first come, first served), priority (reservations, deadlines, priorities, fairness
    between tenants), or module:Class, a custom policy."""
    service_classes: str = ""
    """JSON object: name of a class of service -> its guarantees, for the policy priority."""
    tenant_weights: str = ""
    """JSON object: tenant -> weight, for the policy priority. A tenant that is not named has weight 1."""
    ageing_seconds: float = 30.0
    """Seconds after which a waiting request gains one level of priority, if no similar request was admitted
    meanwhile."""
    late_requests: str = "downgrade"
    """Treatment of a request that can no longer meet its deadline: downgrade (it goes on without a deadline) or
    drop."""
    prefill_mode: str = "mixed"
    """Contents of a step: mixed (decodes, then prompts with the rest of the budget), prefill_first, decode_first,
    separate (only prompts or only decodes), auto (mixed, prefill_first or separate, by predicted step time), or
    module:Class, a custom mode."""
    preemption_mode: str = "auto"
    """How a running request is preempted: recompute, swap (its KV is saved in host memory), auto (the cheaper of both),
    or none (a request is admitted only if there is room for its longest possible answer)."""
    batching: str = "continuous"
    """continuous (a new batch in every step), or a baseline: static (requests of a batch end together), or dynamic
    (batches start as static ones do, and requests end one by one); or module:Class, a custom rule."""
    batch_wait_ms: float = 0.0
    """Milliseconds that a static or dynamic batch waits for more requests before it starts."""
    preferred_batch_sizes: str = ""
    """Sizes, like 4,8, at which a static or dynamic batch starts without waiting."""
    policy_share: float = 0.75
    """Fraction of a step's prompt tokens that is assigned in the policy's order, from 0.25 to 1. The rest goes to the
    smallest requests, so that short prompts do not wait for long ones."""
    num_lookahead_steps: int | None = None
    """Steps scheduled ahead of the newest known tokens: 0, 1 or 2. None: 1 with Triton's kernels on a GPU, otherwise
    0."""
    speculative_config: str = ""
    """JSON object that turns speculative decoding on, such as {"method": "ngram"}. ngram drafts the tokens that
    followed an earlier occurrence of the last few tokens; prompt_lookup_min (3) is the length of the match. suffix also
    looks into earlier answers. draft_model
    drafts with a small model that has the same tokenizer; medusa drafts with heads on the model's hidden state, and
    eagle3 with a layer on its hidden states. The key model names the small model, the heads or the layer.
    num_speculative_tokens (8) is the maximum number of drafts for a row. How many of them are checked depends on the
    cost of a step. Answers stay the same, bit for bit. Steps are then not scheduled ahead."""
    admission_watermark: float = 0.01
    """Fraction of the blocks that stays free when a request joins a running batch."""
    usual_mask_ms: float = 2.0
    """Milliseconds of processor time that a mask of a grammar may take on average. Only the time above it counts for
    the two limits below."""
    max_mask_seconds: float = 5.0
    """Maximum seconds above that for the masks of all answers of a request. Then the request ends with an error."""
    max_tenant_mask_share: float = 0.25
    """Maximum seconds above that for the masks of all requests of a tenant, as a fraction of the last minute. Then the
    request that took most ends with an error."""
    governor: str = "off"
    """Controller that changes max_num_seqs, max_num_batched_tokens and admission_watermark at run time, up to the
    values set here: off, rules, or module:Class, a custom governor."""
    governor_ttft_ms: float | None = None
    """Target of the governor for the time to the first token. None: no target."""
    governor_tpot_ms: float | None = None
    """Target of the governor for the time per output token. None: no target."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The preferred batch sizes in ascending order. Raises ConfigError."""
        sizes = self.preferred_batch_sizes
        parts = [part.strip() for part in sizes.split(",")] if isinstance(sizes, str) and sizes.strip() else []
        if (sizes and not parts) or not all(re.fullmatch("[1-9][0-9]{0,4}", part) for part in parts):
            raise ConfigError(f"preferred_batch_sizes must be whole numbers above 0, like 4,8; got {sizes!r}")
        return tuple(sorted({int(part) for part in parts}))

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Settings of speculative decoding; None if it is off. Raises ConfigError."""
        return SpeculativeConfig.parse(self.speculative_config) if self.speculative_config else None

    def takes_drafts(self, num_lookahead_steps: int) -> bool:
        """Whether steps can have drafts. They cannot if steps are scheduled ahead, because a step with drafts needs the
        tokens of the previous step.

        ``num_lookahead_steps`` is the executor's preference; above 0 the newest tokens stay on the executor's device.
        Raises ConfigError for a bad ``speculative_config``.
        """
        ahead = num_lookahead_steps or (self.speculation is None and self.num_lookahead_steps)
        return not ahead

    @property
    def max_running(self) -> int:
        """Maximum number of running requests. The token budget limits it, because each running request must be able to
        take one token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def open_policy_share(self) -> float:
        """``policy_share``, or 1 for static and dynamic batches, which are filled in the policy's order only."""
        return 1.0 if self.batching in CLOSED_BATCHING else self.policy_share

    @property
    def promises(self) -> dict[str, ServiceClass] | None:
        """Class of service -> its guarantees. None if the policy ignores classes."""
        return None if self.scheduling_policy == "fcfs" else parse_service_classes(self.service_classes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters. Names are vLLM's."""

    enable_lora: bool = False
    """Serve adapters (LoRA) in addition to the model."""
    max_loras: int = 8
    """Maximum number of different adapters in a step."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    max_cpu_loras: int | None = None
    """Maximum number of adapters in memory. An adapter that was removed from memory is read again when a request needs
    it. None: 4 x max_loras."""

    @property
    def num_cpu_loras(self) -> int:
        """Maximum number of adapters in memory."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def active(self) -> LoRAConfig | None:
        """These settings; None if no adapters are served."""
        return self if self.enable_lora else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings. Raises ConfigError when a value is out of range."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    lora: LoRAConfig = LoRAConfig()

    def __post_init__(self) -> None:
        model = self.model
        cache = self.cache
        scheduler = self.scheduler
        lora = self.lora
        if scheduler.governor == "shadow":
            raise ConfigError(
                "governor shadow was removed; write rules (its changes stay within the settings, and each is logged)"
                " or off. docs/governor.md has a command that simulates the rules"
            )
        for part in (model, cache, scheduler, lora):
            _check(part)
        if lora.num_cpu_loras < lora.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {lora.max_cpu_loras}, but a step may have max_loras = {lora.max_loras} adapters,"
                " which must be in memory; raise the one or lower the other"
            )
        if not isinstance(model.device, str) or not re.fullmatch("cpu|cuda(:(0|[1-9][0-9]{0,2}))?", model.device):
            raise ConfigError(f"device must be cpu, cuda or cuda:N, got {model.device!r}")
        if cache.kv_store is not None and (cache.prefix_offload or not cache.enable_prefix_caching):
            other = "without enable_prefix_caching" if not cache.prefix_offload else "together with prefix_offload"
            raise ConfigError(f"kv_store cannot be used {other}: it keeps the blocks of the prefix cache; choose one")
        if cache.block_size & (cache.block_size - 1):
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {cache.block_size!r}")
        _policy(scheduler)
        _check_retention(scheduler, cache)
        if scheduler.batch_sizes and scheduler.batching == "continuous":
            raise ConfigError("preferred_batch_sizes are for batching static or dynamic; continuous never waits")

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from ``{"max_num_seqs": 64, ...}``. An unknown name raises ConfigError with the most similar known
        name.

        The settings of a ``preset`` are added, except those that are given. Amounts may be texts (``"4GB"``,
        ``"32k"``). A name that only vLLM has is translated, or raises ConfigError with
        the setting to use (:mod:`chairlift.base.vllm_names`).
        """
        parts: dict[str, dict[str, Any]] = {"model": {}, "cache": {}, "scheduler": {}, "lora": {}}
        owners = {flag.name: flag.part for flag in flat_fields()}
        kinds = {flag.name: flag.kind for flag in flat_fields()}
        for name, value in with_preset(translate(settings)).items():
            if name not in owners:
                if (answer := answer_to(str(name), python=True)) is not None:
                    raise ConfigError(answer)
                near = difflib.get_close_matches(str(name), list(owners), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(owners)}"
                raise ConfigError(f"unknown setting {name!r}; {hint}")
            read = reader_of(name, kinds[name]) if isinstance(value, str) else None
            parts[owners[name]][name] = value if read is None else read(value)
        return cls(
            model=ModelConfig(**parts["model"]),
            cache=CacheConfig(**parts["cache"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
            lora=LoRAConfig(**parts["lora"]),
        )

    def to_flat(self) -> dict[str, Any]:
        """Settings that differ from their defaults, as plain keywords for :meth:`from_flat`. Settings of the preset are
        always included, because they may have been given their default values."""
        values = {flag.name: (getattr(getattr(self, flag.part), flag.name), flag.default) for flag in flat_fields()}
        preset = self.scheduler.preset
        kept = () if preset is None else PRESETS[preset].settings
        settings = {name: value for name, (value, default) in values.items() if value != default or name in kept}
        return {name: str(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of ``chairlift serve`` in addition to those of the engine. Raises ConfigError when a value is out of
    range."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs an API key, or insecure."""
    port: int = 8000
    """TCP port; 0 selects a free port."""
    replicas: int = 1
    """Number of engine processes that divide the requests. Each process holds the weights. On this machine they also
    divide the processors and, by default, the memory for KV. With ray_address they run in a Ray cluster."""
    min_replicas: int | None = None
    """Minimum number of replicas with autoscaling, and their number at the start unless replicas is larger. None:
    replicas."""
    max_replicas: int | None = None
    """Maximum number of replicas: turns autoscaling on. A replica is added when requests wait too long or miss their
    latency targets, and removed when the others are enough. On this machine each replica gets this part of the
    processors and of the memory for KV. None: the number of replicas is fixed."""
    autoscale_wait: float = 0.5
    """Forecast wait of a new request, in seconds, above which autoscaling adds a replica."""
    autoscale_goodput: float = 0.99
    """Fraction of the requests with latency targets that must meet them; below it, autoscaling adds a replica."""
    autoscale_delay: float = 60.0
    """Seconds for which the other replicas must have been enough before autoscaling removes one. At least twice the
    time that a replica needs to start is waited."""
    models: str | None = None
    """Directory of models, or a YAML or JSON file that names them: one server for all of them, each in an engine of its
    own, which is loaded when a request needs it. None: one model."""
    models_memory_bytes: int | None = None
    """Memory for weights, KV cache and process of all loaded models together. None: as much as the three largest models
    need, at most 80 % of the machine's memory."""
    model_keep_alive: float | None = None
    """Seconds without requests after which a model is unloaded. None: it is unloaded only when another model needs its
    memory."""
    max_num_loading_reqs: int = 256
    """Maximum number of requests that wait for models to be loaded; further requests get status 429."""
    routing: str = "forecast"
    """How a replica is chosen for a request: forecast (earliest first token), prefix (longest matching prefix in its
    cache), least (least work), p2c (better of two random replicas) or rr (in turn). With p2c and rr a request does not
    wait for a replica with room."""
    ray_address: str | None = None
    """Ray cluster whose machines run the replicas: local (a new one on this machine, which ends with the server), auto
    (the cluster that runs on this machine), or HOST:PORT of a cluster's head. Needs chairlift[ray]. None: processes on
    this machine, without Ray."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients; responses contain the first name. None: the model's own name."""
    api_key: tuple[str, ...] = ()
    """Key that clients must send as a bearer token; may be repeated. Other users of the machine can see the command
    line: prefer a file."""
    api_key_file: str | None = None
    """File with one API key per line."""
    insecure: bool = False
    """Allow an address that other machines can reach without an API key."""
    allowed_host: tuple[str, ...] = ()
    """Host name that clients may use in the Host header, besides the loopback names and the name of this machine."""
    trusted_proxy: tuple[str, ...] = ()
    """Address or network of a router, such as 10.0.0.0/8, whose headers x-gateway-inference-fairness-id and
    x-llm-d-inference-fairness-id name the tenant; may be repeated. None: these headers are ignored."""
    chat_template: str | None = None
    """File with a chat template, instead of the model's own."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls: a name in docs/tools.md, or module:FORMAT, a format of your own. auto: the
    format that its chat template prints. none: requests with tools are refused."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning: a name in docs/tools.md, or module:FORMAT, a format of your own. auto: the
    format that its chat template prints. none: reasoning stays in the answer."""
    lora_modules: tuple[str, ...] = ()
    """Adapter to serve from the start: name=path, name=Hub id, or {"name": ..., "path": ...}; may be repeated."""
    lora_dir: str | None = None
    """Directory from which the key named admin may load adapters while the server runs. None: no directory."""
    max_num_queued_reqs: int | None = None
    """Maximum number of waiting requests; further requests get status 429. None: 4 x max_num_seqs x replicas (or
    max_replicas), at least 64."""
    max_num_queued_tokens: int | None = None
    """Maximum number of prompt tokens of all waiting requests. None: 32 x max_num_batched_tokens x replicas (or
    max_replicas)."""
    queue_timeout: float | None = None
    """Seconds that a request may wait for its first step, unless it has a queue_timeout of its own. None: no limit."""
    request_timeout: float = 600.0
    """Seconds that a request may take in total."""
    stall_timeout: float = 60.0
    """Seconds after which a client that does not read its answer is disconnected."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests may still take after the server was told to stop."""
    health_timeout: float = 30.0
    """Seconds without a completed step, while there is work, after which the engine counts as stuck."""
    restart: bool = True
    """Start the engine again when its process dies. Otherwise the server exits."""
    max_body_bytes: int | None = None
    """Maximum length of a request body in bytes. None: 4 MiB, or 48 MiB if the model reads images."""
    max_connections: int = 2048
    """Maximum number of open connections."""
    max_stored_responses: int = 1024
    """Maximum number of stored responses of /v1/responses, except those with store: false; 0 stores none."""
    max_stored_response_bytes: int = 64 * 1024 * 1024
    """Maximum number of bytes of stored responses, conversations included."""
    metrics_prefix: str = "chairlift"
    """Prefix of the metrics' names: chairlift, or vllm for dashboards made for vLLM."""
    log_format: str = "text"
    """text or json (one object per line)."""
    log_requests: bool = False
    """Log each request's id, sizes and times. Prompts are never logged."""
    status_interval: float = 10.0
    """Seconds between two status lines while there is traffic; 0 turns them off."""
    otlp_traces_endpoint: str | None = None
    """URL for OpenTelemetry traces (OTLP over HTTP), such as http://127.0.0.1:4318/v1/traces. Traces contain no
    texts."""
    batch_dir: str | None = None
    """Directory for files and batches; it contains prompts. Without it /v1/files and /v1/batches are off."""
    batch_max_in_flight: int | None = None
    """Maximum number of batch requests in the engine at a time. None: half of max_num_seqs."""
    max_batch_file_bytes: int = 200 * 1024 * 1024
    """Maximum size of a file uploaded for a batch, in bytes."""
    max_batch_dir_bytes: int = 32 * 1024**3
    """Maximum size of all files and answers in batch_dir, in bytes. Uploads beyond it are refused, and batches pause
    until files are deleted."""
    enable_training: bool = False
    """Let clients fine-tune adapters of the model with the training API of the tinker client, under /api/v1. It needs
    training_dir."""
    training_dir: str | None = None
    """Directory for training runs and their checkpoints. It contains training data."""
    max_training_dir_bytes: int = 64 * 1024**3
    """Maximum size of everything in training_dir, in bytes: calls, results, checkpoints and saved states."""
    max_training_bytes_per_key: int = 2**50
    """Maximum size of the checkpoints of one API key, in bytes."""
    max_training_adapters_per_key: int = 16
    """Maximum number of adapters that one API key, or one session if there are no keys, may train at a time."""
    training_result_seconds: float = 86_400.0
    """Seconds for which the result of a training call is kept for its client. A result that was retrieved is dropped
    after 5 minutes."""
    training_memory_bytes: int = 4 * 1024**3
    """Memory for adapters in training, with gradients and the optimiser's state, in bytes. An adapter that does not fit
    is refused."""
    training_pack_tokens: int = 2048
    """Maximum number of tokens of all clients in one training pass."""
    training_gap_ms: float = 25.0
    """Milliseconds that training may add between two steps of the engine while it has requests. A single slice of work
    may take longer."""
    training_share: float = 0.5
    """Largest part of the time that training takes while the engine has requests."""
    training_in_flight: str = "keep"
    """What running samples of the kind inflight do when newer weights of their training run are published. keep: they
    end with the weights with which they began. follow: they go on with the newer ones."""
    allowed_media_domains: tuple[str, ...] = ()
    """Host from which the server may fetch images that requests name by an http or https address; may be repeated.
    Private network addresses of the host are refused. None: the server fetches nothing."""
    allowed_local_media_path: str | None = None
    """Directory whose image files requests may name by file: addresses: every client can read these files. None: no
    files."""
    cors_origin: tuple[str, ...] = ()
    """Origin of web pages that may call this server, such as https://app.example.org; may be repeated. *: all
    origins."""

    def __post_init__(self) -> None:
        _check(self)
        _check_needs(self)
        _check_replicas(self)
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", origin):
                raise ConfigError(
                    "cors_origin must be scheme, host and port as browsers send them, such as https://app.example.org"
                    f" or http://localhost:3000, in lower case and without a path, or *; got {origin!r}"
                )
        for network in self.trusted_proxy:
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError:
                raise ConfigError(
                    f"trusted_proxy must be addresses or networks such as 10.1.2.3 or 10.0.0.0/8, got {network!r:.100}"
                ) from None
        for host in self.allowed_media_domains:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}", host):
                raise ConfigError(
                    f"allowed_media_domains must be names of hosts such as images.example.org, got {host!r:.100}"
                )
        if self.allowed_local_media_path is not None and not os.path.isdir(self.allowed_local_media_path):
            raise ConfigError(
                f"allowed_local_media_path {self.allowed_local_media_path!r:.200} is no directory; name one"
            )
        for model_name in self.served_model_name:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}", model_name):
                raise ConfigError(f"served_model_name must be of letters, digits and ._/:-, got {model_name!r}")


_AUTOSCALING: Final = (("max_replicas",), ", which turns autoscaling on")
_BATCHES: Final = (("batch_dir",), ", without which there are no batches")
_TRAINING: Final = (("enable_training",), ", without which nobody trains")
_NEEDS: Final = {
    **dict.fromkeys(("models_memory_bytes", "model_keep_alive", "max_num_loading_reqs"), (("models",), "")),
    "routing": (("replicas", "max_replicas", "ray_address"), ": with one engine there is nothing to choose"),
    "min_replicas": (_AUTOSCALING[0], f"{_AUTOSCALING[1]}; or set replicas"),
    **dict.fromkeys(("autoscale_wait", "autoscale_goodput", "autoscale_delay"), _AUTOSCALING),
    **dict.fromkeys(("batch_max_in_flight", "max_batch_file_bytes", "max_batch_dir_bytes"), _BATCHES),
    "enable_training": (("training_dir",), ", in which training runs survive a restart"),
    **dict.fromkeys(("training_dir", "max_training_dir_bytes", "training_memory_bytes"), _TRAINING),
    **dict.fromkeys(("max_training_bytes_per_key", "max_training_adapters_per_key"), _TRAINING),
    "training_result_seconds": _TRAINING,
    **dict.fromkeys(("training_pack_tokens", "training_gap_ms", "training_share", "training_in_flight"), _TRAINING),
}
"""Setting of the server -> (settings of which it needs at least one, end of the message). Without them it would have no
effect."""


def _check_needs(config: ServerConfig) -> None:
    """Raise ConfigError for a setting that has no effect together with the others."""
    values = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
    given = {field.name: value for field, value in values if value != field.default}
    for name, (needed, why) in _NEEDS.items():
        if name in given and not given.keys() & set(needed):
            raise ConfigError(f"{name} {given[name]} needs {' or '.join(needed)}{why}")
    if given.get("max_stored_responses") == 0 and "max_stored_response_bytes" in given:
        raise ConfigError("max_stored_response_bytes has no effect with max_stored_responses 0; leave one of them out")


def _check_replicas(config: ServerConfig) -> None:
    """Raise ConfigError if the numbers of replicas contradict each other."""
    least = config.min_replicas
    most = config.max_replicas
    count = config.replicas
    if most is None:
        return
    if count > most:
        raise ConfigError(f"replicas {count} must not exceed max_replicas {most}")
    if least is not None and least > most:
        raise ConfigError(f"min_replicas {least} must not exceed max_replicas {most}")
    if least is not None and 1 < count < least:
        raise ConfigError(f"replicas {count}, the number at the start, must not be below min_replicas {least}")
    if not config.restart:
        raise ConfigError("autoscaling (max_replicas) starts replicas, and restart is off; leave one of the two out")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep KV, or recurrent states, of the same positions."""

    num_blocks: int
    """Number of blocks in the group's pool, including the null block."""
    window: int | None = None
    """None: the layers keep every position (``full``). W: the layers keep the last W positions (``window(W)``)."""
    num_host_blocks: int = 0
    """Number of blocks in host memory that can hold the KV of preempted requests."""
    state_span: int | None = None
    """Positions per block in a group of recurrent states: a multiple of the block size, or :data:`ONE_STATE`. Each
    block holds one state. None: the group holds K and V."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One setting, as a command-line flag."""

    name: str
    part: str
    """Group that the setting belongs to: ``model``, ``cache``, ``scheduler``, ``lora`` or ``server``."""
    kind: type
    """Type of the flag's value: bool, int, float, str or list. That a setting may also be None is not included."""
    default: Any
    help: str
    choices: tuple[str, ...] | None


@functools.cache
def flat_fields() -> tuple[Flag, ...]:
    """All settings of the engine with type, default and help, in the order of declaration."""
    parts: dict[str, type[Any]] = {
        **{"model": ModelConfig, "cache": CacheConfig},
        **{"scheduler": SchedulerConfig, "lora": LoRAConfig},
    }
    return tuple(flag for part, owner in parts.items() for flag in _fields_of(part, owner))


@functools.cache
def server_fields() -> tuple[Flag, ...]:
    """All settings of the server with type, default and help, in the order of declaration."""
    return tuple(_fields_of("server", ServerConfig))


def _fields_of(part: str, owner: type[Any]) -> list[Flag]:
    hints = get_type_hints(owner)
    docs = field_docs(owner)
    flags = []
    for field in dataclasses.fields(owner):
        hint = hints[field.name]
        kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
        kind = list if get_origin(hint) is tuple else kinds[0]
        flags.append(Flag(field.name, part, kind, field.default, docs[field.name], _CHOICES.get(field.name)))
    return flags


def _check(settings: Any) -> None:
    """Raise ConfigError for a setting of the wrong type, out of range, or not among its choices."""
    for field in dataclasses.fields(settings):
        name = field.name
        value = getattr(settings, field.name)
        if value is None and field.default is None:
            continue
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigError(f"{name} must be one of {', '.join(_CHOICES[name])}; got {value!r}")
        known, form = _EXTENSIBLE.get(name, ((), ""))
        if known and value not in known and not is_plugin(value):
            raise ConfigError(f"{name} must be {', '.join(known)} or {form}; got {value!r}")
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        if field.default == () and (isinstance(value, str) or not all(isinstance(x, str) and x for x in value)):
            raise ConfigError(f"{name} must be a list of names, got {value!r}")
        if name in _TEXTS:
            _check_text(name, value)
        if name in _RANGES:
            _check_range(name, value, "int" in field.type)


def _check_draft_files(method: str, model: Any) -> None:
    got = f"got method {method!r} and model {model!r:.200}"
    if method not in DRAFT_METHODS:
        if model != "":
            raise ConfigError(f"speculative_config: {method} takes no model; {got}")
        return
    _, what, is_bundled, is_own = DRAFT_METHODS[method]
    if is_own:
        if model != "":
            raise ConfigError(
                f"speculative_config: {method} reads the {what} in the served model's own files; leave model out; {got}"
            )
        return
    if not isinstance(model, str) or not (model or is_bundled):
        except_for = " (the bundled model comes with its own)" if is_bundled else ""
        raise ConfigError(
            f"speculative_config: {method} needs model, the directory or name of the {what}{except_for}; {got}"
        )


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be text, got {value!r}")
    if re.search("[\0\ud800-\udfff]", str(value)):  # open() would raise for it, without the name of the setting
        raise ConfigError(f"{name} must be UTF-8 text without NUL, got {str(value)!a}; rename what it names")


def known_values(name: str) -> tuple[str, ...]:
    """Values of a setting that have names. Some settings take others, too."""
    return _CHOICES.get(name) or _EXTENSIBLE.get(name, ((), ""))[0]


def _check_range(name: str, value: Any, whole: bool) -> None:
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} must be a{' whole' if whole else ''} number from {low} to {high}, got {value!r}")


def _check_retention(scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise ConfigError for a class with a retention level that the rule of eviction does not look at."""
    if scheduler.service_classes and cache.cache_eviction in ("lru", "asked", "tlru"):
        usual = parse_service_classes("")
        for name, each in parse_service_classes(scheduler.service_classes).items():
            if each.retention and (name not in usual or usual[name].retention != each.retention):
                raise ConfigError(
                    f"service class {name} has retention {each.retention}, but cache_eviction {cache.cache_eviction}"
                    " does not look at it; choose cache_eviction lease, or leave retention out"
                )


def _policy(scheduler: SchedulerConfig) -> None:
    name = scheduler.scheduling_policy
    classes = parse_service_classes(scheduler.service_classes)
    weights = parse_tenant_weights(scheduler.tenant_weights)
    if name == "fcfs" and (scheduler.service_classes or weights):
        raise ConfigError("service_classes and tenant_weights need scheduling_policy 'priority'; 'fcfs' ignores them")
    rows = sum(each.min_seqs for each in classes.values())
    max_running = scheduler.max_running
    if rows and rows >= max_running:
        raise ConfigError(
            f"service classes reserve {rows} rows, but of the {max_running} that max_num_seqs and"
            " max_num_batched_tokens allow, one must stay free for everybody; reserve less"
        )
    tokens = sum(each.min_step_tokens for each in classes.values())
    if tokens > scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"service classes reserve {tokens} tokens per step of max_num_batched_tokens"
            f" {scheduler.max_num_batched_tokens}; reserve less"
        )
