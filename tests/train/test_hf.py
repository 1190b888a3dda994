"""The Trainer of transformers takes the steps of a plain loop when it gets our packs and our loss."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.errors import ConfigError
from chairlift_train.collate import TRAINER_KEYS, PackCollator
from chairlift_train.hf import TrainerLoss
from chairlift_train.layout import Layout, Pack
from chairlift_train.loss import StepLoss
from tests.free_port import free_port
from tests.train.families import VOCABULARY, tiny

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS, ACCUMULATION = 3, 2


class Packs(torch.utils.data.IterableDataset[Pack]):
    """Rows with very unequal numbers of targets, and weights that are not all alike."""

    def __iter__(self) -> Iterator[Pack]:
        rng = np.random.default_rng(0)
        for lengths in ([20, 3, 9], [4], [5, 5, 5, 5, 5], [2, 2], [30], [3, 17]):
            tokens = rng.integers(0, VOCABULARY, sum(lengths)).astype(np.int32)
            weights = rng.choice([0.0, 0.5, 1.0], sum(lengths)).astype(np.float32)
            weights[Layout.of(lengths).positions == 0] = 0
            yield Pack(tokens, tuple(lengths), tuple(range(len(lengths))), weights)


def plain_loop(
    reduce: Any, collate: PackCollator, steps: int = STEPS, accumulation: int = ACCUMULATION
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = tiny("llama")
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.5), StepLoss(reduce)
    packs, losses = list(Packs()), []
    for step in range(steps):
        batches = [collate(pack) for pack in packs[step * accumulation : (step + 1) * accumulation]]
        optimizer.zero_grad()
        with loss.step(batches):
            for batch in batches:
                logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
                loss(logits, batch).backward()
        losses.append(loss.total)
        optimizer.step()
    return losses, model.state_dict()


def make_trainer(folder: pathlib.Path, loss: Any, collate: PackCollator, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATION,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"max_steps": STEPS} | settings,
    )
    return transformers.Trainer(
        tiny("llama"), arguments, train_dataset=Packs(), data_collator=collate, compute_loss_func=loss
    )


def run_rank(rank: int, port: int, folder: pathlib.Path) -> None:
    """One of two ranks: the trainer deals the packs itself, two of them to each in its only step."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()})
    torch.set_num_threads(1)
    settings = {"accelerator_config": {"dispatch_batches": False}, "ddp_backend": "gloo", "max_steps": 1}
    for average in (True, False):
        loss = TrainerLoss("sequence")
        trainer = make_trainer(folder, loss, PackCollator(), average_tokens_across_devices=average, **settings)
        loss.attach(trainer)
        trainer.train()
        head = trainer.model.lm_head.weight.detach()
        np.savez(folder / f"{rank}{average}.npz", loss=losses_of(trainer)[0], head=head)


@pytest.mark.nightly
def test_two_ranks_take_the_step_of_one(tmp_path: pathlib.Path) -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    expected, weights = plain_loop("sequence", PackCollator(), steps=1, accumulation=2 * ACCUMULATION)
    for name in ("0True", "1True", "0False", "1False"):
        with np.load(tmp_path / f"{name}.npz") as result:
            assert float(result["loss"]) == pytest.approx(expected[0], rel=1e-6)
            assert torch.allclose(torch.from_numpy(result["head"]), weights["lm_head.weight"], rtol=1e-5, atol=1e-6)


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("reduce", ["token", "sequence", "sqrt", "weights"])
def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path: pathlib.Path, reduce: Any) -> None:
    expected, weights = plain_loop(reduce, PackCollator())
    loss = TrainerLoss(reduce)
    trainer = make_trainer(tmp_path, loss, PackCollator())
    loss.attach(trainer)
    trainer.train()
    assert losses_of(trainer) == pytest.approx(expected, rel=1e-5)
    for name, value in trainer.model.state_dict().items():
        assert torch.allclose(value, weights[name], rtol=1e-5, atol=1e-6), name


def test_the_loss_of_one_process_is_the_mean_over_labelled_tokens(tmp_path: pathlib.Path) -> None:
    """A plain function, without ``attach``: a label weighs 1, and no label 0, as transformers has it."""
    collate = PackCollator(keys=TRAINER_KEYS)
    expected, weights = plain_loop("token", collate)
    trainer = make_trainer(tmp_path, TrainerLoss(), collate)
    trainer.train()
    assert losses_of(trainer) == pytest.approx(expected, rel=1e-5)
    for name, value in trainer.model.state_dict().items():
        assert torch.allclose(value, weights[name], rtol=1e-5, atol=1e-6), name


def test_evaluation_between_steps_is_a_token_mean(tmp_path: pathlib.Path) -> None:
    """The model is given nothing that it does not know, although the collator makes it."""
    loss = TrainerLoss("sequence")
    trainer = make_trainer(tmp_path, loss, PackCollator())
    loss.attach(trainer)
    seen: set[str] = set()
    trainer.model.register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True)
    pack = next(iter(Packs()))
    batch = PackCollator(keys=TRAINER_KEYS)(pack)
    with torch.no_grad(), (mean := StepLoss()).step([batch]):
        mean(trainer.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits, batch)
    assert trainer.evaluate([pack])["eval_loss"] == pytest.approx(mean.total, rel=1e-5)
    assert seen <= {*TRAINER_KEYS, "num_items_in_batch"}


def test_evaluation_is_a_mean_over_all_tokens_and_not_over_rows(tmp_path: pathlib.Path) -> None:
    """Rows have very different numbers of targets; in a mean of the rows' means all of them count the same."""
    loss = TrainerLoss("sequence")
    trainer = make_trainer(tmp_path, loss, PackCollator(), per_device_eval_batch_size=1)
    loss.attach(trainer)
    packs = list(Packs())
    batches = [PackCollator(keys=TRAINER_KEYS)(pack) for pack in packs]
    means = []
    with torch.no_grad(), (mean := StepLoss()).step(batches):
        for batch in batches:
            logits = trainer.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            before = mean.total
            mean(logits, batch)
            means.append((mean.total - before) * mean.normaliser(batches) / max(1e-9, mean.normaliser([batch])))
    for _ in range(2):  # nothing of the first is left in the second
        assert trainer.evaluate(packs)["eval_loss"] == pytest.approx(mean.total, rel=1e-5)
    assert abs(sum(means) / len(means) / mean.total - 1) > 1e-3, "the rows are too much alike to tell"
    assert trainer.predict(packs).metrics["test_loss"] == pytest.approx(mean.total, rel=1e-5)


def test_misuse_is_refused(tmp_path: pathlib.Path) -> None:
    loss = TrainerLoss("sequence")
    trainer = make_trainer(tmp_path, loss, PackCollator(keys=TRAINER_KEYS))
    with pytest.raises(ConfigError, match="compute_loss_func"):
        TrainerLoss().attach(trainer)
    with pytest.raises(ConfigError, match="attach"):
        trainer.train()
    trainer.train_dataset.column_names = None
    with pytest.raises(ConfigError, match="remove_unused_columns"):
        loss.attach(trainer)
    with pytest.raises(ConfigError, match="no labels"):
        loss({"logits": torch.zeros(1, 2, 3)}, None)
