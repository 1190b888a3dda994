"""A simulated generator of rollouts and a simple learner, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Sequence

from chairlift_train.async_loop import AsyncLoop, Generator, Rollout
from chairlift_train.staleness import Selection, StalenessGate, StalenessPolicy

ACTIONS = 8
BATCH, SLOTS = 32, 64
TRAIN_SECONDS = 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    exps = [math.exp(logit - top) for logit in logits]
    return [each / sum(exps) for each in exps]


class SimulatedGenerator:
    """Generates tokens while the trainer computes. A step takes 10 ms plus a little for each row.

    Rollouts have realistic lengths (log-normal, cut off). The first token is an action of a bandit, drawn from the
    learner's weights at the start of the rollout.
    """

    def __init__(self, clock: Clock, seed: int) -> None:
        self.clock = clock
        self.random = random.Random(seed)
        self.at = 0.0
        self.steps = 0
        self.weights, self.version = [0.0] * ACTIONS, 0
        self.queue: list[tuple[int, Sequence[int]]] = []
        self.rows: list[tuple[int, int, Rollout]] = []  # (last step, ticket, rollout)
        self.ended: list[Rollout] = []

    def submit(self, ticket: int, prompt: Sequence[int]) -> None:
        self.queue.append((ticket, prompt))

    def poll(self, *, wait: bool) -> list[Rollout]:
        self.run_until(self.clock.now)
        while wait and not self.ended and (self.rows or self.queue):
            self.run_until(self.at + 0.01)
        self.clock.now = max(self.clock.now, self.at if wait else 0.0)
        ended, self.ended = self.ended, []
        return ended

    def update_weights(self, source: list[float], version: int) -> None:
        self.run_until(self.clock.now)
        self.weights, self.version = list(source), version

    def run_until(self, when: float) -> None:
        while self.at < when:
            self.begin()
            if not self.rows:
                self.at = when
                return
            self.steps += 1
            self.at += 0.010 + 0.00005 * len(self.rows)
            while self.rows and self.rows[0][0] <= self.steps:
                self.ended.append(heapq.heappop(self.rows)[2])

    def begin(self) -> None:
        while self.queue and len(self.rows) < SLOTS:
            ticket, prompt = self.queue.pop(0)
            chances = softmax(self.weights)
            action = self.random.choices(range(ACTIONS), chances)[0]
            length = min(1024, int(self.random.lognormvariate(math.log(150), 0.8)) + 1)
            rollout = Rollout(
                ticket, prompt, [action] * length, [math.log(chances[action])] * length, [self.version] * length
            )
            heapq.heappush(self.rows, (self.steps + length, ticket, rollout))


class Bandit:
    """Learner: REINFORCE with truncated importance weights. The reward of action a is a / ACTIONS plus noise."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.clock = clock
        self.random = random.Random(seed)
        self.logits = [0.0] * ACTIONS

    def __call__(self, selection: Selection) -> float:
        self.clock.now += TRAIN_SECONDS
        actions = [rollout.tokens[0] for rollout in selection.samples]
        rewards = [action / ACTIONS + self.random.gauss(0, 0.2) for action in actions]
        mean = statistics.fmean(rewards)
        chances = softmax(self.logits)
        gradient, total = [0.0] * ACTIONS, sum(selection.weights)
        for rollout, reward, weight in zip(selection.samples, rewards, selection.weights, strict=True):
            action = rollout.tokens[0]
            ratio = min(2.0, chances[action] / math.exp(rollout.logprobs[0]))
            for other in range(ACTIONS):
                gradient[other] += weight * ratio * (reward - mean) * ((other == action) - chances[other]) / total
        self.logits = [x + 4.0 * selection.lr_scale * g for x, g in zip(self.logits, gradient, strict=True)]
        return 1.0 - sum(chance * a / ACTIONS for a, chance in enumerate(softmax(self.logits)))


def simulate(bound: int, policy: StalenessPolicy, steps: int = 60, seed: int = 0) -> tuple[float, float, AsyncLoop]:
    """Simulate training. Returns (seconds of the simulated run, final loss, loop)."""
    clock = Clock()
    trainer = Bandit(clock, seed)
    generator: Generator = SimulatedGenerator(clock, seed + 1000)
    gate = StalenessGate(bound, BATCH, policy)
    loop = AsyncLoop(generator, trainer, gate, itertools.repeat([1, 2, 3]), weights=lambda: trainer.logits)
    losses = loop.run(steps)
    assert len(losses) == steps
    return clock.now, statistics.fmean(losses[-5:]), loop
