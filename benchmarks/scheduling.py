"""Measures the gain and the cost of scheduling policies, in paired runs of each policy against the default one.

    python benchmarks/scheduling.py --simulate                       # on the modelled machine, in seconds
    python benchmarks/scheduling.py --model /tmp/s135 --rounds 3 --json benchmarks/results/scheduling.json

Scenarios (``--only a c`` picks some):

a. priority: few urgent requests while batch work arrives at five times the engine's capacity;
b. tenants: two tenants, of which one sends ten times as much as the other, and more than the capacity;
c. memory: each way to preempt with a peak demand of 1.2 times the KV cache, and with a permanent backlog;
d. prompts: three kinds of prompt-dominated traffic in each prefill mode;
e. governor: the rules against the best of a few fixed numbers of rows, with too little memory;
f. deadlines: goodput of least slack first against arrival order, at 0.8, 1.0, 1.2 and 1.5 times the capacity.

Every scenario interleaves its settings within each round, on one trace per round. d and e begin each round with another
setting, after an uncounted warm-up run. The script prints results per setting, and ratios with a 95 % interval over the
rounds (bootstrap). In d and e, each round is compared with the fixed setting that was best in the other rounds, because
the best of several noisy runs is better than it should be. Simulated results are only as valid as the simulator.

These commands take about 20 minutes each with a model of 135M parameters on two cores. Rounds of d are short, because
its noise comes from the machine; rounds of e are long, because its noise comes from the trace::

    python benchmarks/scheduling.py --model DIR --only d --max-num-seqs 16 --rounds 5 --count 64
    python benchmarks/scheduling.py --model DIR --only e --max-num-seqs 16 --rounds 3 --count 48

``--traffic bursts`` runs only one kind of the traffic of d or e, so that a kind with a wide interval can get more
rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import random
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift import __version__
from chairlift.config import EngineConfig
from chairlift.core.scheduler.fairness import DECODE_WEIGHT, PREFILL_WEIGHT
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift_lab.bench.machine import describe_machine
from chairlift_lab.replay.machines import Deployment, deploy, read_deployment, shape_from_name
from chairlift_lab.replay.replay import RequestTiming, ServedTrace, serve_trace, simulated_core
from chairlift_lab.workload.arrivals import AllAtOnce, Arrivals, Gamma
from chairlift_lab.workload.lengths import LogNormal
from chairlift_lab.workload.trace import TracedRequest

CHAT = (LogNormal(4.6, 0.8, 8, 512), LogNormal(4.2, 0.7, 4, 256))
PROMPTS = {
    "documents": (LogNormal(7.6, 0.4, 512, 4096), LogNormal(3.0, 0.3, 8, 40)),
    "mixed": (LogNormal(6.5, 0.8, 64, 4096), LogNormal(3.5, 0.5, 8, 100)),
    "bursts": (LogNormal(7.0, 0.5, 256, 3000), LogNormal(3.0, 0.4, 8, 60)),
}
GOVERNED = {
    "bursts": (CHAT, 0.2),
    "long answers": ((LogNormal(4.0, 0.5, 16, 256), LogNormal(5.5, 0.4, 64, 512)), 1.0),
    "long prompts": ((LogNormal(6.5, 0.6, 64, 2048), LogNormal(4.0, 0.5, 16, 160)), 1.0),
}
FIXED_MODES = ("mixed", "prefill_first", "decode_first", "separate")
BLOCK_SIZE = 16
Lengths = tuple[LogNormal, LogNormal]


@dataclasses.dataclass
class Run:
    """Result of serving one trace with one setting of the engine."""

    served: ServedTrace
    timings: list[RequestTiming]
    step_p99: float
    peak_blocks: int
    """Maximum number of KV blocks in use at once."""

    def ttft(self, keep: Callable[[TracedRequest], bool], quantile: float) -> float:
        """Quantile of the TTFT in seconds, over the requests that ``keep`` accepts."""
        values = sorted(t.first - t.request.arrival for t in self.timings if t.first >= 0 and keep(t.request))
        return values[min(len(values) - 1, int(quantile * len(values)))] if values else float("nan")


class Bench:
    """Creates engines with given settings, simulated or real, and runs traces on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": 512, "max_model_len": 8192}
        self.deployment: Deployment | None = None
        if args.model is None:
            source = args.cost_model
            self.deployment = (
                read_deployment(source) if source else deploy(args.machine, shape_from_name("qwen2.5-0.5b"))
            )
            longest = self.deployment.max_model_len
        else:
            longest = int(self._model_config()["max_position_embeddings"])
        self.base["max_model_len"] = min(self.base["max_model_len"], longest)
        self._known: dict[str, tuple[float, int]] = {}

    def traffic(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of ``kinds`` that ``--traffic`` names; all entries without the flag."""
        return {kind: each for kind, each in kinds.items() if kind in (self.args.traffic or kinds)}

    @property
    def validity(self) -> str:
        return "measured" if self.deployment is None else self.deployment.validity

    def run(self, trace: Sequence[TracedRequest], **settings: Any) -> Run:
        core, limits = self._core({**self.base, **settings})
        timings: list[RequestTiming] = []
        served = serve_trace(core, trace, limits, timings)
        if served.refused:
            raise SystemExit(f"{served.refused} requests of the trace are too long for the model; take another model")
        steps = sorted(record.end - record.start for record in core.step_log)
        core.shutdown()
        peak = max((record.blocks.used for record in core.step_log), default=0)
        return Run(served, timings, steps[int(0.99 * len(steps))] if steps else 0.0, peak)

    def _core(self, settings: dict[str, Any]) -> tuple[EngineCore, ModelLimits]:
        if self.deployment is not None:
            return simulated_core(self.deployment, EngineConfig.from_flat(settings))
        import torch

        from chairlift import LLM

        torch.set_num_threads(1)
        llm = LLM(self.args.model, skip_tokenizer_init=True, **settings)
        promises = llm.config.scheduler.promises
        return llm.engine.core, ModelLimits(int(self._model_config()["vocab_size"]), llm.max_model_len, (), promises)

    def _model_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.args.model / "config.json").read_text())
        return config

    def capacity(self, lengths: Lengths, count: int, **settings: Any) -> float:
        """Requests per second when the engine is always fully loaded."""
        return self.run(draw(lengths, AllAtOnce(), count, 99), **settings).served.requests_per_second

    def needs(
        self, kind: str, lengths: Lengths, count: int, arrivals: Callable[[float], Arrivals]
    ) -> tuple[float, int]:
        """(requests per second at full load, maximum number of KV blocks in use with ``arrivals`` at that rate).

        Measured once per kind of traffic, after a short warm-up run.
        """
        if kind not in self._known:
            self.run(draw(lengths, AllAtOnce(), 8, 98))
            rate = self.capacity(lengths, count)
            trace = draw(lengths, arrivals(rate), count, 0)
            self._known[kind] = (rate, self.run(trace, enable_prefix_caching=False).peak_blocks)
        return self._known[kind]

    def fitting(self, lengths: Lengths) -> Lengths:
        """The lengths, with prompts shortened where the model would refuse the request as too long."""
        longest = self.base["max_model_len"]
        prompt, answer = lengths
        return dataclasses.replace(prompt, most=min(prompt.most, longest - answer.most)), answer


def draw(lengths: Lengths, arrivals: Arrivals, count: int, seed: int, **fields: Any) -> list[TracedRequest]:
    """A seeded trace of requests that differ only in their lengths."""
    import numpy as np

    rng = np.random.default_rng(seed)
    prompts, outputs = lengths[0].draw(rng, count), lengths[1].draw(rng, count)
    return [
        TracedRequest(arrival=at, prompt_tokens=prompt, output_tokens=output, **fields)
        for at, prompt, output in zip(arrivals.times(count, seed), prompts, outputs, strict=True)
    ]


def merged(*traces: Iterable[TracedRequest]) -> list[TracedRequest]:
    """One trace from several, sorted by arrival."""
    return sorted((request for trace in traces for request in trace), key=lambda request: request.arrival)


def turns(settings: Sequence[Any], round_number: int) -> list[Any]:
    """Order of the settings in a round: each round begins with another setting, and every second round is reversed."""
    at = round_number % len(settings)
    order = [*settings[at:], *settings[:at]]
    return order[::-1] if round_number % 2 else order


def against_best(rounds: Sequence[dict[str, float]], kind: str, ours: str, fixed: Sequence[str]) -> list[float]:
    """Tokens per second relative to the fixed setting that was best in the other rounds, per round.

    If requests can be preempted, only settings with fewer than 2 % preemptions are considered. The result is NaN if
    there is none.
    """
    healthy = [
        name for name in fixed if statistics.fmean(row.get(f"{kind} {name} preempted", 0) for row in rounds) < 0.02
    ]
    if not healthy:
        return [float("nan")]
    found = []
    for at, row in enumerate(rounds):
        others = [*rounds[:at], *rounds[at + 1 :]] or rounds
        best = max(healthy, key=lambda name: statistics.fmean(other[f"{kind} {name} tok/s"] for other in others))
        found.append(row[f"{kind} {ours} tok/s"] / row[f"{kind} {best} tok/s"])
    return found


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean of ``values`` and its 95 % interval, by bootstrap."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(2000))
    return {"mean": statistics.fmean(values), "low": means[50], "high": means[-50]}


# --- scenarios -------------------------------------------------------------------------------------------------------


def priority(bench: Bench, seed: int) -> dict[str, float]:
    """Scenario a: p99 TTFT of urgent work at 5 times the capacity, divided by the p99 TTFT without other work plus two
    p99 steps; and the loss of throughput."""
    count = bench.args.count
    rate = bench.capacity(CHAT, count)
    seconds = count / rate
    few = max(20, count // 8)
    urgent = draw(CHAT, Gamma(few / seconds), few, 1000 + seed, priority=-10)
    flood = draw(CHAT, Gamma(5 * rate), count, seed, priority=5)
    alone = bench.run(urgent, scheduling_policy="priority")
    both = merged(urgent, flood)
    plain = bench.run([dataclasses.replace(request, priority=0) for request in both])
    ours = bench.run(both, scheduling_policy="priority")

    def is_urgent(request: TracedRequest) -> bool:
        return request.priority < 0

    lone, p99 = alone.ttft(is_urgent, 0.99), ours.ttft(is_urgent, 0.99)
    return {
        "alone p99 TTFT s": lone,
        "overloaded p99 TTFT s": p99,
        "bound s": lone + 2 * ours.step_p99,
        "p99 TTFT / bound": p99 / (lone + 2 * ours.step_p99),
        "throughput ratio": ours.served.output_tokens_per_second / plain.served.output_tokens_per_second,
        "preemption rate": ours.served.preemption_rate,
    }


def tenants(bench: Bench, seed: int) -> dict[str, float]:
    """Scenario b: p99 TTFT of the small tenant while another tenant sends ten times as much, the loss of throughput,
    and the difference of the tenants' service while both want more than half."""
    count = bench.args.count
    rate = bench.capacity(CHAT, count)
    few = max(20, count // 10)
    large = draw(CHAT, Gamma(1.5 * rate), count, seed, tenant="large")
    small = draw(CHAT, Gamma(0.15 * rate), few, 2000 + seed, tenant="small")
    alone = bench.run(small, scheduling_policy="priority")
    both = merged(large, small)
    plain, ours = bench.run(both), bench.run(both, scheduling_policy="priority")

    def is_small(request: TracedRequest) -> bool:
        return request.tenant == "small"

    lone, p99 = alone.ttft(is_small, 0.99), ours.ttft(is_small, 0.99)
    flood = draw(CHAT, Gamma(8 * rate), count + count // 2, 3000 + seed, tenant="large")
    both = merged(flood, draw(CHAT, Gamma(0.8 * rate), count // 2, 4000 + seed, tenant="small"))
    backlog, fair = bench.run(both), bench.run(both, scheduling_policy="priority")
    longest = max(request.prompt_tokens + request.output_tokens for request in both)
    bound = 2 * max(PREFILL_WEIGHT * longest, DECODE_WEIGHT * fair.peak_blocks * BLOCK_SIZE)
    return {
        "service gap / VTC bound": service_gap(fair.timings) / bound,
        "fcfs service gap / VTC bound": service_gap(backlog.timings) / bound,
        "alone p99 TTFT s": lone,
        "fcfs p99 TTFT s": plain.ttft(is_small, 0.99),
        "fair p99 TTFT s": p99,
        "p99 TTFT / (alone + 3 steps)": p99 / (lone + 3 * ours.step_p99),
        "throughput ratio": ours.served.output_tokens_per_second / plain.served.output_tokens_per_second,
    }


def service_gap(timings: Sequence[RequestTiming]) -> float:
    """Largest growth of the difference in service between two tenants while both had requests waiting, in weighted
    tokens.

    It uses the times of arrivals, starts and tokens, not the engine's own counters.
    """
    events: list[tuple[float, str, int, float]] = []
    for timing in timings:
        tenant = timing.request.tenant or ""
        events.append((timing.request.arrival, tenant, 1, 0.0))
        events.append((timing.started, tenant, -1, PREFILL_WEIGHT * (timing.request.prompt_tokens or 0)))
        events += [(time, tenant, 0, DECODE_WEIGHT) for time in timing.times]
    waiting: Counter[str] = Counter()
    service: dict[str, float] = {"large": 0.0, "small": 0.0}
    low, high, widest = math.inf, -math.inf, 0.0
    for _, tenant, came, tokens in sorted(events):
        waiting[tenant] += came
        service[tenant] += tokens
        if min(waiting["large"], waiting["small"]) > 0:
            gap = service["large"] - service["small"]
            low, high = min(low, gap), max(high, gap)
            widest = max(widest, high - low)
        else:
            low, high = math.inf, -math.inf
    return widest


def memory(bench: Bench, seed: int) -> dict[str, float]:
    """Scenario c: results of each preemption mode, with a peak demand of 1.2 times the KV cache, and with a permanent
    backlog."""
    count = bench.args.count
    lengths = (LogNormal(5.0, 0.5, 32, 512), LogNormal(5.5, 0.4, 64, 512))
    rate = bench.capacity(lengths, count)
    figures: dict[str, float] = {}
    for case, share, arrivals in (("", 1.2, Gamma(rate)), ("hopeless ", 3.0, AllAtOnce())):
        arrived = draw(lengths, arrivals, count, seed)
        blocks = int(bench.run(arrived, enable_prefix_caching=False).peak_blocks / share) + 1
        best = 0.0
        for mode in ("recompute", "swap", "auto", "none"):
            swap = {"swap_space_bytes": 1 << 30} if mode in ("swap", "auto") else {"swap_space_bytes": 0}
            run = bench.run(arrived, preemption_mode=mode, num_kv_blocks=blocks, **swap)
            rate_now = run.served.output_tokens_per_second
            figures[f"{case}{mode} tok/s"] = rate_now
            figures[f"{case}{mode} TPOT p99 ms"] = run.served.tpot.p99 * 1000
            figures[f"{case}{mode} preempted"] = run.served.preemption_rate
            best = max(best, rate_now) if mode in ("recompute", "swap") else best
        figures[f"{case}auto / better of the two"] = figures[f"{case}auto tok/s"] / best
    return figures


def prompts(bench: Bench, seed: int) -> dict[str, float]:
    """Scenario d: throughput of prompt-dominated traffic in each prefill mode, and the delay of the ends of outputs."""
    figures: dict[str, float] = {}
    for kind, lengths in bench.traffic(PROMPTS).items():
        count, lengths = max(16, bench.args.count // 4), bench.fitting(lengths)
        rate, _ = bench.needs(kind, lengths, count, Gamma)
        trace = draw(lengths, Gamma(1.1 * rate, 0.2 if kind == "bursts" else 1.0), count, seed)
        for mode in turns((*FIXED_MODES, "auto"), seed):
            run = bench.run(trace, prefill_mode=mode)
            figures[f"{kind} {mode} tok/s"] = run.served.output_tokens_per_second
            figures[f"{kind} {mode} E2E p50 s"] = run.served.e2e.p50
    return figures


def governor(bench: Bench, seed: int) -> dict[str, float]:
    """Scenario e: throughput of the rules, and of the best fixed number of rows with fewer than 2 % preemptions. All
    rows together need twice the available memory."""
    figures: dict[str, float] = {}
    for kind, (lengths, shape) in bench.traffic(GOVERNED).items():
        count, lengths = bench.args.count, bench.fitting(lengths)
        rate, blocks = bench.needs(kind, lengths, count, lambda rate, shape=shape: Gamma(1.2 * rate, shape))
        trace = draw(lengths, Gamma(1.2 * rate, shape), count, seed)
        for rows in turns((*fixed_rows(bench), None), seed):
            setting = {"governor": "rules"} if rows is None else {"max_num_seqs": rows}
            served = bench.run(trace, num_kv_blocks=blocks // 2 + 1, **setting).served
            name = "rules" if rows is None else f"{rows} rows"
            figures[f"{kind} {name} tok/s"] = served.output_tokens_per_second
            figures[f"{kind} {name} preempted"] = served.preemption_rate
    return figures


def fixed_rows(bench: Bench) -> list[int]:
    """Fixed numbers of rows to compare with the governor."""
    widest = bench.args.max_num_seqs
    return [widest // 4, 3 * widest // 8, widest // 2, widest]


def deadlines(bench: Bench, seed: int) -> dict[str, float]:
    """Scenario f: fraction of requests that met their deadlines: least slack first, with and without dropping late
    requests, and FCFS."""
    count = bench.args.count
    rate = bench.capacity(CHAT, count)
    lone = bench.run(draw(CHAT, Gamma(0.1 * rate), 20, 77)).served
    figures: dict[str, float] = {}
    for load in (0.8, 1.0, 1.2, 1.5):
        rng = random.Random(seed)
        trace = [
            dataclasses.replace(request, deadline_ms=1000 * rng.choice([2.0, 4.0, 10.0]) * lone.e2e.p50)
            for request in draw(CHAT, Gamma(load * rate), count, seed)
        ]
        plain = bench.run([dataclasses.replace(request, deadline_ms=None) for request in trace])
        kept = [
            timing.last - timing.request.arrival <= asked.deadline_ms / 1000
            for timing, asked in zip(plain.timings, trace, strict=True)
            if asked.deadline_ms is not None
        ]
        figures[f"{load} fcfs"] = sum(kept) / len(kept)
        for late in ("downgrade", "drop"):
            run = bench.run(trace, scheduling_policy="priority", late_requests=late)
            figures[f"{load} deadline, {late}"] = run.served.goodput or 0.0
    return figures


def ratios(bench: Bench, scenario: str, rounds: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Name of a ratio in the table -> its value in each round, for ratios that need the results of all rounds."""
    if scenario == "d":
        kinds = bench.traffic(PROMPTS)
        return {f"{kind} auto / best fixed": against_best(rounds, kind, "auto", FIXED_MODES) for kind in kinds}
    if scenario == "e":
        names = [f"{rows} rows" for rows in fixed_rows(bench)]
        kinds = bench.traffic(GOVERNED)
        return {f"{kind} rules / best fixed": against_best(rounds, kind, "rules", names) for kind in kinds}
    return {}


SCENARIOS = {"a": priority, "b": tenants, "c": memory, "d": prompts, "e": governor, "f": deadlines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="run this model on this machine; otherwise simulate")
    parser.add_argument("--simulate", action="store_true", help="simulate, which is the default")
    parser.add_argument("--machine", default="ryzen-9950x", help="modelled machine (see chairlift sim --help)")
    parser.add_argument("--cost-model", type=Path, help="fitted by chairlift sim --fit, instead of a modelled machine")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument(
        "--traffic", nargs="+", choices=sorted({*PROMPTS, *GOVERNED}), help="kinds of traffic in d and e (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=200, help="requests per trace")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    print(f"{bench.validity}, {args.rounds} rounds")
    results: dict[str, Any] = {}
    for name in args.only:
        rounds = [SCENARIOS[name](bench, seed) for seed in range(args.rounds)]
        results[name] = {figure: interval([row[figure] for row in rounds]) for figure in rounds[0]}
        results[name] |= {figure: interval(each) for figure, each in ratios(bench, name, rounds).items()}
        for figure in results[name].values():
            figure["rounds"] = args.rounds
        print(f"({name}) {(SCENARIOS[name].__doc__ or '').split(') ')[-1].strip()}")
        for figure, value in results[name].items():
            print(f"    {figure:34} {value['mean']:10.3f}   [{value['low']:.3f}, {value['high']:.3f}]")
    if args.json is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "command": f"scheduling.py --rounds {args.rounds} --count {args.count} --max-num-seqs {args.max_num_seqs}",
            "validity": bench.validity,
            "model": "qwen2.5-0.5b" if args.model is None else args.model.name,
            "commit": commit,
            "chairlift": __version__,
            "python": platform.python_version(),
            "machine": dataclasses.asdict(describe_machine()),
            "scenarios": results,
        }
        if args.json.exists():  # scenarios that were not run now stay in the file
            before = json.loads(args.json.read_text())
            if (before["model"], before["validity"]) == (record["model"], record["validity"]):
                merged_figures = {name: {**before["scenarios"].get(name, {}), **results[name]} for name in results}
                record["scenarios"] = dict(sorted({**before["scenarios"], **merged_figures}.items()))
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
