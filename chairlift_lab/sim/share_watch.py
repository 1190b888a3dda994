"""Checks that no prompt in a simulated world waits longer than the two bounds of the shared prompt budget allow.

The scheduler gives a fraction f of the prompt tokens of a step in policy order, and the rest to the smallest prompts.
For a prompt of p tokens, counted since the request could join:

- A is the number of prompt tokens that the scheduler has given to all requests.
- V is the number of tokens that were left to compute in prompts before this prompt in policy order.
- S is the number of tokens in smaller prompts, with prompts that joined later.

The prompt must be computed before A exceeds ``(V + p) / f``, and before A exceeds ``(p + S) / (1 - f)``, each plus the
tokens of one step. Steps that are scheduled ahead count when they are scheduled.

A step with decode rows has a second limit for the tokens of prompts that still read images, and it may be 0. For such a
prompt, the first bound counts only the tokens that this step gives to prompts that read images. They are given in
policy order, so the smallest prompt may get none of them: the second bound does not count this step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from chairlift.core.request import Request
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift_lab.sim.policy_watch import Violation

__all__ = ["ShareWatch"]


@dataclasses.dataclass(slots=True)
class _Prompt:
    """A request whose prompt is not yet computed. Counts are in tokens. A, V, S and p are those of the module text."""

    request: Request
    resumed_at_step: int
    order: tuple[float, ...]
    """Sort key in policy order. The smallest key gets tokens first."""
    size_order: tuple[float, ...]
    remaining: int
    """Prompt tokens that are not yet computed."""
    before: int
    """Number of tokens in this prompt and in all prompts before it in policy order (V + p of the module text)."""
    smaller: int
    """Number of tokens in this prompt and in all smaller prompts (S + p of the module text)."""
    handed_out: int = 0
    """Number of prompt tokens given to all requests since this request could join (A of the first bound)."""
    handed_out_by_size: int = 0
    """The same for the second bound."""


class ShareWatch:
    """Checks the waits after every scheduled step. Raises Violation when a request waits longer than a bound allows.

    Some requests have no bound: preempted requests, requests that were refused a block, requests with a deadline, and
    requests of a class with reserved step tokens. Their tokens count as work before all other requests. The size of a
    request with an adapter is unknown until the request joins.

    Args:
        scheduler: The scheduler to check. Its policy is ``fcfs`` or ``priority``.
        fraction: Fraction of the prompt tokens that is given in policy order (f).
        max_step_tokens: Maximum number of tokens of a step.
        reserving: Names of the service classes with reserved step tokens.
    """

    def __init__(self, scheduler: Scheduler, fraction: float, max_step_tokens: int, reserving: Set[str]) -> None:
        self._scheduler = scheduler
        self._fraction = fraction
        self._slack = max_step_tokens + 2
        """Tolerance of the bounds in tokens: one step, plus 2 because both parts of the prompt budget are rounded to
        whole tokens."""
        self._reserving = reserving
        self._prompts: dict[str, _Prompt] = {}
        kv = scheduler.kv
        self._from_arrival = scheduler.policy.name == "fcfs" and kv.prefix_cache is None
        """Whether requests are watched from their arrival. With a prefix cache they are watched only from the step in
        which they join, because the number of tokens to compute is unknown before."""
        self._newest = 0
        self.num_checked = 0
        """Number of prompts that were computed within both bounds."""
        self.num_jumps = 0
        """Number of prompts that were computed before another prompt that precedes them in policy order."""

    def step(self, out: SchedulerOutput, refused: Set[str]) -> None:
        """Count the tokens of a step that was just scheduled, and check that no prompt that is not yet computed has
        waited longer than the two bounds allow.

        ``refused`` has the ids of requests that did not get a block in this step.
        """
        self._queue()
        self._forget(out, refused)
        for row in out.joined:
            request = self._scheduler.running.get(row.request_id)
            if request is not None and request.admitted_at_step == out.step and row.request_id not in refused:
                self._join(request, len(row.token_ids) - row.num_computed_tokens)
        given = dict(zip(out.chunk_ids, (chunk.num_tokens for chunk in out.chunks), strict=True))
        total, limited, for_images = sum(given.values()), *self._images_in(out)
        others = sum(count for name, count in given.items() if name not in self._prompts)
        computed = []
        for name, prompt in self._prompts.items():
            prompt.before += others
            prompt.smaller += others
            self._check(prompt)
            is_limited = name in limited
            prompt.handed_out += for_images if is_limited else total
            prompt.handed_out_by_size += 0 if is_limited else total
            prompt.remaining -= given.get(name, 0)
            if prompt.remaining <= 0:
                computed.append(name)
        for name in computed:
            ended = self._prompts.pop(name)
            self.num_checked += 1
            self.num_jumps += any(other.order < ended.order for other in self._prompts.values())

    def _images_in(self, out: SchedulerOutput) -> tuple[Set[str], int]:
        """(ids of watched prompts whose tokens in this step had a second limit because they read images, number of
        tokens that the step gives to such prompts)."""
        if not out.num_decodes and not out.preempted:  # with a preemption, the decode row may have left the step
            return frozenset(), 0
        starts = dict(zip(out.chunk_ids, (chunk.start for chunk in out.chunks), strict=True))

        def reads(name: str) -> bool:
            request = self._scheduler.requests[name]
            start = starts.get(name, request.num_computed_tokens)
            return bool(request.images) and start < request.images[-1].end

        tokens = sum(chunk.num_tokens for name, chunk in zip(out.chunk_ids, out.chunks, strict=True) if reads(name))
        return {name for name in self._prompts if reads(name)}, tokens

    def _queue(self) -> None:
        """Start watching new requests that wait, as if a row and blocks were free. :meth:`_forget` stops watching a
        request that gets no row or block."""
        if self._from_arrival:
            for request in self._scheduler.requests.values():
                if request.sequence > self._newest:
                    self._newest = request.sequence
                    # A request with a source waits for another prompt, and a request with an adapter waits until the
                    # adapter is loaded.
                    if request.source is None and not request.adapter_id:
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
                new.before += other.remaining
            else:
                other.before += size
            if other.size_order < new.size_order:
                new.smaller += other.remaining
            else:
                other.smaller += size
        self._prompts[request.request_id] = new

    def _forget(self, out: SchedulerOutput, refused: Set[str]) -> None:
        """Stop watching requests that were preempted, that ended, or for which there was no row or no block."""
        waiting = self._scheduler.waiting
        passed = any(request.times_passed for request in waiting)  # a request did not fit
        full = not self._scheduler.batch.open_rows  # true even if the step ran out of tokens before it ran out of rows
        stuck = bool(refused) or passed or full or out.held_up_by not in ("", "tokens")
        joined = {row.request_id for row in out.joined}

        def is_out(name: str, prompt: _Prompt) -> bool:
            request = prompt.request
            if self._scheduler.requests.get(name) is not request or name in out.preempted or name in refused:
                return True
            if prompt.resumed_at_step < 0:  # it has not joined before this step
                return stuck if request.slot < 0 else name not in joined
            # A request that was preempted between two steps may have joined again. This counts as a new join, for the
            # tokens that are left.
            return request.slot < 0 or request.resumed_at_step != prompt.resumed_at_step

        for name in [name for name, prompt in self._prompts.items() if is_out(name, prompt)]:
            del self._prompts[name]

    def _check(self, prompt: _Prompt) -> None:
        """Raise Violation if the prompt is not computed although a bound has passed."""
        f = self._fraction
        name = prompt.request.request_id
        if prompt.handed_out > prompt.before / f + self._slack:
            raise Violation(
                f"{name} is not computed after {prompt.handed_out} tokens of prompts, although only {prompt.before}"
                f" tokens are its own or before it in policy order, which gets a fraction of {f}"
            )
        if f < 1.0 and prompt.handed_out_by_size > prompt.smaller / (1 - f) + self._slack:
            raise Violation(
                f"{name} is not computed after {prompt.handed_out_by_size} tokens of prompts, although only"
                f" {prompt.smaller} tokens are its own or of smaller prompts, which get a fraction of {1 - f}"
            )
