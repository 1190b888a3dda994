"""Embeddings and classes equal transformers' in any company, to the bit among themselves, and mistakes are noticed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM
from chairlift.errors import ConfigError, ModelLoadError, PromptTooLongError, RequestError
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.pooled_runner import NativePooledRunner, PooledExecutor, TorchPooledRunner
from chairlift.kernels.cpu.library import ThreadPool, supported_isas
from chairlift.kernels.recording import Recorder
from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_pooled
from chairlift.models.pooled_network import PooledNetwork
from chairlift.models.pooling import PooledConfig, pools, read_pooled_config
from tests.models.pooled import (
    EMBEDDERS,
    TEXTS,
    expected_classes,
    expected_embeddings,
    pooled_model,
    sentence_files,
)
from tests.models.tiny import MORE_FAMILIES, tiny_hf_model
from tests.native import needs_kernels

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "mpnet", "nomic_bert", "gte")


def load(where: Path, **settings: Any) -> LLM:
    return LLM(where, skip_tokenizer_init=True, **{"threads": 1, **settings})


def embeddings(llm: LLM, texts: list[list[int]]) -> npt.NDArray[np.float32]:
    return np.array([each.outputs.embedding for each in llm.embed(texts)], dtype=np.float32)


def executor(where: Path, change: Callable[[PooledConfig], PooledConfig] = lambda config: config) -> PooledExecutor:
    """In PyTorch, without an engine, of a config that may be changed."""
    config = change(read_pooled_config(where))
    network = load_pooled(where, config, torch.float32, torch.device("cpu"), weight_format=PLAIN)
    return PooledExecutor(network, TorchPooledRunner(network, torch.device("cpu")))


def error(found: Any, expected: Any) -> float:
    return float(np.abs(np.stack(found) - np.asarray(expected)).max())


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("family", EMBEDDERS)
def test_embeddings_equal_transformers_in_any_company(family: str, pooling: str, tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, family)
    expected = expected_embeddings(theirs, TEXTS, pooling)
    for settings in ({}, {"kernels": "torch"}, {"max_num_batched_tokens": 50}, {"max_num_seqs": 1}):
        llm = load(where, pooling_type=pooling, **settings)
        assert error(list(embeddings(llm, TEXTS)), expected) < 1e-5
        assert error(list(embeddings(llm, TEXTS[::-1])), expected.flip(0)) < 1e-5


@needs_kernels
@pytest.mark.parametrize("family", EMBEDDERS)
def test_bits_do_not_depend_on_company(family: str, tmp_path: Path) -> None:
    where, _ = pooled_model(tmp_path, family)
    for settings in ({"pooling_type": "MEAN"}, {"pooling_type": "LAST", "dtype": "bfloat16"}, {"threads": 2}):
        llm = load(where, **settings)
        together = embeddings(llm, TEXTS)
        assert np.array_equal(together, np.concatenate([embeddings(llm, [text]) for text in TEXTS]))
        assert np.array_equal(together[::-1], embeddings(llm, TEXTS[::-1]))
        assert llm.info.deterministic


_ALTERNATING = ["sliding_attention", "full_attention"] * 2
BOTH_WAYS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **{"use_bidirectional_attention": True, "sliding_window": 20, "layer_types": _ALTERNATING},
        **{"head_dim": 32, "num_key_value_heads": 2, "query_pre_attn_scalar": 32, "eos_token_id": 2, "bos_token_id": 3},
    },
    "llama": {"is_causal": False, "num_key_value_heads": 2},
    "qwen2": {
        **{"is_causal": False, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9},
        "layer_types": _ALTERNATING,
    },
}
"""Decoders whose tokens see later ones -> fields of their config."""


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_decoders_whose_tokens_see_later_ones_equal_transformers(family: str, tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, family, **BOTH_WAYS[family])
    expected = expected_embeddings(theirs, TEXTS, "MEAN")
    for settings in ({}, {"kernels": "torch"}, {"max_num_batched_tokens": 50}):
        assert error(list(embeddings(load(where, pooling_type="MEAN", **settings), TEXTS)), expected) < 1e-5
    llm = load(where)
    together, alone = embeddings(llm, TEXTS), [embeddings(llm, [text]) for text in TEXTS[:3]]
    assert np.array_equal(together[:3], np.concatenate(alone)) or not llm.info.deterministic
    with pytest.raises((ConfigError, ModelLoadError), match=r"see later ones|runner is 'generate'"):
        load(where, runner="generate", num_kv_blocks=20)


@pytest.mark.planted("test_decoders_whose_tokens_see_later_ones_equal_transformers")
@pytest.mark.parametrize("family", BOTH_WAYS)
def test_windows_of_another_width_and_causal_decoders_are_noticed(family: str, tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, family, **BOTH_WAYS[family])
    expected, nothing = expected_embeddings(theirs, TEXTS, "LAST"), [None] * len(TEXTS)
    network = read_pooled_config(where).network
    assert error(executor(where).run(TEXTS, nothing), expected) < 1e-5
    narrower = tuple(each and each - 1 for each in network.layer_windows)
    for change in ({"both_ways": False}, {"layer_windows": narrower}):
        if change.get("layer_windows") != network.layer_windows:
            assert error(executor(where, _network(**change)).run(TEXTS, nothing), expected) > 1e-4


def test_a_published_llama_whose_tokens_see_later_ones_is_pooled_as_its_config_says(tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, "llama", **BOTH_WAYS["llama"])
    raw = json.loads((where / "config.json").read_text())
    del raw["is_causal"]
    code = {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}
    raw |= {"architectures": ["LlamaBidirectionalModel"], "auto_map": code, "model_type": "llama_bidirec"}
    (where / "config.json").write_text(json.dumps({**raw, "pooling": "avg"}))
    assert error(list(embeddings(load(where), TEXTS)), expected_embeddings(theirs, TEXTS, "MEAN")) < 1e-5


@pytest.mark.parametrize(("types", "factor"), [(0, 2.0), (1, 8.0)])
def test_a_published_gte_rotates_as_its_code_does(types: int, factor: float, tmp_path: Path) -> None:
    """transformers has no ``ntk``, but its ``linear`` divides frequencies as well."""
    rope = {"rope_type": "linear", "factor": factor ** (2 / 16), "rope_theta": 20_000.0 * factor}
    where, theirs = pooled_model(tmp_path, "gte", type_vocab_size=types, rope_parameters=rope)
    raw = json.loads((where / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"architectures": ["NewModel", "NewForTokenClassification"], "model_type": "new", "rope_theta": 20000}
    raw |= {"auto_map": {"AutoModel": "modeling.NewModel"}, "layer_norm_type": "layer_norm", "pack_qkv": True}
    raw |= {"logn_attention_scale": False, "position_embedding_type": "rope", "unpad_inputs": False}
    (where / "config.json").write_text(json.dumps({**raw, "rope_scaling": {"type": "ntk", "factor": factor}}))
    expected = expected_embeddings(theirs, TEXTS, "CLS")
    for kernels in ("auto", "torch"):
        assert error(list(embeddings(load(where, kernels=kernels), TEXTS)), expected) < 1e-5


def native_runner(where: Path) -> NativePooledRunner:
    network = load_pooled(
        where,
        read_pooled_config(where),
        torch.float32,
        torch.device("cpu"),
        weight_format=NativeBackend("avx2").weight_format(None),
    )
    return NativePooledRunner(
        network, torch.float32, ThreadPool(1), isa=supported_isas()[-1], max_tokens=512, max_rows=8
    )


@needs_kernels
def test_attention_of_encoders_is_in_the_kernels_unless_heads_turn_or_have_an_odd_size(tmp_path: Path) -> None:
    found = {family: native_runner(pooled_model(tmp_path, family)[0]).calls for family in ENCODERS}
    called = {family for family, calls in found.items() if "encoder_attention" in calls}
    assert called == {"gte", "modernbert", "mpnet", "nomic_bert"}
    where, theirs = pooled_model(tmp_path / "odd", "bert", num_attention_heads=8)
    assert "encoder_attention" in native_runner(where).calls
    expected = expected_embeddings(theirs, TEXTS, "MEAN")
    assert error(list(embeddings(load(where, pooling_type="MEAN"), TEXTS)), expected) < 1e-5


@pytest.mark.planted
@needs_kernels
def test_an_encoder_that_sees_no_later_tokens_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, theirs = pooled_model(tmp_path, "bert")
    expected = expected_embeddings(theirs, TEXTS, "MEAN")
    attend = Recorder.attend

    def causal(self: Recorder, *args: Any, both_ways: bool, **given: Any) -> Any:
        assert both_ways
        return attend(self, *args, **given)

    monkeypatch.setattr(Recorder, "attend", causal)
    assert error(list(embeddings(load(where, pooling_type="MEAN"), TEXTS)), expected) > 1e-2


@pytest.mark.parametrize("family", [name for name in EMBEDDERS if name not in ("mistral", "gpt2", "nomic_bert", "gte")])
def test_classifiers_equal_transformers(family: str, tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, family, labels=3)
    expected = expected_classes(theirs, TEXTS).softmax(-1)
    for kernels in ("auto", "torch"):
        found = load(where, kernels=kernels).classify(TEXTS)
        assert error([each.outputs.probs for each in found], expected) < 1e-5


def test_modernbert_classifies_by_the_mean_too(tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, "modernbert", labels=2, classifier_pooling="mean")
    found = load(where).classify(TEXTS)
    assert error([each.outputs.probs for each in found], expected_classes(theirs, TEXTS).softmax(-1)) < 1e-5


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"id2label": {"0": "relevant"}}, "sigmoid"),
    ],
)
def test_a_classifier_names_its_activation(fields: dict[str, Any], name: str, tmp_path: Path) -> None:
    labels = len(fields.get("id2label", (1, 2)))
    where, theirs = pooled_model(tmp_path, "bert", labels=labels)
    raw = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**raw, **fields}))
    logits = expected_classes(theirs, TEXTS)
    expected = logits if name == "identity" else torch.sigmoid(logits)
    assert error([each.outputs.probs for each in load(where).classify(TEXTS)], expected) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_every_family_of_texts_gives_the_embeddings_of_transformers(family: str, tmp_path: Path) -> None:
    """The last token's state, of a causal model whose head is left out."""
    from transformers import AutoModel

    where = tiny_hf_model(tmp_path, family)
    theirs: Any = AutoModel.from_pretrained(where).eval()
    expected = torch.stack([expected_embeddings(theirs, [text], "LAST")[0] for text in TEXTS])
    for kernels in ("auto", "torch"):
        assert error(list(embeddings(load(where, runner="pooling", kernels=kernels), TEXTS)), expected) < 1e-4
    if family == "exaone":
        return  # transformers saves this body under names that no publisher uses
    theirs.save_pretrained(where)  # names without a prefix, and no head
    assert error(list(embeddings(load(where), TEXTS)), expected) < 1e-4


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["max_tokens", "weightedmean_tokens"])
def test_the_maximum_and_a_weighted_mean_are_those_of_sentence_transformers(mode: str, tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, "bert")
    sentence_files(where, mode)
    rows = [theirs(torch.tensor([text])).last_hidden_state[0].detach() for text in TEXTS]
    if mode == "max_tokens":
        pooled = [each.max(0).values for each in rows]
    else:
        weights = [torch.arange(1.0, len(each) + 1)[:, None] for each in rows]
        pooled = [(each * weight).sum(0) / weight.sum() for each, weight in zip(rows, weights, strict=True)]
    expected = torch.nn.functional.normalize(torch.stack(pooled), dim=1)
    for kernels in ("auto", "torch"):
        assert error(list(embeddings(load(where, kernels=kernels), TEXTS)), expected) < 1e-5


