"""The leak detector finds every leak of the known families and none where there is none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import PackedContext
from chairlift.models.hf_config import parse_config
from chairlift_train.isolation import check_isolation
from chairlift_train.varlen import patch_hf
from tests.train.families import EXACT, LEAKING, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", EXACT)
def test_isolated_models_raise_no_false_alarm(family: str, dtype: torch.dtype) -> None:
    report = check_isolation(tiny(family, dtype), strict=True)
    assert report
    assert max(report.alone) <= report.tolerance / 5, "too close to the tolerance to be told from a leak"
    assert "are isolated" in str(report)


class _PassesOn(torch.nn.Module):
    """As DistributedDataParallel, whose signature names nothing that the model takes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def test_a_model_inside_another_is_given_what_it_takes() -> None:
    assert check_isolation(_PassesOn(_PassesOn(tiny("llama"))), strict=True)
    assert not check_isolation(_PassesOn(tiny(LEAKING[0])))


@pytest.mark.parametrize("family", LEAKING)
def test_leaking_families_are_caught(family: str) -> None:
    started = time.process_time()
    report = check_isolation(tiny(family))
    assert time.process_time() - started < 60  # of a machine that others keep busy: a second of one that is idle
    assert not report
    assert {(0, 1), (1, 2)} <= {(leak.source, leak.victim) for leak in report.leaks}
    assert all(leak.difference > 10 * report.tolerance for leak in report.leaks[:1])
    assert report.first_layer is not None
    assert "what to do" in str(report)


@pytest.mark.parametrize("family", EXACT)
def test_a_mask_of_ones_is_caught_in_every_family(family: str) -> None:
    report = check_isolation(tiny(family), attention_mask=True)
    assert not report
    assert report.leaks
    assert "do not pass an attention_mask" in str(report)


def test_a_cache_makes_transformers_forget_the_boundaries() -> None:
    """True of every family in 5.x: the default of a plain loop, ``use_cache=True``, leaks."""
    model = tiny("llama")
    model.config.use_cache = True
    report = check_isolation(model)
    assert not report
    assert "pass use_cache=False" in str(report)
    with patch_hf(model):
        assert check_isolation(model)


def collator(features: Sequence[Mapping[str, Any]], *, mask: bool = False, restart: bool = True) -> dict[str, Any]:
    rows = [torch.tensor(feature["input_ids"]) for feature in features]
    ids = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows]) if restart else torch.arange(ids.shape[1])
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions[None], "loss_weight": torch.ones(ids.shape)}
    return batch | ({"attention_mask": torch.ones_like(ids)} if mask else {})


def test_the_collator_that_training_uses_is_what_is_checked() -> None:
    model = tiny("qwen3")
    assert check_isolation(model, collate=collator)
    report = check_isolation(model, collate=lambda features: collator(features, mask=True))
    assert {(leak.source, leak.victim) for leak in report.leaks} == {(0, 1), (0, 2), (1, 2)}
    assert "do not pass an attention_mask" in str(report)
    assert not check_isolation(model, collate=lambda features: collator(features, restart=False))
    ids_only = check_isolation(model, collate=lambda features: {"input_ids": collator(features)["input_ids"]})
    assert ids_only.advice == ("pass position_ids that restart at 0 in every sequence",)
    with pytest.raises(ConfigError, match="one row"):
        check_isolation(model, collate=lambda features: {"input_ids": torch.ones(3, 9, dtype=torch.int64)})


def test_the_collator_of_transformers_is_isolated() -> None:
    from transformers import DataCollatorWithFlattening

    assert check_isolation(tiny("llama"), collate=DataCollatorWithFlattening())


def test_the_first_layer_that_mixes_is_named() -> None:
    masked = check_isolation(tiny("llama"), attention_mask=True)
    assert masked.first_layer == "model.layers.0.self_attn"
    assert check_isolation(tiny("lfm2")).first_layer == "model.layers.0.conv"
    assert check_isolation(tiny("qwen3_next")).first_layer == "model.layers.0.linear_attn"
    assert "first module that mixes sequences: model.layers.0.self_attn" in str(masked)


class Positions(torch.nn.Module):
    """Sequences never meet, but positions count through."""

    def __init__(self, past: int = 0, future: int = 0, *, restart: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.places = torch.nn.Embedding(64, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 50)
        self.past, self.future, self.restart = past, future, restart

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        x = x + sum(torch.roll(x, shift, 1) for shift in (*range(1, self.past + 1), *range(-self.future, 0)))
        x = x + self.places(position_ids if self.restart else torch.arange(x.shape[1])[None])
        logits: torch.Tensor = self.head(self.drop(x))
        return logits


def test_both_directions_and_positions_are_checked() -> None:
    assert check_isolation(Positions().train()), "what dropout drops is no leak"
    forward = check_isolation(Positions(past=1))
    assert {(0, 1), (1, 2)} <= {(leak.source, leak.victim) for leak in forward.leaks}
    backward = check_isolation(Positions(future=1))
    assert {(1, 0), (2, 1)} <= {(leak.source, leak.victim) for leak in backward.leaks}
    counting = check_isolation(Positions(restart=False))
    assert not counting
    assert not counting.leaks
    assert "differs from itself alone" in str(counting)
    assert "positions may not restart" in str(counting)


def test_families_without_position_ids_are_reported() -> None:
    report = check_isolation(tiny("bloom"))
    assert "takes no position_ids" in str(report)


def test_strict_refuses_and_the_mode_is_put_back() -> None:
    model = tiny("mpt").train()
    model.transformer.blocks[0].eval()
    with pytest.raises(ConfigError, match="NOT isolated"):
        check_isolation(model, strict=True)
    assert model.training
    assert not model.transformer.blocks[0].training
    assert not any(module._forward_hooks for module in model.modules())


def test_a_tolerance_above_the_leak_lets_it_pass_and_a_model_of_zeros_says_nothing() -> None:
    assert check_isolation(tiny("opt"), tol=10.0)
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    report = check_isolation(model)
    assert not report
    assert "no conclusion" in str(report)


def test_our_own_models_are_checked_through_forward() -> None:
    config = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = CausalLM(parse_config({"model_type": "llama", **config, **heads}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25, generator=generator)

    def forward(batch: dict[str, Any]) -> torch.Tensor:
        positions = batch["position_ids"][0]
        starts = torch.nonzero(positions == 0)[:, 0].tolist()
        hidden = model(batch["input_ids"][0], positions, PackedContext([*starts, len(positions)]))
        return model.compute_logits(hidden)

    def merged(batch: dict[str, Any]) -> torch.Tensor:
        positions = batch["position_ids"][0]
        return model.compute_logits(model(batch["input_ids"][0], positions, PackedContext([0, len(positions)])))

    assert check_isolation(model, forward=forward)
    report = check_isolation(model, forward=merged)
    assert report.leaks
    assert report.first_layer is not None
