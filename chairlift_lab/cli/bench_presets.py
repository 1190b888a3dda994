"""``chairlift bench presets``: the same requests under the rules of several systems."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.base.presets import BASELINE, PRESETS
from chairlift.base.writing import check_writable, replacing
from chairlift.cli.flags import add_engine_flags, read_settings, whole_number
from chairlift.config import BUNDLED_MODEL, EngineConfig
from chairlift_lab.cli.bench_offline import measure_sides, measuring_defaults, model_of

if TYPE_CHECKING:
    from chairlift.llm import LLM
    from chairlift_lab.bench.batch_picture import Panel
    from chairlift_lab.bench.presets import Measured
    from chairlift_lab.bench.report import Report
    from chairlift_lab.bench.serve_run import ServeRun
    from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "answer the same requests under the rules of several systems, beginning with static batches"
DESCRIPTION: Final = """Answer the same requests under each preset, and print one table and one picture.

The requests have log-normal lengths and arrive at once. All presets have the same kernels, rows and memory, so that
only the scheduling differs. The first row of the table is the baseline: static batches. Each round runs every preset
once. The command takes about two minutes with the bundled model, which runs on one thread unless --threads says
more.

  chairlift bench presets
  chairlift bench presets --presets orca,vllm,tgi --svg batch.svg --json presets.json
  chairlift bench presets MODEL --max-num-seqs 32 --num-kv-blocks 1000

The settings that are given as flags apply to all presets, and win over them. docs/presets.md explains the presets."""

_ROWS: Final = 16
_BLOCKS: Final = 144
"""Number of KV blocks: 16 rows need about 100 on average, and up to 480."""
_IN_PICTURE: Final = "orca"

_print: Final = functools.partial(print, sep="\n", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    measured = parser.add_argument_group("measurement")
    measured.add_argument(
        "--presets",
        metavar="NAME,...",
        type=_names,
        default=list(PRESETS),
        help=f"presets to measure besides {BASELINE}: {', '.join(name for name in PRESETS if name != BASELINE)} "
        "(default: all)",
    )
    measured.add_argument(
        "--num-prompts",
        metavar="N",
        type=whole_number(1, 100_000),
        default=512,
        help="number of requests (default: 512)",
    )
    measured.add_argument(
        "--requests-seed",
        metavar="N",
        type=whole_number(0, 2**62),
        default=0,
        help="seed of their lengths (default: 0)",
    )
    measured.add_argument(
        "--rounds", metavar="N", type=whole_number(1, 1000), default=6, help="runs per preset (default: 6)"
    )
    measured.add_argument("--svg", metavar="FILE", type=Path, help="write the picture of the batch to this file")
    add_engine_flags(parser, leave_out={"model", "seed", "preset"})


def _names(text: str) -> list[str]:
    """Parse a list of presets. The baseline is always the first."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in PRESETS]:
        raise argparse.ArgumentTypeError(f"must be names of presets ({', '.join(PRESETS)}), got {unknown[0]!r}")
    return list(dict.fromkeys([BASELINE, *names]))


def run(args: argparse.Namespace) -> tuple[Report, int]:
    """Run the benchmark. Returns the report and the exit code. Raises ConfigError, before a model is loaded if
    possible."""
    from chairlift_lab.bench.machine import describe_machine, machine_facts
    from chairlift_lab.bench.presets import preset_record, preset_table, preset_words, requests_of
    from chairlift_lab.bench.report import Facts, Report, text

    check_writable(args.svg, "svg", args.json, args.config)
    settings, _ = read_settings(args, sampling=False)
    if (ignored := settings.pop("preset", None)) is not None:
        print(
            f"chairlift: the preset {ignored} is not applied: this command runs {', '.join(args.presets)}",
            file=sys.stderr,
        )
    name, where, _ = model_of(args, settings)
    own = measuring_defaults(settings) | _limits(settings, name) | settings | {"model": where}
    sides = [own | {"preset": preset} for preset in args.presets]
    configs = [EngineConfig.from_flat(side) for side in sides]
    machine = describe_machine()
    _print(*text(Facts(machine_facts(dataclasses.asdict(machine)) | {"model": name})), "")
    requests = requests_of(args.num_prompts, args.requests_seed)
    measured, panels, code = _measure(args, name, sides, requests)
    flat = [config.to_flat() for config in configs]
    presets = [dataclasses.replace(each, settings=own) for each, own in zip(measured, flat, strict=True) if each.runs]
    conditions = _conditions(requests, configs[0])
    words = preset_words(presets)
    width = min(100, shutil.get_terminal_size().columns)
    picture = ["", *_picture_lines(panels, width)] if panels else []
    _print("", *text(preset_table(presets, conditions)), "", *words, *picture)
    if args.svg is not None and panels:
        _write_svg(args.svg, panels)
    record = {
        "benchmark": "presets",
        "command": shlex.join(["chairlift", *sys.argv[1:]]),
        "machine": dataclasses.asdict(machine),
        "model": name,
        "conditions": conditions,
        "requests": {"count": len(requests), "seed": args.requests_seed},
        "rounds": args.rounds,
        "words": words,
        "presets": preset_record(presets),
    }
    return Report(record), code


