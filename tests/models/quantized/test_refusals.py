"""Settings and tensors that cannot be read are refused by name before memory is allocated, and always with the same
class of error."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.loader import check_weights, load_model
from chairlift.models.model_files import read_config, read_network
from tests.models.quantized import packers
from tests.models.quantized.make import model_pair, rewrite
from tests.models.quantized.test_compressed_tensors import FP8, INT8, float_weights, int_weights, settings_and_pack
from tests.models.tiny import tiny_hf_model

LAYER = "model.layers.1.mlp.down_proj"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8_METHOD: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def refusal(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message with which loading fails, without memory for weights having been asked for."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was laid out for a model that is refused")

    monkeypatch.setattr(CausalLM, "lay_out", never)
    with pytest.raises(ModelLoadError) as caught:
        load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN)
    message = str(caught.value)
    assert "\n" not in message and caught.value.__cause__ is None
    return message


def compressed(form: str, weights: dict[str, Any], activations: Any = None, **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


INT = int_weights(8, "channel")
SETTINGS: list[tuple[Any, list[str]]] = [
    ([1], ["quantization_config must be an object, not a list"]),
    ({"bits": 4}, ["quant_method = None is not supported", "compressed-tensors, fbgemm_fp8, fp8", "original weights"]),
    ({"quant_method": "hqq", "bits": 4}, ["HQQ weights are not read: ", "quant_method = 'hqq'", "a GGUF file"]),
    ({"quant_method": "exl2", "bits": 4.5}, ["EXL2 (ExLlamaV2) weights are not read: ", "--quantization int8"]),
    ({"quant_method": "quark"}, ["Quark (AMD) weights are not read: "]),
    ({"quant_method": ["gptq"]}, ["quant_method = ['gptq'] is not supported"]),
    ({**GPTQ, "bits": 5}, ["GPTQ: ", "bits = 5 is not supported; supported: 2, 3, 4, 8"]),
    ({**GPTQ, "bits": "4"}, ["bits = '4' is not supported"]),
    ({**GPTQ, "bits": True}, ["bits = True is not supported"]),
    ({**GPTQ, "group_size": 0}, ["group_size = 0 is not supported; supported: -1 (a whole row) and multiples of 32"]),
    ({**GPTQ, "group_size": 16}, ["group_size = 16 is not supported"]),
    ({**GPTQ, "sym": "yes"}, ["sym = 'yes' is not supported; supported: True, False"]),
    ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format = 'marlin' is not supported", "gptq, gptq_v2"]),
    ({**GPTQ, "dynamic": {"+:.*": {"bits": 5}}}, ["GPTQ: ", "bits = 5 is not supported; supported: 2, 3, 4, 8"]),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, ["ModelOpt: ", "quant_algo = 'W4A16_AWQ'", "NVFP4"]),
    ({"quant_method": "bitsandbytes"}, ["bitsandbytes: ", "load_in_4bit = None is not supported"]),
    ({"quant_method": "auto-round", "data_type": "mx_fp"}, ["AutoRound: ", "data_type = 'mx_fp' is not supported"]),
    ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, ["AutoRound: ", "'auto_round:fp8'"]),
    ({**AWQ, "bits": 8}, ["bits = 8 is not supported; supported: 4"]),
    ({**AWQ, "version": "gemv"}, ["version = 'gemv' is not supported; supported: gemm"]),
    ({**AWQ, "zero_point": False}, ["zero_point = False is not supported; supported: True"]),
    ({**FP8_METHOD, "activation_scheme": "fixed"}, ["FP8: ", "activation_scheme = 'fixed' is not supported", "static"]),
    ({**FP8_METHOD, "weight_block_size": [128]}, ["weight_block_size = [128] is not supported", "[128, 128]"]),
    ({**FP8_METHOD, "weight_block_size": "999999999x1"}, ["weight_block_size = '999999999x1' is not supported"]),
    ({**GPTQ, "format": "bitblas"}, ["format = 'bitblas' is not supported; supported: gptq, gptq_v2"]),
    ({**FP8_METHOD, "weight_block_size": [0, 128]}, ["weight_block_size = [0, 128] is not supported"]),
    (compressed("nvfp4-pack-quantized", INT), ["weights: type = 'int' is not supported; supported: float"]),
    (compressed("mixed-precision", INT), ["group_0: format = None is not supported", "pack-quantized"]),
    (compressed("marlin-24", INT), ["compressed-tensors: ", "format = 'marlin-24' is not supported"]),
    (compressed("int-quantized", INT, {**INT8, "dynamic": 1}), ["input_activations: dynamic = 1", "supported: True"]),
    (
        compressed("int-quantized", INT, sparsity_config={"format": "sparse-24-bitmask"}),
        ["'sparse-24-bitmask'", "dense"],
    ),
    (compressed("int-quantized", {**INT, "num_bits": 2}), ["weights: num_bits = 2 is not supported; supported: 4, 8"]),
    (compressed("pack-quantized", {**INT, "num_bits": 9}), ["num_bits = 9 is not supported; supported: 2, 3, 4, 5"]),
    (
        compressed("pack-quantized", {**INT, "actorder": "rows"}),
        ["actorder = 'rows'", "null, group, weight and static"],
    ),
    (compressed("pack-quantized", float_weights("channel")), ["type = 'float' is not supported; supported: int"]),
    (compressed("float-quantized", float_weights("group")), ["strategy = 'group'", "tensor, channel, block"]),
    (compressed("pack-quantized", int_weights(4, "group")), ["group_size = None is not supported", "multiples of 32"]),
    (compressed("float-quantized", float_weights("block"), FP8), ["block_structure = None is not supported"]),
    ({**compressed("int-quantized", INT), "config_groups": {}}, ["config_groups = {} is not supported"]),
    ({**compressed("int-quantized", INT), "config_groups": {"a": ["Linear"]}}, ["a = ['Linear'] is not supported"]),
    ({**compressed("int-quantized", INT), "config_groups": 7}, ["config_groups = 7 is not supported"]),
    ({**compressed("int-quantized", INT), "config_groups": {"a": {}}}, ["config_groups.a has no weights"]),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_settings_that_are_not_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, words: list[str]
) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=1)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    message = refusal(model_dir, monkeypatch)
    assert all(word in message for word in words), message


FORMATS = {
    "hqq": "HQQ weights are not read: ",
    "eetq": "EETQ weights are not read: ",
    "torchao": "torchao weights are not read: ",
    "quanto": "Quanto weights are not read: ",
    "sinq": "SINQ weights are not read: ",
    "bitnet": "BitNet weights are not read: ",
    "quip_sharp": "QuIP# weights are not read: ",
}


@pytest.mark.parametrize("method", FORMATS)
def test_a_refusal_begins_with_the_format_and_ends_with_the_remedy(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=1)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    message = refusal(model_dir, monkeypatch)
    assert message.startswith(FORMATS[method])
    remedy = "a GGUF file, or the original weights, which --quantization int8 or int4 rounds while they are loaded"
    assert message.endswith(remedy)


def test_formats_that_no_key_names_are_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HQQ's own files, MLX's experts, and BitNet's family."""
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=1)
    (model_dir / "model.safetensors").rename(model_dir / "qmodel.pt")
    message = refusal(model_dir, monkeypatch)
    assert message.startswith("HQQ weights are not read: ") and "qmodel.pt" in message and "GGUF" in message
    model_dir = tiny_hf_model(tmp_path, "qwen3_moe", num_hidden_layers=1)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 4}}))
    message = refusal(model_dir, monkeypatch)
    assert message.startswith("MLX: ") and message.endswith("with --quantization int8 or int4, or a GGUF file")
    config |= {"model_type": "bitnet", "quantization_config": {"quant_method": "bitnet"}}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"^BitNet weights are not read: .*three values.*; use another"):
        read_network(model_dir, "auto")


