"""GRPO with asynchronous rollouts, on a task that a program can check: answers whose words have no letter "e".

The bundled model continues a few beginnings of texts. The reward of an answer is the fraction of its words without an
"e". An ``LLM`` generates the rollouts and gets new weights after every step (``AsyncLoop``). The weights of a rollout
may be one version older than the weights that it trains (``StalenessGate``); importance ratios correct for that. The
script measures the reward before and after training, on answers that are not used for training. ``--shuffle`` assigns
rewards to random answers, so that the model must not learn anything.

    python examples/grpo.py --steps 12 --seed 0
    python examples/grpo.py --steps 12 --seed 0 --output build/grpo   # writes checkpoints; the same command resumes
    python examples/grpo.py --steps 200 --bound 0 --compare           # mismatch of the two halves, in every step

The trainer's forward pass is a step of the engine (``ExactNetwork``), so the log-probabilities of a rollout are those
of the trainer, bit for bit, as long as their weights are the same. Each step prints the largest difference
(``mismatch``), which is 0. With ``--compare`` it also prints that of a forward pass by PyTorch; ``--forward torch``
trains with such a pass. A resumed run ends with the same bits as a run that was never stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.errors import ConfigError
from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train import AsyncLoop, PackCollator, PackStream, Rollout, StalenessGate
from chairlift_train.checkpoint import CheckpointStore, ModelFiles, load_state
from chairlift_train.config import TrainerConfig
from chairlift_train.forward import native_network
from chairlift_train.layout import Pack
from chairlift_train.networks import NativeNetwork
from chairlift_train.objectives import clipped_gain, group_advantages
from chairlift_train.rollout import RolloutGenerator
from chairlift_train.staleness import Selection

PROMPTS = ("A cat and a dog", "Name a colour.", "Give me three numbers.", "Sing a song.")
GROUP = 8
"""Answers per prompt. Their mean reward is the baseline."""
TOKENS = 12
"""Tokens per answer."""
CLIP = 0.2
"""Clip range of the ratio around 1. A ratio beyond the range, in the direction of more gain, has no gradient (PPO)."""


def reward(text: str) -> float:
    """Fraction of the words without an "e"; 0 if there are no words."""
    words = re.findall("[a-z]+", text.lower())
    return statistics.fmean("e" not in word for word in words) if words else 0.0


class GRPO:
    """Group-relative policy optimisation (Shao et al., 2024): policy, optimiser and the loss of a step."""

    compare = False
    """Whether to measure the mismatch of a forward pass by PyTorch, too."""

    def __init__(
        self, model_dir: Path, llm: LLM, *, rate: float, shuffle: bool, seed: int, forward: Literal["exact", "torch"]
    ) -> None:
        self.policy = load_model(model_dir, read_config(model_dir), torch.float32, weight_format=PLAIN).train()
        self.policy.requires_grad_(True)
        self.network = native_network(self.policy, None, TrainerConfig(steps=1, warmup_steps=0, forward=forward))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.llm, self.shuffle, self.random = llm, shuffle, random.Random(seed)
        self.collate = PackCollator()

    def weights(self) -> dict[str, Tensor]:
        """Weights for the generator, by their names in a checkpoint."""
        return hf_state_dict(self.policy)

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[list[float], list[float]]:
        """(rewards, advantages). Advantage: reward minus the mean of its prompt's answers, in standard deviations."""
        texts = [self.llm.tokenizer.decode(list(rollout.tokens)) for rollout in rollouts]
        rewards = [reward(text) for text in texts]
        credited = self.random.sample(rewards, len(rewards)) if self.shuffle else rewards
        return rewards, group_advantages(credited, [tuple(rollout.prompt) for rollout in rollouts])

    def step(self, selection: Selection) -> dict[str, Any]:
        """Takes one optimiser step on packed rollouts, and returns its measurements."""
        rollouts: list[Rollout] = selection.samples
        rewards, advantages = self.advantages(rollouts)
        rows = [rollout.sequence(1.0) for rollout in rollouts]
        for row, advantage, staleness in zip(rows, advantages, selection.staleness, strict=True):
            row |= {"advantage": advantage, "current": staleness == 0}
        (packs,) = PackStream(rows, capacity=512, step=f"sequences:{len(rows)}").steps()
        self.optimizer.zero_grad(set_to_none=True)
        parts = [self._learn(pack, packs[0].step_weight) for pack in packs]
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0))
        self.optimizer.step()
        totals = [math.fsum(column) for column in zip(*(part[:2] for part in parts), strict=True)]
        return {
            "reward": statistics.fmean(rewards),
            "staleness": statistics.fmean(selection.staleness),
            "drift": totals[0] / packs[0].step_weight,
            "clipped": totals[1] / packs[0].step_weight,
            "grad_norm": norm,
            **{name: max(part[2][name] for part in parts) for name in parts[0][2]},
        }

    def _learn(self, pack: Pack, targets: float) -> tuple[float, float, dict[str, float]]:
        """Adds the gradient of a pack. Returns (drift, number of clipped targets), summed over its targets, and the
        largest differences between the log-probabilities of trainer and generator at equal weights.

        Drift estimates KL(generator's weights || policy's weights) as ratio - 1 - log(ratio) per token.
        """
        batch = self.collate(pack)
        places = torch.from_numpy(pack.weights > 0).nonzero()[:, 0]
        wanted = batch, pack, places - 1, batch["input_ids"][0][places]
        now = self.network.logprobs(*wanted)
        before = torch.tensor([value for meta in pack.meta for value in meta["logprobs"]])[places]
        lengths = torch.tensor(pack.lengths)
        advantage = torch.tensor([meta["advantage"] for meta in pack.meta]).repeat_interleave(lengths)[places]
        gain = clipped_gain(now, before, advantage, low=CLIP, high=CLIP)
        (gain.losses.sum() / targets).backward()
        with torch.no_grad():
            current = torch.tensor([meta["current"] for meta in pack.meta]).repeat_interleave(lengths)[places]
            found = {"mismatch": _largest((now - before)[current])}
            if self.compare:
                found["mismatch_torch"] = _largest((NativeNetwork(self.policy).logprobs(*wanted) - before)[current])
        return float(gain.drift.sum()), float(gain.clipped.sum()), found


