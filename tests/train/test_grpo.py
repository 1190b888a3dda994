"""The worked example of ``AsyncLoop``: a reward rises because of the rewards, and by nothing else."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train import PackStream, Rollout
from chairlift_train.checkpoint import CheckpointStore
from chairlift_train.varlen import VarlenContext
from tests.train import grpo_run

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "chairlift" / "assets"


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    return grpo_run.example()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_the_reward_rises_and_does_not_when_rewards_are_shuffled(grpo: ModuleType, seed: int) -> None:
    learnt = grpo.train(MODEL, steps=10, seed=seed, shuffle=False)
    assert learnt["standard_errors"] >= 4
    assert 0 < learnt["stalest"] <= 1
    assert max(step["drift"] for step in learnt["steps"]) > 0
    shuffled = grpo.train(MODEL, steps=10, seed=seed, shuffle=True)
    assert shuffled["standard_errors"] < 4 < learnt["standard_errors"] - shuffled["standard_errors"]


@pytest.mark.nightly
def test_a_run_killed_at_20_random_points_ends_with_the_same_bits(tmp_path: Path) -> None:
    rng = random.Random("grpo")
    most = {"rollout": 60, "step": 3}
    deaths: Counter[str] = Counter()

    def go_on(folder: str, point: str, count: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.train.grpo_run", str(tmp_path / folder), point, str(count)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    while deaths.total() < 20:
        point = rng.choice(grpo_run.POINTS)
        done = go_on("killed", point, rng.randint(1, most.get(point, 1)))
        assert done.returncode == -signal.SIGKILL, f"{point}: {done.stderr}"
        deaths[point] += 1
    assert len(deaths) >= 4
    newest = CheckpointStore(tmp_path / "killed").latest()
    assert newest is not None and newest.name < f"step-{grpo_run.STEPS:08d}"
    results = []
    for folder in ("killed", "whole"):
        done = go_on(folder, "never", 0)
        assert done.returncode == 0, done.stderr
        results.append(done.stdout)
    assert results[0] == results[1]
    mine, theirs = (tmp_path / folder / f"step-{grpo_run.STEPS:08d}" for folder in ("killed", "whole"))
    for name in ("model.safetensors", "training/state.safetensors"):
        a, b = load_file(mine / name), load_file(theirs / name)
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
    assert (mine / "training" / "state.json").read_text() == (theirs / "training" / "state.json").read_text()


def test_the_gradient_of_packed_rollouts_is_that_of_the_objective(grpo: ModuleType) -> None:
    """Against the definition, one rollout at a time: min(ratio * A, clip(ratio) * A), a mean over all tokens."""
    policy: Any = load_model(MODEL, read_config(MODEL), torch.float32, weight_format=PLAIN)
    policy.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    rollouts, advantages = [], [1.0, -0.5, 2.0]
    for index, (prompt, length) in enumerate(((3, 5), (6, 2), (2, 7))):
        ids = torch.randint(2, 900, (prompt + length,), generator=generator)
        with torch.no_grad():
            logprobs = policy.compute_logits(policy(ids, torch.arange(len(ids)), VarlenContext((0, len(ids)))))
            logprobs = logprobs.log_softmax(-1)[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]
        noise = 0.3 * torch.randn(length, generator=generator)  # the generator's weights were older
        rollouts.append(Rollout(index, ids[:prompt].tolist(), ids[prompt:].tolist(), (logprobs + noise).tolist()))
    targets = sum(len(rollout.tokens) for rollout in rollouts)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        ids = torch.tensor([*rollout.prompt, *rollout.tokens])
        logits = policy.compute_logits(policy(ids, torch.arange(len(ids)), VarlenContext((0, len(ids)))))
        rows = logits[len(rollout.prompt) - 1 : -1]
        now = -functional.cross_entropy(rows, ids[len(rollout.prompt) :], reduction="none")
        ratio = (now - torch.tensor(rollout.logprobs)).exp()
        clipped = ratio.clamp(0.8, 1.2)
        (-torch.minimum(ratio * advantage, clipped * advantage).sum() / targets).backward()
    expected = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    assert any(p.abs().max() > 0 for p in expected.values())
    policy.zero_grad(set_to_none=True)
    learner = grpo.GRPO.__new__(grpo.GRPO)
    learner.policy, learner.network, learner.collate = policy, grpo.NativeNetwork(policy), grpo.PackCollator()
    more = [{"advantage": advantage, "current": True} for advantage in advantages]
    rows = [rollout.sequence(1.0) | each for rollout, each in zip(rollouts, more, strict=True)]
    for pack in PackStream(rows, capacity=16):
        learner._learn(pack, targets)
    for name, value in expected.items():
        difference = (policy.get_parameter(name).grad - value).norm()
        assert difference <= 3e-6 * value.norm() + 1e-9, name
