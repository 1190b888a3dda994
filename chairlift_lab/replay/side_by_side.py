"""Compares two sets of rules (presets, or the recorded settings) on the requests of a recording, at the same times.

The recorded values are measured, and are reported first. A cost model is fitted to the recorded steps, and both sides
are simulated with it. The recorded run is simulated, too. If the cost model is inaccurate, or if this simulation
differs from the recording, there is no comparison, and the error says why.

The program of this module is a worker (:mod:`chairlift.base.workers`). It replies to a recording with one line with the
comparison, followed by the recordings of the simulated sides, and to ``demo`` with a recording of a simulated example.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.base.presets import PRESETS, RECORDED, with_preset
from chairlift.base.workers.child import Answer, serve
from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, Roofline
from chairlift.engine.step_export import RecordedRequest, Recording, read_recording
from chairlift.engine.step_recorder import StepRecorder
from chairlift.errors import ChairliftError, ConfigError
from chairlift_lab.replay.calibrate import describe_fit, fit_steps
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import ServedTrace, serve_trace, simulated_core
from chairlift_lab.replay.served import KEEPING, kept_up
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = [
    "Side",
    "batching_sides",
    "compare",
    "compare_sides",
    "demo",
    "recorded_config",
    "recorded_deployment",
    "recorded_trace",
]


_MAX_REQUESTS: Final = 4000
_MAX_BYTES: Final = 256 << 20
_DEMO_BLOCK: Final = 16
_MAX_ERROR: Final = 0.2
"""Maximum median relative error of the cost model for which a comparison is made."""
_ALIKE: Final = 1.25
"""Maximum ratio between recorded and simulated times for which a comparison is made."""
_MIN_SECONDS: Final = 1.0
"""Minimum duration of a run whose throughput is compared."""
_SAME: Final = 0.05
"""Smallest relative difference of throughput that is called a difference, also with an exact simulation."""
_MANY: Final = 100
"""Smallest number of requests that have a 99th percentile."""
_DROPPED: Final = ("preset", "governor", "late_requests", "scheduling_policy")


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides that are compared."""

    name: str
    """Name in the sentences about the result."""
    settings: Mapping[str, Any]
    """Changes to the settings of the recorded engine."""

    @classmethod
    def of(cls, name: str) -> Side:
        """The side of a preset, or of the recorded settings. Raises ConfigError for an unknown name."""
        if name == RECORDED:
            return cls("the engine", {})
        if name not in PRESETS:
            raise ConfigError(f"a side must be {RECORDED} or one of {', '.join(PRESETS)}; got {name!r:.100}")
        return cls(name, {"preset": name})


