"""Preferences (DPO) on a task that a program can check: of two answers, the one with fewer words that have an "e".

The bundled model answers each prompt twice. The better answer is the chosen one of a pair; an adapter learns from the
pairs, with the model without the adapter as the reference. The script measures the reward before and after training, on
answers that are not used for training.

    python examples/dpo.py --steps 8
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import tempfile
from pathlib import Path

import torch

from chairlift import LLM, LoRARequest, SamplingParams
from chairlift.kernels.weights import PLAIN
from chairlift.lora.trainable import TrainableAdapter
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train import PackStream, TrainerConfig
from chairlift_train.forward import native_network
from chairlift_train.preferences import PreferenceStats, learn_preferences, pair_items

PROMPTS = ("A cat and a dog", "Name a colour.", "Give me three numbers.", "Sing a song.")
PAIRS = 8
"""Pairs per prompt in a step."""
TOKENS = 12
"""Tokens per answer."""


def reward(text: str) -> float:
    """Fraction of the words without an "e"; 0 if there are no words."""
    words = re.findall("[a-z]+", text.lower())
    return statistics.fmean("e" not in word for word in words) if words else 0.0


class DPO:
    """An adapter of the bundled model, its optimiser, and the engine that answers with the newest adapter."""

    def __init__(self, model_dir: Path, folder: Path, *, rate: float, beta: float) -> None:
        model = load_model(model_dir, read_config(model_dir), torch.float32, weight_format=PLAIN)
        self.adapter = TrainableAdapter(model, r=8, alpha=16)
        self.network = native_network(model, self.adapter, TrainerConfig(steps=1, warmup_steps=0, forward="exact"))
        self.optimizer = torch.optim.AdamW(self.adapter.parameters.values(), rate, weight_decay=0.0)
        self.llm = LLM(model_dir, dtype="float32", num_kv_blocks=256, enable_lora=True, max_lora_rank=8)
        self.folder, self.beta = folder, beta
        self.versions = itertools.count(1)

    def answers(self, seeds: range) -> list[list[tuple[list[int], list[int], float]]]:
        """For each prompt: (prompt, answer, reward) for each seed, from the model with the newest adapter."""
        version = next(self.versions)
        self.adapter.write(self.folder / f"{version}")
        request = LoRARequest(f"adapter-{version}", version, self.folder / f"{version}")
        params = [SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=seed) for seed in seeds]
        outputs = self.llm.generate(
            [prompt for prompt in PROMPTS for _ in seeds], params * len(PROMPTS), lora_request=request
        )
        found = [
            (list(output.prompt_token_ids), list(output.outputs[0].token_ids), reward(output.outputs[0].text))
            for output in outputs
        ]
        return [found[i : i + len(seeds)] for i in range(0, len(found), len(seeds))]

    def step(self, number: int) -> PreferenceStats:
        """Make pairs, and take one optimiser step on them."""
        items = []
        pairs = itertools.count()
        first = 2 * PAIRS * number
        for group in self.answers(range(first, first + 2 * PAIRS)):
            for one, other in zip(group[::2], group[1::2], strict=True):
                worse, better = sorted((one, other), key=lambda answer: answer[2])
                if worse[2] < better[2]:  # pairs of equal rewards say nothing
                    items += pair_items(next(pairs), better[0], better[1], worse[1])
        (packs,) = PackStream(items, capacity=512, step=f"sequences:{len(items)}").steps()
        self.optimizer.zero_grad(set_to_none=True)
        stats = learn_preferences(self.network, packs, beta=self.beta)
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters.values(), 1.0)
        self.optimizer.step()
        return stats

    def measured(self) -> list[float]:
        """Rewards of new answers. All calls use the same seeds; training uses other seeds."""
        return [answer[2] for group in self.answers(range(10_000_000, 10_000_032)) for answer in group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("chairlift/assets"), help="model directory")
    parser.add_argument("--steps", type=int, default=8, help="optimiser steps")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the reference")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        learner = DPO(args.model, Path(folder), rate=args.rate, beta=args.beta)
        before = learner.measured()
        for number in range(args.steps):
            stats = learner.step(number)
            print(
                f"step {number + 1}: loss {stats.loss:.4f}, margin {stats.margin:+.3f}, accuracy {stats.accuracy:.2f}"
            )
        after = learner.measured()
    error = (statistics.variance(before) / len(before) + statistics.variance(after) / len(after)) ** 0.5
    rise = statistics.fmean(after) - statistics.fmean(before)
    print(
        f"reward {statistics.fmean(before):.3f} before, {statistics.fmean(after):.3f} after:"
        f" {rise / error:+.1f} standard errors"
    )


if __name__ == "__main__":
    main()
