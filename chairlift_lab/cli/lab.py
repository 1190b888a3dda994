"""``chairlift lab``: compares batching policies on public traffic, in the simulator and on the real engine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from chairlift.base.writing import check_writable, replacing
from chairlift.cli.flags import whole_number
from chairlift.config import BUNDLED_MODEL, flat_fields
from chairlift.errors import ConfigError
from chairlift_lab.cli import lab_fit
from chairlift_lab.cli.sim import setting_value
from chairlift_lab.cli.tune import ProgressLine, duration, engine_maker

if TYPE_CHECKING:
    from chairlift_lab.laboratory.cell import LabMachine, LabTrace
    from chairlift_lab.laboratory.plan import LabPlan
    from chairlift_lab.laboratory.state import LabState

__all__ = ["DESCRIPTION", "OTHERS", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "compare published batching policies on public traces"
DESCRIPTION: Final = """Compare batching policies on public traces: simulated in parallel, then measured here.

Each policy serves the same requests. The command prints goodput against the default, and writes a page with all
figures, the published claims beside what was found, and the command that repeats each row. After Ctrl-C, the same
command continues. `chairlift lab traces` lists the traces, `chairlift lab policies` the policies.

  chairlift lab --quick
  chairlift lab run --policies all --traces all --loads 0.8,0.95 --seeds 20 --output lab
  chairlift lab run --policies mine:Policy --traces mooncake-conversation --machines h100-sxm:llama-3.1-8b
  chairlift lab run --traces my-traffic.jsonl --machines here --output mine
  chairlift lab show lab --all"""
OTHERS: Final[dict[str, ModuleType]] = {"fit": lab_fit}
"""Name of a further subcommand -> its module, with SUMMARY, DESCRIPTION, add_arguments and run."""
_TRACES: Final = "Show the traces: where they come from, and what is drawn from them beside its target."
_KNOTS: Final = """Compute the knots of a trace file, from which requests like those of the trace are drawn.

