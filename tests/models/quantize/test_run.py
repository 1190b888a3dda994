"""Directories that are written: what Chairlift, compressed-tensors and transformers read in them."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from chairlift import LLM
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.weights import PLAIN
from chairlift.models import loader
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.formats.quantize import run
from chairlift.models.formats.quantize.recipes import RECIPES
from chairlift.models.formats.quantize.rounding import round_rows
from chairlift.models.formats.quantize.run import quantize_model
from chairlift.models.formats.quantize.writing import ShardWriter
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.gguf.make import to_gguf
from tests.models.paged import packed_logits
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model
from tests.native import needs_kernels
from tests.text.tokenizer import tiny

KINDS = {name: RECIPES[name].layers for name in ("int4-g32", "int4-g128", "int8")}
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def with_tokenizer(model_dir: Path) -> Path:
    tiny.byte_level_backend().save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return model_dir


def small(tmp_path: Path, family: str = "llama", **overrides: Any) -> Path:
    vocab = tiny.byte_level_backend().get_vocab_size()
    return with_tokenizer(tiny_hf_model(tmp_path, family, **{"vocab_size": vocab, **SIZES, "std": 0.1, **overrides}))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("small"), dtype=torch.bfloat16)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"the quick brown fox number {number} jumps over it" for number in range(20)))
    return path


def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    """By Hugging Face's names, float32."""
    return hf_state_dict(load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN))


def decompressed(out: Path) -> dict[str, torch.Tensor]:
    """The layers as compressed-tensors reads them, in float32."""
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    )
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored, found = load_file(out / "model.safetensors"), {}
    for name in stored:
        layer, _, ending = name.rpartition(".")
        if ending == "weight_packed":
            parts = {e: stored[f"{layer}.{e}"] for e in ("weight_packed", "weight_scale", "weight_shape")}
            parts["weight_scale"] = parts["weight_scale"].float()
            found[f"{layer}.weight"] = compressor.decompress(parts, scheme)["weight"]
    return found


@pytest.mark.parametrize("calibrated", [False, True], ids=["nearest", "gptq"])
@pytest.mark.parametrize("form", KINDS)
def test_numbers_are_those_of_compressed_tensors(
    tmp_path: Path, model_dir: Path, texts: Path, form: str, calibrated: bool
) -> None:
    report = quantize_model(model_dir, tmp_path / "out", form, texts if calibrated else None)
    found, wanted, before = weights(tmp_path / "out"), decompressed(tmp_path / "out"), weights(model_dir)
    matrices = [name for name in before if name.endswith("_proj.weight")]
    assert sorted(wanted) == sorted(matrices)
    for name, values in before.items():
        assert torch.equal(found[name], wanted.get(name, values)), name
    assert (report.matrices, report.weights) == (14, sum(before[name].numel() for name in matrices))
    assert report.nbytes == sum(each.nbytes for each in load_file(tmp_path / "out" / "model.safetensors").values())
    error = sum(float((found[name] - before[name]).double().square().sum()) for name in matrices)
    assert report.squares.error == pytest.approx(error, rel=1e-4)
    assert (report.tokens > 0) is calibrated
    assert (report.samples, len(report.output_errors)) == ((20, 8) if calibrated else (0, 0))
    model = load_model(tmp_path / "out", read_config(tmp_path / "out"), weight_format=PLAIN)
    for name in ("self_attn.qkv_proj", "mlp.down_proj"):
        assert model.get_submodule(f"model.layers.1.{name}").shape.kind == KINDS[form]


