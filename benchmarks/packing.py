"""Measures packing, resuming, balancing, lanes, staleness and drift in training, and checks the results against bounds.

    python benchmarks/packing.py --only A1 A2 A3 --count 200000
    python benchmarks/packing.py --rounds 5 --count 200000 --json benchmarks/results/packing.json

Letters name the subject: A packing, D resuming and ranks, E balance, F lanes, G staleness, H drift. Attention and
isolation (B2, C) are in ``packing_attention.py``. Packers of other projects run in the same process, interleaved, on
the same lengths, if they are installed: ``pip install trl==1.16.0 datasets binpacking==2.0.1 grain==0.2.18
river==0.26.1 torchdata``. For results that do not depend on the clock, each round has another seed. ``--clock cpu``
counts CPU seconds, for a machine on which other programs run.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from acceptance import Figure, at_least, at_most, context, interleaved, main, missing, peer, ratios
from packers import MIXES, C, Rows, grain_dataset, mix, next_fit, peers, river_detector, waste

from chairlift_train.balance import Cost, deal_rows, idle, level_rows
from chairlift_train.collate import PackCollator
from chairlift_train.lanes import Lanes
from chairlift_train.layout import Pack
from chairlift_train.pack import lower_bound, pack_indices
from chairlift_train.stream import PackStream
from chairlift_train.stream_stats import StreamStats

POOL = 256


# --- A: packing ------------------------------------------------------------------------------------------------------


def a1(args: argparse.Namespace) -> Iterator[Figure]:
    """Padding of packs that are formed from a pool of 256 pending sequences."""
    for name in MIXES:
        draws = [mix(name, args.count, seed) for seed in range(args.rounds)]
        values = [waste(lengths, len(pack_indices(lengths, C, pool=POOL))) for lengths in draws]
        demanded = name in ("chat", "docs")
        yield (
            at_most(f"{name}: pool 256", values, 0.15, "%") if demanded else context(f"{name}: pool 256", values, "%")
        )
        lengths = draws[0]
        padded = [8 * max(lengths[at : at + 8]) for at in range(0, len(lengths) - 7, 8)]
        whole = 8 * len(padded)
        yield context(f"{name}: padded batches of 8", 100 * (1 - sum(lengths[:whole]) / sum(padded)), "%")
        yield context(f"{name}: next-fit", waste(lengths, next_fit(lengths)), "%")


def a2(args: argparse.Namespace) -> Iterator[Figure]:
    """Number of packs above the lower bound, which no packer can beat."""
    for name in MIXES:
        found: dict[str, list[float]] = {"pool 256": [], "whole set": []}
        for seed in range(args.rounds):
            lengths = mix(name, args.count, seed)
            bound = lower_bound(lengths, C)
            for label, pool in (("pool 256", POOL), ("whole set", None)):
                found[label].append(100 * (len(pack_indices(lengths, C, pool=pool)) / bound - 1))
        yield at_most(f"{name}: pool 256", found["pool 256"], 0.6, "%")
        yield context(f"{name}: whole set", found["whole set"], "%")


def a3(args: argparse.Namespace) -> Iterator[Figure]:
    """Number of packs of other packers divided by the number of Chairlift's packs, on the same sequences. The ratio
    must be at least 1 on every mix, and above 1 on three of four."""
    if peer("datasets") is not None:
        peer("datasets").disable_progress_bars()
    draws = {name: mix(name, args.peer_count, 0) for name in MIXES}
    ours = {
        "pool 256": {name: len(pack_indices(lengths, C, pool=POOL)) for name, lengths in draws.items()},
        "whole set": {name: len(pack_indices(lengths, C)) for name, lengths in draws.items()},
    }
    for label, (package, run) in peers(1000).items():
        if peer(package) is None:
            yield missing(label, package)
            continue
        theirs = {name: run(lengths) for name, lengths in draws.items()}
        for name in MIXES:
            text = f"{theirs[name]} against {ours['pool 256'][name]} and {ours['whole set'][name]}"
            yield context(f"{label}, {name}: waste", waste(draws[name], theirs[name]), "%", text)
        for kind, packs in ours.items():
            if kind == "pool 256" and "100k" in label:
                continue  # a window of this size is the whole data set, so compare it with packers that see as much
            each = [theirs[name] / packs[name] for name in MIXES]
            yield at_least(f"{label} / {kind}: least of four mixes", min(each), 1.0, "x")
            fewer = sum(theirs[name] > packs[name] for name in MIXES)
            text = f"{label} / {kind}: mixes with fewer packs"
            # A packer labelled 100k sees the whole data set. It then also reaches the lower bound on most mixes, so
            # this value has no bound here.
            yield context(text, fewer) if "100k" in label else at_least(text, fewer, 3)


def a4(args: argparse.Namespace) -> Iterator[Figure]:
    """Seconds to plan a million lengths, and seconds to read, pack and collate a million rows of 100 tokens."""
    lengths = mix("chat", args.million, 0)
    rows = Rows([100] * args.million)
    lists = [row.tolist() for row in (rows[index] for index in range(1000))] * (args.million // 1000)
    collate = PackCollator()

    def read(source: Any) -> None:
        for pack in PackStream(source, C):
            collate.arrays(pack)

    runs = {
        "plan": lambda: pack_indices(lengths, C, pool=POOL),
        "rows": lambda: read(rows),
        "lists": lambda: read(lists),
    }
    seconds = interleaved(runs, args.rounds, warm_up=False, clock=args.clock)
    per_million = 1_000_000 / args.million
    yield at_most("plan, pool 256", [s * per_million for s in seconds["plan"]], 3.0, "s", "stretch: 1.5 s")
    yield at_most("collated, rows are arrays", [s * per_million for s in seconds["rows"]], 12.0, "s")
    yield context("collated, rows are lists", [s * per_million for s in seconds["lists"]], "s")


def a5(args: argparse.Namespace) -> Iterator[Figure]:
    """Time per sequence to plan and to concatenate tokens. Each packer reads its fastest input format."""
    lengths = mix("chat", args.peer_count, 0)
    tokens = np.arange(sum(lengths), dtype=np.int32)
    rows = np.split(tokens, np.cumsum(lengths)[:-1])
    few = rows[: max(500, args.peer_count // 10)]  # Grain takes hundreds of microseconds per sequence
    runs: dict[str, Callable[[], Any]] = {"ours": lambda: sum(pack.num_tokens for pack in PackStream(rows, C))}
    counts = {"ours": len(lengths)}
    if peer("trl") is not None:
        datasets = peer("datasets")
        datasets.disable_progress_bars()
        dataset = datasets.Dataset.from_dict({"input_ids": rows})
        runs["from a data set: ours"] = lambda: sum(pack.num_tokens for pack in PackStream(dataset, C))
        for label, window in (("1000", 1000), ("100k", 100_000)):
            settings = {"batch_size": window, "load_from_cache_file": False}
            runs[f"TRL bfd, window {label}"] = functools.partial(
                peer("trl").pack_dataset, dataset, C, "bfd", map_kwargs=settings
            )
    if peer("grain") is not None:
        for label, kind, bins in (("first-fit, 8", "FirstFit", 8), ("best-fit, 64", "BestFit", 64)):
            name = f"Grain {label} bins"
            runs[name] = lambda kind=kind, bins=bins: sum(1 for _ in grain_dataset(few, kind, bins))
            counts[name] = len(few)
    seconds = interleaved(runs, args.rounds, clock=args.clock)
    each = {name: [1e6 * s / counts.get(name, len(lengths)) for s in values] for name, values in seconds.items()}
    for name, values in each.items():
        yield context(name, values, "us")
    for package, word, bound in (("grain", "Grain", 20), ("trl", "TRL", 2)):
        theirs = [values for name, values in each.items() if name.startswith(word)]
        if not theirs:
            yield missing(f"{word} / ours", package)
            continue
        best = [min(values) for values in zip(*theirs, strict=True)]
        yield at_least(f"{word}, its fastest setting / ours", ratios(best, each["ours"]), bound, "x")
        if word == "TRL":  # TRL reads and writes Arrow tables
            yield context("TRL / ours from the same data set", ratios(best, each["from a data set: ours"]), "x")


def a8(args: argparse.Namespace) -> Iterator[Figure]:
    """Time per sequence to plan and to concatenate tokens, for a million sequences. Grain reads 5,000 of them.

    TRL packs windows of 1,000 rows, which is its faster setting in A5.
    """
    lengths = mix("chat", args.million, 0)
    rows = Rows(lengths)
    few = [rows[index] for index in range(min(5_000, args.million))]
    runs: dict[str, Callable[[], Any]] = {"ours": lambda: sum(pack.num_tokens for pack in PackStream(rows, C))}
    if peer("trl") is not None:
        datasets = peer("datasets")
        datasets.disable_progress_bars()
        arrow = importlib.import_module("pyarrow")
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.resize(rows.tokens, offsets[-1])
        column = arrow.LargeListArray.from_arrays(arrow.array(offsets), arrow.array(tokens))
        dataset = datasets.Dataset(arrow.table({"input_ids": column}))
        settings = {"batch_size": 1000, "load_from_cache_file": False}
        runs["TRL bfd, window 1000"] = functools.partial(
            peer("trl").pack_dataset, dataset, C, "bfd", map_kwargs=settings
        )
    if peer("grain") is not None:
        for label, kind, bins in (("first-fit, 8", "FirstFit", 8), ("best-fit, 64", "BestFit", 64)):
            runs[f"Grain {label} bins"] = lambda kind=kind, bins=bins: sum(1 for _ in grain_dataset(few, kind, bins))
    seconds = interleaved(runs, args.rounds, warm_up=False, clock=args.clock)
    counts = {name: len(few) if name.startswith("Grain") else len(lengths) for name in runs}
    each = {name: [1e6 * s / counts[name] for s in values] for name, values in seconds.items()}
    for name, values in each.items():
        yield context(name, values, "us")
    for package, word, bound in (("grain", "Grain", 16), ("trl", "TRL", 1.5)):
        theirs = [values for name, values in each.items() if name.startswith(word)]
        if not theirs:
            yield missing(f"{word} / ours", package)
            continue
        best = [min(values) for values in zip(*theirs, strict=True)]
        yield at_least(f"{word}, its fastest setting / ours", ratios(best, each["ours"]), bound, "x")


def a6(args: argparse.Namespace) -> Iterator[Figure]:
    """Delay from a sequence's arrival to its pack, measured in packs."""
    for name in MIXES:
        stats = drained(PackStream(Rows(mix(name, args.count // 4, 1)), C, pool=POOL)).stats()
        yield at_most(f"{name}: longest", stats.delay_packs.max, POOL, "packs", f"99 %: {stats.delay_packs.p99}")
        note = "mean length, packed against read"
        yield context(f"{name}: length drift, most", 100 * stats.length_drift_max, "%", note)


def drained(stream: PackStream) -> PackStream:
    for _ in stream:
        pass
    return stream


def grown(samples: int) -> tuple[int, int]:
    """(resident memory in bytes after 10,000 samples, the same after all samples). Run it in a separate process."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    rng = np.random.default_rng(0)
    rows = Rows(np.clip(rng.lognormal(4.4, 0.8, samples), 1, 1024).astype(int).tolist())
    stream, early, read = PackStream(rows, 1024), 0, 0
    for pack in stream:
        read += len(pack.lengths)
        early = early or (resident() if read >= 10_000 else 0)
    return early, resident()


def a7(args: argparse.Namespace) -> Iterator[Figure]:
    """Growth of the process's memory between 10,000 and a million samples."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        early, late = pool.apply(grown, (args.million,))
    yield at_most("resident memory", 100 * (late / early - 1), 5.0, "%", f"{early >> 20} MiB to {late >> 20} MiB")


# --- D: resuming and ranks -------------------------------------------------------------------------------------------


def print_of(pack: Pack) -> tuple[Any, ...]:
    """All contents of a pack as a tuple, for comparison."""
    told = (pack.ids, pack.lengths, pack.step, pack.last_of_step, pack.step_weight, pack.step_sequences, pack.filler)
    return pack.tokens.tobytes(), pack.weights.tobytes(), *told


def differing(resumed: Sequence[Any], expected: Sequence[Any]) -> int:
    """Number of packs that differ, including lost and repeated packs."""
    return sum(a != b for a, b in zip(resumed, expected, strict=False)) + abs(len(resumed) - len(expected))


def d1(args: argparse.Namespace) -> Iterator[Figure]:
    """Number of packs that differ when the stream is stopped and resumed at every k-th pack."""
    rows = Rows(mix("docs", 3000, 0))
    make = functools.partial(PackStream, rows, C, step="tokens:64K", order="shuffled", window=32)
    expected = [print_of(pack) for pack in make()]
    for k in (1, 7, 100):
        resumed, stream, stops = [], make(), 0
        while (pack := next(stream, None)) is not None:
            resumed.append(print_of(pack))
            if len(resumed) % k == 0 and stops < 300:
                state, stops = copy.deepcopy(stream.state_dict()), stops + 1
                stream = make()
                stream.load_state_dict(state)
        yield at_most(f"k = {k}", differing(resumed, expected), 0, "packs")
    torchdata = peer("torchdata")
    for workers in (0, 2):
        if torchdata is None:
            yield missing(f"three times, {workers} loader processes", "torchdata")
            continue
        loader_of = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
        resumed, state = [], None
        for stop in (40, 111, 200, 10**9):
            loader = loader_of(make().as_torch(), batch_size=None, num_workers=workers)
            if state is not None:
                loader.load_state_dict(state)
            for pack in loader:
                resumed.append(print_of(pack))
                if len(resumed) == stop:
                    state = loader.state_dict()
                    break
        yield at_most(f"three times, {workers} loader processes", differing(resumed, expected), 0, "packs")


def d2(args: argparse.Namespace) -> Iterator[Figure]:
    """Seconds from loading a saved state to the next pack, near the end of a million samples."""
    rows = Rows([100] * args.million)
    stream = PackStream(rows, C, step="tokens:1M")
    for _ in range(int(0.99 * args.million * 100 / C)):
        next(stream)
    state, expected, seconds = stream.state_dict(), print_of(next(stream)), []
    for _ in range(args.rounds):
        begin = time.perf_counter()
        resumed = PackStream(rows, C, step="tokens:1M")
        resumed.load_state_dict(state)
        pack = next(resumed)
        seconds.append(time.perf_counter() - begin)
    yield at_most("restored, with the next pack", seconds, 1.0, "s")
    yield at_most("packs that differ", float(print_of(pack) != expected), 0)


def d3(args: argparse.Namespace) -> Iterator[Figure]:
    """With 1, 2, 4 and 8 ranks, check that all ranks have equal numbers of packs, that the ranks together have the same
    packs as one rank, and that no token is lost."""
    lengths = mix("docs", 4000, 0)
    rows, whole = Rows(lengths), Counter[Any]()
    for ranks in (1, 2, 4, 8):
        settings: dict[str, Any] = {"ranks": ranks, "balance": Cost.transformer(), "window": 128, "step": "packs:32"}
        dealt = [list(PackStream(rows, C, rank=rank, **settings)) for rank in range(ranks)]
        packs = Counter((pack.ids, pack.tokens.tobytes()) for each in dealt for pack in each if not pack.filler)
        whole = whole or packs
        tokens = sum(pack.num_tokens for each in dealt for pack in each if not pack.filler)
        counts = {len(each) for each in dealt}
        yield at_most(f"{ranks} ranks: different numbers of packs", len(counts) - 1, 0)
        yield at_most(f"{ranks} ranks: other packs than 1 rank's", sum(((packs - whole) + (whole - packs)).values()), 0)
        yield at_most(f"{ranks} ranks: tokens lost", abs(sum(lengths) - tokens), 0)


# --- E: balance ------------------------------------------------------------------------------------------------------

LONG = 32768
COSTS = {"7B-like": Cost.transformer(4096), "1B-like": Cost.transformer(2048)}


def e1(args: argparse.Namespace) -> Iterator[Figure]:
    """Idle fraction of 8 ranks that synchronise after every pack, with C = 32,768, and the padding that balancing
    costs."""
    for kind, (name, cost) in itertools.product(("docs", "chat"), COSTS.items()):
        lengths = mix(kind, max(4000, args.count // 10), 0, LONG)
        rows, label = Rows(lengths), f"{kind}, {name}"

        def dealt(window: int, balance: Cost | None, seed: int, rows: Rows = rows) -> StreamStats:
            settings: dict[str, Any] = {"ranks": 8, "balance": balance, "window": window, "seed": seed}
            return drained(PackStream(rows, LONG, step="packs:8", **settings)).stats()

        packs = [cost.of(lengths[i] for i in pack) for pack in pack_indices(lengths, LONG, pool=POOL)]
        plain = dealt(256, None, 0)
        order = [packs[at : at + 8] for at in range(0, len(packs) - 7, 8)]
        yield context(f"{label}: as they come", 100 * idle(order), "%")
        for window in (32, 64, 128):
            yield context(f"{label}: window {window}", 100 * dealt(window, cost, 0).idle, "%")
        found = [dealt(256, cost, seed) for seed in range(min(3, args.rounds))]
        yield at_most(f"{label}: window 256", [100 * stats.idle for stats in found], 3.0, "%")
        padded = [waste(lengths, stats.packs + stats.fillers, LONG) for stats in found]
        without = waste(lengths, plain.packs + plain.fillers, LONG)
        yield at_most(f"{label}: padding added", [each - without for each in padded], 0.1, "points")


def levelled(costs: Sequence[float], ranks: int) -> list[list[float]]:
    """Costs of the packs of one step, arranged as rows with one column per rank."""
    rows = [[costs[index] for index in row] for row in deal_rows(costs, ranks, 0)]
    return [[row[pack] for pack in chosen] for row, chosen in zip(rows, level_rows(rows), strict=True)]


def e2(args: argparse.Namespace) -> Iterator[Figure]:
    """Idle fraction of 8 ranks that synchronise after every optimiser step, with the longest packs first."""
    lengths = mix("docs", max(4000, args.count // 10), 0, LONG)
    packs = pack_indices(lengths, LONG, pool=POOL)
    for name, cost in COSTS.items():
        costs = [cost.of(lengths[i] for i in pack) for pack in packs]
        for each in (2, 4, 8):
            steps = [costs[at : at + 8 * each] for at in range(0, len(costs) - 8 * each + 1, 8 * each)]
            sums = [list(map(sum, zip(*levelled(step, 8), strict=True))) for step in steps]
            label, value = f"{name}: {each} packs per rank", 100 * idle(sums)
            yield at_most(label, value, 1.0, "%") if each == 8 else context(label, value, "%")


# --- F, G, H: lanes, staleness, drift --------------------------------------------------------------------------------


def f1(args: argparse.Namespace) -> Iterator[Figure]:
    """Packing into lanes: fraction of used positions, tokens that are not seen exactly once, and a recurrence over
    chunks compared with the recurrence over whole documents."""
    long = Lanes(Rows(mix("chat", 40_000, 0)), lanes=8, chunk=512)
    deque(long, maxlen=0)
    yield at_least("places used, 40,000 documents", 100 * long.stats()["used"], 99.9, "%")
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 1000, length).astype(np.int32) for length in mix("chat", 2000, 0)]
    lanes = Lanes(documents, lanes=8, chunk=512)
    carried, seen, wrong, off = [0.0] * 8, Counter[int](), 0, 0.0
    for batch in lanes:
        for row, bounds in enumerate(batch.cu_seqlens):
            for document, start, end in zip(batch.ids[row], bounds, bounds[1:], strict=False):
                if document < 0:
                    continue
                tokens, at = batch.tokens[row, start:end], int(batch.positions[row, start])
                wrong += int((tokens != documents[document][at : at + end - start]).sum())
                seen[document] += end - start
                carried[row] = _recurrence(tokens, batch.reset[row, start:end], carried[row])
                if at + end - start == len(documents[document]):
                    whole = documents[document]
                    off = max(off, abs(carried[row] - _recurrence(whole, np.arange(len(whole)) == 0, math.nan)))
            if not batch.carry[row]:
                carried[row] = math.nan
    wrong += sum(abs(seen[number] - len(document)) for number, document in enumerate(documents))
    yield at_most("tokens lost, repeated or changed", wrong, 0)
    yield at_most("recurrence at the end of a document, carried", off, 1e-6)


def _recurrence(tokens: Any, reset: Any, state: float) -> float:
    for token, begins in zip(tokens.tolist(), reset.tolist(), strict=True):
        state = (0.0 if begins else 0.95 * state) + token / 1000
    return state


def g1(args: argparse.Namespace) -> Iterator[Figure]:
    """Staleness over 100,000 random events, checked by the tests' reference, and the bias against long samples in mode
    ``wait``."""
    books = importlib.import_module("tests.train.staleness_books")
    for policy in books.POLICIES:
        worst = 0
        for seed in range(10):
            gate = books.explore(policy, seed, 10_000).gate
            worst = max(worst, gate.stats().staleness_max - gate.bound)
        yield at_most(f"{policy}: staleness above its bound", worst, 0, "versions")
    for policy in ("wait", "drop"):
        biases = [100 * abs(books.steady(policy, bound, 30_000).length_bias) for bound in (0, 1, 2)]
        name = f"{policy}: mean length, consumed against produced"
        yield at_most(name, max(biases), 2.0, "%") if policy == "wait" else context(name, max(biases), "%")


def g2(args: argparse.Namespace) -> Iterator[Figure]:
    """Asynchronous and synchronous training on a virtual clock, with simulated generation and a bandit that learns."""
    simulate = importlib.import_module("tests.train.simulated_rollouts").simulate
    seeds = range(max(6, args.rounds))
    for policy in ("drop", "wait"):
        in_step = [simulate(0, policy, seed=seed)[:2] for seed in seeds]
        for bound in (1, 2):
            apart = [simulate(bound, policy, seed=seed)[:2] for seed in seeds]
            gains = [sync[0] / other[0] for sync, other in zip(in_step, apart, strict=True)]
            yield at_least(f"{policy}, bound {bound}: times as fast", gains, 1.5, "x")
            losses = [[loss for _, loss in runs] for runs in (in_step, apart)]
            noise = math.sqrt(sum(statistics.variance(each) for each in losses))
            worse = (statistics.fmean(losses[1]) - statistics.fmean(losses[0])) / noise
            note = f"{statistics.fmean(losses[0]):.3f} in step, {statistics.fmean(losses[1]):.3f}"
            yield at_most(f"{policy}, bound {bound}: final loss above, in deviations", worse, 1.0, "", note)


def h1(args: argparse.Namespace) -> Iterator[Figure]:
    """Drift detectors compared with river's ADWIN on the same streams, and how well replay keeps a model from
    forgetting old data."""
    streams = importlib.import_module("tests.train.drift_streams")
    detectors = importlib.import_module("chairlift_train.detectors")
    seeds = range(10 * args.rounds)
    makes: dict[str, Callable[[], Any]] = {
        "Adwin": lambda: detectors.Adwin().update,
        "PageHinkley": lambda: detectors.PageHinkley().update,
    }
    if peer("river") is not None:
        makes["river ADWIN"] = functools.partial(river_detector, importlib.import_module("river.drift").ADWIN)
    for name, stream in streams.STREAMS.items():
        found = {label: streams.evaluate(make, stream, seeds) for label, make in makes.items()}
        for label, outcome in found.items():
            note = f"{outcome.false_alarms:.2f} false alarms per 1,000 values, {100 * outcome.missed:.0f} % missed"
            yield context(f"{name}, {label}: delay", outcome.delay, "values", note)
        if "river ADWIN" not in found:
            yield missing(f"{name}: against river's ADWIN", "river")
            continue
        ours, theirs = found["Adwin"], found["river ADWIN"]
        yield at_most(f"{name}, Adwin: delay above river's", ours.delay - theirs.delay, 0, "values")
        extra = ours.false_alarms - theirs.false_alarms
        yield at_most(f"{name}, Adwin: false alarms above river's", extra, 0, "/1,000")
    run = importlib.import_module("examples.continual").run
    for share in (0.0, 0.1):
        outcome = run(args.continual_steps, share)
        name, note = f"old domain's loss has grown, {share:.0%} replay", f"new domain's loss {outcome.new_after:.3f}"
        grown_by = 100 * outcome.forgotten
        yield at_most(name, grown_by, 5.0, "%", note) if share else context(name, grown_by, "%", note)


MEASURES = {
    **{"A1": a1, "A2": a2, "A3": a3, "A4": a4, "A5": a5, "A6": a6, "A7": a7, "A8": a8},
    **{"D1": d1, "D2": d2, "D3": d3, "E1": e1, "E2": e2, "F1": f1, "G1": g1, "G2": g2, "H1": h1},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="sequences of each mix (200000 for the record)")
    parser.add_argument(
        "--peer-count", type=int, default=5_000, help="number of these sequences that other packers get"
    )
    parser.add_argument(
        "--million", type=int, default=1_000_000, help="sequences in measurements of a million sequences"
    )
    parser.add_argument("--continual-steps", type=int, default=200, help="optimiser steps per domain in H1")
    main(MEASURES, parser)
