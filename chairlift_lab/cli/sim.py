"""``chairlift sim``: simulates the effect of settings on a given traffic."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import chairlift
from chairlift.base.quantities import reader_of
from chairlift.base.writing import check_writable, replacing
from chairlift.cli.flags import add_engine_flags, load_llm, read_settings, whole
from chairlift.config import BUNDLED_MODEL, EngineConfig, Flag, flat_fields
from chairlift.errors import ConfigError
from chairlift_lab.cli.sim_fleet import (
    add_fleet_flags,
    check_flags,
    error_lines,
    fleet_lines,
    simulate_fleets,
    trace_with_slo,
)

if TYPE_CHECKING:
    from chairlift_lab.replay.machines import Deployment
    from chairlift_lab.replay.replay import SimReport
    from chairlift_lab.workload.trace import TracedRequest

__all__ = [
    *("DESCRIPTION", "SUMMARY", "add_arguments", "add_traffic_flags", "read_traffic", "report_lines", "run"),
    *("NOT_SIMULATED", "setting_value"),
]

SUMMARY: Final = "replay traffic through the engine on a simulated machine"
DESCRIPTION: Final = """Replay traffic through the real scheduler on a simulated machine, much faster than in real time.

The traffic is a workload with arrivals, or a trace file. There are four kinds of machines: a known machine (--machine;
modelled from data sheets, not validated), a cost model from a file (--cost-model), this machine (--fit times some steps
of a model), or recorded steps (--step-log). All settings of scheduler and KV cache apply.

  chairlift sim --machine h100-sxm --model llama-3-8b --workload chat --arrivals poisson:20
  chairlift sim --fit MODEL --save here.json
  chairlift sim --cost-model here.json --trace trace.jsonl --compare max_num_seqs=8,16,32
  chairlift sim --machine h100-sxm --arrivals poisson:60 --replicas 1,2,4 --slo ttft:500,tpot:30 --target 0.99"""

_SEEDS: Final = """Run the engine in random worlds with faults, and check every invariant after every step.

A seed determines the whole execution. A failing world is reduced to the events that the failure needs."""
_GATE: Final = """Run your own policy in random worlds with faults, and check its results and the engine's invariants.

A prefill mode or a batch membership can be tested as well. A class that passes is safe to use. For a failing class, the
output names the broken rule and how to repeat it."""
NOT_SIMULATED: Final = {
    "model",
    "revision",
    "tokenizer",
    "skip_tokenizer_init",
    "kv_events_endpoint",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "generation_config",
    "device",
    "threads",
    "kernels",
    "seed",
    "swap_directory",
    "image_memory_bytes",
    "speculative_config",
}
"""Settings that a simulation does not have."""
_MAX_REQUESTS: Final = 1_000_000
_A_SAMPLE: Final = 1000
_USUAL_MODEL: Final = "llama-3-8b"
_BUSY: Final = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift sim`` and its subcommands."""
    parser.set_defaults(simulation=None)
    add_traffic_flags(parser, required=False)
    machine = parser.add_argument_group("machine")
    chosen = machine.add_mutually_exclusive_group()
    chosen.add_argument(
        "--machine",
        metavar="NAME",
        help="name of a known machine, such as h100-sxm or turin-9755, or a machine file of chairlift lab fit",
    )
    chosen.add_argument("--cost-model", metavar="FILE", type=Path, help="file with a cost model, written by --save")
    chosen.add_argument("--fit", metavar="MODEL", help="time some steps of this model on this machine")
    chosen.add_argument("--step-log", metavar="FILE", type=Path, help="learn from recorded steps, one JSON object each")
    machine.add_argument(
        "--model",
        metavar="NAME",
        help="with --machine NAME or --step-log: a known model, or a directory with a config.json"
        f" (default: {_USUAL_MODEL})",
    )
    machine.add_argument("--save", metavar="FILE", type=Path, help="write the cost model to this file")
    machine.add_argument(
        "--save-steps", metavar="FILE", type=Path, help="with --fit: write the timed steps to this file"
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--compare", metavar="SETTING=A,B,...", help="one simulation, and one table row, for each value"
    )
    results.add_argument("--json", metavar="FILE", type=Path, help="write settings and results to this file")
    add_fleet_flags(parser)
    add_engine_flags(parser, leave_out=NOT_SIMULATED)
    others = parser.add_subparsers(title="other simulations", metavar="[NAME]", dest="simulation")
    seeds = others.add_parser("seeds", help="check every invariant in random worlds with faults", description=_SEEDS)
    seeds.add_argument(
        "--seed",
        dest="one_seed",
        metavar="N",
        type=whole,
        help="run only the world with this seed, and show how it fails",
    )
    seeds.add_argument("--seeds", metavar="N", type=whole, default=1000, help="number of worlds (default: 1000)")
    seeds.add_argument("--first", metavar="N", type=whole, default=0, help="seed of the first world (default: 0)")
    seeds.set_defaults(parser=seeds)
    gate = others.add_parser("gate", help="test your own policy in random worlds", description=_GATE)
    gate.add_argument("policy", metavar="module:Class", help="class of a policy, prefill mode or batch membership")
    gate.add_argument("--seed", dest="one_seed", metavar="N", type=whole, help="run only the world with this seed")
    gate.add_argument("--seeds", metavar="N", type=whole, default=300, help="number of worlds (default: 300)")
    gate.add_argument("--first", metavar="N", type=whole, default=0, help="seed of the first world (default: 0)")
    gate.set_defaults(parser=gate)


