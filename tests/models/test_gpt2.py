"""GPT-2 computes what transformers computes, however requests meet."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift.cli.main import main
from chairlift.errors import ModelLoadError
from chairlift.kernels import ops
from chairlift.kernels.cpu import lowering
from chairlift.models import registry
from chairlift.models.families import gpt2
from chairlift.models.hf_config import parse_config
from tests.equivalence.all_pairs import all_pairs
from tests.models.greedy_texts import Truth, check_texts, truth_of
from tests.models.logprobs import check_logprobs
from tests.models.tiny import hf_model, tiny_hf_model
from tests.native import needs_kernels

FACTORS: dict[str, Sequence[Any]] = {
    "max_num_batched_tokens": (1, 7, 64),
    "block_size": (1, 8, 16),
    "arrival": ("together", "reversed", "staggered"),
    "cache": ("ample", "tight", "preempting"),
    "enable_prefix_caching": (True, False),
    "kernels": ("auto", "torch"),
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return truth_of(tiny_hf_model(tmp_path_factory.mktemp("models"), "gpt2"), 16)


@pytest.mark.parametrize("combination", all_pairs(FACTORS), ids=lambda each: "-".join(map(str, each.values())))
def test_texts_equal_those_of_transformers(combination: dict[str, Any], truth: Truth) -> None:
    check_texts(truth, combination)


@needs_kernels
def test_operations_that_the_kernels_lack_are_named_in_one_line(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_logprobs(truth.model_dir, truth.model, 1e-4, dtype="float32") == []
    without = {op: kernel for op, kernel in lowering._KERNELS.items() if op not in (ops.layer_norm, ops.gelu_tanh)}
    monkeypatch.setattr(lowering, "_KERNELS", without)
    monkeypatch.setattr(lowering, "_CLAIMED", {op: lowering._CLAIMED[op] for op in without if op in lowering._CLAIMED})
    (note,) = check_logprobs(truth.model_dir, truth.model, 1e-4, dtype="float32")
    assert note.startswith("the kernels lack layer_norm, gelu_tanh: PyTorch computes these operations")
    assert check_logprobs(truth.model_dir, truth.model, 1e-4, dtype="float32", kernels="torch") == []


@pytest.mark.parametrize(
    "config",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"n_inner": None, "tie_word_embeddings": False},
        {"layer_norm_epsilon": 0.5},
    ],
    ids=lambda config: next(iter(config)),
)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_every_variant_gives_the_logits_of_transformers(config: dict[str, Any], kernels: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "gpt2", std=0.1, **config)
    check_logprobs(model_dir, hf_model(model_dir), 1e-4, dtype="float32", kernels=kernels)


def test_bfloat16_stays_near_float32(truth: Truth, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "gpt2", std=0.08, dtype=torch.bfloat16)
    check_logprobs(model_dir, hf_model(model_dir, torch.float32), 0.1, dtype="bfloat16")


def test_files_without_the_prefix_and_with_causal_masks_load(truth: Truth, tmp_path: Path) -> None:
    """As the files of the first GPT-2 are."""
    tensors = {
        name.removeprefix("transformer."): t for name, t in load_file(truth.model_dir / "model.safetensors").items()
    }
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 512, 512) for layer in range(3)}
    save_file({**tensors, **masks}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((truth.model_dir / "config.json").read_text())
    check_logprobs(tmp_path, truth.model, 1e-4, dtype="float32")


@needs_kernels
def test_check_accepts_it_and_nothing_is_slow(truth: Truth, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(truth.model_dir)
    assert main(["check", where, "--num-kv-blocks", "60", "--skip-tokenizer-init"]) == 0
    shown = capsys.readouterr().out
    assert "gpt2, 3 layers" in shown and "the kernels lack" not in shown
    assert "greedy tokens alone and in a batch" in shown


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_function": "silu"}, "activation_function 'silu' is not supported; supported: gelu_new"),
        ({"n_embd": 0}, "n_embd must be a whole number"),
        ({"n_head": None}, "n_head is missing"),
        ({"n_embd": 50}, "not a multiple"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, r"no \.\.\.ForCausalLM or \.\.\.Model"),
    ],
)
def test_refused_settings_have_the_names_of_the_file(change: dict[str, Any], words: str, truth: Truth) -> None:
    raw = json.loads((truth.model_dir / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=words):
        parse_config({**raw, **change})


# -- each way of getting it wrong is noticed ---------------------------------------------------------------------------


def drop_positions(patch: pytest.MonkeyPatch) -> None:
    lookup = ops.embedding

    def wrong(ids: Tensor, weight: Any) -> Tensor:
        if not isinstance(weight, Tensor) or len(weight) != 512:
            return lookup(ids, weight)
        return ops.call_out(lambda ids: torch.zeros(len(ids), 64), ids, width=64)

    patch.setattr(ops, "embedding", wrong)


def drop_the_bias_of_norms(patch: pytest.MonkeyPatch) -> None:
    norm = ops.layer_norm
    patch.setattr(ops, "layer_norm", lambda x, weight, bias, eps: norm(x, weight, torch.zeros_like(bias), eps))


def exact_gelu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "gelu_tanh", lambda x: ops.call_out(torch.nn.functional.gelu, x, width=96))


def read_products_untransposed(patch: pytest.MonkeyPatch) -> None:
    """Leave one square matrix untransposed. A matrix of another shape would not fit."""
    patch.setitem(
        registry.FAMILIES, "gpt2", dataclasses.replace(gpt2.GPT2, transposed=("qkv_proj", "up_proj", "down_proj"))
    )


def scramble_qkv(patch: pytest.MonkeyPatch) -> None:
    heads = ops.rotary_heads
    patch.setattr(ops, "rotary_heads", lambda qkv, *rest: heads(ops.call_out(_regrouped, qkv, width=192), *rest))


def _regrouped(qkv: Tensor) -> Tensor:
    return qkv.view(len(qkv), 64, 3).transpose(1, 2).reshape(len(qkv), 192)


def drop_the_scale(patch: pytest.MonkeyPatch) -> None:
    read = gpt2.GPT2.read
    wrong = dataclasses.replace(gpt2.GPT2, read=lambda *given: {**read(*given), "layer_scales": (1.0,) * 3})
    patch.setitem(registry.FAMILIES, "gpt2", wrong)


BROKEN = [drop_positions, drop_the_bias_of_norms, exact_gelu, read_products_untransposed, scramble_qkv, drop_the_scale]


@pytest.mark.planted("test_every_variant_gives_the_logits_of_transformers")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_mistakes_are_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], kernels: str, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logprobs(truth.model_dir, truth.model, 1e-4, dtype="float32", kernels=kernels)
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"more likely|its log-probability"):
        check_logprobs(truth.model_dir, truth.model, 1e-4, dtype="float32", kernels=kernels)
