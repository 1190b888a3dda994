"""The loss of a step does not depend on how the step is cut up: into micro-batches, ranks, chunks of rows."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import multiprocessing
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from chairlift.errors import ConfigError
from chairlift_train.collate import PackCollator
from chairlift_train.layout import Pack
from chairlift_train.loss import Batch, ExpertCounts, StepLoss, token_losses
from chairlift_train.parallel import settle, sum_over_ranks
from tests.train.families import VOCABULARY, tiny

REDUCTIONS = ("token", "sequence", "sqrt", "weights")


class Bigram(nn.Module):
    """The smallest language model: a row of logits per token."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=dtype))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table[input_ids]


def sequences(count: int = 12, seed: int = 0) -> list[Pack]:
    """Packs of one sequence each, 1 to 30 tokens, some prompts, weights from a quarter to two."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        length = int(rng.integers(1, 31))
        weights = rng.choice([0.0, 0.25, 1.0, 2.0], length).astype(np.float32)
        weights[0] = 0
        made.append(Pack(rng.integers(0, VOCABULARY, length).astype(np.int32), (length,), (i,), weights))
    return made


def join(parts: list[Pack]) -> Pack:
    return Pack(
        np.concatenate([part.tokens for part in parts]),
        tuple(length for part in parts for length in part.lengths),
        tuple(i for part in parts for i in part.ids),
        np.concatenate([part.weights for part in parts]),
    )


def by_hand(parts: list[Pack], reduce: str) -> float:
    """The definition, target by target, in Python."""
    table = Bigram().table.detach()
    total = z = 0.0
    for part in parts:
        n = int((part.weights[1:] != 0).sum())
        share = {"sequence": 1 / max(1, n), "sqrt": 1 / math.sqrt(max(1, n))}.get(reduce, 1.0)
        for t in range(1, part.num_tokens):
            nll = -torch.log_softmax(table[part.tokens[t - 1]], 0)[part.tokens[t]].item()
            total += float(part.weights[t]) * share * nll
        z += {"token": float(part.weights.sum()), "weights": n, "sequence": n > 0, "sqrt": math.sqrt(n)}[reduce]
    return total / z


def train_step(model: nn.Module, loss: StepLoss, packs: list[Pack], *, collated: bool = False) -> torch.Tensor:
    model.zero_grad()
    with loss.step(packs):
        for pack in packs:
            batch: Batch = PackCollator(pad_to=7)(pack) if collated else pack
            ids = batch["input_ids"] if not isinstance(batch, Pack) else torch.from_numpy(batch.tokens).long()
            loss(model(ids), batch).backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad.clone()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_loss_is_its_definition(reduce: Any) -> None:
    loss = StepLoss(reduce)
    train_step(Bigram(), loss, [join(sequences())])
    assert loss.total == pytest.approx(by_hand(sequences(), reduce), rel=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_every_split_gives_the_same_step(reduce: Any, dtype: torch.dtype, tolerance: float) -> None:
    @given(st.lists(st.integers(0, 4), min_size=12, max_size=12), st.booleans(), st.sampled_from([None, 1, 13]))
    @settings(max_examples=15, deadline=None)
    def check(places: list[int], collated: bool, chunk: int | None) -> None:
        parts = sequences()
        micro = [join([p for p, place in zip(parts, places, strict=True) if place == i]) for i in sorted(set(places))]
        loss = StepLoss(reduce, chunk=chunk)
        split = train_step(Bigram(dtype), loss, micro, collated=collated)
        assert loss.total == pytest.approx(expected_loss, rel=tolerance)
        assert (split - expected).norm() / expected.norm() < tolerance

    whole = StepLoss(reduce)
    expected = train_step(Bigram(dtype), whole, [join(sequences())])
    expected_loss = whole.total
    check()


def test_the_loss_is_not_a_mean_of_means() -> None:
    """Micro-batches with different numbers of targets, each divided by its own: the bug that this ends."""
    parts, loss = sequences(), StepLoss()
    right = train_step(Bigram(), loss, parts)
    model = Bigram()
    for part in (part for part in parts if part.weights.any()):
        with loss.step([part]):
            (loss(model(torch.from_numpy(part.tokens).long()), part) / len(parts)).backward()
    assert model.table.grad is not None
    assert (model.table.grad - right).norm() / right.norm() > 0.05


@pytest.mark.parametrize(("reduce", "z"), [("token", 40.0), ("sequence", 8.0)])
def test_counts_of_the_stream_are_used_for_the_mean(reduce: Any, z: float) -> None:
    """It knows the packs of the other ranks too."""
    pack = Pack(np.arange(5, dtype=np.int32), (5,), (0,), np.array([0, 1, 1, 1, 1], np.float32), (), 3, False, 40.0, 8)
    counted, known = StepLoss(reduce), StepLoss(reduce)
    model = Bigram()
    with counted.step(float(counted.normaliser([pack]))):
        counted(model(torch.arange(5)), pack)
    with known.step([PackCollator()(pack)]):
        known(model(torch.arange(5)), pack)
    assert known.total == pytest.approx(counted.total * counted.normaliser([pack]) / z, rel=1e-12)


def test_a_filler_adds_nothing_and_still_has_a_backward() -> None:
    filler = Pack(np.zeros(1, np.int32), (1,), (), np.zeros(1, np.float32), filler=True)
    parts = sequences()
    assert torch.equal(train_step(Bigram(), StepLoss(), [*parts, filler]), train_step(Bigram(), StepLoss(), parts))
    loss, model = StepLoss(), Bigram()
    with loss.step(5.0):
        loss(model(torch.zeros(1, dtype=torch.long)), filler).backward()
    assert model.table.grad is not None and not model.table.grad.any()


def test_unpacked_batches_of_several_rows_give_the_same_loss() -> None:
    """Plain rows [B, S], labels -100 on the padding: no segment ids, no weights."""
    parts = [Pack(p.tokens, p.lengths, p.ids, np.array([0.0] + [1.0] * (p.num_tokens - 1), "f4")) for p in sequences()]
    ids = torch.zeros(len(parts), 30, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, part in enumerate(parts):
        ids[row, : part.num_tokens] = labels[row, : part.num_tokens] = torch.from_numpy(part.tokens).long()
    batch = {"input_ids": ids, "labels": labels}
    for reduce in REDUCTIONS:
        packed, padded = StepLoss(reduce), StepLoss(reduce)  # type: ignore[arg-type]
        train_step(Bigram(), packed, parts)
        with padded.step([batch]):
            padded(Bigram()(ids), batch)
        assert padded.total == pytest.approx(packed.total, rel=1e-12)


def test_label_smoothing_and_chunks_are_those_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 7, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([1, 2, -100, 3, 4, 5, 6, 0, -100, 1])
    losses = token_losses(logits, labels, label_smoothing=0.1, chunk=4)
    expected = nn.functional.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=0.1)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, expected)
    assert losses[2] == losses[8] == 0
    (ours,) = torch.autograd.grad(losses.sum(), logits)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.equal(ours, theirs)


def test_chunks_bound_the_memory_of_the_float32_logits() -> None:
    """Tensors that autograd keeps for the backward pass: the logits, and no float32 copy of them."""
    logits = torch.randn(512, 64, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.long)

    def kept(chunk: int | None) -> int:
        sizes: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel() if tensor.dtype == torch.float32 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            token_losses(logits, labels, chunk=chunk).sum()
        return sum(sizes)

    assert kept(None) >= logits.numel()
    assert kept(64) < logits.numel() / 16


def test_misuse_is_refused() -> None:
    loss, pack = StepLoss(), sequences()[0]
    logits = Bigram()(torch.from_numpy(pack.tokens).long())
    with pytest.raises(ConfigError, match="inside"):
        loss(logits, pack)
    with loss.step([pack]), pytest.raises(ConfigError, match="give all rows"):
        loss(logits[:-1], pack)
    steps = [Pack(pack.tokens, pack.lengths, (0,), pack.weights, step=step) for step in (1, 2)]
    with pytest.raises(ConfigError, match=r"\[1, 2\]"), loss.step(steps):
        pass
    prompt = Pack(pack.tokens, pack.lengths, (0,), np.zeros_like(pack.weights))
    with pytest.raises(ConfigError, match="targets"), loss.step([prompt]):
        pass
    for settings_ in ({"reduce": "mean"}, {"gradients": "max"}, {"label_smoothing": 1.0}, {"chunk": 0}):
        with pytest.raises(ConfigError):
            StepLoss(**settings_)  # type: ignore[arg-type]


def experts_step(model: nn.Module, experts: ExpertCounts, packs: list[Pack]) -> float:
    """The balance loss of a model whose logits are also its router's."""

    def forward(pack: Batch) -> list[torch.Tensor]:
        assert isinstance(pack, Pack)
        return [model(torch.from_numpy(pack.tokens).long())[:, :4]]

    model.zero_grad()
    total = 0.0
    with experts.step(packs, forward):
        for pack in packs:
            part = experts(forward(pack), pack)
            part.backward()
            total += part.item()
    return total