The file has any format that chairlift trace reads. The knots hold no request: only quantiles and a few numbers."""
_SHOW: Final = "Print the results in a directory again, and write its page again."
_DEFAULTS: Final[dict[str, Any]] = {
    "policies": "all",
    "traces": "all",
    "machines": "l4:llama-3.1-8b,here",
    "loads": [0.8, 0.95],
    "memory": [1.0],
    "policy_share": [0.75, 1.0],
    "seeds": 5,
    "requests": 300,
    "workers": None,
    "model": BUNDLED_MODEL,
    "time_limit": None,
    "output": Path("lab"),
    "set": [],
    "quick": False,
    "stop_decided": False,
}
_QUICK: Final = {"loads": [0.95], "policy_share": [0.75], "seeds": 2, "requests": 60, "time_limit": 270.0}
_MOST_MEASURED: Final = 0.3
"""Part of a time limit that is kept for the measured rounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift lab`` and its subcommands."""
    _add_run_flags(parser)
    parser.set_defaults(lab_command=None, **_DEFAULTS)
    others = parser.add_subparsers(title="other commands", metavar="[NAME]", dest="lab_command")
    # A flag before the subcommand holds, too: the subcommand sets only what is given.
    again = others.add_parser("run", help=SUMMARY, description=DESCRIPTION, argument_default=argparse.SUPPRESS)
    _add_run_flags(again)
    again.set_defaults(parser=again)
    for name, summary, description, add in (
        ("policies", "list the policies, with source and claim", "List the policies, with source and claim.", _nothing),
        ("traces", "show the traces, target and drawn", _TRACES, _add_traces_flags),
        ("knots", "compute the knots of a trace file", _KNOTS, _add_knots_flags),
        ("show", "print results again", _SHOW, _add_show_flags),
    ):
        command = others.add_parser(name, help=summary, description=description)
        add(command)
        command.set_defaults(parser=command)
    for name, module in OTHERS.items():
        command = others.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(parser=command)


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is compared")
    what.add_argument("--policies", metavar="NAME,...", help="names of policies, or module:Class (default: all)")
    what.add_argument(
        "--traces", metavar="NAME,...", help="names of traces, or files of recorded traffic (default: all)"
    )
    what.add_argument(
        "--machines",
        metavar="NAME,...",
        help="MACHINE:MODEL, a file with a cost model, or here, which is this machine with --model; policies are also"
        " measured here (default: l4:llama-3.1-8b,here)",
    )
    what.add_argument(
        "--loads", metavar="X,...", type=_numbers, help="rates as shares of what fcfs sustains (default: 0.8,0.95)"
    )
    what.add_argument("--memory", metavar="X,...", type=_numbers, help="shares of the KV memory (default: 1)")
    what.add_argument(
        "--policy-share", metavar="X,...", type=_numbers, help="values of --policy-share to try (default: 0.75,1)"
    )
    what.add_argument("--model", metavar="MODEL", help="model of the machine here (default: the bundled model)")
    what.add_argument(
        "--set", metavar="SETTING=VALUE", action="append", help="a setting of the engine for all cells; repeatable"
    )
    how = parser.add_argument_group("how much is run")
    how.add_argument("--seeds", metavar="N", type=whole_number(1, 1000), help="seeds of each cell (default: 5)")
    how.add_argument(
        "--requests", metavar="N", type=whole_number(40, 100_000), help="requests of a cell (default: 300)"
    )
    how.add_argument("--workers", metavar="N", type=whole_number(1, 512), help="processes (default: one per processor)")
    how.add_argument(
        "--stop-decided",
        action="store_true",
        help="after 3, 5, 8, 12 and 16 seeds, end the rows that win beyond doubt or will hardly win",
    )
    how.add_argument(
        "--time-limit", metavar="TIME", type=duration, help="time after which no new cell begins, such as 20m"
    )
    how.add_argument(
        "--quick", action="store_true", help="few seeds and requests: at most five minutes on two processors"
    )
    how.add_argument("--output", metavar="DIR", type=Path, help="directory for results and page (default: lab)")


def _add_traces_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="traces (default: all)")


def _add_knots_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="trace in any format that chairlift trace reads")
    parser.add_argument("-o", "--output", dest="knots_output", metavar="FILE", type=Path, required=True)
    parser.add_argument("--name", required=True, help="name of the trace, as in --traces")
    parser.add_argument("--title", default="", help="what the trace is, in a few words")
    parser.add_argument("--source", default="", help="where the file comes from")
    parser.add_argument("--licence", default="", help="licence of the file")
    parser.add_argument(
        "--keep-gaps", action="store_true", help="gaps within sessions do not change with the rate, as those of tools"
    )


def _add_show_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="output of chairlift lab, or its results.json")
    parser.add_argument("--all", dest="everything", action="store_true", help="all figures of all rows")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand. Returns its exit code. Raises ChairliftError if it cannot run."""
    if args.lab_command in OTHERS:
        code: int = OTHERS[args.lab_command].run(args)
        return code
    commands = {"policies": _policies, "traces": _traces, "knots": _knots, "show": _show}
    return commands.get(args.lab_command, _compare)(args)


