"""Measures what leases are worth to agents whose tools take time, and what they cost others.

    python benchmarks/sessions.py --rounds 10 --json benchmarks/results/sessions-simulated.json
    python benchmarks/sessions.py --model SmolLM2-135M-Instruct.Q4_1.gguf --traces agents --rounds 2 --turns 4 \
        --engines offload lease store-lru store --pause 12 --json benchmarks/results/sessions.json

``--agents`` agents share a system prompt. Each has ``--turns`` turns; between two of them its tool runs for a time that
is drawn from a log-normal distribution. Beside them, prompts of ``--flood-tokens`` tokens arrive that never come again,
at ``--flood-share`` of the speed at which prompts are computed. The KV cache holds eight of the twelve agents. The
engines, in turns within each round and with equal memory for KV, are:

- ``offload``: ``--cache-eviction lru --prefix-offload``, a tenth of the memory is host memory: the reference;
- ``lru``, ``tlru``, ``lease`` and ``continuum``: the rule, and no host memory;
- ``store-lru`` and ``store``: ``lru`` and ``lease`` with ``--kv-store`` in a new directory, on a real engine only.

All have the same arrivals, lengths and pauses in a round. Printed is, for each engine, the value divided by that of the
reference: the seconds that agents wait for their turns (``job``), the 90th percentile of the agents' time to the first
token, the 99th percentile of the flood's, and the flood's throughput in tokens per second. In the second trace,
``chats``, LRU is right: half of the conversations call no tools and come back five times as fast, and the tools of the
others take twenty times as long, so that it does not pay to keep their blocks.

Without ``--model`` the engine is simulated, on a machine that computes about 3,000 prompt tokens per second.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from chairlift import LLM, __version__
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import InputProcessor, ModelLimits
from chairlift_lab.replay.machines import MODELS, Deployment, Machine
from chairlift_lab.replay.replay import simulated_core
from chairlift_lab.replay.traced_request import TracedRequest, prompt_token_ids
from chairlift_lab.workload.arrivals import Gamma
from chairlift_lab.workload.lengths import Fixed
from chairlift_lab.workload.traffic import Chats, SharedPrefixes, ToolPauses, Traffic

if __package__:
    from benchmarks.offline import cpu_name
else:
    from offline import cpu_name

BLOCK = 16
VOCAB = 4000
"""Number of different tokens in prompts."""
MODEL_VOCAB = 49_152
"""Number of tokens that SmolLM2 may generate."""
TOOL = ("run_tests",)
GROUP = 1 << 20
"""More prefix ids than all agents of a group have."""
CONTINUUM = "chairlift.core.kv_cache.eviction.continuum:Continuum"
RULES = {"offload": "lru", "lru": "lru", "tlru": "tlru", "lease": "lease", "continuum": CONTINUUM}
STORES = {"store-lru": "lru", "store": "lease"}
"""Engines with files -> rule. Their blocks are read back at the machine's speed, so they are not simulated."""
TWO_CORES = Machine("two-cores", 40e9, 1.7e12, 8e9, 0.75, 0.5, 0.0005, 0.5, True)


@dataclasses.dataclass(slots=True)
class Job:
    """A conversation, or a single prompt of the flood."""

    prompt: list[int]
    pauses: list[float]
    """Seconds before each further turn."""
    added: list[list[int]]
    """New tokens of each further turn."""
    num_tokens: int
    """Number of tokens of each answer."""
    is_agent: bool
    calls: bool
    turn: int = 0
    sent: float = 0.0
    first: float | None = None
    answer: list[int] = dataclasses.field(default_factory=list)


def agents_of(args: argparse.Namespace, factor: float) -> Traffic:
    """Agents whose tool takes ``factor`` times as long as usual."""
    return Traffic(
        prompt=Fixed(args.added - args.answer),
        output=Fixed(args.answer),
        prefixes=SharedPrefixes(args.system),
        chats=Chats(
            Fixed(args.turns),
            most_tokens=1 << 20,
            first=Fixed(args.own),
            tools=(ToolPauses(TOOL[0], args.pause * factor, args.spread),),
        ),
    )


