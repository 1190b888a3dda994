"""A pack as the batch of another framework's training loop. NumPy; PyTorch is imported where tensors are made."""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift.errors import ConfigError
from chairlift.train.collate import PackCollator
from chairlift.train.layout import Layout, Pack

__all__ = ["megatron_batch"]


def megatron_batch(pack: Pack, *, context_parallel: int = 1, pad_id: int = 0) -> dict[str, Any]:
    """A pack as Megatron-LM's GPT models take it, for attention in the THD layout.

    ========================== =============== ================================================================
    tokens, position_ids       int64 [1, T]    positions restart at 0 in every sequence
    labels                     int64 [1, T]    **shifted**: the token that follows; 0 where there is none
    loss_mask                  float32 [1, T]  weight of the label in the same place
    packed_seq_params          dict            arguments of ``megatron.core.packed_seq_params.PackedSeqParams``
    ========================== =============== ================================================================

    With ``context_parallel`` ranks each sequence is filled up to a multiple of twice their number, as ring attention
    over both ends needs it: ``cu_seqlens_q`` has the sequences, ``cu_seqlens_q_padded`` their places in the row. The
    caller shards the row (``tex.thd_get_partitioned_indices`` of Transformer Engine). Divide the sum of
    ``loss_mask * losses`` by the pack's ``step_weight``, not by the row's own sum: rows differ.

    Raises ConfigError for ``context_parallel`` below 1.
    """
    import torch

    if context_parallel < 1:
        raise ConfigError(f"context_parallel must be at least 1 rank, got {context_parallel}")
    multiple = 2 * context_parallel if context_parallel > 1 else 1
    arrays = PackCollator(keys=("input_ids", "loss_weight")).arrays(pack)
    places = [-(-length // multiple) * multiple for length in pack.lengths]
    real, padded = Layout.of(pack.lengths), Layout.of(places)
    total = padded.num_tokens
    tokens, labels, mask = np.full(total, pad_id, np.int64), np.zeros(total, np.int64), np.zeros(total, np.float32)
    for length, start, place in zip(pack.lengths, real.cu_seqlens, padded.cu_seqlens, strict=False):
        ids, weights = (arrays[name][0][start : start + length] for name in ("input_ids", "loss_weight"))
        tokens[place : place + length] = ids
        labels[place : place + length - 1] = ids[1:]
        mask[place : place + length - 1] = weights[1:]
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
