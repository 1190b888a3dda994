"""Trains on a stream whose topic changes, without forgetting the old topic.

A tiny Llama reads sequences of a made-up language. Halfway, the sequences change to another language that shares some
words with the first. A `DriftSampler` detects the change from the losses, and then replays old sequences: a tenth of
all sequences. The same run without replay shows the difference.

    python examples/continual.py

With --write the script only writes the stream, for `chairlift train examples/continual.yaml`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import parse_config
from chairlift_train.collate import PackCollator
from chairlift_train.drift import DriftEvent, DriftSampler
from chairlift_train.loss import StepLoss, token_losses
from chairlift_train.stream import PackStream
from chairlift_train.varlen import VarlenContext

WORDS = 56
OLD, NEW = 0, 24
"""First words of the two languages. They share 8 of their 32 words, but the shared words have different successors."""
SEQUENCES_PER_STEP = 32


def language(first_word: int, count: int) -> list[np.ndarray]:
    """``count`` sequences of 16 to 64 words. The 32 words begin at ``first_word``. Each has a few likely successors."""
    grammar = np.random.default_rng(first_word).dirichlet(np.full(32, 0.1), 32).cumsum(axis=1)
    rng = np.random.default_rng([first_word, count])
    rows = rng.integers(0, 32, (count, 64))
    for at in range(1, 64):
        rows[:, at] = np.minimum((grammar[rows[:, at - 1]] < rng.random((count, 1))).sum(axis=1), 31)
    return [row[:length] + first_word for row, length in zip(rows, rng.integers(16, 65, count), strict=True)]


def tiny_llama() -> CausalLM:
    torch.manual_seed(0)
    config = {"model_type": "llama", "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    return CausalLM(parse_config(config))


def logits_of(model: CausalLM, batch: dict[str, Tensor]) -> Tensor:
    """[T, V] logits of one packed row, in which each token attends only to its own sequence."""
    context = VarlenContext(batch["cu_seqlens"].tolist())
    return model.compute_logits(model(batch["input_ids"][0], batch["position_ids"][0], context))


def sequence_losses(logits: Tensor, batch: dict[str, Tensor]) -> list[float]:
    """Mean loss per token of every sequence in the row. Each row of logits predicts the label of the next token."""
    nll = token_losses(logits.detach(), torch.nn.functional.pad(batch["labels"][0, 1:], (0, 1), value=-100))
    return [float(part[:-1].mean()) for part in nll.split(batch["cu_seqlens"].diff().tolist())]


@torch.no_grad()
def evaluate(model: CausalLM, sequences: list[np.ndarray]) -> float:
    """Mean loss per token of sequences that were not used for training."""
    collate = PackCollator()
    losses = [
        (float(token_losses(logits_of(model, batch)[:-1], batch["labels"][0, 1:]).sum()), pack.step_weight)
        for pack in PackStream(sequences, capacity=4096)
        for batch in [collate(pack)]
    ]
    return sum(loss for loss, _ in losses) / sum(targets for _, targets in losses)


@dataclasses.dataclass
class Outcome:
    old_before: float
    """Loss of the old language just before the new one begins."""
    old_after: float
    new_after: float
    events: list[DriftEvent]

    @property
    def forgotten(self) -> float:
        """Growth of the loss of the old language, as a fraction."""
        return self.old_after / self.old_before - 1


def run(steps: int, replay: float) -> Outcome:
    """Takes ``steps`` optimiser steps in the old language, then as many in the new one."""
    shift = steps * SEQUENCES_PER_STEP
    sampler = DriftSampler({"feed": language(OLD, shift) + language(NEW, shift)}, replay=replay, reservoir=2000)
    stream = PackStream(sampler, capacity=1024, pool=64, step=f"sequences:{SEQUENCES_PER_STEP}")
    model, collate, loss = tiny_llama(), PackCollator(), StepLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    held_out_old, held_out_new = language(OLD, 400), language(NEW, 400)
    old_before = None
    for packs in stream.steps():
        if old_before is None and max(max(pack.ids) for pack in packs) >= shift:
            old_before = evaluate(model, held_out_old)
        optimizer.zero_grad()
        ids: list[int] = []
        losses: list[float] = []
        targets: list[int] = []
        with loss.step(packs):
            for pack in packs:
                batch = collate(pack)
                logits = logits_of(model, batch)
                loss(logits, batch).backward()
                ids += pack.ids
                losses += sequence_losses(logits, batch)
                targets += [length - 1 for length in pack.lengths]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sampler.observe(ids, losses, targets)
    if old_before is None:
        raise SystemExit("the stream ended before the new language began")
    return Outcome(old_before, evaluate(model, held_out_old), evaluate(model, held_out_new), sampler.events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps per language (%(default)s)")
    parser.add_argument("--replay", type=float, default=0.1, help="share of old sequences (%(default)s)")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the stream to FILE, as JSON lines, and end")
    arguments = parser.parse_args()
    if arguments.write is not None:
        count = arguments.steps * SEQUENCES_PER_STEP
        stream = language(OLD, count) + language(NEW, count)
        arguments.write.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in stream))
        return
    print(f"{'replay':>7} {'noticed after':>14} {'old before':>11} {'old after':>10} {'forgotten':>10} {'new':>6}")
    for replay in (0.0, arguments.replay):
        outcome = run(arguments.steps, replay)
        noticed = outcome.events[0].drawn - arguments.steps * SEQUENCES_PER_STEP if outcome.events else None
        after = "never" if noticed is None else f"{noticed} sequences"
        print(
            f"{replay:7.0%} {after:>14} {outcome.old_before:11.3f} {outcome.old_after:10.3f} "
            f"{outcome.forgotten:10.1%} {outcome.new_after:6.3f}"
        )


if __name__ == "__main__":
    main()
