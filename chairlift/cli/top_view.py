"""The view of ``chairlift top``: the server's data as lines of text. This module uses neither the terminal nor a
clock."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from chairlift.cli.remote_server import plain

__all__ = ["SORTS", "Line", "Metrics", "Snapshot", "quantile", "span", "text_of", "view"]

SORTS: Final = ("age", "output", "speed", "prompt", "queued")
"""Sort keys for requests; ``age`` is the order in which the server lists them."""

_WATCH = 0.02
_TOO_MANY = 0.05
"""Fractions of preempted sequences from which the preemption rate is shown as a warning and as an error."""
_MANY: Final = 100
"""Number of observations from which a 99th percentile needs no remark. Below it, the number is shown."""
_MIN_SECONDS: Final = 0.5
"""Minimum time in seconds over which the speed of a request is shown."""
_MIN_ENDED: Final = 20
"""Minimum number of ended requests from which the preemption rate is judged."""
_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BAR: Final = 20
_TOOLS: Final = 3
"""Maximum number of tools that are named. The next number: of characters of a name."""
_TOOL: Final = 16
_PROMPT_BAR: Final = 8
_PROGRESS: Final = 11
_CLASS: Final = 9
_WITH_CLASS: Final = 90
"""Minimum width of the window in columns at which requests are listed with their class of service."""
_MIN_WIDTH: Final = 80
"""Minimum width in columns to which lines are fitted. In a narrower window, the ends of lines are cut off."""
_TWO_COLUMNS: Final = 96
"""Minimum width of the window in columns at which gauges and rates are side by side."""
_WITH_BARS: Final = 100
"""Minimum width of the window in columns at which requests have a progress bar for their prefill."""

Line = list[tuple[str, str]]
"""A line as pieces: (text, style). The style is ``title``, ``good``, ``watch``, ``bad``, ``dim``, ``busy``, or
empty."""


class Metrics:
    """Samples in Prometheus' text format. Names have no prefix (``vllm:``, ``chairlift:``). With ``model``, samples of
    other models are left out."""

    def __init__(self, text: str, model: str | None = None) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
            if match is not None:
                try:
                    value = float(match[3])
                except ValueError:
                    continue
                if not math.isfinite(value):
                    continue
                labels = dict(_LABEL.findall(match[2] or ""))
                if model is not None and labels.get("model_name", model) != model:
                    continue
                self._samples.setdefault(match[1].rpartition(":")[2], []).append((labels, value))

    def value(self, name: str, **labels: str) -> float | None:
        """Sum of the samples that have these labels; None when there are none."""
        required = labels.items()
        found = [value for has, value in self._samples.get(name, ()) if required <= has.items()]
        return sum(found) if found else None

    def values_of(self, name: str, label: str) -> list[str]:
        """Values of a label over all samples of a metric, in the order of the samples."""
        return list(dict.fromkeys(labels[label] for labels, _ in self._samples.get(name, ()) if label in labels))

    def mean(self, name: str) -> float | None:
        """Mean over the samples of a metric; None when there are none."""
        values = [value for _, value in self._samples.get(name, ())]
        return sum(values) / len(values) if values else None

    def maximum(self, name: str) -> float | None:
        """Maximum over the samples of a metric; None when there are none."""
        return max((value for _, value in self._samples.get(name, ())), default=None)

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram: inclusive upper bound -> number of observations up to the bound."""
        counts: dict[float, float] = {}
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            bound = labels.get("le", "").replace("+Inf", "inf")
            if re.fullmatch(r"inf|[0-9.e+-]+", bound):
                counts[float(bound)] = counts.get(float(bound), 0.0) + value
        return counts


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Data about a server, read at one time."""

    when: float
    """Time at which the metrics were read, in seconds on a monotonic clock."""
    url: str
    state: str = "serving"
    """``serving``, or a description of the problem."""
    model: str = ""
    version: str = ""
    uptime: float | None = None
    metrics: Metrics | None = None
    requests: Sequence[Mapping[str, Any]] | None = None
    """The server's list of requests; None if the server has no such list."""


