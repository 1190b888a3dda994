"""Number of drafts in a step: the number with the most tokens per second, which may be none.

A draft costs time, since each is one more row. Its value is the probability that it and all drafts before it are
accepted. Drafts of rows with a high acceptance come first; more are added while tokens per second grow. On CPUs a step
of few rows waits for memory, so drafts are nearly free. A step of many rows is limited by arithmetic, and no draft
pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from chairlift.config import SchedulerConfig
from chairlift.request import Request
from chairlift.scheduler.cost_model import StepFeatures
from chairlift.scheduler.costs import Costs
from chairlift.spec_decode.ngram import NgramIndex

__all__ = ["AdaptiveSpeculator", "best_number", "speculator_from_config"]

_PRIOR = 0.5
"""Assumed acceptance of drafts for a request that has had none."""
_MEMORY = 0.15
"""Weight of the newest draft in the estimate of the acceptance."""
_PROBE_STEPS = 24
"""If no draft pays by the estimates, one is tried again after this many steps, because texts change."""
_MOST_COMPARED = 64
"""Most drafts of a step; on a CPU more never pay."""
_LEAST_GAIN = 1.02
"""Least gain that counts, because the estimates are noisy."""


def best_number(num_rows: int, chances: Sequence[float], seconds: Callable[[int], float]) -> int:
    """Number of drafts with the most tokens per second.

    Args:
        num_rows: Rows of the step, each of which yields a token in any case.
        chances: Probability that each draft is accepted, not ascending.
        seconds: Time of the step with this many drafts.
    """
    best, rate = 0, num_rows / seconds(0) * _LEAST_GAIN
    tokens = float(num_rows)
    for number, chance in enumerate(chances, 1):
        tokens += chance
        if tokens / seconds(number) > rate:
            best, rate = number, tokens / seconds(number)
    return best


class AdaptiveSpeculator:
    """Drafts by n-grams, as many as pay.

    Args:
        step_seconds: Time of a step by its features, as learnt so far.
        most: Most drafts of a row in one step.
        ngram_size: Length of the match that a draft needs, in tokens.
        hint_of: Expected text of a request as token ids, if it has one.
    """

    def __init__(
        self,
        step_seconds: Callable[[StepFeatures], float],
        most: int,
        ngram_size: int,
        hint_of: Callable[[Request], Sequence[int]] = lambda request: (),
    ) -> None:
        self._seconds, self._most, self._size, self._hint_of = step_seconds, most, ngram_size, hint_of
        self._chances: dict[str, float] = {}
        self._indexes: dict[str, NgramIndex] = {}
        self._idle_steps = 0

    def choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        """See :class:`~chairlift.scheduler.drafts.Speculator`."""

        def seconds(number: int) -> float:
            return self._seconds(step._replace(num_decodes=step.num_decodes + number))

        self._idle_steps += 1
        probes = self._idle_steps >= _PROBE_STEPS
        if not probes and not self._may_pay(rows, step, seconds):
            return []
        proposals = self._propose(rows)
        order = sorted(self._ranked(proposals), reverse=True)[: min(budget, _MOST_COMPARED)]
        number = best_number(step.num_decodes, [chance for chance, _ in order], seconds)
        if probes and order:
            number, self._idle_steps = max(1, number), 0
        counts = dict.fromkeys(proposals, 0)
        for _, name in order[:number]:
            counts[name] += 1
        return [(request, drafts[: counts[name]]) for name, (request, drafts) in proposals.items() if counts[name]]

    def _may_pay(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, seconds: Callable[[int], float]
    ) -> bool:
        """Whether any draft would pay if every row had drafts. It avoids the search for drafts in full batches."""
        chances = sorted((self._chances.get(request.request_id, _PRIOR) for request, _ in rows), reverse=True)
        powers = (chance**at for chance in chances[:_MOST_COMPARED] for at in range(1, self._most + 1))
        return best_number(step.num_decodes, sorted(powers, reverse=True)[:_MOST_COMPARED], seconds) > 0

    def _propose(self, rows: Iterable[tuple[Request, int]]) -> Mapping[str, tuple[Request, Sequence[int]]]:
        found = {}
        for request, most in rows:
            name = request.request_id
            index = self._indexes.get(name)
            if index is None:
                index = self._indexes[name] = NgramIndex(self._size, self._hint_of(request))
            drafts = index.propose(request.token_ids, request.num_prompt_tokens, min(most, self._most))
            if drafts:
                found[name] = (request, drafts)
        return found

    def _ranked(self, proposals: Mapping[str, tuple[Request, Sequence[int]]]) -> Iterable[tuple[float, str]]:
        """(probability, request id) of each draft. Within a row, probabilities fall."""
        for name, (_, drafts) in proposals.items():
            chance = self._chances.get(name, _PRIOR)
            for at in range(1, len(drafts) + 1):
                yield chance**at, name

    def verified(self, request: Request, drafts: Sequence[int], num_accepted: int) -> None:
        """See :class:`~chairlift.scheduler.drafts.Speculator`."""
        self._idle_steps = 0
        chance = self._chances.get(request.request_id, _PRIOR)
        for right in [1.0] * num_accepted + [0.0] * (num_accepted < len(drafts)):
            chance += _MEMORY * (right - chance)
        self._chances[request.request_id] = min(chance, 0.98)

    def forget(self, request: Request) -> None:
        """See :class:`~chairlift.scheduler.drafts.Speculator`."""
        self._chances.pop(request.request_id, None)
        self._indexes.pop(request.request_id, None)


def speculator_from_config(config: SchedulerConfig, costs: Costs) -> AdaptiveSpeculator | None:
    """The speculator of the settings; None without speculative decoding. Raises ConfigError."""
    asked = config.speculation
    if asked is None:
        return None
    return AdaptiveSpeculator(costs.model.step_seconds, asked.num_speculative_tokens, asked.prompt_lookup_min)
