"""``chairlift trace``: records, generates, shortens and shows traffic files."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.base.writing import check_writable
from chairlift.cli.flags import whole_number
from chairlift.errors import ConfigError
from chairlift_lab.cli import trace_record, trace_view

if TYPE_CHECKING:
    from chairlift_lab.workload.trace import LoadedTrace, TracedRequest, Traffic
    from chairlift_lab.workload.traffic import RequestClass

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "record, generate, sample or show traffic: lengths and times, never texts"
DESCRIPTION: Final = """Work with traces: files with arrival times, lengths of prompts and answers, and shared prefixes.

A trace has no texts. Chairlift's format is JSON lines. The commands also read published formats (Mooncake, Bailian,
Azure, BurstGPT, ShareGPT), and your own logs with --columns or --pattern.

  chairlift trace record --url http://127.0.0.1:8000 -o monday.jsonl --duration 10m
  chairlift trace show monday.jsonl --svg monday.svg
  chairlift trace sample monday.jsonl -n 1000 -o small.jsonl
  chairlift trace draw --workload chat --arrivals poisson:4 -n 1000 -o made.jsonl"""

_SHOW: Final = """Show a trace: statistics, and histograms of lengths and arrivals.

  chairlift trace show trace.jsonl
  chairlift trace show AzureLLMInferenceTrace_conv.csv --svg azure.svg
  chairlift trace show gateway.csv --columns time=started_at,input=prompt_tokens,output=completion_tokens
  chairlift trace show access.log --pattern '\\[(?P<time>[^]]+)\\].* in=(?P<input>\\d+) out=(?P<output>\\d+)'"""
_SAMPLE: Final = """Write a sample of N requests of a trace, in Chairlift's format. Without -n, write all requests.

Requests are drawn at random from the whole trace, and chats as a whole, so the distribution of lengths stays. Times are
compressed so that the rate stays. A random sample changes some properties: bursts become smoother, prefixes repeat less
often, and the last of a few long chats end late. --window keeps bursts and prefixes: it takes consecutive requests with
their times, from a random position. But the lengths of one hour may differ from those of the day: if they change with
time, compare both with `chairlift trace show`."""
_DRAW: Final = """Write a generated trace. The same flags and the same seed give the same trace on any machine.

