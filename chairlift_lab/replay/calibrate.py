"""Fits a cost model to real steps: steps of a short calibration run, or of a step log in a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift.engine.step_export import read_recording
from chairlift.engine.step_log import StepRecord
from chairlift.errors import ConfigError
from chairlift_lab.replay.machines import MACHINES, Deployment, ModelShape
from chairlift_lab.replay.replay import serve_trace
from chairlift_lab.replay.traced_request import PREFIX_BLOCK, TracedRequest

__all__ = ["StepTimes", "calibrate", "describe_fit", "fit_core", "fit_deployment", "fit_steps", "read_steps"]

_PROMPTS: Final = (16, 200, 64)
_ANSWER: Final = 12
_USUAL: Final = "genoa-9654"
"""Machine whose costs are the prior of a fit: a CPU without matrix units, with a typical ratio of speed to
bandwidth."""
_LONG_PROMPTS: Final = (32, 96, 200, 400, 800, 1600)
_MAX_FITTED_ROWS: Final = 64


class StepTimes:
    """Subscriber to the events of an engine core. It collects the duration of each step for a cost model."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepFeatures, float]] = []
        self.lines: list[str] = []
        """Records of the collected steps: one line of JSON per step."""
        self._last_end = 0.0

    def landed(self, record: StepRecord) -> None:
        """Record a step that has ended."""
        # With look-ahead, a step is scheduled while the previous step is still running.
        self.steps.append((record.features, record.end - max(record.start, self._last_end)))
        self.lines.append(record.to_json())
        self._last_end = record.end


def calibrate(core: EngineCore, limits: ModelLimits, max_rows: int) -> StepTimes:
    """Time steps of a real engine: batches of 1, 2, 4, ... up to ``max_rows`` rows, and prompts of many lengths.

    All sizes run twice, the second time in reverse order, so that a slow moment of the machine does not affect only one
    size. The core must be idle. For 64 rows the calibration takes about 280 steps. Prompts are shortened to fit the
    model and the KV cache.
    """
    room = min(limits.max_model_len, core.kv.capacity_tokens + 1)
    counts = sorted({min(1 << power, max_rows) for power in range(max_rows.bit_length() + 1)})
    batches = [[(_PROMPTS[row % len(_PROMPTS)], _ANSWER) for row in range(count)] for count in counts]
    batches += [[(length, 3)] for length in _LONG_PROMPTS]
    # Batches with short and with long contexts, so that the fit can separate the cost of a row from the cost of its
    # context.
    batches += [[(16, _ANSWER)] * min(max_rows, 24), [(900, _ANSWER)] * min(max_rows, 4)]
    times = StepTimes()
    serial = 0
    try:
        for index, batch in enumerate([[(16, 4)], *batches, *batches[::-1]]):
            if index == 1:  # the first batch is warm-up
                core.events.subscribe("the calibration", times)
            requests = []
            for prompt, answer in batch:
                answer = min(answer, room // 2)
                prompt = min(prompt, room - answer)
                # Each prompt has its own prefix ids, so that it is never found in the prefix cache.
                own = tuple(range(serial, serial - (-prompt // PREFIX_BLOCK)))
                serial += len(own)
                requests.append(TracedRequest(arrival=0.0, prompt_tokens=prompt, output_tokens=answer, prefix_ids=own))
            serve_trace(core, requests, limits)
    finally:
        core.events.unsubscribe("the calibration")
    return times


def fit_steps(steps: list[tuple[StepFeatures, float]], shape: ModelShape | None = None) -> CostModel:
    """Fit a cost model to (features, seconds) of real steps.

    ``shape`` gives a prior for the durations of step sizes that were not measured. The fit scales this prior, too.
    Raises ConfigError when there are too few steps.
    """
    count = sum(seconds > 0 for _, seconds in steps)
    if count < 16:
        raise ConfigError(f"a cost model needs at least 16 steps that took time, and there are {count}; record more")
    model = CostModel(None if shape is None else shape.on(MACHINES[_USUAL]))
    model.fit(steps)
    return model


def describe_fit(model: CostModel, steps: list[tuple[StepFeatures, float]]) -> str:
    """Text that says how well a cost model predicts the durations of ``steps``."""
    errors = model.errors(steps)
    p50 = errors[len(errors) // 2]
    p90 = errors[int(0.9 * len(errors))]
    return f"fitted on {len(errors):,} real steps, half of them within {p50:.0%} and nine of ten within {p90:.0%}"


def fit_core(core: EngineCore, limits: ModelLimits, machine: str, shape: ModelShape) -> tuple[Deployment, StepTimes]:
    """Time steps of a real, idle engine (:func:`calibrate`), and fit a cost model to them.

    Returns (deployment with this cost model and the engine's KV cache, step times).
    """
    times = calibrate(core, limits, min(core.scheduler.batch.max_running, _MAX_FITTED_ROWS))
    size = core.executor.block_size
    # The dtype of the KV cache may differ from the dtype of the model.
    kv_bytes = sum(core.executor.block_bytes) // size
    memory = core.executor.cache_groups[0].num_blocks * size * kv_bytes
    deployment = fit_deployment(machine, shape, times.steps, memory, limits.max_model_len)
    shared = core.scheduler.batch.reads_shared_once
    return dataclasses.replace(deployment, kv_bytes_per_token=kv_bytes, reads_shared_once=shared), times


def fit_deployment(
    machine: str, shape: ModelShape, steps: list[tuple[StepFeatures, float]], memory: int, max_model_len: int
) -> Deployment:
    """Deployment whose cost model is fitted to real steps. ``memory`` is the size of the KV cache in bytes.

    Raises ConfigError when there are too few steps.
    """
    cost = fit_steps(steps, shape)
    return Deployment(
        machine=machine,
        model=shape.name,
        cost=cost,
        kv_bytes_per_token=shape.kv_bytes,
        kv_memory_bytes=memory,
        max_model_len=max_model_len,
        validity=describe_fit(cost, steps),
    )


def read_steps(path: Path) -> list[tuple[StepFeatures, float]]:
    """Read (features, seconds) of each step from a step log (one JSON object per line) or a recording of the live view.

    Raises ConfigError with the line number for an invalid line.
    """
    steps: list[tuple[StepFeatures, float]] = []
    last_end = 0.0
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the step log {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    if text.startswith('{"key":'):
        return read_recording(text.encode()).steps
    for number, line in enumerate(text.splitlines(), 1):
        try:
            # Logs of earlier versions have neither adapters nor shared prefixes.
            fields = {"adapter_bytes": 0.0, "shared_tokens": 0.0, **json.loads(line)}
            features = StepFeatures(*(float(fields[name]) for name in StepFeatures._fields))  # type: ignore[arg-type]
            start, end = float(fields["start"]), float(fields["end"])
        except (ValueError, TypeError, KeyError, RecursionError):
            wanted = ", ".join(("start", "end", *StepFeatures._fields))
            raise ConfigError(
                f"line {number} of {path} is not a step: it must be a JSON object with {wanted}"
            ) from None
        if not all(0 <= value < 1e15 for value in (*features, start, end)) or end <= start:  # this excludes NaN, too
            raise ConfigError(f"line {number} of {path}: a step cannot have {line.strip():.80}")
        steps.append((features, end - max(start, last_end)))
        last_end = end
    return steps