def run_rank(rank: int, folder: str) -> None:
    """One of two ranks: unequal shares of the step, DDP around the model, one micro-batch without synchronisation.

    In one more step, rank 1 has no packs, and rank 0 has a pack of a stream.
    """
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=100)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=wait)
    parts = sequences()
    results: dict[str, Any] = {}
    mine = [join(parts[:2]), join(parts[2:3])] if rank == 0 else [join(parts[3:9]), join(parts[9:])]
    model = DistributedDataParallel(Bigram())
    for reduce in REDUCTIONS:
        model.zero_grad()
        loss = StepLoss(reduce)  # type: ignore[arg-type]
        with loss.step(mine):
            with model.no_sync():
                loss(model(torch.from_numpy(mine[0].tokens).long()), mine[0]).backward()
            loss(model(torch.from_numpy(mine[1].tokens).long()), mine[1]).backward()
        total = np.array(sum_over_ranks([loss.total])[0])
        results |= {reduce: model.module.table.grad.numpy().copy(), f"{reduce}_total": total}
    known, loss = dataclasses.replace(mine[0], step_weight=40.0), StepLoss()
    with loss.step([known] if rank == 0 else []):
        results["known"] = np.array(loss._normaliser)
    experts_step(model, ExpertCounts(4, 2), mine)
    results["experts"] = model.module.table.grad.numpy().copy()
    np.savez(f"{folder}/{rank}.npz", **results)
    settle()
    distributed.destroy_process_group()