# --- run -------------------------------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from chairlift_lab.laboratory.results import lab_record
    from chairlift_lab.laboratory.run import processes, run_plan
    from chairlift_lab.laboratory.state import LabState

    begun = time.monotonic()
    if args.quick:
        given = {name for name, value in _DEFAULTS.items() if getattr(args, name) != value}
        for name, value in _QUICK.items():
            if name not in given:
                setattr(args, name, value)
    output: Path = args.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {output}: {error.strerror}; give another --output") from None
    state = LabState(output / "state.json")
    progress = ProgressLine()
    if state.resumed:
        progress.line(f"{state.path} holds earlier results: cells that are in it are not run again")
    plan = _plan(args, state, progress)
    limit = float("inf") if args.time_limit is None else args.time_limit
    measured = any(machine.name == "here" for machine in plan.machines)
    deadline = begun + limit * (1 - _MOST_MEASURED * measured)
    try:
        with processes(args.workers or os.cpu_count() or 1, deadline) as hands:
            run_plan(plan, state, hands, say=progress.update)
        if measured:
            _measure(plan, args, state, progress, begun + limit)
    except KeyboardInterrupt:
        state.save()
        progress.line(f"stopped; what was found is in {state.path}, and the same command goes on from there")
        raise
    progress.end()
    command = shlex.join(["chairlift", *sys.argv[1:]]) if sys.argv[1:2] == ["lab"] else "chairlift lab ..."
    record = lab_record(plan, state, command=command)
    _write(output, record)
    _print(record)
    print(f"\nresults and page: {output / 'results.json'}, {output / 'report.html'}")
    return 0


def _plan(args: argparse.Namespace, state: LabState, progress: ProgressLine) -> LabPlan:
    from chairlift_lab.laboratory.plan import LabPlan
    from chairlift_lab.laboratory.policies import chosen_policies

    machines = [_machine(name, args, state, progress) for name in _names(args.machines)]
    return LabPlan(
        policies=chosen_policies(args.policies),
        traces=_chosen_traces(args.traces),
        machines=[dataclasses.replace(machine, memory=share) for machine in machines for share in args.memory],
        loads=args.loads,
        shares=args.policy_share,
        seeds=args.seeds,
        requests=args.requests,
        settings=_settings(args.set),
        stops_decided=args.stop_decided,
    )


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _settings(given: Sequence[str]) -> dict[str, Any]:
    flags = {flag.name: flag for flag in flat_fields()}
    settings = {}
    for text in given:
        name, _, value = text.partition("=")
        flag = flags.get(name.replace("-", "_"))
        if flag is None or not value:
            raise ConfigError(f"set must be SETTING=VALUE with a setting of the engine, got {text!r}")
        settings[flag.name] = setting_value(flag, value)
    return settings


def _machine(name: str, args: argparse.Namespace, state: LabState, progress: ProgressLine) -> LabMachine:
    from chairlift_lab.laboratory.cell import LabMachine
    from chairlift_lab.replay.machines import Deployment, deploy, read_deployment, shape_from_name

    if name == "here":
        if name not in state.machines:
            progress.line(f"timing steps of {args.model} on this machine")
            state.machines[name] = _fitted_here(args).to_dict()
            state.save()
        return LabMachine(name=name, deployment=Deployment.from_dict(state.machines[name]))
    if Path(name).is_file():
        return LabMachine(name=name, deployment=read_deployment(Path(name)))
    machine, _, model = name.partition(":")
    return LabMachine(name=name, deployment=deploy(machine, shape_from_name(model or "llama-3.1-8b")))


def _fitted_here(args: argparse.Namespace) -> Any:
    from chairlift_lab.bench.machine import describe_machine
    from chairlift_lab.replay.calibrate import fit_core

    make_core, shape = engine_maker(args.model, _settings(args.set))
    core, limits = make_core(_settings(args.set))
    try:
        return fit_core(core, limits, describe_machine().cpu, shape)[0]
    finally:
        core.shutdown()


def _chosen_traces(text: str) -> list[LabTrace]:
    from chairlift_lab.laboratory.cell import LabTrace
    from chairlift_lab.laboratory.knots import bundled_knots, read_knots

    known = bundled_knots()
    chosen = []
    for name in list(known) if text == "all" else _names(text):
        if name in known:
            chosen.append(LabTrace(name=name, knots=known[name]))
        elif name.endswith(".json") and Path(name).is_file():
            knots = read_knots(Path(name))
            chosen.append(LabTrace(name=knots.name, knots=knots))
        elif Path(name).is_file():
            chosen.append(LabTrace(name=Path(name).name, file=Path(name)))
        else:
            raise ConfigError(f"traces must be all, a file, or some of {', '.join(known)}; got {name!r}")
    return chosen


