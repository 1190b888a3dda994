"""``chairlift trace view`` and ``trace replay``: show a recording of the engine's steps again, or simulate it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import chairlift
from chairlift.base.writing import check_writable, replacing
from chairlift.cli.commands import LIVE_COMPARISON
from chairlift.cli.flags import add_engine_flags, read_settings, whole
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.engine.step_export import Recording

__all__ = [
    "DESCRIPTION",
    "REPLAY_DESCRIPTION",
    "REPLAY_SUMMARY",
    "SUMMARY",
    "add_arguments",
    "add_replay_arguments",
    "replay",
    "run",
]

SUMMARY: Final = "show a recording of steps in the browser"
DESCRIPTION: Final = """Show a recording of steps in the live view: the row and the KV blocks of each request.

The button JSONL of a server's page /live saves a recording of steps. Or use curl:

  curl -o steps.jsonl 'http://127.0.0.1:8000/live/export?format=jsonl'
  chairlift trace view steps.jsonl
  chairlift trace view --demo          a simulated example

The page is served on this machine only, until Ctrl-C."""
REPLAY_SUMMARY: Final = "simulate the requests of a recording of steps"
REPLAY_DESCRIPTION: Final = """Simulate the requests of a recording of steps, with the same arrivals and lengths.

The cost model is fitted on the recorded steps. The settings are those of the recorded engine, unless flags change them.

  chairlift trace replay steps.jsonl
  chairlift trace replay steps.jsonl --max-num-seqs 32
  chairlift trace replay steps.jsonl --static         also simulates static batches"""

_MAX_BYTES: Final = 1 << 28
_NOT_CHANGED: Final = {
    *("model", "revision", "tokenizer", "skip_tokenizer_init", "dtype", "device", "threads", "kernels", "seed"),
    *("quantization", "kv_cache_dtype", "generation_config", "swap_directory", "max_model_len"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift trace view``."""
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="the recording")
    parser.add_argument("--demo", action="store_true", help="show a simulated example instead")
    parser.add_argument("--port", metavar="N", type=whole, default=0, help="port of the page (default: a free port)")


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift trace replay``."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the recording")
    parser.add_argument("--static", action="store_true", help="compare with static batching")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write settings and results to this file")
    add_engine_flags(parser, leave_out=_NOT_CHANGED)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C. Returns 0. Raises ConfigError if the file is not a recording."""
    if args.demo == (args.file is not None):
        raise ConfigError("say what to show: a FILE, or --demo")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port must be from 0 to 65535, got {args.port}")
    if args.demo:
        from chairlift_lab.replay.side_by_side import demo

        data = demo()
    else:
        data = _read(args.file)[0]
    try:
        from chairlift.server.pages.live_recording import serve_recording
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("chairlift"):
            raise
        raise ConfigError(f"this needs {error.name}; install it with pip install {error.name}") from None
    asyncio.run(
        serve_recording(data, args.port, lambda url: print(f"{url}   to stop: Ctrl-C", flush=True), LIVE_COMPARISON)
    )
    return 0


def replay(args: argparse.Namespace) -> int:
    """Simulate the recorded requests, and print the report. Returns 0. Raises ConfigError if the file is not a
    recording, or cannot be simulated."""
    from chairlift_lab.cli.sim import report_lines
    from chairlift_lab.replay.replay import replay as simulate
    from chairlift_lab.replay.side_by_side import (
        batching_sides,
        compare_sides,
        recorded_config,
        recorded_deployment,
        recorded_trace,
    )

    check_writable(args.json, "json", args.file, args.config)
    _, recording = _read(args.file)
    settings, _ = read_settings(args, sampling=False)
    if refused := sorted(_NOT_CHANGED & settings.keys()):
        raise ConfigError(f"{refused[0]} in {args.config} means nothing to a simulation; leave it out")
    trace = recorded_trace(recording)
    deployment = recorded_deployment(recording)
    config = recorded_config(recording, **settings)
    report = simulate(trace, config, deployment)
    print(f"{args.file}: {len(trace):,} requests, {len(recording.steps):,} steps")
    print(f"simulated on the recorded machine ({deployment.validity})\n")
    print("\n".join(report_lines(report)))
    static = compare_sides(recording, *batching_sides(**settings))[0] if args.static else None
    if static is not None:
        print("", *static["words"], sep="\n")
    if args.json is not None:
        record: dict[str, Any] = {
            "chairlift": chairlift.__version__,
            "benchmark": "replay",
            "recording": str(args.file),
        }
        record |= {"settings": dataclasses.asdict(config), **report.to_dict(), "static": static}
        with replacing(args.json) as file:
            file.write(json.dumps(record, indent=1) + "\n")
    return 0


def _read(path: Path) -> tuple[bytes, Recording]:
    from chairlift.engine.step_export import read_recording

    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES >> 20} MiB; cut it down to its first lines")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from None
    try:
        return data, read_recording(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
