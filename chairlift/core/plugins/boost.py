"""Boosts: a request is served as if it had arrived earlier, the shorter it is the more.

Source: gamma-Boost, arXiv 2404.08826 (abstract), for known sizes; UniBoost, arXiv 2606.18431 (abstract), for classes of
requests without a prediction. Claim: p99 of the time of an answer 35 to 50 % below that of shortest remaining time
first with known lengths.

Not built, because the text was not available: UniBoost's statistic of running answers, and its preemption.
"""

from __future__ import annotations

import math

from chairlift.core.plugins.keyed_policy import KeyedPolicy
from chairlift.core.request import Request

__all__ = ["GammaBoost", "UniBoost"]


class GammaBoost(KeyedPolicy):
    """Key: arrival minus ``ln(1 / (1 - exp(-gamma s))) / gamma``, where s is the predicted service in seconds."""

    name = "gamma_boost"
    gamma = 1.0
    """Per second. Towards 0 the order is shortest first, towards infinity first come, first served."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.arrival_time - self.boost(request),)

    def boost(self, request: Request) -> float:
        """Seconds by which the request is served as if it had arrived earlier."""
        part = math.exp(-self.gamma * self.view.service_seconds(request))
        return -math.log1p(-min(part, 1 - 1e-12)) / self.gamma


class UniBoost(GammaBoost):
    """Boost of a class: ``ln(M / (M - 1)) / gamma``, where M is the mean of exp(gamma s) over recent answers."""

    name = "uniboost"

    def boost(self, request: Request) -> float:
        lengths = self.view.recent_answers(request)
        if not lengths:
            return super().boost(request)
        exponents = [min(700.0, self.gamma * self.view.service_seconds(request, tokens)) for tokens in lengths]
        mean = math.fsum(map(math.exp, exponents)) / len(exponents)
        return math.log(mean / max(mean - 1, 1e-12)) / self.gamma
