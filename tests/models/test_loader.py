"""A model directory is data from a stranger: what is wrong with it is named, and nothing in it is run."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.errors import ConfigError, InvariantError, ModelLoadError
from chairlift.kernels.cpu.packing import PackedWeight
from chairlift.kernels.fp8 import quantize
from chairlift.kernels.weights import FP8, NATIVE, ONEDNN, PLAIN, WeightFormat
from chairlift.models import registry
from chairlift.models.formats.checkpoint import checkpoint_layout, hf_state_dict
from chairlift.models.hf_config import parse_config
from chairlift.models.layers.linear import Linear
from chairlift.models.loader import (
    load_model,
    replace_weights,
    resolve_dtype,
    resolve_model_dir,
)
from chairlift.models.model_files import read_config
from chairlift.models.random_weights import random_model, write_random_model
from tests.models.paged import packed_logits
from tests.models.published_renamed import PUBLISHED_RENAMED
from tests.models.tiny import (
    EXPERT_FAMILIES,
    FAMILIES,
    MORE_FAMILIES,
    RECURRENT_FAMILIES,
    WHOLE_FAMILIES,
    hf_logits,
    hf_model,
    tiny_hf_model,
)
from tests.models.vision.tiny import VISION_FAMILIES
from tests.native import needs_kernels
from tests.tiers import one_in

Mutate = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_hf_model(tmp_path, "llama")


def load(model_dir: Path, **options: Any) -> Any:
    return load_model(model_dir, read_config(model_dir), **options)


def refusal(model_dir: Path) -> str:
    """The message with which loading fails; one line, fit for another process, and never another exception."""
    with pytest.raises(ModelLoadError) as caught:
        load(model_dir)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isprintable(), "half a surrogate pair cannot be sent, and would end the engine"
    assert caught.value.__cause__ is None
    return message


def rewrite(model_dir: Path, mutate: Mutate) -> None:
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    mutate(tensors)
    save_file(tensors, path)


def shard(model_dir: Path) -> dict[str, str]:
    """Split the checkpoint into two files with an index, as large models come."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, model_dir / file)
        weight_map.update(dict.fromkeys(names, file))
    write_index(model_dir, weight_map)
    return weight_map


def write_index(model_dir: Path, weight_map: Any) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("weight_format", [ONEDNN, PLAIN])
def test_sharded_and_single_files_load_alike(model_dir: Path, weight_format: WeightFormat) -> None:
    single = packed_logits(load(model_dir, weight_format=weight_format), [[1, 2, 3]])[0]
    shard(model_dir)
    assert torch.equal(packed_logits(load(model_dir, weight_format=weight_format), [[1, 2, 3]])[0], single)


def test_progress_rises_to_one(model_dir: Path) -> None:
    seen: list[float] = []
    load(model_dir, progress=lambda label, share: seen.append(share))
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] == 1.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_state_dict_is_the_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family, tie_word_embeddings=tied)
    stored = load_file(model_dir / "model.safetensors")
    model = load(model_dir, weight_format=PLAIN)
    exported = hf_state_dict(model)
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
    whole = [part for part in checkpoint_layout(model) if not part.transposed]
    ours = {model.get_parameter(part.parameter).untyped_storage().data_ptr() for part in whole}
    theirs = {exported[part.name].untyped_storage().data_ptr() for part in whole}
    assert theirs == ours, "saving takes room for another"
    save_file(exported, tmp_path / "again.safetensors")


