"""A directory with quantised layers is worth what its twin in float32 says, bit for bit."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.weights import PLAIN
from chairlift.models import loader
from chairlift.models.formats.quantized_checkpoints import with_whole_weights
from chairlift.models.formats.stored_names import with_usual_names
from chairlift.models.formats.stored_rows import StoredRows
from chairlift.models.loader import check_weights, load_model, replace_weights
from chairlift.models.model_files import read_config
from tests.models.quantized import packers
from tests.models.quantized.make import Pack, model_pair, parameters, rewrite
from tests.models.tiny import tiny_hf_model

DOWN = "model.layers.1.mlp.down_proj"
CASES: dict[str, tuple[Any, Pack, GroupKind | None]] = {
    "gptq": (*packers.gptq(), GroupKind(4, 32)),
    "gptq in groups of 64, asymmetric": (*packers.gptq(group=64, symmetric=False), GroupKind(4, 64, True)),
    "gptq v2, asymmetric": (*packers.gptq(symmetric=False, v2=True), GroupKind(4, 32, True)),
    "gptq of 8 bits": (*packers.gptq(8, 64, order="given"), GroupKind(8, 64)),
    "gptq of 8 bits, asymmetric": (*packers.gptq(8, symmetric=False), GroupKind(8, 32, True)),
    "gptq with a scale for each row": (*packers.gptq(group=-1, symmetric=False), GroupKind(4, 128, True)),
    "gptq in another order": (*packers.gptq(order="random"), None),
    "gptq in another order, asymmetric": (*packers.gptq(8, 64, symmetric=False, order="random", v2=True), None),
    "awq": (*packers.awq(), GroupKind(4, 32, True)),
    "awq in groups of 128": (*packers.awq(128), GroupKind(4, 128, True)),
    "awq with a scale for each row": (*packers.awq(-1), GroupKind(4, 128, True)),
    "fp8 in blocks": (*packers.block_fp8(), GroupKind(8, 128, e4m3=True)),
    "fp8 in blocks that do not fit": (*packers.block_fp8((48, 80), torch.bfloat16), None),
    "fp8 with one scale": (*packers.tensor_fp8(), GroupKind(8, 128, e4m3=True)),
    "fp8 with one scale, by its other name": (
        *packers.tensor_fp8("weight_scale_inv", (1,)),
        GroupKind(8, 128, e4m3=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_twin(tmp_path: Path, case: str) -> None:
    settings, pack, kind = CASES[case]
    quantised, twin = model_pair(tmp_path, settings, pack)
    found, wanted = parameters(quantised), parameters(twin)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
    model = load_model(quantised, read_config(quantised), "float32", weight_format=PLAIN)
    assert model.get_submodule(DOWN).shape.kind == kind
    assert model.lm_head.shape.kind is None
    check_weights(quantised, read_config(quantised), torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Pieces of 7 to 15 rows: their ends lie within words of several outputs, and within blocks."""
    settings, pack, _ = CASES[case]
    quantised, twin = model_pair(tmp_path, settings, pack, num_hidden_layers=1)
    wanted = parameters(twin)
    monkeypatch.setattr(loader, "MOST_NUMBERS", 1000)
    found = parameters(quantised)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("case", ["gptq of 8 bits", "awq", "fp8 in blocks"])
def test_answers_are_those_of_the_twin(tmp_path: Path, case: str, kernels: str) -> None:
    settings, pack, _ = CASES[case]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for model_dir in model_pair(tmp_path, settings, pack):
        llm = LLM(
            str(model_dir),
            dtype="float32",
            quantization="none",
            skip_tokenizer_init=True,
            kernels=kernels,
            num_kv_blocks=64,
        )
        outputs = llm.generate([[5, 9, 100, 3], list(range(2, 40))], greedy)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_other_families_have_biases_norms_and_tied_heads(tmp_path: Path, family: str, tied: bool) -> None:
    """In several files, too."""
    quantised, twin = model_pair(tmp_path, *packers.gptq(), family=family, tie_word_embeddings=tied)
    tensors = load_file(quantised / "model.safetensors")
    (quantised / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, quantised / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"part-{i}.safetensors")
    (quantised / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found, wanted = parameters(quantised), parameters(twin)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_are_replaced_from_directories_of_either_sort(tmp_path: Path) -> None:
    """The quantization that the new directory states is used, not that of the original model."""
    quantised, twin = model_pair(tmp_path, *packers.gptq())
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2}
    other = tiny_hf_model(tmp_path / "other", "llama", seed=1, **sizes)
    model = load_model(quantised, read_config(quantised), "float32", weight_format=PLAIN)
    for source, wanted in ((other, other), (quantised, twin)):
        replace_weights(model, source)
        found = dict(model.named_parameters())
        assert all(torch.equal(found[name], value) for name, value in parameters(wanted).items())


def test_a_bias_of_zeros_that_the_model_has_not_is_passed_over(tmp_path: Path) -> None:
    quantised, twin = model_pair(tmp_path, *packers.gptq())
    rewrite(quantised, lambda tensors: tensors.update({f"{DOWN}.bias": torch.zeros(64)}))
    assert torch.equal(parameters(quantised)[f"{DOWN}.weight"], parameters(twin)[f"{DOWN}.weight"])
    rewrite(quantised, lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(64)}))
    with pytest.raises(ModelLoadError, match=rf"1 unexpected \({DOWN}.bias\)"):
        parameters(quantised)


def test_layers_with_other_names_keep_their_integers(tmp_path: Path) -> None:
    """A wrapper that only renames a tensor would hide that it is stored as integers."""
    quantised, _ = model_pair(tmp_path, *packers.gptq())
    with contextlib.ExitStack() as stack:
        tensors = with_whole_weights(loader.open_safetensors(quantised, stack), quantised)
        renamed = with_usual_names(tensors, {"model.": "language_model.model."}, experts=False)
        stored = renamed[f"language_model.{DOWN}.weight"]
        assert isinstance(stored, StoredRows) and stored.kind == GroupKind(4, 32)
