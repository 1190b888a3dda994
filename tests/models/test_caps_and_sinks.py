"""Caps and sinks through the whole engine: Gemma 2 however requests meet, sinks in a family that has none, LongRoPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from chairlift import LLM, SamplingParams
from chairlift.cli.main import main
from chairlift.errors import RequestError
from chairlift.kernels import recording, sdpa
from chairlift.models import registry
from chairlift.models.context import PagedContext
from chairlift.models.hf_config import read_hf_config
from tests.equivalence.all_pairs import all_pairs
from tests.models.greedy_texts import Truth, check_texts, truth_of
from tests.models.logprobs import PROMPTS, check_logprobs
from tests.models.paged import packed_logits
from tests.models.test_families import close, load, prompt
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model
from tests.native import needs_kernels

FACTORS: dict[str, Sequence[Any]] = {
    "max_num_batched_tokens": (1, 7, 64),
    "arrival": ("together", "staggered"),
    "cache": ("ample", "tight", "preempting"),
    "enable_prefix_caching": (True, False),
    "kernels": ("auto", "torch"),
}


# -- gemma2 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return truth_of(tiny_hf_model(tmp_path_factory.mktemp("models"), "gemma2"), 10)


@pytest.mark.parametrize("combination", all_pairs(FACTORS), ids=lambda each: "-".join(map(str, each.values())))
def test_texts_equal_those_of_transformers(combination: dict[str, Any], truth: Truth) -> None:
    check_texts(truth, combination)


def capped_logits(truth: Truth, cap: float | None) -> Tensor:
    truth.model.config.final_logit_softcapping = cap
    try:
        return hf_logits(truth.model, PROMPTS[0])[-1]
    finally:
        truth.model.config.final_logit_softcapping = 12.0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_cap_comes_before_penalties_temperature_and_logprobs(kernels: str, truth: Truth) -> None:
    """A penalty that is small beside logits without a cap, and large beside those with one, decides."""
    llm = LLM(truth.model_dir, num_kv_blocks=60, skip_tokenizer_init=True, dtype="float32", kernels=kernels)
    capped, plain = (capped_logits(truth, cap) for cap in (12.0, None))
    first, second = capped.topk(2).indices.tolist()
    gap = float(capped[first] - capped[second])
    assert gap < 0.7 * float(plain[first] - plain[second]), "the cap must matter"
    bias = {first: -1.05 * gap}
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2, logit_bias=bias)
    (output,) = llm.generate([PROMPTS[0]], params)
    answer = output.outputs[0]
    assert answer.token_ids == [second] and answer.logprobs is not None
    # Log-probabilities are those of the model, before what the request asks for.
    assert abs(answer.logprobs[0][second].logprob - float(capped.log_softmax(-1)[second])) < 1e-3
    many = [SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True, n=16, seed=seed) for seed in range(15)]
    drawn = [one.token_ids[0] for output in llm.generate([PROMPTS[0]] * 15, many) for one in output.outputs]
    share, expected = drawn.count(first) / len(drawn), float(capped.softmax(-1)[first])
    assert abs(share - expected) < 4 * (expected * (1 - expected) / len(drawn)) ** 0.5
    assert abs(expected - float(plain.softmax(-1)[first])) > 0.2, "without a cap it would be noticed"


def drop_the_cap_of_scores(patch: pytest.MonkeyPatch) -> None:
    read = registry.FAMILIES["gemma2"].read
    wrong = dataclasses.replace(registry.FAMILIES["gemma2"], read=lambda *given: {**read(*given), "score_cap": None})
    patch.setitem(registry.FAMILIES, "gemma2", wrong)


def drop_the_cap_of_logits(patch: pytest.MonkeyPatch) -> None:
    read = registry.FAMILIES["gemma2"].read
    wrong = dataclasses.replace(registry.FAMILIES["gemma2"], read=lambda *given: {**read(*given), "logit_cap": None})
    patch.setitem(registry.FAMILIES, "gemma2", wrong)


def cap_before_the_scale(patch: pytest.MonkeyPatch) -> None:
    """The scores that are capped are larger than they should be: a cap that is smaller by as much."""
    read = registry.FAMILIES["gemma2"].read

    def wrong(*given: Any) -> dict[str, Any]:
        found = dict(read(*given))
        return {**found, "score_cap": found["score_cap"] * found["layer_scales"][0]}

    patch.setitem(registry.FAMILIES, "gemma2", dataclasses.replace(registry.FAMILIES["gemma2"], read=wrong))


@pytest.mark.planted
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("broken", [drop_the_cap_of_scores, drop_the_cap_of_logits, cap_before_the_scale])
def test_mistakes_are_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], kernels: str, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"more likely|its log-probability"):
        check_logprobs(truth.model_dir, truth.model, 1e-3, dtype="float32", kernels=kernels)


@pytest.mark.planted
def test_a_cap_behind_the_mask_is_noticed(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lift what a query must not see from minus infinity to minus the cap."""

    def wrong(queries: Tensor, keys: Tensor, values: Tensor, shape: Any, dropout: float) -> Tensor:
        rows, num_keys = queries.shape[2], keys.shape[1]
        scores = queries @ keys.unsqueeze(1).mT * shape.scale
        scores = scores + sdpa._tile_mask(rows, num_keys, shape.window, scores.dtype, scores.device)
        return (shape.cap * torch.tanh(scores / shape.cap)).softmax(-1) @ values.unsqueeze(1)

    monkeypatch.setattr("chairlift.kernels.sdpa._attend_written_out", wrong)
    with pytest.raises(AssertionError, match=r"more likely|its log-probability"):
        check_logprobs(truth.model_dir, truth.model, 1e-3, dtype="float32", kernels="torch")