def run(args: argparse.Namespace) -> int:
    """Simulate. Returns 0. Raises ChairliftError if it cannot run."""
    if args.simulation is not None:
        from chairlift_lab.sim.__main__ import run_seeds
        from chairlift_lab.sim.gate import run_gate

        chosen = range(args.first, args.first + args.seeds) if args.one_seed is None else [args.one_seed]
        if not chosen:
            raise ConfigError(f"--seeds must be at least 1, got {args.seeds}")
        return run_gate(args.policy, chosen) if args.simulation == "gate" else run_seeds(chosen)
    read = ("trace", "cost_model", "step_log", "config")
    written = ("save", "save_steps", "json")
    for flag in written:
        others = [getattr(args, other, None) for other in (*read, *written) if other != flag]
        check_writable(getattr(args, flag), flag.replace("_", "-"), *others)
    check_flags(args)
    if args.model is not None and (args.cost_model or (args.machine and Path(args.machine).is_file())):
        raise ConfigError(f"--model {args.model}: a machine file has its own model; leave it out")
    settings, _ = read_settings(args, sampling=False)
    refused = sorted(NOT_SIMULATED & settings.keys())
    if refused:
        raise ConfigError(f"{refused[0]} in {args.config} means nothing to a simulation; leave it out")
    configs = _configs(settings, args.compare)
    trace, users, traffic = read_traffic(args)
    trace = trace_with_slo(trace, args.slo)
    deployment = choose_deployment(args, configs[0][1])
    if args.save is not None:
        from chairlift_lab.replay.machines import write_deployment

        write_deployment(args.save, deployment)
    more: dict[str, Any] = {}
    if args.replicas is None:
        lines, results = _simulate(args, configs, trace, deployment, users)
    else:
        reports, errors = simulate_fleets(args, trace, configs[0][1], deployment, users)
        lines = fleet_lines(reports, args.target, args.price)
        lines += ["", *error_lines(errors)] if errors else []
        results = [report.to_dict() for report in reports]
        more = {"flow_errors": [each.to_dict() for each in errors]} if errors else {}
    print(f"{traffic}\n{deployment.model} on {deployment.machine} ({deployment.validity})\n")
    print("\n".join(lines))
    if args.json is not None:
        record = {
            "chairlift": chairlift.__version__,
            "benchmark": "sim",
            "machine": deployment.machine,
            "model": deployment.model,
            "validity": deployment.validity,
            "traffic": traffic,
            "results": results,
            **more,
        }
        with replacing(args.json) as file:
            file.write(json.dumps(record, indent=1) + "\n")
    return 0


