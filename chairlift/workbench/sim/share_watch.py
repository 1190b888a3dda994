"""Both bounds of the shared prompt budget, checked for every request of a simulated world.

Let A be the prompt tokens handed out since a request of p tokens could join, V the uncomputed work before it in policy
order, S the work with smaller sizes, later joins included, and f the fraction in policy order. Its prompt is computed
by ``A = (V + p) / f`` and by ``A = (p + S) / (1 - f)``, each plus one step. Positions advance when a step is scheduled,
so look-ahead adds nothing here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from chairlift.request import Request
from chairlift.scheduler.output import SchedulerOutput
from chairlift.scheduler.scheduler import Scheduler
from chairlift.workbench.sim.policy_watch import Violation

__all__ = ["ShareWatch"]


@dataclasses.dataclass(slots=True)
class _Prompt:
    """A request whose prompt is under way. Counts are tokens."""

    request: Request
    resumed_at_step: int
    order: tuple[float, ...]
    """Place in policy order: smaller gets tokens first."""
    size_order: tuple[float, ...]
    left: int
    """Not yet computed."""
    before: int
    """V + p."""
    smaller: int
    """p + S."""
    handed_out: int = 0
    """A."""


class ShareWatch:
    """Told of every step after it was scheduled. Raises Violation when a request waits longer than a bound allows.

    Requests that a bound says nothing about are left out, and their tokens count as work before everybody: those that
    gave way, that a block was refused to, that have a deadline, or that belong to a class with reserved step tokens.
    What a request with an adapter waits for is not known before it joins.

    Args:
        scheduler: The one that is watched; its policy is ``fcfs`` or ``priority``.
        fraction: f.
        most_tokens: Tokens of a step, at most.
        reserving: Classes of service with reserved step tokens.
    """

    def __init__(self, scheduler: Scheduler, fraction: float, most_tokens: int, reserving: Set[str]) -> None:
        self._scheduler = scheduler
        self._fraction = fraction
        self._slack = most_tokens + 2
        """One step; carried fractions of a token add less than one on each side."""
        self._reserving = reserving
        self._prompts: dict[str, _Prompt] = {}
        kv = scheduler.kv
        self._from_arrival = scheduler.policy.name == "fcfs" and kv.prefix_cache is None
        """Whether it is known before a request joins what it will have to compute, and when it may."""
        self._newest = 0
        self.num_checked = 0
        """Prompts that were computed within both bounds."""
        self.num_jumps = 0
        """Prompts that were computed before older work that precedes them in policy order."""

    def step(self, out: SchedulerOutput, refused: Set[str]) -> None:
        """Step ``out`` was scheduled; ``refused`` has requests that did not get a block in it."""
        self._queue()
        self._forget(out, refused)
        for row in out.joined:
            request = self._scheduler.running.get(row.request_id)
            if request is not None and request.admitted_at_step == out.step and row.request_id not in refused:
                self._join(request, len(row.token_ids) - row.num_computed_tokens)
        given = dict(zip(out.chunk_ids, (chunk.num_tokens for chunk in out.chunks), strict=True))
        total = sum(given.values())
        others = sum(count for name, count in given.items() if name not in self._prompts)
        done = []
        for name, prompt in self._prompts.items():
            prompt.before += others
            prompt.smaller += others
            self._check(prompt)
            prompt.handed_out += total
            prompt.left -= given.get(name, 0)
            if prompt.left <= 0:
                done.append(name)
        for name in done:
            ended = self._prompts.pop(name)
            self.num_checked += 1
            self.num_jumps += any(other.order < ended.order for other in self._prompts.values())

    def _queue(self) -> None:
        """Watch new requests that wait and could join: a row and blocks count as there until a step shows otherwise."""
        if self._from_arrival:
            for request in self._scheduler.requests.values():
                if request.sequence > self._newest:
                    self._newest = request.sequence
                    if request.source is None and not request.adapter_id:  # others wait for a prompt, or an adapter
                        self._begin(request, request.num_prompt_tokens)

    def _join(self, request: Request, size: int) -> None:
        known = self._prompts.get(request.request_id)
        if known is None:
            self._begin(request, size)
        else:
            known.resumed_at_step = request.resumed_at_step

    def _begin(self, request: Request, size: int) -> None:
        if request.service.has_deadline or request.service.service_class in self._reserving:
            return
        standing = (request.priority,) if self._scheduler.policy.name == "priority" else ()
        new = _Prompt(
            request,
            request.resumed_at_step,
            (*standing, request.sequence),
            (*standing, size, request.sequence),
            size,
            size,
            size,
        )
        for other in self._prompts.values():
            if other.order < new.order:
                new.before += other.left
            else:
                other.before += size
            if other.size_order < new.size_order:
                new.smaller += other.left
            else:
                other.smaller += size
        self._prompts[request.request_id] = new

    def _forget(self, out: SchedulerOutput, refused: Set[str]) -> None:
        """Leave out those that gave way, left, or could not join for want of a row or of blocks."""
        waiting = self._scheduler.waiting
        passed = any(request.times_passed for request in waiting)  # before one that did not fit nobody may join
        full = not self._scheduler.batch.open_rows  # even where tokens ran out before anybody asked for a row
        stuck = bool(refused) or passed or full or out.held_up_by not in ("", "tokens")
        joined = {row.request_id for row in out.joined}

        def is_out(name: str, prompt: _Prompt) -> bool:
            request = prompt.request
            if self._scheduler.requests.get(name) is not request or name in out.preempted or name in refused:
                return True
            if prompt.resumed_at_step < 0 and request.slot < 0:
                return stuck
            return request.slot < 0 or (name not in joined and request.resumed_at_step != prompt.resumed_at_step)

        for name in [name for name, prompt in self._prompts.items() if is_out(name, prompt)]:
            del self._prompts[name]

    def _check(self, prompt: _Prompt) -> None:
        """It was not computed when so much had been handed out."""
        f, name = self._fraction, prompt.request.request_id
        if prompt.handed_out > prompt.before / f + self._slack:
            raise Violation(
                f"{name} is not computed after {prompt.handed_out} tokens of prompts, with {prompt.before} of its own"
                f" and before it in policy order, of which a share of {f} is handed out first"
            )
        if f < 1.0 and prompt.handed_out > prompt.smaller / (1 - f) + self._slack:
            raise Violation(
                f"{name} is not computed after {prompt.handed_out} tokens of prompts, with {prompt.smaller} of its own"
                f" and of smaller ones, and a share of {1 - f} goes by size"
            )
