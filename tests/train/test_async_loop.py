"""The asynchronous loop: over a simulated generator on a virtual clock, and over an engine."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.errors import ConfigError
from chairlift_train.async_loop import AsyncLoop, Rollout
from chairlift_train.rollout import RolloutGenerator
from chairlift_train.sequences import read_sample
from chairlift_train.staleness import Selection, StalenessGate, StalenessPolicy
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model
from tests.train.simulated_rollouts import BATCH, Bandit, Clock, SimulatedGenerator, simulate


@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_overlapping_gives_half_as_much_throughput_again(policy: StalenessPolicy) -> None:
    synchronous = simulate(0, policy)[0]
    for bound in (1, 2):
        seconds, _, loop = simulate(bound, policy)
        stats = loop.stats().gate
        assert synchronous / seconds >= 1.5, f"bound {bound}: {synchronous / seconds:.2f}"
        assert stats.staleness_max <= bound
        assert stats.staleness_p50 >= 1, "it was not asynchronous"
        assert stats.dropped == 0 or policy == "drop"


@pytest.mark.full
@pytest.mark.parametrize("policy", ["drop", "wait", "reweight"])
def test_an_overlapping_loop_learns_as_well_as_one_in_step(policy: StalenessPolicy) -> None:
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


def test_each_step_publishes_its_weights() -> None:
    generator = Echo()
    loop = echo_loop([[i + 1] for i in range(6)], generator)
    assert loop.run(10) == [[[1], [2]], [[3], [4]], [[5], [6]]], "three batches, then the prompts have ended"
    assert generator.given == [("weights 1", 1), ("weights 2", 2), ("weights 3", 3)]
    with pytest.raises(StopIteration):
        loop.step()


class Quick(Echo):
    """Has ended them all, whenever it is asked."""

    def poll(self, *, wait: bool) -> list[Rollout]:
        ended, self.queue = self.queue, []
        return ended


def test_finished_rollouts_are_not_waited_for() -> None:
    loop = echo_loop([[i + 1] for i in range(12)], Quick())
    assert len(loop.run(10)) == 6
    assert loop.stats().num_waits == 1, "for the first rollouts"


def test_failed_rollouts_are_passed_and_counted() -> None:
    loop = echo_loop([[1], [0], [2], [0], [3], [4], [5]], Echo())
    assert loop.run(10) == [[[1], [2]], [[3], [4]]]
    stats = loop.stats()
    assert (stats.num_failed, stats.gate.cancelled, stats.gate.waiting, stats.num_steps) == (2, 2, 1, 2)


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_batch_whose_step_failed_is_trained_on_in_the_next(bound: int, resumed: bool) -> None:
    prompts, failing = [[i + 1] for i in range(8)], iter([True, False, True, True])
    generator = Quick()

    def make() -> AsyncLoop:
        loop = echo_loop(prompts, generator, bound)
        train = loop._train_step

        def sometimes(selection: Selection) -> Any:
            if next(failing, False):
                raise RuntimeError("out of memory")
            return train(selection)

        loop._train_step = sometimes
        return loop

    loop, trained, failures = make(), [], 0
    while len(trained) < 4:
        try:
            trained.append(loop.step())
        except RuntimeError:
            failures += 1
            if resumed:
                state = loop.state_dict()
                generator.queue.clear()
                loop = make()
                loop.load_state_dict(state)
    assert trained == [[[1], [2]], [[3], [4]], [[5], [6]], [[7], [8]]]
    assert (failures, loop.stats().num_steps, loop.stats().gate.consumed) == (3, 4, 8)
    assert sum(loop.stats().gate.staleness.values()) == 8


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_weights_that_failed_to_be_published_are_published_before_the_next_batch(bound: int, resumed: bool) -> None:
    class Away(Quick):
        failing = iter([True, False, True, True])

        def update_weights(self, source: Any, version: int) -> None:
            if next(self.failing, False):
                raise ConnectionError("away")
            super().update_weights(source, version)

    prompts, generator, trained = [[i + 1] for i in range(8)], Away(), []

    def make() -> AsyncLoop:
        loop = echo_loop(prompts, generator, bound)
        loop._train_step = lambda selection: trained.append([list(rollout.prompt) for rollout in selection.samples])
        return loop

    loop, failures = make(), 0
    while len(generator.given) < 4:
        try:
            loop.step()
        except ConnectionError:
            failures += 1
            if resumed:
                state = loop.state_dict()
                generator.queue.clear()
                loop = make()
                loop.load_state_dict(state)
    assert trained == [[[1], [2]], [[3], [4]], [[5], [6]], [[7], [8]]]
    assert [version for _, version in generator.given] == [1, 2, 3, 4]
    assert (failures, loop.stats().num_steps, loop.stats().gate.version) == (3, 4, 4)


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
    with pytest.raises(ConfigError, match="this loop has already started"):
        second.load_state_dict(first.state_dict())


def test_a_drained_loop_has_complete_rollouts_only() -> None:
    prompts, generator = [[i + 1] for i in range(12)], Echo()
    whole = echo_loop(prompts, Echo()).run(6)
    loop = echo_loop(prompts, generator)
    before = loop.run(2)
    loop._refill()
    running, admitted = len(loop.state_dict()["running"]), loop.stats().gate.running + loop.stats().gate.waiting
    assert running > 0
    loop.drain()
    state = loop.state_dict()
    assert state["running"] == [] and generator.queue == []
    assert len(state["gate"]["waiting"]) == admitted, "a drained loop starts no rollouts"
    assert before + loop.run(4) == whole


def test_figures_go_on_with_a_state_and_prompts_that_are_gone_are_missed() -> None:
    prompts = [[1], [0], [2], [3], [4], [5]]
    first = echo_loop(prompts, Echo())
    first.run(1)
    second, third = echo_loop(prompts, Echo()), echo_loop(prompts[:2], Echo())
    second.load_state_dict(first.state_dict())
    assert second.stats() == first.stats()
    with pytest.raises(ConfigError, match="ended after 2, but 5 had been read"):
        third.load_state_dict(first.state_dict())


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 rollout, got 0"):
        AsyncLoop(Echo(), len, StalenessGate(1, 1), [], weights=dict, concurrency=0)  # type: ignore[arg-type]
    gate = StalenessGate(0, 2)
    gate.admit(2)
    with pytest.raises(ConfigError, match="the gate is used elsewhere, too"):
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


def test_rollouts_that_end_during_other_calls_are_reported(model_dirs: list[Path]) -> None:
    llm = LLM(model_dirs[0], skip_tokenizer_init=True, num_kv_blocks=64, max_num_seqs=4, dtype="float32", threads=1)
    short, long = (
        RolloutGenerator(llm, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0), logprobs="raw")
        for count in (3, 60)
    )
    short.submit(0, [5, 6])
    long.submit(1, [5, 6])
    llm.generate([[7, 8]], SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0))  # an evaluation, say
    assert [rollout.ticket for rollout in long.poll(wait=True)] == [1]
    short.submit(2, [5])
    assert [rollout.ticket for rollout in short.poll(wait=True)] == [0]


def test_a_seed_that_leaves_its_range_is_reported_like_other_refusals(model_dirs: list[Path]) -> None:
    llm = LLM(model_dirs[0], skip_tokenizer_init=True, num_kv_blocks=64, max_num_seqs=4, dtype="float32", threads=1)
    generator = RolloutGenerator(llm, SamplingParams(max_tokens=2, seed=2**63 - 1))
    generator.submit(0, [5])
    generator.submit(1, [6])
    reported = {rollout.ticket: rollout.error for _ in range(2) for rollout in generator.poll(wait=True)}
    assert reported[0] == "" and "seed must be" in reported[1]


def test_every_rollout_has_a_seed_also_where_the_sum_would_be_none() -> None:
    asked: list[int | None] = []
    engine = SimpleNamespace(add_request=lambda prompt, params, stream: asked.append(params.seed))
    generator = RolloutGenerator(cast(LLM, fake_llm(engine=engine)), SamplingParams(seed=-4))
    for ticket in range(6):
        generator.submit(ticket, [5])
    assert asked == [-4, -3, -2, 0, 1, 2]


def test_a_rollout_is_one_answer(model_dirs: list[Path]) -> None:
    with pytest.raises(ConfigError, match="a rollout is one answer, got n=2; submit the prompt 2 times"):
        RolloutGenerator(None, SamplingParams(n=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        *({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 0.5}),
        *({"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}, {"allowed_token_ids": [1, 2]}),
    ],
)
def test_rollouts_of_another_distribution_than_their_log_probabilities_are_refused(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    llm = cast(LLM, fake_llm())
    with pytest.raises(ConfigError, match=f"drawn with {next(iter(given))}="):
        RolloutGenerator(llm, params)
    RolloutGenerator(llm, params, logprobs="raw")
    RolloutGenerator(llm, SamplingParams(top_k=-1, max_tokens=3, stop_token_ids=[4]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": 0.0}, "drawn with temperature=0.0"),
        ({"temperature": 0.7, "presence_penalty": 0.5}, "drawn with presence_penalty=0.5, but"),
        ({"top_p": 0.9}, "give top_k from 1 to 20"),
        ({"top_k": 21}, "got 21"),
    ],
)
def test_what_a_trainer_cannot_compute_again_is_refused(given: dict[str, Any], words: str) -> None:
    llm = cast(LLM, fake_llm("processed_logprobs"))
    with pytest.raises(ConfigError, match=words):
        RolloutGenerator(llm, SamplingParams(**given))
    RolloutGenerator(llm, SamplingParams(temperature=0.7, top_k=20, top_p=0.9))
    with pytest.raises(ConfigError, match="raw_logprobs"):
        RolloutGenerator(llm, SamplingParams(), logprobs="raw")


def fake_llm(mode: str = "raw_logprobs", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(logprobs_mode=mode)), **more)
