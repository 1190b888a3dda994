"""Converts packs to inputs of models and kernels: one flat row of tokens, offsets of its sequences, and loss weights.

The inputs never contain an ``attention_mask``, because an all-ones mask makes Hugging Face models treat the row as one
sequence, without a warning. These models find the boundaries of the sequences in ``position_ids``, which restart at 0.
``use_cache`` is always False, because with a KV cache (the default) they ignore the boundaries, too.

Needs NumPy. :meth:`PackCollator.__call__` imports PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift_train.layout import Layout, Pack

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
"""Label of a token that is not a target (the convention of PyTorch's cross-entropy)."""

TRAINER_KEYS = ("input_ids", "labels", "position_ids", "use_cache")
"""Arguments of ``forward`` that every transformers model accepts."""

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Names that transformers uses for FlashAttention's arguments. Without these arguments, every layer computes the
boundaries of the sequences again."""

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
"""Default keys of a collator's output. See :class:`PackCollator`."""

_SYNONYMS = {
    "seq_idx": "segment_ids",
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "max_length_q": "max_seqlen",
    "max_length_k": "max_seqlen",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PackCollator:
    """Collates a pack, or a list of packs and features, into one row of T tokens for a model.

    It can be used as the ``collate_fn`` of a data loader. The items of a list become consecutive sequences of one row.
    A feature is a mapping with ``input_ids``, and optionally ``labels`` (aligned with ``input_ids``; :data:`IGNORED`
    for tokens that are not targets), ``loss_weight``, and TRL's ``seq_lengths`` if the feature contains several
    sequences.

    ========================== ================ ==================================================================
    input_ids, position_ids    int64 [1, T]     positions restart at 0 in every sequence
    labels                     int64 [1, T]     aligned with ``input_ids`` (the loss shifts them); :data:`IGNORED` for
                                                the first token of every sequence and where the weight is 0
    cu_seqlens, max_seqlen     int32 [N+1], int offsets of the sequences; length of the longest sequence
    segment_ids, seq_idx       int32 [1, T]     index of the sequence of each token, from 0
    use_cache                  bool             False: with a cache, transformers' models ignore the boundaries
    loss_weight                float32 [1, T]   weight of each token as a target
    num_tokens                 int              number of tokens without padding; 0 for a filler
    step_weight, _sequences    float, int       as in :class:`~chairlift_train.layout.Pack`; 0 if unknown
    ========================== ================ ==================================================================
    """

    pad_to: int = 1
    """T is padded to a multiple of this number. The padding is a separate sequence without targets."""
    pad_id: int = 0
    """Token id of the padding."""
    keys: Sequence[str] = ALL_KEYS
    """Keys of the output. Use :data:`TRAINER_KEYS` for a model that rejects unknown arguments; :data:`FLASH_KEYS` can
    be added."""

    def __post_init__(self) -> None:
        unknown = set(self.keys) - {*ALL_KEYS, *_SYNONYMS}
        if unknown:
            raise ConfigError(f"unknown keys {sorted(unknown)}; known keys are {[*ALL_KEYS, *FLASH_KEYS]}")
        if self.pad_to < 1:
            raise ConfigError(f"pad_to must be 1 (no padding) or more, got {self.pad_to}")

    def __call__(self, packs: Pack | Sequence[Pack | Mapping[str, Any]]) -> dict[str, Any]:
        """Collate to CPU tensors that own their memory. Raises ConfigError for the same errors as :meth:`arrays`."""
        import torch

        arrays = self.arrays(packs)
        made = {id(value): torch.from_numpy(value) for value in arrays.values() if isinstance(value, np.ndarray)}
        return {key: made.get(id(value), value) for key, value in arrays.items()}

    def arrays(self, packs: Pack | Sequence[Pack | Mapping[str, Any]]) -> dict[str, Any]:
        """Collate to NumPy arrays, without PyTorch.

        Raises ConfigError for an empty list, for features with inconsistent fields, and for packs of different
        optimiser steps.
        """
        pack = _join([packs] if isinstance(packs, Pack) else packs)
        tokens = pack.tokens.astype(np.int64)
        weights = pack.weights.astype(np.float32)
        lengths = pack.lengths
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
    """A pack as a row of a ``datasets`` data set, with the columns of TRL's packing. :class:`PackCollator` accepts it.

    For ``SFTTrainer``, use ``IterableDataset.from_generator(lambda: map(trl_columns, stream))`` with
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
    """Fields of Megatron-Core's ``PackedSeqParams``, for attention over tensors [T, heads, dim]."""
    offsets = batch["cu_seqlens"]
    longest = batch["max_seqlen"]
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def xformers_seqlens(batch: Mapping[str, Any]) -> list[int]:
    """Lengths of the sequences, for ``BlockDiagonalCausalMask.from_seqlens`` of xformers."""
    return [int(length) for length in np.diff(np.asarray(batch["cu_seqlens"]))]


def jax_inputs(batch: Mapping[str, Any]) -> dict[str, npt.NDArray[np.int32]]:
    """Tokens, positions and segment ids under the names of JAX libraries. Segments count from 1; 0 is padding."""
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
    """Convert a feature of a Hugging Face loader, with one or several sequences, to a pack."""
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