def changed(ending: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        found = change(tensors.pop(f"{LAYER}.{ending}"))
        if found is not None:
            tensors[f"{LAYER}.{ending}"] = found.contiguous()

    return apply


def added(ending: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{ending}": tensor})


def gone(_: Tensor) -> None:
    return None


gptq = packers.gptq(symmetric=False)
W4 = settings_and_pack("pack-quantized", int_weights(4, "group", symmetric=False, group=32))
W8 = settings_and_pack("int-quantized", int_weights(8, "channel"), INT8)
FLOAT = settings_and_pack("float-quantized", float_weights("channel"), FP8)
DAMAGE: list[tuple[Any, Any, list[str]]] = [
    (gptq, changed("scales", gone), ["down_proj.scales is missing beside qweight, qzeros"]),
    (gptq, changed("qzeros", gone), ["down_proj.qzeros is missing"]),
    (gptq, changed("scales", lambda t: t[:-1]), ["down_proj.scales has shape [3, 64]", "need [4, 64]"]),
    (gptq, changed("qzeros", lambda t: t.t()), ["down_proj.qzeros has shape [8, 4]", "need [4, 8]"]),
    (gptq, changed("qweight", lambda t: t[:, :32]), ["down_proj.scales has shape [4, 64]", "need [4, 32]"]),
    (gptq, changed("qweight", lambda t: t[:0]), ["down_proj.qweight has shape [0, 64]", "none of them 0"]),
    (gptq, changed("qweight", lambda t: t.float()), ["down_proj.qweight is stored as F32", "needs I32"]),
    (gptq, added("g_idx", torch.arange(7).int()), ["down_proj.g_idx has shape [7]", "need [128]"]),
    (gptq, added("g_idx", torch.full((128,), 4).int()), ["down_proj.g_idx has numbers from 4 to 4", "4 groups"]),
    (gptq, added("g_idx", torch.full((128,), -1).int()), ["down_proj.g_idx has numbers from -1"]),
    (gptq, added("weight", torch.ones(64, 128)), ["down_proj.weight and", "are both stored"]),
    (gptq, added("other", torch.ones(64)), ["1 unexpected (model.layers.1.mlp.down_proj.other)"]),
    (packers.awq(), changed("qweight", lambda t: t[:64]), ["down_proj.qzeros has shape [4, 8]", "need [2, 8]"]),
    (packers.block_fp8(), changed("weight_scale_inv", lambda t: t.repeat(2, 1)), ["has shape [2, 1]", "need [1, 1]"]),
    (packers.block_fp8(), changed("weight_scale_inv", gone), ["down_proj.weight is stored as F8_E4M3"]),
    (packers.block_fp8(), changed("weight", gone), ["down_proj.weight is missing beside weight_scale_inv"]),
    (packers.block_fp8(), added("weight_scale", torch.ones(1)), ["weight_scale is stored beside weight_scale_inv"]),
    (packers.block_fp8(), added("input_scale", torch.ones(1)), ["1 unexpected", "down_proj.input_scale"]),
    (
        packers.tensor_fp8(),
        changed("weight_scale", lambda t: torch.ones(3)),
        ["has shape [3]", "[64, 1] or [64] or []"],
    ),
    (W4, changed("weight_shape", lambda t: t * 2), ["weight_shape says [128, 256], but weight_packed has room for"]),
    (W4, changed("weight_shape", lambda t: t - t), ["weight_shape says [0, 0]"]),
    (W4, changed("weight_shape", lambda t: torch.tensor([64, -(1 << 62)])), ["weight_shape says [64, -46"]),
    (W4, changed("weight_zero_point", gone), ["down_proj.weight_zero_point is missing beside"]),
    (W4, changed("weight_zero_point", lambda t: t[:5]), ["weight_zero_point has shape [5, 4]", "need [8, 4]"]),
    (W4, added("weight_g_idx", torch.arange(128).int()), ["weight_g_idx has numbers from 0 to 127", "4 groups"]),
    (W8, changed("weight", lambda t: t[:, :64]), ["down_proj.weight has shape [64, 64], but config.json asks for"]),
    (W8, changed("weight_scale", lambda t: t.double()), ["down_proj.weight_scale is stored as F64", "F32 or F16"]),
    (W8, changed("weight_scale", gone), ["down_proj.weight is stored as I8, and quantization_config", "does not say"]),
    (FLOAT, changed("weight_scale", lambda t: t[:8]), ["weight_scale has shape [8, 1]", "need [64, 1]"]),
]


@pytest.mark.parametrize(("made", "damage", "words"), DAMAGE)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, damage: Any, words: list[str]
) -> None:
    model_dir, _ = model_pair(tmp_path, *made)
    rewrite(model_dir, damage)
    message = refusal(model_dir, monkeypatch)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("made", "ending"),
    [(gptq, "scales"), (packers.awq(), "scales"), (packers.block_fp8(), "weight_scale_inv"), (W8, "weight_scale")],
)
def test_scales_that_are_not_finite_are_found(tmp_path: Path, made: Any, ending: str) -> None:
    model_dir, _ = model_pair(tmp_path, *made)
    for value in (torch.nan, torch.inf):

        def spoil(tensors: dict[str, Tensor], value: float = value) -> None:
            tensors[f"{LAYER}.{ending}"].view(-1)[-1] = value

        rewrite(model_dir, spoil)
        with pytest.raises(ModelLoadError, match=f"tensor {LAYER}.weight has NaN or infinity"):
            check_weights(model_dir, read_config(model_dir), torch.float32)


