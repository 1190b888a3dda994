"""``chairlift tune``: finds the best settings for some traffic, and measures the gain of continuous batching.

The simulator is fitted to measured steps of this machine and tries many settings. The real engine then runs the few
best settings, in turn. Where simulation and real runs disagree, the real runs decide. Only results of real runs are
reported as measured. If the simulator does not fit this machine, its results are not used, and the settings are tried
in real runs only (``tune_measured``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.engine.clock import Clock
from chairlift.errors import ConfigError
from chairlift_lab.bench.serve_run import fit
from chairlift_lab.bench.tune_lab import TRUSTED, Lab, LabTraffic, MakeCore
from chairlift_lab.bench.tune_measured import longest_run, measured_candidates, measured_score
from chairlift_lab.bench.tune_search import GOODPUT, PREEMPTED, Judge, SettingScore, Space, search, shortfall
from chairlift_lab.bench.tune_state import FIRST_LOOK, Setting, State, StoredFigures, Trial
from chairlift_lab.bench.verdict import MIN_ROUNDS, Ratio, RatioEstimate, RunSample
from chairlift_lab.replay.machines import ModelShape
from chairlift_lab.replay.served import KEEPING
from chairlift_lab.workload.trace import TracedRequest

__all__ = [
    *("REPEATS", "SEARCHED", "Confirmed", "Findings", "Question", "Refuted"),
    *("capacity_of", "claimed_rate", "refuted_by", "tune"),
]

SEARCHED: Final = tuple(field.name for field in dataclasses.fields(Setting) if field.name not in ("batching", "drafts"))
"""Names of the settings that are searched, unless the user gives them."""

_MOST_SIMULATED: Final = 2000
_LEAST_PACED: Final = 100
_LEARN_UNTIL = 0.12
_SEARCH_UNTIL = 0.35
_ROUNDS_UNTIL = 0.65
_PACE_UNTIL = 0.96
_ONE_PACED = 0.1
"""Fractions of the time limit: the end of each part of the search, and the maximum length of one run at a given
rate."""
_ROUNDS: Final = 8
"""Number of rounds. It is fixed before the first one: if it depended on the results, the intervals would be too
narrow."""
REPEATS: Final = 3
"""Number of real runs that must meet the targets at a rate before the rate is claimed."""
_PACED_SECONDS: Final = 5.0
"""Minimum time over which the requests of such a run arrive."""
_OFF: Final = 0.2
_ALIKE: Final = 1.02
_SLACK: Final = 1.15
_MOST_RATES: Final = 6
_DOWN = 0.85
_BELOW = 0.95
"""Factors that give the next rate after a real run failed: (factor of the failed rate, factor of the throughput of the
failed run). The smaller product is tried next."""
_CHECKED: Final = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Input of a tuning: traffic, latency targets ("promises"), fixed settings and a time limit."""

    requests: Sequence[TracedRequest]
    users: int | None = None
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Name of a latency field of TracedRequest -> target in ms."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that the user gives, name -> value. They are not searched."""
    time_limit: float = 600.0
    """Maximum duration of the tuning, in seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Confirmed:
    """A rate at which several real runs of a setting met the latency targets."""

    rate: float
    """Claimed rate in requests per second: the smallest of the rate of arrivals, the requests that each run completed
    per second, and the measured throughput."""
    arrivals: float
    """Number of requests per second that arrived in the runs."""
    runs: int
    seconds: float
    """Duration of the shortest run."""
    high: float
    """Upper end of the interval of the measured throughput. No rate above it can be kept up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refuted:
    """A real run that missed its latency targets, and its request rate."""

    setting: str
    """Text that describes the settings of the run."""
    rate: float
    """Number of requests per second that arrived in the run."""
    completed: float
    """Number of requests per second that ended in the run."""
    goodput: float | None
    preemption_rate: float
    keeping: float
    """Number of ended requests divided by the number of arrived requests, in the second half of the arrivals."""