def dense_steps(where: Path, *steps: tuple[int, int, bool, str]) -> list[torch.nn.Linear]:
    """Write linear layers between Pooling and Normalize: (inputs, outputs, whether it has a bias, activation) each."""
    modules = json.loads((where / "modules.json").read_text())
    layers = []
    torch.manual_seed(3)
    for index, (inputs, outputs, bias, activation) in enumerate(steps):
        folder = f"{index + 2}_Dense"
        (where / folder).mkdir()
        settings = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
        (where / folder / "config.json").write_text(json.dumps(settings))
        layers.append(torch.nn.Linear(inputs, outputs, bias=bias))
        tensors = {f"linear.{name}": value.detach() for name, value in layers[-1].named_parameters()}
        save_file(tensors, where / folder / "model.safetensors")
        modules.insert(2 + index, {"path": folder, "type": "sentence_transformers.models.Dense"})
    (where / "modules.json").write_text(json.dumps(modules))
    return layers


_TANH = "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_dense_steps_follow_the_pooling(family: str, tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, family)
    sentence_files(where)
    layers = dense_steps(where, (64, 96, True, _TANH), (96, 32, False, "torch.nn.modules.linear.Identity"))
    pooled = expected_embeddings(theirs, TEXTS, "MEAN", normalize=False)
    with torch.no_grad():
        expected = torch.nn.functional.normalize(layers[1](layers[0](pooled).tanh()), dim=1)
    for kernels in ("auto", "torch"):
        llm = load(where, kernels=kernels)
        assert error(list(embeddings(llm, TEXTS)), expected) < 1e-5
        assert len(llm.embed([TEXTS[0]])[0].outputs.embedding) == 32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"in_features": 65}, "in_features is 65, but the step before gives 64 numbers"),
        ({"activation_function": "torch.nn.SELU"}, "'SELU' is not supported; supported: GELU"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_unsupported_dense_steps_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    where, _ = pooled_model(tmp_path, "bert")
    sentence_files(where)
    dense_steps(where, (64, 32, True, _TANH))
    path = where / "2_Dense" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(ModelLoadError, match=words):
        load(where)


@pytest.mark.planted("test_embeddings_equal_transformers_in_any_company[MEAN-mpnet]")
def test_distances_that_are_ignored_or_turned_round_are_noticed(tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, "mpnet")
    expected = expected_embeddings(theirs, TEXTS, "MEAN")
    tensors = load_file(where / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("relative_attention_bias.weight"))
    for wrong in (torch.zeros_like(tensors[name]), tensors[name].roll(16, 0)):
        save_file({**tensors, name: wrong}, where / "model.safetensors")
        assert error(list(embeddings(load(where, pooling_type="MEAN"), TEXTS)), expected) > 5e-4


def test_the_files_of_sentence_transformers_say_how_texts_are_pooled(tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, "bert")
    sentence_files(where, "mean_tokens", normalize=False, prompts={"query": "q: ", "document": ""})
    (where / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    llm = load(where)
    short = [text for text in TEXTS if len(text) <= 64]
    expected = expected_embeddings(theirs, short, "MEAN", normalize=False)
    assert error(list(embeddings(llm, short)), expected) < 1e-5 * float(expected.abs().max())
    assert llm.max_model_len == 64 and llm.info.pooling is not None
    assert llm.info.pooling.prompts == {"query": "q: ", "document": ""}
    with pytest.raises(PromptTooLongError, match="has 150 tokens, but the model takes 64"):
        llm.embed(TEXTS)
    cut = llm.embed(TEXTS, truncate_prompt_tokens=-1)[4]
    assert cut.prompt_token_ids == TEXTS[4][:64]
    assert load(where, max_model_len=150).embed(TEXTS)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense", "path": ""}], "steps Dense are not supported"),
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "exactly one of"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, "exactly one"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "exactly one"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "include_prompt": False}, "include_prompt is false"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is true"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "is not one of the prompts"),
    ],
)
def test_unsupported_pooling_settings_are_refused_by_name(file: str, content: Any, reason: str, tmp_path: Path) -> None:
    where, _ = pooled_model(tmp_path, "bert")
    sentence_files(where)
    (where / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=reason):
        load(where)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("bert", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder is true"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types must name"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("qwen3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"architectures": ["Qwen3ForTokenClassification"]}, "is not supported for embeddings"),
    ],
)
def test_configs_that_ask_for_other_maths_are_refused(
    family: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    where, _ = pooled_model(tmp_path, family)
    raw = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**raw, **fields}))
    with pytest.raises(ModelLoadError, match=reason):
        load(where, runner="pooling")