def test_models_that_store_the_transpose_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_hf_model(tmp_path, "gpt2")
    settings, pack = packers.gptq()
    layer = "transformer.h.0.attn.c_proj"
    tensors = load_file(model_dir / "model.safetensors")
    tensors |= {
        f"{layer}.{ending}": each.contiguous() for ending, each in pack(tensors.pop(f"{layer}.weight"))[0].items()
    }
    save_file(tensors, model_dir / "model.safetensors")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    assert "is quantised, which gpt2 models cannot be" in refusal(model_dir, monkeypatch)


@pytest.mark.parametrize("made", [gptq, packers.awq(), packers.block_fp8(), W4, W8])
def test_random_damage_never_escapes_as_another_error(tmp_path: Path, made: Any) -> None:
    """Sides are cut and swapped, dtypes changed, tensors dropped and settings replaced."""
    model_dir, _ = model_pair(tmp_path, *made, num_hidden_layers=1)
    path, config_path = model_dir / "model.safetensors", model_dir / "config.json"
    whole, config = load_file(path), json.loads(config_path.read_text())
    layers = [name for name in whole if "_proj." in name]
    values = [None, 0, -1, 4, 32, "x", [], {}, True, 1e9, [64, 64], "static"]
    rng, refused = random.Random(0), list[str]()
    for _ in range(60):
        tensors, settings = dict(whole), dict(config["quantization_config"])
        name = rng.choice(layers)
        tensor = tensors.pop(name)
        if (change := rng.randrange(6)) < 5:
            tensors[name] = [
                lambda t: t[: rng.randrange(len(t) + 1)] if t.dim() else t,
                lambda t: t.t() if t.dim() == 2 else t,
                lambda t: t.to(rng.choice([torch.int32, torch.float32, torch.int8, torch.uint8])),
                lambda t: t.flatten(),
                lambda t: t,
            ][change](tensor).contiguous()
        if change >= 4:
            settings[rng.choice(list(settings))] = rng.choice(values)
        save_file(tensors, path, metadata={"format": "pt"})
        config_path.write_text(json.dumps({**config, "quantization_config": settings}))
        try:
            load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN)
        except ModelLoadError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert not any("\n" in message for message in refused)


def test_mlx_is_refused_by_name_where_its_weights_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_hf_model(tmp_path, "qwen3_next")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 4}}))
    message = refusal(model_dir, monkeypatch)
    assert message.startswith("MLX: ") and "model_type is 'qwen3_next'" in message
    assert "--quantization int8" in message