def _simulate(
    args: argparse.Namespace,
    configs: list[tuple[str, EngineConfig]],
    trace: list[TracedRequest],
    deployment: Deployment,
    users: int | None,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Simulate one engine with each of the settings. Returns (lines to print, results for JSON)."""
    from chairlift_lab.replay.replay import replay

    reports = [(value, replay(trace, config, deployment, max_concurrency=users)) for value, config in configs]
    lines = report_lines(reports[0][1]) if args.compare is None else _comparison_lines(args.compare, reports)
    return lines, [
        {"setting": value, "settings": dataclasses.asdict(config), **report.to_dict()}
        for (value, config), (_, report) in zip(configs, reports, strict=True)
    ]


# --- what is simulated -----------------------------------------------------------------------------------------------


def _configs(settings: dict[str, Any], compare: str | None) -> list[tuple[str, EngineConfig]]:
    """One entry per simulation: (label, engine settings). The label is the compared value."""
    if compare is None:
        return [("", EngineConfig.from_flat(settings))]
    name, _, values = compare.partition("=")
    flags = {flag.name: flag for flag in flat_fields() if flag.name not in NOT_SIMULATED}
    flag = flags.get(name.replace("-", "_"))
    if flag is not None and flag.name == "tensor_parallel_size":
        raise ConfigError("--compare changes settings of one machine; simulate each tensor_parallel_size by itself")
    if flag is None or not values:
        raise ConfigError(f"compare must be SETTING=A,B,... with one of {', '.join(flags)}; got {compare!r}")
    return [
        (text, EngineConfig.from_flat(settings | {flag.name: setting_value(flag, text)})) for text in values.split(",")
    ]


def setting_value(flag: Flag, text: str) -> Any:
    if (read := reader_of(flag.name, flag.kind)) is not None:
        return read(text)
    try:
        return {"true": True, "false": False}[text.lower()] if flag.kind is bool else flag.kind(text)
    except (ValueError, KeyError):
        raise ConfigError(f"compare: {flag.name} must be of type {flag.kind.__name__}, got {text!r}") from None


def add_traffic_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the flags that :func:`read_traffic` reads: requests and arrival times. If not ``required``, the default is
    the workload ``chat``."""
    traffic = parser.add_argument_group("traffic")
    source = traffic.add_mutually_exclusive_group(required=required)
    default = None if required else "chat"
    kinds = "a kind of traffic: chat, summarize, write, ..." + ("" if required else " (default: chat)")
    source.add_argument("--workload", metavar="NAME", default=default, help=kinds)
    source.add_argument(
        "--trace", metavar="FILE", type=Path, help="recorded traffic, in any format that chairlift trace reads"
    )
    count = _A_SAMPLE if required else 256
    traffic.add_argument(
        "--num-prompts", metavar="N", type=whole, help=f"number of requests (default: {count:,}; for a trace: all)"
    )
    traffic.add_argument(
        "--arrivals",
        metavar="FORM",
        help="arrival times of a workload: all, constant:RATE, poisson:RATE, gamma:RATE:BURSTINESS, "
        "onoff:RATE:ON_S:OFF_S, ramp:START:END:S, diurnal:RATE:PEAK_TO_TROUGH:PERIOD_S or closed:USERS; "
        "rates are in requests per second (default: all at once)",
    )
    traffic.add_argument("--seed", metavar="N", type=whole, default=0, help="seed of the workload (default: 0)")
    parser.set_defaults(usual_count=count)


def read_traffic(args: argparse.Namespace) -> tuple[list[TracedRequest], int | None, str]:
    """(requests, number of users, description of the traffic). The number of users is None in an open loop. Raises
    ConfigError."""
    from chairlift_lab.workload.arrivals import ClosedLoop, parse_arrivals
    from chairlift_lab.workload.trace import draw_trace, read_trace

    if args.num_prompts is not None and not 1 <= args.num_prompts <= _MAX_REQUESTS:
        raise ConfigError(f"num_prompts must be from 1 to {_MAX_REQUESTS:,}, got {args.num_prompts}")
    if args.seed < 0:
        raise ConfigError(f"seed must be 0 or more, got {args.seed}")
    if args.trace is not None:
        if args.arrivals is not None:
            raise ConfigError(
                "--arrivals is for a workload, and a trace keeps its own times; leave it out, or change them first with"
                " chairlift trace sample --rate R"
            )
        trace = read_trace(args.trace)[: args.num_prompts]
        return trace, None, f"trace {args.trace}, {len(trace):,} requests"
    count = args.num_prompts or args.usual_count
    form = "all" if args.arrivals is None else args.arrivals
    arrivals = parse_arrivals(form)
    trace = draw_trace(args.workload, arrivals, count, args.seed)
    users = arrivals.users if isinstance(arrivals, ClosedLoop) else None
    return trace, users, f"workload {args.workload}, {count:,} requests, arrivals {form}, seed {args.seed}"


def choose_deployment(args: argparse.Namespace, config: EngineConfig) -> Deployment:
    """Choose the machine and the model to simulate from the flags. Raises ConfigError."""
    from chairlift_lab.replay.machines import MACHINES, check_undivided, machine_from_name, read_deployment

    processes = config.model.tensor_parallel_size
    if args.save_steps is not None and args.fit is None:
        raise ConfigError("save_steps goes with --fit, which times the steps; leave it out")
    if args.cost_model is not None:
        check_undivided(processes, f"the cost model {args.cost_model}")
        return read_deployment(args.cost_model)
    if args.fit is not None:
        return _fitted_here(args)
    if args.step_log is not None:
        check_undivided(processes, f"the step log {args.step_log}")
        return _fitted_on_log(args, config)
    if args.machine is None:
        names = ", ".join(MACHINES)
        raise ConfigError(f"say on what: --machine (one of {names}), --cost-model FILE, --fit MODEL or --step-log FILE")
    return machine_from_name(args.machine, args.model or _USUAL_MODEL, processes)


def _fitted_here(args: argparse.Namespace) -> Deployment:
    from chairlift.engine.input_processor import ModelLimits
    from chairlift.models.loader import resolve_dtype, resolve_model_dir
    from chairlift.models.model_files import read_config
    from chairlift_lab.bench.machine import describe_machine
    from chairlift_lab.replay.calibrate import fit_core
    from chairlift_lab.replay.machines import ModelShape

    settings, _ = read_settings(args, sampling=False)
    model_dir = Path(chairlift.__file__).parent / "assets" if args.fit == BUNDLED_MODEL else resolve_model_dir(args.fit)
    network = read_config(model_dir)
    llm = load_llm(settings | {"model": str(model_dir), "skip_tokenizer_init": True}, quiet=True)
    shape = ModelShape.of(args.fit, network, resolve_dtype(network, llm.info.dtype).itemsize)
    machine = describe_machine()
    if machine.busy > _BUSY:
        print(
            f"chairlift: warning: other programs use {machine.busy:.0%} of this machine; its times will vary",
            file=sys.stderr,
        )
    print(f"timing steps of {args.fit} on this machine ({machine.cpu})", file=sys.stderr)
    limits = ModelLimits(network.vocab_size, llm.max_model_len)
    deployment, times = fit_core(llm.engine.core, limits, machine.cpu, shape)
    if args.save_steps is not None:
        with replacing(args.save_steps) as file:
            file.write("\n".join(times.lines) + "\n")
    return deployment


def _fitted_on_log(args: argparse.Namespace, config: EngineConfig) -> Deployment:
    from chairlift_lab.replay.calibrate import fit_deployment, read_steps
    from chairlift_lab.replay.machines import shape_from_name

    steps = read_steps(args.step_log)
    shape = shape_from_name(args.model or _USUAL_MODEL)
    memory = config.cache.kv_cache_memory_bytes
    if memory is None and config.cache.num_kv_blocks is None:
        raise ConfigError("a step log does not say how much memory there is; give --kv-cache-memory-bytes")
    return fit_deployment(f"the machine of {args.step_log}", shape, steps, memory or 1 << 30, shape.max_model_len)


# --- what is printed -------------------------------------------------------------------------------------------------


def report_lines(report: SimReport) -> list[str]:
    from chairlift_lab.bench.report import aligned

    served = report.served
    lines = [
        f"requests        {served.requests:,} served, {served.refused:,} refused on arrival,"
        f" {served.dropped:,} dropped at their deadline"
        + (f", {served.cancelled:,} cancelled by their client" if served.cancelled else ""),
        f"tokens          {served.prompt_tokens:,} of prompts, {served.cached_tokens:,} of them from the prefix cache;"
        f" {served.output_tokens:,} of answers",
        f"throughput      {served.requests_per_second:.2f} requests/s, {served.output_tokens_per_second:,.1f} output"
        f" tokens/s, over {_seconds(served.seconds)}",
        f"steps           {served.steps:,} with {served.mean_rows:.1f} requests on average, running"
        f" {served.utilisation:.0%} of the time",
        f"preemptions     {served.preemptions:,}; {served.preemption_rate:.1%} of the requests were preempted",
    ]
    if served.goodput is not None:
        lines.append(f"promises        met for {served.goodput:.1%} of the requests that had any")
    table = [["", "mean", "p50", "p90", "p99"]]
    for label, times in (
        ("in the queue", served.queue),
        ("time to first token", served.ttft),
        ("time per output token", served.tpot),
        ("between tokens", served.itl),
        ("whole request", served.e2e),
    ):
        untold = served.delivered_whole and (times is served.tpot or times is served.itl)
        cells = ["-"] * 4 if untold else map(_seconds, (times.mean, times.p50, times.p90, times.p99))
        table.append([label, *cells])
    return [*lines, "", *aligned(table)]


def _comparison_lines(compare: str, reports: list[tuple[str, SimReport]]) -> list[str]:
    from chairlift_lab.bench.report import aligned

    name = compare.partition("=")[0]
    table = [
        [name, "requests/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99", "rows", "preempted"]
    ]
    for value, report in reports:
        served = report.served
        row = [value, f"{served.requests_per_second:.2f}", f"{served.output_tokens_per_second:,.0f}"]
        for times in (served.ttft, served.tpot, served.e2e):
            untold = served.delivered_whole and times is served.tpot
            row += ["-", "-"] if untold else [_seconds(times.p50), _seconds(times.p99)]
        table.append([*row, f"{served.mean_rows:.1f}", f"{served.preemption_rate:.1%}"])
    return aligned(table)


def _seconds(value: float) -> str:
    """A duration as text in a suitable unit."""
    if value < 1:
        return f"{value * 1000:.1f} ms"
    if value < 100:
        return f"{value:.2f} s"
    return f"{value:,.0f} s"