def _limits(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Rows, memory and threads of all presets, unless the user gives them.

    The bundled model runs on one thread: its steps take less than a millisecond, and threads that wait for each other
    would measure what else runs on the machine.
    """
    has_memory = any(settings.get(name) is not None for name in ("kv_cache_memory_bytes", "num_kv_blocks"))
    threads = {"threads": 1} if name == BUNDLED_MODEL else {}
    return {"max_num_seqs": _ROWS} | threads | ({} if has_memory else {"num_kv_blocks": _BLOCKS})


def _conditions(requests: Sequence[TracedRequest], config: EngineConfig) -> str:
    """What all runs have in common, for the table's caption."""
    prompt = sum(request.prompt_tokens for request in requests)
    output = sum(request.output_tokens for request in requests)
    memory = config.cache.kv_cache_memory_bytes
    blocks = config.cache.num_kv_blocks
    room = f"{blocks:,} KV blocks" if blocks is not None else f"{memory:,} bytes of KV cache"
    what = f"{len(requests):,} requests at once with {prompt:,} prompt tokens and {output:,} output tokens"
    return f"{what}; {config.scheduler.max_num_seqs:,} rows, {room}"


def _measure(
    args: argparse.Namespace, name: str, sides: Sequence[Mapping[str, Any]], requests: Sequence[TracedRequest]
) -> tuple[list[Measured], Sequence[Panel], int]:
    """(runs of each preset, panels of the picture, exit code)."""
    from chairlift_lab.bench.batch_picture import PictureRecorder
    from chairlift_lab.bench.presets import Measured, PresetRun
    from chairlift_lab.bench.serve_result import figures_of
    from chairlift_lab.bench.serve_run import Load

    recorder = PictureRecorder()

    def prepare(llm: LLM) -> None:
        recorder.steps.clear()
        llm.engine.core.events.subscribe("the picture", recorder)

    drawn = list(dict.fromkeys([_IN_PICTURE if _IN_PICTURE in args.presets else args.presets[-1], BASELINE]))
    runs: list[list[PresetRun]] = [[] for _ in sides]
    panels: list[dict[str, Panel]] = [{} for _ in range(args.rounds)]
    code = 0
    for index, place, _, run in measure_sides(name, sides, [Load(requests=requests)] * args.rounds, prepare):
        preset = args.presets[place]
        found = PresetRun.of(figures_of(run, {}), recorder.since(run.begin))
        runs[place].append(found)
        if run.interrupted:
            code = 130
        elif found.failed:
            code = 1
        if preset in drawn:
            panels[index][preset] = _panel(preset, run, recorder.steps, sides[place]["max_num_seqs"])
        _print(f"round {index + 1} of {args.rounds}: {preset}, {found.output_throughput:,.0f} output tokens/s")
    measured = [Measured(preset, {}, each) for preset, each in zip(args.presets, runs, strict=True)]
    complete = [[each[preset] for preset in drawn] for each in panels if len(each) == len(drawn)]
    return measured, _typical(complete), code


def _typical(rounds: Sequence[Sequence[Panel]]) -> Sequence[Panel]:
    """The panels of the round in which the ratio of their durations is next to the median over the rounds."""
    if not rounds:
        return []
    middle = statistics.median_low(panels[0].seconds / panels[-1].seconds for panels in rounds)
    return next(panels for panels in rounds if panels[0].seconds / panels[-1].seconds == middle)


def _panel(preset: str, run: ServeRun, steps: Sequence[Any], num_rows: int) -> Panel:
    from chairlift_lab.bench.batch_picture import Panel, spans_of

    wanted = {str(index): request.output_tokens for index, request in enumerate(run.load.requests)}
    spans = spans_of((record for record in steps if record.start >= run.begin), wanted, run.begin)
    title = f"{preset}: {sum(wanted.values()):,} output tokens in {run.seconds:.2f} s"
    return Panel(title, spans, num_rows, run.seconds)


def _picture_lines(panels: Sequence[Panel], width: int) -> list[str]:
    from chairlift_lab.bench.batch_picture import text_lines

    try:
        "█░".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return list(text_lines(panels, width, fine=False))
    return list(text_lines(panels, width))


def _write_svg(path: Path, panels: Sequence[Panel]) -> None:
    from chairlift_lab.bench.batch_picture import svg_lines

    with replacing(path) as file:
        file.write("\n".join(svg_lines(panels)) + "\n")
