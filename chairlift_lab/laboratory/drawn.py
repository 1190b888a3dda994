"""The knots of a trace beside what is drawn from them, so that a reader sees how near the requests are to the trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from chairlift_lab.laboratory.fit_knots import fit_knots
from chairlift_lab.laboratory.knots import TraceKnots
from chairlift_lab.workload.summary import summarise

__all__ = ["DrawnFigure", "drawn_figures"]

_COUNT: Final = 2000
_SEED: Final = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnFigure:
    """One figure of a trace: its target in the knots, and its value in 2,000 drawn requests."""

    name: str
    target: float
    drawn: float


def drawn_figures(knots: TraceKnots, count: int = _COUNT) -> Iterator[DrawnFigure]:
    """Figures of ``count`` requests that are drawn at the rate of the trace, beside their targets."""
    trace = knots.draw(count, seed=_SEED)
    found = fit_knots(trace, name=knots.name, title="", source="", licence="")
    yield DrawnFigure("requests/s", knots.rate, found.rate)
    yield DrawnFigure("burstiness", knots.burstiness, found.burstiness)
    first = "prompt" if knots.sessions is None else "first prompt"
    pairs = [(first, knots.prompt, found.prompt), ("answer", knots.output, found.output)]
    if knots.sessions is not None and found.sessions is not None:
        pairs += [
            ("turns", knots.sessions.turns, found.sessions.turns),
            ("new tokens of a turn", knots.sessions.fresh, found.sessions.fresh),
            ("gap in s", knots.sessions.gap_seconds, found.sessions.gap_seconds),
        ]
    for name, target, drawn in pairs:
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            yield DrawnFigure(f"{name} {label}", float(target.at([share])[0]), float(drawn.at([share])[0]))
    yield DrawnFigure("correlation", knots.correlation, found.correlation)
    repeated = summarise(trace).repeated
    if repeated is not None:
        yield DrawnFigure("repeated prompt tokens", knots.repeated, repeated)