Lengths are in tokens: lognormal:MU:SIGMA:MIN:MAX (MU and SIGMA of the logarithm), zipf:ALPHA:MIN:MAX, uniform:MIN:MAX,
fixed:N, or file:TRACE for the lengths of a trace.
Arrivals are in requests per second: all, constant:RATE, poisson:RATE, gamma:RATE:BURSTINESS (1 is Poisson, smaller
values give bursts), onoff:RATE:ON_SECONDS:OFF_SECONDS, ramp:START_RATE:END_RATE:SECONDS,
diurnal:RATE:PEAK_TO_TROUGH:PERIOD_SECONDS, or closed:USERS, where each user sends the next request after its answer.

  chairlift trace draw --workload chat --arrivals poisson:4 -n 1000 -o made.jsonl
  chairlift trace draw --input-len uniform:100:900 --output-len fixed:20 --arrivals diurnal:2:5:600 -o day.jsonl
  chairlift trace draw --turns uniform:2:6 --think 10 --shared-prefix 512:0.8:3 --cancel 0.1:uniform:500:5000 \\
      --class weight=3,tenant=app,ttft_ms=500,tpot_ms=80 --class tenant=batch,priority=5 -o mix.jsonl
  chairlift trace draw --turns uniform:4:12 --tool search:2:0.8:3 --tool run_tests:15:0.5 --arrivals poisson:1 \\
      -o agents.jsonl"""

_number: Final = functools.partial(whole_number, maximum=10_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``chairlift trace`` and their flags."""
    commands = parser.add_subparsers(title="commands", metavar="NAME", dest="trace_command", required=True)
    for name, summary, description, add in (
        ("show", "figures and histograms of a trace", _SHOW, _add_show_flags),
        ("sample", "some of a trace, like the whole; or all of it, in our format", _SAMPLE, _add_sample_flags),
        ("draw", "a made-up trace", _DRAW, _add_draw_flags),
        ("record", trace_record.SUMMARY, trace_record.DESCRIPTION, trace_record.add_arguments),
        ("view", trace_view.SUMMARY, trace_view.DESCRIPTION, trace_view.add_arguments),
        ("replay", trace_view.REPLAY_SUMMARY, trace_view.REPLAY_DESCRIPTION, trace_view.add_replay_arguments),
    ):
        command = commands.add_parser(name, help=summary, description=description)
        verbose = "log more, and print tracebacks"
        command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=verbose)
        command.set_defaults(parser=command)
        add(command)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand. Returns its exit code. Raises ChairliftError if it cannot run."""
    commands = {"show": _show, "sample": _sample, "draw": _draw, "record": trace_record.run}
    commands |= {"view": trace_view.run, "replay": trace_view.replay}
    return commands[args.trace_command](args)


# --- show and sample -------------------------------------------------------------------------------------------------


def _add_reading_flags(parser: argparse.ArgumentParser) -> None:
    reading = parser.add_argument_group("reading")
    reading.add_argument("file", metavar="FILE", type=Path, help="the trace")
    ways = reading.add_mutually_exclusive_group()
    ways.add_argument(
        "--format",
        choices=(
            "chairlift",
            "mooncake",
            "bailian",
            "azure",
            "burstgpt",
            "sharegpt",
            "chats",
            "custom",
            "openai-batch",
        ),
        help="format of the file (default: detected from its first line)",
    )
    ways.add_argument(
        "--columns",
        metavar="FIELD=COLUMN,...",
        help="read CSV, TSV or JSON lines: columns, by name or number from 1, of time, input and output, and "
        "optionally tenant, priority, service_tier, session, turn, cancel_ms, ttft_ms, tpot_ms, deadline_ms",
    )
    ways.add_argument("--pattern", metavar="REGEX", help="read a text log, with groups (?P<time>...) of the same names")
    reading.add_argument("--sort", action="store_true", help="accept lines in any order of time")
    reading.add_argument(
        "--arrivals",
        metavar="FORM",
        help="arrival times for conversations and other texts, which have none (default: all at once)",
    )
    reading.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="model directory whose tokenizer counts tokens of texts (default: 4 characters are a token)",
    )
    reading.add_argument(
        "--seed", metavar="N", type=_number(0), default=0, help="seed of all random choices (default: 0)"
    )


def _add_show_flags(parser: argparse.ArgumentParser) -> None:
    _add_reading_flags(parser)
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also write the histograms to this SVG file")


def _add_sample_flags(parser: argparse.ArgumentParser) -> None:
    _add_reading_flags(parser)
    parser.add_argument("-n", "--num-prompts", metavar="N", type=_number(1), help="number of requests (default: all)")
    _add_output_flags(parser)
    parser.add_argument("--window", action="store_true", help="take consecutive requests, with their times")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--rate", metavar="R", type=float, help="scale the times to R requests per second")
    rate.add_argument("--keep-rate", action="store_true", help="keep the rate of the trace (the default)")


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="the new trace, JSON lines")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def _show(args: argparse.Namespace) -> int:
    from chairlift_lab.cli.trace_picture import fact_lines, histogram_lines, write_picture

    check_writable(args.svg, "svg", args.file)
    loaded = _load(args)
    print(f"{args.file}, read as {loaded.format}", *fact_lines(loaded.requests, loaded.notes), sep="\n")
    print("\n".join(histogram_lines(loaded.requests)))
    if args.svg is not None:
        write_picture(args.svg, args.file.name, loaded.requests)
        print(f"\nwrote {args.svg}")
    return 0


def _sample(args: argparse.Namespace) -> int:
    from chairlift_lab.workload.sample import sample_trace

    if args.window and args.num_prompts is None:
        raise ConfigError("--window is a number of neighbours; say how many with -n")
    _check_output(args)
    loaded = _load(args)
    sample = sample_trace(loaded.requests, args.num_prompts, args.seed, rate=args.rate, window=args.window)
    _write(args, sample, loaded.notes)
    return 0


def _load(args: argparse.Namespace) -> LoadedTrace:
    from chairlift_lab.workload.arrivals import parse_arrivals
    from chairlift_lab.workload.columns import parse_columns
    from chairlift_lab.workload.trace import load_trace

    return load_trace(
        args.file,
        format=args.format,
        columns=None if args.columns is None else parse_columns(args.columns),
        pattern=args.pattern,
        arrivals=None if args.arrivals is None else parse_arrivals(args.arrivals),
        tokenizer=None if args.tokenizer is None else _counter(args.tokenizer),
        sort=args.sort,
        seed=args.seed,
    )


def _counter(folder: Path) -> Callable[[str], int]:
    """A function that counts the tokens of a text with the tokenizer in ``folder``."""
    from chairlift.text.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(folder)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _check_output(args: argparse.Namespace) -> None:
    """Raise ConfigError, before any input is read, if the output file exists or cannot be written."""
    if args.output.is_file() and not args.force:
        raise ConfigError(f"{args.output} is there already; give another -o, or --force to replace it")
    check_writable(args.output, "output")


def _write(args: argparse.Namespace, trace: list[TracedRequest], notes: Sequence[str] = ()) -> None:
    from chairlift_lab.cli.trace_picture import fact_lines
    from chairlift_lab.workload.trace import write_trace

    write_trace(args.output, trace)
    print(f"wrote {args.output}", *fact_lines(trace, notes), sep="\n")


# --- draw ------------------------------------------------------------------------------------------------------------


def _add_draw_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--num-prompts", metavar="N", type=_number(1), default=1000, help="number of requests (default: 1000)"
    )
    _add_output_flags(parser)
    parser.add_argument("--seed", metavar="N", type=_number(0), default=0, help="seed (default: 0)")
    parser.add_argument(
        "--workload",
        metavar="NAME",
        default="chat",
        help="chat, assistant, summarize, write, uniform, conversation, agents or coding-agents; the flags below "
        "change it",
    )
    parser.add_argument("--arrivals", metavar="FORM", default="all", help="arrival times (default: all at once)")
    parser.add_argument("--input-len", metavar="FORM", help="lengths of prompts; for chats, of the new text in a turn")
    parser.add_argument("--output-len", metavar="FORM", help="lengths of answers")
    parser.add_argument(
        "--shared-prefix",
        metavar="TOKENS[:SHARE[:DISTINCT[:ALPHA]]]",
        help="a fraction SHARE of the prompts (default: 1) begins with one of DISTINCT texts (default: 1). The "
        "frequency of text k is proportional to 1 / k ** ALPHA (default: 1). TOKENS is a multiple of 512 (chats: 16)",
    )
    parser.add_argument("--turns", metavar="FORM", help="generate chats with these numbers of turns")
    parser.add_argument("--think", metavar="SECONDS", type=float, help="mean time between two turns of a chat")
    parser.add_argument("--first-len", metavar="FORM", help="lengths of the first message of a chat")
    parser.add_argument(
        "--tool",
        dest="tools",
        metavar="NAME:MEDIAN_S:SIGMA[:WEIGHT]",
        action="append",
        help="tool that is called between the turns of a chat, and how long it runs (log-normal, from the end of the "
        "answer); may be repeated, with relative frequencies (default: 1)",
    )
    parser.add_argument("--context", metavar="N", type=_number(1), help="maximum number of tokens of a chat")
    parser.add_argument(
        "--cancel",
        metavar="SHARE:FORM",
        help="fraction of clients that disconnect, and after how many ms: 0.1:fixed:2000",
    )
    parser.add_argument(
        "--class",
        dest="classes",
        metavar="FIELD=VALUE,...",
        action="append",
        help="kind of client; may be repeated: weight, tenant, priority, service_tier, ttft_ms, tpot_ms, deadline_ms",
    )


def _draw(args: argparse.Namespace) -> int:
    from chairlift_lab.workload.arrivals import ClosedLoop, parse_arrivals

    _check_output(args)
    arrivals = parse_arrivals(args.arrivals)
    notes = []
    if isinstance(arrivals, ClosedLoop):
        notes.append(
            f"a file cannot say that {arrivals.users} users take turns: hold so many requests in flight when it is"
            f" replayed (bench serve --max-concurrency {arrivals.users}). A closed loop hides queueing."
        )
    _write(args, _traffic(args).draw(args.num_prompts, arrivals, args.seed), notes)
    return 0


def _traffic(args: argparse.Namespace) -> Traffic:
    from chairlift_lab.workload.lengths import parse_lengths
    from chairlift_lab.workload.trace import WORKLOADS
    from chairlift_lab.workload.traffic import Cancels, Chats

    if args.workload not in WORKLOADS:
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}; got {args.workload!r}")
    base = WORKLOADS[args.workload]
    changes: dict[str, Any] = {}
    if args.input_len is not None:
        changes["prompt"] = parse_lengths(args.input_len)
    if args.output_len is not None:
        changes["output"] = parse_lengths(args.output_len, of="output")
    chats = base.chats if args.turns is None else Chats(parse_lengths(args.turns))
    given: dict[str, Any] = {"think_seconds": args.think, "most_tokens": args.context}
    given["tools"] = tuple(map(_tool, args.tools)) if args.tools else None
    given["first"] = None if args.first_len is None else parse_lengths(args.first_len)
    given = {name: value for name, value in given.items() if value is not None}
    if chats is None and given:
        flags = "--think, --tool, --first-len and --context"
        raise ConfigError(f"{flags} are for chats; say how many turns they have with --turns")
    if args.think is None and "tools" in given:
        given["think_seconds"] = 0.0
    elif args.think is not None and "tools" not in given:
        given["tools"] = ()
    changes["chats"] = None if chats is None else dataclasses.replace(chats, **given)
    if args.shared_prefix is not None:
        changes["prefixes"] = _prefixes(args.shared_prefix)
    if args.cancel is not None:
        share, colon, after = args.cancel.partition(":")
        if not colon:
            raise ConfigError(f"--cancel must be SHARE:FORM, such as 0.1:fixed:2000 for ms, got {args.cancel!r}")
        changes["cancels"] = Cancels(_as(float, "the share of --cancel", share), parse_lengths(after))
    if args.classes:
        changes["classes"] = tuple(map(_request_class, args.classes))
    return dataclasses.replace(base, **changes)


def _tool(text: str) -> Any:
    from chairlift_lab.workload.traffic import ToolPauses

    name, *numbers = text.split(":")
    kinds = ("MEDIAN_S", "SIGMA", "WEIGHT")
    if not 2 <= len(numbers) <= len(kinds):
        raise ConfigError(f"--tool must be NAME:MEDIAN_S:SIGMA[:WEIGHT], such as run_tests:15:0.5, got {text!r}")
    parsed = [_as(float, f"{kind} of --tool", number) for kind, number in zip(kinds, numbers, strict=False)]
    return ToolPauses(name, *parsed)


def _prefixes(text: str) -> Any:
    from chairlift_lab.workload.traffic import SharedPrefixes

    kinds: list[tuple[str, Callable[[str], Any]]] = [
        ("tokens", int),
        ("share", float),
        ("distinct", int),
        ("alpha", float),
    ]
    parts = text.split(":")
    if len(parts) > len(kinds):
        raise ConfigError(f"--shared-prefix must be TOKENS[:SHARE[:DISTINCT[:ALPHA]]], got {text!r}")
    fields = {
        name: _as(kind, f"{name} of --shared-prefix", part) for (name, kind), part in zip(kinds, parts, strict=False)
    }
    return SharedPrefixes(**fields)


def _request_class(text: str) -> RequestClass:
    from chairlift_lab.workload.traffic import RequestClass

    kinds: dict[str, Callable[[str], Any]] = {
        "weight": float,
        "tenant": str,
        "priority": int,
        "service_tier": str,
        "ttft_ms": float,
        "tpot_ms": float,
        "deadline_ms": float,
    }
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in kinds or not equals or name in fields:
            raise ConfigError(f"--class must be FIELD=VALUE,... with {', '.join(kinds)}, each once; got {text!r}")
        fields[name] = _as(kinds[name], f"{name} of --class", value)
    return RequestClass(**fields)


def _as(kind: Callable[[str], Any], name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        allowed = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} must be {allowed}, got {text!r}") from None