def _measure(plan: LabPlan, args: argparse.Namespace, state: LabState, progress: ProgressLine, deadline: float) -> None:
    """Measure at the highest load that the machine can sustain, trace by trace."""
    from chairlift_lab.laboratory.measure import HERE, measure

    make_core, _ = engine_maker(args.model, dict(plan.settings))
    load = max((load for load in plan.loads if load <= 1), default=None)
    for group in plan.groups():
        if group.machine.name == HERE and group.machine.memory == plan.machines[0].memory and group.load == load:
            measure(
                plan,
                state,
                group,
                make_core,
                say=progress.update,
                out_of_time=lambda: time.monotonic() > deadline,
            )


def _write(output: Path, record: dict[str, Any]) -> None:
    from chairlift_lab.laboratory.report import lab_report

    files = {"results.json": json.dumps(record, indent=1) + "\n", "report.html": lab_report(record).html()}
    for name, whole in files.items():
        with replacing(output / name) as file:
            file.write(whole)


def _print(record: dict[str, Any], *, everything: bool = False) -> None:
    from chairlift_lab.bench.report import text
    from chairlift_lab.laboratory.report import printed_summary

    print("\n".join(text(*printed_summary(record, everything=everything))))


# --- the other commands ----------------------------------------------------------------------------------------------


def _policies(args: argparse.Namespace) -> int:
    from chairlift_lab.laboratory.policies import known_policies

    for policy in known_policies().values():
        print(f"{policy.name}: {policy.source}")
        print(f"    {' '.join(f'{name}={value}' for name, value in policy.settings.items())}")
        if policy.claim:
            print(f"    claim: {policy.claim}")
    return 0


def _traces(args: argparse.Namespace) -> int:
    from chairlift_lab.bench.report import aligned
    from chairlift_lab.laboratory.drawn import drawn_figures

    for number, trace in enumerate(_chosen_traces(",".join(args.names) or "all")):
        if trace.knots is None:
            raise ConfigError(f"{trace.name} is a trace file; chairlift trace show {trace.file} shows it")
        knots = trace.knots
        print(*[""] * bool(number), f"{knots.name}: {knots.title}", sep="\n" if number else "")
        print(f"{knots.basis}; {knots.source}; {knots.licence}")
        rows = [["", "target", "drawn"]]
        rows += [[each.name, f"{each.target:,.4g}", f"{each.drawn:,.4g}"] for each in drawn_figures(knots)]
        print("\n".join(aligned(rows)))
    return 0


def _knots(args: argparse.Namespace) -> int:
    from chairlift_lab.laboratory.fit_knots import fit_knots
    from chairlift_lab.workload.trace import load_trace

    check_writable(args.knots_output, "output", args.file)
    loaded = load_trace(args.file)
    knots = fit_knots(
        loaded.requests,
        name=args.name,
        title=args.title or args.name,
        source=args.source or args.file.name,
        licence=args.licence or "not stated",
        keeps_gaps=args.keep_gaps,
    )
    with replacing(args.knots_output) as file:
        file.write(json.dumps(knots.to_dict()) + "\n")
    print(f"{len(loaded.requests):,} requests -> {args.knots_output}")
    for note in loaded.notes:
        print(note)
    return 0


def _show(args: argparse.Namespace) -> int:
    path = args.directory / "results.json" if args.directory.is_dir() else args.directory
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        known = record["benchmark"] == "lab"
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise ConfigError(f"{path} has no results of chairlift lab")
    _print(record, everything=args.everything)
    if args.directory.is_dir():
        with contextlib.suppress(OSError):
            _write(args.directory, record)
    return 0


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if not all(0 < number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers above 0 like 0.5,0.95, got {text!r}")
    return numbers
