"""Keys that a file does not have, or has in an older form, have the values of llama.cpp's loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from chairlift.errors import ModelLoadError
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.rotary import inverse_frequencies
from chairlift.models.model_files import read_config
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.models.gguf.make import to_gguf, write_gguf
from tests.models.gguf.test_model import FURTHER
from tests.models.gguf.test_tokenizer import as_metadata, tokens_id
from tests.models.tiny import tiny_hf_model
from tests.text.tokenizer.tiny import byte_fallback_backend, byte_level_backend


def config_of(tmp_path: Path, family: str, **changes: Any) -> NetworkConfig:
    """Config of a tiny model's file with changed metadata; None removes a key."""
    name, overrides = FURTHER.get(family, (family, {}))
    model_dir = tiny_hf_model(tmp_path, name, **overrides)
    return read_config(to_gguf(model_dir, tmp_path / "model.gguf", **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama.rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"llama.rope.scale_linear": 2.0}, ("linear", 2.0)),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, ("linear", 4.0)),
        ({"llama.rope.scaling.factor": 0.0}, ("default", 1.0)),
        ({"llama.rope.scaling.type": "linear"}, ("default", 1.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, ("default", 1.0)),
        ({"llama.rope.scaling.type": "yarn"}, ("default", 1.0)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, ("yarn", 4.0)),
        ({"llama.rope.freq_base": None}, ("default", 1.0)),
    ],
)
def test_a_factor_without_its_type_scales_linearly(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[str, float]
) -> None:
    rope = config_of(tmp_path, "llama", **changes).rope
    assert rope is not None and (rope.rope_type, rope.factor, rope.theta) == (*expected, 10_000.0)


def test_yarn_keys_are_those_of_the_original_model(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "attn_factor": 0.5}
    rope = config_of(tmp_path, "llama", **{f"llama.rope.scaling.{key}": value for key, value in keys.items()}).rope
    assert rope is not None and (rope.original_max_position_embeddings, rope.beta_fast, rope.beta_slow) == (64, 16, 1)
    assert rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))


def test_linear_scaling_and_divisors_of_frequencies_hold_together(tmp_path: Path) -> None:
    divisors = np.arange(1, 9, dtype=np.float32)
    model_dir = tiny_hf_model(tmp_path, "llama")
    path = to_gguf(model_dir, tmp_path / "model.gguf", divisors=divisors, **{"llama.rope.scaling.factor": 4.0})
    found, _ = inverse_frequencies(16, read_config(path).rope, 512)
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2).float() / 16)
    torch.testing.assert_close(found, plain / torch.from_numpy(divisors) / 4, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"])
def test_a_head_is_as_wide_as_the_hidden_size_divided_by_the_heads(tmp_path: Path, family: str) -> None:
    """The original families have other defaults: 128 for Qwen3, 256 for Gemma."""
    found = config_of(tmp_path, family, **{f"{family}.attention.key_length": None})
    assert found.head_dim == found.hidden_size // found.num_attention_heads


def test_absent_heads_of_keys_are_the_heads_of_queries(tmp_path: Path) -> None:
    found = config_of(tmp_path, "llama", **{"llama.attention.head_count_kv": None})
    assert found.num_key_value_heads == found.num_attention_heads


def test_old_files_of_gemma2_have_the_windows_and_caps_of_the_model(tmp_path: Path) -> None:
    keys = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    found = config_of(tmp_path, "gemma2", **dict.fromkeys(f"gemma2.{key}" for key in keys))
    assert found.layer_windows == tuple(None if layer % 2 else 4096 for layer in range(found.num_hidden_layers))
    assert (found.score_cap, found.logit_cap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("pattern", "slides"),
    [(None, "YYYYYN"), (3, "YYNYYN"), (1, "NNNNNN"), (0, "YYYYYY"), ([True, False] * 3, "YNYNYN")],
)
def test_a_file_may_say_which_layers_have_windows(tmp_path: Path, pattern: Any, slides: str) -> None:
    found = config_of(tmp_path, "gemma3", **{"gemma3.attention.sliding_window_pattern": pattern})
    window = max(filter(None, found.layer_windows), default=None)
    assert found.layer_windows == tuple(window if each == "Y" else None for each in slides)


@pytest.mark.parametrize("window", [None, 0])
def test_gemma3_without_a_window_attends_to_everything(tmp_path: Path, window: int | None) -> None:
    found = config_of(tmp_path, "gemma3", **{"gemma3.attention.sliding_window": window})
    assert set(found.layer_windows) == {None}


def test_longrope_without_a_magnitude_changes_none(tmp_path: Path) -> None:
    changes = {"phi3.rope.scaling.attn_factor": None, "phi3.rope.scaling.type": "longrope"}
    rope = config_of(tmp_path, "phi3-longrope", **changes).rope
    assert rope is not None and (rope.rope_type, rope.attention_factor) == ("longrope", 1.0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"attention.causal": False}, "reads texts in both directions"),
        ("llama", {"rope.scaling.attn_factor": 1.5}, "is supported with the type yarn only"),
        ("llama", {"rope.scaling.type": 3}, "rope.scaling.type must be a text, got 3"),
        ("llama", {"attention.head_count": 0}, "head_count is 0; it must be a positive number"),
        ("llama", {"attention.key_length_swa": 8}, "key_length_swa differs from key_length 16"),
        ("llama", {"rope.dimension_count": 16, "rope.dimension_count_swa": 8}, "dimension_count_swa differs"),
        (
            "llama",
            {"rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
            "ext",
        ),
        ("gemma2", {"rope.freq_base_swa": 5e3}, "freq_base_swa differs from freq_base"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "has 1 entries for 6 layers"),
        ("gemma3", {"block_count": 1 << 30}, "block_count is 1073741824; 1 to 1024 layers are supported"),
        ("phi3-longrope", {"rope.scaling.factor": 4.0}, "scales a model that has a divisor for each frequency"),
    ],
)
def test_keys_that_would_change_the_results_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    prefix = family.partition("-")[0]
    with pytest.raises(ModelLoadError, match=message):
        config_of(tmp_path, family, **{f"{prefix}.{key}": value for key, value in changes.items()})


