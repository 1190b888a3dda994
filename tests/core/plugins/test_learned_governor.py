"""The learned governor: what it may do, what it does, and which weights it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.plugins import learned_governor
from chairlift.core.plugins.learned_governor import FEATURES, MOVES, LearnedGovernor, features, read_weights
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.governor import Observation, Targets
from chairlift.errors import ConfigError
from tests.core.scheduler.test_governor import (
    BOUNDS,
    check_first_burst,
    check_one_seed_gives_one_run,
    check_rails,
    observation,
    observations,
    targets,
)

pytestmark = pytest.mark.nightly

PATH = "chairlift.core.plugins.learned_governor:LearnedGovernor"
TABLE = Path(learned_governor.__file__).with_suffix(".json")


@settings(max_examples=60)
@given(targets, st.lists(observations, min_size=1, max_size=12))
def test_the_learned_governor_stays_within_its_bounds_for_any_observation(
    aims: Targets, seen: list[Observation]
) -> None:
    chosen, again = (LearnedGovernor(BOUNDS, aims, Costs([1 << 16])) for _ in range(2))
    check_rails(chosen, again, seen)


def test_one_seed_gives_one_run() -> None:
    check_one_seed_gives_one_run(PATH)


def test_a_first_burst_is_not_let_in_to_be_preempted() -> None:
    check_first_burst(PATH)


def test_shipped_weights_are_small_plain_and_for_these_features() -> None:
    assert TABLE.stat().st_size < 4096
    weights = read_weights(TABLE)
    assert set(weights) == set(MOVES) and all(len(row) == len(FEATURES) for row in weights.values())
    assert len(features(observation(), BOUNDS, Targets(), Costs([1]))) == len(FEATURES)


GOOD = {"features": list(FEATURES), "weights": {move: [0.5] * len(FEATURES) for move in MOVES}}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "__import__('os').abort()",
        "\x80\x04cposix\nabort\n.",
        json.dumps(GOOD | {"features": ["one"]}),
        json.dumps(GOOD | {"weights": {"running": [0.5] * len(FEATURES)}}),
        json.dumps(GOOD).replace("0.5", "NaN"),
        json.dumps(GOOD).replace("0.5", '"0.5"'),
        json.dumps(GOOD).replace("0.5", "true"),
        "[" * 100_000,
    ],
)
def test_a_file_without_valid_weights_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "learned_governor.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"learned_governor\.json"):
        read_weights(path)
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    assert read_weights(path) == GOOD["weights"]