@needs_kernels
@pytest.mark.parametrize(("form", "bits"), [("int8", "int8"), ("int4-g32", "int4"), ("int4-g128", "int4")])
def test_chairlift_serves_the_integers(tmp_path: Path, model_dir: Path, form: str, bits: str) -> None:
    quantize_model(model_dir, tmp_path / "out", form)
    llm = LLM(str(tmp_path / "out"), num_kv_blocks=16)
    assert llm.info.quantization == bits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_transformers_computes_the_same(tmp_path: Path, family: str) -> None:
    out, ids = tmp_path / "out", [5, 9, 100, 3, 77, 20]
    quantize_model(small(tmp_path, family, tie_word_embeddings=family == "qwen2"), out, "int4-g32")
    model = load_model(out, read_config(out), "float32", weight_format=PLAIN)
    theirs = hf_model(out, torch.float32)
    torch.testing.assert_close(packed_logits(model, [ids])[0], hf_logits(theirs, ids), rtol=1e-3, atol=1e-3)


def test_float16_stays_and_float32_becomes_bfloat16(tmp_path: Path, model_dir: Path) -> None:
    for given, wanted in ((torch.float16, torch.float16), (torch.float32, torch.bfloat16)):
        source = small(tmp_path / str(given), dtype=given)
        report = quantize_model(source, tmp_path / f"{given}-out", "int8")
        stored = load_file(tmp_path / f"{given}-out" / "model.safetensors")
        assert {each.dtype for each in stored.values()} == {wanted, torch.int32, torch.int64}
        assert read_config(tmp_path / f"{given}-out").dtype == str(wanted).removeprefix("torch.")
        assert [("float32 to bfloat16" in note) for note in report.notes] == [True] * (given == torch.float32)


def test_files_beside_the_weights_are_copied(tmp_path: Path, model_dir: Path) -> None:
    shutil.copytree(model_dir, source := tmp_path / "source")
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "surprise.py").write_text("")
    quantize_model(source, tmp_path / "out", "int4-g32")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert names == copied | {"config.json", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in copied)


