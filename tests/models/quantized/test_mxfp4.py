"""gpt-oss as it is published, its experts in MXFP4: the numbers are transformers', and the kernels multiply with codes.

Changes that must make these fail: the halves of a byte exchanged; exponents off by one; gates above what they gate, not
between; rows of one expert given to the next.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import hf_state_dict
from tests.models.logprobs import PROMPTS, check_logprobs
from tests.models.paged import packed_logits
from tests.models.quantized.make import mxfp4_pair, rewrite
from tests.models.test_families import close, load, prompt
from tests.models.tiny import hf_logits, hf_model
from tests.native import needs_kernels

WEIGHTS = "model.safetensors"
NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with experts in MXFP4, and the same with the floats that transformers makes of them."""
    return mxfp4_pair(tmp_path_factory.mktemp("mxfp4"), hidden_size=64, intermediate_size=96)


def test_weights_are_those_of_transformers(models: tuple[Path, Path]) -> None:
    codes, floats = models
    saved, expected = hf_state_dict(load(codes, weight_format=PLAIN)), load_file(floats / WEIGHTS)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name].float()) for name in expected)


def test_logits_are_those_of_transformers(models: tuple[Path, Path]) -> None:
    codes, floats = models
    expected = hf_logits(hf_model(floats), prompt(40))
    assert close(packed_logits(load(codes), [prompt(40)])[0], expected)
    check_logprobs(codes, hf_model(floats), 1e-3, dtype="float32", kernels="torch")


@needs_kernels
def test_the_kernels_multiply_with_codes(models: tuple[Path, Path]) -> None:
    """The results differ by the rounding of rows to 8 bits. With --quantization none they are equal."""
    codes, floats = models
    model = hf_model(floats)
    check_logprobs(codes, model, 1e-3, dtype="float32", quantization="none")
    check_logprobs(codes, model, 0.25, dtype="float32", quantization="stored")
    settings: dict[str, Any] = {"num_kv_blocks": 60, "skip_tokenizer_init": True}
    llm, plain = LLM(codes, **settings), LLM(floats, **settings)
    assert llm.info.quantization == "mxfp4"
    assert plain.info.quantization is None
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    alone = [llm.generate([each], params)[0].outputs[0] for each in PROMPTS]
    for output, answer in zip(llm.generate(PROMPTS, params), alone, strict=True):
        assert output.outputs[0].token_ids == answer.token_ids
        assert output.outputs[0].logprobs == answer.logprobs


@needs_kernels
def test_new_weights_are_written_in_codes(models: tuple[Path, Path]) -> None:
    """Floats that are numbers of MXFP4 become the codes they were; others are rounded."""
    codes, floats = models
    llm = LLM(codes, num_kv_blocks=60, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    before = [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params)]
    for source in (floats, codes):
        llm.update_weights(source, version=1)
        assert [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params)] == before
    assert llm.info.quantization == "mxfp4"


@pytest.mark.nightly
def test_transformers_own_code_reads_them(models: tuple[Path, Path]) -> None:
    codes, floats = models
    check_logprobs(codes, hf_model(floats), 1e-3, dtype="float32", model_impl="transformers")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda all: all.pop(f"{NAME}_scales"), "down_proj_scales is missing beside blocks"),
        (lambda all: all.pop(f"{NAME}_blocks"), "down_proj_blocks is missing beside scales"),
        (
            lambda all: all.update({f"{NAME}_blocks": all[f"{NAME}_blocks"][..., :8]}),
            "down_proj_blocks has shape .*, but a block of 32 numbers has 16 bytes",
        ),
        (
            lambda all: all.update({f"{NAME}_scales": all[f"{NAME}_scales"][:3]}),
            r"down_proj_scales has shape \[3, 64, 3\]",
        ),
        (
            lambda all: all.update({f"{NAME}_scales": all[f"{NAME}_scales"].int()}),
            "down_proj_scales is stored as I32, but quantization_config needs U8",
        ),
        (
            lambda all: all.update({NAME: torch.zeros(5, 96, 64)}),
            "down_proj and .*down_proj_blocks are both stored",
        ),
        (
            lambda all: all.update({f"{NAME}_{end}": all[f"{NAME}_{end}"][:, :32] for end in ("blocks", "scales")}),
            r"down_proj has shape \[5, 96, 32\], but config.json asks for \[5, 96, 64\]",
        ),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    change: Any, words: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(models[0], tmp_path / "model")
    rewrite(tmp_path / "model", change)
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path / "model")


def test_an_exponent_that_is_no_number_replaces_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(models[0], tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: tensors[f"{NAME}_scales"].fill_(255))
    llm = LLM(models[0], num_kv_blocks=60, skip_tokenizer_init=True)
    with pytest.raises(ModelLoadError, match="down_proj has NaN or infinity"):
        llm.update_weights(tmp_path / "model", version=1)