@pytest.mark.full
def test_two_ranks_with_unequal_shares_take_the_step_of_one(tmp_path: pathlib.Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=run_rank, args=(1, str(tmp_path)))
    other.start()
    run_rank(0, str(tmp_path))
    other.join()
    whole, balance = join(sequences()), Bigram()
    experts_step(balance, ExpertCounts(4, 2), [whole])
    assert balance.table.grad is not None
    expected = {"experts": balance.table.grad}
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as results:
            assert float(results["known"]) == 40.0
            for reduce in REDUCTIONS:
                loss = StepLoss(reduce)  # type: ignore[arg-type]
                expected[reduce] = train_step(Bigram(), loss, [whole])
                assert float(results[f"{reduce}_total"]) == pytest.approx(loss.total, rel=1e-12)
            for name, gradient in expected.items():
                assert (torch.from_numpy(results[name]) - gradient).norm() / gradient.norm() < 1e-12, name


def router_batches(model: Any, splits: list[list[Pack]], dtype: torch.dtype) -> tuple[list[Any], Any]:
    batches = [PackCollator(pad_to=16)(join(parts)) for parts in splits]

    def forward(batch: Any) -> Any:
        return model(batch["input_ids"], position_ids=batch["position_ids"], output_router_logits=True, use_cache=False)

    return batches, forward


def balance(name: str, dtype: torch.dtype, splits: list[list[Pack]], **kind: Any) -> tuple[float, torch.Tensor]:
    """The step's balance loss and the gradients of all routers."""
    model = tiny(name, dtype)
    experts = ExpertCounts.of(model.config, per_layer=kind.get("per_layer", False))
    batches, forward = router_batches(model, splits, dtype)
    total = 0.0
    with experts.step(batches, forward if kind.get("exact", True) else None):
        for batch in batches:
            part = experts(forward(batch).router_logits, batch)
            part.backward()
            total += part.item()
    routers = [p.grad.flatten() for key, p in model.named_parameters() if key.endswith("gate.weight")]
    assert len(routers) == model.config.num_hidden_layers
    return total, torch.cat(routers)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_expert_balance_is_the_same_over_micro_batches(name: str, dtype: torch.dtype, per_layer: bool) -> None:
    parts = sequences()
    whole, gradient = balance(name, dtype, [parts], per_layer=per_layer)
    split, split_gradient = balance(name, dtype, [parts[:1], parts[1:8], parts[8:]], per_layer=per_layer)
    assert split == pytest.approx(whole, rel=1e-6)
    assert (split_gradient - gradient).norm() / gradient.norm() < (1e-5 if dtype == torch.float32 else 1e-12)


def test_expert_balance_is_that_of_transformers_without_the_padding() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    parts, model = sequences(), tiny("mixtral", torch.float64)
    batches, forward = router_batches(model, [parts], torch.float64)
    mask = torch.zeros_like(batches[0]["input_ids"])
    mask[:, : batches[0]["num_tokens"]] = 1
    assert not mask.all(), "there is padding to be left out"
    logits = forward(batches[0]).router_logits
    expected = load_balancing_loss_func(logits, 4, 2, mask)
    assert balance("mixtral", torch.float64, [parts])[0] == pytest.approx(expected.item(), rel=1e-6)
    per_layer = sum(load_balancing_loss_func((layer,), 4, 2, mask).item() for layer in logits) / len(logits)
    assert balance("mixtral", torch.float64, [parts], per_layer=True)[0] == pytest.approx(per_layer, rel=1e-6)


def test_expert_counts_so_far_are_near_and_not_exact() -> None:
    parts = sequences()
    exact, _ = balance("mixtral", torch.float64, [parts])
    cheap, _ = balance("mixtral", torch.float64, [parts[:4], parts[4:]], exact=False)
    assert cheap != pytest.approx(exact, rel=1e-9)
    assert cheap == pytest.approx(exact, rel=0.1)
    assert balance("mixtral", torch.float64, [parts], exact=False)[0] == pytest.approx(exact, rel=1e-12)


def test_expert_counts_refuse_misuse() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        ExpertCounts(4, 5)
    with pytest.raises(ConfigError, match="LlamaConfig"):
        ExpertCounts.of(tiny("llama").config)
    experts = ExpertCounts(4, 2)
    with pytest.raises(ConfigError, match="inside"):
        experts([torch.zeros(3, 4)], {"input_ids": torch.zeros(1, 3)})
    with pytest.raises(ConfigError, match="no routing"):
        _ = experts.fractions
    batch = {"input_ids": torch.zeros(1, 3)}
    with experts.step([batch], functools.partial(lambda logits, _: logits, [torch.eye(4)[:3]])):
        assert experts.fractions.sum() == pytest.approx(2)
