"""Evaluation is an exact mean over tokens, changes nothing, and the best checkpoint stays."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train.config import TrainConfig
from chairlift_train.evaluation import Evaluation, EvaluationResult
from chairlift_train.run import Outcome, train
from chairlift_train.trainer import Trainer, TrainingStepResult
from tests.train import tiny_run
from tests.train.test_trainer import config, examples, one_by_one, tiny_model


class Killed(Exception):
    pass


def settings(folder: Path, **sections: Any) -> TrainConfig:
    raw = tiny_run.settings(folder)
    files = {name: [str(folder / f"{name}.jsonl")] for name in ("short", "long")}
    raw["data"] = {**raw["data"], "eval_files": files, **sections.pop("data", {})}
    return TrainConfig.from_mapping(raw | sections)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_run.write_records(tmp_path / "data.jsonl")
    tiny_run.write_records(tmp_path / "short.jsonl", 3, seed=1)
    tiny_run.write_records(tmp_path / "long.jsonl", 20, seed=2)
    return tmp_path


def run(config: TrainConfig, stop: int = -1) -> tuple[Outcome, list[EvaluationResult]]:
    found: list[EvaluationResult] = []

    def on_step(result: TrainingStepResult, _trainer: Trainer) -> None:
        if result.step == stop:
            raise Killed

    return train(config, on_step=on_step, on_evaluation=found.append), found


@pytest.mark.parametrize(
    ("overflow", "told"),
    [
        ("drop", "leave out 2 sequences .* cut off 0 tokens"),
        ("truncate", "leave out 1 .* cut off 10"),
        ("split", "leave out 0 .* cut off 4"),
    ],
)
def test_sequences_that_do_not_fit_are_told(
    overflow: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("chairlift"), "propagate", True)  # a command line sets it to False
    rows = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"input_ids": [*range(1, 9)], "completion_mask": [0] + [1] * 7},
        {"input_ids": [*range(1, 7)], "completion_mask": [0] * 5 + [1]},
    ]
    Evaluation({"a": lambda: rows}, capacity=4, overflow=overflow).check()
    assert re.search(told, " ".join(caplog.messages))
    caplog.clear()
    Evaluation({"a": lambda: rows}, capacity=8, overflow=overflow).check()
    assert not caplog.messages


@pytest.mark.parametrize("capacity", [40, 64, 1000])
def test_the_loss_is_that_of_the_sequences_one_by_one(capacity: int) -> None:
    data = {"a": examples(5, seed=1), "b": examples(11, seed=2)}
    trainer = Trainer(tiny_model(), config(dropout=0.5, label_smoothing=0.3, reduce="sequence"))
    before = torch.get_rng_state()
    evaluation = Evaluation({name: lambda rows=rows: rows for name, rows in data.items()}, capacity=capacity)
    evaluation.check()
    result = evaluation.run(trainer)
    assert trainer.model.training and torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    for name, rows in {**data, "total": [*data["a"], *data["b"]]}.items():
        row = result.total if name == "total" else result.sources[name]
        expected, _ = one_by_one(tiny_model(), rows, "token")
        assert row.loss == pytest.approx(expected, rel=1e-6)
        assert row.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
        assert row.targets == sum(sum(each["completion_mask"]) for each in rows)
    mean_of_means = (result.sources["a"].loss + result.sources["b"].loss) / 2
    assert abs(mean_of_means / result.total.loss - 1) > 1e-4, "the sources are too much alike to tell"


def test_each_checkpoint_is_evaluated_and_training_is_the_same_as_without(folder: Path) -> None:
    outcome, found = run(settings(folder))
    assert [result.step for result in found] == [2, 4, 6, 8, 10, 12]
    lines = (folder / "out" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [result.as_dict() for result in found]
    best = min(found, key=lambda result: result.total.loss)
    assert outcome.best == (best.step, best.total.loss)
    plain, none = run(settings(folder, data={"eval_files": []}, output=str(folder / "plain")))
    assert not none and plain.best is None and plain.last == outcome.last
    mine, theirs = (
        load_model(each.directory, read_config(each.directory), torch.float32, weight_format=PLAIN)
        for each in (outcome, plain)
    )
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_the_best_checkpoint_stays_however_many_follow(folder: Path) -> None:
    """The learning rate rises until the model forgets: the first checkpoint is the best."""
    training = {"steps": 12, "warmup_steps": 12, "learning_rate": 1.0, "max_grad_norm": None}
    outcome, found = run(settings(folder, training=training))
    step, loss = outcome.best or (-1, math.nan)
    assert step < 10 and loss == min(result.total.loss for result in found) < found[-1].total.loss
    root = folder / "out"
    assert (root / "best").resolve() == (root / f"step-{step:08d}").resolve()
    assert {path.name for path in root.glob("step-*")} == {f"step-{step:08d}", "step-00000010", "step-00000012"}
    model = load_model(root / "best", read_config(root / "best"), torch.float32, weight_format=PLAIN)
    trainer = Trainer(model, config())
    again = Evaluation({"all": lambda: rows(folder)}, capacity=64).run(trainer)
    assert again.total.loss == pytest.approx(loss, rel=1e-5)


def rows(folder: Path) -> list[Any]:
    texts = [(folder / f"{name}.jsonl").read_text() for name in ("short", "long")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


@pytest.mark.parametrize("stop", [3, 7, 10, 11])
def test_a_run_that_was_killed_goes_on_with_the_same_evaluations(folder: Path, stop: int) -> None:
    whole, expected = run(settings(folder))
    part = settings(folder, output=str(folder / "part"))
    with pytest.raises(Killed):
        run(part, stop)
    outcome, _ = run(part)
    assert outcome.best == whole.best and outcome.last == whole.last
    lines = (folder / "part" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [result.as_dict() for result in expected]
    assert (folder / "part" / "best").resolve().name == f"step-{(whole.best or (0, 0))[0]:08d}"


def test_data_that_cannot_be_evaluated_is_refused_before_anything_is_computed(folder: Path) -> None:
    for content, message in (
        ('{"input_ids": [1, 2], "loss_weight": [0, 0]}\n', "eval_files short has no target"),
        ("no record\n", r"short\.jsonl, line 1: not JSON"),
        ('{"input_ids": [1, 99]}\n', "has the token id 99, but the model knows 61"),
    ):
        (folder / "short.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=message):
            run(settings(folder))
    with pytest.raises(ConfigError, match="eval_files: short has no file"):
        settings(folder, data={"eval_files": {"short": []}})
    (folder / "out").mkdir(exist_ok=True)
    assert not list((folder / "out").glob("step-*"))
