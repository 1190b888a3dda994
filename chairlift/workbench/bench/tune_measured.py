"""Search for the best settings by real runs only: for a machine that the simulator does not fit.

There is time for far fewer settings than a simulator tries: numbers of slots, spread over the range, for static batches
and for continuous ones, each served once with all requests at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from chairlift.workbench.bench.tune_lab import Lab
from chairlift.workbench.bench.tune_search import Score, Space, shortfall
from chairlift.workbench.bench.tune_state import FIRST_LOOK, Setting, State, Trial

__all__ = ["longest_run", "measured_candidates", "measured_score"]

_SPREAD: Final = 4
"""Numbers of slots that are tried."""


def measured_candidates(
    settings: dict[str, Setting], lab: Lab, space: Space, count: int, left: Callable[[], float]
) -> tuple[list[Setting], Mapping[str, Score]]:
    """The best one or two continuous settings, best first, and the scores of all roles in ``settings``.

    Sets the role ``static_best``. ``count`` requests are served for each setting; ``left`` returns the remaining
    seconds. The settings of the roles run in any case.
    """
    roles = list(dict.fromkeys(settings.values()))
    for setting in roles:
        lab.measure(setting, None, count, FIRST_LOOK)
    for rows in _spread(space.rows):
        for like in (settings["default"], settings["static"]):
            setting = dataclasses.replace(like, max_num_seqs=rows)
            if left() > lab.expected_seconds(setting, None, count):
                lab.measure(setting, None, count, FIRST_LOOK)
    looked = {trial.setting: measured_score(lab, trial.setting) for trial in lab.state if trial.round == FIRST_LOOK}
    ranked = sorted(looked, key=lambda setting: looked[setting], reverse=True)
    settings["static_best"] = next(setting for setting in ranked if setting.batching == "static")
    continuous = [setting for setting in ranked if setting.batching != "static"]
    return continuous[:2], {role: looked[setting] for role, setting in settings.items()}


def _spread(rows: Sequence[int]) -> list[int]:
    """A few of many, the largest among them, largest first."""
    step = max(1, -(-len(rows) // _SPREAD))
    return list(rows[::-1][::step])


def longest_run(state: State, setting: Setting) -> Trial | None:
    """The real run of most requests, all at once; None where the setting was not run."""
    runs = [each for each in state if each.setting == setting and each.rate is None and each.round is not None]
    return max(runs, key=lambda each: (each.count, each.round), default=None)


def measured_score(lab: Lab, setting: Setting) -> Score:
    """Score from the real run with most requests, all at once; a setting without one gets the lowest score."""
    trial = longest_run(lab.state, setting)
    if trial is None:
        return Score(False, 0.0)
    missing = shortfall(trial.figures)
    if trial.figures.goodput is not None and lab.traffic.users is None:  # promises are judged at a rate
        missing = shortfall(dataclasses.replace(trial.figures, goodput=None))
    return Score(False, -missing) if missing else Score(True, trial.figures.output_tokens_per_second)
