"""``chairlift sim --replicas N``: simulates traffic on several replicas."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from chairlift.base.quantities import read_count
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift_lab.replay.fleet import FleetReport
    from chairlift_lab.replay.flow_fleet import FlowError
    from chairlift_lab.replay.machines import Deployment
    from chairlift_lab.replay.served import ServedTrace
    from chairlift_lab.workload.trace import TracedRequest

__all__ = [
    *("add_fleet_flags", "certainty", "check_flags", "error_lines", "fleet_lines", "simulate_fleets"),
    "trace_with_slo",
]

_ONLY_FLEET: Final = (*("routing", "target", "start_seconds", "door_delay_ms", "fail", "resume", "rollout", "price"),)
_SLO_FIELDS: Final = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "deadline_ms"}


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a fleet to ``chairlift sim``."""
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--replicas",
        metavar="N,...",
        help="numbers of replicas to simulate behind one router; more than 16 as flows of requests, with the error",
    )
    fleet.add_argument(
        "--autoscale",
        metavar="MIN-MAX",
        help="also simulate a fleet whose size follows forecast waits, deadlines and load",
    )
    fleet.add_argument(
        "--routing",
        metavar="NAME,...",
        help="which replica serves a request: forecast (the default), prefix, least, p2c or rr",
    )
    fleet.add_argument(
        "--target", metavar="SHARE", type=float, help="fraction of requests that must meet their deadlines"
    )
    fleet.add_argument("--slo", metavar="NAME:MS,...", help="deadlines of every request, such as ttft:500,tpot:80")
    fleet.add_argument("--start-seconds", metavar="S", type=float, help="time that a replica takes to start again")
    fleet.add_argument("--door-delay-ms", metavar="MS", type=float, help="time until the router receives a token")
    fleet.add_argument(
        "--fail", metavar="REPLICA@S", action="append", help="a replica dies at this time; may be repeated"
    )
    fleet.add_argument(
        "--resume", action="store_true", default=None, help="continue the answers of a dead replica on another replica"
    )
    fleet.add_argument("--rollout", metavar="S", type=float, help="restart the replicas one by one, from this time on")
    fleet.add_argument(
        "--price", metavar="PER_HOUR", type=float, help="price of one replica; the cost of the tokens is printed"
    )


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for combinations of flags that have no meaning."""
    given = [name for name in _ONLY_FLEET if getattr(args, name) is not None]
    if args.autoscale is not None and args.replicas is None:
        args.replicas = ""
    if args.replicas is None and given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is about a fleet; say how many with --replicas")
    if args.replicas is not None and args.compare is not None:
        raise ConfigError("--compare and --replicas are two comparisons; leave one out")
    if args.target is not None and not 0 < args.target <= 1:
        raise ConfigError(f"--target is a share above 0 and at most 1, got {args.target}")


def trace_with_slo(trace: list[TracedRequest], slo: str | None) -> list[TracedRequest]:
    """Add the latency limits of ``slo`` to every request of a trace. Raises ConfigError."""
    if slo is None:
        return trace
    from chairlift_lab.bench.serve_result import parse_goodput

    limits: dict[str, Any] = {}
    for name, milliseconds in parse_goodput([slo]).items():
        if name not in _SLO_FIELDS:
            raise ConfigError(f"--slo knows {', '.join(_SLO_FIELDS)} in a simulation, got {name!r}")
        limits[_SLO_FIELDS[name]] = milliseconds
    return [dataclasses.replace(request, **limits) for request in trace]


def simulate_fleets(
    args: argparse.Namespace,
    trace: Sequence[TracedRequest],
    config: EngineConfig,
    deployment: Deployment,
    users: int | None,
) -> tuple[list[FleetReport], list[FlowError]]:
    """Simulate the fleet for each combination of a number of replicas and a routing policy. Returns (one report per
    combination, errors of the approximate flow model for the combinations with many replicas). Raises ConfigError."""
    from chairlift_lab.replay.fleet import MAX_EXACT, FleetPlan, replay_fleet
    from chairlift_lab.replay.flow_fleet import flow_error, replay_flow

    if args.target is not None and not any(
        limit is not None for each in trace for limit in (each.ttft_ms, each.tpot_ms, each.deadline_ms)
    ):
        raise ConfigError(
            "--target needs latency targets, but this traffic has none; set them, as in --slo ttft:500,tpot:80"
        )
    common: dict[str, Any] = {
        "door_delay": (args.door_delay_ms or 0.0) / 1000,
        "start_seconds": args.start_seconds or 0.0,
        "failures": tuple(map(_failure, args.fail or ())),
        "resume": bool(args.resume),
        "rollout_at": args.rollout,
    }
    plans = [
        FleetPlan(replicas=number, routing=routing, **common)
        for number in (_numbers(args.replicas) if args.replicas else [])
        for routing in (args.routing or "forecast").split(",")
    ]
    if args.autoscale is not None:
        minimum, maximum = _range(args.autoscale)
        plans += [
            FleetPlan(replicas=maximum, least=minimum, routing=routing, **common)
            for routing in (args.routing or "forecast").split(",")
        ]
    large = [plan for plan in plans if plan.replicas > MAX_EXACT]
    reports = [
        (replay_flow if plan in large else replay_fleet)(trace, config, deployment, plan, max_concurrency=users)
        for plan in plans
    ]
    return reports, [flow_error(trace, config, deployment, plan, max_concurrency=users) for plan in large]


def _numbers(text: str) -> list[int]:
    try:
        return [read_count("", number) for number in text.split(",")]
    except ConfigError:
        raise ConfigError(f"--replicas takes numbers such as 1,2,4, got {text!r:.60}") from None


def _range(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition("-")
    try:
        return int(minimum), int(maximum)
    except ValueError:
        raise ConfigError(f"--autoscale takes MIN-MAX such as 1-4, got {text!r:.60}") from None


def _failure(text: str) -> tuple[int, float]:
    replica, _, when = text.partition("@")
    try:
        return int(replica), float(when)
    except ValueError:
        raise ConfigError(f"--fail takes REPLICA@SECONDS such as 0@12.5, got {text!r:.60}") from None


def fleet_lines(reports: Sequence[FleetReport], target: float | None, price: float | None) -> list[str]:
    """Lines of output: a table of the reports, and the smallest fleet that reaches ``target``."""
    from chairlift_lab.bench.report import aligned

    head = ["replicas", "routing", "requests/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "hits", "busy"]
    head += ["kept"] * any(each.served.goodput is not None for each in reports)
    head += ["broken", "moved"] * any(each.broken or each.moved for each in reports)
    head += ["per million tokens"] * (price is not None)
    table = [head]
    for report in reports:
        served = report.served
        row = [_size(report), report.routing]
        row += [f"{served.requests_per_second:.2f}", f"{served.output_tokens_per_second:,.0f}"]
        for times in (served.ttft, served.tpot):
            row += [_milliseconds(times.p50), _milliseconds(times.p99)]
        row += [f"{report.hit_rate:.0%}", f"{served.utilisation:.0%}"]
        if "kept" in head:
            row.append("-" if served.goodput is None else f"{served.goodput:.1%}")
        if "broken" in head:
            row += [f"{report.broken}", f"{report.moved}"]
        if price is not None:
            tokens = served.output_tokens_per_second * 3600
            row.append(f"{1e6 * price * report.mean_replicas / tokens:.2f}" if tokens else "-")
        table.append(row)
    lines = aligned(table)
    if target is not None:
        good = [each for each in reports if each.served.goodput is not None and each.served.goodput >= target]
        best = min(good, key=lambda each: (each.mean_replicas, -(each.served.goodput or 0.0)), default=None)
        if best is None:
            lines += ["", f"none of these meets the targets of {target:.1%} of the requests; try more replicas"]
        else:
            plural = "replica" if _size(best) == "1" else "replicas"
            lines += [
                "",
                f"{_size(best)} {plural} with {best.routing} routing: {best.served.goodput:.1%} of the requests meet"
                f" their targets (required {target:.1%}); {certainty(best.served, target)}",
            ]
    return lines


def certainty(served: ServedTrace, target: float) -> str:
    """Text with the interval of the share of requests that meet their targets, for requests like those of the trace."""
    from chairlift_lab.bench.verdict import share_interval

    total = served.requests + served.dropped
    low, high = share_interval(round((served.goodput or 0.0) * total), total)
    text = f"{low:.1%} to {high:.1%} of all requests like these {total:,}"
    return text if low >= target else f"{text}, so more requests are needed to be sure of {target:.1%}"


def error_lines(errors: Sequence[FlowError]) -> list[str]:
    """Lines of output about the error of the approximate flow model, compared with the exact simulation."""
    lines = []
    for each in errors:
        differences = ", ".join(f"{name} {100 * (ratio - 1):+.1f} %" for name, ratio in each.ratios().items())
        kept = ""
        if each.exact.served.goodput is not None and each.flow.served.goodput is not None:
            kept = f"; kept {each.flow.served.goodput:.1%}, exactly {each.exact.served.goodput:.1%}"
        part = f"1/{each.parts} of the traffic on {each.exact.replicas} replicas, {each.exact.routing}"
        lines.append(f"error of the flow model (~), on {part}: {differences}{kept}")
    return lines


def _size(report: FleetReport) -> str:
    """Number of replicas as text. With autoscaling: the mean and the maximum number."""
    if report.least is None:
        return f"{'~' if report.as_flow else ''}{report.replicas}"
    return f"{report.mean_replicas:.1f} (to {report.peak_replicas})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
