"""Tables and JSON records of the measured speeds of kernels and the measured limits of a machine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift.kernels.roof import Roof
from chairlift_lab.bench.kernels import Measurement
from chairlift_lab.bench.limits import Limits
from chairlift_lab.bench.machine import HostMachine
from chairlift_lab.bench.report import Table

__all__ = ["doubts", "kernel_table", "limits_record", "limits_table"]

_TITLES: Final = {
    "product": "Matmuls: [rows, k] x [k, n]",
    "experts": "Experts: routing and matmuls of the chosen experts",
    "decode": "Attention, decode: one query per sequence",
    "shared": "Attention, decode: answers to one prompt",
    "prefill": "Attention, prefill: whole prompts",
    "head": "Output head: matmul and sampling",
}


_MAX_CHANGE: Final = 0.1
_MAX_BUSY: Final = 0.1


def limits_table(limits: Mapping[str, Any], caption: str = "") -> Table:
    """Table of the limits in a :func:`limits_record`. A median far from the best trial shows that the measurement was
    disturbed."""
    memory = f"{limits.get('memory', 'memory read')}, GB/s"
    rows = [
        [memory, str(each["threads"]), *(f"{each[name] / 1e9:.1f}" for name in ("best", "median"))]
        for each in limits["read_bytes"]
    ]
    for each in limits["product_operations"]:
        name = f"{each['isa']} {each['product']} products, {'TOP/s' if each['product'] == 'int8' else 'TFLOP/s'}"
        rows.append([name, str(each["threads"]), *(f"{each[name] / 1e12:.2f}" for name in ("best", "median"))])
    return Table(["limit", "threads", "best", "median"], rows, caption)


def doubts(machine: HostMachine, before: Roof, after: Roof, *, followed: bool) -> Iterator[str]:
    """Lines with the limits at the end of the measurement, and reasons not to trust the results.

    ``followed``: whether the shares are relative to limits that were measured around each run. Such shares stay valid
    if only the memory bandwidth changes. A change of the arithmetic speed means that other programs used the
    processors.
    """
    yield f"limits at the end: memory read {after.bandwidth / 1e9:.1f} GB/s, products {after.peak / 1e12:.2f} TFLOP/s"
    memory, products = (1 - min(p) / max(p) for p in ((before.bandwidth, after.bandwidth), (before.peak, after.peak)))
    change = max(memory, products)
    trusted = products <= _MAX_CHANGE and machine.busy <= _MAX_BUSY
    if trusted and followed and memory > _MAX_CHANGE:
        yield f"Memory's limit changed by {memory:.0%}: shares refer to the limit at their time; times are unchanged."
    elif not trusted or memory > _MAX_CHANGE:
        yield f"The machine was not idle: {machine.busy:.0%} busy at the start, and a limit changed by {change:.0%}."
        yield "The shares are not reliable; run this again when nothing else runs."


def kernel_table(measurements: Sequence[Measurement]) -> Table:
    """Table of the measurements of one kind of kernel. There must be at least one measurement."""
    kind = measurements[0].kind
    shares = [each.main.share for each in measurements]
    match kind:
        case "product":
            headers = ["shape", "k", "n", "rows", *_PRODUCT]
            cells = _product_cells
            headers += [] if "all" in measurements[0].timings else ["streaming costs"]
        case "experts":
            headers = ["shape", "rows", "touched", *_PRODUCT]
            cells = _expert_cells
        case "head":
            headers = ["shape", "n", "rows", *_PRODUCT, "drawn us", "drawing costs"]
            cells = _head_cells
        case "shared":
            headers = ["shape", "heads", "batch", "context", "us", "GB/s", "of floor", "apart us", "apart costs"]
            cells = _shared_cells
        case _:
            rate = "GB/s" if kind == "decode" else "TFLOP/s"
            headers = ["shape", "heads", "batch", "context", "us", rate, "of floor", "in order", "paging costs"]
            cells = _attention_cells
    caption = f"{_TITLES[kind]}; share of the floor: median {statistics.median(shares):.0%}, least {min(shares):.0%}"
    return Table(headers, [cells(each) for each in measurements], caption)


_PRODUCT: Final = ("us", "GB/s", "TFLOP/s", "of floor")


def _product_cells(each: Measurement) -> list[str]:
    labels = [str(each.labels["shape"]), *(f"{each.labels[name]:,}" for name in ("k", "n", "rows"))]
    return [*labels, *_rates(each), *([] if "all" in each.timings else [_signed(each.extra_cost)])]


def _expert_cells(each: Measurement) -> list[str]:
    names = each.labels
    return [str(names["shape"]), f"{names['rows']:,}", f"{names['touched']} of {names['experts']}", *_rates(each)]


def _head_cells(each: Measurement) -> list[str]:
    labels = [str(each.labels["shape"]), *(f"{each.labels[name]:,}" for name in ("n", "rows"))]
    drawn = f"{each.timings['drawn'].median * 1e6:,.1f}"
    return [*labels, *_rates(each), drawn, _signed(each.extra_cost)]


def _attention_cells(each: Measurement) -> list[str]:
    names = each.labels
    paged = each.timings["paged"]
    in_order = each.timings["in order"]
    heads = f"{names['heads']}/{names['kv_heads']}x{names['head_dim']}"
    of = each.nbytes / 1e9 if each.kind == "decode" else each.operations / 1e12
    digits = 1 if each.kind == "decode" else 3
    return [
        str(names["shape"]),
        heads,
        f"{names['batch']:,}",
        f"{names['context']:,}",
        f"{paged.median * 1e6:,.1f}",
        f"{of / paged.median:.{digits}f}",
        f"{paged.share:.0%}",
        f"{of / in_order.median:.{digits}f}",
        _signed(each.extra_cost),
    ]


def _shared_cells(each: Measurement) -> list[str]:
    names = each.labels
    together = each.main
    heads = f"{names['heads']}/{names['kv_heads']}x{names['head_dim']}"
    sizes = [str(names["shape"]), heads, f"{names['batch']:,}", f"{names['context']:,}"]
    speed = [f"{together.median * 1e6:,.1f}", f"{each.nbytes / 1e9 / together.median:.1f}", f"{together.share:.0%}"]
    return [*sizes, *speed, f"{each.timings['apart'].median * 1e6:,.1f}", _signed(each.extra_cost)]


def _rates(each: Measurement) -> list[str]:
    return [
        f"{each.main.median * 1e6:,.1f}",
        f"{each.nbytes / each.main.median / 1e9:.1f}",
        f"{each.operations / each.main.median / 1e12:.3f}",
        f"{each.main.share:.0%}",
    ]


def _signed(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def limits_record(limits: Limits) -> dict[str, Any]:
    """The limits as data for JSON. Rates are per second."""
    return {
        "buffer_bytes": limits.buffer_bytes,
        "memory": limits.memory,
        "read_bytes": [{"threads": threads, **dataclasses.asdict(rate)} for threads, rate in limits.read.items()],
        "product_operations": [
            {"isa": peak.isa, "product": peak.product, "threads": peak.threads, **dataclasses.asdict(peak.operations)}
            for peak in limits.peaks
        ],
    }
