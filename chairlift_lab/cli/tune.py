"""``chairlift tune``: measures the gain from batching for a given traffic, and recommends settings."""

from __future__ import annotations

import argparse
import gc
import hashlib
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import chairlift
from chairlift.base.presets import with_preset
from chairlift.base.writing import replacing
from chairlift.cli.flags import add_engine_flags, read_settings
from chairlift.config import BUNDLED_MODEL, EngineConfig
from chairlift.errors import ConfigError
from chairlift_lab.cli.sim import add_traffic_flags, read_traffic
from chairlift_lab.cli.tune_fleet import add_fleet_size_flags, check_fleet_flags, run_fleet

if TYPE_CHECKING:
    from chairlift.engine.core import EngineCore
    from chairlift.engine.input_processor import ModelLimits
    from chairlift_lab.bench.tune_lab import MakeCore
    from chairlift_lab.bench.tune_report import TuneAnswer
    from chairlift_lab.workload.trace import TracedRequest

__all__ = ["DESCRIPTION", "SUMMARY", "ProgressLine", "add_arguments", "duration", "engine_maker", "run"]

SUMMARY: Final = "measure the gain from batching for your traffic, and recommend settings"
DESCRIPTION: Final = """Measure the gain from batching for your traffic on this machine, and recommend settings.

The command runs static batches, then continuous batching with its defaults. A simulator, fitted on measured steps of
the model, tries many settings. The real engine runs the best candidates in turns. The best settings meet the targets
(--slo) for 99 of 100 requests, preempt fewer than 2 of 100, and have the highest throughput.

  chairlift tune --workload chat --output tuned
  chairlift tune MODEL --trace traffic.jsonl --slo ttft:500,tpot:80 --price-per-hour 1.50 --output tuned
  chairlift serve MODEL --config tuned/chairlift.yaml
  chairlift tune llama-3-8b --fleet --machine h100-sxm --workload assistant --arrivals poisson:60 --slo ttft:500,tpot:9

The output directory gets chairlift.yaml, report.html and tune.json. After Ctrl-C, the same command continues. Settings
that are given as flags stay unchanged; the command searches the others."""

