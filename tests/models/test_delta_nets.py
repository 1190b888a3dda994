"""Gated delta nets: each way of getting a state wrong is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.kernels import ops, recurrent
from chairlift.kernels.delta_rule import DeltaRule
from chairlift.kernels.recurrent import StatePiece
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.model_files import read_config
from tests.models.paged import PagedRunner
from tests.models.test_families import close, load, prompt
from tests.models.test_recurrent_families import PIECE_MISTAKES
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model


def serve_in_two_chunks(model_dir: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of the second chunks of two texts side by side, and transformers'."""
    theirs, tokens = hf_model(model_dir), [prompt(24, 5), prompt(24, 6)]
    runner = PagedRunner(load(model_dir, weight_format=PLAIN), 8)
    for part in (slice(0, 9), slice(9, 24)):
        logits = runner.step([("a", tokens[0][part]), ("b", tokens[1][part])])
    return logits, [hf_logits(theirs, each)[9:] for each in tokens]


def forgotten(part: int) -> Callable[[pytest.MonkeyPatch], None]:
    """A part of the state is zero whenever a step begins."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        scan = DeltaRule.scan

        def wrong(self: DeltaRule, inputs: Any, state: tuple[torch.Tensor, ...]) -> Any:
            kept = [torch.zeros_like(each) if place == part else each for place, each in enumerate(state)]
            return scan(self, inputs, tuple(kept))

        patch.setattr(DeltaRule, "scan", wrong)

    return spoil


def memory_in_16_bits(patch: pytest.MonkeyPatch) -> None:
    scan = DeltaRule.scan

    def wrong(self: DeltaRule, inputs: Any, state: tuple[torch.Tensor, ...]) -> Any:
        return scan(self, inputs, (state[0], state[1].bfloat16().float()))

    patch.setattr(DeltaRule, "scan", wrong)


def rates_in_16_bits(patch: pytest.MonkeyPatch) -> None:
    rates = DeltaRule._rates
    patch.setattr(DeltaRule, "_rates", lambda self, x: tuple(each.bfloat16().float() for each in rates(self, x)))


def keys_of_the_next_head(patch: pytest.MonkeyPatch) -> None:
    convolved = DeltaRule._convolved

    def wrong(self: DeltaRule, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, tail = convolved(self, *given)
        return q.roll(1, 2), k.roll(1, 2), v, tail

    patch.setattr(DeltaRule, "_convolved", wrong)


def pieces(wrong: Callable[[list[StatePiece]], list[StatePiece]]) -> Callable[[pytest.MonkeyPatch], None]:
    plan = recurrent.plan_pieces
    return lambda patch: patch.setattr("chairlift.models.context.plan_pieces", lambda *args: wrong(plan(*args)))


DELTA_MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "convolution tail lost": forgotten(0),
    "memory lost": forgotten(1),
    "memory in 16 bits": memory_in_16_bits,
    "rates in 16 bits": rates_in_16_bits,
    "keys of the next head": keys_of_the_next_head,
    "lengths of q and k": lambda patch: patch.setattr("chairlift.kernels.delta_rule._unit", lambda x: x),
    "no gate behind attention": lambda patch: patch.setattr(ops, "sigmoid_gate", lambda x, gate: x),
    **{wrong.__name__: pieces(wrong) for wrong in PIECE_MISTAKES.values()},
}


@pytest.mark.planted("test_a_delta_net_is_right_where_mistakes_are_noticed")
@pytest.mark.parametrize("mistake", DELTA_MISTAKES)
def test_a_delta_net_that_goes_wrong_is_noticed(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_hf_model(tmp_path, "qwen3_next")
    DELTA_MISTAKES[mistake](monkeypatch)
    found, expected = serve_in_two_chunks(model_dir)
    monkeypatch.undo()
    assert not all(close(logits, truth) for logits, truth in zip(found, expected, strict=True))


def test_a_delta_net_is_right_where_mistakes_are_noticed(tmp_path: Path) -> None:
    found, expected = serve_in_two_chunks(tiny_hf_model(tmp_path, "qwen3_next"))
    assert all(close(logits, truth) for logits, truth in zip(found, expected, strict=True))


def test_a_new_model_draws_its_decays(tmp_path: Path) -> None:
    config = read_config(tiny_hf_model(tmp_path, "qwen3_next"))
    (first, *_) = [layer.mixer for layer in CausalLM(config).model.layers if layer.mixer is not None]
    assert first.decay_log.requires_grad
    assert bool((first.decay_log.exp() > 0.009).all() and (first.decay_log.exp() < 16.1).all())
    assert len(set(first.decay_log.tolist())) == len(first.decay_log)
