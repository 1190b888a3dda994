"""Rules that say which requests may be preempted and how, and a count of preempted requests."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from chairlift.core.request import Request
from chairlift.core.scheduler.policy import Policy

__all__ = [
    "RECOMPUTE",
    "PreemptionCosts",
    "PreemptionMode",
    "PreemptionRate",
    "candidates",
    "is_pinned",
    "may_be_preempted",
]


class PreemptionCosts(Protocol):
    """Measured costs of preemption, in seconds."""

    def recompute_seconds(self, num_tokens: int) -> float:
        """Seconds to compute ``num_tokens`` lost positions of one request again."""
        ...

    def swap_seconds(self, num_blocks: Sequence[int]) -> float:
        """Seconds to copy blocks to host memory and back. ``num_blocks`` has the number of blocks per cache group."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionMode:
    """How running requests are preempted.

    ``recompute`` drops KV: only the last blocks if a running request needs a few blocks, otherwise all of it. ``swap``
    saves KV in host memory while there is room. ``auto`` chooses the cheaper of both. With ``none`` no request is
    preempted, so a request joins only if there are blocks for its longest possible answer (TGI's rule).
    """

    name: str = "recompute"
    costs: PreemptionCosts | None = None

    @property
    def never(self) -> bool:
        return self.name == "none"

    @property
    def drops_tails(self) -> bool:
        return self.name in ("auto", "recompute")

    def saves(self, request: Request, num_tokens: int) -> bool:
        """Whether to save the KV of a request's first ``num_tokens`` positions in host memory. Otherwise it is
        dropped."""
        if self.name != "auto" or self.costs is None:
            return self.name == "swap"
        num_blocks = [len(table) for table in request.block_ids]
        return self.costs.swap_seconds(num_blocks) < self.costs.recompute_seconds(num_tokens)


def is_pinned(request: Request, max_preemptions: int) -> bool:
    """Whether a request was preempted so often that it may not be preempted again. It joins only with all blocks that
    it may need."""
    return request.num_preemptions >= max_preemptions


def may_be_preempted(request: Request, max_preemptions: int, step: int) -> bool:
    """Whether a running request may be preempted in ``step``.

    It may not be preempted if it joined in this step, has no new token since its last preemption, is pinned, or is
    complete. A request that has lost blocks, and still waits for new ones, may lose more blocks. Every request is
    admitted with blocks for all its known tokens. So a request that may not be preempted can always compute its next
    token, and others wait for it only for a limited time.
    """
    return (
        request.finish_reason is None
        and request.admitted_at_step < step
        and (
            request.short_of_blocks
            or (
                (not request.num_preemptions or len(request.token_ids) > request.progress_mark)
                and not is_pinned(request, max_preemptions)
            )
        )
    )


def candidates(
    running: Iterable[Request], needy: Request, policy: Policy, max_preemptions: int, step: int
) -> Iterable[Request]:
    """Running requests that may be preempted for blocks that ``needy`` needs. ``needy`` can be one of them."""
    for request in running:
        if may_be_preempted(request, max_preemptions, step) and (request is needy or policy.yields(request, needy)):
            yield request


RECOMPUTE = PreemptionMode()


class PreemptionRate:
    """Counts finished requests and preempted requests, and gives the fraction of preempted ones over the last
    ``window`` seconds."""

    def __init__(self, window: float = 60.0) -> None:
        self.window = window
        self.num_finished = 0
        self.num_preempted = 0
        self._recent: deque[tuple[float, bool]] = deque()
        self._recent_preempted = 0

    def finished(self, request: Request, now: float) -> None:
        preempted = request.num_preemptions > 0
        self.num_finished += 1
        self.num_preempted += preempted
        self._recent.append((now, preempted))
        self._recent_preempted += preempted
        self._forget(now)

    def recent(self, now: float) -> float:
        self._forget(now)
        return self._recent_preempted / len(self._recent) if self._recent else 0.0

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self.window:
            self._recent_preempted -= self._recent.popleft()[1]
