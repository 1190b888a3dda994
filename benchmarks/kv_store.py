"""Measures what KV in files saves when a conversation returns to a new process, and what writing it costs.

    python benchmarks/make_random_model.py /tmp/smollm --shape smollm-135m
    python benchmarks/kv_store.py --model /tmp/smollm --rounds 5 --json benchmarks/results/kv-store.json

A process computes ``--rounds`` conversations of ``--length`` tokens and is killed (SIGKILL) when their blocks are
written. A second engine finds its files. In each round, three times to the first token take turns, each for a
conversation and ``--added`` new tokens: ``computed`` by an engine without files, ``loaded`` from the files (which the
system still has in memory), and ``warm``: once more, with other new tokens. The outputs must be equal. The bound for
``loaded`` is ``warm`` and 1.25 times the time to read, copy and verify the bytes of the conversation, each measured
alone.

Then ``--prompts`` new prompts at once, none of which returns, run on an engine with files and on one without, in turns.
The ratio is the throughput with files divided by that without. At the end, the time is measured in which a store with
100,000 blocks is opened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams, __version__
from chairlift.engine.kv_blocks import KVBlocks
from chairlift.engine.kv_store.disk import OsDisk
from chairlift.engine.kv_store.files import StoreFiles
from chairlift.engine.kv_store.record import Record, payload_checksum
from chairlift.engine.kv_store.store import KVStore

if __package__:
    from benchmarks.offline import cpu_name
else:
    from offline import cpu_name

BLOCKS = 100_000
"""Number of blocks of the store whose opening is measured."""
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def make(args: argparse.Namespace, directory: str | None) -> LLM:
    """An engine; with a directory, one whose files are open."""
    store: dict[str, Any] = {}
    if directory is not None:
        store = {"kv_store": directory, "kv_store_bytes": args.bytes, "kv_store_write_rate": args.write_rate}
    llm = LLM(args.model, skip_tokenizer_init=True, max_num_seqs=16, threads=args.threads, **store)
    if directory is not None and blocks_of(llm).wait_for_store() is None:
        raise SystemExit("the files could not be opened; the log says why")
    return llm


def blocks_of(llm: LLM) -> KVBlocks:
    return llm.engine.core.preparers.kv_blocks


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """(seconds, token, number of prompt tokens that were not computed)."""
    start = time.perf_counter()
    (output,) = llm.generate([prompt], FIRST)
    return time.perf_counter() - start, output.outputs[0].token_ids[0], output.num_cached_tokens or 0


def conversations_of(args: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3000) for _ in range(args.length)] for _ in range(args.rounds)]


def write(args: argparse.Namespace, directory: str) -> None:
    """Compute and write the conversations, and wait to be killed."""
    writer = make(args, directory)
    for each in conversations_of(args):
        writer.generate([each], FIRST)
        while blocks_of(writer).next_event(0.0) is not None:  # the write rate delays some blocks
            time.sleep(0.05)
            blocks_of(writer).store_blocks()
    print("written", flush=True)
    time.sleep(3600)


def write_and_die(directory: str) -> None:
    """Let another process write the conversations, and kill it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--writer", directory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "written\n":
            raise SystemExit("the conversations could not be written")
        process.send_signal(signal.SIGKILL)


def moving_seconds(directory: str, nbytes: int) -> float:
    """Seconds to read so many bytes of the files, to copy them and to verify them."""
    name = max(Path(directory).rglob("blocks-*"), key=lambda path: path.stat().st_size)
    piece = 1 << 19
    best = [float("inf")] * 3
    for _ in range(5):
        parts = []
        descriptor = os.open(name, os.O_RDONLY)
        start = time.perf_counter()
        for at in range(0, nbytes, piece):
            parts.append(os.pread(descriptor, piece, at))
        read = time.perf_counter()
        for each in parts:
            bytearray(each)
        copied = time.perf_counter()
        for each in parts:
            payload_checksum(each, bytes(32), 0, 0)
        found = read - start, copied - read, time.perf_counter() - copied
        os.close(descriptor)
        best = [min(pair) for pair in zip(best, found, strict=True)]
    print(f"{nbytes / 2**20:.1f} MiB: read, copy, verify in {', '.join(f'{each * 1000:.1f}' for each in best)} ms")
    return sum(best)


