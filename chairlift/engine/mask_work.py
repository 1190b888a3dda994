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

from chairlift.grammar.compiler import Matcher
from chairlift.structured_outputs import CANNOT_BE_FOLLOWED

__all__ = ["Filling", "Mask", "MaskBudget", "MaskJob", "MaskPlace", "MaskWork", "fill", "masks_of"]

Mask = npt.NDArray[np.uint32]
_log = logging.getLogger(__name__)

_REQUEST_SECONDS: Final = 10.0
"""Maximum processor seconds for the masks of all answers of a request together."""
_NUM_FILLERS: Final = 2
"""Number of threads that fill the masks of a step. The second one goes on if a mask keeps the first one busy."""


@dataclasses.dataclass(slots=True, eq=False)
class MaskBudget:
    """Processor time that the masks of a request take, over all its answers."""

    tenant: str = ""
    seconds: float = 0.0
    """Processor seconds that all masks took so far."""
    price: float = 0.0
    """Expected processor seconds of the next mask: a moving mean."""

    def spend(self, seconds: float, num_masks: int) -> None:
        self.seconds += seconds
        self.price += (seconds / num_masks - self.price) / 2


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
        self._waiting: dict[str, deque[MaskJob]] = {}
        """Tenant -> jobs that were not begun, oldest first."""
        self._spent: dict[str, float] = {}
        """Tenant with such jobs -> wall seconds of its jobs, counted from the smallest value when it came."""
        self._lock = threading.Lock()

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
        tenant = job.place.budget.tenant
        with self._lock:
            if tenant not in self._waiting:
                self._waiting[tenant] = deque()
                self._spent[tenant] = min(self._spent.values(), default=0.0)
            self._waiting[tenant].append(job)
        self._submit("late-masks", 1, self._run_next)

    def take_done(self) -> list[MaskJob]:
        """Jobs that were completed since the last call, without dropped ones."""
        found: list[MaskJob] = []
        while self.done:
            found.append(self.done.popleft())
        return [job for job in found if not job.is_dropped]

    def shutdown(self) -> None:
        """Drop all jobs that were not begun, and end the threads."""
        with self._lock:
            self._waiting.clear()
            self._spent.clear()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._threads.clear()

    def _run_next(self) -> None:
        """Compute the oldest job of the tenant that has used the least time."""
        with self._lock:
            if not self._waiting:
                return
            tenant = min(self._waiting, key=lambda name: self._spent[name])
            job = self._waiting[tenant].popleft()
        begin = time.perf_counter()
        if not job.is_dropped:
            fill(job)
            self.done.append(job)
        with self._lock:
            if tenant in self._waiting:
                self._spent[tenant] += time.perf_counter() - begin
                if not self._waiting[tenant]:
                    del self._waiting[tenant], self._spent[tenant]

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


def fill(job: MaskJob) -> None:
    """Compute the masks of a job: one, and one more after each draft. The matcher then stands where it stood before."""
    matcher, budget, drafts = job.place.matcher, job.place.budget, job.place.drafts
    begin = time.thread_time()
    try:
        for index in range(len(drafts) + 1):
            mask = matcher.mask()
            job.masks.append(None if mask is None else mask.copy())
            if matcher.error or (index < len(drafts) and not matcher.consume(drafts[index])):
                break
        if not matcher.error:
            matcher.rewind(job.at)
    except Exception as error:
        _log.exception("the mask of an answer could not be computed")
        matcher.error = f"{CANNOT_BE_FOLLOWED}its mask could not be computed ({type(error).__name__})"
        job.masks.append(None)
    budget.spend(time.thread_time() - begin, len(job.masks) or 1)
    if not matcher.error and budget.seconds > _REQUEST_SECONDS:
        matcher.error = (
            f"{CANNOT_BE_FOLLOWED}the masks of all answers of the request took {budget.seconds:.3g} s of processor"
            f" time together, and {_REQUEST_SECONDS:g} s are allowed; make the grammar simpler, or ask for fewer"
            " answers or tokens"
        )
