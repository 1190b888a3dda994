"""Facts about a loaded engine, as plain data that other processes can also use."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Final

from chairlift.base.service_class import ServiceClass
from chairlift.errors import ConfigError

__all__ = ["EngineInfo", "PairTexts", "PoolingInfo", "check_update", "describe_impl"]

_IMPLS: Final = {
    "native": "native: Chairlift's own code for this family",
    "transformers": (
        "transformers: PyTorch runs the layers between our attention; expect about 2 times the time of native layers in"
        " float32, and 3 to 10 times in bfloat16"
    ),
}


def describe_impl(model_impl: str) -> str:
    """Sentence that says whose code runs the layers, and what it costs."""
    return _IMPLS[model_impl]


@dataclasses.dataclass(frozen=True, slots=True)
class PairTexts:
    """Texts that a reranker's prompt has around a query and a document. The reranker is a decoder that answers whether
    the document fits the query."""

    before: str
    """Text before the query and the document. It is tokenized separately, and so is ``behind``."""
    query: str
    """Text before the query. It is tokenized together with the query and the document."""
    document: str
    """Text between the query and the document."""
    behind: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Facts about a model for embeddings, scores or classes."""

    task: str
    """Task of the model: ``embed`` or ``classify``."""
    pooling_type: str
    """Hidden state that becomes the result: ``LAST`` (last token), ``CLS`` (first token) or ``MEAN``."""
    normalize: bool
    """Whether embeddings have length 1."""
    width: int
    """Number of values in an embedding."""
    dimensions: tuple[int, ...] | None = None
    """Sizes to which an embedding may be shortened. Empty: any size up to ``width``. None: it cannot be shortened."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of the output; empty for embeddings."""
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> prompt that is put before a text."""
    default_prompt: str | None = None
    """Name of the prompt that is used if a request names none."""
    token_types: bool = False
    """Whether the second text of a pair has a different token type."""
    pair: PairTexts | None = None
    """Fixed texts around a pair, if a decoder answers yes or no about it; the last class is yes. None for other
    models."""

    @property
    def scores(self) -> bool:
        """Whether the model can score pairs of texts: by embeddings, as a classifier with one class, or by answering
        yes or no."""
        return len(self.labels) <= 1 or self.pair is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about the engine. They are collected when the model is loaded, and again when its weights are replaced."""

    model: str
    """Name of the model as the caller gave it."""
    model_dir: str
    """Directory of the model's files; empty for a model without files."""
    vocab_size: int
    """Number of logits. Every token id is below this number."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids from the model's configuration. The tokenizer may have more."""
    shortest_prompt: int = 1
    """Minimum number of tokens of a prompt."""
    capacity_tokens: int = 0
    """Maximum number of positions of one request that the KV cache can hold. Positions that a sliding window has passed
    take no space. 0 until the engine knows it."""
    pool_tokens: int
    """Number of token positions that the whole KV cache holds. If there are several block pools, the number for the
    smallest pool."""
    block_size: int
    num_blocks: int
    """Number of blocks available to requests, summed over all cache groups."""
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    kernels: str
    """Implementation of the kernels: an instruction set of the native kernels, ``triton``, ``torch``, or ``hashlm``."""
    threads: int
    memory_plan: str
    """Text about the size of the KV cache."""
    held: bool
    """Whether outputs are delivered only when their whole batch ends (``batching="static"``)."""
    deterministic: bool
    """Whether an answer has the same bits whatever other requests are in the batch."""
    fingerprint: str = ""
    """``fp_`` and ten hexadecimal digits, made from model, precision, kernels and version."""
    model_impl: str = "native"
    """Implementation of the layers: ``native`` or ``transformers``."""
    quantization: str | None = None
    """Formats of the quantised weights, such as ``int4+int8``; None if all weights have the model's dtype."""
    approximations: tuple[str, ...] = ()
    """Roundings and approximations beyond arithmetic in ``dtype``, in words."""
    weight_bytes: int = 0
    """Bytes of all weights in memory."""
    kv_cache_dtype: str | None = None
    """Data type in which K and V are stored, if it differs from ``dtype``; otherwise None."""
    sampling_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name -> value of the model's default sampling parameters."""
    notes: tuple[str, ...] = ()
    """Notes on how the model is served here, one per line."""
    block_bytes: int = 0
    """Bytes of a block with K and V of all layers in its cache group (the mean, if groups differ); 0 if unknown."""
    records_graphs: bool = False
    """Whether steps can be recorded as CUDA graphs."""
    graphs: str = ""
    """Text about the CUDA graphs of decode steps and their memory; empty if there are none."""

    preset: str | None = None
    """Preset from which the settings of scheduling come; None without one."""
    speculative_method: str | None = None
    """Method that makes drafts for all requests, such as ngram; None without speculative decoding."""
    num_speculative_tokens: int = 0
    """Maximum number of drafts for a row in one step; 0 without speculative decoding."""
    takes_predictions: bool = False
    """Whether drafts are made from the text that a request expects as its answer (``prediction``)."""
    takes_images: bool = False
    """Whether requests may have images."""
    pooling: PoolingInfo | None = None
    """Facts about a model for embeddings, scores or classes; None for a model that generates text."""
    weights: str = ""
    """Directory of the newest weights; empty if the weights were never replaced."""
    weight_version: int = 0

    def updated(self, weights: str, version: int, approximations: tuple[str, ...]) -> EngineInfo:
        """A copy of these facts for the new weights, with their approximations and a new fingerprint."""
        named = "\0".join((self.fingerprint, str(version), weights, *approximations))
        return dataclasses.replace(
            self,
            weights=weights,
            weight_version=version,
            approximations=approximations,
            fingerprint=f"fp_{hashlib.sha256(named.encode()).hexdigest()[:10]}",
        )

    def too_much_reserved(self, classes: Mapping[str, ServiceClass] | None) -> str:
        """Error text if the KV cache has fewer blocks than the classes of service reserve; empty if it has enough."""
        reserved = {name: each.min_blocks for name, each in (classes or {}).items() if each.min_blocks}
        pool = self.pool_tokens // self.block_size
        if sum(reserved.values()) < pool:
            return ""
        listed = ", ".join(f"{name} {count:,}" for name, count in reserved.items())
        return (
            f"service classes reserve {sum(reserved.values()):,} KV blocks ({listed}), but there are {pool:,}; the"
            " reservations cannot all hold, and nothing is left for others: lower min_blocks, or raise"
            " kv_cache_memory_bytes"
        )


def check_update(version: int, newest: int, in_flight: str) -> None:
    """Raise ConfigError if ``version`` is lower than ``newest``, or if ``in_flight`` is not a known mode."""
    if in_flight not in ("continue", "recompute"):
        raise ConfigError(f"in_flight must be 'continue' or 'recompute', got {in_flight!r}")
    if type(version) is not int or not newest <= version < 2**63:
        raise ConfigError(f"version must be an integer of at least {newest}, the weights' version now, got {version!r}")
