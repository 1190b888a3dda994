"""The asynchronous loop: over a simulated generator on a virtual clock, and over an engine."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.errors import ConfigError
from chairlift.rollout import RolloutGenerator
from chairlift.train.async_loop import AsyncLoop, Generator, Rollout
from chairlift.train.sequences import read_sample
from chairlift.train.staleness import Selection, StalenessGate, StalenessPolicy
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model

# -- a simulated generator, and something to learn -------------------------------------------------------------------

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
    """Decodes elsewhere, while the trainer computes: a step takes 10 ms and a little for each row it has.

    A rollout is as long as real ones are (log-normal, cut off), and its first token is an action of a bandit, drawn
    from the weights that there were when it began.
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
    """REINFORCE with truncated importance weights; action a pays a / ACTIONS, less noise."""

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
    """Seconds of a run, its final loss, and the loop."""
    clock = Clock()
    trainer = Bandit(clock, seed)
    generator: Generator = SimulatedGenerator(clock, seed + 1000)
    gate = StalenessGate(bound, BATCH, policy)
    loop = AsyncLoop(generator, trainer, gate, itertools.repeat([1, 2, 3]), weights=lambda: trainer.logits)
    losses = loop.run(steps)
    assert len(losses) == steps
    return clock.now, statistics.fmean(losses[-5:]), loop


@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_overlapping_is_worth_half_as_much_again(policy: StalenessPolicy) -> None:
    synchronous = simulate(0, policy)[0]
    for bound in (1, 2):
        seconds, _, loop = simulate(bound, policy)
        stats = loop.stats().gate
        assert synchronous / seconds >= 1.5, f"bound {bound}: {synchronous / seconds:.2f}"
        assert stats.staleness_max <= bound
        assert stats.staleness_p50 >= 1, "it was not asynchronous"
        assert stats.dropped == 0 or policy == "drop"


@pytest.mark.parametrize("policy", ["drop", "wait", "reweight"])
def test_it_learns_as_well_as_in_step(policy: StalenessPolicy) -> None:
    seeds = range(6)
    in_step = [simulate(0, policy, seed=seed)[1] for seed in seeds]
    for bound in (1, 2):
        losses = [simulate(bound, policy, seed=seed)[1] for seed in seeds]
        spread = math.sqrt(statistics.variance(in_step) + statistics.variance(losses))
        assert statistics.fmean(losses) - statistics.fmean(in_step) <= spread
        assert statistics.fmean(losses) < 0.35, "1 - 7/16 is where it begins"


def test_a_run_depends_on_its_seed_only() -> None:
    assert simulate(2, "wait", 20)[:2] == simulate(2, "wait", 20)[:2]
    assert simulate(2, "wait", 20)[:2] != simulate(2, "wait", 20, seed=1)[:2]


def test_concurrency_bounds_what_runs() -> None:
    clock = Clock()
    trainer, generator, most = Bandit(clock, 0), SimulatedGenerator(clock, 0), 0
    gate = StalenessGate(2, BATCH)

    def watched(selection: Selection) -> None:
        nonlocal most
        most = max(most, len(gate.running))
        trainer(selection)

    AsyncLoop(generator, watched, gate, itertools.repeat([1]), weights=lambda: trainer.logits, concurrency=10).run(10)
    assert 0 < most <= 10


# -- the loop itself -------------------------------------------------------------------------------------------------


class Echo:
    """Ends every rollout when it is polled; prompts that begin with 0 fail."""

    def __init__(self) -> None:
        self.version = 0
        self.given: list[tuple[Any, int]] = []
        self.queue: list[Rollout] = []

    def submit(self, ticket: int, prompt: Sequence[int]) -> None:
        error = "" if prompt[0] else "it is bad"
        self.queue.append(
            Rollout(ticket, prompt, list(prompt), [-0.5] * len(prompt), [self.version] * len(prompt), error)
        )

    def poll(self, *, wait: bool) -> list[Rollout]:
        ended, self.queue = (self.queue[:1], self.queue[1:]) if wait else ([], self.queue)
        return ended

    def update_weights(self, source: Any, version: int) -> None:
        self.given.append((source, version))
        self.version = version


def echo_loop(prompts: Sequence[Sequence[int]], generator: Echo, bound: int = 1) -> AsyncLoop:
    seen: Iterator[int] = itertools.count(1)

    def train(selection: Selection) -> list[list[int]]:
        return [list(rollout.prompt) for rollout in selection.samples]

    return AsyncLoop(
        generator, train, StalenessGate(bound, 2, "wait"), prompts, weights=lambda: f"weights {next(seen)}"
    )


