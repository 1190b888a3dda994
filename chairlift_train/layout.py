"""Packs and the layout of their sequences: the data classes that all parts of the training half use.

Needs NumPy. PyTorch is imported only by methods that return tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "Pack"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Boundaries of N sequences in a flat batch of T tokens. There is no padding between the sequences."""

    cu_seqlens: tuple[int, ...]
    """[N + 1] ascending offsets. Sequence ``i`` is ``[cu_seqlens[i], cu_seqlens[i + 1])``; the first offset is 0 and
    the last is T."""

    def __post_init__(self) -> None:
        if not self.cu_seqlens or self.cu_seqlens[0] != 0:
            raise ConfigError(f"cu_seqlens must begin with 0, got {self.cu_seqlens[:4]}")
        if any(end <= start for start, end in itertools.pairwise(self.cu_seqlens)):
            raise ConfigError("cu_seqlens must rise from each entry to the next: a sequence has at least one token")

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Layout:
        """Layout of sequences with these lengths, one after another. Raises ConfigError for an empty sequence."""
        return cls((0, *itertools.accumulate(int(length) for length in lengths)))

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of each sequence in tokens, [N]."""
        return tuple(end - start for start, end in itertools.pairwise(self.cu_seqlens))

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence in tokens."""
        return max(self.lengths, default=0)

    @functools.cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """[T] position of each token in its sequence, from 0."""
        starts = np.asarray(self.cu_seqlens[:-1], dtype=np.int64)
        return np.arange(self.num_tokens, dtype=np.int64) - np.repeat(starts, self.lengths)

    @functools.cached_property
    def segment_ids(self) -> npt.NDArray[np.int32]:
        """[T] index of the sequence that each token belongs to, from 0 (``seq_idx`` of Mamba's kernels)."""
        return np.repeat(np.arange(self.num_sequences, dtype=np.int32), self.lengths)

    def unpack(self, tensor: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """Split a tensor [T, ...] into one view [L_i, ...] per sequence.

        A leading axis of size 1 (the batch axis of Hugging Face's models) is dropped. Raises ConfigError when axis
        ``dim`` does not have T entries.
        """
        import torch

        if tensor.ndim > 1 and tensor.shape[0] == 1 and tensor.shape[dim] != self.num_tokens:
            tensor = tensor[0]
        if tensor.shape[dim] != self.num_tokens:
            raise ConfigError(f"axis {dim} of {list(tensor.shape)} must have the layout's {self.num_tokens} tokens")
        return list(torch.split(tensor, list(self.lengths), dim))


@dataclasses.dataclass(frozen=True, slots=True)
class Pack:
    """A pack: one or more sequences that are computed in one forward pass."""

    tokens: npt.NDArray[np.int32]
    """[T] token ids: the sequences one after another."""
    lengths: tuple[int, ...]
    """[N] lengths of the sequences; their sum is T."""
    ids: tuple[int, ...]
    """[N] index of each sequence in its source. Pieces of a split sequence have the same index."""
    weights: npt.NDArray[np.float32]
    """[T] loss weight of each token as a *target*: 0 for prompts and for the first token of a sequence."""
    meta: tuple[Mapping[str, Any], ...] = ()
    """[N] name -> value of further fields that each sequence had in the source. Empty if no sequence has further
    fields."""
    step: int = 0
    """Number of the optimiser step that this pack belongs to, from 0."""
    last_of_step: bool = True
    """Whether this rank's optimiser step ends with this pack."""
    step_weight: float = 0.0
    """Sum of ``weights`` over all packs of the step on all ranks. The loss is divided by it for a mean over tokens."""
    step_sequences: int = 0
    """Number of sequences with a target in all packs of the step on all ranks. The loss is divided by it for a mean
    over sequences."""
    filler: bool = False
    """Whether this pack is a filler: a single token without a target, so that all ranks get the same number of
    packs."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def layout(self) -> Layout:
        """Layout of the sequences in the pack."""
        return Layout.of(self.lengths)