def test_pieces_and_shards_change_nothing(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_model(model_dir, tmp_path / "whole", "int4-g32")
    monkeypatch.setattr(loader, "_PIECE_BYTES", 5000)
    monkeypatch.setattr(loader, "MOST_NUMBERS", 1000)
    monkeypatch.setattr(run, "ShardWriter", lambda folder, tensors: ShardWriter(folder, tensors, 40_000))
    report = quantize_model(model_dir, tmp_path / "pieces", "int4-g32")
    assert len(report.files) > 3
    found, wanted = weights(tmp_path / "pieces"), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_gguf_file_becomes_a_directory(tmp_path: Path, texts: Path) -> None:
    """One with a tokenizer inside; its own integers are dequantised first."""
    from tests.models.gguf.test_tokenizer import as_metadata

    backend = tiny.byte_level_backend()
    source = tiny_hf_model(tmp_path, "llama", vocab_size=backend.get_vocab_size(), **SIZES)
    more = as_metadata(backend, "gpt2")
    gguf = to_gguf(source, tmp_path / "model.gguf", "Q8_0", **{"tokenizer.ggml.pre": "gpt-2", **more})
    for path, calibration in (("out", None), ("calibrated", texts)):
        report = quantize_model(gguf, tmp_path / path, "int4-g32", calibration)
        assert "quantised already (int8 in groups of 32)" in report.notes[0]
    before, found = weights(gguf), weights(tmp_path / "out")
    for name, values in before.items():
        quantised = name.endswith("_proj.weight")
        wanted = round_rows(values, KINDS["int4-g32"], torch.bfloat16)[0].dequantize() if quantised else values
        torch.testing.assert_close(found[name], wanted, rtol=2**-8, atol=0)
    one, two = (read_config(path) for path in (gguf, tmp_path / "out"))
    assert (one.rope, one.eos_token_ids, one.max_model_len) == (two.rope, two.eos_token_ids, two.max_model_len)
    llms = [LLM(str(path), num_kv_blocks=16) for path in (gguf, tmp_path / "out", tmp_path / "calibrated")]
    ids = [llm.tokenizer.encode("the quick brown fox") for llm in llms if llm.tokenizer is not None]
    assert ids[0] == ids[1] == ids[2]


def test_a_quantised_directory_is_dequantised_first(tmp_path: Path, model_dir: Path) -> None:
    quantize_model(model_dir, tmp_path / "8", "int8")
    report = quantize_model(tmp_path / "8", tmp_path / "4", "int4-g32")
    assert "the model is quantised already (int8 in groups of 32): its weights are dequantised" in report.notes[0]
    wanted = weights(tmp_path / "8")["model.layers.0.mlp.up_proj.weight"]
    rounded, _ = round_rows(wanted, KINDS["int4-g32"], torch.bfloat16)
    assert torch.equal(weights(tmp_path / "4")["model.layers.0.mlp.up_proj.weight"], rounded.dequantize())


# --- refusals --------------------------------------------------------------------------------------------------------


def test_rows_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = small(tmp_path, intermediate_size=192)
    with pytest.raises(ModelLoadError, match=r"has rows of 192 .* use --format int4 or int4-small or int4-g32"):
        quantize_model(source, tmp_path / "out", "int4-g128")
    with pytest.raises(ModelLoadError, match=r"rows of 72 numbers, .* this model cannot be quantised"):
        quantize_model(small(tmp_path / "odd", hidden_size=72), tmp_path / "out", "int8")
    with pytest.raises(ModelLoadError, match="weights of gpt2 models are stored transposed"):
        quantize_model(tiny_hf_model(tmp_path, "gpt2"), tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_frequency_divisors_are_refused(tmp_path: Path) -> None:
    import numpy as np

    source = tiny_hf_model(tmp_path, "llama", **SIZES)
    gguf = to_gguf(source, tmp_path / "model.gguf", divisors=np.ones(16, np.float32))
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight divides each rotary frequency"):
        quantize_model(gguf, tmp_path / "out", "int8")


@pytest.mark.parametrize(("existed", "calibrated"), [(False, False), (True, False), (False, True)])
def test_weights_that_are_not_finite_leave_nothing_behind(
    tmp_path: Path, model_dir: Path, texts: Path, existed: bool, calibrated: bool
) -> None:
    shutil.copytree(model_dir, broken := tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][7, 3] = float("inf")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    if existed:
        (tmp_path / "out").mkdir()
    with pytest.raises(ModelLoadError, match=r"layers.1.mlp.down_proj.weight has NaN or infinity"):
        quantize_model(broken, tmp_path / "out", "int4-g32", texts if calibrated else None)
    assert list((tmp_path / "out").iterdir() if existed else ()) == []
    assert (tmp_path / "out").exists() is existed


def test_a_full_disk_is_found_before_or_cleaned_up(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"needs \d+ MiB .* and 0 MiB are free; make room"):
            quantize_model(model_dir, tmp_path / "out", "int8")
    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        quantize_model(model_dir, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, texts: Path) -> None:
    source = small(tmp_path, vocab_size=100)
    with pytest.raises(ConfigError, match=r"the tokenizer makes token .* but the model has 100"):
        quantize_model(source, tmp_path / "out", "int8", texts)


def test_few_tokens_are_noted(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    report = quantize_model(model_dir, tmp_path / "out", "int8", tmp_path / "short.txt")
    assert "fewer than the 256 inputs of the widest layer" in report.notes[-1]


def steps(shares: list[tuple[str, float]]) -> Iterator[float]:
    return (share for label, share in shares if label == "quantising")


def test_progress_ends_at_one(tmp_path: Path, model_dir: Path, texts: Path) -> None:
    shares: list[tuple[str, float]] = []
    quantize_model(model_dir, tmp_path / "out", "int8", texts, lambda label, share: shares.append((label, share)))
    assert {label for label, _ in shares} == {"loading weights", "calibrating", "quantising"}
    assert list(steps(shares)) == sorted(steps(shares))
    assert shares[-1][1] == 1.0
