"""``chairlift tune``: what does batching do for this traffic, and with which settings? One answer, from real runs.

The simulator, fitted on steps of this machine, looks at many settings; the real engine runs the few that matter, side
by side. Where the two disagree, the real runs decide.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.engine.clock import Clock
from chairlift.errors import ConfigError
from chairlift.replay.machines import ModelShape
from chairlift.workbench.bench.serve_run import fit
from chairlift.workbench.bench.tune_lab import Lab, MakeCore, Traffic
from chairlift.workbench.bench.tune_search import GOODPUT, PREEMPTED, Judge, Score, Space, search, shortfall
from chairlift.workbench.bench.tune_state import Figures, Setting, State
from chairlift.workbench.workload.trace import TracedRequest

__all__ = ["SEARCHED", "Findings", "Question", "Ratio", "tune"]

SEARCHED: Final = tuple(field.name for field in dataclasses.fields(Setting) if field.name != "batching")
"""Settings that are searched, unless they are given."""

_MOST_SIMULATED: Final = 2000
_LEAST_PACED: Final = 100
_LEARN_UNTIL, _SEARCH_UNTIL, _ROUNDS_UNTIL, _PACE_UNTIL, _ONE_PACED = 0.12, 0.45, 0.8, 0.96, 0.08
"""Shares of the time limit: when each part ends, and what one run at a given rate may take."""
_ROUNDS, _MOST_ROUNDS, _NARROW = 3, 5, 0.1
_OFF: Final = 0.2
_ALIKE: Final = 1.02
_SLACK: Final = 1.15
_STEPS_DOWN: Final = (1.0, 0.85, 0.7)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked."""

    requests: Sequence[TracedRequest]
    users: int | None = None
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Promises in ms, by the names of TracedRequest's fields."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that are not searched."""
    time_limit: float = 600.0
    """Seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Of two settings' throughputs, side by side in each round: mean, and its 95 % interval by bootstrap."""

    mean: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        rng = random.Random(0)
        means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(2000))
        return cls(statistics.fmean(values), means[49], means[-50], len(values))


@dataclasses.dataclass(kw_only=True)
class Findings:
    """The answer. Roles: ``static`` (slots that always fit), ``static_best``, ``equal`` (continuous, as many slots as
    static), ``default``, ``chosen``."""

    traffic: Traffic
    cut: int
    """Requests that were shortened because the model, or its cache, has no room for them."""
    count: int
    """Requests that were simulated."""
    by_rate: bool
    """Whether settings were compared by the highest rate at which they keep promises."""
    tight: bool
    """Whether memory is short: some simulated setting preempts."""
    settings: dict[str, Setting] = dataclasses.field(default_factory=dict)
    scores: dict[str, Score] = dataclasses.field(default_factory=dict)
    """By role, simulated."""
    confirmed_rate: float | None = None
    """Requests per second at which the real engine kept the promises with the chosen settings."""
    full_count: int = 0
    """Requests of each real run in which all come at once."""
    rounds: int = 0
    pace: float | None = None
    """Requests per second of the runs that latencies are read from; None: those in which all come at once."""
    paced_count: int = 0
    ratios: dict[str, Ratio] = dataclasses.field(default_factory=dict)
    """Throughput, all at once, of the chosen settings over ``default`` and ``static_best`` (here the better of the two
    static ones); ``equal``: of equal over static."""
    accuracy: dict[str, float] = dataclasses.field(default_factory=dict)
    """Simulated over measured throughput, by role."""
    by_slots: list[tuple[int, Figures]] = dataclasses.field(default_factory=list)
    """The chosen settings with other max_num_seqs, simulated, all requests at once."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What a reader has to know besides."""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, without the traffic itself."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["traffic"], fields["by_slots"]
        for name in ("settings", "ratios"):
            fields[name] = {role: dataclasses.asdict(value) for role, value in fields[name].items()}
        return fields | {"scores": {role: score._asdict() for role, score in self.scores.items()}}


