"""The clients of a trace: when each request is sent, and how it is admitted."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.engine.input_processor import InputProcessor, PreparedRequest
from chairlift.errors import RequestError
from chairlift.replay.served import Collector, RequestTiming
from chairlift.replay.traced_request import TracedRequest, prompt_token_ids
from chairlift.sampling_params import SamplingParams

__all__ = ["Clients", "enter"]


class Clients:
    """Clients of a trace. A request is sent at its time, after the earlier turn of its session has ended, and within
    the limit of requests in flight."""

    def __init__(self, trace: Sequence[TracedRequest], begin: float, most: int | None) -> None:
        self._trace, self._begin = trace, begin
        self._places = None if most is None else deque([begin] * most)
        """For each user of a closed loop: since when it has no request in flight."""
        self._later: dict[str, deque[int]] = {}
        order = list(range(len(trace)))
        if any(request.session for request in trace):
            order.sort(key=lambda index: (trace[index].turn, index))
        first = []
        for index in order:
            turns = self._later.get(trace[index].session)
            if turns is not None:
                turns.append(index)
                continue
            first.append((begin + trace[index].arrival, index))
            if trace[index].session:
                self._later[trace[index].session] = deque()
        heapq.heapify(first)
        self._ready: list[tuple[float, int]] = first
        self._leaving: list[tuple[float, int]] = []

    @property
    def done(self) -> bool:
        """Whether all requests are sent that need no other one to end."""
        return not self._ready

    def next_event(self) -> float | None:
        """Time at which the next request is sent or leaves, if no other one ends before."""
        sent = self._ready[0][0] if self._ready and self._places is None else None
        if self._ready and self._places:
            sent = max(self._ready[0][0], self._places[0])
        return min(
            (when for when in (sent, *[each[0] for each in self._leaving[:1]]) if when is not None), default=None
        )

    def send(self, now: float) -> tuple[int, float] | None:
        """The next request to send at ``now``, and the time at which it became ready."""
        if not self._ready or self._ready[0][0] > now or (self._places is not None and not self._places):
            return None
        when, index = heapq.heappop(self._ready)
        if self._places is not None:
            when = max(when, self._places.popleft())
        patience = self._trace[index].cancel_ms
        if patience is not None:
            heapq.heappush(self._leaving, (when + patience / 1000, index))
        return index, when

    def leaving(self, now: float) -> list[int]:
        """Requests whose client leaves now, answered or not."""
        over = []
        while self._leaving and self._leaving[0][0] <= now:
            over.append(heapq.heappop(self._leaving)[1])
        return over

    def ended(self, index: int, now: float) -> None:
        """A request has ended: its user, and the next turn of its session, may continue."""
        if self._places is not None:
            self._places.append(now)
        turns = self._later.get(self._trace[index].session)
        if turns:
            later = turns.popleft()
            heapq.heappush(self._ready, (max(now, self._begin + self._trace[later].arrival), later))


def enter(
    add: Callable[[PreparedRequest], object],
    door: InputProcessor,
    request: TracedRequest,
    index: int,
    arrival: float,
    collector: Collector,
) -> bool:
    """Check a request that was sent at ``arrival`` and ``add`` it. Returns False when it is refused.

    Policies that ignore promises get none.
    """
    asked: dict[str, Any] = {}
    if door.limits.service_classes is not None:
        names = ("priority", "service_tier", "ttft_ms", "tpot_ms", "deadline_ms")
        asked = {name: getattr(request, name) or None for name in names}
    params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, seed=0, **asked)
    prompt = prompt_token_ids(request, index, door.limits.vocab_size)
    name, timing = str(index), RequestTiming(dataclasses.replace(request, arrival=arrival), index)
    if collector.watch is not None:
        collector.watch(timing)
    try:
        prepared = door.prepare(name, prompt, params, arrival, tenant=request.tenant)
        add(prepared)
    except RequestError as error:
        timing.error = str(error)
        collector.over(timing, arrival)
        return False
    service = prepared.service
    promised = {
        "ttft_ms": service.first_token_by - arrival,
        "tpot_ms": service.seconds_per_token,
        "deadline_ms": service.finish_by - arrival,
    }
    of_class: dict[str, Any] = {
        name: 1000 * seconds
        for name, seconds in promised.items()
        if seconds < math.inf and getattr(request, name) is None
    }
    timing.request = dataclasses.replace(timing.request, **of_class)
    collector.timings[name] = timing
    return True
