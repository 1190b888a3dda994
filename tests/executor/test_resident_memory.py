"""A process that serves a model keeps its weights once, its KV cache, and a few hundred megabytes in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chairlift.models.random_weights import write_random_model
from tests.native import needs_kernels

OTHER = 400e6
"""Bytes for Python, PyTorch, the buffers of a step and everything else."""
SHAPE = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    **{"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048},
}
"""110 million parameters."""
MEASURE = """
import sys
from chairlift import LLM, SamplingParams

llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype=sys.argv[2], kv_cache_memory_bytes=int(sys.argv[3]))
prompts = [[1 + (i * j) % 16_000 for j in range(40 + 20 * i)] for i in range(32)]
llm.generate(prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True))
print(next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.nightly
@needs_kernels
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch's libraries for CUDA take hundreds of megabytes")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_weights_are_in_memory_once(dtype: str, tmp_path: Path) -> None:
    model_dir = write_random_model(tmp_path / "model", SHAPE, dtype=dtype)
    weights, kv_cache = (model_dir / "model.safetensors").stat().st_size, 128 << 20
    arguments = [sys.executable, "-c", MEASURE, str(model_dir), dtype, str(kv_cache)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    most = int(done.stdout.split()[-1])
    assert most <= weights + kv_cache + OTHER, f"{most / 1e6:.0f} MB with {weights / 1e6:.0f} MB of weights"
    assert most > weights, "or it has measured something else"
