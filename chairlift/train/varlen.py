"""Attention inside the sequences of a pack, in few large calls instead of one per sequence.

Sequences of similar length are gathered into a rectangle, attended in one call, and scattered back. The rectangle is
filled up on the right only, and causal attention never looks right, so no mask is needed and nothing leaks: what is
computed for the filling is thrown away.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chairlift.errors import ConfigError

__all__ = ["VarlenContext"]

_BUCKET = 16
"""Sequences whose lengths round up to the same multiple of this share a call."""


@dataclasses.dataclass(slots=True)
class VarlenContext:
    """A drop-in for :class:`~chairlift.models.context.PackedContext` that is fast for many short sequences.

    The same numbers up to rounding, differentiable, without sliding windows.
    """

    cu_seqlens: Sequence[int]
    """[N + 1] offsets of the sequences in the flat batch; the last is T."""
    _buckets: list[Tensor] = dataclasses.field(default_factory=list, init=False)
    """Per bucket, int64 [n, L]: the flat row at each place; places past the end of a sequence repeat its last row."""
    _restore: Tensor = dataclasses.field(init=False)
    """int64 [T]: for every flat row, its place in the buckets laid end to end."""

    def __post_init__(self) -> None:
        groups: dict[int, list[tuple[int, int]]] = {}
        for start, end in itertools.pairwise(self.cu_seqlens):
            if end > start:
                groups.setdefault(-(-(end - start) // _BUCKET), []).append((start, end))
        places = [0] * self.cu_seqlens[-1]
        offset = 0
        for spans in groups.values():
            width = max(end - start for start, end in spans)
            index = [[min(row, end - 1) for row in range(start, start + width)] for start, end in spans]
            for i, (start, end) in enumerate(spans):
                places[start:end] = range(offset + i * width, offset + i * width + end - start)
            offset += len(spans) * width
            self._buckets.append(torch.tensor(index))
        self._restore = torch.tensor(places)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """Attend inside each sequence: q [T, Hq, Dh], k and v [T, Hkv, Dh] -> [T, Hq, Dh], one dtype."""
        if window is not None:
            raise ConfigError(
                f"VarlenContext has no sliding window (layer {layer} asks for {window}); use PackedContext"
            )
        group = q.shape[1] // k.shape[1]
        outputs: list[Tensor] = []
        for index in self._buckets:
            shape = (*index.shape, -1, q.shape[2])
            flat = index.view(-1).to(q.device)
            queries, keys, values = (x.index_select(0, flat).view(shape).transpose(1, 2) for x in (q, k, v))
            if group > 1:
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
            outputs.append(out.transpose(1, 2).reshape(-1, q.shape[1], q.shape[2]))
        return torch.cat(outputs).index_select(0, self._restore.to(q.device))
