"""``chairlift lab fit``: fits a machine to logs or benchmark records, also of other engines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import chairlift
from chairlift.base.writing import check_writable, replacing
from chairlift.cli.flags import add_engine_flags, read_settings, whole
from chairlift.config import flat_fields
from chairlift.errors import ConfigError
from chairlift_lab.cli.sim import NOT_SIMULATED, setting_value

if TYPE_CHECKING:
    from chairlift_lab.fitting.fit import FitPlan
    from chairlift_lab.fitting.run import Run

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "fit a machine to logs or benchmark records, also of vLLM and SGLang"
DESCRIPTION: Final = """Fit a machine to runs of an engine, and print its errors on runs that were held back.

A FILE is a benchmark's record of requests (vllm bench serve --save-result --save-detailed, or chairlift bench serve
--json), the log of a vLLM server with --enable-logging-iteration-details, the log of an SGLang server, or a step
log. The settings of the engine are flags; FILE@SETTING=VALUE,... gives those that differ in one file. The machine file
is for chairlift sim --machine, tune --fleet --machine and lab.

  chairlift lab fit rate2.json rate4.json --hold-back rate6.json --machine h100-sxm --model llama-3-8b \\
      --preset vllm --no-enable-prefix-caching --capture-sizes vllm --save my-h100.json
  chairlift sim --machine my-h100.json --workload chat --arrivals poisson:20"""

_SIZES: Final = ("none", "vllm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift lab fit``."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="runs to fit, at low and medium rates")
    parser.add_argument(
        "--hold-back",
        metavar="FILE",
        nargs="+",
        action="extend",
        default=[],
        help="runs to test the fit on: other rates, other lengths, other settings",
    )
    parser.add_argument("--machine", metavar="NAME", required=True, help="the most similar known machine: the prior")
    parser.add_argument(
        "--model", metavar="NAME", required=True, help="a known model, or a directory with a config.json"
    )
    parser.add_argument("--name", metavar="TEXT", help="name of the fitted machine (default: NAME, fitted)")
    parser.add_argument(
        "--capture-sizes",
        metavar="SIZES",
        default="none",
        help="numbers of tokens to which steps are padded: none (default), vllm (its CUDA graphs), or 1,2,4,8,...",
    )
    parser.add_argument(
        "--decode-log-interval",
        metavar="N",
        type=whole,
        default=40,
        help="decode steps per line of an SGLang log, as set there (default: 40)",
    )
    parser.add_argument(
        "--no-polish",
        dest="polishes",
        action="store_false",
        help="fit steps only; do not adjust the machine to the latencies of requests",
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the machine to this file")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write terms and errors to this file")
    add_engine_flags(parser, leave_out=NOT_SIMULATED)


def run(args: argparse.Namespace) -> int:
    """Fit. Returns 0. Raises ChairliftError if it cannot fit."""
    from chairlift_lab.fitting.fit import fit_machine
    from chairlift_lab.fitting.report import fit_lines, fit_record
    from chairlift_lab.replay.machines import write_deployment

    inputs = [_split(text)[0] for text in (*args.files, *args.hold_back)]
    check_writable(args.save, "save", *inputs, args.json, args.config)
    check_writable(args.json, "json", *inputs, args.save)
    plan = _plan(args)
    progress = _progress if sys.stderr.isatty() else None
    result = fit_machine(plan, progress)
    if progress is not None:
        print(file=sys.stderr)
    print("\n".join(fit_lines(plan, result)))
    if args.save is not None:
        write_deployment(args.save, result.deployment)
        print(f"\nwrote {args.save}: {result.deployment.validity}")
    if args.json is not None:
        record = {"chairlift": chairlift.__version__, "benchmark": "lab fit", **fit_record(plan, result)}
        with replacing(args.json) as file:
            file.write(json.dumps(record, indent=1) + "\n")
    return 0


def _plan(args: argparse.Namespace) -> FitPlan:
    from chairlift_lab.fitting.fit import FitPlan
    from chairlift_lab.replay.machines import MACHINES, deploy, shape_from_name

    if args.machine not in MACHINES:
        raise ConfigError(f"machine must be one of {', '.join(MACHINES)}: the most similar one; got {args.machine!r}")
    settings, _ = read_settings(args, sampling=False)
    refused = sorted(NOT_SIMULATED & settings.keys())
    if refused:
        raise ConfigError(f"{refused[0]} in {args.config} means nothing to a simulation; leave it out")
    if args.decode_log_interval < 1:
        raise ConfigError(f"decode_log_interval must be at least 1, got {args.decode_log_interval}")
    seen = [Path(_split(text)[0]).resolve() for text in args.files]
    for text in args.hold_back:
        if Path(_split(text)[0]).resolve() in seen:
            raise ConfigError(f"{_split(text)[0]} is fitted and held back; a test needs a run that the fit did not see")
    return FitPlan(
        runs=[run for text in args.files for run in _read(text, args, settings)],
        held_back=[run for text in args.hold_back for run in _read(text, args, settings)],
        sheet=deploy(args.machine, shape_from_name(args.model)),
        name=args.name or f"{args.machine}, fitted",
        settings=settings,
        capture_sizes=_sizes(args.capture_sizes, settings.get("max_num_seqs", 256)),
        polishes=args.polishes,
    )


def _read(text: str, args: argparse.Namespace, settings: dict[str, Any]) -> list[Run]:
    from chairlift_lab.fitting.read import read_runs

    path, own = _split(text)
    cache_is_off = {**settings, **own}.get("enable_prefix_caching") is False
    return read_runs(Path(path), settings=own, cache_is_off=cache_is_off, steps_per_line=args.decode_log_interval)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """(path, settings) of ``FILE`` or ``FILE@SETTING=VALUE,...``. Raises ConfigError."""
    path, at, words = text.rpartition("@")
    if not at or Path(text).exists():
        return text, {}
    flags = {flag.name: flag for flag in flat_fields() if flag.name not in NOT_SIMULATED}
    found = {}
    for word in words.split(","):
        name, equals, value = word.partition("=")
        flag = flags.get(name.replace("-", "_"))
        if flag is None or not equals:
            raise ConfigError(
                f"{word!r} in {text} is not SETTING=VALUE with a setting of the engine that chairlift lab fit --help"
                " lists, such as FILE@max_num_seqs=8,policy_share=1; correct it"
            )
        found[flag.name] = setting_value(flag, value)
    return path, found


def _sizes(text: str, max_num_seqs: int) -> tuple[int, ...]:
    from chairlift_lab.replay.padding import vllm_capture_sizes

    if text in _SIZES:
        return vllm_capture_sizes(max_num_seqs) if text == "vllm" else ()
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise ConfigError(f"--capture-sizes must be none, vllm, or whole numbers above 0 like 1,2,4,8; got {text!r}")
    return tuple(sizes)


def _progress(simulated: int, loss: float) -> None:
    print(f"\r{simulated} simulations, typical error {loss**0.5:.1%} ", end="", file=sys.stderr, flush=True)