def quantile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float | None:
    """Quantile ``share`` (0 to 1) of the observations between two states of a histogram (upper bound -> cumulative
    count).

    The value is interpolated linearly within a bucket, as in Prometheus. If it lies above the last finite bound, that
    bound is returned. None if there are no observations.
    """
    bounds = sorted(after)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    rank = share * counts[-1]
    low = 0.0
    seen = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank and count > seen:
            return low if bound == float("inf") else low + (bound - low) * max(0.0, rank - seen) / (count - seen)
        low = low if bound == float("inf") else bound
        seen = count
    return low


def view(
    now: Snapshot, before: Snapshot | None, *, width: int, height: int, sort: str = "age", keys: str = ""
) -> list[Line]:
    """The screen as at most ``height`` lines.

    Lines fit into ``width`` if it is at least 80 columns; in a narrower window the caller cuts them. Rates and
    latencies cover the time since ``before``, if given. ``keys`` is the help text for keys.
    """
    lines = [*_header(now, width), *_gauges(now, before, width), *_replicas(now.metrics), [(keys, "dim")]]
    if now.requests is None:
        why = "this server does not list its requests" if now.metrics is not None else ""
        return [*lines, [(why, "dim")]][:height]
    room = max(0, height - len(lines) - 1)
    lines.append(_columns(width))
    found = _sorted(now.requests, sort)
    shown = found if len(found) <= room else found[: max(0, room - 1)]
    lines += [_row(request, width) for request in shown]
    if len(shown) < len(found):
        lines.append([(f"... and {len(found) - len(shown):,} more", "dim")])
    elif not found and now.state == "serving":
        lines.append([("nothing runs or waits", "dim")])
    return lines[:height]


def text_of(line: Line) -> str:
    """Text of a line, without the styles of its pieces."""
    return "".join(text for text, _ in line).rstrip()


