"""``chairlift train`` over sources that change: noticed, replayed, and the same run after it was stopped anywhere."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chairlift.errors import ConfigError
from chairlift_train.config import TrainConfig
from chairlift_train.drift import DriftSampler
from chairlift_train.run import Outcome, train
from chairlift_train.trainer import Trainer, TrainingStepResult
from tests.train import tiny_run

CHANGE = 500
STEPS = 76


def write_stream(path: Path) -> Path:
    """Words that count up by one, and from number :data:`CHANGE` on by seven, among other words."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(2 * CHANGE):
            first, stride, base = rng.randrange(30), (1 if number < CHANGE else 7), (0 if number < CHANGE else 30)
            ids = [base + (first + stride * place) % 30 for place in range(rng.randint(6, 20))]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return path


def settings(folder: Path, name: str) -> TrainConfig:
    return TrainConfig.from_mapping(
        tiny_run.settings(folder, steps=STEPS, learning_rate=0.01, dropout=0.0)
        | {
            "data": {"files": [str(folder / "data.jsonl")], "shuffle": False, "epochs": 1},
            "packing": {"capacity": 128, "pool": 8, "step": "sequences:12"},
            "drift": {"replay": 0.25, "reservoir": 200, "detector": "page_hinkley"},
            "checkpoints": {"every": 1000},
            "output": str(folder / name),
        }
    )


def run(config: TrainConfig, stop: int = 0) -> tuple[Outcome, DriftSampler]:
    samplers: list[DriftSampler | None] = []

    def on_step(result: TrainingStepResult, trainer: Trainer) -> None:
        trainer.stop_requested = result.step == stop
        samplers[:] = [trainer.drift]

    outcome = train(config, on_step=on_step)
    assert isinstance(samplers[0], DriftSampler)
    return outcome, samplers[0]


def test_a_change_is_noticed_by_the_loss_and_the_old_is_replayed(tmp_path: Path) -> None:
    write_stream(tmp_path / "data.jsonl")
    outcome, sampler = run(settings(tmp_path, "whole"))
    (event,) = sampler.events
    assert CHANGE < event.drawn < CHANGE + 350
    assert event.after > event.before + 0.5
    stats = sampler.stats()
    since = stats["drawn"] - event.drawn
    assert 0.15 * since < stats["replayed"] < 0.35 * since
    assert stats["old"]["data@0"]["loss"] < 1.0, "what is replayed is still known"
    assert max(int(item["input_ids"].max()) for _, item in sampler._old["data@0"].items) < 30
    config = settings(tmp_path, "stopped")
    assert not run(config, stop=70)[0].finished
    resumed, again = run(config)
    assert again.events == sampler.events
    mine, theirs = (load_file(each.directory / "training" / "state.safetensors") for each in (outcome, resumed))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_losses_are_those_of_each_sequence_alone(tmp_path: Path) -> None:
    """Several sequences share a pack, prompts are not learnt, and a sequence without a target has no loss."""
    tiny_run.write_records(tmp_path / "data.jsonl")
    told: dict[int, float] = {}

    class Listening(DriftSampler):
        def observe(self, of: Any, loss: Any, targets: Any = None) -> None:
            told.update(zip(of, loss, strict=True))
            assert list(targets) == [sum(weight > 0 for weight in items[number]["loss_weight"]) for number in of]

    items: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3, 4, 5], "loss_weight": [0, 0, 0, 1, 1]},
        {"input_ids": [9]},
        {"input_ids": [7, 8, 9, 10], "loss_weight": [0, 1, 0.5, 0]},
    ]
    from chairlift_train.stream import PackStream
    from tests.train.test_trainer import config, one_step, tiny_model

    sampler = Listening({"a": items})
    stream = PackStream(sampler, 1000, step="sequences:3")
    next(Trainer(tiny_model(), config(), stream, drift=sampler).run())
    assert told.keys() == {0, 2}
    for number, item in ((0, items[0]), (2, items[2])):
        mask = [int(weight > 0) for weight in item["loss_weight"]]
        alone = one_step(tiny_model(), [{"input_ids": item["input_ids"], "completion_mask": mask}])[1].loss
        assert told[number] == pytest.approx(alone, rel=1e-6)


def test_the_chosen_items_do_not_depend_on_an_interruption() -> None:
    """A source that is asked to stop while it waits for data is asked again after the resume."""

    class Waiting:
        def __init__(self, stop_at: int) -> None:
            self.at, self.stop_at = 0, stop_at

        def __iter__(self) -> Waiting:
            return self

        def __next__(self) -> list[int]:
            if self.at == self.stop_at:
                self.stop_at = -1
                raise InterruptedError
            self.at += 1
            return [1] * (3 if self.at < 150 else 30)

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def make(stop_at: int) -> DriftSampler:
        return DriftSampler({"a": Waiting(stop_at), "b": Waiting(-1)}, signal="length", replay=0.3)

    def some(sampler: DriftSampler, count: int) -> list[tuple[str, int]]:
        return [(item["source"], len(item["input_ids"])) for item, _ in zip(sampler, range(count), strict=False)]

    expected = some(make(-1), 600)
    assert any("@" in source for source, _ in expected)
    for stop_at in (0, 10, 200):
        first = make(stop_at)
        given = []
        with contextlib.suppress(InterruptedError):
            for item in first:
                given.append((item["source"], len(item["input_ids"])))
        assert 0 <= len(given) < 600
        second = make(-1)
        second.load_state_dict(first.state_dict())
        assert given + some(second, 600 - len(given)) == expected


def test_follow_waits_for_one_source(tmp_path: Path) -> None:
    files = {"a": ["a.jsonl"], "b": ["b.jsonl"]}
    data = {"files": files, "access": "follow", "shuffle": False}
    with pytest.raises(ConfigError, match="waits for one source, but files has 2"):
        TrainConfig.from_mapping(tiny_run.settings(tmp_path) | {"data": data})
