"""Chooses the number of drafts in a step that gives the most tokens per second. The number may be 0.

A draft costs time, because it is one more row to compute. Its value is the probability that it and all earlier drafts
of its row are accepted. The most probable drafts are added first, as long as the tokens per second increase. On CPUs a
step with few rows waits for memory, so drafts cost almost nothing. A step with many rows is limited by computation, so
drafts cost more than they give.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from chairlift.config import SchedulerConfig, SpeculativeConfig
from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.drafts import Guide
from chairlift.core.spec_decode.acceptance import Acceptance, Source
from chairlift.core.spec_decode.ngram import NgramProposer
from chairlift.core.spec_decode.predicted import PredictedText
from chairlift.core.spec_decode.suffix import SuffixProposer
from chairlift.core.spec_decode.upkeep import Upkeep

__all__ = ["AdaptiveSpeculator", "Proposer", "best_number", "speculator_from_config"]

_PROBE_STEPS = (4, 24)
"""(first number, largest number) of steps without drafts after which one draft is tried although the estimates are
against it, because the text may have changed. The number is the first one at the start and after a right draft. It
doubles after each wrong draft, up to the largest one."""
_PROBE_SHARE = 0.005
_MAX_PAID_PROBE_STEPS = 1200
"""Fraction of the time that probes may take if making drafts costs time, and the number of steps without drafts after
which there is a probe whatever it costs, because the measured cost of a drafter may have been an outlier."""
_REST_STEPS = 16
"""Maximum number of steps for which the answer that no drafts pay stays valid. It depends only on the rows and on
estimates, which change little without drafts."""
_LOOK_SECONDS = 6e-5
_LOOK_SHARE = 0.002
_MAX_PAID_REST_STEPS = 128
"""If making drafts costs time: the seconds in which the answer is found, the fraction of the time that this may take,
and the largest number of steps for which the answer is valid, instead of ``_REST_STEPS``. Beside a short step, finding
it takes a tenth of the step."""
_LOOKS_COMPARED = 32
"""Number of steps in which drafts were looked for after which the time that this took is compared with the time that
drafts saved. It is small, because beside the step of a small model a look takes up to a third of the step."""
_FEW_ROWS = 4
"""Maximum number of decode rows for which the end of one request can change the answer much."""
_FIRST_TRY = 4
"""Number of drafts that are tried first for a request with a ``prediction``, whatever they cost. The caller who
supplied the predicted text knows the answer better than the engine."""
_MAX_DRAFTS = 64
"""Maximum number of drafts in a step, over all rows. On a CPU, more are never useful."""
_SIZES_COMPARED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, _MAX_DRAFTS)
"""Numbers of drafts that :meth:`AdaptiveSpeculator._may_pay` compares."""
_MIN_GAINS = (1.005, 1.02)
_GAIN_PER_COST = 0.2
"""Drafts are used only if they increase the tokens per second by a factor between the first and the last of
``_MIN_GAINS``. It is above 1 because the estimates are noisy. It grows with the relative time that the drafts add,
times ``_GAIN_PER_COST``: drafts that cost almost nothing lose almost nothing if an estimate is wrong."""
_ALIKE = 0.8
"""Rows take turns if the probability of a row's first draft is at least this fraction of that of the draft that was
added last."""
_FIRST_REACH = 1
_ROWS_PER_REACH = 8
"""Most drafts that the proposer makes for a row at first, and the number of checked rows with that many after which it
doubles. If large steps came first, the times of smaller ones would stay guesses, and the choice would stay wrong."""
_PLAIN_AFTER = 200
"""Number of steps with drafts and as many decode rows after which there is one without drafts, to measure its time.
Otherwise, if the first times of steps without drafts were outliers, drafts might seem to pay for ever."""
_MAX_KNOWN = 16
"""Default of the maximum number of drafts of a row in one step, if the drafts come from a predicted output or a
grammar."""


def best_number(num_rows: int, drafts: Sequence[tuple[float, str]], seconds: Callable[[int], float]) -> int:
    """Number of drafts with the most tokens per second, among those that do not delay the last of these rows.

    Rows without drafts wait for the drafts of the others, and take part in smaller steps when the others have ended. So
    drafts for some rows can delay the rest more than they save. Rows whose first drafts are about as probable take
    turns over the steps, so all of them gain from the drafts of one of them.

    Args:
        num_rows: Number of rows of the step. Each of them yields one token in any case.
        drafts: (probability that the draft is accepted, request id), in descending order.
        seconds: Function from the number of drafts to the seconds of the step. A number below 0 stands for fewer rows.
    """
    alone = seconds(0)
    best = 0
    plain = num_rows / alone
    rate = plain
    first: dict[str, float] = {}
    for chance, name in drafts:
        first.setdefault(name, chance)
    waiting = list(first.values())[::-1]
    gained = 0.0
    sharing = 0
    for number, (chance, _) in enumerate(drafts, 1):
        gained += chance
        while waiting and waiting[-1] >= _ALIKE * chance:
            waiting.pop()
            sharing += 1
        found = (num_rows + gained) / (taken := seconds(number))
        if found <= rate or found <= plain * _least_gain(taken, alone):
            continue
        # Rows with drafts end after the fraction 1 - saved of the steps; then the other rows run without them.
        saved = gained / (gained + sharing)
        rest = seconds(-sharing) if sharing < num_rows else 0.0
        if (1 - saved) * taken + saved * rest <= alone:
            best = number
            rate = found
    return best


def _least_gain(taken: float, alone: float) -> float:
    """Minimum factor by which drafts must increase the tokens per second of a step that takes ``taken`` seconds with
    them and ``alone`` without."""
    return min(_MIN_GAINS[1], _MIN_GAINS[0] + _GAIN_PER_COST * max(0.0, taken / alone - 1))


class Proposer(Protocol):
    """Guesses the next tokens of requests."""

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Drafts of each row. A row is (decoding request, maximum number of its drafts). A row's result may be
        empty."""
        ...

    def seconds(self, num_rows: int) -> float:
        """Expected seconds in which one draft for each of ``num_rows`` rows is made."""
        ...

    def forget(self, request: Request) -> None:
        """Called when a request has ended, even if it never got drafts."""
        ...


