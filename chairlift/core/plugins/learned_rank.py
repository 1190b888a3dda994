"""Learning to rank: the shortest answers first, by predicted rank, with protection from starvation.

Source: Fu et al., arXiv 2408.15792. Claim: latency 2.8 times lower (chat), throughput 6.5 times higher (synthetic
data). The rank comes from the predictions that requests carry; the laboratory draws them with a stated Kendall
correlation to the true lengths. Without predictions it comes from recent answers of the class.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from chairlift.core.plugins.keyed_policy import KeyedPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler.policy import Policy, Resource
from chairlift.core.scheduler.view import View

__all__ = ["LearnedRank"]


class LearnedRank(KeyedPolicy):
    """Shortest predicted answer first, waiting and running requests alike. A request that has waited for
    ``starve_steps`` steps is urgent, until it has run for ``urgent_steps`` steps."""

    name = "learned_rank"
    preemptive = True
    starve_steps = 256
    urgent_steps = 32

    def __init__(self, view: View | None = None) -> None:
        super().__init__(view)
        self.since: dict[str, int] = {}
        """Id -> step in which the request began to wait, or to run."""
        self.urgent: dict[str, bool] = {}
        """Id of an urgent request -> whether it runs."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (self.view.answer_tokens(request),)

    def catch_up(self, original: Policy) -> None:
        super().catch_up(original)
        if isinstance(original, LearnedRank):  # a forecast counts its steps from 0
            passed = original.view.step - self.view.step
            self.since = {name: step - passed for name, step in self.since.items()}

    def lane(self, request: Request) -> Hashable:
        return request.request_id in self.urgent

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        return (head.request_id not in self.urgent, *self.order(head))

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        return self.rank(request, 0.0, now) < self.rank(running, 0.0, now)

    def moved(self) -> Iterable[Request]:
        step = self.view.step
        calm = [
            each
            for each in self.view.running
            if self.urgent.get(each.request_id) and step - self.since[each.request_id] >= self.urgent_steps
        ]
        for each in calm:
            del self.urgent[each.request_id]
        starved = [name for name in self.waiting if step - self.since[name] >= self.starve_steps]
        fresh = [name for name in starved if name not in self.urgent]
        self.urgent |= dict.fromkeys(fresh, False)
        return [*calm, *(self.waiting[name] for name in fresh)]

    def queued(self, request: Request, now: float) -> None:
        self.since[request.request_id] = self.view.step
        if request.request_id in self.urgent:
            self.urgent[request.request_id] = False
        super().queued(request, now)

    def joined(self, request: Request) -> None:
        self.since[request.request_id] = self.view.step
        if request.request_id in self.urgent:
            self.urgent[request.request_id] = True
        super().joined(request)

    def forgotten(self, request: Request) -> None:
        self.since.pop(request.request_id, None)
        self.urgent.pop(request.request_id, None)
        super().forgotten(request)