_SLO: Final = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "deadline_ms"}
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}
_BUSY: Final = 0.1
_EVERY: Final = 10.0
"""Seconds between lines of progress if the output is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift tune``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    add_traffic_flags(parser, required=True)
    goal = parser.add_argument_group("goal and limits")
    goal.add_argument(
        "--slo",
        metavar="NAME:MS,...",
        type=_slo,
        default={},
        help="latency limits for requests without their own: ttft (time to first token), tpot (time per "
        "output token), e2el (whole request), in ms; as in ttft:500,tpot:80",
    )
    goal.add_argument("--output", metavar="DIR", type=Path, help="directory for the results")
    goal.add_argument(
        "--time-limit",
        metavar="TIME",
        type=duration,
        default=600.0,
        help="maximum duration, such as 90s or 10m (default: 10m)",
    )
    goal.add_argument(
        "--price-per-hour", metavar="PRICE", type=_positive, default=1.0, help="price of this machine (default: 1)"
    )
    goal.add_argument(
        "--rate-scale", metavar="X", type=_positive, default=1.0, help="requests arrive X times as fast (default: 1)"
    )
    add_fleet_size_flags(parser)
    add_engine_flags(parser, leave_out={"model", "seed", "batching"})


def run(args: argparse.Namespace) -> int:
    """Tune. Returns 0. Raises ChairliftError if it cannot run."""
    check_fleet_flags(args)
    requests, users, what = read_traffic(args)
    what += "" if args.rate_scale == 1 else f", {args.rate_scale:g} times as fast"
    if args.fleet:
        with_slo = [_with_slo(request, args.slo) for request in _scaled(requests, args.rate_scale)]
        return run_fleet(args, with_slo, users, what)
    fixed = with_preset(read_settings(args, sampling=False)[0])  # the settings of a preset are fixed, too
    name = fixed.pop("model", BUNDLED_MODEL) if args.model is None else args.model
    EngineConfig.from_flat(fixed)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {args.output}: {error.strerror}; give another --output") from None
    from chairlift.engine.clock import SystemClock
    from chairlift_lab.bench.machine import describe_machine
    from chairlift_lab.bench.other_load import OtherLoad
    from chairlift_lab.bench.report import text
    from chairlift_lab.bench.tune import Question, tune
    from chairlift_lab.bench.tune_report import TuneAnswer, printed
    from chairlift_lab.bench.tune_state import State

    machine = describe_machine()
    inputs = {
        "model": name,
        "traffic": _digest(requests, users),
        "slo": args.slo,
        "rate_scale": args.rate_scale,
        "settings": fixed,
        "machine": f"{machine.cpu}, {machine.processors} processors",
        "chairlift": chairlift.__version__,
    }
    state = State(args.output / "tune.json", inputs)
    question = Question(
        requests=_scaled(requests, args.rate_scale), users=users, slo=args.slo, fixed=fixed, time_limit=args.time_limit
    )
    progress = ProgressLine()
    progress.line(_described(question.requests, users, what))
    if state.resumed:
        progress.line(f"{state.path} holds results of the same question: going on from there")
    if machine.busy > _BUSY:
        progress.line(f"warning: other programs use {machine.busy:.0%} of this machine; measured times will vary")
    make_core, shape = engine_maker(name, fixed)
    try:
        findings = tune(
            question,
            state,
            make_core,
            machine=machine.cpu,
            shape=shape,
            clock=SystemClock(),
            say=progress.update,
            other_load=OtherLoad().share,
        )
    except KeyboardInterrupt:
        state.save()
        progress.line(f"stopped; what was found out is in {state.path}, and the same command goes on from there")
        raise
    progress.end()
    command = shlex.join(["chairlift", *sys.argv[1:]]) if sys.argv[1:2] == ["tune"] else "chairlift tune ..."
    answer = TuneAnswer(
        findings=findings,
        state=state,
        model=name,
        what=what,
        fixed=fixed,
        machine=machine,
        price=args.price_per_hour,
        command=command,
        output=args.output,
    )
    _write(answer)
    print("", *text(*printed(answer)), sep="\n")
    return 0


def _write(answer: TuneAnswer) -> None:
    """Write the settings, the page and the results to the output directory."""
    from chairlift_lab.bench.tune_report import config_lines, tune_report

    report = tune_report(answer)
    files = {"chairlift.yaml": "\n".join(config_lines(answer)) + "\n", "report.html": report.html()}
    for file, whole in files.items():
        with replacing(answer.output / file) as opened:
            opened.write(whole)
    answer.state.report = dict(report.record)
    answer.state.save()


# --- what is asked ---------------------------------------------------------------------------------------------------


def _digest(requests: list[TracedRequest], users: int | None) -> str:
    digest = hashlib.sha256(repr(users).encode())
    for request in requests:
        digest.update(repr(request).encode())
    return digest.hexdigest()[:16]


def _scaled(requests: list[TracedRequest], scale: float) -> list[TracedRequest]:
    import dataclasses

    return [dataclasses.replace(request, arrival=request.arrival / scale) for request in requests]


def _with_slo(request: TracedRequest, slo: Mapping[str, float]) -> TracedRequest:
    """Add the latency limits in ``slo`` to a request that has no latency limits of its own."""
    import dataclasses

    own = any(limit is not None for limit in (request.ttft_ms, request.tpot_ms, request.deadline_ms))
    more: dict[str, Any] = {} if own else dict(slo)
    return dataclasses.replace(request, **more)


def _described(requests: Sequence[TracedRequest], users: int | None, what: str) -> str:
    prompt, output = (sum(getattr(each, name) for each in requests) for name in ("prompt_tokens", "output_tokens"))
    span = requests[-1].arrival - requests[0].arrival
    if span > 0:
        rate = f", {(len(requests) - 1) / span:.2f} requests/s"
    elif users is None:
        rate = ", all at once"
    else:
        rate = ""
    return f"{what}: {prompt:,} prompt tokens, {output:,} output tokens{rate}"


def engine_maker(name: str, fixed: Mapping[str, Any]) -> tuple[MakeCore, Any]:
    """Returns (function that creates an engine with the model ``name``, shape of the model)."""
    from chairlift import LLM
    from chairlift.models.loader import resolve_dtype, resolve_model_dir
    from chairlift.models.model_files import read_config
    from chairlift_lab.replay.machines import ModelShape

    bundled = Path(chairlift.__file__).parent / "assets"
    model_dir = bundled if name == BUNDLED_MODEL else resolve_model_dir(name, fixed.get("revision"))
    network = read_config(model_dir)
    dtype = resolve_dtype(network, fixed.get("dtype", "auto"))

    def make_core(settings: Mapping[str, Any]) -> tuple[EngineCore, ModelLimits]:
        gc.collect()  # the engine before left much, and a collection in the middle of a run would count
        llm = LLM(**{**settings, "model": str(model_dir), "skip_tokenizer_init": True})
        return llm.engine.core, llm.engine.limits

    return make_core, ModelShape.of(name, network, dtype.itemsize)


def _slo(text: str) -> dict[str, float]:
    """Field of TracedRequest -> limit, parsed from text such as ``ttft:500,tpot:80``."""
    promises: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        try:
            promises[_SLO[name]] = _positive(value)
        except (KeyError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(
                f"must be names and milliseconds like ttft:500,tpot:80 (names: {', '.join(_SLO)}), got {text!r}"
            ) from None
    return promises


def duration(text: str) -> float:
    """argparse parser of a time such as ``90s`` or ``10m``: the seconds."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh]?)", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 5 <= seconds <= 86_400 * 7:
        raise argparse.ArgumentTypeError(f"must be a time from 5s to 168h, such as 90s or 10m, got {text!r}")
    return seconds


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-9 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


# --- progress --------------------------------------------------------------------------------------------------------


class ProgressLine:
    """Shows progress on standard error: one changing line on a terminal, otherwise a line at intervals."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = -_EVERY
        self._stage = ""

    def update(self, text: str) -> None:
        stage = text[:1]
        now = time.monotonic()
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage or now >= self._shown + _EVERY:
            print(text, file=sys.stderr, flush=True)
            self._shown = now
            self._stage = stage

    def line(self, text: str) -> None:
        self.end()
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