def _largest(differences: Tensor) -> float:
    return float(differences.abs().max()) if len(differences) else 0.0


def measured(llm: LLM, count: int) -> list[float]:
    """Rewards of ``count`` new answers per prompt. All calls use the same seeds; training uses other seeds."""
    params = [SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=10_000_000 + i) for i in range(count)]
    outputs = llm.generate([prompt for prompt in PROMPTS for _ in params], params * len(PROMPTS))
    return [reward(output.outputs[0].text) for output in outputs]


class Checkpoints:
    """Checkpoints of a run: a model directory and the state of loop, optimiser and random numbers."""

    def __init__(self, root: Path, model_dir: Path, settings: dict[str, Any], at: Callable[[str], None]) -> None:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        self.store = CheckpointStore(root, at=at)
        self.files = ModelFiles(config=config, tokenizer_dir=model_dir, dtype=torch.float32)
        self.settings = settings
        self.newest = self.store.latest()
        self.state = None if self.newest is None else load_state(self.newest)
        if self.state is not None and self.state["settings"] != settings:
            raise ConfigError(
                f"{self.newest} was written with {self.state['settings']}, not {settings}; give the same settings, or"
                " another --output"
            )

    def save(self, loop: AsyncLoop, learner: GRPO, before: list[float], figures: list[Any]) -> None:
        """Write a checkpoint. Running rollouts end first, so that the state has complete rollouts only."""
        loop.drain()
        state = {
            "settings": self.settings,
            "loop": loop.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "random": learner.random.getstate(),
            "before": before,
            "figures": figures,
        }
        self.store.save(len(figures), state, learner.policy, self.files)

    def resume(self, loop: AsyncLoop, learner: GRPO) -> tuple[list[float], list[Any]]:
        """Restore the newest checkpoint. Returns (rewards before training, measurements of the steps)."""
        assert self.state is not None
        learner.optimizer.load_state_dict(self.state["optimizer"])
        learner.random.setstate(self.state["random"])
        learner.llm.update_weights(learner.weights(), len(self.state["figures"]))
        loop.load_state_dict(self.state["loop"])
        return self.state["before"], self.state["figures"]