class _Timer:
    """What is left of the time limit, and who is told."""

    def __init__(self, clock: Clock, limit: float, say: Callable[[str], None]) -> None:
        self._clock, self._begin, self.limit, self._say = clock, clock.now(), limit, say
        self._stage = ""

    def spent(self) -> float:
        return self._clock.now() - self._begin

    def left_until(self, share: float) -> float:
        """Seconds until this share of the limit is used up."""
        return share * self.limit - self.spent()

    def stage(self, text: str) -> None:
        self._stage = text
        self.tell("")

    def tell(self, more: str) -> None:
        left = max(0.0, self.limit - self.spent())
        self._say(f"{self._stage}{': ' if more else ''}{more} ({left:.0f} s left)")


def tune(
    question: Question,
    state: State,
    make_core: MakeCore,
    *,
    machine: str,
    shape: ModelShape,
    clock: Clock,
    say: Callable[[str], None],
) -> Findings:
    """Answer it; what was done before, according to ``state``, is not done again.

    Raises ConfigError when the question makes no sense. KeyboardInterrupt loses nothing but the run that it ends.
    """
    timer = _Timer(clock, question.time_limit, say)
    pinned = {name: value for name, value in question.fixed.items() if name in SEARCHED}
    fixed = {name: value for name, value in question.fixed.items() if name not in SEARCHED}
    defaults = _defaults(question.fixed)
    most_rows = pinned.get("max_num_seqs", _most_rows(len(question.requests), defaults.max_num_seqs))
    lab = Lab(state, make_core, fixed, most_rows=most_rows, on_trial=lambda: timer.tell(_done(lab)))
    if lab.deployment is None:
        timer.stage("1 of 5, timing steps of the model on this machine")
        lab.fit(machine, shape)
    room, capacity, block = lab.room()
    requests, cut = fit(question.requests, room)
    lab.traffic = traffic = Traffic(requests, question.users, question.slo)
    findings = Findings(
        traffic=traffic,
        cut=cut,
        count=min(len(requests), _MOST_SIMULATED),
        by_rate=traffic.has_promises and traffic.users is None,
        tight=False,
    )
    slots = max(1, min(defaults.max_num_seqs, capacity // (-(-min(traffic.longest, room) // block) * block)))
    static = dataclasses.replace(defaults, batching="static", max_num_seqs=slots)
    findings.settings |= {"static": static, "equal": dataclasses.replace(defaults, max_num_seqs=slots)}
    findings.settings["default"] = defaults
    if state.deployment is None:
        _learn(findings, lab, timer)
    judge = Judge(lab, findings.count, by_rate=findings.by_rate)
    candidates = _search(findings, lab, judge, _space(pinned, most_rows), timer)
    _rounds(findings, lab, candidates, timer)
    _choose(findings, lab, judge, candidates, timer)
    for rows in sorted({*_space({}, most_rows).rows, findings.settings["chosen"].max_num_seqs}):
        setting = dataclasses.replace(findings.settings["chosen"], max_num_seqs=rows)
        findings.by_slots.append((rows, lab.simulate(setting, None, findings.count)))
    _conclude(findings, lab)
    return findings


def _learn(findings: Findings, lab: Lab, timer: _Timer) -> None:
    """The two baselines for real, on as many requests as the time permits, for the simulator to learn from."""
    settings = [findings.settings["static"], findings.settings["default"]]
    seconds = sum(lab.simulate(setting, None, findings.count).seconds for setting in settings)
    share = min(1.0, max(0.05, timer.left_until(_LEARN_UNTIL) / seconds))
    lab.learn(settings, max(1, round(share * findings.count)))


def _done(lab: Lab) -> str:
    return f"{lab.simulations} simulations, {lab.runs} real runs"


def _defaults(fixed: Mapping[str, Any]) -> Setting:
    scheduler = EngineConfig.from_flat(fixed).scheduler
    if scheduler.batching != "continuous":
        raise ConfigError(f"batching is what tune finds out, got {scheduler.batching!r}; leave it out")
    names = [field.name for field in dataclasses.fields(Setting)]
    return Setting(**{name: getattr(scheduler, name) for name in names})


def _most_rows(count: int, default: int) -> int:
    """More slots than requests are of no use."""
    most = 1
    while most < min(count, max(512, default)):
        most *= 2
    return max(most, default)


def _space(pinned: Mapping[str, Any], most_rows: int) -> Space:
    rows = [1 << power for power in range(2, most_rows.bit_length())] or [most_rows]
    every: dict[str, Sequence[Any]] = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": (256, 1024, 4096),
        "admission_watermark": (0.01, 0.05, 0.15, 0.3),
        "prefill_mode": ("mixed", "prefill_first", "decode_first", "separate", "auto"),
        "preemption_mode": ("auto", "recompute", "swap", "none"),
    }
    every |= {name: (value,) for name, value in pinned.items()}
    return Space(
        rows=every["max_num_seqs"],
        tokens=every["max_num_batched_tokens"],
        watermarks=every["admission_watermark"],
        prefill_modes=every["prefill_mode"],
        preemption_modes=every["preemption_mode"],
    )


# --- simulated -------------------------------------------------------------------------------------------------------


def _search(findings: Findings, lab: Lab, judge: Judge, space: Space, timer: _Timer) -> list[Setting]:
    """The best settings by simulation, best first; two of them, or one."""
    settings, count = findings.settings, findings.count
    timer.stage("2 of 5, static batches in the simulator")
    static_judge = Judge(lab, count, by_rate=findings.by_rate)
    static_judge.score(settings["static"], exact=True)
    for rows in space.rows:
        if timer.left_until(_SEARCH_UNTIL / 2) > 0:
            static_judge.score(dataclasses.replace(settings["static"], max_num_seqs=rows))
    settings["static_best"] = max(static_judge.scores, key=lambda setting: static_judge.scores[setting])
    findings.scores |= {name: static_judge.scores[settings[name]] for name in ("static", "static_best")}
    timer.stage("3 of 5, searching settings in the simulator")
    widest = dataclasses.replace(settings["default"], max_num_seqs=space.rows[-1])
    findings.tight = lab.simulate(widest, None, count).preemption_rate > 0
    if not findings.tight:
        space = dataclasses.replace(space, watermarks=space.watermarks[:1], preemption_modes=("auto",))
    start, deadline = settings["default"], _SEARCH_UNTIL
    if not search(space, judge, start, lambda: timer.left_until(deadline) <= 0):
        findings.notes.append(
            "The time limit ended the search before it was done; a longer one may find better settings."
        )
    for name in ("default", "equal"):
        findings.scores[name] = judge.score(settings[name], exact=True)
    lab.state.save()
    return _candidates(findings, lab, judge)


def _candidates(findings: Findings, lab: Lab, judge: Judge) -> list[Setting]:
    """Of those that are nearly as good as the best the one with the shortest waits, then another that preempts less."""
    scores = {setting: score for setting, score in judge.scores.items() if score.exact}
    ranked = sorted(scores, key=lambda setting: scores[setting], reverse=True)
    best = scores[ranked[0]]
    near = [each for each in ranked[:6] if scores[each].keeps and scores[each].value * _ALIKE >= best.value] or ranked[
        :1
    ]
    pace = findings.traffic.rate

    def wait(setting: Setting) -> tuple[float, int]:
        return round(lab.simulate(setting, pace, findings.count).e2el_p99, 2), setting.max_num_seqs

    first = min(near, key=wait)

    def preempted(setting: Setting) -> float:
        return lab.simulate(setting, None, findings.count).preemption_rate

    for other in ranked:
        far = abs(other.max_num_seqs / first.max_num_seqs - 1) > 0.15 or other.prefill_mode != first.prefill_mode
        alike = scores[other].keeps == best.keeps and preempted(other) <= 0.5 * preempted(first)
        if far and alike and other != findings.settings["default"]:
            return [first, other]
    return [first]


# --- real ------------------------------------------------------------------------------------------------------------


def _contestants(findings: Findings, candidates: Sequence[Setting]) -> list[Setting]:
    roles = ("static", "static_best", "equal", "default")
    return list(dict.fromkeys([*(findings.settings[role] for role in roles), *candidates]))


def _rounds(findings: Findings, lab: Lab, candidates: Sequence[Setting], timer: _Timer) -> None:
    """Real runs with all requests at once, side by side: in every round each setting once, in turned order."""
    timer.stage(f"4 of 5, real runs, {findings.traffic.crowd}")
    settings = _contestants(findings, candidates)
    done = sorted({(trial.count, trial.round) for trial in lab.state if trial.round is not None and trial.rate is None})
    count = done[0][0] if done else _full_count(findings, lab, settings, timer)
    findings.full_count = count

    def complete(number: int) -> bool:
        return all(lab.state.find(setting, None, count, number) is not None for setting in settings)

    longest = sum(lab.simulate(setting, None, findings.count).seconds for setting in settings) * count / findings.count
    while findings.rounds < _MOST_ROUNDS:
        number = findings.rounds
        if not complete(number):
            if timer.left_until(_ROUNDS_UNTIL) < longest:
                break
            lab.state.drop_round(count, number)
            begin = timer.spent()
            for place in range(len(settings)):
                if timer.left_until(_PACE_UNTIL) <= 0:
                    return
                lab.measure(settings[(place + number) % len(settings)], None, count, number)
            longest = timer.spent() - begin
        findings.rounds += 1
        if findings.rounds >= _ROUNDS:
            ratio = _ratio(findings, lab, candidates[0], findings.settings["static_best"])
            if ratio.high - ratio.low < _NARROW * ratio.mean:
                break


def _full_count(findings: Findings, lab: Lab, settings: Sequence[Setting], timer: _Timer) -> int:
    """So many requests that three rounds fit into the time, if the simulator is right; but enough for two batches."""
    seconds = sum(lab.simulate(setting, None, findings.count).seconds for setting in settings)
    share = timer.left_until(_ROUNDS_UNTIL) / (_ROUNDS * _SLACK * seconds)
    least = min(findings.count, 2 * findings.settings["static"].max_num_seqs)
    return max(least, min(findings.count, round(share * findings.count)))


def _runs(findings: Findings, lab: Lab, setting: Setting) -> list[Figures]:
    """Of each complete round."""
    runs = [lab.state.find(setting, None, findings.full_count, number) for number in range(findings.rounds)]
    return [trial.figures for trial in runs if trial is not None]


def _ratio(findings: Findings, lab: Lab, one: Setting, other: Setting) -> Ratio:
    pairs = zip(_runs(findings, lab, one), _runs(findings, lab, other), strict=True)
    return Ratio.of([a.output_tokens_per_second / b.output_tokens_per_second for a, b in pairs])


def _choose(findings: Findings, lab: Lab, judge: Judge, candidates: list[Setting], timer: _Timer) -> None:
    """The real runs decide between the candidates and the defaults; then come the runs that latencies are read from."""
    settings, default = findings.settings, findings.settings["default"]
    timer.stage("5 of 5, real runs at a given rate")
    rated = list(dict.fromkeys([*candidates, default]))
    if findings.by_rate:
        chosen = _confirm(findings, lab, judge, rated, timer)
    elif findings.rounds:
        rated = list(dict.fromkeys([*rated, settings["equal"]]))
        medians = {each: _median(_runs(findings, lab, each)) for each in rated}
        allowed = [each for each in rated if _holds(_runs(findings, lab, each))]
        chosen = max(allowed or rated[:1], key=lambda each: medians[each])
        if default in allowed and medians[default] * _ALIKE >= medians[chosen]:
            chosen = default  # nobody should have to keep a file of settings that change nothing
    else:
        chosen = rated[0]
    if chosen != rated[0] and chosen != default:
        findings.notes.append(
            f"The simulator preferred {rated[0].describe()}; in the real runs {chosen.describe()} did better, and they"
            " decide."
        )
    settings["chosen"], findings.scores["chosen"] = chosen, judge.score(chosen, exact=True)
    findings.pace = findings.traffic.rate or (
        (findings.confirmed_rate or findings.scores["chosen"].rate) if findings.by_rate else None
    )
    if findings.pace is not None:
        _paced(findings, lab, findings.pace, timer)


def _holds(runs: Sequence[Figures]) -> bool:
    """Whether few enough were preempted, and what was promised was kept."""
    kept = [each.goodput for each in runs if each.goodput is not None]
    few = statistics.fmean(each.preemption_rate for each in runs) < PREEMPTED
    return few and (not kept or statistics.fmean(kept) >= GOODPUT)


def _median(runs: Sequence[Figures]) -> float:
    return statistics.median(each.output_tokens_per_second for each in runs)


def _confirm(findings: Findings, lab: Lab, judge: Judge, rated: list[Setting], timer: _Timer) -> Setting:
    """The setting that keeps the promises at the highest rate on the real engine, and that rate."""
    highest = judge.scores[rated[0]].rate
    if highest is None:
        findings.notes.append("No setting keeps the promises for 99 of 100 requests, not even when few requests come.")
        return rated[0]
    for share in _STEPS_DOWN:
        rate = highest * share
        count = _paced_count(findings, timer, rate)
        if count is None or timer.left_until(_PACE_UNTIL) < 1.2 * count / rate:
            break
        for setting in rated if share == 1 else rated[:1]:
            if timer.left_until(_PACE_UNTIL) >= 1.2 * count / rate and not shortfall(lab.measure(setting, rate, count)):
                findings.confirmed_rate = rate
                return setting
    findings.notes.append("That the promises are kept at the highest rate is simulated; no real run confirmed it.")
    return rated[0]


def _paced_count(findings: Findings, timer: _Timer, rate: float) -> int | None:
    """Requests that fit into one run at a rate; None when they would be too few to say anything."""
    count = min(findings.count, int(rate * _ONE_PACED * timer.limit))
    return count if count >= min(_LEAST_PACED, findings.count) else None


def _paced(findings: Findings, lab: Lab, pace: float, timer: _Timer) -> None:
    count = _paced_count(findings, timer, pace)
    findings.paced_count = count or findings.count
    for role in ("chosen", "static_best", "default", "static", "equal"):
        setting = findings.settings[role]
        expected = lab.simulate(setting, pace, findings.paced_count).seconds
        if count is not None and timer.left_until(_PACE_UNTIL) > 1.2 * expected:
            lab.measure(setting, pace, count)


# --- concluded -------------------------------------------------------------------------------------------------------


def _conclude(findings: Findings, lab: Lab) -> None:
    settings, notes = findings.settings, findings.notes
    if findings.cut:
        notes.append(f"{findings.cut:,} requests are too long for the model or its KV cache; they were shortened.")
    if findings.count < len(findings.traffic.requests):
        notes.append(
            f"Only the first {findings.count:,} of {len(findings.traffic.requests):,} requests were used; chairlift"
            " trace sample draws fewer that stand for all."
        )
    if not findings.rounds:
        notes.append("There was no time for real runs: all figures are simulated. Raise --time-limit.")
        return
    if findings.rounds < _ROUNDS:
        notes.append(
            "There was no time for three rounds of real runs, so the intervals say little. Raise --time-limit."
        )
    findings.ratios = {
        "static_best": min(
            (_ratio(findings, lab, settings["chosen"], settings[role]) for role in ("static_best", "static")),
            key=lambda ratio: ratio.mean,
        ),
        "default": _ratio(findings, lab, settings["chosen"], settings["default"]),
        "equal": _ratio(findings, lab, settings["equal"], settings["static"]),
    }
    for role, setting in settings.items():
        simulated = lab.simulate(setting, None, findings.full_count).output_tokens_per_second
        findings.accuracy[role] = simulated / _median(_runs(findings, lab, setting))
    worst = max(findings.accuracy.values(), key=lambda ratio: max(ratio, 1 / ratio))
    if max(worst, 1 / worst) > 1 + _OFF:
        notes.append(
            f"The simulator was off by up to {max(worst, 1 / worst) - 1:.0%} here, so what is only simulated is worth"
            " little. Was the machine quiet?"
        )
