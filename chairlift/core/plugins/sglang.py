"""SGLang's orders: longest cached prefix (LPM), depth first by weight, and highest response ratio next (HRRN).

Source: Zheng et al., NeurIPS 2024, and SGLang's scheduler. Claim: more hits in the prefix cache than in order of
arrival. LPM has no bound: requests without a cached prefix can starve. SGLang's prefill delayer waits only while some
data-parallel ranks can prefill, so with one engine it does nothing and is not built.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from chairlift.core.plugins.keyed_policy import KeyedPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.view import View

__all__ = ["DepthFirstByWeight", "HighestResponseRatio", "LongestPrefixMatch"]


class LongestPrefixMatch(KeyedPolicy):
    """Most cached tokens first. A prompt that begins like another one of which little is cached goes last: it will find
    the beginning in the cache."""

    name = "lpm"
    changes = True
    most_waiting = 128
    """With more waiting requests, the order of arrival holds."""
    common_tokens = 32

    def catch_up(self, original: Policy) -> None:
        super().catch_up(original)
        self.changes = False  # a forecast has no prefix cache, and copies of requests have other tokens

    def key(self, request: Request) -> tuple[float, ...]:
        return (0.0, 0.0)

    def new_keys(self) -> Mapping[str, tuple[float, ...]]:
        if len(self.waiting) > self.most_waiting:
            return dict.fromkeys(self.waiting, (0.0, 0.0))
        begins: set[tuple[int, ...]] = set()
        keys = {}
        for name, request in sorted(self.waiting.items(), key=lambda item: item[1].sequence):
            cached = self.view.cached_tokens(request)
            begin = tuple(request.token_ids[: self.common_tokens])
            alike = cached <= self.common_tokens == len(begin)
            keys[name] = (float(alike and begin in begins), -cached)
            begins |= {begin} if alike else set()
        return keys


class DepthFirstByWeight(LongestPrefixMatch):
    """Requests in the order of a walk through the prefix cache. Of two branches, the one below which more requests wait
    comes first. Requests that end at a node come after its branches."""

    name = "dfs_weight"

    def new_keys(self) -> Mapping[str, tuple[float, ...]]:
        if len(self.waiting) > self.most_waiting:
            return dict.fromkeys(self.waiting, (0.0, 0.0))
        paths = {name: self.view.cached_path(request) for name, request in self.waiting.items()}
        weights = Counter(node for path in paths.values() for node in path)
        numbers = {node: number for number, node in enumerate(weights)}  # in the order in which they were met
        return {
            name: (*(part for node in path for part in (-weights[node], numbers[node])), math.inf)
            for name, path in paths.items()
        }


class HighestResponseRatio(KeyedPolicy):
    """Largest ratio of the prompt tokens that were admitted since a request arrived to its own uncached tokens."""

    name = "hrrn"
    changes = True

    def __init__(self, view: View | None = None) -> None:
        super().__init__(view)
        self.admitted = 0
        self.before: dict[str, int] = {}
        """Id -> ``admitted`` when the request arrived."""

    def key(self, request: Request) -> tuple[float, ...]:
        since = self.admitted - self.before.setdefault(request.request_id, self.admitted)
        return (-since / self.view.uncached_tokens(request),)

    def joined(self, request: Request) -> None:
        super().joined(request)
        self.admitted += self.view.uncached_tokens(request)

    def forgotten(self, request: Request) -> None:
        super().forgotten(request)
        self.before.pop(request.request_id, None)
