"""What a loaded engine is, in plain data: known to whoever talks to it, in this process or another."""

from __future__ import annotations

import dataclasses

__all__ = ["EngineInfo"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Made once, when the model is in memory."""

    model: str
    """As it was asked for."""
    model_dir: str
    """Where its files are; empty for a model without files."""
    vocab_size: int
    """Width of the logits: every token id is below it."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """What the model's configuration says; the tokenizer may know more."""
    capacity_tokens: int
    """Positions in the whole KV cache."""
    block_size: int
    num_blocks: int
    """Blocks that requests can have, over all cache groups."""
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    kernels: str
    """Who computes: an instruction-set path of the native kernels, ``torch``, or ``hashlm``."""
    threads: int
    memory_plan: str
    """The KV cache in words."""
    held: bool
    """Whether answers are delivered only when their whole batch ends (``batching="static"``)."""
    deterministic: bool
    """Whether an answer's bits are independent of the batch."""
    fingerprint: str
    """``fp_`` and ten hexadecimal digits of model, precision, kernels and version."""
