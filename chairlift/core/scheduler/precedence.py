"""The policy ``priority``: reservations take precedence over deadlines, then come priorities, fairness and arrival."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from chairlift.base.service_class import ServiceClass
from chairlift.core.request import Request
from chairlift.core.scheduler.deadlines import Deadlines, EstimateOf
from chairlift.core.scheduler.fairness import VirtualTokenCounters
from chairlift.core.scheduler.policy import FirstComeFirstServed, Policy, Resource

__all__ = ["Precedence"]


_OWED_SHARE = 0.75
"""Fraction of its fair number of rows that a tenant may take by preemption. If tenants could take more, they would
preempt each other without end."""

_STARVING = 8
"""If no request of a lane (group of waiting requests) was admitted for this many ageing periods, the lane also goes
before requests with deadlines."""


class Precedence(FirstComeFirstServed):
    """The policy ``priority``.

    * A class that uses fewer rows, blocks or step tokens than are reserved for it takes them back from the requests
      that use them.
    * Requests with a deadline are ordered by the latest time at which they must start, computed with ``estimate``.
      :class:`~chairlift.core.scheduler.deadlines.Deadlines` says what happens to requests that will be late.
    * A request with a lower ``priority`` number displaces running requests with a higher number. A lane gains one
      level for each ``ageing_seconds`` in which none of its requests joined. Age changes only the order of the queue;
      it takes no row from a running request. A request that joined after eight times ``ageing_seconds`` keeps its row
      against requests of a better priority; otherwise it would starve.
    * Tenants with requests of one priority are ordered by their virtual token counters, then by the number of rows
      per weight, then by arrival. A tenant is *owed* a row if two conditions hold: it got less service than another
      tenant, and its running and waiting requests are no more than three quarters of its fair number of rows, or one
      row. It takes the row from a tenant with more rows than its fair number and more than one row. So a tenant with
      few requests does not wait for a tenant with many.

    Bounds in steps, for R rows, budget T and requests of at most L positions, with continuous batching and mixed
    steps: prompts that are being computed are complete after ``P = ceil(R * L / (T - R + 1))`` steps. Requests that
    may not be preempted end ``L`` steps later. D is the look-ahead, W is ``max_times_passed``.

    * A class with fewer rows than reserved gets one back within ``P + D + 1`` steps, if there are blocks for all rows.
      A request of a class with fewer blocks than reserved joins within ``(W + 1) * (P + L + D + 1)`` steps. Reserved
      step tokens are available in every step, as far as decodes leave tokens.
    * The head of the lowest of N lanes starts within ``N * (W + 1) * (P + L + D + 1)`` steps after it has waited for
      ``8 * ageing_seconds``.
    * A tenant that is owed a row gets it within ``P + D + 1`` steps, if there are blocks for all rows and other
      requests may be preempted.
    * :class:`~chairlift.core.scheduler.fairness.VirtualTokenCounters` gives the bound of fairness between tenants. Age
      takes precedence over fairness, so that bound holds only while no request waits for ``ageing_seconds``.
    """

    name = "priority"
    preemptive = True

    def __init__(
        self,
        classes: Mapping[str, ServiceClass],
        *,
        max_running: int,
        ageing_seconds: float = 30.0,
        tenant_weights: Mapping[str, float] | None = None,
        estimate: EstimateOf | None = None,
    ) -> None:
        self.counters = VirtualTokenCounters(tenant_weights)
        self._classes = dict(classes)
        self._no_class = ServiceClass()
        self._max_running = max_running
        self._ageing = ageing_seconds
        self._deadlines = Deadlines(estimate)
        self._rows: Counter[str] = Counter()
        """Class of service -> number of its running requests."""
        self._tenant_rows: Counter[str] = Counter()
        self._row = 1.0
        """Weight that entitles a tenant to one row of the batch: the sum of the weights of all tenants with requests,
        divided by the number of rows."""
        self._running: Iterable[Request] = ()
        self._settled = self._counted = True
        self._blocks: Counter[str] = Counter()
        """Class of service -> number of KV blocks that its running requests hold. For a request in several cache
        groups, only the group with its longest block table counts."""
        self._reserves_blocks = any(each.min_blocks for each in classes.values())
        self._reserves_tokens = any(each.min_step_tokens for each in classes.values())
        self._known: set[str] = set()
        self._starving: set[str] = set()
        """Ids of requests that go first because no request of their lane was admitted for a long time: the first
        request of each such lane, and requests that joined for this reason."""

    def fork(self) -> Precedence:
        twin = Precedence(
            self._classes,
            max_running=self._max_running,
            ageing_seconds=self._ageing,
            estimate=self._deadlines.estimate_of,
        )
        twin._starving = set(self._starving)
        return twin

    def catch_up(self, original: Policy) -> None:
        counters = getattr(original, "counters", None)
        if isinstance(counters, VirtualTokenCounters):
            self.counters.catch_up(counters)

    # -- the order -----------------------------------------------------------------------------------------------

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.start_by == math.inf, request.priority, request.start_by, request.sequence)

    def lane(self, request: Request) -> Hashable:
        service = request.service
        return (service.service_class, request.priority, service.tenant, request.start_by < math.inf)

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        if not self._settled:
            self.counters.settle(self._running)
            self._settled = True
        periods = int(waited / self._ageing)
        tenant = head.service.tenant
        fair = self.counters[tenant]
        claim = not (self._claims(head, "slots") or self._claims(head, "blocks"))
        if periods >= _STARVING:
            self._starving.add(head.request_id)
            return (claim, 0, -periods, head.priority, fair, head.sequence)
        if head.start_by < math.inf:
            return (claim, 1, head.start_by, head.priority, fair, head.sequence)
        rows = self._tenant_rows[tenant] / self.counters.weight(tenant)  # a tenant that is owed a row goes first
        return (claim, 2, 0.0, head.priority - periods, fair, rows, head.sequence)

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        if request.service.service_class != running.service.service_class:
            within = self._within(running, resource)
            if within or self._claims(request, resource):
                return not within
        if running.request_id in self._starving and resource != "tokens":
            return False
        if request.start_by < math.inf and (resource == "tokens" or self._deadlines.is_urgent(request, now)):
            return request.start_by < running.start_by if resource == "tokens" else running.start_by == math.inf
        if resource == "slots" and request.priority == running.priority and self._is_owed(request, running):
            return running.start_by == math.inf
        return request.priority < running.priority and running.start_by == math.inf

    def _is_owed(self, request: Request, running: Request) -> bool:
        """Whether the tenant of ``request`` may take a row from the tenant of ``running``: the former has fewer rows
        than its weight entitles it to, and the latter has more."""
        tenant = request.service.tenant
        other = running.service.tenant
        if tenant == other or self.counters[tenant] > self.counters[other]:
            return False
        num_requests = self._tenant_rows[tenant] + self.counters.num_waiting(tenant)
        few = num_requests * self._row <= max(_OWED_SHARE * self.counters.weight(tenant), self._row)
        return few and self._tenant_rows[other] * self._row > max(self.counters.weight(other), self._row)

    def yields(self, running: Request, needy: Request) -> bool:
        if running.service.service_class != needy.service.service_class and self._reserves_blocks:
            within = self._within(running, "blocks")
            if within != self._within(needy, "blocks"):
                return not within
        return super().yields(running, needy)

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        # Among equal requests, the victim belongs to the tenant that got the most service, and is the latest arrival.
        return max(candidates, key=self._weakness, default=None)

    def _weakness(self, request: Request) -> tuple[float, ...]:
        borrowed = not (self._within(request, "slots") or self._within(request, "blocks"))
        deadline = request.start_by == math.inf and request.request_id not in self._starving
        return (borrowed, deadline, request.priority, self.counters[request.service.tenant], request.sequence)

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        if len(needs) == 1:
            return super().share(needs, budget)
        floors = self._floors(needs)
        shares = []
        open_to_all = budget - sum(floors.values())
        for request, num_tokens in sorted(needs, key=self._chunk_order):
            name = request.service.service_class
            assigned = min(num_tokens, floors[name] + max(0, open_to_all), budget)
            budget -= assigned
            own = min(assigned, floors[name])
            floors[name] -= own
            open_to_all -= assigned - own
            shares.append((request, assigned))
        return shares

    def _floors(self, needs: Sequence[tuple[Request, int]]) -> dict[str, int]:
        """Class of service -> number of step tokens that are reserved for it and that it needs now."""
        needed: Counter[str] = Counter()
        for request, num_tokens in needs:
            needed[request.service.service_class] += num_tokens
        return {name: min(self._class(name).min_step_tokens, needed[name]) for name in needed}

    def standing(self, request: Request) -> tuple[float, ...]:
        return (request.start_by, request.priority)

    def reserved_tokens(self, needs: Sequence[tuple[Request, int]]) -> int:
        return sum(self._floors(needs).values()) if self._reserves_tokens else 0

    def _chunk_order(self, need: tuple[Request, int]) -> tuple[float, ...]:
        request = need[0]
        stalled = request.num_computed_tokens >= request.progress_mark
        return (not stalled, *self.standing(request), request.sequence)

    # -- reservations --------------------------------------------------------------------------------------------

    def _class(self, name: str) -> ServiceClass:
        return self._classes.get(name, self._no_class)

    def _claims(self, request: Request, resource: Resource) -> bool:
        """Whether the class of the request has less of ``resource`` than is reserved for it."""
        name = request.service.service_class
        own = self._class(name)
        if resource == "slots":
            return self._rows[name] < own.min_seqs
        if resource == "blocks":
            return own.min_blocks > 0 and self._used(name) < own.min_blocks
        return own.min_step_tokens > 0

    def _within(self, request: Request, resource: Resource) -> bool:
        """Whether the class of the request has at most as much of ``resource`` as is reserved for it."""
        name = request.service.service_class
        own = self._class(name)
        if resource == "slots":
            return 0 < own.min_seqs >= self._rows[name]
        if resource == "blocks":
            return own.min_blocks > 0 and self._used(name) <= own.min_blocks
        return own.min_step_tokens > 0

    def _used(self, name: str) -> int:
        if not self._counted:
            self._counted = True
            self._blocks.clear()
            for request in self._running:
                self._blocks[request.service.service_class] += max(map(len, request.block_ids), default=0)
        return self._blocks[name]

    def may_stay(self, request: Request) -> bool:
        name = request.service.service_class
        still_reserved = sum(
            max(0, own.min_seqs - self._rows[other]) for other, own in self._classes.items() if other != name
        )
        return self._rows[name] < self._class(name).min_seqs or self._rows.total() + still_reserved < self._max_running

    # -- deadlines -----------------------------------------------------------------------------------------------

    def late(self, now: float) -> Iterable[Request]:
        return self._deadlines.lost(now)

    def moved(self) -> Iterable[Request]:
        return self._deadlines.doubtful()

    # -- what happens --------------------------------------------------------------------------------------------

    def observe(self, running: Iterable[Request], now: float) -> None:
        self._running = running
        self._settled = self._counted = False
        tenants = {*self.counters.active(), *self._tenant_rows}
        self._row = sum(map(self.counters.weight, tenants)) / self._max_running

    def queued(self, request: Request, now: float) -> None:
        self.counters.queued(request)
        if request.request_id not in self._known:
            self._known.add(request.request_id)
            self._deadlines.add(request)

    def joined(self, request: Request) -> None:
        self._rows[request.service.service_class] += 1
        self._tenant_rows[request.service.tenant] += 1
        self.counters.joined(request)
        self._counted = False

    def left(self, request: Request) -> None:
        self._rows[request.service.service_class] -= 1
        self._tenant_rows[request.service.tenant] -= 1
        if not self._tenant_rows[request.service.tenant]:
            del self._tenant_rows[request.service.tenant]
        self.counters.left(request)
        self._counted = False

    def forgotten(self, request: Request) -> None:
        self._known.discard(request.request_id)
        self._starving.discard(request.request_id)
        self.counters.forgotten(request)
