"""Computes masks of allowed tokens on threads, so that a slow mask delays only its own answer.

The masks of a step are filled while the model computes the step. A mask that is not ready shortly after that is *late*:
its answer waits alone, and the mask is completed as a :class:`MaskJob`. Jobs of several tenants take turns.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED
from chairlift.engine.fair_queue import FairQueue
from chairlift.engine.mask_limits import MaskBudget
from chairlift.text.grammar.compiler import Matcher

__all__ = ["Filling", "Mask", "MaskJob", "MaskPlace", "MaskWork", "fill", "masks_of"]

Mask = npt.NDArray[np.uint32]
_log = logging.getLogger(__name__)

_NUM_FILLERS: Final = 2
"""Number of threads that fill the masks of a step. The second one goes on if a mask keeps the first one busy."""


class MaskPlace(Protocol):
    """Matcher of an answer at its newest token, for which a step needs a mask."""

    @property
    def first(self) -> int:
        """Sample position of the mask."""
        ...

    @property
    def drafts(self) -> tuple[int, ...]:
        """Drafts after the newest token. There is one more mask after each draft."""
        ...

    @property
    def row(self) -> Any:
        """The answer, for the caller."""
        ...

    @property
    def matcher(self) -> Matcher: ...

    @property
    def budget(self) -> MaskBudget: ...


@dataclasses.dataclass(slots=True, eq=False)
class MaskJob:
    """A mask that is made while its answer waits. No other code may use the matcher before the job is done."""

    place: MaskPlace
    at: int
    """Number of output tokens before the token that the mask is for."""
    masks: list[Mask | None] = dataclasses.field(default_factory=list)
    is_dropped: bool = False
    """Whether the answer has ended, so that the result is not needed."""


class Filling:
    """The masks of one step, while they are filled. The engine's thread makes the object and calls :meth:`result`."""

    def __init__(self, places: Sequence[MaskPlace], work: MaskWork) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs = [MaskJob(place, place.matcher.num_consumed) for place in places]
        self._unclaimed = deque(self._jobs)
        self._pending = set(self._jobs)

    def run(self) -> None:
        """Fill masks until none is left to begin. Several threads may call this."""
        filled: MaskJob | None = None
        while True:
            is_late = False
            with self._lock:  # once per mask, because each lock and each wake-up takes time from the step's thread
                if filled is not None:
                    is_late = filled not in self._pending
                    self._pending.discard(filled)
                    if not self._pending:
                        self._changed.notify_all()
                job = self._unclaimed.popleft() if self._unclaimed else None
            if is_late and filled is not None:
                self._work.done.append(filled)
            if job is None:
                return
            fill(job)
            filled = job

    def result(self, bound: float | None) -> tuple[dict[int, Mask], list[MaskJob]]:
        """Wait for the masks, at most ``bound`` seconds; None: wait for all. Returns (sample position -> mask, jobs
        that go on). Call it once."""
        half = None if bound is None else bound / 2
        self._wait(half)
        if self._pending and half is not None:
            self._work.help(self)
            self._wait(half)
        with self._changed:
            late = [job for job in self._jobs if job in self._pending]
            self._pending.clear()
            unbegun = list(self._unclaimed)
            self._unclaimed.clear()
        for job in unbegun:
            self._work.later(job)
        return masks_of([job for job in self._jobs if job not in late]), late

    def _wait(self, bound: float | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pending, bound)


class MaskWork:
    """Threads that compute masks. Only the engine's thread calls the methods. Threads begin with the first mask.

    With ``beside=False`` the masks of a step are computed in the caller's thread, and none is late.
    """

    def __init__(self, *, beside: bool = True) -> None:
        self.done: deque[MaskJob] = deque()
        """Jobs that are complete and were not taken yet."""
        self._beside = beside
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._late: FairQueue[MaskJob] = FairQueue()

    def begin(self, places: Sequence[MaskPlace]) -> Filling:
        """Start to fill the masks of a step."""
        filling = Filling(places, self)
        if not self._beside:
            filling.run()
        elif places:
            self._submit("masks", _NUM_FILLERS, filling.run)
        return filling

    def help(self, filling: Filling) -> None:
        """Let another thread fill the masks that were not begun."""
        self._submit("masks", _NUM_FILLERS, filling.run)

    def later(self, job: MaskJob) -> None:
        """Compute a mask when the jobs before it are done. Then the job is in :attr:`done`."""
        self._late.add(job.place.budget.tenant, job)
        self._submit("late-masks", 1, self._run_next)

    def take_done(self) -> list[MaskJob]:
        """Jobs that were completed since the last call, without dropped ones."""
        found: list[MaskJob] = []
        while self.done:
            found.append(self.done.popleft())
        return [job for job in found if not job.is_dropped]

    def shutdown(self) -> None:
        """Drop all jobs that were not begun, and end the threads."""
        self._late.clear()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._threads.clear()

    def _run_next(self) -> None:
        """Compute the oldest job of the tenant that has used the least time."""
        taken = self._late.take()
        if taken is None:
            return
        tenant, job = taken
        begin = time.perf_counter()
        if not job.is_dropped:
            fill(job)
            self.done.append(job)
        self._late.took(tenant, time.perf_counter() - begin)

    def _submit(self, name: str, count: int, work: Callable[[], None]) -> Future[None]:
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(count, f"grammar-{name}")
        return self._threads[name].submit(work)


def masks_of(jobs: Sequence[MaskJob]) -> dict[int, Mask]:
    """Sample position -> mask, for complete jobs. A position at which all tokens are allowed has no mask."""
    found: dict[int, Mask] = {}
    for job in jobs:
        for index, mask in enumerate(job.masks):
            if mask is not None:
                found[job.place.first + index] = mask
    return found


def fill(job: MaskJob, seconds: float | None = None) -> None:
    """Compute the masks of a job: one, and one more after each draft. The matcher then stands where it stood before.

    An answer whose request has reached a limit gets the limit's error. ``seconds``: time to charge; default: measure.
    """
    matcher = job.place.matcher
    budget = job.place.budget
    begin = time.thread_time()
    if not budget.error:
        try:
            _make_masks(job)
        except Exception as error:
            _log.exception("the mask of an answer could not be computed")
            matcher.error = f"{CANNOT_BE_FOLLOWED}its mask could not be computed ({type(error).__name__})"
        budget.spend(time.thread_time() - begin if seconds is None else seconds, len(job.masks))
    job.masks = job.masks or [None]
    matcher.error = matcher.error or budget.error


def _make_masks(job: MaskJob) -> None:
    matcher = job.place.matcher
    drafts = job.place.drafts
    for index in range(len(drafts) + 1):
        if job.is_dropped:
            return
        mask = matcher.mask()
        job.masks.append(None if mask is None else mask.copy())
        if matcher.error or (index < len(drafts) and not matcher.consume(drafts[index])):
            break
    if not matcher.error:
        matcher.rewind(job.at)
