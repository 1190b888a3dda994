"""What the executor must know of a request that ends after its prompt, and returns a vector instead of tokens."""

from __future__ import annotations

import dataclasses

__all__ = ["PooledRow"]


@dataclasses.dataclass(frozen=True, slots=True)
class PooledRow:
    """A text for an embedding, a score or classes. It takes the place of a
    :class:`~chairlift.base.sampling_row.SamplingRow`."""

    token_types: list[int] | None = None
    """Token type of each token; None: type 0 for all tokens."""
