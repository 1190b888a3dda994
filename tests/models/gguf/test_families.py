"""GGUF files of every kind of family are the models that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.gguf.make import to_gguf
from tests.models.paged import PagedRunner, packed_logits
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model
from tests.native import needs_kernels

_FACTORS: Final = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.3}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "arcee": ("arcee", {}),
    "granite": ("granite", {**_FACTORS, "logits_scaling": 2.5}),
    "granitemoe": ("granitemoe", {**_FACTORS, "logits_scaling": 2.5}),
    "lfm2": ("lfm2", {}),
    "mamba2": ("mamba2", {"n_groups": 1}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
    "starcoder2": ("starcoder2", {}),
}
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_file_equal_transformers_alone_and_in_company(tmp_path: Path, name: str) -> None:
    family, overrides = MODELS[name]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    path = to_gguf(model_dir, tmp_path / "model.gguf")
    ours = load_model(path, read_config(path), "float32")
    theirs = hf_model(model_dir)
    prompts = [prompt(40, 1), prompt(3, 2), prompt(61, 3)]
    expected = [hf_logits(theirs, tokens) for tokens in prompts]
    for logits, reference in zip(packed_logits(ours, prompts), expected, strict=True):
        assert close(logits, reference)
    runner = PagedRunner(ours, 8, num_blocks=256)
    chunks = [runner.step([("chunked", prompts[2][a:b])])[0] for a, b in ((0, 5), (5, 6), (6, 32), (32, 61))]
    assert close(torch.cat(chunks), expected[2])


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_text_models_of_models_that_read_images_are_those_of_texts(
    tmp_path: Path, family: str, architecture: str
) -> None:
    """Positions of texts are equal on all three axes."""
    model_dir = tiny_hf_model(tmp_path, family, **({"norm_topk_prob": True} if family == "qwen3_moe" else {}))
    keys = {f"{architecture}.rope.dimension_sections": [2, 3, 3, 0]}
    path = to_gguf(model_dir, tmp_path / "model.gguf", architecture=architecture, **keys)
    tokens = prompt(40)
    found = packed_logits(load_model(path, read_config(path), "float32"), [tokens])[0]
    assert close(found, hf_logits(hf_model(model_dir), tokens))


@needs_kernels
@pytest.mark.parametrize("name", ["granitemoe", "mixtral", "qwen2_moe"])
def test_experts_of_a_file_keep_their_integers(tmp_path: Path, name: str) -> None:
    """Answers with activations of 8 bits differ from those of floats, so floats with the same weights are compared."""
    family, overrides = MODELS[name]
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if family == "qwen2_moe" else {}
    path = to_gguf(tiny_hf_model(tmp_path, family, **{**overrides, **sizes}), tmp_path / "model.gguf", "Q8_0")
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64}
    answers = []
    for more in ({"quantization": "none", "kernels": "torch"}, {"quantization": "none"}):
        outputs = LLM(str(path), **settings, **more).generate([[5, 9, 100, 3], list(range(2, 40))], GREEDY)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert LLM(str(path), **settings, quantization="stored").info.quantization == "int8"
