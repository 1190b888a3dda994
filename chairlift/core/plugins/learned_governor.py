"""A governor whose parameters were learnt in the simulator: a linear policy, read from the JSON file next to this
module.

Load it with ``--governor chairlift.core.plugins.learned_governor:LearnedGovernor``. Each decision has three outputs:
steps in the logarithm of the row limit, in the logarithm of the token budget, and in the watermark. Each output is a
weighted sum of the features, limited by a smooth function. ``tools/train_governor.py`` found the weights by the
cross-entropy method (Rubinstein, 1999), a simple form of reinforcement learning. The governor does not learn while it
serves, so equal observations give equal decisions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.governor import (
    HEALTHY,
    Bounds,
    Observation,
    Proposal,
    Settings,
    Targets,
    expected_growth,
    rows_in_time,
    rows_that_fit,
    tokens_for_throughput,
    tokens_in_time,
)
from chairlift.errors import ConfigError

__all__ = ["FEATURES", "MOVES", "LearnedGovernor", "Weights", "features", "read_weights"]

Weights = Mapping[str, Sequence[float]]
"""Name of an output -> one weight per feature."""

FEATURES: Final = (
    "one",
    "rows to those that fit",
    "rows to those in time",
    "budget to the best",
    "watermark to growth",
    "preempted",
    "memory free",
    "work waits",
    "pace missed",
    "first token late",
)
MOVES: Final = ("running", "tokens", "watermark")
_LARGEST_WATERMARK_MOVE: Final = 0.05


def features(seen: Observation, bounds: Bounds, targets: Targets, costs: Costs) -> list[float]:
    """Inputs of the policy, each from -2 to 2: logarithms of ratios, and fractions."""
    now = seen.settings
    most = bounds.most
    in_time = most.running
    tokens = tokens_for_throughput(seen, costs, most.tokens)
    if targets.tpot < math.inf:
        in_time = rows_in_time(seen, costs, targets.tpot, most.running)
        tokens = tokens_in_time(seen, costs, targets.tpot, most.tokens)
    values = [
        1.0,
        math.log(min(rows_that_fit(seen), most.running) / now.running),
        math.log(in_time / now.running),
        math.log(tokens / now.tokens),
        (expected_growth(seen) - now.watermark) / 0.1,
        (seen.preemption_rate - HEALTHY) / HEALTHY,
        (1 - seen.kv_use) / 0.1 - 1,
        1.0 if seen.waiting else -1.0,
        math.log(max(seen.tpot, 1e-6) / targets.tpot) if targets.tpot < math.inf else 0.0,
        math.log(max(seen.ttft, 1e-3) / targets.ttft) if targets.ttft < math.inf else 0.0,
    ]
    return [max(-2.0, min(value, 2.0)) for value in values]


class LearnedGovernor:
    """The learnt governor. ``weights`` replace the weights of the package."""

    name = "learned"

    def __init__(self, bounds: Bounds, targets: Targets, costs: Costs, weights: Weights | None = None) -> None:
        self._bounds = bounds
        self._targets = targets
        self._costs = costs
        self.weights = shipped_weights() if weights is None else weights

    def decide(self, now: float, seen: Observation) -> Proposal | None:
        values = features(seen, self._bounds, self._targets, self._costs)
        moves = {}
        strongest = {}
        for move in MOVES:
            parts = [weight * value for weight, value in zip(self.weights[move], values, strict=True)]
            moves[move] = math.tanh(sum(parts))
            strongest[move] = FEATURES[max(range(len(parts)), key=lambda part: abs(parts[part]))]
        at = seen.settings
        wanted = Settings(
            max(1, round(at.running * math.exp(moves["running"]))),
            max(1, round(at.tokens * math.exp(moves["tokens"]))),
            at.watermark + _LARGEST_WATERMARK_MOVE * moves["watermark"],
        )
        why = ", ".join(f"{move} {moves[move]:+.2f} most for '{strongest[move]}'" for move in MOVES)
        return Proposal(wanted, why)


@cache
def shipped_weights() -> Weights:
    """The weights in ``learned_governor.json``."""
    return read_weights(Path(__file__).with_suffix(".json"))


def read_weights(path: Path) -> Weights:
    """Read weights from a JSON file. Raises ConfigError for an invalid file, or one for other features."""
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the governor's weights in {path}: {type(error).__name__}") from None
    known = isinstance(fields, dict) and fields.get("features") == list(FEATURES)
    weights = fields.get("weights") if known else None
    if not isinstance(weights, dict) or set(weights) != set(MOVES) or not all(map(_is_row, weights.values())):
        raise ConfigError(
            f"{path} has no weights for this governor: it must have the {len(FEATURES)} features that"
            " chairlift.core.plugins.learned_governor lists, and as many finite numbers for each of"
            f" {', '.join(MOVES)}; make it with tools/train_governor.py"
        )
    return {move: [float(weight) for weight in weights[move]] for move in MOVES}


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == len(FEATURES)
        and all(type(weight) in (int, float) and math.isfinite(weight) for weight in row)
    )
