"""Files that llama.cpp's own converter writes are the models that they were made from, for each architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.gguf.make import converter
from tests.models.gguf.test_model import FURTHER, parameters
from tests.models.paged import packed_logits
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model

_YARN: Final = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3: Final = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **FURTHER,
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": _YARN | {"beta_fast": 16.0, "attention_factor": 1.2}}),
}
_CONVERT: Final = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import gguf
from conversion import get_model_class
from conversion.base import ModelBase
config = ModelBase.load_hparams(Path(sys.argv[2]), False)
model = get_model_class(config["architectures"][0])
model.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
model(Path(sys.argv[2]), gguf.LlamaFileType.ALL_F32, Path(sys.argv[3])).write()
"""
"""Program that converts a directory without its tokenizer. It runs in its own process, because llama.cpp has its own
version of the package ``gguf``."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    family, overrides = MODELS[name]
    model_dir, path = tiny_hf_model(tmp_path, family, **overrides), tmp_path / "model.gguf"
    vocabulary = {str(number): number for number in range(read_config(model_dir).vocab_size)}
    (model_dir / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    command = [sys.executable, "-c", _CONVERT, str(converter()), str(model_dir), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = parameters(path), parameters(model_dir)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-7)
    tokens = prompt(40)
    model = load_model(path, read_config(path).for_length(40), "float32")
    assert close(packed_logits(model, [tokens])[0], hf_logits(hf_model(model_dir), tokens))
