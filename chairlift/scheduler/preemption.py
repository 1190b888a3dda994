"""Which requests may be preempted, how, and how often that happens."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
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
        """Seconds to compute ``num_tokens`` lost positions of one request again."""
        ...

    def swap_seconds(self, num_blocks: Sequence[int]) -> float:
        """Seconds to copy ``num_blocks`` blocks, one number per cache group, to host memory and back."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionMode:
    """How running requests are preempted.

    ``recompute`` drops KV: only the end of it if running work needs a few blocks, else all of it. ``swap`` keeps KV in
    host memory as long as there is room. ``auto`` takes the cheaper of both. With ``none`` no request is preempted,
    so requests join only with blocks for the longest answer they may give (TGI's rule).
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
        """Whether to save the first ``num_tokens`` positions of a request in host memory instead of dropping them."""
        if self.name != "auto" or self.costs is None:
            return self.name == "swap"
        num_blocks = [len(table) for table in request.block_ids]
        return self.costs.swap_seconds(num_blocks) < self.costs.recompute_seconds(num_tokens)


def is_pinned(request: Request, max_preemptions: int) -> bool:
    """Whether a request was preempted so often that it never is again. It joins only with all blocks it may need."""
    return request.num_preemptions >= max_preemptions


def may_be_preempted(request: Request, max_preemptions: int, step: int) -> bool:
    """Whether a running request may be preempted in ``step``.

    It may not if it joined in this step, has no new token since its last preemption, is pinned, or is complete. A
    request that still waits for its lost blocks may lose more. Every request is admitted with blocks for all its known
    tokens, so a request that may not be preempted can always produce its next token, and the wait for it is bounded.
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
    """Running requests that may be preempted for blocks that ``needy`` needs. ``needy`` may be among them."""
    for request in running:
        if may_be_preempted(request, max_preemptions, step) and (request is needy or policy.yields(request, needy)):
            yield request


RECOMPUTE = PreemptionMode()


class PreemptionRate:
    """Numbers of finished and of preempted requests, and the preempted share over the last ``window`` seconds."""

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
