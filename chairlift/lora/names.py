"""Names of an adapter's tensors: which module of the base model a tensor belongs to, and what it is there."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["TensorName", "module_names", "parse_name"]

_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP and activation checkpointing add."""
_PREFIXES: Final = ("module.", "base_model.model.")
"""Prefixes that DistributedDataParallel and PEFT add."""
_KINDS: Final = (
    (r"(.+)\.lora_([AB])(?:\.[\w-]+)?\.weight", ("a", "b")),
    (r"(.+)\.lora_(B)(?:\.[\w-]+)?\.bias", ("", "added_bias")),
    (r"(.+)\.lora_embedding_([AB])(?:\.[\w-]+)?", ("embedding_a", "embedding_b")),
    (r"(.+)\.lora_magnitude_vector()(?:\.[\w-]+)?(?:\.weight)?", ("magnitude",)),
    (r"(.+)\.token_adapter\.trainable_tokens_delta()(?:\.[\w-]+)?", ("token_rows",)),
    (r"(.+)\.original_module()(?:\.[\w-]+)+", ("unused",)),
    (r"(.+)\.base_layer\.(?:weight|(bias))", ("base_weight", "bias")),
    (r"(.+?)(?:\.modules_to_save\.[\w-]+)?\.(?:weight|(bias))", ("weight", "bias")),
)
"""(regular expression of a whole name with two groups, kinds). The first group is the module. The kind is the first
one if the second group is empty or ``A``, otherwise the second one. ``[\\w-]+`` is the adapter's name, which PEFT
leaves out when it saves an adapter, and which training frameworks may keep."""


class TensorName(NamedTuple):
    """Meaning of a tensor's name."""

    module: str
    """Name of the module in the base model."""
    kind: str
    """``a``, ``b``: LoRA's matrices. ``added_bias``: bias of B. ``embedding_a``, ``embedding_b``: the matrices of an
    embedding. ``magnitude``: DoRA's vector. ``token_rows``: new rows of an embedding. ``weight``, ``bias``: values that
    replace those of the module. ``base_weight``: the base's own weight, saved with the adapter. ``unused``: the
    original of a replaced module. Empty: not known."""


def parse_name(name: str) -> TensorName:
    """Meaning of the tensor ``name`` of an adapter, also of a name with an adapter's name (``.default.``), with parts
    that wrappers of modules added (``module.``, ``_orig_mod.``), or without PEFT's prefix."""
    whole = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    while whole.startswith(_PREFIXES):
        for prefix in _PREFIXES:
            whole = whole.removeprefix(prefix)
    for pattern, kinds in _KINDS:
        found = re.fullmatch(pattern, whole)
        if found:
            second = bool(found[2]) and found[2] != "A"
            return TensorName(found[1], kinds[second] if second < len(kinds) else "")
    return TensorName(whole, "")


def module_names(name: str) -> tuple[str, ...]:
    """``name`` of a module, and the same without each prefix that older versions of transformers used."""
    return (name, name.replace(".block_sparse_moe.", ".mlp.")) if ".block_sparse_moe." in name else (name,)
