"""An adapter in a GGUF file is the adapter from which llama.cpp's converter made it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file

from chairlift import LoRARequest
from chairlift.errors import ModelLoadError
from chairlift.lora.adapter import Adapter
from chairlift.lora.reader import WEIGHTS_NAME, read_adapter
from chairlift.lora.settings import CONFIG_NAME
from chairlift.lora.sites import Sites, sites_of
from chairlift.models.hf_config import read_json
from tests.lora.adapters import random_adapter
from tests.lora.test_kinds import per_expert
from tests.lora.test_product import PROMPTS, answers, bits, engine
from tests.models.gguf.make import converted_adapter, to_gguf, write_gguf
from tests.models.test_families import load
from tests.models.tiny import tiny_hf_model

F32 = gguf.GGMLQuantizationType.F32
NEIGHBOURS = ("llama", "smollm3")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def written(adapter: Path, model_dir: Path, path: Path, architecture: str, **more: Any) -> Path:
    """Write an adapter of PEFT as a GGUF file. ``more`` replaces keys and tensors of the file; None removes one."""
    config = read_json(model_dir / "config.json")
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {}
    for name, values in load_file(adapter / WEIGHTS_NAME).items():
        if ".base_layer." in name:
            continue  # the base's own weight, which the converter leaves out
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_(embedding_)?([AB])(\.weight)?", name)
        assert found, name
        stored = names.get_name(found[1])
        b = found[3] == "B"
        if architecture in NEIGHBOURS and stored.endswith(("attn_q", "attn_k")) and b:
            heads = config["num_attention_heads" if stored.endswith("q") else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        values = values.T if found[2] and not b else values
        tensors[f"{stored}.weight.lora_{found[3].lower()}"] = (np.ascontiguousarray(values), F32)
    keys = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(read_json(adapter / CONFIG_NAME)["lora_alpha"]),
    }
    both = {**keys, **tensors, **more}
    kept = {name: value for name, value in both.items() if value is not None}
    return write_gguf(
        path,
        {name: value for name, value in kept.items() if not isinstance(value, tuple)},
        {name: value for name, value in kept.items() if isinstance(value, tuple)},
    )


def same(one: Adapter, other: Adapter, tolerance: float = 0.0) -> None:
    assert one.rank == other.rank and one.layers.keys() == other.layers.keys() and one.layers
    for name in one.layers:
        for a, b in zip(merged(one, name), merged(other, name), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert (one.embedding is None) == (other.embedding is None)
    if one.embedding is not None and other.embedding is not None:
        for a, b in ((one.embedding.a, other.embedding.a), (one.embedding.b, other.embedding.b)):
            assert a is not None and b is not None and torch.equal(a, b)


def merged(adapter: Adapter, name: str) -> list[torch.Tensor]:
    """Rows of B A of a layer, which do not depend on how the layer is divided: each with the number of its row."""
    rows = [(part.start, part.b @ part.a) for part in adapter.layers[name]]
    return [torch.arange(start, start + len(product))[:, None] + 100 * product for start, product in rows]


FAMILIES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "one-of-two": ("llama", "llama", {"target_modules": ["v_proj", "up_proj"]}),
    "ranks": ("llama", "llama", {"rank_pattern": {"q_proj": 7, "down_proj": 1}}),
    "embedding": ("llama", "llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "halves": ("qwen3", "qwen3", {"target_modules": ALL}),
    "fused": ("phi3", "phi3", {}),
    "ungated": ("starcoder2", "starcoder2", {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_has_the_matrices_of_the_directory(name: str, tmp_path: Path) -> None:
    family, architecture, settings = FAMILIES[name]
    model_dir = tiny_hf_model(tmp_path, family, tie_word_embeddings=False)
    adapter = random_adapter(model_dir, tmp_path / "a", **settings)
    sites = sites_of(load(model_dir))
    path = written(adapter, model_dir, tmp_path / "a.gguf", architecture)
    same(read_adapter(path, sites, max_rank=64), read_adapter(adapter, sites, max_rank=64))


def test_both_forms_give_the_same_answers(tmp_path: Path) -> None:
    """Over the model's directory and over the model's GGUF file, in one batch, from a file and from a directory."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    adapter = random_adapter(model_dir, tmp_path / "a")
    (tmp_path / "b").mkdir()
    path = written(adapter, model_dir, tmp_path / "b" / "a.gguf", "llama")
    for model in (model_dir, to_gguf(model_dir, tmp_path / "model.gguf")):
        llm = engine(model)
        asked = [LoRARequest("a", 1, adapter), LoRARequest("b", 2, path), LoRARequest("c", 3, tmp_path / "b"), None]
        found = [bits(each) for each in answers(llm, [PROMPTS[0]] * 4, asked)]
        assert found[0] == found[1] == found[2] != found[3]


