"""A machine is recovered from nothing but the times of requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.errors import ConfigError
from chairlift_lab.fitting.fit import FitPlan, FittedMachine, fit_machine
from chairlift_lab.fitting.polish import scaled
from chairlift_lab.fitting.reconstruct import recover_steps
from chairlift_lab.fitting.records import read_record
from chairlift_lab.fitting.report import fit_lines, fit_record
from chairlift_lab.fitting.run import Run
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import replay
from tests.lab.fitting.known_machine import SETTINGS, SHEET, NoisyCost, machine, record, serve, traffic


def run_of(name: str, rate: float, seed: int, settings: dict[str, Any] | None = None, **lengths: Any) -> Run:
    """A run on the known machine, whose client and front end take 5 ms per request."""
    deployment = machine(seed=seed, request_seconds=0.005)
    timings = serve(traffic(rate, 60, seed, **lengths), deployment, **(settings or {}))
    run = read_record(name, record(timings), cache_is_off=True)
    return dataclasses.replace(run, settings=settings or {})


def fitted(runs: list[Run], held_back: list[Run], **changes: Any) -> tuple[FitPlan, FittedMachine]:
    plan = FitPlan(runs=runs, held_back=held_back, sheet=SHEET, name="mine", settings=SETTINGS, **changes)
    return plan, fit_machine(plan)


def test_steps_are_recovered_from_token_times() -> None:
    """Without noise, each recovered step has the time of its recovered features."""
    timings = serve(traffic(4.0, 80, 3), machine(noise=0.0))
    run = read_record("r", record(timings), cache_is_off=True)
    found = recover_steps(run.requests, SETTINGS["max_num_batched_tokens"])
    cost = NoisyCost(0.0)
    right = sum(seconds == pytest.approx(cost.exact(step), rel=0.01) for step, seconds in found.steps)
    assert right > 0.98 * len(found.steps) > 0.9 * found.clusters
    assert found.torn == 0


@pytest.mark.nightly
def test_a_machine_is_recovered_from_requests() -> None:
    """Fitted at two rates; tested at a third one, with half of the rows, and with other lengths."""
    runs = [run_of("slow", 1.0, 1), run_of("medium", 2.5, 2)]
    held_back = [
        run_of("fast", 4.0, 3),
        run_of("few rows", 4.0, 3, {"max_num_seqs": 4}),
        run_of("long", 2.0, 4, prompts=(500, 1500), outputs=(4, 12)),
    ]
    plan, result = fitted(runs, held_back)
    for each in result.compared["fit"]:
        errors = each.errors
        assert all(abs(errors[f"{name} p50"]) < 0.05 for name in ("ttft", "tpot", "e2e")), (each.name, errors)
        assert all(abs(errors[f"{name} p99"]) < 0.15 for name in ("ttft", "tpot", "e2e")), (each.name, errors)
    for name in ("data sheet", "constant step"):
        assert max(abs(error) for each in result.compared[name] for error in each.errors.values()) > 0.3
    assert result.deployment.request_seconds == pytest.approx(0.005, abs=0.003)
    assert {order.verdict for order in result.orders} <= {"same", "too close"} and len(result.orders) == 3
    assert "on 3 held back, TTFT p50" in result.deployment.validity
    text = "\n".join(fit_lines(plan, result))
    assert "Does the simulation order two settings as the machine did?" in text and "few rows / fast" in text
    assert "constant step" in text and "within 5%" in text
    assert fit_record(plan, result)["requests"][0]["errors"]["fit"] == result.compared["fit"][0].errors


def test_equal_lengths_leave_positions_to_the_data_sheet() -> None:
    same: dict[str, Any] = {"prompts": (200, 200), "outputs": (30, 30)}
    plan, result = fitted([run_of("one", 2.0, 1, **same)], [], polishes=False)
    reasons = {term.name: term.reason for term in result.fit.terms}
    assert reasons["context"].startswith("all requests have 200 prompt and 30 answer tokens")
    assert "not identified: all requests have 200" in "\n".join(fit_lines(plan, result))
    assert result.seen and "not tested on others" in result.deployment.validity


def test_too_few_tokens_are_refused() -> None:
    run = run_of("short", 1.0, 1, outputs=(2, 2))
    with pytest.raises(ConfigError, match=r"of 4 requests give \d+ steps with a known time, and a fit needs 16"):
        recover_steps(run.requests[:4], 512)
    whole = [dataclasses.replace(each, times=each.times[:1]) for each in run.requests]
    with pytest.raises(ConfigError, match="no answer has two tokens"):
        recover_steps(whole, 512)


def test_a_server_that_served_more_than_the_simulated_one_can_is_named() -> None:
    run = dataclasses.replace(run_of("one", 2.0, 1), settings={"max_model_len": 64})
    with pytest.raises(ConfigError, match=r"one: the simulated engine refuses .* check max_model_len"):
        fitted([run], [])


def test_factors_change_their_group_only() -> None:
    cost = SHEET.cost
    prompts, decodes = StepFeatures(0, 0, 0, 5000.0), StepFeatures(0, 5000)
    changed = scaled(cost, {"prompt": 3.0})
    base = cost.step_seconds(StepFeatures())
    assert changed.step_seconds(prompts) - base == pytest.approx(3 * (cost.step_seconds(prompts) - base))
    assert changed.step_seconds(decodes) == cost.step_seconds(decodes)


def test_a_machine_file_has_padding_and_delay() -> None:
    deployment = dataclasses.replace(SHEET, capture_sizes=(8, 16), request_seconds=0.25)
    again = Deployment.from_dict(deployment.to_dict())
    assert (again.capture_sizes, again.request_seconds) == ((8, 16), 0.25)
    trace, config = traffic(2.0, 12, 1), EngineConfig.from_flat(SETTINGS)
    plain, late = (
        replay(trace, config, each).served for each in (SHEET, dataclasses.replace(SHEET, request_seconds=0.25))
    )
    assert late.ttft.p50 == pytest.approx(plain.ttft.p50 + 0.25, rel=0.01)
    assert late.tpot.p50 == pytest.approx(plain.tpot.p50, rel=0.01)
    padding = dataclasses.replace(SHEET, capture_sizes=(512,))
    assert replay(trace, config, padding).served.tpot.p50 > 2 * plain.tpot.p50
    old = {name: value for name, value in SHEET.to_dict().items() if name not in ("capture_sizes", "request_seconds")}
    assert Deployment.from_dict(old).request_seconds == 0
    for name, value in (
        ("capture_sizes", [0]),
        ("capture_sizes", "8"),
        ("request_seconds", -1),
        ("request_seconds", None),
    ):
        with pytest.raises(ConfigError, match=f"not a cost model: {name} is"):
            Deployment.from_dict(SHEET.to_dict() | {name: value})
