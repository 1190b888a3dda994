"""``chairlift bench serve``: flags and plan of the benchmark. Also the code that ``bench offline`` shares: traffic,
printed lines and files. The measurement itself is in ``chairlift_lab/bench/serve.py``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import random
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import chairlift
from chairlift.cli.flags import whole
from chairlift.cli.remote_server import RemoteServer, add_url_flag, plain, read_key
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift_lab.bench.report import Report, Table
    from chairlift_lab.bench.serve import Plan
    from chairlift_lab.bench.serve_result import Figures
    from chairlift_lab.bench.serve_run import Load, LoadOutcome, Progress, ServeRun
    from chairlift_lab.bench.verdict import Ratio
    from chairlift_lab.replay.traced_request import TracedRequest
    from chairlift_lab.workload.arrivals import Arrivals
    from chairlift_lab.workload.lengths import Lengths
    from chairlift_lab.workload.texts import Said

__all__ = [
    *("DESCRIPTION", "SIDES", "SUMMARY", "TableCell", "add_arguments", "add_traffic_flags", "check_ranges", "loads_of"),
    *("results", "run", "show", "watch"),
]

SUMMARY: Final = "send traffic to a running server, and measure its latency"
DESCRIPTION: Final = """Send traffic to a running OpenAI-compatible server, and measure its latency as a client.

Requests are sent at their times, independent of the server (open loop). Every run has new prompts, so no cache of the
server has them. Lengths and times depend only on --seed. Examples:

  chairlift bench serve --workload chat --request-rate 4 --num-prompts 200 --goodput ttft:500 tpot:80
  chairlift bench serve --trace monday.jsonl --html monday.html
  chairlift bench serve --dataset ShareGPT.json --num-prompts 200 --request-rate 4
  chairlift bench serve --input-len 512 --output-len uniform:16:128 --request-rate 1,2,4,8 --ignore-eos
  chairlift bench serve --compare http://127.0.0.1:8000 http://127.0.0.1:8001 --rounds 8 --ignore-eos