@pytest.fixture(scope="module")
def adapter(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(model_dir, tmp_path_factory.mktemp("adapter") / "a")


@pytest.mark.parametrize("alpha", [0.0, None])
def test_without_alpha_the_scale_is_one(
    alpha: float | None, adapter: Path, model_dir: Path, sites: Sites, tmp_path: Path
) -> None:
    whole = written(adapter, model_dir, tmp_path / "whole.gguf", "llama", **{"adapter.lora.alpha": 4.0})  # r is 4
    path = written(adapter, model_dir, tmp_path / "a.gguf", "llama", **{"adapter.lora.alpha": alpha})
    same(read_adapter(path, sites, max_rank=4), read_adapter(whole, sites, max_rank=4))


def matrix(*shape: int) -> tuple[npt.NDArray[np.float32], gguf.GGMLQuantizationType]:
    return np.zeros(shape, dtype=np.float32), F32


Q = "blk.0.attn_q.weight"
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "model": ({"general.type": "model"}, "general.type is 'model'; an adapter has 'adapter'"),
    "kind": ({"adapter.type": "control"}, "adapter.type is 'control'"),
    "architecture": ({"general.architecture": "qwen2"}, "architecture is 'qwen2', and the model is llama"),
    "activated": ({"adapter.alora.invocation_tokens": [1, 2]}, "invocation_tokens"),
    "alpha": ({"adapter.lora.alpha": "8"}, "adapter.lora.alpha must be a number"),
    "norm": ({"blk.0.attn_norm.weight": matrix(64)}, "'blk.0.attn_norm.weight' is no matrix of an adapter"),
    "half": ({f"{Q}.lora_b": None}, "lora_A but no lora_B"),
    "layer": ({"blk.7.attn_q.weight.lora_a": matrix(4, 64)}, "blk.7.attn_q.*another model"),
    "rank": ({f"{Q}.lora_a": matrix(5, 64)}, r"shape \[5, 64\]"),
    "rows": ({f"{Q}.lora_b": matrix(32, 4)}, r"shape \[32, 4\]"),
    "experts": ({"blk.0.ffn_up_exps.weight.lora_a": matrix(2, 4, 64)}, "blk.0.ffn_up_exps.0"),
    "vector": ({f"{Q}.lora_a": matrix(4)}, r"shape \[4\], which no matrix"),
    "nan": ({f"{Q}.lora_a": (np.full((4, 64), np.nan, dtype=np.float32), F32)}, "NaN"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(
    name: str, adapter: Path, model_dir: Path, sites: Sites, tmp_path: Path
) -> None:
    change, problem = REFUSED[name]
    path = written(adapter, model_dir, tmp_path / "a.gguf", "llama", **change)
    with pytest.raises(ModelLoadError, match=problem):
        read_adapter(path, sites, max_rank=64)


def test_a_file_must_lie_below_the_root_also_behind_links(
    adapter: Path, model_dir: Path, sites: Sites, tmp_path: Path
) -> None:
    path = written(adapter, model_dir, tmp_path / "a.gguf", "llama")
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(path, root / "own.gguf")
    (root / "link.gguf").symlink_to(path)
    assert read_adapter(root / "own.gguf", sites, max_rank=4, root=root).rank == 4
    with pytest.raises(ModelLoadError, match="lies outside of"):
        read_adapter(root / "link.gguf", sites, max_rank=4, root=root)
    with pytest.raises(ModelLoadError, match="is not a file"):
        read_adapter(root / "none.gguf", sites, max_rank=4, root=root)
    with pytest.raises(ModelLoadError, match="rank 4, and max_lora_rank is 3"):
        read_adapter(root / "own.gguf", sites, max_rank=3, root=root)


CONVERTED: Final = (
    *("llama", "qwen2", "qwen3", "gemma2", "phi3", "starcoder2", "granite", "smollm3", "glm4"),
    *("gemma3_text", "mistral", "internlm3", "olmo2", "seed_oss", "stablelm", "arcee", "qwen3_moe"),
)
EXPERTS: Final = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONVERTED)
def test_llama_cpps_converter_writes_the_same_adapter(family: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family)
    adapter = random_adapter(model_dir, tmp_path / "a", **(EXPERTS if family == "qwen3_moe" else {}))
    if family == "qwen3_moe":
        per_expert(adapter, 6)
    sites = sites_of(load(model_dir))
    path = converted_adapter(adapter, model_dir, tmp_path / "a.gguf")
    same(read_adapter(path, sites, max_rank=64), read_adapter(adapter, sites, max_rank=64))
