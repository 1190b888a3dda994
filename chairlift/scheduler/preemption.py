"""Who may be preempted, how, and how often it happens."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from chairlift.request import Request
from chairlift.scheduler.policy import Policy

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
    """Seconds, as measured."""

    def recompute_seconds(self, num_tokens: int) -> float:
        """To compute so many lost positions of one request again."""
        ...

    def swap_seconds(self, num_blocks: int) -> float:
        """To copy so many blocks of every cache group to host memory, and back."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionMode:
    """How running requests are preempted, as a value.

    ``recompute`` drops KV: the end of it only where that is enough (running work needs blocks), else all of it.
    ``swap`` keeps it in host memory as long as there is room. ``auto`` takes what costs less time. With ``none``
    nobody is preempted, and so requests join only with blocks for the longest answer they may give (TGI's rule).
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
        """Whether to keep the first ``num_tokens`` positions of a request in host memory rather than drop them."""
        if self.name != "auto" or self.costs is None:
            return self.name == "swap"
        num_blocks = max(map(len, request.block_ids), default=0)
        return self.costs.swap_seconds(num_blocks) < self.costs.recompute_seconds(num_tokens)


def is_pinned(request: Request, max_preemptions: int) -> bool:
    """A request preempted this often is never preempted again, and joins only with all blocks it may ever need."""
    return request.num_preemptions >= max_preemptions


def may_be_preempted(request: Request, max_preemptions: int, step: int) -> bool:
    """Whether somebody may take a running request's place in ``step``.

    Not if it joined in this very step, has not produced a token since it came back from a preemption, is pinned or
    already complete. One that has not come back yet, for want of blocks, may have to give up more. Every request is
    admitted with blocks for all its known tokens, so one that may not be preempted can always produce its next token,
    and the wait for it is bounded.
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
    """Running requests that may be preempted for blocks that ``needy``, itself among them, needs."""
    for request in running:
        if may_be_preempted(request, max_preemptions, step) and (request is needy or policy.yields(request, needy)):
            yield request


RECOMPUTE = PreemptionMode()


class PreemptionRate:
    """Requests that have finished, those of them that were preempted, and their share over a window in seconds."""

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
