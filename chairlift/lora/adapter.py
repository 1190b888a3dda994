"""An adapter in memory, as it was read: matrices and vectors by the layers of this package that they change."""

from __future__ import annotations

import dataclasses

from torch import Tensor

__all__ = ["Adapter", "EmbeddingChange", "LowRank", "Replaced"]


@dataclasses.dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank matrices that an adapter adds to one layer: ``x @ a.T @ b.T`` is added to the outputs from ``start``
    on."""

    start: int
    a: Tensor
    """Matrix A, float32 [r, in]."""
    b: Tensor
    """Matrix B, float32 [rows, r], already multiplied by the adapter's scale. Its rows have the order of the rows of
    this package's layer."""
    magnitude: Tensor | None = None
    """DoRA's magnitudes (Liu et al., 2024), float32 [rows]: each row of weight plus ``b @ a`` is scaled to this norm.
    None: rows are not scaled."""
    bias: Tensor | None = None
    """Bias of B, float32 [rows], already multiplied by the adapter's scale; None if there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replaced:
    """Rows of a layer that an adapter replaces, from ``start`` on."""

    start: int
    weight: Tensor | None = None
    """New rows of the weight, [rows, in] of any float dtype; None: the weight stays."""
    bias: Tensor | None = None
    """New values of the bias, float32 [rows]; None: the bias stays."""


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingChange:
    """Change of the token embedding [V, D]."""

    table: Tensor | None = None
    """New embeddings [V, D]; None: the model's own."""
    token_ids: Tensor | None = None
    """int64 [n]: tokens whose embeddings are :attr:`rows`; None if there are none."""
    rows: Tensor | None = None
    """New embeddings of :attr:`token_ids`, float32 [n, D]."""
    a: Tensor | None = None
    """Matrix A, float32 [V, r]: row i belongs to token i. None: no low-rank term."""
    b: Tensor | None = None
    """Matrix B, float32 [r, D], already multiplied by the adapter's scale. ``a[token] @ b`` is added."""

    @property
    def numbers(self) -> int:
        """Number of values in all matrices."""
        return sum(0 if each is None else each.numel() for each in (self.table, self.rows, self.a, self.b))


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, in memory."""

    layers: dict[str, list[LowRank]]
    """Layer name in this package -> the layer's low-rank parts, ordered by their first row. One expert of a stack has a
    name of its own; see :func:`~chairlift.lora.sites.member_of`."""
    digest: str
    """Digest of the settings and all data that were read. Adapters with equal digests compute the same bits."""
    rank: int
    """Largest rank of any low-rank part of the adapter."""
    replaced: dict[str, list[Replaced]] = dataclasses.field(default_factory=dict)
    """Layer name in this package -> rows that the adapter replaces."""
    embedding: EmbeddingChange | None = None
    """Change of the token embedding; None if there is none."""

    @property
    def names(self) -> list[str]:
        """Names of all layers that the adapter changes, except the token embedding."""
        return list(dict.fromkeys((*self.layers, *self.replaced)))

    @property
    def numbers(self) -> int:
        """Number of values in all matrices of the adapter."""
        low = sum(part.a.numel() + part.b.numel() for parts in self.layers.values() for part in parts)
        whole = sum(part.weight.numel() for each in self.replaced.values() for part in each if part.weight is not None)
        return low + whole + (0 if self.embedding is None else self.embedding.numbers)
