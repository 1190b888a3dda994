"""Decides which encoded rows of images are given up when the memory for rows is full and a tile must be encoded.

Giving up rows costs the time to encode them again, if they are needed again. Keeping them costs the time that requests
wait for room.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

__all__ = ["HeldRows", "rows_to_give_up"]


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRows:
    """The rows of one tile that requests use."""

    key: bytes
    size: int
    """Number of bytes."""
    seconds: float
    """Seconds that the encoder needs to compute the rows again."""
    may_go: bool
    """Whether the rows may be given up for the request that needs room."""
    is_needed: bool
    """Whether a request must still read the rows, unless its KV appears in another way. Rows whose KV exists are needed
    only if this KV is lost."""
    num_tokens: int | None = 0
    """Number of prompt tokens that must be computed until no request needs the rows; None if the requests that need
    them wait for other images."""


def rows_to_give_up(
    held: Iterable[HeldRows],
    lack: int,
    waited: float,
    num_requests: int,
    compute_seconds: Callable[[int], float],
) -> list[bytes]:
    """Keys of the tiles whose rows to give up now, so that ``lack`` more bytes are free. Empty: wait instead.

    Rows that no request needs go first: encoding them again costs nothing, unless KV is lost. Needed rows go if waiting
    costs at least as much as encoding them again. Waiting costs the seconds that the request has ``waited`` already,
    and those until other requests have computed their images. It delays only this request, because others compute
    meanwhile. Encoding again delays all ``num_requests`` unfinished requests with images, because the encoder and the
    steps take turns. So the decision to wait costs at most as much again as encoding (the rule of the ski rental), and
    no request waits for ever.

    ``compute_seconds`` predicts the seconds to compute a number of prompt tokens.
    """
    held = list(held)
    cheapest = sorted((each for each in held if each.may_go), key=lambda each: each.seconds / max(each.size, 1))
    chosen: list[HeldRows] = []
    for needed in (False, True):
        for rows in cheapest:
            if lack > sum(each.size for each in chosen) and rows.is_needed == needed:
                chosen.append(rows)
    if sum(each.size for each in chosen) < lack:
        return []
    cost = sum(each.seconds for each in chosen if each.is_needed)
    if any(each.is_needed for each in chosen):
        free = sum(each.size for each in chosen if not each.is_needed)
        wait = waited + _seconds_until_free(held, lack - free, compute_seconds)
        if wait < cost * num_requests:
            return []
    return [each.key for each in chosen]


def _seconds_until_free(held: Iterable[HeldRows], lack: int, compute_seconds: Callable[[int], float]) -> float:
    """Seconds until requests have computed images whose rows have ``lack`` bytes together; infinite if that never
    happens."""
    tokens = 0
    for rows in sorted((each for each in held if each.num_tokens), key=lambda each: each.num_tokens or 0):
        tokens = max(tokens, rows.num_tokens or 0)
        lack -= rows.size
        if lack <= 0:
            return compute_seconds(tokens)
    return math.inf