class BoundedProposer(Proposer, Protocol):
    """Proposer that makes a limited number of drafts for a row, such as Medusa's heads."""

    most: int
    """Maximum number of drafts for a row in one step."""


class _Drafted(NamedTuple):
    """Drafts of one row from which the step may take the first few."""

    request: Request
    tokens: Sequence[int]
    source: Source


class AdaptiveSpeculator:
    """Chooses drafts for each step.

    The source of a row's drafts is its grammar if the grammar forces tokens; otherwise the text that the caller
    expects, while the answer follows it; otherwise a proposer.

    Args:
        step_seconds: Function from the features of a step to its predicted seconds.
        most: Maximum number of drafts for a row in one step.
        proposer: Source of drafts for all other requests. None: they get no drafts.
        guide: Knows the tokens that grammars force. None: there are no grammars.
        look_clock: Clock in seconds, to measure how long the choice of drafts takes where making them costs almost
            nothing. If this takes more time than drafts save, it pauses. None: it is not measured.
    """

    def __init__(
        self,
        step_seconds: Callable[[StepFeatures], float],
        most: int,
        proposer: Proposer | None = None,
        guide: Guide | None = None,
        look_clock: Callable[[], float] | None = None,
    ) -> None:
        self._seconds = step_seconds
        self.most = most
        self._proposer = proposer
        self._guide = guide
        self._most_proposed = min(most, getattr(proposer, "most", most))
        """Maximum number of drafts for a row that the proposer makes, such as the number of Medusa heads."""
        self.acceptance = Acceptance()
        self._texts: dict[str, PredictedText] = {}
        self._sources: dict[str, Source] = {}
        """Request id -> source of the drafts that the request got last."""
        self.reach = _FIRST_REACH
        """Most drafts that the proposer makes for a row now. It doubles while the engine learns what steps cost."""
        self._num_reached = 0
        self._idle_steps = 0
        self._probe_steps = _PROBE_STEPS[0]
        self._resting_steps = self._resting_rows = 0
        """For how many more steps the answer that drafts do not pay is valid, and for how many decode rows it was
        given."""
        self._is_paid_rest = False
        """Whether making drafts cost time when the answer was given."""
        has_upkeep = hasattr(proposer, "upkeep")
        self._look_clock = None if has_upkeep or proposer is None else look_clock
        self._upkeep: Upkeep = getattr(proposer, "upkeep", None) or Upkeep(_LOOKS_COMPARED)
        self._token_seconds = 0.0
        """Seconds per token of the newest step that could have drafts, if it has none."""
        self.drafting_seconds = 0.0
        """Total seconds that the proposer took to make drafts. 0 for n-grams, which take microseconds."""
        self._drafted_steps: Counter[int] = Counter()
        """Number of decode rows -> number of steps with drafts since the last step without drafts that was measured."""
        self.measures = False
        """Whether the newest step has no drafts so that its time is measured. The caller sets it to False again."""
        self.only_known = proposer is None
        """Whether drafts come only from a request's ``prediction`` or grammar, because there is no proposer."""

    def rests(self, num_rows: int) -> bool:
        """Whether :meth:`choose` found a few steps ago that drafts do not pay, and since then no draft was checked, no
        probe became due, and the number of decode rows did not halve or, if making drafts costs time, double. Most
        steps without drafts then cost nothing more than this call. Also true without decode rows, and while the
        proposer keeps no states: then it can make no drafts, and a probe is due when it keeps them again."""
        if not self._upkeep.is_on:
            self._idle_steps = _MAX_PAID_PROBE_STEPS
            self._resting_steps = 0
            if self._look_clock is not None and num_rows:
                self._upkeep.passes(has_new=True)
            return True
        if not num_rows:
            return True
        if not self._resting_steps:
            return False
        rows = self._resting_rows
        if 2 * num_rows <= rows or (self._is_paid_rest and num_rows >= 2 * rows):
            return False
        self._resting_steps -= 1
        self._idle_steps += 1
        return True

    def choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        """Choose the drafts of a step: (request, drafts) for some of ``rows``, with at most ``budget`` drafts in total.
        ``rows`` has (decoding request, maximum number of its drafts)."""
        if self._look_clock is None:
            return self._choose(rows, step, budget)
        begin = self._look_clock()
        chosen = self._choose(rows, step, budget)
        self._upkeep.kept(self._look_clock() - begin)
        return chosen

    def _choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        times: dict[int, float] = {}
        num_decodes = step.num_decodes
        others = step[1:]

        def seconds(number: int) -> float:
            found = times.get(number)
            if found is None:
                found = times[number] = self._seconds(StepFeatures(num_decodes + number, *others))
            return found

        self._idle_steps += 1
        self.measures = self._drafted_steps[num_decodes] >= _PLAIN_AFTER
        if self.measures:
            self._drafted_steps[num_decodes] = 0
            return []
        alone = seconds(0)
        self._token_seconds = alone / step.num_decodes
        if self._upkeep.is_due:
            self._upkeep.compare(alone)
        price = 0.0 if self._proposer is None else self._proposer.seconds(len(rows))
        probes = self._idle_steps >= (probe_after := self._steps_before_probe(price, seconds))
        if price and not any(request.prediction or request.is_guided for request, _ in rows):
            depth = self._depth(rows, step, seconds, price)
            may_pay = depth > 0
        else:
            may_pay = self._may_pay(rows, step, seconds)
            depth = self._depth(rows, step, seconds, price) if may_pay else 0
        if not probes and not depth:
            self._rest(step.num_decodes, price, alone, probe_after)
        if not probes and not may_pay:
            return []
        depth = max(int(probes), depth)
        drafted = self._propose([(request, min(limit, self.most)) for request, limit in rows], depth)
        order = sorted(self._ranked(drafted), reverse=True)[: min(budget, _MAX_DRAFTS)]
        number = best_number(step.num_decodes, order, seconds)
        if probes and order:
            if not number:
                number = 1
                order = [self._least_tried(drafted)]
            self._idle_steps = 0
        counts = {name: _FIRST_TRY if self._is_new(each) else 0 for name, each in drafted.items()}
        chosen = Counter(name for _, name in order[:number])
        proposed = sum(count for name, count in chosen.items() if drafted[name].source is Source.PROPOSED)
        if proposed:
            self._upkeep.drafted(max(0.0, seconds(number) - alone) * proposed / number)
        counts = {name: max(at_least, chosen[name]) for name, at_least in counts.items()}
        self._drafted_steps[num_decodes] += any(counts.values())
        return [(each.request, each.tokens[: counts[name]]) for name, each in drafted.items() if counts[name]]

    def _rest(self, num_rows: int, price: float, alone: float, probe_after: float) -> None:
        """Let :meth:`rests` be true for the next few steps, until a probe is due: ``probe_after`` steps without drafts.
        One draft for each row costs ``price`` seconds, and a step without drafts ``alone``."""
        self._drafted_steps[num_rows] = 0  # one of the next few steps, which have no drafts, is measured
        self._resting_rows = num_rows
        self._is_paid_rest = price > 0
        steps = _REST_STEPS
        if price:
            steps = max(steps, min(int(_LOOK_SECONDS / (_LOOK_SHARE * alone)), _MAX_PAID_REST_STEPS))
        self._resting_steps = min(steps, math.ceil(probe_after) - self._idle_steps - 1)

    def _steps_before_probe(self, price: float, seconds: Callable[[int], float]) -> float:
        """Number of steps without drafts after which a probe is due. If one draft for each row costs ``price`` seconds,
        these steps take so long that making one draft and checking it is a small share of the time."""
        if not price:
            return self._probe_steps
        alone = seconds(0)
        price += max(0.0, seconds(1) - alone)
        return max(self._probe_steps, min(price / (_PROBE_SHARE * alone), _MAX_PAID_PROBE_STEPS))

    def _least_tried(self, drafted: Mapping[str, _Drafted]) -> tuple[float, str]:
        """(probability, request id) of the request with the fewest checked drafts. The probability is the estimate for
        its next draft."""
        name = min(drafted, key=lambda name: self.acceptance[drafted[name].source].weight(name))
        return self.acceptance[drafted[name].source].survivals(name, 1)[0], name

    def _is_new(self, drafted: _Drafted) -> bool:
        """Whether the drafts come from the predicted output that the request supplied (``prediction``), and no draft of
        this kind was checked for the request yet."""
        new = drafted.source is Source.PREDICTED
        return new and drafted.request.request_id not in self.acceptance[Source.PREDICTED].requests

    def _is_unknown(self, request: Request) -> bool:
        """Whether no draft that the proposer made for the request was checked yet."""
        return request.request_id not in self.acceptance[Source.PROPOSED].requests

    def _may_pay(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, seconds: Callable[[int], float]
    ) -> bool:
        """Whether drafts could increase the tokens per second if the drafts of all rows were as probable as the most
        probable ones. In full batches the answer is no. Then the search for drafts is skipped, and this method is the
        only cost."""
        names: dict[Source, list[str]] = {}
        proposes = self._proposer is not None
        others = []
        expecting = self.acceptance[Source.PREDICTED].requests
        for request, _ in rows:
            if request.prediction or request.is_guided:
                if request.prediction and request.request_id not in expecting:
                    return True
                for source in self._sources_of(request):
                    names.setdefault(source, []).append(request.request_id)
            elif proposes:
                others.append(request.request_id)
        if others:
            names.setdefault(Source.PROPOSED, []).extend(others)
        if not names:
            return False
        depth = min(self.most, -(-_MAX_DRAFTS // len(rows)))
        curves = [self.acceptance[source].best(each, depth)[:depth] for source, each in names.items()]
        chances = list(map(max, *curves)) if len(curves) > 1 else curves[0]
        gains = [0.0, *accumulate(chances)]
        alone = seconds(0)
        most = len(rows) * depth
        for size in _SIZES_COMPARED:
            number = min(size, most)
            full, rest = divmod(number, len(rows))
            gained = len(rows) * gains[full] + (rest * chances[full] if rest else 0.0)
            taken = seconds(number)
            if (1 + gained / step.num_decodes) * alone > taken * _least_gain(taken, alone):
                return True
            if size >= most:
                break
        return False

    def _depth(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, seconds: Callable[[int], float], price: float
    ) -> int:
        """Maximum number of drafts that the proposer shall make for each row. If one draft for each row costs ``price``
        seconds: the number that gives the most tokens per second if all are used."""
        if not price:
            return self._most_proposed
        acceptance = self.acceptance[Source.PROPOSED]
        survivals = [acceptance.survivals(request.request_id, self._most_proposed) for request, _ in rows]
        depth = 0
        tokens = float(step.num_decodes)
        alone = seconds(0)
        plain = rate = tokens / alone
        for number in range(1, self._most_proposed + 1):
            tokens += sum([chances[number - 1] for chances in survivals])
            taken = seconds(number * len(rows)) + number * price
            found = tokens / taken
            if found > max(rate, plain * _least_gain(taken, alone)):
                depth = number
                rate = found
        return depth

    def _sources_of(self, request: Request) -> Iterable[Source]:
        """Sources from which drafts for the request may come, preferred sources first."""
        if request.is_guided and self._guide is not None:
            yield Source.FORCED
        if request.prediction:
            yield Source.PREDICTED
        if self._proposer is not None:
            yield Source.PROPOSED

    def _propose(self, rows: Sequence[tuple[Request, int]], depth: int) -> Mapping[str, _Drafted]:
        """Request id -> its candidate drafts, for requests that have any. The proposer makes at most ``depth`` drafts
        per row."""
        found: dict[str, _Drafted] = {}
        others: list[tuple[Request, int]] = []
        for request, limit in rows:
            if request.is_guided and self._guide is not None and (drafts := self._guide.forced(request, limit)):
                found[request.request_id] = _Drafted(request, drafts, Source.FORCED)
            elif request.prediction and (drafts := self._expected(request, limit)):
                found[request.request_id] = _Drafted(request, drafts, Source.PREDICTED)
            else:
                others.append((request, min(limit, depth, self.reach)))
        if self._proposer is not None and self._upkeep.is_on and others and depth:
            begin = time.perf_counter()
            proposals = self._proposer.propose(others)
            taken = time.perf_counter() - begin
            if self._look_clock is None:  # otherwise it is a part of the look
                self._upkeep.drafted(taken)
            self.drafting_seconds += taken if self._proposer.seconds(len(others)) else 0.0
            for (request, _), drafts in zip(others, proposals, strict=True):
                if drafts:
                    found[request.request_id] = _Drafted(request, drafts, Source.PROPOSED)
        self._sources = {name: each.source for name, each in found.items()}
        return found

    def _expected(self, request: Request, limit: int) -> Sequence[int]:
        """Next tokens, at most ``limit``, of the predicted output that the request supplied (``prediction``)."""
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = PredictedText(request.prediction)
        return text.propose(request.token_ids, request.num_prompt_tokens, limit)

    def _ranked(self, drafted: Mapping[str, _Drafted]) -> Iterable[tuple[float, str]]:
        """Yield (probability, request id) for each draft. Within a row the probability does not increase."""
        for name, each in drafted.items():
            chances = self.acceptance[each.source].survivals(name, len(each.tokens))
            yield from [(chance, name) for chance, _ in zip(chances, each.tokens, strict=False)]

    def verified(self, request: Request, drafts: Sequence[int], num_accepted: int) -> None:
        """Learn from a step that has checked ``drafts``: the first ``num_accepted`` of them were right."""
        self._idle_steps = self._resting_steps = 0
        self._probe_steps = _PROBE_STEPS[0] if num_accepted else min(2 * self._probe_steps, _PROBE_STEPS[1])
        source = self._sources.get(request.request_id, Source.PROPOSED)
        self._num_reached += source is Source.PROPOSED and len(drafts) >= self.reach
        if self._num_reached == _ROWS_PER_REACH:
            self.reach = 2 * self.reach
            self._num_reached = 0
        self.acceptance[source].learn(request.request_id, len(drafts), num_accepted)
        if source is Source.PROPOSED:
            self._upkeep.saved(num_accepted * self._token_seconds)
        if source is Source.PREDICTED:
            request.num_accepted_predicted += num_accepted
            request.num_rejected_predicted += len(drafts) - num_accepted

    def forget(self, request: Request) -> None:
        """Remove the state of a request that has ended."""
        # Where making drafts costs time, few requests have checked drafts, and the others are all alike.
        if self._resting_rows <= _FEW_ROWS and not (self._is_paid_rest and self._is_unknown(request)):
            self._resting_steps = 0
        self.acceptance.forget(request.request_id)
        self._texts.pop(request.request_id, None)
        if self._proposer is not None:
            self._proposer.forget(request)


def _reader_of_tokens(speculation: SpeculativeConfig) -> Proposer:
    """The proposer of a method that only reads tokens."""
    if speculation.method == "ngram":
        return NgramProposer(speculation.prompt_lookup_min)
    return SuffixProposer(
        speculation.prompt_lookup_min,
        speculation.suffix_decoding_max_tree_depth,
        speculation.suffix_decoding_max_spec_factor,
        speculation.suffix_decoding_min_token_prob,
        speculation.suffix_decoding_max_cached_requests,
    )


def speculator_from_config(
    config: SchedulerConfig,
    costs: Costs,
    num_lookahead_steps: int,
    guide: Guide | None = None,
    drafter: BoundedProposer | None = None,
) -> AdaptiveSpeculator | None:
    """The speculator for these settings; None if steps take no drafts (:meth:`SchedulerConfig.takes_drafts`). If no
    method is set, only requests with a ``prediction`` or a grammar get drafts. ``drafter`` is the small model or the
    heads, if loaded. Raises ConfigError."""
    speculation = config.speculation
    if not config.takes_drafts(num_lookahead_steps):
        return None
    if speculation is None:
        return AdaptiveSpeculator(costs.decode_seconds, _MAX_KNOWN, guide=guide)
    proposer = _reader_of_tokens(speculation) if drafter is None else drafter
    most = speculation.num_speculative_tokens
    return AdaptiveSpeculator(costs.decode_seconds, most, proposer, guide, look_clock=time.perf_counter)
