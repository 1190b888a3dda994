"""Distillation from a teacher's most likely tokens: a damaged copy of the bundled model is repaired.

The teacher, an engine, answers prompts and reports the most likely tokens of each position with their
log-probabilities. The student has the same weights plus noise. It learns the teacher's distribution over these tokens
on packed answers. The script prints the loss above its minimum, which is the entropy of the teacher's tokens.

    python examples/distill.py --steps 12
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train import PackCollator, PackStream, TrainerConfig
from chairlift_train.forward import native_network
from chairlift_train.networks import NativeNetwork
from chairlift_train.objectives import distillation_losses

PROMPTS = ("A cat and a dog", "Name a colour.", "Give me three numbers.", "Sing a song.")
TOP = 8
"""Tokens that the teacher reports per position."""


def lessons(llm: LLM, seeds: range) -> list[dict[str, Any]]:
    """Answers of the teacher as items for a stream, each with the teacher's tokens and their log-probabilities."""
    params = [SamplingParams(temperature=1.0, max_tokens=16, seed=seed, logprobs=TOP) for seed in seeds]
    items = []
    for output in llm.generate([prompt for prompt in PROMPTS for _ in seeds], params * len(PROMPTS)):
        answer = output.outputs[0]
        tables = [sorted(entry.items(), key=lambda item: -item[1].logprob)[:TOP] for entry in answer.logprobs or ()]
        prompt = len(output.prompt_token_ids)
        items.append(
            {
                "input_ids": [*output.prompt_token_ids, *answer.token_ids],
                "loss_weight": [0.0] * prompt + [1.0] * len(answer.token_ids),
                "teacher_ids": [[token for token, _ in table] for table in tables],
                "teacher": [[entry.logprob for _, entry in table] for table in tables],
            }
        )
    return items


def step_loss(network: NativeNetwork, items: list[dict[str, Any]], *, learns: bool) -> float:
    """Mean cross-entropy minus the teacher's entropy. With ``learns``, its gradient is added to the parameters."""
    (packs,) = PackStream(items, capacity=512, step=f"sequences:{len(items)}").steps()
    collate = PackCollator()
    total = 0.0
    for pack in packs:
        batch = collate(pack)
        places = torch.from_numpy(pack.weights > 0).nonzero()[:, 0]
        ids = torch.tensor([row for meta in pack.meta for row in meta["teacher_ids"]])
        teacher = torch.tensor([row for meta in pack.meta for row in meta["teacher"]])
        with torch.set_grad_enabled(learns):
            loss = distillation_losses(network.logits(batch, pack, places - 1), ids, teacher).sum()
        if learns:
            (loss / packs[0].step_weight).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach()) - _entropy(teacher)
    return total / packs[0].step_weight


def _entropy(teacher: Tensor) -> float:
    """Sum over the rows of the entropy of the renormalised tokens."""
    shares = teacher.softmax(-1)
    return float(-(shares * shares.log()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("chairlift/assets"), help="model directory")
    parser.add_argument("--steps", type=int, default=12, help="optimiser steps")
    parser.add_argument("--noise", type=float, default=0.3, help="damage, in standard deviations of each matrix")
    args = parser.parse_args()
    torch.manual_seed(0)
    student = load_model(args.model, read_config(args.model), torch.float32, weight_format=PLAIN)
    with torch.no_grad():
        for matrix in student.parameters():
            if matrix.ndim == 2:
                matrix.add_(args.noise * matrix.std() * torch.randn_like(matrix))
    student.requires_grad_(True)
    network = native_network(student, None, TrainerConfig(steps=1, warmup_steps=0))
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3, weight_decay=0.0)
    llm = LLM(args.model, dtype="float32", num_kv_blocks=256)
    held_out = lessons(llm, range(10_000_000, 10_000_004))
    print(f"before: {step_loss(network, held_out, learns=False):.3f} above the teacher's entropy")
    for number in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = step_loss(network, lessons(llm, range(8 * number, 8 * number + 8)), learns=True)
        optimizer.step()
        print(f"step {number + 1}: {loss:.3f}")
    print(f"after: {step_loss(network, held_out, learns=False):.3f}, on answers that were not learnt from")


if __name__ == "__main__":
    main()