def opening_seconds() -> float:
    """Seconds in which a store with :data:`BLOCKS` blocks is opened."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        sizes = {"block_size": 16, "block_bytes": [64], "spans": [16]}

        def files() -> StoreFiles:
            size = BLOCKS * 700
            return StoreFiles(OsDisk(directory), "model", {}, nbytes=size, **sizes)  # type: ignore[arg-type]

        store = files()
        for slot in range(BLOCKS):
            key = slot.to_bytes(32, "little")
            store.write(Record(0, slot, slot + 1, 0, bytes(16), key, key, bytes(128)), bytes(64))
        store.close()
        start = time.perf_counter()
        opened = KVStore(files(), 1e9)
        seconds = time.perf_counter() - start
        if opened.num_blocks != BLOCKS:
            raise SystemExit(f"{opened.num_blocks} blocks were found, {BLOCKS} were written")
        opened.close()
    return seconds


def returning(args: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    """Seconds to the first token of each round, by how the KV came."""
    write_and_die(directory)
    rng = random.Random(3)
    reader, plain = make(args, directory), make(args, None)
    warm_up = [rng.randrange(3000) for _ in range(args.length)]
    first_token(reader, warm_up)
    first_token(plain, warm_up)
    seconds: dict[str, list[float]] = {"computed": [], "loaded": [], "warm": []}
    for each in conversations_of(args):
        added = [rng.randrange(3000) for _ in range(args.added)]
        loaded = first_token(reader, each + added)
        computed = first_token(plain, each + added)
        warm = first_token(reader, each + added[::-1])
        if loaded[1] != computed[1] or loaded[2] < args.length - 16 or computed[2]:
            raise SystemExit(f"a conversation came back wrong: {loaded} after loading, {computed} computed")
        for name, found in (("computed", computed), ("loaded", loaded), ("warm", warm)):
            seconds[name].append(found[0])
        print(f"computed {computed[0]:.3f} s, loaded {loaded[0]:.3f} s, warm {warm[0]:.3f} s", flush=True)
    read = blocks_of(reader).counts()["num_kv_bytes_read"] / args.rounds
    print(f"{read / 2**20:.1f} MiB per conversation, {blocks_of(reader).store.bytes_per_second / 1e6:,.0f} MB/s")
    reader.engine.shutdown()
    moving = moving_seconds(directory, int(read))
    seconds["bound"] = [warm + 1.25 * moving for warm in seconds["warm"]]
    return seconds


def throughput(args: argparse.Namespace, directory: str) -> list[float]:
    """Throughput with files divided by that without, of each round."""
    rng = random.Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    engines = make(args, directory), make(args, None)
    ratios = []
    for number in range(args.rounds + 1):
        prompts = [[rng.randrange(3000) for _ in range(256)] for _ in range(args.prompts)]
        taken = []
        for llm in engines if number % 2 else reversed(engines):
            start = time.perf_counter()
            llm.generate(prompts, params)
            taken.append((llm is engines[0], time.perf_counter() - start))
        with_files, without = (next(each for own, each in taken if own is wanted) for wanted in (True, False))
        if number:
            ratios.append(without / with_files)
            print(f"throughput with files: {ratios[-1]:.3f} of that without", flush=True)
    engines[0].engine.shutdown()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=2_000)
    parser.add_argument("--added", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--write-rate", default="64MB", help="kv_store_write_rate")
    parser.add_argument("--bytes", default="2GB", help="kv_store_bytes")
    parser.add_argument("--writer", metavar="DIRECTORY", help="only write the conversations, and wait to be killed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.writer:
        write(args, args.writer)
    with tempfile.TemporaryDirectory() as directory:
        seconds = returning(args, directory)
    with tempfile.TemporaryDirectory() as directory:
        ratios = throughput(args, directory)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    faster = [one / other for one, other in zip(seconds["computed"], seconds["loaded"], strict=True)]
    print(f"first token: {', '.join(f'{name} {value:.3f} s' for name, value in medians.items())}")
    print(f"loading is {statistics.median(faster):.1f}x as fast as computing ({min(faster):.1f} to {max(faster):.1f})")
    bounds = [one / other for one, other in zip(seconds["loaded"], seconds["bound"], strict=True)]
    print(f"loaded / bound {statistics.median(bounds):.2f} ({min(bounds):.2f} to {max(bounds):.2f})")
    opening = opening_seconds()
    print(f"a store with {BLOCKS:,} blocks is open after {opening:.2f} s")
    print(f"throughput {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if args.json is not None:
        facts: dict[str, Any] = {"cpu": cpu_name(), "version": __version__, "model": args.model, "length": args.length}
        args.json.write_text(
            json.dumps({**facts, "seconds": seconds, "throughput": ratios, "opening": opening}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
