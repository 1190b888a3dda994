"""Converts a pack to a batch for the training loop of Megatron-LM. Needs NumPy and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift.errors import ConfigError
from chairlift_train.collate import PackCollator
from chairlift_train.layout import Layout, Pack

__all__ = ["megatron_batch"]


def megatron_batch(pack: Pack, *, context_parallel: int = 1, pad_id: int = 0) -> dict[str, Any]:
    """Convert a pack to the inputs of Megatron-LM's GPT models, for attention in the THD layout.

    ========================== =============== ================================================================
    tokens, position_ids       int64 [1, T]    positions restart at 0 in every sequence
    labels                     int64 [1, T]    **shifted**: the next token; 0 at the end of a sequence
    loss_mask                  float32 [1, T]  weight of the label at the same position
    packed_seq_params          dict            arguments of ``megatron.core.packed_seq_params.PackedSeqParams``
    ========================== =============== ================================================================

    With several ``context_parallel`` ranks, each sequence is padded to a multiple of twice their number, as Megatron's
    ring attention requires. ``cu_seqlens_q`` has the offsets without padding, and ``cu_seqlens_q_padded`` the offsets
    in the padded row. The caller divides the row among the ranks (``tex.thd_get_partitioned_indices`` of Transformer
    Engine). Divide the sum of ``loss_mask * losses`` by the pack's ``step_weight``, not by the sum of the row's own
    weights, because the sums of rows differ.

    Raises ConfigError for ``context_parallel`` below 1.
    """
    import torch

    if context_parallel < 1:
        raise ConfigError(f"context_parallel must be at least 1 rank, got {context_parallel}")
    multiple = 2 * context_parallel if context_parallel > 1 else 1
    arrays = PackCollator(keys=("input_ids", "loss_weight")).arrays(pack)
    padded_lengths = [-(-length // multiple) * multiple for length in pack.lengths]
    real = Layout.of(pack.lengths)
    padded = Layout.of(padded_lengths)
    total = padded.num_tokens
    tokens = np.full(total, pad_id, np.int64)
    labels = np.zeros(total, np.int64)
    mask = np.zeros(total, np.float32)
    for length, start, target_start in zip(pack.lengths, real.cu_seqlens, padded.cu_seqlens, strict=False):
        ids, weights = (arrays[name][0][start : start + length] for name in ("input_ids", "loss_weight"))
        tokens[target_start : target_start + length] = ids
        labels[target_start : target_start + length - 1] = ids[1:]
        mask[target_start : target_start + length - 1] = weights[1:]
    offsets, offsets_padded = (torch.tensor(each.cu_seqlens, dtype=torch.int32) for each in (real, padded))
    params: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    if multiple > 1:
        params |= {"cu_seqlens_q_padded": offsets_padded, "cu_seqlens_kv_padded": offsets_padded}
    params |= {"max_seqlen_q": padded.max_seqlen, "max_seqlen_kv": padded.max_seqlen}
    return {
        "tokens": torch.from_numpy(tokens)[None],
        "labels": torch.from_numpy(labels)[None],
        "loss_mask": torch.from_numpy(mask)[None],
        "position_ids": torch.from_numpy(padded.positions)[None],
        "packed_seq_params": params,
    }