def test_plain_formats_are_loaded_without_the_compiled_kernels(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.cpu.packing.load", lambda: None)
    exported, stored = (
        hf_state_dict(load(model_dir, weight_format=PLAIN)),
        load_file(model_dir / "model.safetensors"),
    )
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize("weight_format", [ONEDNN, pytest.param(NATIVE, marks=needs_kernels)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_packed_for_serving_cannot_be_exported(tied: bool, tmp_path: Path, weight_format: WeightFormat) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", tie_word_embeddings=tied)
    with pytest.raises(ConfigError, match="weight_format=PLAIN"):
        hf_state_dict(load(model_dir, weight_format=weight_format))


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_format_holds_the_same_weights(family: str, tied: bool, dtype: str, tmp_path: Path) -> None:
    """An intermediate size that is no multiple of a panel, so that gates and ups are padded apart."""
    model_dir = tiny_hf_model(tmp_path, family, tie_word_embeddings=tied, intermediate_size=72)
    plain = load(model_dir, dtype=dtype, weight_format=PLAIN)
    for sharded in (False, True):
        if sharded:
            shard(model_dir)
        native = load(model_dir, dtype=dtype, weight_format=NATIVE)
        linears = [(name, module) for name, module in plain.named_modules() if isinstance(module, Linear)]
        packed_names = {f"{name}.weight" for name, _ in linears} | ({"model.embed_tokens.weight"} if tied else set())
        for name, linear in linears:
            packed = native.get_submodule(name).weight
            assert isinstance(packed, PackedWeight) and packed.interleaved == name.endswith("gate_up_proj")
            assert torch.equal(packed.unpack(), linear.weight)
            assert (packed.bias is None) == (linear.bias is None)
            if linear.bias is not None:
                ones = PackedWeight(*linear.weight.shape, packed.dtype, interleaved=packed.interleaved)
                ones.set_bias(linear.bias)
                assert torch.equal(packed.bias, ones.bias) and packed.bias.any()
        rest = {name: value for name, value in plain.named_parameters() if name not in packed_names}
        kept = dict(native.named_parameters())
        assert kept.keys() == rest.keys()
        assert all(torch.equal(kept[name], value) for name, value in rest.items())
        assert (native.model.embed_tokens.weight is native.lm_head.weight) == tied


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_fp8_format_rounds_the_layers_and_nothing_else(family: str, tied: bool, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family, tie_word_embeddings=tied, intermediate_size=72)
    plain = load(model_dir, dtype="bfloat16", weight_format=PLAIN)
    fp8 = load(model_dir, dtype="bfloat16", weight_format=FP8)
    exact = load(model_dir, dtype="float32", weight_format=PLAIN)  # rounded once, not by way of bfloat16
    names = [name for name, module in plain.named_modules() if isinstance(module, Linear) and name != "lm_head"]
    assert len(names) == 4 * 3
    for name in names:
        values, scales = quantize(exact.get_submodule(name).weight)
        weight = fp8.get_submodule(name).weight
        assert torch.equal(weight.values.float(), values.float()) and torch.equal(weight.scales, scales)
    kept, rest = dict(fp8.named_parameters()), dict(plain.named_parameters())
    assert kept.keys() == rest.keys() - {f"{name}.weight" for name in names}
    assert all(torch.equal(value, rest[name]) for name, value in kept.items())
    assert (fp8.lm_head.weight is fp8.model.embed_tokens.weight) == tied
    with pytest.raises(ConfigError, match="weight_format=PLAIN"):
        hf_state_dict(fp8)


def test_a_layer_in_fp8_computes_wherever_python_runs_it(model_dir: Path) -> None:
    rounded = load(model_dir, weight_format=PLAIN)
    for module in rounded.modules():
        if isinstance(module, Linear) and module is not rounded.lm_head:
            values, scales = quantize(module.weight)
            module.weight.data = values.float() * scales[:, None]
    ours = packed_logits(load(model_dir, weight_format=FP8), [[1, 2, 3]])
    torch.testing.assert_close(ours, packed_logits(rounded, [[1, 2, 3]]))


@needs_kernels
def test_native_format_says_where_it_works(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"float32 and bfloat16 on device cpu, not torch.float16 on cpu"):
        load(model_dir, weight_format=NATIVE, dtype="float16")
    with pytest.raises(ConfigError, match="on cuda"):
        load(model_dir, weight_format=NATIVE, device="cuda")
    model = load(model_dir, weight_format=NATIVE)
    with pytest.raises(InvariantError, match="step program"):
        packed_logits(model, [[1, 2, 3]])


MEASURE = """
import sys, torch
from pathlib import Path
from chairlift.kernels.weights import NATIVE
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config

def high_water() -> int:
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_num_threads(1)
warm, measured = map(Path, sys.argv[1:])
load_model(warm, read_config(warm), weight_format=NATIVE)
before = high_water()
model = load_model(measured, read_config(measured), weight_format=NATIVE)
print(high_water() - before)
"""


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize("tied", one_in(2, [False, True]))
def test_native_loading_needs_hardly_more_memory_than_the_weights(tied: bool, tmp_path: Path) -> None:
    """Neither the file's pages nor a second copy of anything large stay."""
    warm = tiny_hf_model(tmp_path / "warm", "qwen2")
    config = json.loads((warm / "config.json").read_text())
    config |= {"vocab_size": 50_000, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    config |= {"head_dim": 64, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    config |= {"dtype": "bfloat16", "tie_word_embeddings": tied}
    measured = write_random_model(tmp_path / "measured", config, dtype="bfloat16", seed=1)
    command = [sys.executable, "-c", MEASURE, str(warm), str(measured)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    weights = (measured / "model.safetensors").stat().st_size
    assert weights > 64 << 20
    # A slice of 4 MiB per thread may be there twice, and a few huge pages may be half empty.
    assert weights * 0.95 < int(done.stdout) < weights + (40 << 20)


def test_random_model_directory_loads_in_transformers(tmp_path: Path) -> None:
    config = json.loads((tiny_hf_model(tmp_path, "qwen3") / "config.json").read_text())
    written = write_random_model(tmp_path / "random", config, dtype="float32", seed=3, std=0.25)
    expected = hf_logits(hf_model(written), [5, 6, 7])
    torch.testing.assert_close(packed_logits(load(written), [[5, 6, 7]])[0], expected, rtol=1e-4, atol=1e-4)
    half = random_model(parse_config(config), "bfloat16", seed=3, std=0.25)
    embedding = load_file(written / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(half.model.embed_tokens.weight, embedding.bfloat16())


def test_dtype_is_converted_while_loading(model_dir: Path) -> None:
    assert load(model_dir).model.norm.weight.dtype == torch.float32
    assert load(model_dir, dtype="bfloat16").model.norm.weight.dtype == torch.bfloat16
    with pytest.raises(ModelLoadError, match="int8"):
        resolve_dtype(read_config(model_dir), "int8")


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", tie_word_embeddings=True)
    expected = packed_logits(load(model_dir), [[1, 2]])[0]
    rewrite(
        model_dir,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            }
        ),
    )
    assert torch.equal(packed_logits(load(model_dir), [[1, 2]])[0], expected)


@pytest.mark.parametrize("weight_format", [PLAIN, ONEDNN])
def test_a_tied_embedding_may_be_stored_as_the_head(tmp_path: Path, weight_format: WeightFormat) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", tie_word_embeddings=True)
    expected = packed_logits(load(model_dir, weight_format=weight_format), [[1, 2]])[0]
    rewrite(model_dir, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    model = load(model_dir, weight_format=weight_format)
    assert torch.equal(packed_logits(model, [[1, 2]])[0], expected)
    replace_weights(model, tiny_hf_model(tmp_path / "other", "llama", seed=1, tie_word_embeddings=True))
    assert not torch.equal(packed_logits(model, [[1, 2]])[0], expected)
    replace_weights(model, model_dir)
    assert torch.equal(packed_logits(model, [[1, 2]])[0], expected)
    rewrite(model_dir, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 64)}))
    assert "lm_head.weight has shape [3, 64]" in refusal(model_dir)


@pytest.mark.parametrize("head", [torch.zeros(128, 64), torch.zeros(0)], ids=["other", "empty"])
def test_a_tied_head_that_differs_is_refused(tmp_path: Path, head: torch.Tensor) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(model_dir, lambda tensors: tensors.update({"lm_head.weight": head}))
    message = refusal(model_dir)
    assert all(word in message for word in ("lm_head.weight", "differ", "tie_word_embeddings")), message


@pytest.mark.parametrize(
    ("mutate", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), ["1 missing", "model.norm.weight"]),
        (lambda t: t.update({"model.layers.1.mlp.gate_proj.bias": torch.ones(96)}), ["1 unexpected", "gate_proj.bias"]),
        (lambda t: t.update({"model.norm.bias": torch.ones(64)}), ["1 unexpected", "model.norm.bias"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), ["model.norm.weight", "[65]", "[64]"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), ["model.norm.weight", "I8"]),
        (lambda t: [t.pop(name) for name in list(t)[:5]], ["5 missing", "..."]),
    ],
)
def test_tensors_that_do_not_fit_are_named(model_dir: Path, mutate: Mutate, words: list[str]) -> None:
    rewrite(model_dir, mutate)
    message = refusal(model_dir)
    assert all(word in message for word in words), message


def test_surplus_tensors_are_told_as_transformers_does(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors of layers that the model does not have are named in the log. Tensors of its own layers are refused."""
    expected = packed_logits(load(model_dir, weight_format=PLAIN), [[1, 2]])[0]
    surplus = ("mtp.proj.weight", "model.layers.3.mlp.up_proj.weight", "vision.patch.bias", "extra")
    rewrite(model_dir, lambda tensors: tensors.update({name: torch.ones(2) for name in surplus}))
    assert not caplog.messages
    model = load(model_dir, weight_format=PLAIN)
    assert torch.equal(packed_logits(model, [[1, 2]])[0], expected)
    assert len(caplog.messages) == 1 and "does not use 4 of its tensors (" in caplog.messages[0]
    replace_weights(model, model_dir)
    given = load_file(model_dir / "model.safetensors")
    with pytest.raises(ModelLoadError, match="4 unexpected"):
        replace_weights(model, given)


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.nightly) for f in MORE_FAMILIES)])
def test_files_of_the_class_without_a_head_load(tmp_path: Path, family: str) -> None:
    """``LlamaModel`` and its like save ``layers.0...``; with a tied head that is a whole model."""
    model_dir = tiny_hf_model(tmp_path, family, tie_word_embeddings=True)
    whole = load_model(model_dir, read_config(model_dir), weight_format=PLAIN)
    theirs = hf_model(model_dir)
    body = getattr(theirs, theirs.base_model_prefix)
    stored, raw = body.state_dict(), json.loads((model_dir / "config.json").read_text())
    stored |= {name: tensor for name, tensor in theirs.state_dict().items() if name == "lm_head.bias"}  # phi has one
    save_file({name: tensor.clone() for name, tensor in stored.items()}, model_dir / "model.safetensors")
    (model_dir / "config.json").write_text(json.dumps({**raw, "architectures": [type(body).__name__]}))
    bare = load_model(model_dir, read_config(model_dir), weight_format=PLAIN)
    assert torch.equal(packed_logits(bare, [[1, 2, 3]])[0], packed_logits(whole, [[1, 2, 3]])[0])


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_truncated_weights_are_refused(model_dir: Path, keep: int) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "damaged or incomplete" in refusal(model_dir)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a": 1}',
        json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 999_999_999]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 16]}}).encode(),
    ],
)
def test_hostile_headers_are_refused(model_dir: Path, header: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    assert "damaged or incomplete" in refusal(model_dir)


def test_header_length_is_not_trusted(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "damaged or incomplete" in refusal(model_dir)


def test_flipped_header_bits_never_escape_as_another_error(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=1)
    path = model_dir / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(5)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.randrange(header_end)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            load(model_dir)
        except ModelLoadError:
            refused += 1
    # Some flips land in the metadata or in white space, where they do no harm.
    assert refused > 100


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('the pickle was run')",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "\udcff\n.bin"])
def test_pickled_weights_are_refused(model_dir: Path, name: str) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / name).write_bytes(pickle.dumps(Bomb()))
    message = refusal(model_dir)
    assert repr(name) in message and "pickle" in message and "safetensors" in message


def test_missing_weights_are_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(model_dir)


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "..safetensors",
        "a.bin",
        "",
        ".safetensors",
        "C:\\a",
    ],
)
def test_index_cannot_leave_the_directory(model_dir: Path, file: str) -> None:
    weight_map = shard(model_dir)
    shutil.copy(model_dir / weight_map["model.norm.weight"], model_dir.parent / "outside.safetensors")
    write_index(model_dir, {**weight_map, "model.norm.weight": file})
    assert "only *.safetensors files beside it are allowed" in refusal(model_dir)


def test_one_file_beside_the_pieces_is_told(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = packed_logits(load(model_dir), [[1, 2, 3]])[0]
    whole = (model_dir / "model.safetensors").read_bytes()
    shard(model_dir)
    load(model_dir)
    assert not caplog.messages
    (model_dir / "model.safetensors").write_bytes(whole)
    rewrite(model_dir, lambda tensors: tensors.update({"model.norm.weight": -tensors["model.norm.weight"]}))
    assert torch.equal(packed_logits(load(model_dir), [[1, 2, 3]])[0], expected)
    assert len(caplog.messages) == 1
    assert "both model.safetensors and the weights in pieces" in caplog.messages[0]


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_short_memory_is_not_called_damage(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def no_room(*args: object, **options: object) -> None:
        raise kind("unable to mmap 1073741904 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr("chairlift.models.loader.safe_open", no_room)
    assert "there is no memory to map" in refusal(model_dir)


def test_an_index_left_behind_by_a_model_in_pieces_is_passed_over(model_dir: Path) -> None:
    model = hf_model(model_dir)
    model.save_pretrained(model_dir, max_shard_size="100KB")
    model.model.norm.weight.data *= -1
    model.save_pretrained(model_dir)
    assert (model_dir / "model.safetensors.index.json").is_file()
    ours = packed_logits(load(model_dir), [[1, 2, 3]])[0]
    assert torch.allclose(ours, hf_logits(model, [1, 2, 3]), atol=1e-3)


@pytest.mark.parametrize("weight_map", [None, {}, [], 3])
def test_index_without_a_map_is_refused(model_dir: Path, weight_map: Any) -> None:
    shard(model_dir)
    write_index(model_dir, weight_map)
    assert "weight_map" in refusal(model_dir)


def test_index_that_lies_is_refused(model_dir: Path) -> None:
    weight_map = shard(model_dir)
    first, second = sorted(set(weight_map.values()))
    write_index(model_dir, {name: second if file == first else first for name, file in weight_map.items()})
    assert "is not in model-0000" in refusal(model_dir)
    write_index(model_dir, {**weight_map, "\ud800": first})
    assert "'\\ud800' is not in model-0000" in refusal(model_dir)
    write_index(model_dir, weight_map)
    (model_dir / second).unlink()
    assert f"{second}, which is not there" in refusal(model_dir)


def test_names_that_are_no_model_are_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_dir(tmp_path) == tmp_path
    (tmp_path / "file").touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "here").touch()
    monkeypatch.chdir(tmp_path / "below")  # beside which there is no x, whatever the machine has
    for name in (str(tmp_path / "nowhere"), str(tmp_path / "file"), "../x", "a/b/c", "", "a b", "a/../b", "here"):
        with pytest.raises(ModelLoadError, match=r"(is not a directory|is a file, and no model).*; give the direct"):
            resolve_model_dir(name)
    # Without a network, an id that is not in the cache cannot be had.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"'nobody/nothing-at-all'.*the Hugging Face Hub did not give"):
        resolve_model_dir("nobody/nothing-at-all")


def test_every_family_is_compared_with_transformers() -> None:
    compared = [*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES, *RECURRENT_FAMILIES, *WHOLE_FAMILIES, *VISION_FAMILIES]
    compared += PUBLISHED_RENAMED  # with a class of transformers under other names
    compared += ["gru", "lstm"]  # with torch.nn.GRU and torch.nn.LSTM; transformers has no such models
    assert registry.FAMILIES.keys() == set(compared)
