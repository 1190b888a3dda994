"""HTML page for a record of ``chairlift bench offline``: the engine, static batches and the machine's floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from chairlift_lab.bench import plots
from chairlift_lab.bench.kernel_report import limits_table
from chairlift_lab.bench.machine import machine_facts
from chairlift_lab.bench.report import Block, Facts, Report, Section, Table, Text

__all__ = ["offline_report", "run_facts"]

Record = Mapping[str, Any]

_ALL_AT_ONCE: Final = """\
All requests arrive at once, so the time to the first token of a late request includes its wait in the queue."""
_STATIC: Final = """\
Static batches answer the same requests, one batch after another. Rows that have ended are still computed until the \
longest answer of their batch ends."""
_FLOOR: Final = """\
The floor is the minimum time on this machine: every step reads the weights once, or computes with them, at the \
speeds measured below, and reads the cached keys and values of the decoding requests. No engine can be faster. The \
fraction of the floor that an engine reaches can be compared between machines. Tokens per second cannot, because they \
depend on the machine, the model and the workload."""

_MAX_BUSY: Final = 0.1
_SETTINGS: Final = {
    "scheduler": ("batching", "max_num_seqs", "max_num_batched_tokens", "prefill_mode", "preemption_mode"),
    "cache": ("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "enable_prefix_caching"),
    "model": ("dtype", "threads", "device"),
}
"""Group of engine settings -> names of the settings in the group that affect the speed."""


def offline_report(record: Record) -> Report:
    """Report of a record of ``bench offline``."""
    return Report(record, f"Offline throughput of {record['model']}", _lead(record), _sections(record))


def run_facts(run: Record) -> dict[str, str]:
    """Facts about one run: label -> text. ``run`` has the fields of an OfflineRun as plain data."""
    first, last = run["time_to_first_token"], run["latency"]
    waited = run.get("collective_seconds", 0.0)  # missing in older records
    waiting = {"processes": f"waited for each other for {waited / run['seconds']:.1%} of the time"} if waited else {}
    return {
        "requests": _requests(run),
        "time": f"{run['seconds']:.2f} s in {run['steps']:,} steps",
        "output": f"{run['output_tokens_per_second']:,.1f} tokens/s",
        "first token": f"median {first['p50']:.2f} s, 99th percentile {first['p99']:.2f} s",
        "last token": f"median {last['p50']:.2f} s, 99th percentile {last['p99']:.2f} s",
        "preemptions": f"{run['preemptions']:,}",
        "padding": f"{run['held_row_tokens']:,} tokens computed for rows that had ended;\n"
        f"{run['padding_avoided']:,} more in an engine that pads",
        **waiting,
    }


def _requests(run: Record) -> str:
    return f"{run['requests']:,}: {run['prompt_tokens']:,} prompt tokens, {run['output_tokens']:,} output tokens"


def _sections(record: Record) -> Iterator[Section]:
    shortened = {"shortened to fit": f"{record['shortened']:,}"} if record["shortened"] else {}
    run = {"model": str(record["model"]), "kernels": str(record["kernels"]), "seed": str(record["workload"]["seed"])}
    if "chairlift" in record:
        run["Chairlift"] = str(record["chairlift"])
    limits = record["limits"]
    measured = [] if limits is None else [limits_table(limits, "Measured just after the run")]
    yield Section("Result", _result(record, dict(_runs(record))))
    yield Section("Requests", [Facts({"requests": _requests(record["result"])} | shortened)])
    yield Section("Settings", [Facts(run | _settings(record["settings"]))])
    yield Section("Machine", [Facts(machine_facts(record["machine"])), *measured])


def _runs(record: Record) -> Iterator[tuple[str, Record]]:
    if record["baseline"] is not None:
        yield "static batches", record["baseline"]
    yield f"{record['settings']['scheduler']['batching']} batching", record["result"]


def _lead(record: Record) -> str:
    result = record["result"]
    baseline = record["baseline"]
    share = record["floor"].get("share")
    parts = [f"{result['output_tokens_per_second']:,.1f} output tokens per second"]
    if baseline is not None:
        parts.append(f"{baseline['seconds'] / result['seconds']:.2f} times the rate of static batches in one run each")
    if share is not None:
        parts.append(f"{share:.0%} of the maximum of this machine")
    return ", ".join(parts) + "."


def _result(record: Record, runs: Mapping[str, Record]) -> Iterator[Block]:
    floor = record["floor"]
    tokens = record["result"]["output_tokens"]
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
    if record["machine"]["busy"] > _MAX_BUSY:
        yield Text("The machine was not idle before the start. The results are not reliable; run this again.")
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