def test_each_step_publishes_what_it_made() -> None:
    generator = Echo()
    loop = echo_loop([[i + 1] for i in range(6)], generator)
    assert loop.run(10) == [[[1], [2]], [[3], [4]], [[5], [6]]], "three batches, then the prompts have ended"
    assert generator.given == [("weights 1", 1), ("weights 2", 2), ("weights 3", 3)]
    with pytest.raises(StopIteration):
        loop.step()


def test_failed_rollouts_are_passed_and_counted() -> None:
    loop = echo_loop([[1], [0], [2], [0], [3], [4], [5]], Echo())
    assert loop.run(10) == [[[1], [2]], [[3], [4]]]
    stats = loop.stats()
    assert (stats.num_failed, stats.gate.cancelled, stats.gate.waiting, stats.num_steps) == (2, 2, 1, 2)


@pytest.mark.parametrize("steps", range(5))
def test_a_resumed_loop_trains_on_the_same(steps: int) -> None:
    prompts = [[i + 1] for i in range(12)]
    whole = echo_loop(prompts, Echo()).run(6)
    first = echo_loop(prompts, Echo())
    before = first.run(steps)
    generator = Echo()
    generator.version = steps
    second = echo_loop(prompts, generator)
    second.load_state_dict(first.state_dict())
    assert before + second.run(6 - steps) == whole
    with pytest.raises(ConfigError, match="this one is under way"):
        second.load_state_dict(first.state_dict())


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="at least 1 rollout, got 0"):
        AsyncLoop(Echo(), len, StalenessGate(1, 1), [], weights=dict, concurrency=0)  # type: ignore[arg-type]
    gate = StalenessGate(0, 2)
    gate.admit(2)
    with pytest.raises(ConfigError, match="the gate is used by somebody else"):
        AsyncLoop(Echo(), lambda selection: None, gate, [[1]], weights=dict).step()


def test_a_rollout_is_a_sequence_to_pack() -> None:
    rollout = Rollout(3, (7, 8), (9, 10, 11), (-1.0, -2.0, -3.0), (4, 4, 5))
    sample = read_sample(rollout.sequence(0.5))
    assert sample.tokens.tolist() == [7, 8, 9, 10, 11]
    assert sample.weights is not None
    assert sample.weights.tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert sample.meta == {"logprobs": [0.0, 0.0, -1.0, -2.0, -3.0], "versions": [0, 0, 4, 4, 5]}


# -- an engine as the generator -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("models")
    return [tiny_hf_model(where, "llama", seed=seed, std=0.1) for seed in (0, 1)]


def test_an_engine_generates_with_the_weights_it_says(model_dirs: list[Path]) -> None:
    llm = LLM(model_dirs[0], skip_tokenizer_init=True, num_kv_blocks=64, max_num_seqs=4, dtype="float32", threads=1)
    generator = RolloutGenerator(
        llm,
        SamplingParams(temperature=1.0, seed=5, max_tokens=60, stop_token_ids=list(range(2, 12))),
        in_flight="recompute",
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 128) for _ in range(rng.randint(1, 40))] for _ in range(40)]
    prompts[3] = [999]  # no such token
    collected: list[Rollout] = []
    gate = StalenessGate(2, 6, "drop")
    loop = AsyncLoop(
        generator,
        lambda selection: collected.extend(selection.samples),
        gate,
        prompts,
        weights=lambda: model_dirs[(gate.version + 1) % 2],
    )
    assert len(loop.run(10)) == 6
    stats = loop.stats()
    assert stats.num_failed == 1
    assert stats.gate.staleness_max <= 2
    models = [hf_model(each) for each in model_dirs]
    assert any(len(set(rollout.versions)) > 1 for rollout in collected), "none spans an update"
    for rollout in collected:
        tokens = [*rollout.prompt, *rollout.tokens]
        of = [hf_logits(model, tokens[:-1]).log_softmax(-1).numpy() for model in models]
        places = range(len(rollout.prompt) - 1, len(tokens) - 1)
        expected = [
            of[version % 2][place, token]
            for version, place, token in zip(rollout.versions, places, rollout.tokens, strict=True)
        ]
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-3)


def test_a_rollout_is_one_answer(model_dirs: list[Path]) -> None:
    with pytest.raises(ConfigError, match="a rollout is one answer, got n=2; submit the prompt 2 times"):
        RolloutGenerator(None, SamplingParams(n=2))  # type: ignore[arg-type]