def draw(args: argparse.Namespace, seed: int, trace: str, speed: float) -> list[tuple[float, Job]]:
    """(arrival, job) of all jobs of a round. ``speed`` is in prompt tokens per second."""
    groups = [(args.agents, 1.0, True)]
    if trace == "chats":
        groups = [(args.agents - args.agents // 2, 20.0, True), (args.agents // 2, 0.2, False)]
    jobs: list[tuple[float, Job]] = []
    for number, (count, factor, calls) in enumerate(groups):
        arrivals = Gamma(count * args.turns / args.pause)
        turns: dict[str, list[TracedRequest]] = {}
        for request in agents_of(args, factor).draw(count * args.turns, arrivals, 2 * seed + number):
            turns.setdefault(request.session, []).append(request)
        for own in turns.values():
            prompt, *added = texts_of(own, number, args.system // BLOCK)
            pauses = [(request.gap_ms or 0.0) / 1000 for request in own[1:]]
            jobs.append((own[0].arrival, Job(prompt, pauses, added, args.answer, True, calls)))
    seconds = args.turns * args.pause * 1.5
    rate = args.flood_share * speed / args.flood_tokens
    flood = Traffic(prompt=Fixed(args.flood_tokens), output=Fixed(8))
    for index, request in enumerate(flood.draw(int(1.5 * rate * seconds) + 50, Gamma(rate), seed)):
        if request.arrival < seconds:
            prompt = prompt_token_ids(request, seed * 100_000 + index, VOCAB)
            jobs.append((request.arrival, Job(prompt, [], [], 8, False, False)))
    return jobs


def texts_of(turns: list[TracedRequest], group: int, num_shared: int) -> list[list[int]]:
    """Token ids of the first prompt of an agent, and of what each further turn adds. All agents have the same system
    prompt, which is the first ``num_shared`` prefix ids. Agents of different groups have nothing else in common."""
    texts: list[list[int]] = []
    known = 0
    for request in turns:
        ids = tuple(number + (number >= num_shared) * group * GROUP for number in request.prefix_ids)
        prompt = prompt_token_ids(dataclasses.replace(request, prefix_ids=ids), 0, VOCAB)
        texts.append(prompt[known:])
        known = len(prompt) + request.output_tokens
    return texts


def serve(core: EngineCore, limits: ModelLimits, jobs: list[tuple[float, Job]]) -> dict[str, float]:
    """Serve all jobs. Returns the figures of the run."""
    inputs = InputProcessor(limits, None, core.kv, seed=0)
    clock = core.clock
    begin = clock.now()
    queue = [(begin + arrival, number, job) for number, (arrival, job) in enumerate(jobs)]
    heapq.heapify(queue)
    running: dict[str, Job] = {}
    waits: list[float] = []
    firsts: dict[bool, list[float]] = {True: [], False: []}
    total = flooded = cached = 0
    number = len(queue)
    flood_end = begin
    while queue or running:
        now = clock.now()
        while queue and queue[0][0] <= now:
            when, _, job = heapq.heappop(queue)
            name = f"{number}"
            number += 1
            job.sent, job.first, job.answer = when, None, []
            params = SamplingParams(temperature=0.0, max_tokens=job.num_tokens, ignore_eos=True, seed=0)
            core.add(inputs.prepare(name, job.prompt, params, when))
            running[name] = job
        if not core.has_work:
            clock.wait_until(queue[0][0])
            continue
        outputs = core.step()
        if outputs is None:
            times = [core.next_event(), queue[0][0] if queue else None]
            clock.wait_until(min((when for when in times if when is not None), default=clock.now()))
            continue
        now = clock.now()
        cached += sum(count for _, count, _ in outputs.joined)
        for name, token in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            job = running[name]
            job.answer.append(token)
            if job.first is None:
                job.first = now
                firsts[job.is_agent].append(now - job.sent)
        for ended in outputs.finished:
            job = running.pop(ended.sequence_id)
            total += len(job.prompt) + len(job.answer)
            if not job.is_agent:
                flooded += len(job.prompt) + len(job.answer)
                flood_end = now
                continue
            waits.append(now - job.sent)
            if job.turn == len(job.pauses):
                continue
            if job.calls:
                core.paused(ended.sequence_id, TOOL)
            job.prompt = job.prompt + job.answer + job.added[job.turn]
            heapq.heappush(queue, (now + job.pauses[job.turn], number, job))
            number += 1
            job.turn += 1
    return {
        "job": sum(waits),
        "agents_ttft_p90": quantile(firsts[True], 0.9),
        "flood_ttft_p99": quantile(firsts[False], 0.99),
        "flood_throughput": flooded / (flood_end - begin),
        "cached_share": cached / total,
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def settings_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    blocks = args.cache_tokens // BLOCK
    host = blocks // 10 if name == "offload" else 0
    return {
        "cache_eviction": (RULES | STORES)[name],
        "prefix_offload": name == "offload",
        "num_kv_blocks": 1 + blocks - host,
        "max_num_seqs": 16,
        "max_model_len": 4096,
        "host": host,
    }


def simulated(args: argparse.Namespace, name: str) -> tuple[EngineCore, ModelLimits]:
    shape = MODELS["smollm-135m"]
    deployment = Deployment(
        machine=TWO_CORES.name,
        model=shape.name,
        cost=CostModel(shape.on(TWO_CORES)),
        kv_bytes_per_token=shape.kv_bytes,
        kv_memory_bytes=1 << 40,
        max_model_len=4096,
        reads_shared_once=True,
    )
    settings = settings_of(args, name)
    swap = settings.pop("host") * BLOCK * shape.kv_bytes
    return simulated_core(deployment, EngineConfig.from_flat({**settings, "swap_space_bytes": swap}))


def real(args: argparse.Namespace, name: str, directory: str) -> tuple[LLM, ModelLimits]:
    """An engine whose files, if it has any, are in a new directory below ``directory``."""
    settings = settings_of(args, name)
    shape = MODELS["smollm-135m"]
    settings["swap_space_bytes"] = settings.pop("host") * BLOCK * shape.kv_bytes
    if name in STORES:
        settings |= {"kv_store": tempfile.mkdtemp(dir=directory), "kv_store_bytes": args.bytes}
        settings |= {"kv_store_write_rate": args.write_rate}
    llm = LLM(str(args.model), skip_tokenizer_init=True, threads=args.threads, **settings)
    blocks = llm.engine.core.preparers.kv_blocks
    if name in STORES and blocks.wait_for_store() is None:
        raise SystemExit("the files could not be opened; the log says why")
    return llm, ModelLimits(MODEL_VOCAB, 4096, ())


def learn_speed(core: EngineCore) -> None:
    """Compute a few prompts, so that the cost model has seen this machine."""
    inputs = InputProcessor(ModelLimits(VOCAB, 4096, ()), None, core.kv, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for number in range(6):
        prompt = [VOCAB - 1 - number] * (200, 400, 800)[number % 3]
        core.add(inputs.prepare(f"speed {number}", prompt, params, core.clock.now()))
        while core.scheduler.has_unfinished:
            core.step()


def speed_of(core: EngineCore, args: argparse.Namespace) -> float:
    """Prompt tokens per second: predicted, or measured with four prompts."""
    if args.model is None:
        return 2048 / CostModel(MODELS["smollm-135m"].on(TWO_CORES)).prefill_seconds(2048)
    inputs = InputProcessor(ModelLimits(VOCAB, 4096, ()), None, core.kv, seed=0)
    begin = core.clock.now()
    for number in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        core.add(inputs.prepare(f"warm {number}", [number + 10] * 1000, params, begin))
    while core.has_work:
        core.step()
    return 4000 / (core.clock.now() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="run this model instead of a simulation")
    parser.add_argument("--engines", nargs="+", default=list(RULES), choices=[*RULES, *STORES])
    parser.add_argument("--traces", nargs="+", default=["agents", "chats"], choices=["agents", "chats"])
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=608, help="tokens of the common system prompt, a multiple of 16")
    parser.add_argument("--own", type=int, default=900, help="further tokens of an agent's first prompt")
    parser.add_argument("--added", type=int, default=210, help="tokens that a turn adds, answer included")
    parser.add_argument("--answer", type=int, default=40, help="tokens of an agent's answer")
    parser.add_argument("--pause", type=float, default=15.0, help="median seconds that a tool runs")
    parser.add_argument("--spread", type=float, default=0.5, help="standard deviation of its logarithm")
    parser.add_argument("--flood-tokens", type=int, default=500)
    parser.add_argument("--flood-share", type=float, default=0.6)
    parser.add_argument("--cache-tokens", type=int, default=14_200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--write-rate", default="128MB", help="kv_store_write_rate")
    parser.add_argument("--bytes", default="4GB", help="kv_store_bytes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.model is None and (stores := set(args.engines) & set(STORES)):
        parser.error(f"{', '.join(sorted(stores))} need --model: files are read at the speed of a real machine")
    with tempfile.TemporaryDirectory() as directory:
        measure(args, directory)


def measure(args: argparse.Namespace, directory: str) -> None:
    """Run all rounds, and print and write the ratios."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {trace: {} for trace in args.traces}
    speed = 0.0
    for number in range(args.rounds):
        for trace in args.traces:
            for name in args.engines:
                if args.model is None:
                    core, limits = simulated(args, name)
                else:
                    llm, limits = real(args, name, directory)  # the engine ends with the LLM
                    core = llm.engine.core
                    learn_speed(core)
                speed = speed or speed_of(core, args)
                figures = serve(core, limits, draw(args, number, trace, speed))
                store = core.preparers.counts()
                core.shutdown()
                runs[trace].setdefault(name, []).append(figures)
                if args.model is not None:
                    print(trace, name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
                if name in STORES:
                    print("  ", {key: value for key, value in store.items() if "kv" in key}, flush=True)
                    for each in Path(directory).iterdir():
                        shutil.rmtree(each)
    ratios = {trace: ratios_of(of_trace, args.engines[0]) for trace, of_trace in runs.items()}
    print(f"{speed:,.0f} prompt tokens per second; ratios to {args.engines[0]}, median (lowest to highest) of rounds")
    for trace, of_trace in ratios.items():
        for name, each in of_trace.items():
            figures = [f"{key} {middle:.2f} ({low:.2f} to {high:.2f})" for key, (middle, low, high) in each.items()]
            print(f"{trace:7s} {name:10s}", "  ".join(figures))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "command": shlex.join(["sessions.py", *sys.argv[1:]]),
            "commit": commit,
            "chairlift": __version__,
            "cpu": cpu_name(),
            "prompt_tokens_per_second": round(speed),
            "ratios": ratios,
            "runs": runs,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def ratios_of(runs: dict[str, list[dict[str, float]]], reference: str) -> dict[str, dict[str, tuple[float, ...]]]:
    """Engine -> figure -> (median, lowest, highest) of the ratios to the reference over the rounds."""
    found: dict[str, dict[str, tuple[float, ...]]] = {}
    for name, own in runs.items():
        found[name] = {}
        for key in own[0]:
            ratios = [mine[key] / max(theirs[key], 1e-9) for mine, theirs in zip(own, runs[reference], strict=True)]
            found[name][key] = tuple(round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios)))
    return found


if __name__ == "__main__":
    main()
