"""The record of ``chairlift bench offline`` as a page: the engine beside static batches and the machine's floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from chairlift.workbench.bench import plots
from chairlift.workbench.bench.html_page import Block, Facts, Section, Table, Text, page

__all__ = ["offline_page"]

Record = Mapping[str, Any]

_ALL_AT_ONCE: Final = """\
All requests arrive at once, so the first token of a late request includes its wait in line."""
_STATIC: Final = """\
The static batches answer the same requests, as many at a time as fit a batch. A row that has ended is computed on \
until the longest answer of its batch ends."""
_FLOOR: Final = """\
The floor is the least time this machine can need: every step reads the weights once, or computes with them, at the \
speeds measured below, and reads the cached keys and values of the requests that decode. Nothing can be faster. How \
near an engine comes can be compared between machines. Tokens per second cannot: they belong to this machine, model \
and workload."""

_MOST_BUSY: Final = 0.1
_SETTINGS: Final = {
    "scheduler": ("batching", "max_num_seqs", "max_num_batched_tokens", "prefill_mode", "preemption_mode"),
    "cache": ("block_size", "kv_cache_memory_bytes", "enable_prefix_caching"),
    "model": ("dtype", "threads", "device"),
}
"""Those that decide how fast it is."""


def offline_page(record: Record) -> str:
    """The page of a record."""
    runs, machine = dict(_runs(record)), record["machine"]
    result, workload = record["result"], record["workload"]
    lengths = (
        f"{result['requests']:,}: {result['prompt_tokens']:,} prompt tokens, {result['output_tokens']:,} output tokens"
    )
    shortened = {"shortened to fit": f"{record['shortened']:,}"} if record["shortened"] else {}
    about = {
        "processor": f"{machine['cpu']}, {machine['processors']} in use",
        "system": str(machine["system"]),
        "instruction sets": ", ".join(machine["flags"]) or "unknown",
        "L3 cache": f"{machine['l3_bytes'] >> 20:,} MiB",
        "busy before the start": f"{machine['busy']:.0%}",
    }
    run = {"model": str(record["model"]), "kernels": str(record["kernels"]), "seed": str(workload["seed"])}
    if "chairlift" in record:
        run["Chairlift"] = str(record["chairlift"])
    sections = [
        Section("Result", list(_result(record, runs))),
        Section("Requests", [Facts({"requests": lengths} | shortened)]),
        Section("Settings", [Facts(run | _settings(record["settings"]))]),
        Section("Machine", [Facts(about), *_limits(record["limits"])]),
    ]
    return page(f"Offline throughput of {record['model']}", _lead(record), sections)


def _runs(record: Record) -> Iterator[tuple[str, Record]]:
    if record["baseline"] is not None:
        yield "static batches", record["baseline"]
    yield f"{record['settings']['scheduler']['batching']} batching", record["result"]


def _lead(record: Record) -> str:
    result, baseline, share = record["result"], record["baseline"], record["floor"].get("share")
    parts = [f"{result['output_tokens_per_second']:,.1f} output tokens per second"]
    if baseline is not None:
        parts.append(f"{baseline['seconds'] / result['seconds']:.2f} times the rate of static batches")
    if share is not None:
        parts.append(f"{share:.0%} of the most that this machine allows")
    return ", ".join(parts) + "."


def _result(record: Record, runs: Mapping[str, Record]) -> Iterator[Block]:
    floor, tokens = record["floor"], record["result"]["output_tokens"]
    rates = {name: float(run["output_tokens_per_second"]) for name, run in runs.items()}
    rows = [[name, *_row(run)] for name, run in runs.items()]
    if "seconds" in floor:
        rates["floor of this machine"] = tokens / floor["seconds"]
        shown = [_time(floor["seconds"]), f"{rates['floor of this machine']:,.1f}"]
        rows.append(["floor of this machine", *shown, "", "", "", "", f"{floor['steps']:,}", "", ""])
    header = ["", "time", "output tokens/s", "first token p50", "p99", "last token p50", "p99", "steps"]
    yield Table([*header, "preemptions", "for ended rows"], rows)
    yield plots.bars(list(rates), {"rate": list(rates.values())}, title="Throughput", y_label="output tokens/s")
    yield plots.bars(
        ["first token, p50", "first token, p99", "last token, p50", "last token, p99"],
        {name: _latencies(run) for name, run in runs.items()},
        title="Time since the start",
        y_label="seconds, less is better",
    )
    if record["machine"]["busy"] > _MOST_BUSY:
        yield Text("The machine was not idle before the start. Do not trust these figures; measure again when it is.")
    yield Text(f"{_ALL_AT_ONCE} {_STATIC}" if len(runs) > 1 else _ALL_AT_ONCE)
    yield Text(_FLOOR if "seconds" in floor else f"The floor was not measured: {floor['not_measured']}.")


def _row(run: Record) -> list[str]:
    return [
        _time(run["seconds"]),
        f"{run['output_tokens_per_second']:,.1f}",
        *map(_time, _latencies(run)),
        f"{run['steps']:,}",
        f"{run['preemptions']:,}",
        f"{run['held_row_tokens']:,}",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.0f} ms"


def _latencies(run: Record) -> list[float]:
    return [float(run[name][part]) for name in ("time_to_first_token", "latency") for part in ("p50", "p99")]


def _settings(settings: Record) -> dict[str, str]:
    found = ((name, settings.get(group, {}).get(name)) for group, names in _SETTINGS.items() for name in names)
    return {name: str(value) for name, value in found if value is not None}


def _limits(limits: Record | None) -> Iterator[Block]:
    if limits is None:
        return
    rows = [
        [
            f"{limits.get('memory', 'memory read')}, GB/s",
            str(each["threads"]),
            f"{each['best'] / 1e9:.1f}",
            f"{each['median'] / 1e9:.1f}",
        ]
        for each in limits["read_bytes"]
    ]
    for each in limits["product_operations"]:
        unit = "TOP/s" if each["product"] == "int8" else "TFLOP/s"
        best, median = (f"{each[name] / 1e12:.2f}" for name in ("best", "median"))
        rows.append([f"{each['isa']} {each['product']} products, {unit}", str(each["threads"]), best, median])
    yield Table(["limit", "threads", "best", "median"], rows, "Measured just after the run")
