"""Weights of every block type are exact where floats are asked for: equal to the ``gguf`` package's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.kernels.weights import PLAIN, WeightFormat
from chairlift.models.formats.gguf.blocks import BLOCK_TYPES
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_tensors import GGUFTensor
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.gguf.make import real_gemma, real_gguf
from tests.models.gguf.test_tensors import raw_blocks
from tests.native import needs_kernels

NAMES = [kind.name for kind in BLOCK_TYPES.values()]
WIDTH, VOCABULARY = 256, 96
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def one_layer(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a Llama with one layer, whose matrices have the block type ``name``. Returns name of a layer in memory ->
    its weight as the public package reads it, float32."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": WIDTH}
    for key, value in (sizes | {"attention.head_count": 4}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kind, found = gguf.GGMLQuantizationType[name], dict[str, torch.Tensor]()
    for seed, matrix in enumerate(("token_embd", *(f"blk.0.{each}" for each in MATRICES))):
        raw = raw_blocks(name, seed, WIDTH if seed else VOCABULARY, WIDTH)
        writer.add_tensor(f"{matrix}.weight", raw, raw_dtype=kind)
        found[matrix.rpartition(".")[2]] = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    q, k = (found[each].view(4, 32, 2, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH) for each in MATRICES[:2])
    return {
        "model.embed_tokens": found["token_embd"],
        "model.layers.0.self_attn.qkv_proj": torch.cat([q, k, found["attn_v"]]),
        "model.layers.0.self_attn.o_proj": found["attn_output"],
        "model.layers.0.mlp.gate_up_proj": torch.cat([found["ffn_gate"], found["ffn_up"]]),
        "model.layers.0.mlp.down_proj": found["ffn_down"],
    }


def check_exact(path: Path, expected: dict[str, torch.Tensor], weight_format: WeightFormat) -> None:
    model = load_model(path, read_config(path), "float32", weight_format=weight_format)
    assert model.quantization is None
    for name, numbers in expected.items():
        weight = model.get_submodule(name).weight
        assert torch.equal(weight if isinstance(weight, torch.Tensor) else weight.unpack(), numbers), name


@pytest.mark.parametrize("name", NAMES)
def test_float_weights_for_pytorch_equal_the_public_reader_bit_for_bit(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    check_exact(path, one_layer(path, name), PLAIN)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_float_weights_of_the_native_kernels_equal_the_public_reader_bit_for_bit(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    check_exact(path, one_layer(path, name), NativeBackend("avx2").weight_format("none"))


@pytest.mark.nightly
@pytest.mark.parametrize("file", [real_gguf, real_gemma])
def test_all_tensors_of_real_files_equal_the_public_reader_bit_for_bit(file: Callable[[], Path]) -> None:
    """Q4_1 and Q8_0 of SmolLM2; Q4_K, Q5_0, Q6_K and Q8_0 of Gemma 3."""
    path = file()
    ours = GGUFModel(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = GGUFTensor(ours, tensor.name, None).get_tensor(tensor.name)
        np.testing.assert_array_equal(found.numpy().view(np.uint32), expected.view(np.uint32), err_msg=tensor.name)


@pytest.mark.nightly
@needs_kernels
def test_a_real_model_in_float32_knows_a_capital() -> None:
    """With activations of 8 bits its answer is another."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_kv_blocks": 16}
    exact, stored = (
        LLM(str(real_gguf()), quantization=each, **sizes).chat([question], params)[0] for each in (None, "stored")
    )
    assert exact.outputs[0].text == "The capital of France is Paris."
    assert stored.outputs[0].text != exact.outputs[0].text
