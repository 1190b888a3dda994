"""Search for the best settings by real runs only, used when the simulator does not fit this machine.

Real runs take longer than simulations, so only a few settings are tried: a few numbers of slots, each for static and
for continuous batches. Each setting serves the requests once, all at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from chairlift_lab.bench.tune_lab import Lab
from chairlift_lab.bench.tune_search import SettingScore, Space, shortfall
from chairlift_lab.bench.tune_state import FIRST_LOOK, Setting, State, Trial

__all__ = ["longest_run", "measured_candidates", "measured_score"]

_SPREAD: Final = 4
"""How many different numbers of slots are tried."""


def measured_candidates(
    settings: dict[str, Setting], lab: Lab, space: Space, count: int, seconds_left: Callable[[], float]
) -> tuple[list[Setting], Mapping[str, SettingScore]]:
    """Find the best settings by real runs. Returns (the best one or two continuous settings, role -> score).

    ``settings`` maps roles to settings; these settings always run. Further settings run while ``seconds_left`` allows
    it. The best static setting is stored in ``settings`` as ``static_best``. Each run serves ``count`` requests.
    """
    roles = list(dict.fromkeys(settings.values()))
    for setting in roles:
        lab.measure(setting, None, count, FIRST_LOOK)
    for rows in _spread(space.rows):
        for like in (settings["default"], settings["static"]):
            setting = dataclasses.replace(like, max_num_seqs=rows)
            if seconds_left() > lab.expected_seconds(setting, None, count):
                lab.measure(setting, None, count, FIRST_LOOK)
    looked = {trial.setting: measured_score(lab, trial.setting) for trial in lab.state if trial.round == FIRST_LOOK}
    ranked = sorted(looked, key=lambda setting: looked[setting], reverse=True)
    settings["static_best"] = next(setting for setting in ranked if setting.batching == "static")
    continuous = [setting for setting in ranked if setting.batching != "static"]
    return continuous[:2], {role: looked[setting] for role, setting in settings.items()}


def _spread(rows: Sequence[int]) -> list[int]:
    """Select a few values of ``rows`` that cover its whole range, in descending order, beginning with the largest."""
    step = max(1, -(-len(rows) // _SPREAD))
    return list(rows[::-1][::step])


def longest_run(state: State, setting: Setting) -> Trial | None:
    """The real run of a setting with the largest number of requests, all sent at once. None if there is no such run."""
    runs = [each for each in state if each.setting == setting and each.rate is None and each.round is not None]
    return max(runs, key=lambda each: (each.count, each.round), default=None)


def measured_score(lab: Lab, setting: Setting) -> SettingScore:
    """Score of a setting from its :func:`longest_run`. A setting without a run gets a low score."""
    trial = longest_run(lab.state, setting)
    if trial is None:
        return SettingScore(False, 0.0)
    missing = shortfall(trial.figures)
    if trial.figures.goodput is not None and lab.traffic.users is None:  # latency targets apply to runs at a rate only
        missing = shortfall(dataclasses.replace(trial.figures, goodput=None))
    return SettingScore(False, -missing) if missing else SettingScore(True, trial.figures.output_tokens_per_second)
