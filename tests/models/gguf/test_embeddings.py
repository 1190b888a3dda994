"""Embedding models in GGUF files: encoders (BERT, RoBERTa, XLM-RoBERTa, ModernBERT, Nomic) and decoders give the
embeddings of transformers.

Changes that must make these fail: positions that begin with RoBERTa's unused rows; pooling of another kind than the
file's; the embedding of token types left out; the gate and the other half of an MLP exchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from chairlift import LLM
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.models.hf_config import read_json
from chairlift.models.model_files import read_config
from chairlift.models.pooling import pools, read_pooled_config
from tests.models.gguf.make import converted, to_gguf, write_gguf
from tests.models.pooled import TEXTS, expected_classes, expected_embeddings, pooled_model
from tests.models.test_rerankers import PAIRS, write_words
from tests.models.tiny import tiny_hf_model

POOLING = {"MEAN": 1, "CLS": 2, "LAST": 3}
RANK = 4


def named(architecture: str, number: int) -> dict[str, Any]:
    """The key with the pooling."""
    return {f"{architecture}.pooling_type": number}


ARCHITECTURES = {"modernbert": "modern-bert", "nomic_bert": "nomic-bert"}
"""``model_type`` -> ``general.architecture``; of all others it is ``bert``."""


def encoder_file(model_dir: Path, path: Path, kind: str = "F32", **more: Any) -> Path:
    """Convert a directory of BERT, RoBERTa, XLM-RoBERTa, ModernBERT or Nomic as llama.cpp does."""
    config = read_json(model_dir / "config.json")
    arch = ARCHITECTURES.get(config["model_type"], "bert")
    offset = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = {}
    for name, values in load_file(model_dir / "model.safetensors").items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        own = name.removeprefix("roberta.").removeprefix("bert.")
        stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = values[offset:] if stored == "position_embd.weight" else values
        large = values.ndim > 1 and values.shape[-1] % 32 == 0 and stored.startswith("blk.")
        tensors[stored] = (np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind if large else "F32"])
    ropes = config.get("rope_parameters", {})
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"] - offset,
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.layer_norm_epsilon": float(config.get("layer_norm_eps", 1e-5)),
        f"{arch}.attention.causal": False,
        f"{arch}.attention.sliding_window": config.get("local_attention"),
        f"{arch}.rope.freq_base": ropes.get("full_attention", ropes).get("rope_theta"),
        f"{arch}.rope.freq_base_swa": ropes.get("sliding_attention", ropes).get("rope_theta"),
        "tokenizer.ggml.token_type_count": config.get("type_vocab_size"),
        **more,
    }
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def loaded(path: Path) -> LLM:
    return LLM(str(path), skip_tokenizer_init=True, dtype="float32", threads=1)


def embeddings(path: Path, **settings: Any) -> Any:
    llm = LLM(str(path), skip_tokenizer_init=True, dtype="float32", threads=1, **settings)
    return np.array([each.outputs.embedding for each in llm.embed(TEXTS)], dtype=np.float32)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"])
def test_encoders_give_the_embeddings_of_transformers(tmp_path: Path, family: str) -> None:
    model_dir, theirs = pooled_model(tmp_path, family)
    for pooling, number in POOLING.items():
        keys = named(ARCHITECTURES.get(family, "bert"), number)
        path = encoder_file(model_dir, tmp_path / f"{pooling}.gguf", **keys)
        assert pools(path) and read_pooled_config(path).pooling == pooling
        found = embeddings(path)
        assert np.abs(found - expected_embeddings(theirs, TEXTS, pooling).numpy()).max() < 1e-5
    alone = LLM(str(path), skip_tokenizer_init=True, dtype="float32", threads=1)
    assert np.array_equal(found, [alone.embed([text])[0].outputs.embedding for text in TEXTS])


def test_quantised_encoders_are_close_to_their_floats(tmp_path: Path) -> None:
    model_dir, _ = pooled_model(tmp_path, "bert")
    whole = encoder_file(model_dir, tmp_path / "whole.gguf", **named("bert", 1))
    eight = encoder_file(model_dir, tmp_path / "eight.gguf", "Q8_0", **named("bert", 1))
    assert (embeddings(whole) * embeddings(eight, quantization="none")).sum(1).min() > 0.99


def test_decoders_embed_where_the_file_names_a_pooling(tmp_path: Path) -> None:
    model_dir, theirs = pooled_model(tmp_path, "qwen3")
    # llama.cpp's converter takes the model with its prefix and without a head
    config = json.loads((model_dir / "config.json").read_text())
    tensors = load_file(model_dir / "model.safetensors")
    assert not any(name.startswith("model.") for name in tensors)
    from safetensors.numpy import save_file

    save_file({f"model.{name}": values for name, values in tensors.items()}, model_dir / "model.safetensors")
    (model_dir / "config.json").write_text(json.dumps(config))
    plain = to_gguf(model_dir, tmp_path / "plain.gguf")
    assert not pools(plain) and pools(plain, "pooling")
    assert any("pooling_type is LAST" in note for note in read_pooled_config(plain).notes)
    path = to_gguf(model_dir, tmp_path / "model.gguf", **named("qwen3", POOLING["LAST"]))
    assert pools(path) and not pools(path, "generate")
    assert np.abs(embeddings(path) - expected_embeddings(theirs, TEXTS, "LAST").numpy()).max() < 1e-5


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    model_dir, _ = pooled_model(tmp_path, "bert")
    path = encoder_file(model_dir, tmp_path / "model.gguf")
    assert any("pooling_type is CLS" in note for note in read_pooled_config(path).notes)
    with pytest.raises(ConfigError, match="a model for embeddings; use 'auto' or 'pooling'"):
        pools(path, "generate")
    with pytest.raises(ConfigError, match=r"is for models that generate, and .* is an encoder"):
        pools(path, reranker="qwen3")
    with pytest.raises(ModelLoadError, match="is an encoder, which generates no text; use runner 'pooling'"):
        read_config(path)
    for number, words in ((RANK, r"tensor cls\.weight is missing"), (9, "is 9; supported are 1")):
        path = encoder_file(model_dir, tmp_path / "model.gguf", **named("bert", number))
        with pytest.raises(ModelLoadError, match=words):
            read_pooled_config(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "jina-bert-v2"}, "'jina-bert-v2' is an encoder that is not supported.*safetensors"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, "is the image encoder of another GGUF file"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "LoRA adapter, not a model"),
    ],
)
def test_other_files_are_refused_by_what_they_are(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", metadata, {"x": (np.zeros((1, 32), np.float32), gguf.GGMLQuantizationType.F32)}
    )
    with pytest.raises(ModelLoadError, match=words):
        read_config(path)


@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_of_pairs_give_the_classes_of_transformers(tmp_path: Path, labels: int) -> None:
    """As bge-reranker: the classifier is that of RoBERTa."""
    model_dir, theirs = pooled_model(tmp_path, "xlm-roberta", labels=labels)
    path = encoder_file(model_dir, tmp_path / "model.gguf", **named("bert", RANK))
    assert pools(path) and read_pooled_config(path).pooling == "CLS"
    found = [each.outputs.probs for each in loaded(path).classify(TEXTS)]
    same = [each.outputs.probs for each in loaded(model_dir).classify(TEXTS)]
    assert found == same
    logits = expected_classes(theirs, TEXTS)
    expected = logits.sigmoid() if labels == 1 else logits.softmax(-1)
    assert np.abs(np.array(found) - expected.numpy()).max() < 1e-5
    named_classes = {"bert.classifier.output_labels": [f"class {number}" for number in range(labels)]}
    path = encoder_file(model_dir, tmp_path / "named.gguf", **named("bert", RANK), **named_classes)
    assert read_pooled_config(path).labels == tuple(named_classes["bert.classifier.output_labels"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_qwen3_reranker_scores_as_its_directory(tmp_path: Path, tied: bool, apart: bool) -> None:
    """With the rows of yes and no beside the model, as llama.cpp's converter writes them, and without."""
    where = tiny_hf_model(tmp_path, "qwen3", max_position_embeddings=1024, std=0.1, tie_word_embeddings=tied)
    tokenizer = write_words(where, "yes", "no")
    more: dict[str, Any] = {}
    if apart:
        head = load_file(where / "model.safetensors")["model.embed_tokens.weight" if tied else "lm_head.weight"]
        rows = np.stack([head[tokenizer.token_to_id(answer)] for answer in ("yes", "no")])
        more = {**named("qwen3", RANK), "qwen3.classifier.output_labels": ["yes", "no"]}
        extra = {"cls.output.weight": (rows, gguf.GGMLQuantizationType.F32)}
    path = to_gguf(where, tmp_path / "model.gguf", extra=extra if apart else None, leaves_out_head=apart, **more)
    queries, documents = zip(*PAIRS, strict=True)
    settings: dict[str, Any] = {"reranker": "qwen3", "dtype": "float32", "threads": 1}
    found, expected = (
        [each.outputs.score for each in LLM(model, tokenizer=str(where), **settings).score(queries, documents)]
        for model in (path, where)
    )
    assert found == expected and max(found) - min(found) > 0.01
    if apart:
        with pytest.raises(ModelLoadError, match="set reranker to qwen3"):
            read_pooled_config(path)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "roberta", "xlm-roberta"])
def test_llama_cpps_own_converter_writes_such_files(tmp_path: Path, family: str) -> None:
    model_dir, theirs = pooled_model(tmp_path, family)
    if family == "modernbert":  # published files have the key under two names
        config = read_json(model_dir / "config.json")
        (model_dir / "config.json").write_text(json.dumps({"layer_norm_eps": config["norm_eps"], **config}))
    path = converted(model_dir, tmp_path / "model.gguf")
    found = embeddings(path, pooling_type="MEAN")
    assert np.abs(found - expected_embeddings(theirs, TEXTS, "MEAN").numpy()).max() < 1e-5
