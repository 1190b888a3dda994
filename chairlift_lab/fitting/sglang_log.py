"""Reads step times from SGLang's log lines about prefill and decode batches.

A decode line comes after every 40 decode steps (``--decode-log-interval``). Its ``gen throughput`` is the number of
tokens since the line before, divided by the time since then. So the mean time of a decode step is the number of rows
divided by the throughput, if no prefill batch ran between the two lines. If one ran, the rest of the time is that of
the prefill batches.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from typing import Final

from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.errors import ConfigError
from chairlift_lab.fitting.run import Run, TimedStep

__all__ = ["is_sglang_log", "read_sglang_log"]

_BATCH: Final = re.compile(r"(?P<kind>Prefill|Decode) batch(?: \[\d{1,12}\])?[.,]? (?P<fields>#.*)")
_FIELD: Final = re.compile(r"(?P<name>[#\w][^:,]{0,60}): (?P<value>[^,]{1,40})")
_NEAR: Final = 0.1
"""Largest relative difference of the rows of two lines between which the number of rows counts as constant."""


@dataclasses.dataclass(slots=True)
class _Window:
    """What ran between two decode lines."""

    rows: int
    context: int
    step_seconds: float
    """Time since the line before, per decode step."""
    prefills: list[int]


def is_sglang_log(text: str) -> bool:
    """Whether a text has SGLang's lines about decode batches."""
    return re.search(r"Decode batch(?: \[\d{1,12}\])?[.,]? #running-req", text) is not None


def read_sglang_log(name: str, text: str, steps_per_line: int = 40) -> Run:
    """The steps of a log: the mean decode step of each line, and prefill batches. ``steps_per_line``: SGLang's
    ``--decode-log-interval``. Raises ConfigError for a log of an engine that speculates, and for one with too few
    lines."""
    windows = _windows(name, text)
    pure = [each for each in windows if not each.prefills]
    if len(pure) < 8:
        raise ConfigError(
            f"{name}: {len(pure)} pairs of decode lines have no prefill batch between them, and a fit needs 8; record a"
            " longer run, or one with fewer requests per second"
        )
    steps: list[TimedStep] = [(StepFeatures(each.rows, each.context), each.step_seconds) for each in pure]
    for each in windows:
        if not each.prefills:
            continue
        rest = steps_per_line * (each.step_seconds - _decode_seconds(pure, each))
        tokens = round(statistics.fmean(each.prefills))
        if rest > 0:
            steps.append((StepFeatures(0, 0, tokens, tokens * (tokens + 1) / 2), rest / len(each.prefills)))
    unknown = {"pair": "the log does not say how the prompts of a batch are divided"}
    if len(steps) == len(pure):
        unknown["prompt"] = "the log has no prefill batch between two decode lines"
    return Run(name=name, source="log of SGLang", steps=steps, unknown=unknown)


def _windows(name: str, text: str) -> list[_Window]:
    found: list[_Window] = []
    prefills: list[int] = []
    last_rows: int | None = None
    for line in text.splitlines():
        match = _BATCH.search(line)
        if match is None:
            continue
        fields = {each["name"].strip(): each["value"].strip() for each in _FIELD.finditer(match["fields"])}
        if "accept len" in fields:
            raise ConfigError(
                f"{name}: decode lines have an accept len, so the engine speculates; a fit needs a run"
                " without speculative decoding"
            )
        try:
            if match["kind"] == "Prefill":
                prefills.append(int(fields["#new-token"]))
                continue
            rows, tokens = int(fields["#running-req"]), int(fields["#token"])
            rate = float(fields["gen throughput (token/s)"])
        except (KeyError, ValueError):
            raise ConfigError(
                f"{name}: this line lacks #new-token, or #running-req, #token and gen throughput: {line.strip():.120}"
            ) from None
        # The rows of the steps since the line before are known only if both lines have about as many.
        constant = last_rows is not None and rows and abs(rows - last_rows) <= _NEAR * rows
        if constant and rate > 0:
            found.append(_Window(rows, tokens, rows / rate, prefills))
        last_rows, prefills = rows, []
    return found


def _decode_seconds(pure: list[_Window], window: _Window) -> float:
    """Seconds of a decode step with about as many rows and positions, from lines without prefill."""

    def distance(other: _Window) -> float:
        return abs(other.rows - window.rows) / window.rows + abs(other.context - window.context) / (window.context + 1)

    nearest = sorted(pure, key=distance)[:5]
    return statistics.median(each.step_seconds for each in nearest)