def tokenizer_of(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    tensors = {"x": (np.zeros((1, 32), dtype=np.float32), gguf.GGMLQuantizationType.F32)}
    return Tokenizer.from_dir(write_gguf(tmp_path / "model.gguf", metadata, tensors))


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)])
@pytest.mark.parametrize("key", [None, True, False])
def test_files_of_llama3_begin_a_text_with_the_first_token(
    tmp_path: Path, pre: str, adds: bool, key: bool | None
) -> None:
    """Llama 3's files have no ``add_bos_token``, but the model was trained with the token."""
    backend = byte_level_backend()
    metadata = as_metadata(backend, "gpt2") | {"tokenizer.ggml.pre": pre}
    metadata["tokenizer.ggml.bos_token_id"] = first = tokens_id(backend, "<s>")
    metadata.pop("tokenizer.ggml.add_bos_token")
    if key is not None:
        metadata["tokenizer.ggml.add_bos_token"] = key
    ids = tokenizer_of(tmp_path, metadata).encode("text")
    assert (ids[0] == first) is (adds if key is None else key)


def test_special_tokens_of_sentence_piece_have_usual_places(tmp_path: Path) -> None:
    metadata = as_metadata(byte_fallback_backend(), "llama")
    metadata["tokenizer.ggml.unknown_token_id"] = 1 << 20  # outside of the vocabulary
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokenizer_of(tmp_path, metadata).named_tokens == {
        "bos_token": tokens[1],
        "eos_token": tokens[2],
        "unk_token": tokens[0],
    }


def test_answers_end_at_tokens_whose_text_says_so(tmp_path: Path) -> None:
    """Gemma 2's files name ``<eos>`` only, but its turns end with ``<end_of_turn>``. An ordinary token ends nothing."""
    tokens = [f"t{number}" for number in range(8)]
    tokens[3], tokens[5], tokens[6] = "<end_of_turn>", "<eos>", "</s>"
    found = config_of(
        tmp_path,
        "gemma2",
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 1, 1, 3, 1, 3, 1, 1],
            "tokenizer.ggml.eos_token_id": 5,
        },
    )
    assert found.eos_token_ids == (5, 3)


def test_a_byte_level_file_without_a_name_is_split_as_llama_cpp_does(tmp_path: Path) -> None:
    """Punctuation stands alone, and digits are in groups of three."""
    tokenizer = tokenizer_of(tmp_path, as_metadata(byte_level_backend(), "gpt2"))
    text = "It costs 12345$, says he"
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:last] for _, (first, last) in pieces] == [
        *("It", " costs", " ", "123", "45", "$,", " says", " he")
    ]
