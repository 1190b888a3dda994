"""Integers in groups reach the layers as they are, in one kind for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.weights import FP8, ONEDNN, PLAIN, MatrixShape, Plain, WeightFormat
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_tensors import GGUFTensors
from chairlift.models.loader import check_weights, load_model, replace_weights
from chairlift.models.model_files import read_config
from tests.models.gguf.make import to_gguf
from tests.models.paged import packed_logits
from tests.models.tiny import tiny_hf_model


@dataclasses.dataclass(frozen=True)
class Recording(Plain):
    """Plain weights, and what was asked of the format."""

    shapes: list[MatrixShape] = dataclasses.field(default_factory=list, compare=False)
    written: list[GroupKind | None] = dataclasses.field(default_factory=list, compare=False)
    holds: bool = False  # unlike Plain()

    def empty(self, shapes: Sequence[MatrixShape], dtype: torch.dtype, device: torch.device) -> list[Any]:
        self.shapes.extend(shapes)
        return super().empty(shapes, dtype, device)

    def write(self, weight: Tensor, start: int, rows: Tensor | GroupedRows, *, mapped: bool) -> None:
        self.written.append(rows.kind if isinstance(rows, GroupedRows) else None)
        super().write(weight, start, rows, mapped=mapped)


def mixed_gguf(tmp_path: Path, kinds: dict[str, str], **overrides: Any) -> Path:
    """A llama whose matrices are in the type that the first fitting part of their name says, else in Q8_0."""
    model_dir = tiny_hf_model(tmp_path, "llama", **overrides)
    whole = GGUFModel(to_gguf(model_dir, tmp_path / "whole.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "mixed.gguf", "llama")
    for key, value in whole.metadata.items():
        if key.startswith("llama.") or key.endswith("eos_token_id"):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name in whole:
        values = whole.read(name, 0, whole.info(name).rows)
        matrix = len(whole.info(name).shape) == 2
        values = values if matrix else values[0]
        found = next((kind for part, kind in kinds.items() if part in name), "Q8_0") if matrix else "F32"
        number = gguf.GGMLQuantizationType[found]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "mixed.gguf"


def load(path: Path, weight_format: WeightFormat, dtype: str = "float32") -> Any:
    return load_model(path, read_config(path), dtype, weight_format=weight_format)


def test_each_layer_has_the_kind_that_holds_all_its_parts(tmp_path: Path) -> None:
    types = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_0"}
    path = mixed_gguf(tmp_path, {**types, "ffn_down": "Q4_1", "attn_output": "F16"}, num_hidden_layers=1)
    recording = Recording()
    model = load(path, recording)
    kinds = {name: module.shape.kind for name, module in model.named_modules() if hasattr(module, "shape")}
    assert kinds == {
        "model.embed_tokens": GroupKind(8, 32),
        "model.layers.0.self_attn.qkv_proj": GroupKind(8, 32, True),
        "model.layers.0.self_attn.o_proj": None,
        "model.layers.0.mlp.gate_up_proj": GroupKind(4, 32),
        "model.layers.0.mlp.down_proj": GroupKind(4, 32, True),
        "lm_head": GroupKind(8, 32),
    }
    assert {shape.kind for shape in recording.shapes} == {kinds[name] for name in kinds if "embed" not in name}
    assert set(recording.written) == {shape.kind for shape in recording.shapes}, "rows come in the kind of their layer"
    tensors = GGUFTensors(GGUFModel(path), read_config(path))
    qkv = model.get_submodule("model.layers.0.self_attn.qkv_proj").weight
    parts = [tensors[f"blk.0.attn_{each}.weight"].get_tensor("") for each in "qkv"]
    for part in parts[:2]:  # the file has the rows that are rotated together beside each other
        part.copy_(part.view(-1, 8, 2, part.shape[1]).transpose(1, 2).reshape(part.shape))
    torch.testing.assert_close(qkv, torch.cat(parts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight_format", [PLAIN, ONEDNN, FP8])
def test_a_layer_with_a_part_in_floats_is_of_floats(tmp_path: Path, weight_format: WeightFormat) -> None:
    model = load(mixed_gguf(tmp_path, {"attn_v": "F32"}), weight_format)
    assert model.get_submodule("model.layers.1.self_attn.qkv_proj").shape.kind is None
    assert model.get_submodule("model.layers.1.self_attn.o_proj").shape.kind == GroupKind(8, 32)


@pytest.mark.parametrize("weight_format", [Recording(), ONEDNN])
def test_a_tied_head_shares_the_kind_where_it_shares_the_weight(tmp_path: Path, weight_format: WeightFormat) -> None:
    model = load(mixed_gguf(tmp_path, {}, tie_word_embeddings=True), weight_format)
    assert model.model.embed_tokens.shape.kind == GroupKind(8, 32)
    assert model.lm_head.shape.kind == (GroupKind(8, 32) if weight_format.embeds else None)


def grouped(path: Path, kind: GroupKind) -> dict[str, Tensor | GroupedRows]:
    tensors = load_file(path / "model.safetensors")
    return {name: GroupedRows.quantize(each, kind) if each.dim() == 2 else each for name, each in tensors.items()}


@pytest.mark.parametrize("held", ["Q4_0", "Q8_0", "F32"])
@pytest.mark.parametrize("kind", [GroupKind(4, 32), GroupKind(8, 32, True), GroupKind(8, 64)])
def test_grouped_rows_replace_weights_of_any_kind(tmp_path: Path, held: str, kind: GroupKind) -> None:
    model = load(mixed_gguf(tmp_path, {"": held}), Recording())
    source = grouped(tiny_hf_model(tmp_path / "other", "llama", seed=1), kind)
    replace_weights(model, source)
    floats = {name: each.dequantize() if isinstance(each, GroupedRows) else each for name, each in source.items()}
    expected = load(tiny_hf_model(tmp_path / "third", "llama", seed=2), PLAIN)
    replace_weights(expected, floats)
    found, wanted = (packed_logits(each, [[1, 2, 3]])[0] for each in (model, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


NAME = "model.layers.1.mlp.up_proj.weight"


def broken(rows: GroupedRows, what: str) -> GroupedRows:
    scales, codes = rows.scales.clone(), rows.codes.clone()
    if what == "nan":
        scales[5, 1] = torch.nan
    if what == "large":
        scales[5, 1] = 1e4
    if what == "short":
        scales = scales[:, :1]
    if what == "code":
        codes[3, 3] = 16
    minimums = scales if what == "minimums" else None
    return dataclasses.replace(rows, scales=scales, codes=codes, minimums=minimums)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", f"tensor {NAME} has NaN or infinity, or numbers too large for float16, in rows 0 to 95"),
        ("large", f"tensor {NAME} has NaN or infinity, or numbers too large for float16, in rows 0 to 95"),
        ("short", "is not what int4 in groups of 32 are: codes must be uint8 .* below 16, scales"),
        ("code", "is not what int4 in groups of 32 are"),
        ("minimums", "is not what int4 in groups of 32 are"),
    ],
)
def test_damaged_rows_replace_nothing(tmp_path: Path, what: str, message: str) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    model = load(model_dir, PLAIN, "float16")
    before = [each.clone() for each in model.parameters()]
    source = grouped(model_dir, GroupKind(4, 32))
    rows = source[NAME]
    assert isinstance(rows, GroupedRows)
    with pytest.raises(ModelLoadError, match=message):
        replace_weights(model, {**source, NAME: broken(rows, what)})
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_scales_that_are_not_finite_are_found_in_a_file(tmp_path: Path) -> None:
    path = mixed_gguf(tmp_path, {})
    info = GGUFModel(path).info("blk.1.ffn_up.weight")
    content = bytearray(path.read_bytes())
    content[info.start : info.start + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tensor blk\.1\.ffn_up\.weight has NaN or infinity"):
        check_weights(path, read_config(path), torch.float32)


def test_models_that_store_the_transpose_have_no_integers(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "gpt2", hidden_size=64)
    model = load(model_dir, PLAIN)
    with pytest.raises(ModelLoadError, match="is quantised, which gpt2 models cannot be"):
        replace_weights(model, grouped(model_dir, GroupKind(8, 32)))
