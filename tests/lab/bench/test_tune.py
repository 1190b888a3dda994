"""Tuning on a machine that is simulated itself, on a virtual clock: the truth is known, and nothing takes time."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from chairlift.config import CacheConfig, EngineConfig, SchedulerConfig
from chairlift.core.scheduler.cost_model import CostModel, Roofline
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.core.spec_decode.ngram import NgramProposer
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift.errors import ConfigError
from chairlift_lab.bench.machine import describe_machine
from chairlift_lab.bench.report import text as lines_of
from chairlift_lab.bench.serve_run import fit
from chairlift_lab.bench.tune import SEARCHED, Findings, Question, _evictions, _fastest, _latency, _space, tune
from chairlift_lab.bench.tune_lab import Lab, LabTraffic
from chairlift_lab.bench.tune_report import TuneAnswer, columns, config_lines, printed, tune_report, verdict
from chairlift_lab.bench.tune_search import Judge, Space, search, shortfall
from chairlift_lab.bench.tune_state import FIRST_LOOK, Setting, State
from chairlift_lab.replay.machines import Deployment, ModelShape
from chairlift_lab.replay.replay import simulated_core
from chairlift_lab.workload.arrivals import Gamma
from chairlift_lab.workload.lengths import LogNormal
from chairlift_lab.workload.trace import TracedRequest
from tests.tiers import one_in

pytestmark = pytest.mark.full

TRUTH = Roofline(
    weight_seconds=0.02,
    token_seconds=0.0004,
    prompt_share=0.7,
    context_seconds=4e-7,
    pair_seconds=1e-7,
    step_seconds=0.001,
)
SHAPE = ModelShape(
    name="x",
    body_params=10**8,
    head_params=10**7,
    embedding_params=0,
    kv_width=250,
    q_width=500,
    max_model_len=2048,
    itemsize=2,
)
SETTING = Setting(
    batching="continuous",
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    admission_watermark=0.01,
    prefill_mode="mixed",
    preemption_mode="auto",
)


CACHE_FIELDS = {field.name for field in dataclasses.fields(CacheConfig)}


class Machine:
    """Engines on one virtual clock, as slow as the truth says; ``stop_after`` runs somebody presses Ctrl-C."""

    def __init__(self, memory: int = 10**9, stop_after: int | None = None, believed: Roofline | None = None) -> None:
        """``believed``: what an earlier command, on a machine that was otherwise, has found about it."""
        self.believed = believed
        self.clock = VirtualClock()
        self.deployment = Deployment(
            machine="m",
            model="x",
            cost=CostModel(TRUTH),
            kv_bytes_per_token=SHAPE.kv_bytes,
            kv_memory_bytes=memory,
            max_model_len=SHAPE.max_model_len,
        )
        self.made: list[dict[str, Any]] = []
        self.said: list[str] = []
        self._stop_after = stop_after

    def make_core(self, settings: Mapping[str, Any]) -> tuple[EngineCore, ModelLimits]:
        if self._stop_after is not None and len(self.made) == self._stop_after:
            raise KeyboardInterrupt
        self.made.append(dict(settings))
        parts: dict[str, dict[str, Any]] = {"cache": {}, "scheduler": {}}  # from_flat is too slow for here
        for name, value in settings.items():
            parts["cache" if name in CACHE_FIELDS else "scheduler"][name] = value
        config = EngineConfig(cache=CacheConfig(**parts["cache"]), scheduler=SchedulerConfig(**parts["scheduler"]))
        return simulated_core(self.deployment, config, self.clock)

    def tune(
        self,
        path: Path,
        question: Question,
        *,
        known: bool = True,
        other_load: Callable[[], float] = lambda: 0.0,
    ) -> Findings:
        """With ``known`` the simulator is exact from the start."""
        state = self.state = State(path, {"traffic": len(question.requests), "slo": dict(question.slo)})
        if known and state.deployment is None:
            state.deployment = dataclasses.replace(self.deployment, cost=CostModel(self.believed or TRUTH))
        say, clock = self.said.append, self.clock
        return tune(
            question, state, self.make_core, machine="m", shape=SHAPE, clock=clock, say=say, other_load=other_load
        )


class DraftingMachine(Machine):
    """Drafts n-grams, which are always right here, as each simulated token is the same. If ``useless``, drafts are
    never right, and the drafter makes each step longer by a tenth."""

    def __init__(self, *, useless: bool) -> None:
        super().__init__()
        self._useless = useless

    def make_core(self, settings: Mapping[str, Any]) -> tuple[EngineCore, ModelLimits]:
        settings = dict(settings)
        drafts = settings.pop("speculative_config", "")
        core, limits = super().make_core(settings)
        if drafts and self._useless:
            slower = {name: 1.1 * value for name, value in dataclasses.asdict(TRUTH).items()}
            core.executor._cost = CostModel(Roofline(**slower | {"prompt_share": 0.7}))  # type: ignore[attr-defined]
        elif drafts:
            chooser = AdaptiveSpeculator(core.costs.decode_seconds, 8, NgramProposer(3))
            core.scheduler.drafts = Drafts(core.scheduler.batch, chooser)
        return core, limits


def chat(count: int = 48, rate: float | None = None) -> list[TracedRequest]:
    """Most answers are short, a few long."""
    rng = np.random.default_rng(3)
    prompts, answers = LogNormal(3.5, 0.7, 8, 120).draw(rng, count), LogNormal(2.7, 0.9, 2, 100).draw(rng, count)
    times = [0.0] * count if rate is None else Gamma(rate).times(count, 3)
    return [
        TracedRequest(arrival=time, prompt_tokens=prompt, output_tokens=answer)
        for time, prompt, answer in zip(times, prompts, answers, strict=True)
    ]


def alike(count: int = 64) -> list[TracedRequest]:
    """Every prompt is as long as the others, and so is every answer; one batch after the other fills all slots."""
    return [TracedRequest(arrival=0.0, prompt_tokens=16, output_tokens=12) for _ in range(count)]


def short_of_memory(requests: int) -> int:
    """Bytes that hold so many of the longest requests of :func:`chat`."""
    return requests * 224 * SHAPE.kv_bytes + 16 * SHAPE.kv_bytes


def lab(path: Path, traffic: LabTraffic, machine: Machine) -> Lab:
    """One that knows the truth about the machine."""
    state = State(path, {})
    state.deployment = machine.deployment
    made = Lab(state, machine.make_core, {}, max_rows=64, on_trial=lambda: None)
    made.traffic = traffic
    return made


def lab_of(machine: Machine) -> Lab:
    """The lab of a tuning that has ended."""
    return Lab(machine.state, machine.make_core, {}, max_rows=64, on_trial=lambda: None)


FEW = {
    "max_num_batched_tokens": 256,
    "admission_watermark": 0.01,
    "prefill_mode": "mixed",
    "preemption_mode": "auto",
    "policy_share": 1.0,
}
"""Leaves the number of slots to be searched. All prompt tokens in policy order: the promises asked for are those that
just break so."""
SPACE = Space(
    rows=(4, 8, 16, 32, 64),
    tokens=(64, 256, 1024),
    watermarks=(0.01, 0.15),
    prefill_modes=("mixed", "separate", "decode_first"),
    preemption_modes=("auto", "none"),
)


def answer(found: Findings, machine: Machine, path: Path, price: float = 2.0) -> TuneAnswer:
    return TuneAnswer(
        findings=found,
        state=machine.state,
        model="bundled",
        what="traffic of a test",
        fixed=FEW,
        machine=describe_machine(),
        price=price,
        command="chairlift tune",
        output=path,
    )


def report_lines(said: TuneAnswer) -> list[str]:
    return "\n".join(lines_of(*printed(said))).splitlines()


# --- the whole of it -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_with_short_memory_the_chosen_settings_preempt_less_than_the_defaults(tmp_path: Path) -> None:
    """Continuous wins by far at equal slots; the chosen settings preempt less than the defaults."""
    machine = Machine(short_of_memory(8))
    question = Question(requests=chat(), fixed=FEW, time_limit=6000.0)
    found = machine.tune(tmp_path / "tune.json", question, known=False)
    said = answer(found, machine, tmp_path)
    sides = {side.role: side for side in columns(said)}
    assert found.tight
    assert found.rounds == 8
    assert found.settings["static"].max_num_seqs == 9
    assert found.ratios["equal"].ratio > 1.5
    assert found.ratios["static_best"].low > 1.5
    assert sides["default"].full.preemption_rate > 0.02 > sides["chosen"].full.preemption_rate
    assert all(side.full_measured for side in sides.values())
    assert all(ratio == pytest.approx(1, abs=0.1) for ratio in found.accuracy.values())
    text = verdict(said)
    assert text.startswith(f"Run `chairlift serve --config {tmp_path}/chairlift.yaml`: ")
    assert "Warning" not in text
    assert not found.notes
    price = sides["chosen"].cost(2.0)
    assert price is not None
    assert price * sides["chosen"].full.output_tokens_per_second * 3600 / 1e6 == pytest.approx(2.0)
    settings = yaml.safe_load("\n".join(config_lines(said)))
    assert EngineConfig.from_flat(settings).scheduler.max_num_seqs == found.settings["chosen"].max_num_seqs
    assert settings.keys() == {*SEARCHED, "policy_share"}
    page = tune_report(said).html()
    assert page.count("<svg") >= 5
    assert "http" not in page.replace("http://www.w3.org", "")
    assert len(report_lines(said)) > 8


@pytest.mark.parametrize("useless", one_in(2, [True, False]))
@pytest.mark.parametrize("slo", one_in(2, [{}, {"tpot_ms": 200.0}]))
def test_drafts_are_compared_with_none(tmp_path: Path, useless: bool, slo: dict[str, float]) -> None:
    """The user asks for drafts. If they cost more than they give, the settings turn them off, and the report says so.
    Static batches are compared with and without drafts too."""
    machine = DraftingMachine(useless=useless)
    fixed = {**FEW, "speculative_config": '{"method": "ngram"}', "max_num_seqs": 8}
    requests = chat(60, 2.0) if slo else chat()
    found = machine.tune(tmp_path / "tune.json", Question(requests=requests, slo=slo, fixed=fixed, time_limit=6000.0))
    said = dataclasses.replace(answer(found, machine, tmp_path), fixed=fixed)
    sides = {side.role: side for side in columns(said)}
    assert found.settings["chosen"].drafts is not useless
    assert found.settings["other"] == dataclasses.replace(found.settings["chosen"], drafts=useless)
    assert not found.settings["static_plain"].drafts
    assert all(side.full_measured for side in sides.values())
    pairs = [
        [found.settings[role] for role in roles] for roles in (("chosen", "other"), ("static_best", "static_plain"))
    ]
    for name, pair in zip(("drafts", "static_drafts"), pairs, strict=True):
        on, off = sorted(pair, key=lambda setting: not setting.drafts)
        rates = [
            trial.figures.output_tokens_per_second
            for setting in (on, off)
            for trial in machine.state
            if (trial.setting, trial.rate, trial.count, trial.round) == (setting, None, found.full_count, 0)
        ]
        assert found.ratios[name].ratio == pytest.approx(rates[0] / rates[1], rel=0.02)
        assert (found.ratios[name].high < 0.95) is useless and (found.ratios[name].low > 1.05) is not useless
    lengths = {side.role: side.full.accepted_length for side in sides.values() if side.full.accepted_length is not None}
    assert bool(lengths) is not useless and all(3 < length <= 9 for length in lengths.values())
    text, config = verdict(said), yaml.safe_load("\n".join(config_lines(said)))
    assert ("Speculation off is best for this traffic: with drafts it gets 0.9" in text) is useless
    assert config["speculative_config"] == ("" if useless else fixed["speculative_config"])
    assert EngineConfig.from_flat(config).scheduler.takes_drafts(0)
    lines = "\n".join(report_lines(said))
    assert ("tokens of a row with drafts in a step" in lines) is not useless
    assert "no drafts" in lines and "The simulator makes no drafts" in lines
    page = tune_report(said).html()
    assert "best static with / without drafts" in page
    assert page.index("<figure>") < page.index("<table>"), "a phone shows the charts first"
    assert (
        machine.tune(tmp_path / "tune.json", Question(requests=requests, slo=slo, fixed=fixed)).ratios == found.ratios
    )


@pytest.mark.nightly
def test_equal_lengths_are_as_well_served_by_static_batches(tmp_path: Path) -> None:
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", Question(requests=alike(), fixed=FEW, time_limit=6000.0))
    text = verdict(answer(found, machine, tmp_path))
    assert text.startswith("For this traffic static batching is as good")
    assert "No answer is longer than 12 tokens" in text
    assert not found.tight


@pytest.mark.nightly
def test_a_closed_loop_is_called_one(tmp_path: Path) -> None:
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", Question(requests=chat(), users=6, fixed=FEW, time_limit=6000.0))
    said = answer(found, machine, tmp_path)
    assert "6 users: output tokens/s" in "\n".join(report_lines(said))
    for text in ("\n".join(report_lines(said) + config_lines(said)), tune_report(said).html()):
        assert "6 users" in text
        assert "at once" not in text


def test_promises_are_kept_at_the_highest_rate_that_is_confirmed(tmp_path: Path) -> None:
    question = Question(requests=chat(60, 2.0), slo={"ttft_ms": 400.0, "tpot_ms": 40.0}, fixed=FEW, time_limit=6000.0)
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", question)
    chosen = found.scores["chosen"]
    assert found.by_rate
    assert chosen.keeps
    assert chosen.rate is not None
    claim = found.confirmed
    assert claim is not None
    assert 0.7 * chosen.rate <= claim.rate <= claim.arrivals <= chosen.rate
    assert claim.runs >= 3 and claim.seconds >= 5
    assert found.pace == pytest.approx(found.traffic.rate)
    runs = [trial for trial in machine.state if trial.rate == claim.arrivals and trial.round is not None]
    confirmed = [trial for trial in runs if trial.setting == found.settings["chosen"]]
    assert len(confirmed) == claim.runs and not any(shortfall(trial.figures) for trial in confirmed)
    text = verdict(answer(found, machine, tmp_path))
    assert f"up to {claim.rate:.3g} requests/s, in each of {claim.runs} real runs of at least " in text
    assert "highest rate that meets the targets" in "\n".join(report_lines(answer(found, machine, tmp_path)))


@pytest.mark.nightly
def test_costs_at_rates_that_were_only_simulated_are_marked(tmp_path: Path) -> None:
    question = Question(requests=chat(60, 2.0), slo={"ttft_ms": 4000.0}, fixed=FEW, time_limit=6000.0)
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", question)
    lines = report_lines(answer(found, machine, tmp_path))
    assert found.confirmed is not None
    for name in ("highest rate that meets the targets", "cost per million output tokens"):
        (line,) = [line for line in lines if line.startswith(name)]
        assert [cell.startswith("~") for cell in line.split()[-2:]] == [True, False]
    assert "~ is simulated" in lines[0]


@pytest.mark.nightly
def test_targets_that_no_setting_meets_are_told(tmp_path: Path) -> None:
    question = Question(requests=chat(24, 2.0), slo={"tpot_ms": 1.0}, fixed=FEW, time_limit=6000.0)
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", question)
    assert found.scores["chosen"].rate is None
    assert any("even at a low rate" in note for note in found.notes)
    assert "No setting meets the targets" in verdict(answer(found, machine, tmp_path))


def test_promises_are_a_condition_for_a_closed_loop_too(tmp_path: Path) -> None:
    machine = Machine()
    question = Question(requests=chat(), users=16, slo={"tpot_ms": 30.0}, fixed=FEW, time_limit=6000.0)
    found = machine.tune(tmp_path / "tune.json", question)
    sides = {side.role: side for side in columns(answer(found, machine, tmp_path))}
    assert sides["chosen"].full_measured
    assert (sides["chosen"].full.goodput, sides["default"].full.goodput) == (1.0, pytest.approx(0.979, abs=0.001))
    assert sides["chosen"].full.output_tokens_per_second < sides["default"].full.output_tokens_per_second
    assert "It meets the targets for 100.0%, " in verdict(answer(found, machine, tmp_path))
    found.settings["chosen"] = found.settings["default"]
    text = verdict(answer(found, machine, tmp_path))
    assert "It meets the targets for 97.9%, " in text, "another setting keeps them"
    assert "No setting" not in text


def test_static_batches_that_break_promises_are_not_as_good(tmp_path: Path) -> None:
    machine = Machine()
    question = Question(requests=alike(), users=8, slo={"ttft_ms": 150.0}, fixed=FEW, time_limit=6000.0)
    text = verdict(answer(machine.tune(tmp_path / "tune.json", question), machine, tmp_path))
    assert text.startswith("Run `")
    assert "It meets the targets for 100.0%, static batches for 0.0%." in text


@pytest.mark.nightly
def test_preemptions_are_judged_at_the_rate_that_is_promised(tmp_path: Path) -> None:
    machine = Machine(short_of_memory(4))
    question = Question(requests=chat(60, 3.0), slo={"ttft_ms": 1500.0}, fixed=FEW, time_limit=3000.0)
    found = machine.tune(tmp_path / "tune.json", question)
    said = answer(found, machine, tmp_path)
    assert columns(said)[-1].full.preemption_rate > 0.1, "all at once, as nobody asks for"
    assert found.confirmed is not None
    told = f"0.0% of the requests are preempted, at {found.confirmed.arrivals:.3g}/s"
    text = verdict(said)
    assert told in text
    assert "Warning" not in text
    assert any(told in line for line in config_lines(said))


def test_a_measured_latency_is_not_compared_with_a_simulated_one(tmp_path: Path) -> None:
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", Question(requests=chat(60, 2.0), fixed=FEW, time_limit=6000.0))
    text = verdict(answer(found, machine, tmp_path))
    assert f"and its p99 latency is 59% of theirs (59% to 59% in 6 rounds, at {found.pace:.3g}/s); " in text
    for number in (1, 3):
        del machine.state.trials[found.settings["static_best"], found.pace, found.paced_count, number]
    found.latency = _latency(found, lab_of(machine))
    assert found.latency is not None and found.latency.rounds == 4
    assert "p99" not in verdict(answer(found, machine, tmp_path)), "four rounds are too few"


def test_the_same_question_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    question = Question(requests=chat(24), fixed=FEW, time_limit=6000.0)
    whole = Machine()
    wanted = whole.tune(tmp_path / "whole.json", question)
    path, made = tmp_path / "tune.json", 0
    for stop_after in (1, 5, 3, None):
        machine = Machine(stop_after=stop_after)
        if stop_after is None:
            found = machine.tune(path, question)
        else:
            with pytest.raises(KeyboardInterrupt):
                machine.tune(path, question)
            if made and stop_after == 3:
                assert len(machine.state.trials) > made
            made = len(machine.state.trials)
    assert found.settings == wanted.settings
    assert found.rounds == wanted.rounds
    again = Machine(stop_after=0)
    assert again.tune(path, question).settings == wanted.settings, "nothing is left to run"


def test_a_short_time_limit_is_kept_and_said(tmp_path: Path) -> None:
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", Question(requests=chat(48, 1.0), fixed=FEW, time_limit=12.0))
    assert machine.clock.now() < 20
    assert "--time-limit" in " ".join(found.notes)
    assert verdict(answer(found, machine, tmp_path))


def test_settings_that_are_given_stay(tmp_path: Path) -> None:
    machine = Machine()
    fixed = {"max_num_seqs": 8, "prefill_mode": "separate", "max_num_batched_tokens": 64, "block_size": 32}
    found = machine.tune(tmp_path / "tune.json", Question(requests=chat(24), fixed=fixed, time_limit=6000.0))
    assert {each.max_num_seqs for each in found.settings.values()} == {8}
    assert found.settings["chosen"].prefill_mode == "separate"
    assert all(settings["block_size"] == 32 for settings in machine.made)
    with pytest.raises(ConfigError, match="batching is what tune finds out"):
        machine.tune(tmp_path / "t.json", Question(requests=chat(4), fixed={"batching": "static"}))


def test_requests_too_long_for_the_cache_are_shortened_and_counted(tmp_path: Path) -> None:
    machine = Machine(short_of_memory(4))
    long = [*chat(24), TracedRequest(arrival=0.0, prompt_tokens=1500, output_tokens=900, prefix_ids=(1, 2))]
    found = machine.tune(tmp_path / "tune.json", Question(requests=long, fixed=FEW, time_limit=6000.0))
    assert found.cut == 1
    assert any("1 requests are too long" in note for note in found.notes)
    kept, cut = fit(long, 600)
    assert (kept[-1].prompt_tokens, kept[-1].output_tokens, kept[-1].prefix_ids, cut) == (300, 300, (1,), 1)
    with pytest.raises(ConfigError, match="room for 2 tokens"):
        fit(long, 1)


# --- what is claimed ------------------------------------------------------------------------------------------------

WRONG = dataclasses.replace(TRUTH, weight_seconds=0.004, token_seconds=0.00008, step_seconds=0.0002)
"""A machine five times as fast."""


@pytest.mark.parametrize("slo", [{}, {"ttft_ms": 900.0}])
def test_a_wrong_step_model_is_found_out_and_nothing_simulated_is_shown(tmp_path: Path, slo: dict[str, float]) -> None:
    machine = Machine(believed=WRONG)
    found = machine.tune(
        tmp_path / "tune.json", Question(requests=chat(60, 2.0), slo=slo, fixed=FEW, time_limit=6000.0)
    )
    assert not found.trusted
    assert found.fit_error is not None
    assert found.fit_error > 0.2
    assert found.rounds == 8, "it measures instead"
    assert not found.accuracy
    said = answer(found, machine, tmp_path)
    text = verdict(said)
    assert "Nothing here is simulated: the error of the step model is" in text
    assert "as simulated" not in text
    lines = report_lines(said)
    assert not [line for line in lines if "~" in line.replace("~ is simulated", "")]
    page = tune_report(said).html()
    assert "simulated)" not in page
    assert ">simulated<" not in page
    assert all(side.full_measured for side in columns(said))
    if slo:
        assert found.confirmed is not None
        runs = [each for each in machine.state if each.rate == found.confirmed.arrivals and each.round == 0]
        assert max(each.figures.keeping for each in runs) >= 0.9
        assert f"up to {found.confirmed.rate:.3g} requests/s, in each of " in text


def test_a_model_that_fits_is_looked_at_once_and_used(tmp_path: Path) -> None:
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", Question(requests=chat(24), fixed=FEW, time_limit=6000.0))
    assert found.trusted
    assert found.fit_error == pytest.approx(0.0, abs=0.01)
    page = tune_report(answer(found, machine, tmp_path)).html()
    assert "(simulated)</figcaption>" in page, "what only the simulator says is called so, on its chart too"


@pytest.mark.parametrize("slo", one_in(2, [{"ttft_ms": 3000.0}, {"ttft_ms": 900.0}]))
def test_no_claimed_rate_is_above_the_measured_throughput(tmp_path: Path, slo: dict[str, float]) -> None:
    """A short run with few requests meets its targets far above the throughput. Neither the verdict nor the table may
    claim such a rate, confirmed or simulated."""
    machine = Machine()
    found = machine.tune(tmp_path / "tune.json", Question(requests=chat(60), slo=slo, fixed=FEW, time_limit=6000.0))
    said = answer(found, machine, tmp_path)
    for side in columns(said):
        assert side.rate is None or side.rate <= side.full.requests_per_second
    headline = re.search(r"up to ([0-9.]+) requests/s", verdict(said))
    if headline is not None:
        assert float(headline[1]) <= round(columns(said)[-1].full.requests_per_second, 1)
    assert found.confirmed is None or found.confirmed.rate <= found.confirmed.high


def test_runs_that_are_too_short_are_repeated_within_their_sample(tmp_path: Path) -> None:
    """Eight requests take a fraction of a second. A run of a round serves them again, from an empty prefix cache."""
    made = lab(tmp_path / "t.json", LabTraffic(chat(8)), Machine())
    look, run = made.measure(SETTING, None, 1, FIRST_LOOK), made.measure(SETTING, None, 1, 0)
    assert look.seconds < 1 <= run.seconds
    assert run.requests == round(run.seconds / look.seconds)
    assert run.requests_per_second == pytest.approx(look.requests_per_second, rel=1e-6)
    assert run.ttft_p50 == pytest.approx(look.ttft_p50)


def test_the_verdict_names_the_disturbance_and_claims_nothing_that_it_explains(tmp_path: Path) -> None:
    machine = Machine()
    loads = itertools.cycle([0.0, 0.0, 0.0, 0.6])
    found = machine.tune(
        tmp_path / "tune.json", Question(requests=chat(), fixed=FEW, time_limit=6000.0), other_load=lambda: next(loads)
    )
    text = verdict(answer(found, machine, tmp_path))
    assert re.search(r"Other programs used \d+% of this machine during the runs, at most 60%\.", text)
    gain = found.ratios["static_best"]
    assert gain.low < min(gain.per_round) and gain.high > max(gain.per_round)


@pytest.mark.parametrize("slower", [1.0, 0.7])
def test_a_setting_without_a_gain_that_may_be_claimed_is_not_chosen(tmp_path: Path, slower: float) -> None:
    """Real runs have noise, and the candidate of the simulator is as fast as the defaults, or slower: whatever a single
    round says, the defaults stay."""
    rng, machine = np.random.default_rng(1), Machine()
    found = machine.tune(tmp_path / "tune.json", Question(requests=chat(), fixed=FEW, time_limit=6000.0))
    default, rival = found.settings["default"], dataclasses.replace(found.settings["default"], max_num_seqs=33)
    for number in range(8):
        key = (default, None, found.full_count, number)
        trial = machine.state.trials[key]
        for setting, factor in ((default, 1.0), (rival, slower)):
            speed = factor * float(np.exp(rng.normal(0, 0.1))) * (5.0 if number == 3 and setting == rival else 1.0)
            figures = dataclasses.replace(trial.figures, output_tokens_per_second=1000 * speed)
            machine.state.add(dataclasses.replace(trial, setting=setting, figures=figures))
    assert _fastest(found, lab_of(machine), [rival, default]) == default
    for number in range(8):
        trial = machine.state.trials[rival, None, found.full_count, number]
        figures = dataclasses.replace(trial.figures, output_tokens_per_second=1500 + number)
        machine.state.add(dataclasses.replace(trial, figures=figures))
    assert _fastest(found, lab_of(machine), [rival, default]) == rival, "a gain through all rounds"


def test_a_refuted_rate_lowers_the_claim_and_is_told(tmp_path: Path) -> None:
    question = Question(requests=chat(60, 2.0), slo={"ttft_ms": 900.0}, fixed=FEW, time_limit=6000.0)
    path, machine = tmp_path / "tune.json", Machine()
    before = machine.tune(path, question)
    assert before.confirmed is not None
    highest, chosen = before.confirmed.arrivals, before.settings["chosen"]
    planted = []
    for key, trial in machine.state.trials.items():
        if trial.rate == highest and trial.round == 0:
            bad = dataclasses.replace(trial.figures, goodput=0.749, requests_per_second=0.8 * highest)
            machine.state.trials[key] = dataclasses.replace(trial, figures=bad)
            planted.append(trial)
    assert planted
    machine.state.save()
    again = Machine()
    found = again.tune(path, question)
    assert found.settings["chosen"] == chosen
    assert found.confirmed is not None
    assert found.confirmed.rate <= 0.95 * 0.8 * highest
    told = f"Refuted by a real run: at {highest:.3g} requests/s, the targets were met for 74.9% of the requests,"
    assert any(note.startswith(told) for note in found.notes)
    text = verdict(answer(found, again, tmp_path))
    assert f"up to {found.confirmed.rate:.3g} requests/s, in each of " in text


@pytest.mark.nightly
def test_where_every_real_run_broke_the_promises_no_rate_is_claimed(tmp_path: Path) -> None:
    question = Question(requests=chat(60, 2.0), slo={"ttft_ms": 900.0}, fixed=FEW, time_limit=6000.0)
    path, machine = tmp_path / "tune.json", Machine()
    machine.tune(path, question)
    for key, trial in machine.state.trials.items():
        if trial.rate is not None and trial.round == 0:
            bad = dataclasses.replace(trial.figures, goodput=0.749, requests_per_second=1.9)
            machine.state.trials[key] = dataclasses.replace(trial, figures=bad)
    machine.state.save()
    again = Machine(stop_after=0)
    state = State(path, {"traffic": 60, "slo": dict(question.slo)})
    state.trials = machine.state.trials
    found = again.tune(path, dataclasses.replace(question, time_limit=20.0))
    assert found.confirmed is None
    said = answer(found, again, tmp_path)
    text = verdict(said)
    assert "No real run confirmed a rate that meets the targets: at " in text
    assert "a real run met them for 74.9% of the requests" in text
    (line,) = [line for line in report_lines(said) if line.startswith("highest rate that meets the targets")]
    assert line.split()[-1] == "none"


def test_a_backlog_shorter_than_the_promise_keeps_no_promise(tmp_path: Path) -> None:
    """48 requests at three times what the machine can do are all answered within six seconds, and prove nothing."""
    made = lab(tmp_path / "t.json", LabTraffic(chat(48), slo={"ttft_ms": 6000.0}), Machine())
    most = made.measure(SETTING, None, 48).requests_per_second
    fast = made.measure(SETTING, 3 * most, 48)
    assert fast.goodput == 1.0
    assert fast.keeping < 0.5
    assert shortfall(fast) > 0
    wanted = made.traffic.enough(3 * most, 48)
    assert (wanted - 1) / (3 * most) >= 5 * 6.0, "the trace is repeated until it is far longer than the promise"
    assert made.traffic.enough(0.01, 48) == 48
    slow = made.measure(SETTING, 0.3 * most, 96)
    assert slow.keeping > 0.9
    assert shortfall(slow) == 0


def test_traffic_that_comes_again_is_new_to_every_cache() -> None:
    own: dict[str, Any] = {"prompt_tokens": 40, "prefix_ids": (1, 2), "prefix_block": 16, "session": "a"}
    first = [dataclasses.replace(each, **own, turn=place) for place, each in enumerate(chat(3, 2.0)[:2])]
    again = LabTraffic(first).at(4.0, 5)
    assert len(again) == 5
    assert [each.prompt_tokens for each in again] == [40] * 5
    assert len({each.prefix_ids for each in again}) == 3
    assert [(each.session, each.turn) for each in again[2:4]] == [("a again 1", 0), ("a again 1", 1)]
    assert (again[-1].arrival - again[0].arrival) * 4.0 == pytest.approx(4)
    assert [each.arrival for each in again] == sorted(each.arrival for each in again)


# --- its parts -------------------------------------------------------------------------------------------------------


def exhaustive(traffic: LabTraffic, memory: int, tmp_path: Path, *, by_rate: bool) -> tuple[float, float, int, int]:
    """Result of the search, the best of the full grid, and the number of settings that each looked at."""
    machine = Machine(memory)
    count = len(traffic.requests)
    judge = Judge(lab(tmp_path / "a.json", traffic, machine), count, by_rate=by_rate)
    start = dataclasses.replace(SETTING, prefill_mode="decode_first")
    assert search(SPACE, judge, start, lambda: False)
    everything = Judge(lab(tmp_path / "b.json", traffic, machine), count, by_rate=by_rate)
    for setting in SPACE.everything():
        everything.score(setting)
    assert everything.best.keeps
    assert judge.best.keeps
    return judge.best.value, everything.best.value, len(judge.scores), len(everything.scores)


@pytest.mark.nightly
def test_the_search_finds_what_the_full_grid_would(tmp_path: Path) -> None:
    found, best, looked, everything = exhaustive(LabTraffic(chat(32)), short_of_memory(6), tmp_path, by_rate=False)
    assert found >= 0.95 * best
    assert looked < everything


@pytest.mark.nightly
@pytest.mark.parametrize("memory", [6, 12, 1000])
@pytest.mark.parametrize("kind", ["at once", "alike", "promises", "long prompts", "users"])
def test_the_search_finds_what_the_full_grid_would_everywhere(tmp_path: Path, kind: str, memory: int) -> None:
    traffic = {
        "at once": LabTraffic(chat(100)),
        "alike": LabTraffic(alike(100)),
        "promises": LabTraffic(chat(80, 3.0), slo={"ttft_ms": 500.0, "tpot_ms": 60.0}),
        "long prompts": LabTraffic([dataclasses.replace(each, prompt_tokens=120) for each in chat(80)]),
        "users": LabTraffic(chat(80), users=12),
    }[kind]
    found, best, _, _ = exhaustive(traffic, short_of_memory(memory), tmp_path, by_rate=kind == "promises")
    assert found >= 0.95 * best


def test_a_setting_that_preempts_or_is_late_falls_short(tmp_path: Path) -> None:
    fine = lab(tmp_path / "t.json", LabTraffic(chat(8)), Machine()).simulate(SETTING, None, 8)
    assert shortfall(fine) == 0
    assert shortfall(dataclasses.replace(fine, preemption_rate=0.03)) > 0
    assert shortfall(dataclasses.replace(fine, goodput=0.98)) > 0
    assert shortfall(dataclasses.replace(fine, goodput=0.99, preemption_rate=0.01)) == 0


def test_traffic_at_another_rate_keeps_its_requests() -> None:
    traffic = LabTraffic(chat(40, 2.0))
    times = [request.arrival for request in traffic.at(4.0, 40)]
    assert traffic.rate is not None
    assert times[-1] == pytest.approx((traffic.requests[-1].arrival - traffic.requests[0].arrival) * traffic.rate / 4)
    assert [request.arrival for request in traffic.at(None, 3)] == [0.0] * 3
    drawn = LabTraffic(chat(40))
    assert drawn.rate is None
    assert 40 / drawn.at(2.0, 40)[-1].arrival == pytest.approx(2.0, rel=0.4)
    assert drawn.at(4.0, 9)[8].arrival == pytest.approx(drawn.at(2.0, 9)[8].arrival / 2)
    burst = [dataclasses.replace(each, arrival=max(0.0, place - 20)) for place, each in enumerate(chat(40))]
    for asked in (traffic, drawn, LabTraffic(burst)):
        for count in (2, 9, 40):
            times = [request.arrival for request in asked.at(4.0, count)]
            assert (times[0], times[-1]) == (0.0, pytest.approx((count - 1) / 4)), "they come at that rate"
    assert [request.arrival for request in drawn.at(4.0, 1)] == [0.0]
    promised = LabTraffic(
        [dataclasses.replace(chat(1)[0], ttft_ms=5.0)], slo={"ttft_ms": 9.0, "tpot_ms": 7.0}
    ).requests[0]
    assert (promised.ttft_ms, promised.tpot_ms) == (5.0, 7.0)


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_holds_the_whole_tuning(tmp_path: Path) -> None:
    made = lab(tmp_path / "t.json", LabTraffic(chat(8)), Machine())
    made.measure(SETTING, None, 8)
    made.simulate(SETTING, 3.7, 8)
    made.state.save()
    read = State(tmp_path / "t.json", {})
    assert list(read) == list(made.state)
    assert read.deployment is not None
    assert read.deployment.to_dict() == Machine().deployment.to_dict()
    run = read.find(SETTING, None, 8, 0)
    assert run is not None
    assert len(run.latencies) == 8
    read.drop_round(8, 0)
    assert read.find(SETTING, None, 8, 0) is None
    assert read.find(SETTING, 3.7, 8, None) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_another_question_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    State(path, {"model": "a", "slo": {"ttft_ms": 5}}).save()
    State(path, {"model": "a", "slo": {"ttft_ms": 5}})
    with pytest.raises(
        ConfigError, match=r'slo was \{"ttft_ms": 5\} and is \{\} now; give another --output, or remove'
    ):
        State(path, {"model": "a", "slo": {}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"format": 0, "inputs": {}, "trials": [], "deployment": null}', "\x00"),
        *(f'{{"format": 4, "inputs": {inputs}, "trials": [], "deployment": null}}' for inputs in ("[1]", "5")),
        *(f'{{"format": 4, "inputs": {{}}, "trials": [], "deployment": {value}}}' for value in ("5", '{"cost": 5}')),
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="remove"):
        State(path, {})
    assert path.read_text() == text


def test_only_traffic_with_chats_has_rules_of_eviction_to_try() -> None:
    assert _evictions({}) == ["auto", "lru", "tlru", "lease"]
    classes = {"scheduling_policy": "priority", "service_classes": '{"chat": {"retention": 2}}'}
    assert _evictions(classes) == ["auto", "lease"], "the others do not look at retention"
    assert _space({}, 8, ["auto", "lease"]).evictions == ["auto", "lease"]
    assert _space({"cache_eviction": "tlru"}, 8, ["auto", "lease"]).evictions == ("tlru",)
    assert _space({}, 8).evictions == ("auto",)