def test_names_of_other_classes_and_of_old_checkpoints_load(tmp_path: Path) -> None:
    """With BERT's prefix and a head for words, and with LayerNorm's names in TensorFlow."""
    where, theirs = pooled_model(tmp_path, "bert")
    weights = load_file(where / "model.safetensors")
    old = {f"bert.{name}": value for name, value in weights.items()}
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in old.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in old.items()}
    save_file({**old, "cls.predictions.bias": torch.zeros(128)}, where / "model.safetensors")
    assert error(list(embeddings(load(where), TEXTS)), expected_embeddings(theirs, TEXTS, "CLS")) < 1e-5
    save_file({**old, "bert.encoder.layer.0.surprise": torch.zeros(1)}, where / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unexpected .*encoder.layer.0.surprise"):
        load(where)


def test_the_task_of_a_model_is_read_from_its_files(tmp_path: Path) -> None:
    generates = tiny_hf_model(tmp_path, "qwen3")
    assert not pools(generates) and pools(generates, "pooling")
    sentence_files(generates, "lasttoken")
    assert pools(generates) and not pools(generates, "generate")
    assert read_pooled_config(generates).pooling == "LAST"
    encoder, _ = pooled_model(tmp_path, "bert")
    assert pools(encoder)
    with pytest.raises(ConfigError, match="runner is 'generate', but"):
        pools(encoder, "generate")


def test_calls_that_a_model_cannot_serve_are_refused(tmp_path: Path) -> None:
    embedder, classifier = load(pooled_model(tmp_path, "bert")[0]), load(pooled_model(tmp_path, "bert", labels=3)[0])
    generates = LLM(tiny_hf_model(tmp_path, "llama"), skip_tokenizer_init=True, num_kv_blocks=20, threads=1)
    for call, reason in (
        (lambda: embedder.generate([[5]]), "generate needs a model that generates texts"),
        (lambda: embedder.chat([{"role": "user", "content": "Hi"}]), "chat needs a model that generates"),
        (lambda: embedder.classify([[5]]), "the model embeds texts; it cannot classify them"),
        (lambda: classifier.embed([[5]]), "the model is a classifier; it cannot embed"),
        (lambda: classifier.score("a", "b"), "classifier of 3 classes, which gives no scores"),
        (lambda: generates.embed([[5]]), "embed needs a model for embeddings"),
        (lambda: embedder.embed([[5], []]), "prompt 1: the text is empty"),
        (lambda: embedder.embed([[5, 128]]), "token id 128, but the model knows ids from 0 to 127"),
        (lambda: embedder.embed([[5, True]]), "must hold whole numbers"),
        (lambda: embedder.embed("text"), "tokenizer was not loaded"),
        (lambda: embedder.embed([[5]], dimensions=8), "dimensions is 8, but the model's embeddings have 64"),
        (lambda: embedder.embed([[5]], prompt_name="query"), "prompt_name must be one of"),
        (lambda: embedder.embed([[5]], truncate_prompt_tokens=0), "truncate_prompt_tokens must be -1"),
    ):
        with pytest.raises(RequestError, match=reason):
            call()


def test_embeddings_are_cut_where_the_model_was_trained_for_it(tmp_path: Path) -> None:
    where, _ = pooled_model(tmp_path, "bert")
    llm = load(where, is_matryoshka=True)
    whole = embeddings(llm, TEXTS)[:, :16]
    cut = np.array([each.outputs.embedding for each in llm.embed(TEXTS, dimensions=16)])
    assert np.allclose(cut, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-6)
    with pytest.raises(RequestError, match="dimensions must be from 1 to 64, got 65"):
        llm.embed(TEXTS, dimensions=65)


def test_settings_without_effect_are_told(tmp_path: Path) -> None:
    where, _ = pooled_model(tmp_path, "bert")
    notes = load(where, num_kv_blocks=100, max_num_batched_tokens=64).notes
    assert any("num_kv_blocks have no effect: a model for embeddings" in note for note in notes)
    assert any("have a pass of their own" in note for note in notes)
    with pytest.raises(ConfigError, match="kernels is 'triton'"):
        load(where, kernels="triton")


# -- each way of getting it wrong is noticed --------------------------------------------------------------------------


def _network(**change: Any) -> Callable[[PooledConfig], PooledConfig]:
    return lambda config: dataclasses.replace(config, network=dataclasses.replace(config.network, **change))


def _other(**change: Any) -> Callable[[PooledConfig], PooledConfig]:
    return lambda config: dataclasses.replace(config, **change)


WRONG: dict[str, tuple[str, Callable[[PooledConfig], PooledConfig]]] = {
    "position offset": ("roberta", _network(position_offset=1)),
    "pooled by the mean": ("bert", _other(pooling="MEAN")),
    "pooled by the last": ("bert", _other(pooling="LAST")),
    "pooled by the first": ("qwen3", _other(pooling="CLS")),
    "not normalised": ("qwen3", _other(normalize=False)),
    "windows everywhere": ("modernbert", _network(layer_windows=(5,) * 4)),
    "no windows": ("modernbert", _network(layer_windows=(None,) * 4)),
    "a window too narrow by one": ("modernbert", _network(layer_windows=(None, 4, 4, None))),
    "one base of the rotation": ("modernbert", _network(layer_thetas=(160_000.0,) * 4)),
}


@pytest.mark.planted
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_noticed(name: str, tmp_path: Path) -> None:
    family, change = WRONG[name]
    where, theirs = pooled_model(tmp_path, family)
    expected = expected_embeddings(theirs, TEXTS, "CLS" if family in ENCODERS else "LAST")
    nothing = [None] * len(TEXTS)
    assert error(executor(where).run(TEXTS, nothing), expected) < 1e-5
    assert error(executor(where, change).run(TEXTS, nothing), expected) > 1e-4


def test_token_types_matter(tmp_path: Path) -> None:
    where, theirs = pooled_model(tmp_path, "bert", labels=1)
    types = [[0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2) for text in TEXTS]
    expected = torch.sigmoid(expected_classes(theirs, TEXTS, types))
    assert error(executor(where).run(TEXTS, types), expected) < 1e-5
    assert error(executor(where).run(TEXTS, [None] * len(TEXTS)), expected) > 1e-4
    mixed = [each if row % 2 else None for row, each in enumerate(types)]
    plain = torch.sigmoid(expected_classes(theirs, TEXTS))
    expected[::2] = plain[::2]
    assert error(executor(where).run(TEXTS, mixed), expected) < 1e-5


@pytest.mark.planted
def test_a_token_that_is_left_out_and_causal_attention_are_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    from chairlift.kernels import ops

    where, theirs = pooled_model(tmp_path, "bert")
    expected, nothing = expected_embeddings(theirs, TEXTS, "CLS"), [None] * len(TEXTS)
    whole = PooledNetwork.pool

    def shifted(self: PooledNetwork, hidden: torch.Tensor, ends: Any) -> Any:
        return whole(self, hidden.roll(1, 0), ends)

    with monkeypatch.context() as patch:
        patch.setattr(PooledNetwork, "pool", shifted)
        assert error(executor(where).run(TEXTS, nothing), expected) > 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(ops, "bidirectional_attention", ops.packed_attention)
        assert error(executor(where).run(TEXTS, nothing), expected) > 1e-4


def test_numbers_that_are_not_finite_are_the_error_of_their_text(tmp_path: Path) -> None:
    where, _ = pooled_model(tmp_path, "bert")
    weights = load_file(where / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][77] = float("inf")
    broken = tmp_path / "broken"
    shutil.copytree(where, broken)
    save_file(weights, broken / "model.safetensors")
    llm = load(broken)
    assert llm.embed([[5, 6]])
    with pytest.raises(RequestError, match="prompt 1: the model computed numbers that are not finite"):
        llm.embed([[5, 6], [77]])


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_passes_that_no_memory_holds_are_refused_before_weights_are_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _ = pooled_model(tmp_path, family)
    config = json.loads((where / "config.json").read_text()) | {"max_position_embeddings": 2**20}
    (where / "config.json").write_text(json.dumps(config))
    (where / "model.safetensors").write_bytes(b"nothing")
    monkeypatch.setattr("chairlift.executor.kv_tensors.total_memory", lambda: 10**8)
    words = r"{} tokens \(max_num_batched_tokens, max_model_len\) would have [\d,]+ bytes, but there are 100,000,000 "
    for name, size in (("max_num_batched_tokens", 2**24), ("max_model_len", 2**19)):
        with pytest.raises(ConfigError, match=words.format(f"{size:,}")):
            load(where, **{name: size})
    with pytest.raises(ModelLoadError):  # the length in the model's files is no such setting
        load(where)