def train(
    model_dir: Path,
    *,
    steps: int,
    seed: int,
    shuffle: bool,
    rate: float = 2e-4,
    bound: int = 1,
    forward: Literal["exact", "torch"] = "exact",
    compare: bool = False,
    output: Path | None = None,
    every: int = 4,
    at: Callable[[str], None] = lambda _point: None,
) -> dict[str, Any]:
    """Trains. Returns the rewards before and after, the rise in standard errors, and the measurements of each step.

    With ``output``, a checkpoint is written there after ``every`` steps and at the end, and a run begins with the
    newest one. ``at`` is called after each step with ``step``, and after each stage of a save; tests use it.
    """
    torch.manual_seed(seed)
    llm = LLM(model_dir, dtype="float32", num_kv_blocks=256, max_num_seqs=len(PROMPTS) * GROUP)
    settings = {"seed": seed, "shuffle": shuffle, "rate": rate, "bound": bound, "every": every, "forward": forward}
    saved = None if output is None else Checkpoints(output, model_dir, settings, at)
    newest = None if saved is None else saved.newest
    learner = GRPO(newest or model_dir, llm, rate=rate, shuffle=shuffle, seed=seed, forward=forward)
    learner.compare = compare
    batch = len(PROMPTS) * GROUP
    gate = StalenessGate(bound, batch, "wait")
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(GROUP)]
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=1_000_000 * seed)
    loop = AsyncLoop(
        RolloutGenerator(llm, params), learner.step, gate, itertools.cycle(prompts), weights=learner.weights
    )
    if saved is not None and newest is not None:
        before, figures = saved.resume(loop, learner)
    else:
        before, figures = measured(llm, 32), []
    while len(figures) < steps:
        figures.append(loop.step())
        at("step")
        if saved is not None and (len(figures) % every == 0 or len(figures) == steps):
            saved.save(loop, learner, before, figures)
    after = measured(llm, 32)
    error = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(after) / len(after))
    means = [statistics.fmean(before), statistics.fmean(after)]
    return {
        "before": means[0],
        "after": means[1],
        "standard_errors": (means[1] - means[0]) / error,
        "stalest": loop.stats().gate.staleness_max,
        "steps": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("chairlift/assets"), help="model directory")
    parser.add_argument("--steps", type=int, default=12, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rollouts")
    parser.add_argument(
        "--bound",
        type=int,
        default=1,
        help="maximum number of versions between the weights of a rollout and those that it trains",
    )
    parser.add_argument("--forward", choices=("exact", "torch"), default="exact", help="what computes forward passes")
    parser.add_argument("--compare", action="store_true", help="also measure the mismatch of PyTorch's forward pass")
    parser.add_argument("--shuffle", action="store_true", help="assign rewards to random answers")
    parser.add_argument("--output", type=Path, help="directory of checkpoints, from which the same command resumes")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    args = parser.parse_args()
    result = train(
        args.model,
        steps=args.steps,
        seed=args.seed,
        shuffle=args.shuffle,
        bound=args.bound,
        forward=args.forward,
        compare=args.compare,
        output=args.output,
        every=args.every,
    )
    if args.json:
        print(json.dumps(result))
        return
    for number, step in enumerate(result["steps"], 1):
        print(f"step {number:2}: " + ", ".join(f"{name} {value:.3g}" for name, value in step.items()))
    print(
        f"reward {result['before']:.3f} before, {result['after']:.3f} after: {result['standard_errors']:+.1f} standard "
        f"errors; rollouts were at most {result['stalest']} versions old"
    )


if __name__ == "__main__":
    main()
