"""Measures cellular batching (Gao et al., 2018): requests of a recurrent model may join and leave the batch at each
step.

    python benchmarks/cellular.py --rounds 5 --json cellular.json

An LSTM language model with random weights serves a seeded trace of requests, whose prompts and outputs have log-normal
lengths. Each round serves it in three ways, interleaved:

- ``cells``: a request joins the batch at any step and leaves it at the request's last step;
- ``sequences``: all sequences of a batch begin together. Rows of shorter sequences compute on until the longest
  sequence has ended (padding). The next batch begins after that, when it is full or its first request has waited
  ``--wait-ms``;
- ``one by one``: each batch has one request.

All engines are the same program with a different ``batching``. In the closed test all requests arrive at the start, and
the result is the throughput. In the open test requests arrive at random (Poisson) at the fraction ``--load`` of the
capacity of ``sequences``, and the results are the median and the 99th percentile of the time from a request's arrival
to its last token. The script prints medians over the rounds, and the ratios of ``cells`` to the other ways within each
round, with their range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.scheduling import draw, turns
from chairlift import LLM
from chairlift.engine.input_processor import ModelLimits
from chairlift.models.random_weights import write_random_model
from chairlift_lab.bench.machine import describe_machine
from chairlift_lab.replay.replay import RequestTiming, serve_trace
from chairlift_lab.workload.arrivals import AllAtOnce, Arrivals, Gamma
from chairlift_lab.workload.lengths import LogNormal
from chairlift_lab.workload.trace import TracedRequest

LENGTHS = (LogNormal(2.3, 0.7, 2, 64), LogNormal(3.2, 0.9, 2, 200))
"""Lengths of prompts and of outputs. The medians are 10 and 25 tokens; the longest output is eight times its median."""
VOCABULARY = 8192


def modes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name of a way to serve (``cells``, ``sequences``, ``one by one``) -> settings of its engine."""
    whole = {"batching": "static", "preferred_batch_sizes": str(args.rows), "batch_wait_ms": args.wait_ms}
    found: dict[str, dict[str, Any]] = {"cells": {}, "sequences": whole, "one by one": {"max_num_seqs": 1}}
    return {name: {"max_num_seqs": args.rows, **each} for name, each in found.items()}


class Bench:
    """Serves traces with engines of one model."""

    def __init__(self, model_dir: Path, args: argparse.Namespace) -> None:
        self.model_dir, self.args = model_dir, args

    def run(self, mode: str, trace: Sequence[TracedRequest]) -> dict[str, float]:
        """Serve a trace. Returns tokens per second, and the median and 99th percentile of a request's seconds."""
        how = {"skip_tokenizer_init": True, "dtype": "float32", "threads": 1, "max_model_len": 512}
        llm = LLM(self.model_dir, enable_prefix_caching=False, **how, **modes(self.args)[mode])
        timings: list[RequestTiming] = []
        served = serve_trace(
            llm.engine.core, trace, ModelLimits(VOCABULARY, 512, (), llm.config.scheduler.promises), timings
        )
        llm.engine.core.shutdown()
        taken = sorted(each.last - each.request.arrival for each in timings)
        if served.refused or len(taken) != len(trace):
            raise SystemExit(f"{mode}: {len(taken)} of {len(trace)} requests were answered; the trace does not fit")
        tokens = sum(each.request.output_tokens for each in timings)
        seconds = max(each.last for each in timings) - min(each.request.arrival for each in timings)
        return {
            "tokens_per_second": tokens / seconds,
            "requests_per_second": len(taken) / seconds,
            "p50": statistics.median(taken),
            "p99": taken[int(0.99 * len(taken))],
        }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=192, help="requests per trace")
    parser.add_argument("--rows", type=int, default=32, help="maximum number of requests in a batch")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--load", type=float, default=0.8, help="arrival rate, as a fraction of the capacity with whole sequences"
    )
    parser.add_argument(
        "--wait-ms", type=float, default=20.0, help="maximum time to wait for a full batch of sequences"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = {"model_type": "lstm", "vocab_size": VOCABULARY, "hidden_size": args.hidden, "eos_token_id": 0}
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as directory:
        model_dir = write_random_model(Path(directory), {**config, "num_hidden_layers": args.layers}, dtype="float32")
        bench, names = Bench(model_dir, args), list(modes(args))
        bench.run("sequences", draw(LENGTHS, AllAtOnce(), args.rows, 99))
        for number in range(args.rounds):
            found: dict[str, dict[str, float]] = {}
            closed = draw(LENGTHS, AllAtOnce(), args.count, number)
            for name in turns(names, number):
                found[f"closed {name}"] = bench.run(name, closed)
            rate = args.load * found["closed sequences"]["requests_per_second"]
            opened: Arrivals = Gamma(rate)
            for name in turns(names[:2], number):
                found[f"open {name}"] = bench.run(name, draw(LENGTHS, opened, args.count, number))
            rounds.append(found)
    report(rounds)
    if args.json:
        record = {"machine": describe_machine(), "settings": {**vars(args), "json": None}, "rounds": rounds}
        args.json.write_text(json.dumps(record, indent=2, default=str) + "\n")


def report(rounds: Sequence[dict[str, dict[str, float]]]) -> None:
    """Print the medians over the rounds, and the ratios of ``cells`` to each other way."""
    for name in rounds[0]:
        each = {key: statistics.median(found[name][key] for found in rounds) for key in rounds[0][name]}
        print(
            f"{name:18s} {each['tokens_per_second']:8.0f} tokens/s   p50 {1e3 * each['p50']:7.0f} ms"
            f"   p99 {1e3 * each['p99']:7.0f} ms"
        )
    for kind, base in [name.split(" ", 1) for name in rounds[0]]:
        if base == "cells":
            continue
        for key in ("tokens_per_second",) if kind == "closed" else ("p50", "p99"):
            ratios = sorted(found[f"{kind} cells"][key] / found[f"{kind} {base}"][key] for found in rounds)
            print(
                f"{kind}: cells / {base}, {key}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
