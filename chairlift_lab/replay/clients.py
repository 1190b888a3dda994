"""Simulates the clients of a trace: determines when each request is sent, and passes it to the engine."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.input_processor import InputProcessor, PreparedRequest
from chairlift.errors import RequestError
from chairlift_lab.replay.served import Collector, RequestTiming
from chairlift_lab.replay.traced_request import TracedRequest, prompt_token_ids

__all__ = ["Clients", "enter"]


class Clients:
    """Determines when the requests of a trace are sent and cancelled.

    A request is sent at its time, but not before the previous turn of its session has ended. If it has a gap, it is
    sent so long after that end. If ``max_concurrency`` is
    given, at most that many requests are in flight, as with that many users who each wait for an answer.
    """

    def __init__(
        self, trace: Sequence[TracedRequest], begin: float, max_concurrency: int | None, delay: float = 0.0
    ) -> None:
        """``delay``: seconds from sending a request until the engine has it."""
        self._trace = trace
        self._delay = delay
        self._begin = begin + delay
        self._idle_users = None if max_concurrency is None else deque([self._begin] * max_concurrency)
        """One entry per user without a request in flight: the time at which the engine can have the user's next
        request."""
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
            first.append((self._begin + trace[index].arrival, index))
            if trace[index].session:
                self._later[trace[index].session] = deque()
        heapq.heapify(first)
        self._ready: list[tuple[float, int]] = first
        self._leaving: list[tuple[float, int]] = []

    @property
    def done(self) -> bool:
        """Whether no request can be sent until a running request ends. Also true when all requests have been sent."""
        return not self._ready

    def next_event(self) -> float | None:
        """Time at which the next request is sent or cancelled, unless another request ends earlier."""
        sent = self._ready[0][0] if self._ready and self._idle_users is None else None
        if self._ready and self._idle_users:
            sent = max(self._ready[0][0], self._idle_users[0])
        return min(
            (when for when in (sent, *[each[0] for each in self._leaving[:1]]) if when is not None), default=None
        )

    def send(self, now: float) -> tuple[int, float] | None:
        """(index of the next request that the engine gets, time at which it was sent). None if the engine gets no
        request by ``now``."""
        if not self._ready or self._ready[0][0] > now or (self._idle_users is not None and not self._idle_users):
            return None
        when, index = heapq.heappop(self._ready)
        if self._idle_users is not None:
            when = max(when, self._idle_users.popleft())
        sent = when - self._delay
        patience = self._trace[index].cancel_ms
        if patience is not None:
            heapq.heappush(self._leaving, (sent + patience / 1000, index))
        return index, sent

    def leaving(self, now: float) -> list[int]:
        """Indices of the requests whose client disconnects by ``now``, including requests that have ended."""
        indices = []
        while self._leaving and self._leaving[0][0] <= now:
            indices.append(heapq.heappop(self._leaving)[1])
        return indices

    def ended(self, index: int, now: float) -> None:
        """Record that a request has ended, so that its user and the next turn of its session may continue."""
        now += self._delay
        if self._idle_users is not None:
            self._idle_users.append(now)
        turns = self._later.get(self._trace[index].session)
        if turns:
            later = turns.popleft()
            gap = self._trace[later].gap_ms
            when = max(now, self._begin + self._trace[later].arrival) if gap is None else now + gap / 1000
            heapq.heappush(self._ready, (when, later))


def enter(
    add: Callable[[PreparedRequest], object],
    inputs: InputProcessor,
    request: TracedRequest,
    index: int,
    arrival: float,
    collector: Collector,
) -> bool:
    """Check a request that was sent at ``arrival``, and pass it to ``add``. Returns False when the request is refused.

    Latency targets and priorities are passed on only if the scheduling policy uses them.
    """
    fields: dict[str, Any] = {}
    if inputs.limits.service_classes is not None:
        names = ("priority", "service_tier", "ttft_ms", "tpot_ms", "deadline_ms")
        fields = {name: getattr(request, name) or None for name in names}
    params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, seed=0, **fields)
    prompt = prompt_token_ids(request, index, inputs.limits.vocab_size)
    name = str(index)
    timing = RequestTiming(dataclasses.replace(request, arrival=arrival), index)
    if collector.watch is not None:
        collector.watch(timing)
    try:
        prepared = _with_hints(inputs.prepare(name, prompt, params, arrival, tenant=request.tenant), request)
        add(prepared)
    except RequestError as error:
        timing.error = str(error)
        collector.over(timing, arrival)
        return False
    service = prepared.service
    targets = {
        "ttft_ms": service.first_token_by - arrival,
        "tpot_ms": service.seconds_per_token,
        "deadline_ms": service.finish_by - arrival,
    }
    of_class: dict[str, Any] = {
        name: 1000 * seconds
        for name, seconds in targets.items()
        if seconds < math.inf and getattr(request, name) is None
    }
    timing.request = dataclasses.replace(timing.request, **of_class)
    collector.timings[name] = timing
    return True


def _with_hints(prepared: PreparedRequest, request: TracedRequest) -> PreparedRequest:
    """Add what the trace says about a request, and only policies read."""
    hints = {name: getattr(request, name) for name in ("session", "tool", "predicted_tokens")}
    if not any(hints.values()):
        return prepared
    return dataclasses.replace(prepared, service=dataclasses.replace(prepared.service, **hints))
