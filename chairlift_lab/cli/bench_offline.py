"""``chairlift bench offline``: measures the engine in this process, without a server."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import chairlift
from chairlift.cli.flags import add_engine_flags, load_llm, read_settings, whole
from chairlift.config import BUNDLED_MODEL, EngineConfig, flat_fields, known_values
from chairlift.errors import ConfigError
from chairlift_lab.cli.bench_serve import (
    SIDES,
    TableCell,
    add_traffic_flags,
    check_ranges,
    loads_of,
    results,
    show,
    watch,
)
from chairlift_lab.cli.sim import setting_value

if TYPE_CHECKING:
    from chairlift.llm import LLM
    from chairlift.loading.native_path import NativePath
    from chairlift.models.hf_config import NetworkConfig
    from chairlift_lab.bench.machine import HostMachine
    from chairlift_lab.bench.offline import OfflineRun
    from chairlift_lab.bench.report import Report
    from chairlift_lab.bench.serve_run import Load, ServeRun

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "answer a seeded workload, or your own traffic, with the engine"
DESCRIPTION: Final = """Answer requests with the engine in this process.

Answers are greedy, and have exactly the requested lengths.

Without traffic flags, the command answers a seeded workload with all requests at once, and prints the fraction of the
machine's limit that the engine reaches. Lengths are log-normal, as in chat traffic: 64 requests have 8,700 prompt
tokens and 6,415 output tokens. Lengths are cut if they exceed the model's limit. Prompts are random token ids, so no
tokenizer is loaded.

With a trace, a workload or a rate, requests arrive at their times, independent of the engine (open loop), and the
results are those of chairlift bench serve. Every run loads a new engine, so no cache has its prompts. Examples:

  chairlift bench offline --baseline
  chairlift bench offline --trace monday.jsonl --slo ttft:500,tpot:80 --html monday.html
  chairlift bench offline --workload chat --request-rate 4 --num-prompts 100 --compare static --rounds 8
  chairlift bench offline --max-num-seqs 16,32,64 --compare static
  chairlift bench offline --max-num-seqs 1,4,16,64 --compare speculation

Exit code 1: some requests failed. The result counts them by kind."""

_STATIC_ROWS: Final = 16
_SPECULATION: Final = "speculation"
_SPECULATION_SIZES: Final = [1, 4, 16, 64]
"""Default values of max_num_seqs for ``--compare speculation``."""
_TRAFFIC: Final = ("trace", "workload", "input_len", "output_len", "request_rate", "arrivals", "burstiness")
"""Flags that choose traffic with arrival times. If the user gives one of these flags or a flag in ``_MEASURED``, the
traffic is replayed at its arrival times."""
_MEASURED: Final = ("max_concurrency", "slo", "compare")
_print: Final = functools.partial(print, sep="\n", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Traffic flags have the same names as in ``bench serve``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    add_traffic_flags(parser)
    measured = parser.add_argument_group("measurement")
    measured.add_argument(
        "--slo", "--goodput", metavar="NAME:MS,...", help="latency limits, such as ttft:500,tpot:80,e2el:9000"
    )
    sides = measured.add_mutually_exclusive_group()
    sides.add_argument(
        "--baseline", action="store_true", help=f"also run static batches of {_STATIC_ROWS}, and print the ratio"
    )
    sides.add_argument(
        "--compare",
        metavar="SETTINGS",
        help="run the traffic with these settings (A) and with the other flags' settings (B), in turns: static, or "
        "NAME=VALUE,... such as max_num_seqs=8; speculation: continuous and static batches, each with and without "
        "drafts",
    )
    measured.add_argument(
        "--rounds",
        metavar="N",
        type=whole,
        default=6,
        help="rounds of a comparison (default: 6, the fewest for a claim)",
    )
    measured.add_argument("--html", metavar="FILE", type=Path, help="write an HTML page with charts to this file")
    measured.add_argument(
        "--max-num-seqs",
        metavar="N,...",
        dest="sizes",
        type=_sizes,
        help="maximum number of running requests (slots). Several values, with commas, give one table; --compare "
        "static adds static batches of the same sizes",
    )
    add_engine_flags(parser, leave_out={"model", "seed", "max_num_seqs"})


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= 1 << 20 for part in parts):
        raise argparse.ArgumentTypeError(f"must be a number of slots above 0, or several with commas, got {text!r}")
    return sorted({int(part) for part in parts})


def run(args: argparse.Namespace) -> tuple[Report, int]:
    """Run the benchmark. Returns the report and the exit code. Raises ConfigError, before a model is loaded if
    possible."""
    settings, _ = read_settings(args, sampling=False)
    check_ranges(args, rounds=(1, 1000))
    if args.compare == _SPECULATION:
        return _run_speculation(args, settings)
    if args.sizes is not None and len(args.sizes) > 1:
        return _run_sizes(args, settings)
    if args.sizes is not None:
        settings["max_num_seqs"] = args.sizes[0]
    if all(getattr(args, name) is None for name in (*_TRAFFIC, *_MEASURED)):
        return _run_at_once(args, settings)
    if args.baseline:
        args.compare = f"static,max_num_seqs={_STATIC_ROWS}"
    return _run_traffic(args, settings)


def measuring_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for measurements, unless the user gives others. On a GPU, no graph is recorded in measured time."""
    on_gpu = settings.get("device", "cpu") != "cpu"
    return {"skip_tokenizer_init": True} | ({"cuda_graphs": "start"} if on_gpu else {})