# -- sinks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A Llama with a sink per head, here and in transformers."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    sinks = torch.randn(3, 4, generator=torch.Generator().manual_seed(5)) * 2
    tensors = load_file(model_dir / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.sinks": sinks[i].clone() for i in range(3)}
    model = hf_model(model_dir)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        module.sinks = sinks[module.layer_idx]
        causal = torch.full((query.shape[2],) * 2, float("-inf")).triu(1)[None, None]
        return eager_attention_forward(module, query, key, value, causal, scaling)

    AttentionInterface.register("with_sinks", attend)
    model.set_attn_implementation("with_sinks")
    llama = registry.FAMILIES["llama"]
    with_sinks = dataclasses.replace(llama, read=lambda *given: {**llama.read(*given), "sinks": True})
    monkeypatch.setitem(registry.FAMILIES, "llama", with_sinks)
    return model_dir, model


def drop_sinks(patch: pytest.MonkeyPatch) -> None:
    for where in (recording.Recorder, PagedContext):
        attend = where.attend
        patch.setattr(where, "attend", lambda *given, attend=attend, **how: attend(*given, **{**how, "sinks": None}))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_sinks_are_loaded_and_are_those_of_transformers(
    kernels: str, sunk: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logprobs(*sunk, 1e-3, dtype="float32", kernels=kernels)
    drop_sinks(monkeypatch)
    with pytest.raises(AssertionError, match=r"more likely|its log-probability"):
        check_logprobs(*sunk, 1e-3, dtype="float32", kernels=kernels)


# -- LongRoPE ----------------------------------------------------------------------------------------------------------


def long_rope(tmp_path: Path) -> Path:
    factors = {"short_factor": [1 + i / 4 for i in range(8)], "long_factor": [3 + 2 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    return tiny_hf_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)


def test_the_longest_text_decides_between_the_factors_of_longrope(tmp_path: Path) -> None:
    """transformers decides by the length of each text, so an engine takes either short texts or long prompts."""
    model_dir = long_rope(tmp_path)
    theirs = hf_model(model_dir)
    (note,) = check_logprobs(model_dir, theirs, 1e-3, dtype="float32", max_model_len=64)
    assert "factors for short texts are used, as in transformers" in note
    llm = LLM(model_dir, num_kv_blocks=60, skip_tokenizer_init=True)
    assert llm.info.max_model_len == 64
    (note,) = check_logprobs(model_dir, theirs, 1e-3, [prompt(65), prompt(90)], dtype="float32", max_model_len=512)
    assert "factors for long texts are used" in note and "set max_model_len to 64 or less" in note
    llm = LLM(model_dir, num_kv_blocks=60, skip_tokenizer_init=True, max_model_len=512)
    with pytest.raises(RequestError, match=r"the prompt has 64 tokens, but .* more than 64 here: .* max_model_len 64"):
        llm.generate([prompt(64)])
    assert llm.generate([prompt(65)])[0].outputs[0].token_ids
    config, tokens = read_hf_config(model_dir), prompt(100)
    assert close(hf_logits(theirs, tokens), load_logits(model_dir, tokens))
    assert config.for_length(512) is config and config.for_length(64) != config


def load_logits(model_dir: Path, tokens: list[int]) -> Tensor:
    return packed_logits(load(model_dir), [tokens])[0]


@needs_kernels
def test_check_says_which_factors_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-kv-blocks", "60", "--skip-tokenizer-init", "--max-model-len", "64"]
    assert main(["check", str(long_rope(tmp_path)), *flags]) == 0
    assert "the factors for short texts are used" in capsys.readouterr().out
