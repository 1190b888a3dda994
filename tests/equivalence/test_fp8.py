"""Weights in fp8: the answers are those of the model whose weights are what the fp8 stands for.

Where rows are few that is all; where they are many the inputs of every product are rounded too, in transformers by
hooks. Interpreted: PyTorch gives products in fp8 in bfloat16 alone on a GPU, where nothing is exact.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.kernels.triton import conftest  # before anything that imports the kernels, which it makes interpreted ones

# isort: split
from chairlift import LLM, SamplingParams
from chairlift.cli import check
from chairlift.config import EngineConfig
from chairlift.errors import ModelLoadError
from chairlift.executor.local import LocalExecutor
from chairlift.kernels.fp8 import quantize
from chairlift.kernels.triton import program
from chairlift.loading.model import load_executor
from chairlift.models.model_files import read_config
from tests.equivalence import cases
from tests.equivalence.test_triton import (
    FAMILY_SETTINGS,
    SIZES,
    SMALL,
    check_greedy,
    check_invariance,
    greedy,
    invariant_jobs,
    triton_llm,
)
from tests.models.tiny import FAMILIES, hf_model, tiny_hf_model
from tests.rowwise import needs_rowwise_products

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
if conftest.ON_GPU:
    pytest.skip("the interpreter's float32 is what these are exact in", allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

FP8 = {"quantization": "fp8"}
AFTER_A_FLIP = 0.05
"""Sums that differ in their last bit may round to other numbers of fp8, now and then."""


def rounded(rows: Tensor) -> Tensor:
    """The numbers that the fp8 of ``rows`` stand for."""
    values, scales = quantize(rows.flatten(0, -2))
    return (values.float() * scales[:, None]).view(rows.shape)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, PreTrainedModel]]:
    def of(family: str, seed: int = 0, **more: Any) -> tuple[Path, PreTrainedModel]:
        """A model, and transformers with its weights rounded."""
        where, settings = tmp_path_factory.mktemp("models"), {**SMALL, **FAMILY_SETTINGS.get(family, {}), **more}
        model_dir = tiny_hf_model(where / "plain", family, seed=seed, tie_word_embeddings=family == "llama", **settings)
        copy = tiny_hf_model(where / "rounded", family, seed=seed, tie_word_embeddings=family == "llama", **settings)
        file = copy / "model.safetensors"
        weights = load_file(file)
        weights |= {name: rounded(value) for name, value in weights.items() if name.endswith("_proj.weight")}
        save_file(weights, file, metadata={"format": "pt"})
        return model_dir, hf_model(copy)

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_few_rows_meet_the_rounded_weights(family: str, models: Any, device: torch.device) -> None:
    check_greedy(models(family), greedy(2, 5, 3), device, **FP8)


@pytest.mark.full
@pytest.mark.parametrize(("family", "scaled"), [("llama", True), ("qwen2", True), ("mistral", False)])
def test_many_rows_are_rounded_too_where_the_library_multiplies(
    family: str, scaled: bool, models: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that are multiples of 16 use it; others are streamed, and their rows stay as they are."""
    needs_rowwise_products(device)
    plain_dir, reference = models(family, intermediate_size=48 if scaled else 40)
    calls = []
    multiply = program.scaled_linear
    monkeypatch.setattr(program, "scaled_linear", lambda *args, **given: calls.append(1) or multiply(*args, **given))
    monkeypatch.setattr(program, "SMALL_ROWS", 0)
    monkeypatch.setattr(cases, "NEAR_TIE", AFTER_A_FLIP)
    for name, module in reference.named_modules():
        if name.endswith("_proj") and (scaled or not name.endswith("down_proj")):
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    check_greedy((plain_dir, reference), greedy(3, 9, 3), device, **FP8)
    assert calls


def test_scores_are_those_of_the_rounded_weights(models: Any, device: torch.device) -> None:
    """To the rounding of float32, which the weights' own is far above."""
    model_dir, reference = models("qwen2")
    prompt, params = [5, 9, 77, 3], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    llm = triton_llm(model_dir, [cases.Job(prompt, params)], device, **FP8)
    [scores] = llm.generate([prompt], params)[0].outputs[0].logprobs or []
    with torch.inference_mode():
        truth, plain = (
            model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for model in (reference, hf_model(model_dir))
        )
    for token_id, entry in scores.items():
        assert entry.logprob == pytest.approx(float(truth[token_id]), abs=1e-4)
    assert (plain - truth).abs().max() > 0.05, "nothing is told apart"


@pytest.mark.nightly
def test_batch_invariant_answers_have_the_same_bits_in_any_batch(
    models: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 32)
    assert check_invariance(models("llama")[0], invariant_jobs(2, 40, 2), device, **FP8)


def answers(llm: LLM) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate([[5, 6, 7], [8, 9]], params)]


@pytest.mark.nightly
def test_new_weights_are_rounded_where_the_old_ones_lay(models: Any, device: torch.device) -> None:
    (old, _), (new, _) = models("qwen2"), models("qwen2", seed=1)
    jobs = greedy(2, 5, 3)
    expected, llm = answers(triton_llm(new, jobs, device, **FP8)), triton_llm(old, jobs, device, **FP8)
    before = answers(llm)
    assert isinstance(llm.engine.core.executor, LocalExecutor)
    layer: Any = llm.engine.core.executor._runner._model.model.layers[1].mlp.down_proj  # type: ignore[attr-defined]
    places = layer.weight.values.data_ptr(), layer.weight.scales.data_ptr()
    llm.update_weights(new, 1)
    assert answers(llm) == expected != before
    weights = load_file(old / "model.safetensors")
    with pytest.raises(ModelLoadError):
        llm.update_weights({name: value for name, value in weights.items() if "down" not in name}, 2)
    assert answers(llm) == expected
    llm.update_weights(weights, 2)
    assert answers(llm) == before
    assert (layer.weight.values.data_ptr(), layer.weight.scales.data_ptr()) == places


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's
def test_a_weight_that_is_no_number_fails_the_request(models: Any, device: torch.device, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(models("llama")[0], tmp_path / "model"))
    weights = load_file(model_dir / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    llm = triton_llm(model_dir, greedy(1, 5, 2), device, **FP8)
    [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert output.error is not None and "logits contain" in output.error


def test_check_tells_what_is_in_fp8(models: Any, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir, _ = models("llama")
    llm, network = triton_llm(model_dir, greedy(1, 5, 2), device, **FP8), read_config(model_dir)
    assert check._describe(llm, network) == "fp8" in check._TIES
    out = capsys.readouterr().out
    count = sum(value.numel() for value in load_file(model_dir / "model.safetensors").values())
    assert f"{count:,} in float32, those of the layers in fp8 (" in out and "triton in float32 with fp8 weights" in out


def test_the_fingerprint_tells_fp8_from_other_weights(models: Any, device: torch.device) -> None:
    settings = {"dtype": "float32", "kernels": "triton", "num_kv_blocks": 20, "skip_tokenizer_init": True, **SIZES}
    model, infos = str(models("llama")[0]), []
    for more in ({}, FP8):
        config = EngineConfig.from_flat({"model": model, **settings, **more})
        infos.append(load_executor(config).info)
    plain, fp8 = infos
    assert (plain.quantization, fp8.quantization) == (None, "fp8") and plain.fingerprint != fp8.fingerprint
    assert any("fp8" in each for each in fp8.approximations) and not plain.approximations
    same = {"quantization": None, "fingerprint": plain.fingerprint, "weight_bytes": plain.weight_bytes}
    assert dataclasses.replace(fp8, approximations=(), **same) == plain