Exit code 1: some requests failed. The result counts them by kind."""

_MAX_PROMPTS: Final = 1_000_000
SIDES: Final = "AB"
"""Labels of two servers or settings that are compared."""
_DEFAULT_PROMPTS: Final = 256
_ENDPOINTS: Final = {"completions": False, "/v1/completions": False, "chat": True, "/v1/chat/completions": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. They have the same names as in ``vllm bench serve``, if it has them."""
    server = parser.add_argument_group("server")
    where = server.add_mutually_exclusive_group()
    add_url_flag(where)
    where.add_argument(
        "--compare", metavar=("URL_A", "URL_B"), nargs=2, help="send the same requests to two servers, in turns"
    )
    server.add_argument(
        "--rounds", metavar="N", type=whole, default=6, help="rounds of --compare (default: 6, the fewest for a claim)"
    )
    server.add_argument("--model", metavar="NAME", help="model name on the server (default: the first that it lists)")
    server.add_argument("--endpoint", choices=_ENDPOINTS, help="(default: completions; for a data set of chats: chat)")
    server.add_argument(
        "--ready-check-timeout-sec",
        metavar="S",
        type=float,
        default=600.0,
        help="seconds to wait for a server that still loads or does not respond; 0: do not wait (default: 600)",
    )
    server.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with the API key")
    add_traffic_flags(parser, texts=True)
    answers = parser.add_argument_group("answers")
    answers.add_argument("--ignore-eos", action="store_true", help="generate answers of exactly the requested length")
    answers.add_argument("--temperature", metavar="X", type=float, default=0.0, help="(default: 0)")
    answers.add_argument(
        "--promises", action="store_true", help="send the class, priority, tenant and latency limits of the trace"
    )
    answers.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, help="seconds after which a request fails (default: 600)"
    )
    answers.add_argument(
        "--num-warmups",
        "--warmup",
        metavar="N",
        type=whole,
        default=4,
        help="warm-up requests, which are not measured (default: 4)",
    )
    answers.add_argument(
        "--goodput",
        "--slo",
        metavar="NAME:MS",
        nargs="+",
        default=[],
        help="latency limits, such as ttft:500 tpot:80 e2el:9000",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write an HTML page with plots to this file")


def run(args: argparse.Namespace) -> tuple[Report, int]:
    """Run the benchmark. Returns the report and the exit code. Raises ConfigError, before anything is sent if
    possible."""
    from chairlift_lab.bench.serve import raise_file_limit
    from chairlift_lab.bench.serve_result import parse_goodput

    slo = parse_goodput(args.goodput) if args.goodput else {}
    plan, cells = _plan(args, slo)
    raise_file_limit(max(min(len(load.requests), load.max_concurrency or _MAX_PROMPTS) for load in plan.loads))
    with _event_loop() as runner:
        measured = runner.run(_measure(plan, cells, slo))
    return results(measured, args.compare or [])


# --- what is sent ----------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, slo: Mapping[str, float]) -> tuple[Plan, list[dict[str, Any]]]:
    """Create the plan of a benchmark. Returns (plan, additional facts about each load for the record)."""
    from chairlift_lab.bench.serve import Plan

    check_ranges(
        args,
        rounds=(1, 1000),
        num_warmups=(0, 10_000),
        timeout=(0.001, 1e6),
        temperature=(0, 100),
        ready_check_timeout_sec=(0, 1e6),
    )
    loads, cells = loads_of(args, slo, temperature=args.temperature, promises=args.promises)
    chats = any(said.messages for load in loads for said in load.said or ())
    chat = chats if args.endpoint is None else _ENDPOINTS[args.endpoint]
    if chats and not chat:
        raise ConfigError(
            f"{args.dataset} has chats, which go to --endpoint chat; leave out --endpoint {args.endpoint}"
        )
    flags = ("ignore_eos", "temperature", "timeout", "num_warmups")
    cells = [cell | {"benchmark": "serve"} | {name: getattr(args, name) for name in flags} for cell in cells]
    urls = [RemoteServer(url, name="the URL").url for url in args.compare or [args.url]]
    plan = Plan(
        urls=urls,
        loads=loads,
        api_key=None if args.api_key_file is None else read_key(args.api_key_file),
        model=args.model,
        chat=chat,
        ignore_eos=args.ignore_eos,
        num_warmups=args.num_warmups,
        timeout=args.timeout,
        ready_timeout=args.ready_check_timeout_sec,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    return plan, cells


# --- traffic ---------------------------------------------------------------------------------------------------------


def add_traffic_flags(parser: argparse.ArgumentParser, *, texts: bool = False) -> None:
    """Add the flags that choose requests and their arrival times. They have the same names as in ``vllm bench serve``,
    if it has them. ``texts`` adds ``--dataset``, a file with the texts to send."""
    traffic = parser.add_argument_group("traffic")
    source = traffic.add_mutually_exclusive_group()
    source.add_argument("--trace", metavar="FILE", type=Path, help="lengths and times from a file (chairlift trace)")
    parser.set_defaults(dataset=None)
    if texts:
        source.add_argument(
            "--dataset",
            "--dataset-path",
            metavar="FILE",
            type=Path,
            help="send the texts of a file: ShareGPT (JSON or JSON lines), messages, vLLM's custom prompts, a batch "
            "file for OpenAI's API; also .gz and Parquet",
        )
    source.add_argument(
        "--workload", metavar="NAME", help="a kind of traffic, such as chat or summarize (default: chat)"
    )
    source.add_argument(
        "--input-len",
        "--random-input-len",
        metavar="LENGTHS",
        help="tokens of prompts: a number, or uniform:MIN:MAX, lognormal:MU:SIGMA:MIN:MAX, zipf:ALPHA:MIN:MAX",
    )
    traffic.add_argument(
        "--output-len",
        "--random-output-len",
        metavar="LENGTHS",
        help="tokens of answers, in the same forms; needs --input-len",
    )
    traffic.add_argument(
        "--num-prompts",
        metavar="N",
        type=whole,
        help=f"number of requests (default: {_DEFAULT_PROMPTS}; for a trace: all)",
    )
    timing = traffic.add_mutually_exclusive_group()
    timing.add_argument(
        "--request-rate",
        metavar="R",
        help="requests per second; inf: all at once; several values with commas: one run each. The times of a trace "
        "are scaled to this rate. (default: inf; for a trace: its own times)",
    )
    timing.add_argument(
        "--arrivals",
        metavar="FORM",
        help="poisson:RATE, gamma:RATE:BURSTINESS, constant:RATE, onoff:RATE:ON_S:OFF_S, ramp:START:END:SECONDS, "
        "closed:USERS, all, and others",
    )
    traffic.add_argument(
        "--burstiness",
        metavar="X",
        type=float,
        help="burstiness of --request-rate: 1 is Poisson, a smaller value gives bursts (default: 1)",
    )
    traffic.add_argument(
        "--max-concurrency", metavar="N", type=whole, help="maximum number of requests in progress (closed loop)"
    )
    traffic.add_argument("--seed", metavar="N", type=whole, default=0, help="seed of lengths and times (default: 0)")


def check_ranges(args: argparse.Namespace, **more: tuple[float, float]) -> None:
    """Raise ConfigError if a number is outside its allowed range. ``more`` adds ranges: flag name -> (minimum,
    maximum)."""
    ranges = {"num_prompts": (1, _MAX_PROMPTS), "max_concurrency": (1, _MAX_PROMPTS), "seed": (0, 2**62)}
    for name, (minimum, maximum) in {**ranges, "burstiness": (1e-3, 1e6), **more}.items():
        value = getattr(args, name)
        if value is not None and not minimum <= value <= maximum:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be from {minimum:,g} to {maximum:,g}, got {value}")
    if args.burstiness is not None and args.request_rate is None:
        raise ConfigError("--burstiness goes with --request-rate; with --arrivals say gamma:RATE:BURSTINESS")
    if args.burstiness is not None and args.trace is not None:
        raise ConfigError(
            "a trace keeps its own bursts; leave out --burstiness, or give --arrivals gamma:RATE:BURSTINESS"
        )
    if args.dataset is not None and args.output_len is not None and not args.output_len.isdigit():
        raise ConfigError(f"with --dataset, --output-len must be a number for all answers, got {args.output_len!r:.40}")
    if args.dataset is None and (args.input_len is None) != (args.output_len is None):
        raise ConfigError("--input-len and --output-len go together; give both")


def loads_of(
    args: argparse.Namespace, slo: Mapping[str, float], **fields: Any
) -> tuple[list[Load], list[dict[str, Any]]]:
    """(loads, facts about each load for its record). There is one load per rate, or one load per round with
    ``--compare``.

    ``fields`` are set in every load.
    """
    from chairlift_lab.bench.serve_run import Load

    rates = [None] if args.request_rate is None else [_rate(text) for text in args.request_rate.split(",")]
    if args.compare is not None and len(rates) > 1:
        raise ConfigError("--compare takes one --request-rate; compare at several in several runs")
    said = None
    if args.dataset is None:
        source = _source(args)
    else:
        source, said = _texts(args)
    loads = []
    facts = []
    salt = random.SystemRandom().getrandbits(58)
    for number, rate in enumerate(rates * (args.rounds if args.compare is not None else 1)):
        requests, users, arrivals = source(rate)
        concurrency = min([each for each in (args.max_concurrency, users) if each is not None], default=None)
        salted = salt + number * 2 * _MAX_PROMPTS
        loads.append(Load(requests=requests, max_concurrency=concurrency, salt=salted, said=said, **fields))
        facts.append(_settings(args, requests, arrivals, rate) | {"round": number + 1, "goodput_limits_ms": dict(slo)})
    return loads, facts


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ConfigError(f"--request-rate must be a number above 0, or inf, or several with commas; got {text!r:.40}")
    return rate


Source = Callable[[float | None], "tuple[Sequence[TracedRequest], int | None, str]"]
"""Function from a request rate to (requests, number of users, description of the arrival times). The number of users
is None in an open loop."""


def _source(args: argparse.Namespace) -> Source:
    if args.trace is None:
        return lambda rate: _drawn(args, rate)
    from chairlift_lab.workload.formats import read_trace

    recorded = read_trace(args.trace)[: args.num_prompts]

    def of_the_trace(rate: float | None) -> tuple[Sequence[TracedRequest], int | None, str]:
        if rate is None and args.arrivals is None:
            return recorded, None, "the trace's own"
        if rate is None or math.isinf(rate):
            arrivals, users, words = _arrivals(args, rate)
            times = arrivals.times(len(recorded), args.seed)
        else:
            span = recorded[-1].arrival - recorded[0].arrival
            if not span:
                raise ConfigError(f"all requests of {args.trace} have one time; give --arrivals poisson:{rate:g}")
            factor = (len(recorded) - 1) / span / rate
            times = [each.arrival * factor for each in recorded]
            users = None
            words = f"the trace's own, stretched to {rate:g} requests/s"
        return [dataclasses.replace(r, arrival=t) for r, t in zip(recorded, times, strict=True)], users, words

    return of_the_trace


def _texts(args: argparse.Namespace) -> tuple[Source, Sequence[Said]]:
    """(source of requests, texts), from the file of ``--dataset``. Prints notes about the file."""
    from chairlift_lab.workload.arrivals import AllAtOnce
    from chairlift_lab.workload.formats import load_texts

    loaded = load_texts(args.dataset, AllAtOnce(), args.seed)
    requests = loaded.requests[: args.num_prompts]
    said = loaded.said[: args.num_prompts]
    if args.output_len is not None:
        num_tokens = max(1, int(args.output_len))
        requests = [dataclasses.replace(each, output_tokens=num_tokens) for each in requests]
    print("\n".join(f"note: {note}" for note in loaded.notes), end="\n" * bool(loaded.notes))
    several = (args.rounds if args.compare is not None else 1) * len((args.request_rate or "").split(","))
    if several > 1:
        print("note: each run sends the same texts, and a prefix cache may know them from the run before")

    def at(rate: float | None) -> tuple[Sequence[TracedRequest], int | None, str]:
        arrivals, users, words = _arrivals(args, rate)
        times = arrivals.times(len(requests), args.seed)
        return [dataclasses.replace(r, arrival=t) for r, t in zip(requests, times, strict=True)], users, words

    return at, said


def _drawn(args: argparse.Namespace, rate: float | None) -> tuple[Sequence[TracedRequest], int | None, str]:
    import numpy as np

    from chairlift_lab.replay.traced_request import TracedRequest
    from chairlift_lab.workload.trace import draw_trace

    count = args.num_prompts or _DEFAULT_PROMPTS
    arrivals, users, words = _arrivals(args, rate)
    if args.input_len is None:
        return draw_trace(args.workload or "chat", arrivals, count, args.seed), users, words
    rng = np.random.default_rng(args.seed)
    prompts = _lengths(args.input_len).draw(rng, count)
    outputs = _lengths(args.output_len, "output").draw(rng, count)
    requests = [
        TracedRequest(arrival=time, prompt_tokens=prompt, output_tokens=output)
        for time, prompt, output in zip(arrivals.times(count, args.seed), prompts, outputs, strict=True)
    ]
    return requests, users, words


def _lengths(text: str, of: Literal["prompt", "output"] = "prompt") -> Lengths:
    """Parse a distribution of lengths. A plain number means a fixed length."""
    from chairlift_lab.workload.lengths import parse_lengths

    return parse_lengths(f"fixed:{text}" if text.isdigit() else text, of)


def _arrivals(args: argparse.Namespace, rate: float | None) -> tuple[Arrivals, int | None, str]:
    """(arrival process, users of a closed loop, description of both)."""
    from chairlift_lab.workload.arrivals import AllAtOnce, ClosedLoop, Gamma, parse_arrivals

    if args.arrivals is not None:
        arrivals = parse_arrivals(args.arrivals)
        return arrivals, arrivals.users if isinstance(arrivals, ClosedLoop) else None, args.arrivals
    if rate is None or math.isinf(rate):
        return AllAtOnce(), None, "all at once"
    burstiness = 1.0 if args.burstiness is None else args.burstiness
    return Gamma(rate, burstiness), None, f"{rate:g} requests/s, burstiness {burstiness:g}"


def _settings(
    args: argparse.Namespace, requests: Sequence[TracedRequest], arrivals: str, rate: float | None
) -> dict[str, Any]:
    if rate is None:
        span = requests[-1].arrival - requests[0].arrival
        rate = (len(requests) - 1) / span if span else math.inf
    if args.trace is not None:
        workload = f"trace {args.trace}"
    elif args.dataset is not None:
        workload = f"texts of {args.dataset}"
    elif args.input_len is not None:
        workload = f"prompts of {args.input_len} tokens, answers of {args.output_len}"
    else:
        workload = args.workload or "chat"
    return {
        "version": chairlift.__version__,
        "workload": workload,
        "arrivals": arrivals,
        "seed": args.seed,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": 1.0 if args.burstiness is None else args.burstiness,
    }


# --- what is measured ------------------------------------------------------------------------------------------------


async def _measure(plan: Plan, settings: Sequence[Mapping[str, Any]], slo: Mapping[str, float]) -> list[TableCell]:
    """Run the plan, and print the result of each run when it ends."""
    from chairlift_lab.bench.serve import measure

    cells: list[TableCell] = []
    compared = len(plan.urls) > 1
    async for index, place, run in measure(plan, watch):
        if place not in {cell.place for cell in cells}:
            print("\n".join(_head(run, place if compared else None)))
        cells.append(show(run, place, settings[index], slo, compared))
    return cells


def _head(run: ServeRun, place: int | None) -> Iterator[str]:
    server = run.server
    prompts = "token ids" if server.dialect.vocab_size and run.load.said is None else "text"
    kind = "chat completions" if server.dialect.chat else "completions"
    side = "" if place is None else f"{SIDES[place]}: "
    yield f"{side}{plain(server.model)} at {server.url}, {kind}, prompts as {prompts}"
    yield from (f"note: {note}" for note in server.notes)
    if run.load.shortened:
        room = server.max_model_len or 0
        yield f"note: {run.load.shortened:,} requests were shortened, to the {room:,} tokens that fit"


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.Runner]:
    """Context manager: a runner with uvloop's event loop (written in C) if uvloop is installed, else with asyncio's."""
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner


# --- what is printed and written -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class TableCell:
    """Result of one run."""

    place: int
    """Index of the measured server or setting: 0 or 1."""
    settings: Mapping[str, Any]
    run: ServeRun
    figures: Figures
    record: dict[str, Any]


def show(run: ServeRun, place: int, settings: Mapping[str, Any], slo: Mapping[str, float], compared: bool) -> TableCell:
    """Compute the latencies and throughputs of a run, and print them."""
    from chairlift_lab.bench.report import text
    from chairlift_lab.bench.serve_report import run_blocks, serve_record
    from chairlift_lab.bench.serve_result import figures_of

    figures = figures_of(run, slo)
    which = f"{SIDES[place]}, round {settings['round']}" if compared else settings["arrivals"]
    print(f"\n{which}: {settings['workload']}, {len(run.load.requests):,} requests, seed {settings['seed']}")
    print("\n".join(text(*run_blocks(run, figures, slo))), flush=True)
    return TableCell(place, settings, run, figures, serve_record(run, figures, settings))


@contextlib.contextmanager
def watch(name: str, total: int) -> Iterator[Progress]:
    """Context manager: show a progress bar if standard error is a terminal."""
    from tqdm import tqdm

    failed = 0
    with tqdm(total=total, desc=name, unit="req", leave=False, disable=None, dynamic_ncols=True) as bar:

        def ended(num_running: int, outcome: LoadOutcome) -> None:
            nonlocal failed
            failed += outcome.status == "failed"
            bar.set_postfix(running=num_running, failed=failed, refresh=False)
            bar.update()

        yield ended


def results(cells: Sequence[TableCell], names: Sequence[str]) -> tuple[Report, int]:
    """(report, exit code) of all runs. Prints the table of several rates or of two sides. ``names`` are the names of
    two sides; empty if nothing is compared."""
    from chairlift_lab.bench.report import Text, text
    from chairlift_lab.bench.serve_report import COMPARED, compared_words, serve_report, sweep_table

    ratios: dict[str, Ratio] = {}
    compared = None
    record = cells[0].record
    if names:
        record, ratios, compared = _compared(cells, names)
        words = Text(compared_words(ratios, [cell.run.busy for cell in cells]))
        print("", *text(compared, Text(textwrap.fill(COMPARED, 100)), words), sep="\n", flush=True)
    elif len(cells) > 1:
        table = sweep_table((_rate_label(cell), cell.figures) for cell in cells)
        print("", *text(table), sep="\n", flush=True)
        record = {"benchmark": cells[0].settings["benchmark"], "runs": [cell.record for cell in cells]}
    runs: dict[str, list[tuple[ServeRun, Figures]]] = {}
    for cell in cells:
        runs.setdefault(SIDES[cell.place] if names else _rate_label(cell), []).append((cell.run, cell.figures))
    code = 1 if any(each.figures.failed for each in cells) else 0
    code = 130 if any(each.run.interrupted for each in cells) else code
    return serve_report(record, runs, _facts(cells[-1], names), ratios, compared), code


def _compared(cells: Sequence[TableCell], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Ratio], Table]:
    """(record of both sides with the ratios of their measurements, ratios by name, table of the ratios)."""
    from chairlift_lab.bench.serve_report import compared_table
    from chairlift_lab.bench.serve_result import compare

    first, second = ([cell.record for cell in cells if cell.place == place] for place in (0, 1))
    whole = [cell for cell in cells if not cell.run.interrupted]  # half a run has no ratio to a whole one
    rounds = set.intersection(*({cell.settings["round"] for cell in whole if cell.place == place} for place in (0, 1)))
    pairs = [[each for each in side if each["chairlift"]["round"] in rounds] for side in (first, second)]
    ratios = compare(*pairs)
    figures = {key: dataclasses.asdict(ratio) for key, ratio in ratios.items()}
    record = {
        "benchmark": cells[0].settings["benchmark"],
        "compared": {"A": names[0], "B": names[1], "rounds": len(rounds), "ratios": figures},
        "runs": {"A": first, "B": second},
    }
    return record, ratios, compared_table(ratios, *pairs)


def _facts(cell: TableCell, names: Sequence[str]) -> dict[str, str]:
    """Settings of the benchmark for the HTML page: name -> value."""
    load = cell.run.load
    settings = cell.settings
    facts = {SIDES[place]: name for place, name in enumerate(names)}
    facts |= {
        name.replace("_", " "): _value_text(value)
        for name, value in settings.items()
        if name not in ("benchmark", "round")
    }
    return facts | {
        "requests": f"{len(load.requests):,}",
        "most at once": "no limit" if load.max_concurrency is None else f"{load.max_concurrency:,}",
        "date": f"{cell.run.date:%Y-%m-%d %H:%M}",
    }


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {limit:g}" for name, limit in value.items()) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _rate_label(cell: TableCell) -> str:
    rate = cell.settings["request_rate"]
    return "all at once" if rate == "inf" else f"{rate:.4g}/s"
