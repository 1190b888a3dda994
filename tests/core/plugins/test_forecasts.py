"""A forecast runs a copy of the policy: it changes nothing, and with exact lengths it is what happens."""

from __future__ import annotations

import random

import pytest

from chairlift.base.plugins import is_plugin
from chairlift.core.plugins.catalog import IDEAS
from chairlift.core.request import Service
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.forecast import foresee
from chairlift.core.scheduler.policies import load_policy
from tests.core.plugins.toys import SHARES
from tests.core.scheduler.driver import Driver, request

POLICIES = [name for name, idea in IDEAS.items() if idea.kind == "policy" and is_plugin(idea.path)]
SECONDS = 0.05
"""Duration of each step."""
_AT = 6
UNEQUAL = {"longest_prefix", "vtc", "equinox"}
"""Policies whose forecast may differ from what happens: beginnings of prompts and weighted tokens are not those of the
copies."""


def run(name: str, share: float, *, with_forecast: bool) -> tuple[dict[str, float], dict[str, float]]:
    """(forecast starts, made before the step ``_AT``; real starts from then on)."""
    rng = random.Random(name)
    drive = Driver(policy=load_policy(IDEAS[name].path), policy_share=share, max_num_seqs=3, num_blocks=200)
    for number in range(14):
        answer = rng.randint(1, 12)
        service = Service(tenant=rng.choice("ab"), first_token_by=rng.uniform(0.5, 3.0), predicted_tokens=answer)
        drive.add(request(f"r{number}", rng.randint(1, 40), answer, min_tokens=answer, service=service))
    found: dict[str, float] = {}
    real = {}
    steps = 0
    while drive.scheduler.has_unfinished:
        if steps == _AT and with_forecast:
            *_, last = foresee(drive.scheduler, lambda _: SECONDS, AnswerLengths(), drive.now, {"default": 0})
            assert last is not None
            found = last.starts
        out = drive.step()
        if steps >= _AT:
            real |= {row.request_id: drive.now for row in out.joined if row.request_id not in real}
        drive.now += SECONDS
        steps += 1
    return found, real


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_forecast_changes_nothing_and_comes_true(name: str, share: float) -> None:
    _, without = run(name, share, with_forecast=False)
    found, real = run(name, share, with_forecast=True)
    assert len(found) > 3
    assert without == real
    if name not in UNEQUAL:
        # The imagined newcomer of the forecast may take a free row for one step.
        assert found == pytest.approx({each: real[each] for each in found}, abs=1.01 * SECONDS)