def model_of(args: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[str, str, NetworkConfig | None]:
    """(name, path or id, configuration) of the model. The configuration is None for the fake model HashLM."""
    from chairlift.models.hashlm_served import parse_hashlm
    from chairlift.models.loader import resolve_model_dir
    from chairlift.models.model_files import read_config

    name = settings.get("model", BUNDLED_MODEL) if args.model is None else args.model
    if parse_hashlm(name) is not None:
        return name, name, None
    bundled = Path(chairlift.__file__).parent / "assets"
    model_dir = bundled if name == BUNDLED_MODEL else resolve_model_dir(name, settings.get("revision"))
    return name, str(model_dir), read_config(model_dir)


# --- traffic ---------------------------------------------------------------------------------------------------------


def _run_traffic(args: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[Report, int]:
    from chairlift.loading.native_path import native_path
    from chairlift_lab.bench.machine import describe_machine, machine_facts
    from chairlift_lab.bench.report import Facts, text
    from chairlift_lab.bench.serve_result import parse_goodput

    slo = parse_goodput([args.slo]) if args.slo is not None else {}
    changes = [] if args.compare is None else [_changes(args.compare)]
    name, where, network = model_of(args, settings)
    own = measuring_defaults(settings) | dict(settings) | {"model": where}
    sides = [*({**own, **each} for each in changes), own]
    for side in sides:
        EngineConfig.from_flat(side)
    loads, records = loads_of(args, slo)
    machine = describe_machine()
    _print(*text(Facts(machine_facts(dataclasses.asdict(machine)) | {"model": name})))
    names = [args.compare, "as the other flags say"] if changes else []
    cells: list[TableCell] = []
    for index, place, llm, run in measure_sides(name, sides, loads):
        kernels = "hashlm" if network is None else native_path(llm.config, llm.info, network).describe()
        if place not in {cell.place for cell in cells}:
            which = f"{SIDES[place]}, {names[place]}: " if names else ""
            _print("", f"{which}{llm.config.scheduler.batching} batching, {kernels}")
        if run.load.shortened and not cells:
            room = run.server.max_model_len
            _print(f"note: {run.load.shortened:,} requests were shortened, to the {room:,} tokens that fit")
        about = {"benchmark": "offline", "kernels": kernels, "machine": machine.cpu}
        cell = show(run, place, records[index] | about, slo, bool(names))
        cell.record["chairlift"]["engine"] = dataclasses.asdict(llm.config)
        cells.append(cell)
        del llm  # before the next is loaded
    return results(cells, names)


def _run_sizes(args: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[Report, int]:
    """Measure several values of max_num_seqs in interleaved rounds, and print one table."""
    from chairlift_lab.bench.machine import describe_machine, machine_facts
    from chairlift_lab.bench.report import Facts, Text, text
    from chairlift_lab.bench.serve_report import serve_record
    from chairlift_lab.bench.serve_result import figures_of, parse_goodput
    from chairlift_lab.bench.sizes import Size, best_words, sizes_report, sizes_table

    if args.baseline or args.compare not in (None, "static"):
        raise ConfigError(
            "several --max-num-seqs are compared with each other, and with --compare static; with nothing else"
        )
    slo = parse_goodput([args.slo]) if args.slo is not None else {}
    name, where, _ = model_of(args, settings)
    own = measuring_defaults(settings) | dict(settings) | {"model": where}
    kinds = ["continuous", *["static"] * (args.compare is not None)]
    names = [(batching, slots) for batching in kinds for slots in args.sizes]
    sides = [own | {"batching": batching, "max_num_seqs": slots} for batching, slots in names]
    for side in sides:
        EngineConfig.from_flat(side)
    if "," in (args.request_rate or ""):
        raise ConfigError("several --max-num-seqs take one --request-rate; run once for each rate")
    args.compare = args.compare or "static"  # rounds, as of a comparison
    loads, records = loads_of(args, slo)
    machine = describe_machine()
    _print(*text(Facts(machine_facts(dataclasses.asdict(machine)) | {"model": name})), "")
    found: list[list[tuple[ServeRun, Any, dict[str, Any]]]] = [[] for _ in names]
    for index, place, _, run in measure_sides(name, sides, loads):
        batching, slots = names[place]
        figures = figures_of(run, slo)
        about = records[index] | {"benchmark": "offline", "machine": machine.cpu}
        found[place].append((run, figures, serve_record(run, figures, about)))
        _print(
            f"round {records[index]['round']}: {batching}, {slots} slots:"
            f" {figures.output_throughput:,.1f} output tokens/s"
        )
    sizes = [Size(*each, [figures for _, figures, _ in runs]) for each, runs in zip(names, found, strict=True) if runs]
    _print("", *text(sizes_table(sizes), Text(best_words(sizes))))
    record = {
        "benchmark": "offline",
        "model": name,
        "machine": dataclasses.asdict(machine),
        "best": best_words(sizes),
        "sizes": [
            {"batching": batching, "max_num_seqs": slots, "runs": [one for _, _, one in runs]}
            for (batching, slots), runs in zip(names, found, strict=True)
        ],
    }
    facts = {
        "model": name,
        "workload": records[0]["workload"],
        "arrivals": records[0]["arrivals"],
        "seed": str(args.seed),
    }
    runs = [run for each in found for run, _, _ in each]
    code = 1 if any(figures.failed for each in found for _, figures, _ in each) else 0
    return sizes_report(record, sizes, facts), 130 if any(run.interrupted for run in runs) else code


def _run_speculation(args: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[Report, int]:
    """Measure continuous and static batching, each with and without speculative decoding, for several values of
    max_num_seqs. Prints one table."""
    from chairlift_lab.bench.machine import describe_machine, machine_facts
    from chairlift_lab.bench.report import Facts, Text, text
    from chairlift_lab.bench.serve_report import serve_record
    from chairlift_lab.bench.serve_result import figures_of, parse_goodput
    from chairlift_lab.bench.speculation import (
        Drafted,
        SpeculationSide,
        sides_of,
        speculation_report,
        speculation_table,
        speculation_words,
    )

    slo = parse_goodput([args.slo]) if args.slo is not None else {}
    name, where, _ = model_of(args, settings)
    sides = sides_of(measuring_defaults(settings) | dict(settings) | {"model": where}, args.sizes or _SPECULATION_SIZES)
    for _, _, side in sides:
        EngineConfig.from_flat(side)
    loads, records = loads_of(args, slo)
    machine = describe_machine()
    _print(*text(Facts(machine_facts(dataclasses.asdict(machine)) | {"model": name})), "")
    found: list[list[tuple[ServeRun, Any, Drafted, dict[str, Any]]]] = [[] for _ in sides]
    for index, place, llm, run in measure_sides(name, [side for _, _, side in sides], loads):
        drafts, (kind, slots, _) = llm.engine.scheduler.drafts, sides[place]
        counts = (0, 0, 0) if drafts is None else (drafts.num_verified, drafts.num_drafts, drafts.num_accepted)
        drafted = Drafted(*counts)
        figures = figures_of(run, slo)
        record = serve_record(run, figures, records[index] | {"benchmark": "offline", "machine": machine.cpu})
        found[place].append((run, figures, drafted, record | {"drafts": dataclasses.asdict(drafted)}))
        _print(
            f"round {records[index]['round']}: {slots} slots, {kind}: {figures.output_throughput:,.1f} output tokens/s"
        )
    pairs = zip(sides, found, strict=True)
    measured = [SpeculationSide(kind, slots, [each[1:3] for each in runs]) for (kind, slots, _), runs in pairs if runs]
    _print("", *text(speculation_table(measured), Text(speculation_words(measured))))
    report = {
        "benchmark": "offline",
        "model": name,
        "machine": dataclasses.asdict(machine),
        "speculation": speculation_words(measured),
        "sides": [
            {"kind": kind, "max_num_seqs": slots, "settings": side, "runs": [each[3] for each in runs]}
            for (kind, slots, side), runs in zip(sides, found, strict=True)
        ],
    }
    facts = {
        "model": name,
        "workload": records[0]["workload"],
        "arrivals": records[0]["arrivals"],
        "seed": str(args.seed),
    }
    failed = any(figures.failed for runs in found for _, figures, _, _ in runs)
    code = 130 if any(run.interrupted for runs in found for run, *_ in runs) else int(failed)
    return speculation_report(report, measured, facts), code


def _changes(text: str) -> dict[str, Any]:
    """Parse ``static`` or ``max_num_seqs=8,block_size=32``. Returns setting -> value. Raises ConfigError."""
    flags = {flag.name: flag for flag in flat_fields() if flag.name != "model"}
    changes = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in known_values("batching") and not value:
            name, value = "batching", name
        flag = flags.get(name.replace("-", "_"))
        if flag is None or not value:
            raise ConfigError(
                f"--compare must be static, or settings of the engine as in max_num_seqs=8,block_size=32; got {part!r}"
            )
        changes[flag.name] = setting_value(flag, value)
    return changes


def measure_sides(
    name: str,
    sides: Sequence[Mapping[str, Any]],
    loads: Sequence[Load],
    prepare: Callable[[LLM], object] = lambda llm: None,
) -> Iterator[tuple[int, int, LLM, ServeRun]]:
    """Yield (index of the load, index of the side, engine, result) for each run. Two sides alternate in the order A B,
    B A, and so on. The iteration ends after an interrupted run. ``prepare`` is called with the engine before its
    run."""
    from chairlift_lab.bench.offline import room_of, run_here
    from chairlift_lab.bench.serve_run import PromptDialect, Target, fit

    # Both engines get the same requests. Requests are therefore shortened to a length that fits both engines, which
    # must be known before the first run.
    rooms = []
    for side in sides if len(sides) > 1 else ():
        llm = load_llm(side, quiet=True)
        rooms.append(room_of(llm))
        llm.engine.core.shutdown()
        del llm
        gc.collect()
    for index, load in enumerate(loads):
        turn = list(enumerate(sides))
        for place, side in reversed(turn) if index % 2 else turn:
            llm = load_llm(side, quiet=bool(index or rooms))
            room = min(rooms or [room_of(llm)])
            limits = llm.engine.limits
            requests, shortened = fit(load.requests, room)
            dialect = PromptDialect(chat=False, vocab_size=limits.vocab_size, ignore_eos=True)
            target = Target(model=name, owner="chairlift", max_model_len=room, dialect=dialect)
            fitted = dataclasses.replace(load, requests=requests, shortened=shortened)
            prepare(llm)
            with watch(name, len(requests)) as progress:
                run = run_here(llm.engine.core, limits, target, fitted, progress)
            yield index, place, llm, run
            llm.engine.core.shutdown()
            del llm
            gc.collect()
            if run.interrupted:
                return


# --- all at once -----------------------------------------------------------------------------------------------------


def _run_at_once(args: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[Report, int]:
    from chairlift.loading.native_path import native_path
    from chairlift_lab.bench.machine import describe_machine, machine_facts
    from chairlift_lab.bench.offline import fit, room_of, run_offline
    from chairlift_lab.bench.offline_report import offline_report, run_facts
    from chairlift_lab.bench.report import Facts, text
    from chairlift_lab.workload.lengths import Workload

    name, model_dir, network = model_of(args, settings)
    if network is None:
        raise ConfigError(f"{name} has no machine to be measured against; give traffic, such as --workload chat")
    settings = measuring_defaults(settings) | dict(settings) | {"model": model_dir}
    vocab_size = min(Workload().vocab_size, network.vocab_size)
    workload = Workload(count=args.num_prompts or 64, seed=args.seed, vocab_size=vocab_size)
    machine = describe_machine()
    _print(*text(Facts(machine_facts(dataclasses.asdict(machine)) | {"model": name})))
    baseline = None
    if args.baseline:
        llm = load_llm(settings | {"batching": "static", "max_num_seqs": _STATIC_ROWS}, quiet=False)
        requests, _ = fit(workload.requests(), room_of(llm))
        baseline = run_offline(llm, requests)
        del llm
        gc.collect()
        _print("", f"static batches of {_STATIC_ROWS}", *text(Facts(run_facts(dataclasses.asdict(baseline)))))
    llm = load_llm(settings, quiet=False)
    requests, shortened = fit(workload.requests(), room_of(llm))
    result = run_offline(llm, requests)
    path = native_path(llm.config, llm.info, network)
    facts = run_facts(dataclasses.asdict(result))
    if shortened:
        facts["shortened"] = f"{shortened:,} of them, to the {room_of(llm):,} tokens that fit"
    if baseline is not None:
        facts["ratio"] = f"{baseline.seconds / result.seconds:.2f} times the rate of static batches, in one run each"
    _print("", f"{llm.config.scheduler.batching} batching, {path.describe()}", *text(Facts(facts)))
    record = {
        "benchmark": "offline",
        "machine": dataclasses.asdict(machine),
        "model": name,
        "kernels": path.kernels,
        "settings": dataclasses.asdict(llm.config),
        "workload": dataclasses.asdict(workload),
        "shortened": shortened,
        "result": dataclasses.asdict(result),
        "baseline": None if baseline is None else dataclasses.asdict(baseline),
        **_floor(llm, network, requests, path, machine, result),
    }
    return offline_report({"chairlift": chairlift.__version__, **record}), 0


def _floor(
    llm: LLM,
    network: NetworkConfig,
    requests: list[tuple[list[int], int]],
    path: NativePath,
    machine: HostMachine,
    result: OfflineRun,
) -> dict[str, Any]:
    """Print how close the engine came to the limits of this machine. Returns the same values for the record."""
    from chairlift_lab.bench.kernel_report import limits_record, limits_table
    from chairlift_lab.bench.offline import floor_of, limits_of
    from chairlift_lab.bench.report import Facts, text

    try:
        limits = limits_of(llm, path, machine)
    except ConfigError:
        _print(*text(Facts({"floor": "not measured: no compiled kernels ran this model"})))
        return {"limits": None, "floor": {"not_measured": path.reason}}
    floor = floor_of(requests, llm, network, path, limits)
    record = limits_record(limits)
    share = floor.seconds / result.seconds
    facts = {
        "floor": f"{floor.seconds:.2f} s in {floor.steps:,} steps of up to {floor.token_budget} tokens",
        "of the floor": f"{share:.0%}",
    }
    if path.isa and llm.info.weight_bytes < machine.l3_bytes:
        facts["of the floor"] += "\nThe weights fit into the L3 cache, so memory does not bound this model."
    _print(*text(Facts(facts), limits_table(record)))
    return {"limits": record, "floor": {**dataclasses.asdict(floor), "share": share}}
