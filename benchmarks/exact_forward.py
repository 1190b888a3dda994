"""Measures what it costs that the forward pass of training has the engine's bits.

    python benchmarks/make_random_model.py /tmp/s135 --shape smollm-135m
    python benchmarks/exact_forward.py /tmp/s135 --dtype float32

Two trainers take turns on the same packs: one with PyTorch's forward pass and activation checkpointing, and one with
the engine's (``training.forward: exact``), which computes each layer again in the backward pass, too. Each turn is an
optimiser step, with the copy of the new weights to the engine. The order alternates. The script prints the time of a
step, the ratio with its range, and the largest difference of the losses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch

from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train.config import TrainerConfig
from chairlift_train.layout import Pack
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer


def trainer_of(folder: Path, dtype: str, forward: str) -> Trainer:
    model = load_model(folder, read_config(folder), torch.float32, weight_format=PLAIN)
    how = {"forward": "exact"} if forward == "exact" else {"gradient_checkpointing": True}
    return Trainer(model, TrainerConfig(steps=1_000, warmup_steps=0, learning_rate=1e-5, dtype=dtype, **how))  # type: ignore[arg-type]


def packs_of(vocab_size: int, tokens: int, seed: int) -> list[Pack]:
    """The packs of a step: chats of log-normal lengths, all tokens of which are learnt."""
    rng = random.Random(seed)
    items = []
    while sum(len(item["input_ids"]) for item in items) < tokens:
        length = max(8, min(round(rng.lognormvariate(5.0, 0.7)), tokens // 2))
        items.append({"input_ids": [rng.randrange(vocab_size) for _ in range(length)]})
    (packs,) = PackStream(items, capacity=tokens, step=f"sequences:{len(items)}").steps()
    return list(packs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step, and of a pack")
    parser.add_argument("--rounds", type=int, default=6, help="rounds; the first is not counted")
    args = parser.parse_args()
    trainers = {forward: trainer_of(args.model, args.dtype, forward) for forward in ("torch", "exact")}
    print(trainers["exact"].network)
    packs = packs_of(trainers["torch"].network.vocab_size, args.tokens, 0)
    times: dict[str, list[float]] = {"torch": [], "exact": []}
    difference = 0.0
    for number in range(args.rounds + 1):
        losses = []
        for forward in sorted(trainers, reverse=bool(number % 2)):
            begin = time.perf_counter()
            losses.append(trainers[forward].step(packs).loss)
            if number:
                times[forward].append(time.perf_counter() - begin)
        difference = max(difference, abs(losses[0] - losses[1]))
    ratios = [exact / plain for exact, plain in zip(times["exact"], times["torch"], strict=True)]
    count = sum(pack.num_tokens for pack in packs)
    for forward, seconds in times.items():
        print(f"{forward}: {statistics.median(seconds):.3f} s per step of {count:,} tokens")
    print(f"exact / torch: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"losses differ by at most {difference:.2g}")


if __name__ == "__main__":
    main()