def span(seconds: float | None) -> str:
    """A duration as text. It has at most six characters up to 99 days."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24:,}d{hours % 24:02}h"


# --- the top ----------------------------------------------------------------------------------------------------------


def _header(now: Snapshot, width: int) -> list[Line]:
    about = [f"  {plain(now.model)}", f" at {now.url}"] if now.model else [f"  {now.url}"]
    about += [f"  version {plain(now.version)}"] if now.version else []
    about += [f"  up {span(now.uptime)}"] if now.uptime is not None else []
    style = "good" if now.state == "serving" else "bad"
    state: list[Line] = [[(part, style)] for part in textwrap.wrap(plain(now.state), max(1, width))]
    lines: list[Line] = [[("chairlift top", "title")]]
    for part in about:
        if len(text_of(lines[-1])) + len(part) > width >= _MIN_WIDTH and len(lines[-1]) > 1:
            lines.append([])
        lines[-1].append((part, ""))
    return [*lines, *state]


def _gauges(now: Snapshot, before: Snapshot | None, width: int) -> list[Line]:
    metrics = now.metrics
    if metrics is None:
        return []
    running = metrics.value("num_requests_running") or 0
    waiting = metrics.value("num_requests_waiting") or 0
    limit = metrics.value("running_limit")
    usage = metrics.mean("kv_cache_usage_perc")
    rate = metrics.value("preemption_rate", window="60s")
    style, word = _judge(rate, metrics.value("request_success_total"))
    left: list[Line] = [
        [("running   ", ""), *_bar(running, limit, _BAR), (f" {running:,.0f}{_of(limit)}", "")],
        [("KV cache  ", ""), *_bar(usage, 1.0, _BAR), (" -" if usage is None else f" {usage:.0%}", "")],
        [("waiting   ", ""), (f"{waiting:,.0f}", "watch" if waiting else "")],
        [("preempted ", ""), ("-" if rate is None else f"{rate:.1%} of the last minute's, {word}", style)],
    ]
    right = [
        _rates(now, before),
        _latencies(now, before, "TTFT", "time_to_first_token_seconds"),
        _latencies(now, before, "ITL", "inter_token_latency_seconds"),
        _machine(
            *(metrics.value("floor_share"), metrics.maximum("expert_imbalance"), metrics.value("collective_share"))
        ),
    ]
    below = [*_sources(metrics), *_conversations(metrics, width), *_training(now, before)]
    if _MIN_WIDTH <= width < _TWO_COLUMNS:
        return [*left, *([(more, "")] for more in right if more), *below]
    lines = []
    for line, more in zip(left, right, strict=True):
        gap = max(2, 46 - len(text_of(line)))
        fits = len(text_of(line)) + gap + len(more) <= width or width < _MIN_WIDTH
        lines += [[*line, (" " * gap + more, "")]] if fits else [line, [(more, "")]]
    return [*lines, *below]


def _training(now: Snapshot, before: Snapshot | None) -> list[Line]:
    """A line about training, if the server trains."""
    metrics = now.metrics
    if metrics is None or metrics.value("training_sessions") is None:
        return []
    adapters, waiting = (metrics.value(f"training_{name}") or 0.0 for name in ("adapters", "calls_waiting"))
    steps = metrics.value("training_calls_total", kind="optim_step") or 0.0
    text = f"{_rate(now, before, 'training_tokens_total')} tokens/s  {adapters:,.0f} adapters  {steps:,.0f} steps"
    return [[("training  ", ""), (f"{text}  {waiting:,.0f} calls wait", "")]]


def _sources(metrics: Metrics) -> list[Line]:
    """A line with the sources of all prompt tokens, if any came from host memory or disk."""
    names = {"computed": "local_compute", "memory": "local_cache_hit", "host memory": "host", "disk": "disk"}
    counts = {name: metrics.value("prompt_tokens_by_source_total", source=of) or 0.0 for name, of in names.items()}
    if not counts["host memory"] and not counts["disk"]:
        return []
    total = sum(counts.values())
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in counts.items() if count)
    return [[("prompts   ", ""), (shares, "")]]


def _conversations(metrics: Metrics, width: int) -> list[Line]:
    """Lines about conversations whose tools run, and the cache that is kept for them, if any answer called tools."""
    if not metrics.value("pauses_total"):
        return []
    tools = {
        tool: metrics.value("paused_conversations", tool=tool) or 0.0
        for tool in metrics.values_of("paused_conversations", "tool")
    }
    ranked = sorted((tool for tool in tools if tools[tool]), key=lambda tool: -tools[tool])[:_TOOLS]
    named = ", ".join(f"{_cut(plain(tool), _TOOL)} {tools[tool]:,.0f}" for tool in ranked)
    ended, kept = metrics.value("turns_after_pause_total"), metrics.value("turns_after_pause_total", cache="kept")
    found = [f"cache kept for {(kept or 0.0) / ended:.0%} of {ended:,.0f}"] if ended else []
    leased, budget = metrics.value("leased_blocks"), metrics.value("lease_budget_blocks")
    found += [f"leases {leased or 0.0:,.0f} of {budget:,.0f} blocks"] if budget else []
    for name, metric in (("reused", "reuse_gap"), ("evicted", "idle_before_evict")):
        median = quantile({}, metrics.buckets(f"kv_block_{metric}_seconds"), 0.5)
        found += [f"{name} after {span(median)}"] if median is not None else []
    texts = {"pauses": f"{sum(tools.values()):,.0f} now" + (f": {named}" if named else ""), "": ", ".join(found)}
    room = max(width, _MIN_WIDTH) - 10
    return [[(f"{name:<10}", ""), (_cut(text, room), "")] for name, text in texts.items() if text]


def _replicas(metrics: Metrics | None) -> list[Line]:
    """One line per replica, if the server has several."""
    if metrics is None:
        return []
    lines: list[Line] = [*_autoscaling(metrics)]
    for name in metrics.values_of("replica_up", "replica"):
        up, started, unstarted, usage, restarts = (
            metrics.value(f"replica_{what}", replica=name) or 0.0
            for what in ("up", "requests_started", "requests_unstarted", "kv_cache_usage_perc", "restarts_total")
        )
        style, state = ("good", "ready") if up else ("bad", "away")
        text = f"running {started:4,.0f}  next {unstarted:4,.0f}  KV cache {usage:4.0%}  restarts {restarts:,.0f}"
        lines.append([(f"replica {plain(name):<2}", ""), (f"{state}  ", style), (text, "")])
    return lines


def _autoscaling(metrics: Metrics) -> list[Line]:
    """A line about autoscaling, if the server has it."""
    wanted, least, most, starting = (
        metrics.value("autoscaling_replicas", what=what) for what in ("wanted", "min", "max", "starting")
    )
    if wanted is None:
        return []
    wait, load = (metrics.value(f"autoscaling_{name}") or 0.0 for name in ("forecast_wait_seconds", "load"))
    text = f"{wanted:.0f} wanted of {least or 0:.0f}-{most or 0:.0f}, {starting or 0:.0f} starting"
    return [[("replicas  ", ""), (f"{text}  forecast wait {span(wait)}  load {load:.0%}", "")]]


def _machine(share: float | None, imbalance: float | None, waits: float | None) -> str:
    """Text with three values: the fraction of the machine's limits that steps reach, the share of their time in which
    the processes of a divided model wait for each other, and the load of the busiest expert divided by the mean load in
    its layer. Empty if the server reports none."""
    found = [] if share is None else [f"{share:.0%} of its floor"]
    found += [] if waits is None else [f"{waits:.0%} waiting"]
    found += [] if imbalance is None else [f"busiest expert {imbalance:.1f}x the mean"]
    return f"machine   {', '.join(found)}" if found else ""


def _judge(rate: float | None, num_ended: float | None) -> tuple[str, str]:
    """(style, word) for a preemption rate. A few requests are no reason for a judgement."""
    if num_ended is not None and num_ended < _MIN_ENDED:
        return "dim", f"only {num_ended:,.0f} requests have ended"
    if rate is None or rate < _WATCH:
        return "good", "healthy"
    return ("watch", "keep an eye on it") if rate <= _TOO_MANY else ("bad", "too many")


def _rates(now: Snapshot, before: Snapshot | None) -> str:
    prompt, output = (_rate(now, before, name) for name in ("prompt_tokens_total", "generation_tokens_total"))
    return f"tokens/s  prompt {prompt}  output {output}"


def _rate(now: Snapshot, before: Snapshot | None, name: str) -> str:
    """Growth of a counter per second, as text; - if it is not known."""
    new = None if now.metrics is None else now.metrics.value(name)
    old = None if before is None or before.metrics is None else before.metrics.value(name)
    if before is None or new is None or old is None or new < old or now.when <= before.when:
        return "-"
    return f"{(new - old) / (now.when - before.when):,.0f}"


def _latencies(now: Snapshot, before: Snapshot | None, label: str, name: str) -> str:
    if now.metrics is None or before is None or before.metrics is None:
        return f"{label:4}  p50 -  p99 -"
    old, new = before.metrics.buckets(name), now.metrics.buckets(name)
    count = max(new.values(), default=0.0) - max(old.values(), default=0.0)
    text = f"{label:4}  p50 {span(quantile(old, new, 0.5))}  p99 {span(quantile(old, new, 0.99))}"
    return f"{text}  of {count:,.0f}" if 0 < count < _MANY else text


def _bar(value: float | None, limit: float | None, width: int) -> Line:
    share = 0.0 if not value or not limit else min(1.0, value / limit)
    filled = min(width, max(round(share * width), 1 if share else 0))
    return [("[", ""), ("|" * filled, "busy"), (" " * (width - filled), ""), ("]", "")]


def _of(limit: float | None) -> str:
    return f" of {limit:,.0f}" if limit else ""  # a server without a step reports 0


# --- requests ---------------------------------------------------------------------------------------------------------


def _columns(width: int) -> Line:
    prompt = f"{'PROMPT':<{_prompt_width(width)}}"
    heads = (f"{'ID':<{_id_width(width)}}", f"{'STATUS':<9}", f"{'AGE':>6}", prompt, f"{'ETA':>6}")
    more = (f"{'OUTPUT':>11}", f"{'TOK/S':>6}", f"{'QUEUED':>6}", *(["CLASS"] if width >= _WITH_CLASS else []))
    return [(" ".join((*heads, *more)), "title")]


def _row(request: Mapping[str, Any], width: int) -> Line:
    name = plain(str(request.get("id", "")))
    status = plain(str(request.get("status", "")))
    prompt = _count(request, "prompt_tokens")
    computed = _count(request, "computed_tokens")
    output = _count(request, "output_tokens")
    limit = _count(request, "max_tokens") * max(1, _count(request, "n"))
    done = min(computed, prompt)
    eta = _time(request, "expected_start_seconds" if status in ("waiting", "loading") else "expected_token_seconds")
    style = {"decode": "good", "prefill": "busy", "preempted": "bad"}.get(status, "dim")
    progress = _short(prompt) if done == prompt else f"{_short(done)}/{_short(prompt)}"
    speed = _speed(request)
    tenant = plain(str(request.get("tenant", "")))
    line: Line = [
        (f"{_cut(name, _id_width(width)):<{_id_width(width)}} ", ""),
        (f"{status:<9} ", style),
        (f"{span(_time(request, 'age_seconds')):>6} ", ""),
        *([*_bar(done, prompt, _PROMPT_BAR), (" ", "")] if width >= _WITH_BARS else []),
        (f"{progress:<{_PROGRESS}}", ""),
        (
            f" {span(eta) if eta is not None else '-':>6} {_short(output) + '/' + _short(limit):>11}"
            f" {'-' if speed is None else f'{speed:.1f}':>6} {span(_time(request, 'queue_seconds')):>6}",
            "",
        ),
    ]
    if width >= _WITH_CLASS:
        whose = plain(str(request.get("service_tier", ""))) + (f" ({tenant})" if tenant else "")
        line.append((" " + _cut(whose, width - len("".join(text for text, _ in line)) - 1), ""))
    return line


def _cut(text: str, room: int) -> str:
    """Shorten a text that is longer than ``room`` characters: its beginning, followed by a mark."""
    return text if len(text) <= room else text[: max(0, room - 1)] + "~"


def _prompt_width(width: int) -> int:
    return _PROGRESS + (_PROMPT_BAR + 3 if width >= _WITH_BARS else 0)


def _id_width(width: int) -> int:
    """Width of the id column: the columns that all other fields of a line leave free."""
    others = 9 + 6 + _prompt_width(width) + 6 + 11 + 6 + 6 + 7 + (_CLASS + 1 if width >= _WITH_CLASS else 0)
    return max(8, min(36, width - others))


def _speed(request: Mapping[str, Any]) -> float | None:
    """Tokens per second after the first token; None if unknown, or if the time is too short."""
    first = _time(request, "first_token_seconds")
    age = _time(request, "age_seconds")
    output = _count(request, "output_tokens")
    return (
        None
        if first is None or age is None or age - first < _MIN_SECONDS or output < 2
        else (output - 1) / (age - first)
    )


def _sorted(requests: Iterable[Mapping[str, Any]], sort: str) -> list[Mapping[str, Any]]:
    keys = {
        "output": lambda request: _count(request, "output_tokens"),
        "speed": lambda request: _speed(request) or 0.0,
        "prompt": lambda request: _count(request, "prompt_tokens"),
        "queued": lambda request: _time(request, "queue_seconds") or 0.0,
    }
    return sorted(requests, key=keys[sort], reverse=True) if sort in keys else list(requests)


def _count(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    return value if isinstance(value, int) and value >= 0 else 0


def _time(request: Mapping[str, Any], name: str) -> float | None:
    value = request.get(name)
    return float(value) if isinstance(value, (int, float)) and value >= 0 else None


def _short(count: int) -> str:
    """A count as text with at most five characters."""
    for unit, size in (("M", 1_000_000), ("k", 10_000)):
        if count >= size:
            return f"{count / (1_000_000 if unit == 'M' else 1000):.4g}"[:4].rstrip(".") + unit
    return str(count)