def batching_sides(**settings: Any) -> tuple[Side, Side]:
    """Continuous and static batching, with the same changes to the recorded settings."""
    return (
        Side("continuous batching", settings | {"batching": "continuous"}),
        Side("static batching", settings | {"batching": "static"}),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """Results of one side. Times are in seconds from the arrival of a request."""

    tokens_per_second: float
    first_p50: float
    """Median time until the client gets the first token. In a static batch, this is the end of the batch."""
    whole_p50: float
    whole_p99: float
    """With fewer than 100 requests: the longest time."""
    seconds: float
    """Time from the first arrival to the end of the last request."""
    held_share: float
    """Fraction of the computed output tokens that belong to rows which had ended but stayed in their static batch."""
    requests: int
    """Number of requests that ended."""
    kept_up: float
    """Number of ended requests divided by the number of arrived requests, in the second half of the arrivals."""


def recorded_trace(recording: Recording) -> list[TracedRequest]:
    """Convert the requests of a recording to a trace, in which the first request arrives at 0. Raises ConfigError if
    the recording has no requests."""
    requests = recording.arrivals[-_MAX_REQUESTS:]
    if not requests:
        raise ConfigError(
            "the recording has no request with known lengths of prompt and answer: the lengths are known only for"
            " requests that arrived while /live was open; record for longer, with that page open"
        )
    begin = requests[0].arrival
    return [
        TracedRequest(arrival=each.arrival - begin, prompt_tokens=each.prompt_tokens, output_tokens=each.output_tokens)
        for each in requests
    ]


def recorded_config(recording: Recording, **changes: Any) -> EngineConfig:
    """Settings of the recorded engine, as far as a simulation uses them, with ``changes``."""
    # a preset wins over recorded settings
    about = recording.about
    changes = with_preset(changes)
    settings = {name: value for name, value in about["settings"].items() if name not in _DROPPED}
    if (settings | changes).get("batching", "continuous") == "continuous":
        settings.pop("preferred_batch_sizes", None)  # not a setting of continuous batching
    settings |= {name: about[name] for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")}
    return EngineConfig.from_flat(settings | changes)


def recorded_deployment(recording: Recording) -> Deployment:
    """Deployment with a cost model that is fitted to the recorded steps. Raises ConfigError for too few steps."""
    cost = fit_steps(recording.steps)
    about = recording.about
    bytes_per_token = max(1, about["block_bytes"] // about["block_size"])
    return Deployment(
        machine="the recorded machine",
        model="the recorded model",
        cost=cost,
        kv_bytes_per_token=bytes_per_token,
        reads_shared_once=recording.about.get("reads_shared_once") is True,
        kv_memory_bytes=about["pools"][0] * about["block_size"] * bytes_per_token,
        max_model_len=about["max_model_len"],
        validity=describe_fit(cost, recording.steps),
    )


def _simulate(
    trace: Sequence[TracedRequest], config: EngineConfig, deployment: Deployment
) -> tuple[ServedTrace, bytes]:
    """Simulate a trace. Returns (results, recording of all steps)."""
    core, limits = simulated_core(deployment, config)
    recorder = StepRecorder(core, most_bytes=_MAX_BYTES)
    served = serve_trace(core, trace, limits)
    return served, recorder.take()


def compare(data: bytes, upper: str, lower: str) -> bytes:
    """Compare two sides, each named as for :meth:`Side.of`, on the requests of a recording.

    Returns one line of JSON with the results, followed by the recordings of both runs. The upper one is left out if it
    has the recorded settings, because the recording itself shows that run. Raises ConfigError if no comparison is
    possible.
    """
    figures, *runs = compare_sides(read_recording(data), Side.of(upper), Side.of(lower))
    if upper == RECORDED:
        runs[0] = b""
    about = {
        name: {"system": PRESETS[name].system, "does": PRESETS[name].does} for name in (upper, lower) if name in PRESETS
    }
    figures |= {"sides": [upper, lower], "about": about, "upper_lines": len(runs[0].splitlines())}
    return b"\n".join([json.dumps({"compare": figures}).encode(), *filter(None, runs)])


def compare_sides(recording: Recording, upper: Side, lower: Side) -> tuple[dict[str, Any], bytes, bytes]:
    """Compare two sides on the requests of a recording. Returns (results, recordings of both simulated runs).

    Raises ConfigError if no comparison is possible.
    """
    trace = recorded_trace(recording)
    deployment = recorded_deployment(recording)
    _check_fit(recording, deployment)
    recorded = recorded_config(recording)
    measured = _measured(recording, len(trace))
    again = _simulated_side(trace, recorded, deployment)[0]
    _check_alike(measured, again)
    configs = [recorded_config(recording, **side.settings) for side in (upper, lower)]
    (one, upper_lines), (other, lower_lines) = (_simulated_side(trace, config, deployment) for config in configs)
    figures = {
        "measured": dataclasses.asdict(measured),
        "upper": dataclasses.asdict(one),
        "lower": dataclasses.asdict(other),
        "requests": len(trace),
        "begin": recording.arrivals[-len(trace)].arrival,
        "validity": deployment.validity,
        "words": [
            *(_measured_words(upper.name, measured) if configs[0] == recorded else ()),
            *_words(
                (upper.name, one),
                (lower.name, other),
                configs[1].scheduler.batching == "static",
                _error(recording, deployment, measured, again),
            ),
            *_held_words(
                result
                for result, config in zip((one, other), configs, strict=True)
                if config.scheduler.batching == "static"
            ),
        ],
    }
    return figures, upper_lines, lower_lines


def _check_fit(recording: Recording, deployment: Deployment) -> None:
    """Raise ConfigError if the cost model is too inaccurate for a comparison."""
    errors = deployment.cost.errors(recording.steps)
    median_error = errors[len(errors) // 2]
    if median_error > _MAX_ERROR:
        raise ConfigError(
            f"no comparison: the step model misses half of the {len(errors):,} recorded steps by more than"
            f" {median_error:.0%} (allowed: {_MAX_ERROR:.0%}); record for longer, while the machine runs nothing else"
        )


def _measured(recording: Recording, count: int) -> _Result:
    """Measured results of the last ``count`` requests of a recording, without requests that have not ended.

    Raises ConfigError if no request has ended.
    """
    done = [each for each in recording.arrivals[-count:] if each.ended is not None]
    if not done:
        raise ConfigError("no comparison: no recorded request has ended yet; record for longer")
    whole = [(each.ended or 0.0) - each.arrival for each in done]
    first = [each.first - each.arrival for each in done if each.first is not None]
    seconds = max(each.ended or 0.0 for each in done) - min(each.arrival for each in done)
    return _Result(
        tokens_per_second=sum(each.output_tokens for each in done) / seconds if seconds > 0 else 0.0,
        first_p50=float(np.median(first)) if first else 0.0,
        whole_p50=float(np.median(whole)),
        whole_p99=_slow(whole),
        seconds=seconds,
        held_share=0.0,
        requests=len(done),
        kept_up=_kept_up(recording.arrivals[-count:]),
    )


def _check_alike(measured: _Result, simulated: _Result) -> None:
    """Raise ConfigError if the ``simulated`` times of the recorded engine differ too much from the ``measured``
    times."""
    for what, recorded, simulated_seconds in (
        ("an answer (median)", measured.whole_p50, simulated.whole_p50),
        ("all of them", measured.seconds, simulated.seconds),
    ):
        if not recorded / _ALIKE <= simulated_seconds <= recorded * _ALIKE:
            raise ConfigError(
                f"no comparison: {what} took {_seconds(recorded)}, but {_seconds(simulated_seconds)} in a simulation of"
                " the same engine, so a simulation of static batches would not be reliable; record for longer, and"
                " begin while the engine is idle"
            )


def _simulated_side(
    trace: Sequence[TracedRequest], config: EngineConfig, deployment: Deployment
) -> tuple[_Result, bytes]:
    served, lines = _simulate(trace, config, deployment)
    return _side(served, read_recording(lines), config.scheduler.batching == "static"), lines


def _side(served: ServedTrace, recording: Recording, held: bool) -> _Result:
    done = [each for each in recording.arrivals if each.ended is not None]
    whole = [(each.ended or 0.0) - each.arrival for each in done] or [0.0]
    seconds = max((each.ended or 0.0 for each in done), default=0.0) - min((each.arrival for each in done), default=0.0)
    computed = sum(features.num_decodes for features, _ in recording.steps)
    wanted = sum(max(0, each.output_tokens - 1) for each in done)
    return _Result(
        tokens_per_second=served.output_tokens / seconds if seconds > 0 else 0.0,
        first_p50=served.ttft.p50,
        whole_p50=float(np.median(whole)),
        whole_p99=_slow(whole),
        seconds=seconds,
        held_share=max(0.0, 1 - wanted / computed) if held and computed else 0.0,
        requests=len(done),
        kept_up=_kept_up(recording.arrivals),
    )


def _slow(whole: Sequence[float]) -> float:
    """The 99th percentile, or the longest time of fewer than 100 requests."""
    return float(np.percentile(whole, 99)) if len(whole) >= _MANY else max(whole)


def _kept_up(arrivals: Sequence[RecordedRequest]) -> float:
    """:func:`kept_up` of a run; 0 if all requests arrive at once, because a side cannot keep up with that."""
    if len({each.arrival for each in arrivals}) < 2:
        return 0.0
    return kept_up([(each.arrival, math.inf if each.ended is None else each.ended) for each in arrivals])


def _error(recording: Recording, deployment: Deployment, measured: _Result, simulated: _Result) -> float:
    """Relative error of the simulation: that of half of the steps, or of the whole recorded run if that is larger."""
    errors = deployment.cost.errors(recording.steps)
    run = abs(simulated.seconds / measured.seconds - 1) if measured.seconds > 0 else 0.0
    return max(run, errors[len(errors) // 2])


def _measured_words(name: str, measured: _Result) -> list[str]:
    return [
        f"Measured: {name} finished everything in {_seconds(measured.seconds)}, with"
        f" {measured.tokens_per_second:,.0f} tokens per second. Half of the people saw their first word within"
        f" {_seconds(measured.first_p50)}; half of the answers were complete within {_seconds(measured.whole_p50)},"
        f" {_most(measured.requests)} within {_seconds(measured.whole_p99)}."
    ]


def _words(upper: tuple[str, _Result], lower: tuple[str, _Result], whole: bool, error: float) -> list[str]:
    """Sentences that compare two simulated sides, each with its name. ``whole``: the lower side delivers answers when
    their batch has ended. ``error``: relative error of the simulation."""
    (name, one), (against, other) = upper, lower
    why = ", because a static batch delivers when all of it is done" if whole else ""
    return [
        f"Simulated, both: {name} finishes everything in {_seconds(one.seconds)}, {against}"
        f" in {_seconds(other.seconds)}, with {one.tokens_per_second:,.0f} tokens per second against"
        f" {other.tokens_per_second:,.0f}. {_ratio_words(name, one, other, error)}",
        f"Simulated: with {name}, half of the people see their first word within {_seconds(one.first_p50)}, with"
        f" {against} within {_seconds(other.first_p50)}{why}.",
        f"Simulated: half of the answers are complete within {_seconds(one.whole_p50)} against"
        f" {_seconds(other.whole_p50)}; {_most(min(one.requests, other.requests))} within"
        f" {_seconds(one.whole_p99)} against"
        f" {_seconds(other.whole_p99)}.",
    ]


def _ratio_words(name: str, one: _Result, other: _Result, error: float) -> str:
    """Sentence about the ratio of the throughputs of two simulated sides, or about why none is claimed."""
    if min(one.kept_up, other.kept_up) >= KEEPING:
        return "Both keep up with the requests as they arrive, so these rates are those of the traffic."
    shortest = min(one.seconds, other.seconds)
    if shortest < _MIN_SECONDS or other.tokens_per_second <= 0:
        return f"No ratio is claimed from {_seconds(shortest)}; record at least {_seconds(_MIN_SECONDS)} of work."
    ratio = one.tokens_per_second / other.tokens_per_second
    least = max(_SAME, error)
    if 1 / (1 + least) < ratio < 1 + least:
        return f"They do not differ by more than the error of the simulation ({least:.0%})."
    return f"With {name} this is {ratio:.2f} times as much; the simulation is right within {least:.0%}."


def _most(requests: int) -> str:
    return "99 of 100" if requests >= _MANY else f"all {requests}"


def _held_words(static: Iterable[_Result]) -> list[str]:
    return [
        f"Of what simulated static batches compute for answers, {each.held_share:.0%} is for rows that have ended."
        for each in static
    ]


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.995 else f"{value:.1f} s"


def demo() -> bytes:
    """Create a recording of an example: the real scheduler runs on a simulated machine with a small KV cache. The
    traffic has bursts, and short and long answers."""
    rng = np.random.default_rng(7)
    trace = []
    now = 0.0
    for burst in range(7):
        for _ in range(int(rng.integers(8, 15))):
            now += float(rng.exponential(0.06))
            prompt = int(np.clip(rng.lognormal(4.8, 0.7), 16, 600))
            answer = int(np.clip(rng.lognormal(3.7 if rng.random() < 0.7 else 5.2, 0.5), 6, 300))
            # 40 % of the prompts begin with the same system prompt
            system = tuple(range(4)) if rng.random() < 0.4 else ()
            prompt += _DEMO_BLOCK * len(system)
            trace.append(
                TracedRequest(
                    arrival=now, prompt_tokens=prompt, output_tokens=answer, prefix_ids=system, prefix_block=_DEMO_BLOCK
                )
            )
        now += 1.6 if burst % 3 else 0.8
    prices = Roofline(weight_seconds=0.016, token_seconds=0.0002, context_seconds=4e-7, pair_seconds=2e-8)
    deployment = Deployment(
        machine="a simulated machine",
        model="a simulated model",
        cost=CostModel(prices),
        kv_bytes_per_token=1 << 16,
        kv_memory_bytes=1 << 40,
        max_model_len=2048,
    )
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 256, "num_kv_blocks": 156}
    return _simulate(trace, EngineConfig.from_flat(settings), deployment)[1]


def _prepare(setup: dict[str, Any]) -> tuple[Answer, Callable[[], object]]:
    os.nice(10)  # lower priority than the engine
    return _answer, lambda: None


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Reply with the example if ``what`` is ``demo``, else with the comparison of the sides ``upper`` and ``lower``."""
    try:
        if request["what"] == "demo":
            return {"data": demo()}
        return {"data": compare(request.get("data", b""), request["upper"], request["lower"])}
    except ChairliftError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    serve(_prepare, "the simulation takes more memory than it may; record a shorter time")