@dataclasses.dataclass(kw_only=True)
class Findings:
    """Results of a tuning.

    Settings have roles: ``static`` (static batches with as many slots as always fit into memory), ``static_best`` (the
    best static batches), ``equal`` (continuous batching with the slots of ``static``), ``default`` and ``chosen``. If
    the user gave ``speculative_config``, there are also ``other`` (``chosen`` with drafts instead of none, or the
    reverse) and ``static_plain`` (``static_best`` without drafts).
    """

    traffic: LabTraffic
    cut: int
    """Number of requests that were shortened because the model or its KV cache has no room for them."""
    count: int
    """Number of requests in a simulation."""
    by_rate: bool
    """Whether settings were compared by the highest rate at which they meet the latency targets."""
    tight: bool
    """Whether the KV cache is too small for some settings, so that requests are preempted."""
    contestants: int = 1
    """Number of settings with continuous batching that ran in the rounds, besides the defaults."""
    drafts: bool = False
    """Whether the user gave ``speculative_config``, so that settings are compared with and without drafts."""
    settings: dict[str, Setting] = dataclasses.field(default_factory=dict)
    scores: dict[str, SettingScore] = dataclasses.field(default_factory=dict)
    """Role -> simulated score, or the score of a real run if the simulator is not trusted."""
    trusted: bool = True
    """Whether the simulator fits this machine now. If not, no simulated result is used."""
    fit_error: float | None = None
    """Median relative error of the simulator's cost model, on real steps of this traffic."""
    confirmed: Confirmed | None = None
    """Highest rate at which real runs of the chosen settings met the targets, see :func:`claimed_rate`."""
    met_once: tuple[float, int] | None = None
    """(rate, number of real runs that met the targets at this rate), if these runs were too few for a claim."""
    refuted: list[Refuted] = dataclasses.field(default_factory=list)
    """Real runs of the chosen settings and of the candidates that missed a target."""
    full_count: int = 0
    """Number of requests in each real run in which all requests arrive at once."""
    rounds: int = 0
    pace: float | None = None
    """Number of requests that arrive per second in the runs that measure latencies. None: all requests arrive at
    once."""
    paced_count: int = 0
    ratios: dict[str, Ratio] = dataclasses.field(default_factory=dict)
    """Ratios of throughputs when all requests arrive at once. ``default``: chosen settings divided by default settings.
    ``static_best``: chosen settings divided by the better static settings. ``equal``: settings ``equal`` divided by
    settings ``static``. ``drafts``: chosen settings with drafts divided by the same without. ``static_drafts``: the
    better static settings with drafts divided by the same without."""
    latency: Ratio | None = None
    """p99 latency of the chosen settings divided by that of ``static_best``, in the runs at the rate ``pace``, or with
    all requests at once. None if both did not run."""
    accuracy: dict[str, float] = dataclasses.field(default_factory=dict)
    """Role -> simulated throughput divided by measured throughput."""
    by_slots: list[tuple[int, StoredFigures]] = dataclasses.field(default_factory=list)
    """(max_num_seqs, results) of the chosen settings with other numbers of slots and all requests at once. The results
    are simulated, or measured if the simulator is not trusted."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Remarks for the reader of the report."""

    def to_dict(self) -> dict[str, Any]:
        """The results as data for JSON, without the traffic."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["traffic"], fields["by_slots"]
        fields["refuted"] = [dataclasses.asdict(each) for each in self.refuted]
        fields |= {
            name: None if value is None else dataclasses.asdict(value)
            for name, value in (("confirmed", self.confirmed), ("latency", self.latency))
        }
        for name in ("settings", "ratios"):
            fields[name] = {role: dataclasses.asdict(value) for role, value in fields[name].items()}
        return fields | {"scores": {role: score._asdict() for role, score in self.scores.items()}}


class _Timer:
    """Measures the time since the start of the tuning. It reports the stage and the seconds left to ``say``."""

    def __init__(self, clock: Clock, limit: float, say: Callable[[str], None]) -> None:
        self._clock = clock
        self._begin = clock.now()
        self.limit = limit
        self._say = say
        self._stage = ""

    def spent(self) -> float:
        return self._clock.now() - self._begin

    def left_until(self, share: float) -> float:
        """Seconds until this fraction of the time limit is used up."""
        return share * self.limit - self.spent()

    def stage(self, text: str) -> None:
        self._stage = text
        self.tell("")

    def tell(self, more: str) -> None:
        remaining = max(0.0, self.limit - self.spent())
        self._say(f"{self._stage}{': ' if more else ''}{more} ({remaining:.0f} s left)")


def tune(
    question: Question,
    state: State,
    make_core: MakeCore,
    *,
    machine: str,
    shape: ModelShape,
    clock: Clock,
    say: Callable[[str], None],
    other_load: Callable[[], float] = lambda: 0.0,
) -> Findings:
    """Tune the settings for the traffic of ``question``. Runs that ``state`` already contains are not repeated.

    ``other_load`` returns the share of the machine that other programs used since the previous call.

    Raises ConfigError for an invalid question. A KeyboardInterrupt loses only the current run, because ``state`` is
    saved after each run.
    """
    timer = _Timer(clock, question.time_limit, say)
    pinned = {name: value for name, value in question.fixed.items() if name in SEARCHED}
    fixed = {name: value for name, value in question.fixed.items() if name not in SEARCHED}
    defaults = _defaults(question.fixed)
    max_rows = pinned.get("max_num_seqs", _max_rows(len(question.requests), defaults.max_num_seqs))
    lab = Lab(
        state, make_core, fixed, max_rows=max_rows, on_trial=lambda: timer.tell(_done(lab)), other_load=other_load
    )
    if lab.deployment is None:
        timer.stage("1 of 5, timing steps of the model on this machine")
        lab.fit(machine, shape)
    room, capacity, block = lab.room()
    requests, cut = fit(question.requests, room)
    lab.traffic = traffic = LabTraffic(requests, question.users, question.slo)
    findings = Findings(
        traffic=traffic,
        cut=cut,
        count=min(len(requests), _MOST_SIMULATED),
        by_rate=traffic.has_promises and traffic.users is None,
        tight=False,
        drafts=bool(question.fixed.get("speculative_config")),
    )
    slots = max(1, min(defaults.max_num_seqs, capacity // (-(-min(traffic.longest, room) // block) * block)))
    static = dataclasses.replace(defaults, batching="static", max_num_seqs=slots)
    findings.settings |= {"static": static, "equal": dataclasses.replace(defaults, max_num_seqs=slots)}
    findings.settings["default"] = defaults
    if state.deployment is None:
        _learn(findings, lab, timer)
    elif state.fit_error is None:
        lab.check(defaults, min(findings.count, _CHECKED))
    findings.trusted = lab.trusted
    findings.fit_error = state.fit_error
    judge = Judge(lab, findings.count, by_rate=findings.by_rate)
    space = _space(pinned, max_rows, _evictions(question.fixed) if traffic.has_sessions else ())
    candidates = _search(findings, lab, judge, space, timer) if lab.trusted else _look(findings, lab, space, timer)
    _rounds(findings, lab, candidates, timer)
    if not lab.trusted:
        for setting in (*findings.settings.values(), *candidates):
            if longest_run(lab.state, setting) is None:
                lab.measure(setting, None, min(findings.count, _CHECKED), FIRST_LOOK)
    _best_static(findings, lab)
    _choose(findings, lab, candidates, timer)
    findings.trusted = lab.trusted
    findings.fit_error = state.fit_error
    if not lab.trusted:
        findings.scores = {role: measured_score(lab, setting) for role, setting in findings.settings.items()}
    _by_slots(findings, lab, _space({}, max_rows).rows)
    findings.latency = _latency(findings, lab)
    _conclude(findings, lab)
    return findings


def _learn(findings: Findings, lab: Lab, timer: _Timer) -> None:
    """Run the static and the default settings on the real engine, with as many requests as the time permits, to fit the
    simulator."""
    settings = [findings.settings["static"], findings.settings["default"]]
    seconds = sum(lab.simulate(setting, None, findings.count).seconds for setting in settings)  # estimated duration
    share = min(1.0, max(0.05, timer.left_until(_LEARN_UNTIL) / seconds))
    lab.learn(settings, max(1, round(share * findings.count)))


def _done(lab: Lab) -> str:
    return f"{lab.simulations} simulations, {lab.runs} real runs"


def _defaults(fixed: Mapping[str, Any]) -> Setting:
    config = EngineConfig.from_flat(fixed)
    scheduler = config.scheduler
    if scheduler.batching != "continuous":
        cause = f"got {scheduler.batching!r}" if scheduler.preset is None else f"preset {scheduler.preset!r} sets it"
        raise ConfigError(f"batching is what tune finds out, {cause}; leave it out")
    values = {**dataclasses.asdict(config.cache), **dataclasses.asdict(scheduler)}
    return Setting(**{name: values[name] for name in ("batching", *SEARCHED)})


def _max_rows(count: int, default: int) -> int:
    """Largest number of slots to try: about the number of requests, since more slots would stay empty."""
    rows = 1
    while rows < min(count, max(512, default)):
        rows *= 2
    return max(rows, default)


def _evictions(fixed: Mapping[str, Any]) -> list[str]:
    """Rules of eviction to try for chats. A rule that the given classes of service do not permit is left out."""
    rules = ["auto"]
    for rule in ("lru", "tlru", "lease"):
        with contextlib.suppress(ConfigError):
            EngineConfig.from_flat({**fixed, "cache_eviction": rule})
            rules.append(rule)
    return rules


def _space(pinned: Mapping[str, Any], max_rows: int, evictions: Sequence[str] = ()) -> Space:
    rows = [1 << power for power in range(2, max_rows.bit_length())] or [max_rows]
    every: dict[str, Sequence[Any]] = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": (256, 1024, 4096),
        "admission_watermark": (0.01, 0.05, 0.15, 0.3),
        "prefill_mode": ("mixed", "prefill_first", "decode_first", "separate", "auto"),
        "preemption_mode": ("auto", "recompute", "swap", "none"),
        "cache_eviction": evictions or ("auto",),
    }
    every |= {name: (value,) for name, value in pinned.items()}
    return Space(
        rows=every["max_num_seqs"],
        tokens=every["max_num_batched_tokens"],
        watermarks=every["admission_watermark"],
        prefill_modes=every["prefill_mode"],
        preemption_modes=every["preemption_mode"],
        evictions=every["cache_eviction"],
    )


# --- simulated -------------------------------------------------------------------------------------------------------


def _search(findings: Findings, lab: Lab, judge: Judge, space: Space, timer: _Timer) -> list[Setting]:
    """Find the best one or two settings by simulation. The best setting comes first."""
    settings = findings.settings
    count = findings.count
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
    start = settings["default"]
    deadline = _SEARCH_UNTIL
    if not search(space, judge, start, lambda: timer.left_until(deadline) <= 0):
        findings.notes.append(
            "The time limit ended the search before it was done; a longer one may find better settings."
        )
    for name in ("default", "equal"):
        findings.scores[name] = judge.score(settings[name], exact=True)
    lab.state.save()
    return _candidates(findings, lab, judge)


def _look(findings: Findings, lab: Lab, space: Space, timer: _Timer) -> list[Setting]:
    """Find the best one or two settings by real runs. The best setting comes first."""
    timer.stage("2 of 5, real runs of several settings, because the simulator does not fit this machine")
    count = min(findings.count, max(2 * findings.settings["static"].max_num_seqs, _CHECKED))
    candidates, scores = measured_candidates(
        findings.settings, lab, space, count, lambda: timer.left_until(_SEARCH_UNTIL)
    )
    findings.scores |= scores
    findings.tight = any(trial.figures.preemption_rate > 0 for trial in lab.state if trial.round is not None)
    return candidates


def _candidates(findings: Findings, lab: Lab, judge: Judge) -> list[Setting]:
    """Choose one or two settings for real runs, by their simulated scores.

    The first setting has the lowest p99 latency among the settings whose score is close to the best. The second
    setting, if any, differs clearly from the first and preempts at most half as many requests.
    """
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
    found = list(dict.fromkeys([*(findings.settings[role] for role in roles), *candidates]))
    return found + [_without(each) for each in found if findings.drafts]


def _without(setting: Setting) -> Setting:
    """The setting without drafts."""
    return dataclasses.replace(setting, drafts=False)


def _rounds(findings: Findings, lab: Lab, candidates: Sequence[Setting], timer: _Timer) -> None:
    """Run the settings on the real engine with all requests at once, for several rounds.

    Every round runs each setting once. The order is rotated from round to round.
    """
    timer.stage(f"4 of 5, real runs, {findings.traffic.crowd}")
    settings = _contestants(findings, candidates)
    findings.contestants = sum(each.batching == "continuous" for each in settings) - 1
    done = sorted({(trial.count, trial.round) for trial in lab.state if (trial.round or 0) >= 0 and trial.beside})
    count = done[0][0] if done else _full_count(findings, lab, settings, timer)
    findings.full_count = count

    def complete(number: int) -> bool:
        return all(lab.state.find(setting, None, count, number) is not None for setting in settings)

    longest = sum(lab.expected_seconds(setting, None, findings.count) for setting in settings) * count / findings.count
    while findings.rounds < _ROUNDS:
        number = findings.rounds
        if not complete(number):
            if timer.left_until(_ROUNDS_UNTIL) < longest:
                break
            lab.state.drop_round(count, number)
            begin = timer.spent()
            for index in range(len(settings)):
                if timer.left_until(_PACE_UNTIL) <= 0:
                    return
                lab.measure(settings[(index + number) % len(settings)], None, count, number)
            longest = timer.spent() - begin
        findings.rounds += 1


def _full_count(findings: Findings, lab: Lab, settings: Sequence[Setting], timer: _Timer) -> int:
    """Number of requests per run, chosen so that all rounds fit into the time. A run has at least two static
    batches."""
    seconds = sum(lab.expected_seconds(setting, None, findings.count) for setting in settings)
    share = timer.left_until(_ROUNDS_UNTIL) / (_ROUNDS * _SLACK * seconds)
    minimum = min(findings.count, 2 * findings.settings["static"].max_num_seqs)
    return max(minimum, min(findings.count, round(share * findings.count)))


def _trials(findings: Findings, lab: Lab, setting: Setting) -> list[Trial]:
    """The real runs of a setting, one per complete round."""
    runs = [lab.state.find(setting, None, findings.full_count, number) for number in range(findings.rounds)]
    return [trial for trial in runs if trial is not None]


def _runs(findings: Findings, lab: Lab, setting: Setting) -> list[StoredFigures]:
    """Results of the real runs of a setting, one per complete round."""
    return [trial.figures for trial in _trials(findings, lab, setting)]


def _ratio(findings: Findings, lab: Lab, one: Setting, other: Setting, comparisons: int = 1) -> Ratio:
    """Ratio of the throughputs of two settings. ``one`` was chosen among so many settings by these runs."""
    mine, theirs = (
        [trial.sample("output_tokens_per_second") for trial in _trials(findings, lab, each)] for each in (one, other)
    )
    return Ratio.of(mine, theirs, comparisons)


def capacity_of(state: State, setting: Setting) -> RatioEstimate | None:
    """Requests per second of a setting when all requests arrive at once, in the real runs. None without such a run."""
    trials = [each for each in state if each.setting == setting and each.rate is None and each.round is not None]
    chosen = [each for each in trials if each.beside] or trials
    samples = [each.sample("requests_per_second") for each in chosen if each.figures.requests]
    return RatioEstimate.of(samples) if samples else None


def _best_static(findings: Findings, lab: Lab) -> None:
    """Choose ``static_best``: the one of the two static settings that had the higher throughput in the real runs."""
    if findings.rounds:
        settings = findings.settings
        settings["static_best"] = max(
            (settings[role] for role in ("static_best", "static")), key=lambda each: _median(_runs(findings, lab, each))
        )


def _choose(findings: Findings, lab: Lab, candidates: list[Setting], timer: _Timer) -> None:
    """Choose between the candidates and the defaults by real runs, then make the runs that measure latencies."""
    settings = findings.settings
    default = findings.settings["default"]
    timer.stage("5 of 5, real runs at a given rate")
    rated = list(dict.fromkeys([*candidates, default]))
    if findings.by_rate and findings.drafts and findings.rounds:
        rated = [max(each, _without(each), key=lambda each: _median(_runs(findings, lab, each))) for each in rated]
    if findings.by_rate:
        chosen = _confirm(findings, lab, rated, _first_rate(findings, lab, rated[0]), timer)
    elif findings.rounds:
        rated = list(dict.fromkeys([*rated, settings["equal"]]))
        rated += [_without(each) for each in rated if findings.drafts]
        chosen = _fastest(findings, lab, rated)
    else:
        chosen = rated[0]
    with_drafts = dataclasses.replace(chosen, drafts=True)  # the simulator says nothing about drafts
    if with_drafts not in (dataclasses.replace(rated[0], drafts=True), default) and findings.trusted:
        findings.notes.append(
            f"The simulator preferred {rated[0].describe()}; in the real runs {chosen.describe()} did better, and they"
            " decide."
        )
    settings["chosen"], findings.scores["chosen"] = chosen, _score(findings, lab, chosen)
    if findings.drafts and findings.rounds:
        settings["other"] = dataclasses.replace(chosen, drafts=not chosen.drafts)
        settings["static_plain"] = _without(settings["static_best"])
        findings.scores |= {role: _score(findings, lab, settings[role]) for role in ("other", "static_plain")}
    confirmed = claimed_rate(lab.state, lab.traffic, chosen)
    findings.pace = findings.traffic.rate or None
    if findings.pace is None and findings.by_rate:
        findings.pace = confirmed.arrivals if confirmed else findings.scores["chosen"].rate
    if findings.pace is not None:
        _paced(findings, lab, findings.pace, timer)
    if findings.by_rate:
        if confirmed is not None and claimed_rate(lab.state, lab.traffic, chosen) is None:  # refuted by a later run
            _confirm(findings, lab, [chosen], confirmed.arrivals * _DOWN, timer)
        findings.confirmed = claimed_rate(lab.state, lab.traffic, chosen)
        findings.refuted = refuted_by(lab, [chosen, *rated])
        met = _met(lab.state, lab.traffic, chosen)
        highest = max(met, default=None)
        findings.met_once = None if findings.confirmed is not None or highest is None else (highest, len(met[highest]))


def _fastest(findings: Findings, lab: Lab, rated: Sequence[Setting]) -> Setting:
    """Choose the setting with the highest throughput in the rounds. Settings must have a gain that may be claimed over
    the defaults, unless the defaults miss the targets or preempt many requests."""
    default = findings.settings["default"]
    medians = {each: _median(_runs(findings, lab, each)) for each in rated}
    allowed = [each for each in rated if _holds(_runs(findings, lab, each))]
    best = max(allowed or rated[:1], key=lambda each: medians[each])
    if default in allowed and best != default:
        gain = _ratio(findings, lab, best, default, _others(findings))
        return best if gain.larger else default
    return best


def _others(findings: Findings) -> int:
    """Number of settings from which the chosen one is chosen by the rounds, besides the defaults."""
    return max(1, findings.contestants)


def _score(findings: Findings, lab: Lab, setting: Setting) -> SettingScore:
    """Score of a setting by simulation, or by its longest real run if the simulator is not trusted."""
    if lab.trusted:
        return Judge(lab, findings.count, by_rate=findings.by_rate).score(setting, exact=True)
    return measured_score(lab, setting)


def _holds(runs: Sequence[StoredFigures]) -> bool:
    """Whether the results of ``runs`` meet, on average, the latency targets and the limit on preemptions."""
    goodputs = [each.goodput for each in runs if each.goodput is not None]
    few_preempted = statistics.fmean(each.preemption_rate for each in runs) < PREEMPTED
    return few_preempted and (not goodputs or statistics.fmean(goodputs) >= GOODPUT)


def _median(runs: Sequence[StoredFigures]) -> float:
    return statistics.median(each.output_tokens_per_second for each in runs)


def _confirm(findings: Findings, lab: Lab, rated: list[Setting], rate: float | None, timer: _Timer) -> Setting:
    """Find the setting that meets the latency targets at the highest rate on the real engine.

    ``rate`` is tried first. After a failed run, the next rate is lower than the failed rate and lower than the
    throughput of the failed run.
    """
    if rate is None:
        return rated[0]
    for attempt in range(_MOST_RATES):
        count = _paced_count(findings, timer, rate)
        if count is None:
            break
        lower = rate * _DOWN
        for setting in rated if attempt == 0 else rated[:1]:
            missed = _repeat(findings, lab, setting, rate, count, timer)
            if missed is None:
                return rated[0] if attempt else setting
            if not missed:
                return setting
            if setting == rated[0]:
                lower = min(lower, _BELOW * missed[-1].requests_per_second)
        rate = lower
    return rated[0]


def _repeat(
    findings: Findings, lab: Lab, setting: Setting, rate: float, count: int, timer: _Timer
) -> list[StoredFigures] | None:
    """Run a setting at a rate until a run misses the targets, or :data:`REPEATS` runs met them.

    Returns the results of the runs that missed the targets. None if there was no time for all runs.
    """
    for number in range(REPEATS):
        known = lab.state.find(setting, rate, count, number)
        if known is None and timer.left_until(_PACE_UNTIL) < 1.2 * count / rate:
            return None
        figures = lab.measure(setting, rate, count, number)
        if shortfall(figures):
            return [figures]
    return []


def _first_rate(findings: Findings, lab: Lab, setting: Setting) -> float | None:
    """First rate to try: from the simulator, but below the throughput of real runs with all requests at once."""
    if not lab.trusted:
        runs = [each for each in lab.state if each.setting == setting and each.rate is None and each.round is not None]
        highest = max((each.figures.requests_per_second for each in runs), default=None)
        return None if highest is None else _BELOW * highest
    rate = _score(findings, lab, setting).rate
    capacity = capacity_of(lab.state, setting)
    if rate is None:
        findings.notes.append("No setting meets the targets for 99 of 100 requests, even at a low rate.")
        return None
    return rate if capacity is None else min(rate, _BELOW * capacity.low)


def _paced_count(findings: Findings, timer: _Timer, rate: float) -> int | None:
    """Number of requests for one run at a rate, limited by the time. None if the time allows too few requests."""
    enough = findings.traffic.enough(rate, findings.count, _PACED_SECONDS)
    count = min(enough, int(rate * _ONE_PACED * timer.limit))
    return count if count >= min(_LEAST_PACED, findings.count) else None


def _met(state: State, traffic: LabTraffic, setting: Setting) -> dict[float, list[Trial]]:
    """Rate -> real runs of the setting that met the latency targets at this rate.

    A run must be long enough to show a backlog, and no real run of the setting at this or a lower rate may have missed
    the targets.
    """
    runs = [each for each in state if each.setting == setting and each.round is not None]
    broken = min((each.rate for each in runs if each.rate and shortfall(each.figures)), default=math.inf)
    found: dict[float, list[Trial]] = {}
    for each in runs:
        if each.rate is not None and each.rate < broken and each.count >= traffic.enough(each.rate, 1, _PACED_SECONDS):
            found.setdefault(each.rate, []).append(each)
    return found


def claimed_rate(state: State, traffic: LabTraffic, setting: Setting) -> Confirmed | None:
    """Highest rate at which :data:`REPEATS` real runs of the setting met the latency targets. None if there is no such
    rate. The claimed rate is never above the measured throughput of the setting."""
    capacity = capacity_of(state, setting)
    claims = [
        Confirmed(
            rate=min(rate, capacity.low if capacity else rate, *(each.figures.requests_per_second for each in runs)),
            arrivals=rate,
            runs=len(runs),
            seconds=min(each.figures.seconds for each in runs),
            high=capacity.high if capacity else math.inf,
        )
        for rate, runs in _met(state, traffic, setting).items()
        if len(runs) >= REPEATS
    ]
    return max(claims, key=lambda each: each.rate, default=None)


def refuted_by(lab: Lab, settings: Sequence[Setting]) -> list[Refuted]:
    """Real runs of ``settings`` at a given rate that missed their latency targets. The run with the highest rate comes
    first."""
    runs = [trial for trial in lab.state if trial.round is not None and trial.setting in set(settings)]
    found = [
        Refuted(
            setting=trial.setting.describe(),
            rate=trial.rate,
            completed=trial.figures.requests_per_second,
            goodput=trial.figures.goodput,
            preemption_rate=trial.figures.preemption_rate,
            keeping=trial.figures.keeping,
        )
        for trial in runs
        if trial.rate is not None and shortfall(trial.figures)
    ]
    return sorted(found, key=lambda each: -each.rate)


def _paced(findings: Findings, lab: Lab, pace: float, timer: _Timer) -> None:
    """Make the runs at a given rate, which measure latencies. The two sides of the verdict run in several rounds."""
    count = _paced_count(findings, timer, pace)
    findings.paced_count = count or findings.count
    roles = ("chosen", "other", "static_best", "default", "static", "equal", "static_plain")
    settings = list(dict.fromkeys(findings.settings[role] for role in roles if role in findings.settings))
    sides = list(dict.fromkeys(findings.settings[role] for role in ("chosen", "static_best")))
    for number in range(MIN_ROUNDS):
        turn = settings
        if number:
            turn = sides if number % 2 else sides[::-1]
        for setting in turn:
            expected = lab.expected_seconds(setting, pace, findings.paced_count)
            known = lab.state.find(setting, pace, findings.paced_count, number) is not None
            if count is not None and (known or timer.left_until(_PACE_UNTIL) > 1.2 * expected):
                lab.measure(setting, pace, count, number)


def _by_slots(findings: Findings, lab: Lab, rows: Sequence[int]) -> None:
    """Fill ``Findings.by_slots``: results of the chosen settings with other numbers of slots."""
    chosen = findings.settings["chosen"]
    for slots in sorted({*rows, chosen.max_num_seqs}):
        setting = dataclasses.replace(chosen, max_num_seqs=slots)
        if lab.trusted:
            findings.by_slots.append((slots, lab.simulate(setting, None, findings.count)))
        elif (trial := longest_run(lab.state, setting)) is not None:
            findings.by_slots.append((slots, trial.figures))


def _latency(findings: Findings, lab: Lab) -> Ratio | None:
    """p99 latencies of the chosen settings divided by those of the best static batches, in the same rounds."""
    sides = (findings.settings["chosen"], findings.settings["static_best"])
    paced = findings.pace is not None
    rate, count = (findings.pace, findings.paced_count) if paced else (None, findings.full_count)
    pairs: list[tuple[RunSample, RunSample]] = []
    for number in range(MIN_ROUNDS if paced else findings.rounds):
        mine, theirs = (lab.state.find(each, rate, count, number) for each in sides)
        if mine is not None and theirs is not None and theirs.figures.e2el_p99 > 0 < mine.figures.e2el_p99:
            pairs.append((mine.sample("e2el_p99"), theirs.sample("e2el_p99")))
    if not pairs:
        return None
    rivals = 1 if paced else _others(findings)  # the runs at a rate did not choose the settings
    return Ratio.of([mine for mine, _ in pairs], [theirs for _, theirs in pairs], rivals)


# --- conclusions -----------------------------------------------------------------------------------------------------


def _conclude(findings: Findings, lab: Lab) -> None:
    settings = findings.settings
    notes = findings.notes
    if findings.cut:
        notes.append(f"{findings.cut:,} requests are too long for the model or its KV cache; they were shortened.")
    if findings.count < len(findings.traffic.requests):
        notes.append(
            f"Only the first {findings.count:,} of {len(findings.traffic.requests):,} requests were used; chairlift"
            " trace sample draws a smaller sample of the whole trace."
        )
    if not findings.trusted:
        notes.append(
            f"The step model is off by {findings.fit_error or 0.0:.0%} (median) on this machine now, more than"
            f" {TRUSTED:.0%}: no result here is simulated, and fewer settings were tried. Does the machine run other"
            " programs?"
        )
    if findings.drafts and findings.trusted:
        notes.append("The simulator makes no drafts: simulated values are those of settings without drafts.")
    _tell_of_rates(findings)
    if not findings.rounds:
        notes.append(
            "There was no time for a round of real runs side by side"
            + (": throughputs are simulated, and marked with ~." if findings.trusted else ", so there are no ratios.")
            + " Raise --time-limit."
        )
        return
    if findings.rounds < _ROUNDS:
        notes.append(
            f"There was no time for {_ROUNDS} rounds of real runs, so the intervals are wide. Raise --time-limit."
        )
    others = _others(findings)
    findings.ratios = {
        "static_best": min(
            (_ratio(findings, lab, settings["chosen"], settings[role], others) for role in ("static_best", "static")),
            key=lambda ratio: ratio.ratio,
        ),
        "default": _ratio(findings, lab, settings["chosen"], settings["default"], others),
        "equal": _ratio(findings, lab, settings["equal"], settings["static"]),
    }
    if findings.drafts:
        drafted = dataclasses.replace(settings["chosen"], drafts=True)
        findings.ratios["drafts"] = _ratio(findings, lab, drafted, _without(drafted))
        findings.ratios["static_drafts"] = _ratio(findings, lab, settings["static_best"], settings["static_plain"])
    if not findings.trusted:
        return
    for role, setting in settings.items():
        if findings.drafts and setting.drafts:
            continue
        simulated = lab.simulate(setting, None, findings.full_count).output_tokens_per_second
        findings.accuracy[role] = simulated / _median(_runs(findings, lab, setting))
    worst = max(findings.accuracy.values(), key=lambda ratio: max(ratio, 1 / ratio))
    if max(worst, 1 / worst) > 1 + _OFF:
        notes.append(
            f"The simulator was off by up to {max(worst, 1 / worst) - 1:.0%} here, so simulated results are not"
            " reliable. Did the machine run other programs?"
        )


def _tell_of_rates(findings: Findings) -> None:
    """Add notes about the rates at which real runs missed the targets, and a note if no rate was confirmed."""
    for each in findings.refuted[:_MOST_RATES]:
        kept = "" if each.goodput is None else f" the targets were met for {each.goodput:.1%} of the requests,"
        preempted = f" {each.preemption_rate:.1%} were preempted," if each.preemption_rate > PREEMPTED else ""
        grew = f" {each.keeping:.0%} as many requests ended as arrived," if each.keeping < KEEPING else ""
        findings.notes.append(
            f"Refuted by a real run: at {each.rate:.3g} requests/s,{kept}{preempted}{grew} and {each.completed:.3g}"
            f" were completed per second ({each.setting})."
        )
    if findings.by_rate and findings.confirmed is None:
        findings.notes.append(
            f"No rate was confirmed: that takes {REPEATS} real runs which are far longer than the targets and last at"
            f" least {_PACED_SECONDS:g} s. Raise --time-limit."
        )
