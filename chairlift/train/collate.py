"""Turns packs into inputs of models and kernels: one flat row, offsets of its sequences, and weights of its targets.

There is never an ``attention_mask``: an all-ones mask makes Hugging Face models treat the row as one sequence, without
a warning. They find the boundaries in ``position_ids``, which restart at 0. With a KV cache, their default, they
overlook the boundaries as well, so ``use_cache`` is always False.

NumPy only; :meth:`PackCollator.__call__` imports PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.train.layout import Layout, Pack

__all__ = [
    "ALL_KEYS",
    "FLASH_KEYS",
    "IGNORED",
    "TRAINER_KEYS",
    "PackCollator",
    "jax_inputs",
    "packed_seq_params",
    "trl_columns",
    "xformers_seqlens",
]

IGNORED = -100
"""Label of a token that is no target (the convention of PyTorch's cross-entropy)."""

TRAINER_KEYS = ("input_ids", "labels", "position_ids", "use_cache")
"""Keys that ``forward`` of a transformers model takes without handing them on to a kernel."""

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Transformers' names for FlashAttention's arguments. Without them every layer derives the boundaries again."""

ALL_KEYS = (
    *TRAINER_KEYS,
    "cu_seqlens",
    "max_seqlen",
    "segment_ids",
    "seq_idx",
    "loss_weight",
    "num_tokens",
    "step_weight",
    "step_sequences",
)
"""Keys that a collator makes by default. See :class:`PackCollator`."""

_SYNONYMS = {
    "seq_idx": "segment_ids",
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "max_length_q": "max_seqlen",
    "max_length_k": "max_seqlen",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PackCollator:
    """A pack, several packs or plain features -> one row of T tokens, ready for a model. A ``collate_fn`` for loaders.

    Of a list, everything is joined into the one row, a boundary between any two. Features are mappings with
    ``input_ids``, and optionally ``labels`` (aligned with them, :data:`IGNORED` for no target), ``loss_weight``, and
    TRL's ``seq_lengths`` where one feature holds several sequences.

    ========================== ================ ==================================================================
    input_ids, position_ids    int64 [1, T]     positions restart at 0 in every sequence
    labels                     int64 [1, T]     aligned with ``input_ids`` (the loss shifts them); :data:`IGNORED` for
                                                the first token of every sequence and where the weight is 0
    cu_seqlens, max_seqlen     int32 [N+1], int offsets of the sequences; tokens in the longest
    segment_ids, seq_idx       int32 [1, T]     0 in the first sequence, 1 in the second
    use_cache                  bool             False: with a cache, models of transformers overlook the boundaries
    loss_weight                float32 [1, T]   weight of each token as a target
    num_tokens                 int              tokens before the padding; 0 for a filler
    step_weight, _sequences    float, int       of :class:`~chairlift.train.layout.Pack`; 0 when they are not known
    ========================== ================ ==================================================================
    """

    pad_to: int = 1
    """T is filled up to a multiple of this, by a sequence of its own without targets."""
    pad_id: int = 0
    """Token id of the padding."""
    keys: Sequence[str] = ALL_KEYS
    """Keys to return. :data:`TRAINER_KEYS` alone for a model that takes no unknown names; add :data:`FLASH_KEYS`."""

    def __post_init__(self) -> None:
        unknown = set(self.keys) - {*ALL_KEYS, *_SYNONYMS}
        if unknown:
            raise ConfigError(f"unknown keys {sorted(unknown)}; a collator makes {[*ALL_KEYS, *FLASH_KEYS]}")
        if self.pad_to < 1:
            raise ConfigError(f"pad_to must be 1 (no padding) or more, got {self.pad_to}")

    def __call__(self, packs: Pack | Sequence[Pack | Mapping[str, Any]]) -> dict[str, Any]:
        """Collate to CPU tensors that own their memory. Raises ConfigError as :meth:`arrays` does."""
        import torch

        arrays = self.arrays(packs)
        made = {id(value): torch.from_numpy(value) for value in arrays.values() if isinstance(value, np.ndarray)}
        return {key: made.get(id(value), value) for key, value in arrays.items()}

    def arrays(self, packs: Pack | Sequence[Pack | Mapping[str, Any]]) -> dict[str, Any]:
        """Collate to NumPy arrays, without PyTorch.

        Raises ConfigError for nothing to collate, for features that do not fit together, and for packs that belong to
        different optimiser steps.
        """
        pack = _join([packs] if isinstance(packs, Pack) else packs)
        tokens, weights, lengths = pack.tokens.astype(np.int64), pack.weights.astype(np.float32), pack.lengths
        padding = -len(tokens) % self.pad_to
        if padding:
            tokens = np.concatenate([tokens, np.full(padding, self.pad_id, np.int64)])
            weights = np.concatenate([weights, np.zeros(padding, np.float32)])
            lengths = (*lengths, padding)
        layout = Layout.of(lengths)
        if len(tokens) != layout.num_tokens or len(weights) != layout.num_tokens:
            raise ConfigError(f"{len(tokens)} tokens, {len(weights)} weights, lengths of {layout.num_tokens} in all")
        cu_seqlens = np.array(layout.cu_seqlens, dtype=np.int32)
        weights[cu_seqlens[:-1]] = 0.0
        values = {
            "input_ids": tokens[None],
            "labels": np.where(weights != 0, tokens, IGNORED)[None],
            "position_ids": layout.positions[None],
            "use_cache": False,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": layout.max_seqlen,
            "segment_ids": layout.segment_ids[None],
            "loss_weight": weights[None],
            "num_tokens": 0 if pack.filler else layout.num_tokens - padding,
            "step_weight": pack.step_weight,
            "step_sequences": pack.step_sequences,
        }
        return {key: values[_SYNONYMS.get(key, key)] for key in self.keys}


def trl_columns(pack: Pack) -> dict[str, Any]:
    """A pack as a row for ``datasets``, with the columns of TRL's packing; :class:`PackCollator` reads it back.

    ``SFTTrainer`` takes no other kind: ``IterableDataset.from_generator(lambda: map(trl_columns, stream))``, with
    ``dataset_kwargs={"skip_prepare_dataset": True}`` and ``remove_unused_columns=False``.
    """
    weights = PackCollator(keys=("loss_weight",)).arrays(pack)["loss_weight"][0]
    return {
        "input_ids": pack.tokens.tolist(),
        "labels": np.where(weights != 0, pack.tokens, IGNORED).tolist(),
        "loss_weight": weights.tolist(),
        "seq_lengths": list(pack.lengths),
    }


def packed_seq_params(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Megatron-Core's ``PackedSeqParams``, for attention over [T, heads, dim]."""
    offsets, longest = batch["cu_seqlens"], batch["max_seqlen"]
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def xformers_seqlens(batch: Mapping[str, Any]) -> list[int]:
    """Lengths, for ``BlockDiagonalCausalMask.from_seqlens`` of xformers."""
    return [int(length) for length in np.diff(np.asarray(batch["cu_seqlens"]))]


def jax_inputs(batch: Mapping[str, Any]) -> dict[str, npt.NDArray[np.int32]]:
    """Tokens, positions and segment ids as JAX libraries name and count them: segments from 1, and 0 is padding."""
    segment_ids = np.asarray(batch["segment_ids"]) + 1
    segment_ids[..., batch["num_tokens"] :] = 0
    return {
        "inputs": np.asarray(batch["input_ids"], dtype=np.int32),
        "inputs_position": np.asarray(batch["position_ids"], dtype=np.int32),
        "inputs_segmentation": segment_ids.astype(np.int32),
    }


def _join(packs: Sequence[Pack | Mapping[str, Any]]) -> Pack:
    """Join several packs into one."""
    parts = [item if isinstance(item, Pack) else _from_feature(item, i) for i, item in enumerate(packs)]
    if not parts:
        raise ConfigError("nothing to collate; give a Pack, or a list of packs or of features")
    first = parts[0]
    if len(parts) == 1:
        return first
    steps = {part.step for part in parts}
    if len(steps) > 1:
        raise ConfigError(f"packs of optimiser steps {sorted(steps)} in one row; a row belongs to one step")
    return dataclasses.replace(
        first,
        tokens=np.concatenate([part.tokens for part in parts]),
        lengths=tuple(length for part in parts for length in part.lengths),
        ids=tuple(i for part in parts for i in part.ids),
        weights=np.concatenate([part.weights for part in parts]),
        meta=(),
        last_of_step=parts[-1].last_of_step,
        filler=all(part.filler for part in parts),
    )


def _from_feature(feature: Mapping[str, Any], index: int) -> Pack:
    """Make a pack from a feature of a Hugging Face loader, which holds one sequence or several."""
    if "input_ids" not in feature:
        raise ConfigError(f"feature {index} has {sorted(feature)}; it needs input_ids")
    tokens = np.asarray(feature["input_ids"], dtype=np.int32)
    weights = np.asarray(feature.get("loss_weight", np.ones(tokens.shape)), dtype=np.float32)
    labels = np.asarray(feature.get("labels", tokens))
    if tokens.ndim != 1 or not tokens.size or weights.shape != tokens.shape or labels.shape != tokens.shape:
        raise ConfigError(
            f"feature {index} has input_ids {list(tokens.shape)}, labels {list(labels.shape)}, loss_weight "
            f"{list(weights.shape)}; each must be [L] with the same L, at least 1"
        )
    if ((labels != tokens) & (labels != IGNORED)).any():
        raise ConfigError(
            f"feature {index} has labels that differ from input_ids where they are not {IGNORED}; give them aligned "
            "with input_ids (the loss shifts them)"
        )
    lengths = tuple(int(length) for length in feature.get("seq_lengths", (tokens.size,)))
    return Pack(tokens, lengths, (index,) * len(lengths), np.where(labels == IGNORED, np.float32(0), weights))
