"""``chairlift tune --fleet``: finds how many replicas a given traffic needs, and what they cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import chairlift
from chairlift.base.writing import replacing
from chairlift.cli.flags import read_settings
from chairlift.config import BUNDLED_MODEL, EngineConfig
from chairlift.errors import ConfigError
from chairlift_lab.cli.sim import choose_deployment
from chairlift_lab.cli.sim_fleet import certainty, fleet_lines

if TYPE_CHECKING:
    from chairlift_lab.replay.fleet_size import FleetSize
    from chairlift_lab.workload.trace import TracedRequest

__all__ = ["add_fleet_size_flags", "check_fleet_flags", "fleet_size_lines", "run_fleet"]

_ONLY_FLEET: Final = ("machine", "cost_model", "target", "routing", "start_seconds")
_DAY: Final = 86_400


def add_fleet_size_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``--fleet`` to ``chairlift tune``."""
    fleet = parser.add_argument_group("number of replicas (a simulation only; --output is optional)")
    fleet.add_argument(
        "--fleet",
        action="store_true",
        help="find the smallest number of replicas that meets the target, and its cost",
    )
    fleet.add_argument(
        "--machine",
        metavar="NAME",
        help="machine of each replica, such as h100-sxm, or a machine file (default: this one, timed)",
    )
    fleet.add_argument("--cost-model", metavar="FILE", type=Path, help="the same, from a file of chairlift sim --save")
    fleet.add_argument(
        "--target",
        metavar="SHARE",
        type=float,
        help="fraction of requests that must meet their deadlines (default: 0.99)",
    )
    fleet.add_argument("--routing", metavar="NAME", help="forecast (default), prefix, least, p2c or rr")
    fleet.add_argument(
        "--start-seconds", metavar="S", type=float, help="time until a dead replica serves again (default: 60)"
    )


def check_fleet_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for combinations of flags that are not allowed."""
    if args.fleet:
        if args.machine is not None and args.cost_model is not None:
            raise ConfigError("--machine and --cost-model both say what a replica runs on; leave one out")
        if args.target is not None and not 0 < args.target <= 1:
            raise ConfigError(f"--target is a share above 0 and at most 1, got {args.target}")
        return
    for name in _ONLY_FLEET:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is about a fleet; add --fleet")
    if args.output is None:
        raise ConfigError("the following arguments are required: --output")


def run_fleet(args: argparse.Namespace, trace: list[TracedRequest], users: int | None, traffic: str) -> int:
    """Search for the smallest fleet and print it. Returns 0. Raises ChairliftError."""
    from chairlift_lab.replay.fleet_size import smallest_fleet

    settings, _ = read_settings(args, sampling=False)
    model = settings.pop("model", BUNDLED_MODEL) if args.model is None else args.model
    here = args.machine is None and args.cost_model is None
    sim_args = argparse.Namespace(**vars(args) | {"save_steps": None, "step_log": None, "fit": model if here else None})
    sim_args.model = model
    config = EngineConfig.from_flat(settings)
    deployment = choose_deployment(sim_args, config)
    target = 0.99 if args.target is None else args.target
    found = smallest_fleet(
        trace,
        config,
        deployment,
        target=target,
        routing=args.routing or "forecast",
        start_seconds=60.0 if args.start_seconds is None else args.start_seconds,
        max_concurrency=users,
    )
    print(f"{traffic}\n{deployment.model} on {deployment.machine} ({deployment.validity})\n")
    print("\n".join(fleet_size_lines(found, target, args.price_per_hour)))
    if args.output is not None:
        record = {
            "chairlift": chairlift.__version__,
            "machine": deployment.machine,
            "model": deployment.model,
            "validity": deployment.validity,
            "traffic": traffic,
            "target": target,
            "replicas": found.replicas,
            "parts": found.parts,
            "requests_per_second": found.rate,
            "division_error": found.division_error,
            "price_per_hour": args.price_per_hour,
            "tried": [each.to_dict() for each in found.tried],
        }
        args.output.mkdir(parents=True, exist_ok=True)
        with replacing(args.output / "fleet.json") as file:
            file.write(json.dumps(record, indent=1) + "\n")
    return 0


def fleet_size_lines(found: FleetSize, target: float, price: float) -> list[str]:
    """Lines with the fleets that were tried, the result, and its cost at ``price`` per replica and hour."""
    lines = fleet_lines(found.tried, None, None)
    if found.parts > 1:
        lines.insert(0, f"one of {found.parts} equal parts of the traffic:")
    chosen = found.chosen
    count = found.replicas
    if chosen is None or count is None:
        best = max(each.served.goodput or 0.0 for each in found.tried)
        return [
            *lines,
            "",
            f"no number of replicas meets the targets of {target:.1%} of the requests; {best:.1%} is the best. Set"
            " looser targets, or use a faster machine",
        ]
    served = chosen.served
    rate = found.parts * served.requests_per_second if found.rate is None else found.rate
    tokens = rate * served.output_tokens / served.requests
    lines += [
        "",
        f"replicas        {count}: {served.goodput:.1%} of the requests meet their targets (required {target:.1%})",
        f"certainty       {certainty(served, target)}",
        f"each serves     {rate / count:.2f} requests/s, {tokens / count:,.0f} tokens/s",
    ]
    if found.failing is not None:
        lines.append(
            f"with a spare    {count + found.parts}: {found.failing.served.goodput:.1%} meet them while one"
            f"{' of each part' if found.parts > 1 else ''} dies and restarts"
        )
    lines += [
        f"cost            {price * count:,.2f} an hour, {price * count * 24:,.2f} a day;"
        f" {1e6 * price * count / (tokens * 3600):.2f} per million tokens of answers",
        f"a day           {rate * _DAY:,.0f} requests at this rate",
    ]
    if found.halved is not None:
        (whole, half), error = found.halved, found.division_error or 0.0
        lines.append(
            f"dividing        {whole.replicas} replicas with a part {whole.served.goodput:.1%}, {half.replicas} with"
            f" half of it {half.served.goodput:.1%}: an error of {100 * error:.1f} points;"
            f" TTFT p99 {1000 * whole.served.ttft.p99:.0f} and {1000 * half.served.ttft.p99:.0f} ms"
        )
    return lines
