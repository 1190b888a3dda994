"""Facts about a loaded engine, as plain data for this process and others."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.service_class import ServiceClass

__all__ = ["EngineInfo", "PairTexts", "PoolingInfo", "check_update", "describe_impl"]

_IMPLS: Final = {
    "native": "native: Chairlift's own code for this family",
    "transformers": (
        "transformers: PyTorch runs the layers between our attention; expect about 2 times the time of native layers in"
        " float32, and 3 to 10 times in bfloat16"
    ),
}


def describe_impl(model_impl: str) -> str:
    """Origin of the layers' code and its cost, in words."""
    return _IMPLS[model_impl]


@dataclasses.dataclass(frozen=True, slots=True)
class PairTexts:
    """Fixed texts around a query and a document, for a decoder that answers whether they belong together."""

    before: str
    """Text before the pair; tokenized separately, as is ``behind``."""
    query: str
    """Text before the query; tokenized together with the query and the document."""
    document: str
    """Text before the document."""
    behind: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Facts about a model for embeddings, scores or classes."""

    task: str
    """``embed`` or ``classify``."""
    pooling_type: str
    """``LAST``, ``CLS`` or ``MEAN``."""
    normalize: bool
    """Whether embeddings have length 1."""
    width: int
    """Numbers in an embedding."""
    dimensions: tuple[int, ...] | None = None
    """Sizes that an embedding may be cut to. Empty: any up to ``width``. None: it cannot be cut."""
    labels: tuple[str, ...] = ()
    """Names of the classes; empty for embeddings."""
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    """Prompts to put before a text, by name."""
    default_prompt: str | None = None
    """Name of the prompt that is used when a request names none."""
    token_types: bool = False
    """Whether the second text of a pair has a token type of its own."""
    pair: PairTexts | None = None
    """Prompt for pairs where a decoder answers yes or no; the last class is yes."""

    @property
    def scores(self) -> bool:
        """Whether pairs of texts can be scored: by their embeddings, by a classifier with one class, or by yes and
        no."""
        return len(self.labels) <= 1 or self.pair is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about the engine. Made when the model is loaded, and again when its weights are replaced."""

    model: str
    """Model name as the caller gave it."""
    model_dir: str
    """Directory of its files; empty for a model without files."""
    vocab_size: int
    """Width of the logits: every token id is below it."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids in the model's configuration; the tokenizer may know more."""
    capacity_tokens: int
    """Most positions of one request that the KV cache can hold. Positions behind a sliding window take no space."""
    pool_tokens: int
    """Token positions that the whole KV cache holds; with several pools, those of the smallest."""
    block_size: int
    num_blocks: int
    """Blocks available to requests, over all cache groups."""
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    kernels: str
    """Implementation of the kernels: an instruction-set path of the native kernels, ``triton``, ``torch``, or
    ``hashlm``."""
    threads: int
    memory_plan: str
    """Size of the KV cache, in words."""
    held: bool
    """Whether answers are delivered only when their whole batch ends (``batching="static"``)."""
    deterministic: bool
    """Whether the bits of an answer are independent of the rest of the batch."""
    fingerprint: str
    """``fp_`` and ten hexadecimal digits of model, precision, kernels and version."""
    model_impl: str = "native"
    """Implementation of the layers: ``native`` or ``transformers``."""
    quantization: str | None = None
    """Formats of the quantised weights, such as ``int4+int8``; None where all weights have the model's dtype."""
    weight_bytes: int = 0
    """Bytes of all weights in memory."""
    kv_cache_dtype: str | None = None
    """Dtype of K and V, if it is not ``dtype``."""
    sampling_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Default sampling parameters of the model."""
    notes: tuple[str, ...] = ()
    """Notes on how the model is served here, one per line."""
    block_bytes: int = 0
    """Bytes of a block, K and V of all layers in its cache group (their mean, where groups differ); 0 if unknown."""
    graphs: str = ""
    """CUDA graphs of decode steps and their memory, in words; empty where there are none."""

    speculative_method: str | None = None
    """Method of the drafts for all requests, such as ngram; None without speculative decoding."""
    num_speculative_tokens: int = 0
    """Most drafts of a row in one step, where somebody does."""
    takes_predictions: bool = False
    """Whether a text that a request expects (``prediction``) is drafted."""
    takes_images: bool = False
    """Whether requests may have images."""
    pooling: PoolingInfo | None = None
    """None for a model that generates."""
    weights: str = ""
    """Directory of the newest weights, if they were replaced."""
    weight_version: int = 0

    def updated(self, weights: str, version: int) -> EngineInfo:
        """A copy for new weights, with a new fingerprint."""
        digest = hashlib.sha256(f"{self.fingerprint} {version} {weights}".encode()).hexdigest()
        return dataclasses.replace(self, weights=weights, weight_version=version, fingerprint=f"fp_{digest[:10]}")

    def too_much_reserved(self, classes: Mapping[str, ServiceClass] | None) -> str:
        """Reason why the cache cannot hold the blocks that the classes reserve; empty when it can."""
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
    """Raise ConfigError unless this version may follow ``newest`` and ``in_flight`` is a known mode."""
    if in_flight not in ("continue", "recompute"):
        raise ConfigError(f"in_flight must be 'continue' or 'recompute', got {in_flight!r}")
    if type(version) is not int or not newest <= version < 2**63:
        raise ConfigError(f"version must be an integer of at least {newest}, the weights' version now, got {version!r}")
