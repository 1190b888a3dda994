"""Facts about a model that turns texts into vectors or scores, read from its files. The module does not import torch.

The files are those of Hugging Face (``config.json``) and of sentence-transformers (Reimers and Gurevych, 2019):
``modules.json`` lists the steps after the network; ``1_Pooling/config.json`` says how the hidden states of a text
become one vector; ``sentence_bert_config.json`` has the maximum length of a text; ``config_sentence_transformers.json``
has the model's prompts. Unsupported settings in these files are refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.base.rerankers import RERANKERS
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.models.encoder_config import EncoderConfig, EncoderFamily
from chairlift.models.families.bert import BERT
from chairlift.models.families.distilbert import DISTILBERT
from chairlift.models.families.gte import GTE, NEW
from chairlift.models.families.modernbert import MODERNBERT
from chairlift.models.families.mpnet import MPNET
from chairlift.models.families.nomic_bert import NOMIC_BERT
from chairlift.models.families.roberta import ROBERTA
from chairlift.models.families.xlm_roberta import XLM_ROBERTA
from chairlift.models.family import Fields
from chairlift.models.formats.gguf.files import is_gguf
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import gguf_config
from chairlift.models.formats.gguf_encoders import (
    GGUF_ENCODERS,
    gguf_encoder_config,
    gguf_labels,
    gguf_pooling,
    is_reranker,
)
from chairlift.models.hf_config import NetworkConfig, parse_config, read_dtype, read_json
from chairlift.models.registry import FAMILIES

__all__ = ["ENCODERS", "PooledConfig", "parse_encoder", "pools", "read_pooled_config", "read_reranker"]

ENCODERS: Final[dict[str, EncoderFamily]] = {
    family.model_type: family
    for family in (BERT, DISTILBERT, GTE, MODERNBERT, MPNET, NEW, NOMIC_BERT, ROBERTA, XLM_ROBERTA)
}
_BOTH_WAYS: Final = {"llama_bidirec": "llama"}
"""``model_type`` of decoders that their publishers changed so that tokens see later ones -> ``model_type`` of the
decoder."""
_OLD_MODES: Final = {"avg": "MEAN", "cls": "CLS", "last": "LAST"}
"""Value of ``pooling`` in the ``config.json`` of such a model -> type of pooling."""
_CLASSIFIES: Final = "ForSequenceClassification"
_EMBEDS: Final = ("Model", "ForMaskedLM", "ForCausalLM", "LMHeadModel")
_MODES: Final = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_max_tokens": "MAX",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_weightedmean_tokens": "WEIGHTED_MEAN",
}
_SHORT_MODES: Final = {
    **{"cls": "CLS", "lasttoken": "LAST", "max": "MAX", "mean": "MEAN", "weightedmean": "WEIGHTED_MEAN"}
}
_DENSE_ACTIVATIONS: Final = {"GELU": "gelu", "Identity": "identity", "ReLU": "relu", "Tanh": "tanh"}
_ACTIVATIONS: Final = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_PROBLEMS: Final = {
    "multi_label_classification": "sigmoid",
    "regression": "identity",
    "single_label_classification": "softmax",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A linear layer after the pooling, which is computed in float32."""

    folder: str
    """Name of the folder beside ``modules.json`` that has its files."""
    width: int
    out_width: int
    bias: bool = True
    activation: str = "tanh"
    """``tanh``, ``gelu``, ``relu`` or ``identity``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PooledConfig:
    """A network, and how its hidden states become a vector or scores."""

    network: NetworkConfig | EncoderConfig
    pooling: str
    """How a text's vector is made of its hidden states: ``LAST`` (last token), ``CLS`` (first token), ``MEAN`` (mean
    over all tokens), ``MAX`` (maximum of each number) or ``WEIGHTED_MEAN`` (mean with the weights 1, 2, 3, ...)."""
    dense: tuple[DenseConfig, ...] = ()
    """Linear layers that an embedding passes after the pooling, in order."""
    normalize: bool = True
    """Whether an embedding is divided by its Euclidean length, so that it becomes a unit vector."""
    labels: tuple[str, ...] = ()
    """Names of the classes; empty for a model that computes embeddings."""
    activation: str = "softmax"
    """Function applied to a classifier's logits: ``softmax``, ``sigmoid`` or ``identity``."""
    max_seq_length: int | None = None
    """Maximum length of a text in tokens that sentence-transformers accepts; None: the limit of the network."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Name of a prompt -> text that is put before the input text."""
    default_prompt: str | None = None
    """Name of the prompt for requests that name none; None: no prompt."""
    dimensions: tuple[int, ...] | None = None
    """Sizes to which an embedding may be shortened (Matryoshka; Kusupati et al., 2022). Empty: any size. None: it
    cannot be shortened."""
    notes: tuple[str, ...] = ()
    """Notes about the model that the user sees, one per line."""
    answers: tuple[int, ...] = ()
    """Rows of the output head that form a reranker's classifier: the token ids of its answers, such as yes and no."""

    @property
    def width(self) -> int:
        """Number of numbers of an embedding."""
        return self.dense[-1].out_width if self.dense else self.network.hidden_size

    @property
    def task(self) -> str:
        """Task of the model: ``embed`` or ``classify``."""
        return "classify" if self.labels else "embed"

    @property
    def max_model_len(self) -> int:
        """Maximum length of a text in tokens that the network accepts."""
        return self.network.max_model_len


def pools(path: Path, runner: str = "auto", reranker: str | None = None) -> bool:
    """Whether a model is for embeddings, scores or classes, according to its files and these settings.

    Raises ConfigError when a setting does not fit the model, and ModelLoadError for damaged files.
    """
    if reranker is not None and runner == "generate":
        raise ConfigError(f"runner is 'generate', but reranker {reranker!r} scores pairs; leave one of them out")
    if is_gguf(path):
        return _pools_gguf(GGUFModel(path), runner, reranker)
    config = path / "config.json"
    raw = read_json(config) if config.is_file() else {}
    architectures = raw.get("architectures") or [""]
    name = str(architectures[0]) if isinstance(architectures, list) else ""
    only = raw.get("model_type") in ENCODERS
    if runner == "generate" and (only or name.endswith(_CLASSIFIES)):
        raise ConfigError(
            f"runner is 'generate', but {path} is a model for embeddings or classes ({name or raw.get('model_type')});"
            " use runner 'auto' or 'pooling'"
        )
    if runner != "auto" or reranker is not None:
        return runner == "pooling" or reranker is not None
    body = name.endswith((_CLASSIFIES, "Model")) and not name.endswith("LMHeadModel")
    return only or body or _is_sentence(path)


def _pools_gguf(model: GGUFModel, runner: str, reranker: str | None) -> bool:
    only = model.metadata.get("general.architecture") in GGUF_ENCODERS
    if only and runner == "generate":
        raise ConfigError(f"runner is 'generate', but {model.path} is a model for embeddings; use 'auto' or 'pooling'")
    if only and reranker is not None:
        raise ConfigError(
            f"reranker {reranker!r} is for models that generate, and {model.path} is an encoder; leave it out"
        )
    pooled = reranker is not None or (runner == "auto" and gguf_pooling(model) is not None)
    return only or runner == "pooling" or pooled or (runner == "auto" and is_reranker(model))


def _is_sentence(path: Path) -> bool:
    return (path / "modules.json").is_file()


def read_pooled_config(
    path: Path, *, pooling_type: str | None = None, normalize: bool | None = None, is_matryoshka: bool | None = None
) -> PooledConfig:
    """Read the files of a model directory. ``pooling_type``, ``normalize`` and ``is_matryoshka`` override them.

    Raises ModelLoadError when a file is missing or damaged or needs an unsupported feature, and ConfigError for a
    setting that does not fit the model.
    """
    if is_gguf(path):
        return _read_gguf(GGUFModel(path), pooling_type, normalize, is_matryoshka)
    where = path / "config.json"
    if not where.is_file():
        raise ModelLoadError(f"{path} has no config.json; give the directory that holds it")
    raw = _decoder_of(given := read_json(where))
    architecture = _architecture(raw, str(where))
    network: NetworkConfig | EncoderConfig
    if raw.get("model_type") in ENCODERS:
        network = parse_encoder(raw, where=str(where))
    else:
        network = parse_config(raw, where=str(where), pooled=True)
    fields: dict[str, Any] = {"network": network}
    if architecture.endswith(_CLASSIFIES):
        encoder = ENCODERS.get(str(raw.get("model_type")))
        if (encoder is not None and not encoder.head_tensors) or given.get("model_type") in _BOTH_WAYS:
            raise ModelLoadError(
                f"{where}: classifiers of model_type {given['model_type']!r} are not supported; use an embedding model"
            )
        fields |= _classifier(raw, network, str(where))
    else:
        fields |= _embedder(path, isinstance(network, EncoderConfig), raw.get("pooling"))
        fields["dense"] = _dense(path, network.hidden_size)
        width = fields["dense"][-1].out_width if fields["dense"] else network.hidden_size
        fields["dimensions"] = _dimensions(raw, width, str(where), is_matryoshka)
    fields |= _sentence_files(path)
    if pooling_type is not None:
        if "labels" in fields and isinstance(network, EncoderConfig) and pooling_type != fields["pooling"]:
            raise ConfigError(
                f"pooling_type is {pooling_type!r}, but this classifier reads {fields['pooling']}; leave it out"
            )
        fields["pooling"] = pooling_type
        fields["notes"] = ()
    if normalize is not None:
        if "labels" in fields:
            raise ConfigError("pooling_normalize is for embeddings, and this model is a classifier; leave it out")
        fields["normalize"] = normalize
    return PooledConfig(**fields)


def _read_gguf(
    model: GGUFModel, pooling_type: str | None, normalize: bool | None, is_matryoshka: bool | None
) -> PooledConfig:
    """Pooling of a GGUF file. The file does not say whether embeddings have length 1; llama.cpp gives them this
    length."""
    encoder = model.metadata.get("general.architecture") in GGUF_ENCODERS
    network = gguf_encoder_config(model) if encoder else gguf_config(model)
    if is_reranker(model) and pooling_type is None:
        if not encoder:
            raise ModelLoadError(
                f"{model.path}: pooling_type says that the model scores pairs; if it is Qwen3-Reranker, set reranker to"
                " qwen3"
            )
        labels = gguf_labels(model)
        activation = "sigmoid" if len(labels) == 1 else "softmax"
        return PooledConfig(network=network, pooling="CLS", normalize=False, labels=labels, activation=activation)
    given = pooling_type or gguf_pooling(model)
    usual = "CLS" if encoder else "LAST"
    note = f"the file does not say how texts are pooled: pooling_type is {usual}; set it if it was trained otherwise"
    return PooledConfig(
        network=network,
        pooling=given or usual,
        normalize=normalize is not False,
        dimensions=() if is_matryoshka else None,
        notes=() if given else (note,),
    )


def read_reranker(path: Path, name: str, answers: tuple[int, ...]) -> PooledConfig:
    """Read the files of a decoder that answers yes or no. ``answers`` are the token ids of its answers, see
    ``Reranker``.

    Raises ModelLoadError when a file is missing or damaged or needs an unsupported feature, and ConfigError for a model
    that cannot be such a reranker.
    """
    if is_gguf(path):
        return _answering(path, name, gguf_config(GGUFModel(path)), answers, {})
    where = path / "config.json"
    if not where.is_file():
        raise ModelLoadError(f"{path} has no config.json; give the directory that holds it")
    raw = read_json(where)
    architecture = _architecture(raw, str(where))
    if raw.get("model_type") in ENCODERS or not architecture.endswith("ForCausalLM"):
        raise ConfigError(
            f"reranker {name!r} is for models that generate (...ForCausalLM), and {path} is {architecture}; leave it"
            " out"
        )
    return _answering(path, name, parse_config(raw, where=str(where)), answers, _sentence_files(path))


def _answering(
    path: Path, name: str, network: NetworkConfig, answers: tuple[int, ...], settings: Mapping[str, Any]
) -> PooledConfig:
    if any(not 0 <= each < network.vocab_size for each in answers):
        raise ModelLoadError(
            f"{path}: the token ids of the answers are {answers}, but the vocabulary has {network.vocab_size} tokens"
        )
    return PooledConfig(
        network=network,
        pooling="LAST",
        normalize=False,
        labels=RERANKERS[name].answers,
        answers=answers,
        max_seq_length=settings.get("max_seq_length"),
    )


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    architectures = raw.get("architectures") or ["Model"]
    name = str(architectures[0]) if isinstance(architectures, list) else ""
    if not name.endswith((_CLASSIFIES, *_EMBEDS)):
        raise ModelLoadError(
            f"{where}: architectures {architectures!r:.80} is not supported for embeddings; it must end in"
            f" {', '.join(_EMBEDS)} or {_CLASSIFIES}"
        )
    auto_map = raw.get("auto_map")
    if auto_map and raw.get("model_type") not in FAMILIES and raw.get("model_type") not in ENCODERS:
        raise ModelLoadError(f"{where}: the model needs code from its own directory (auto_map), which is never run")
    return name


def parse_encoder(raw: Mapping[str, Any], *, where: str = "config") -> EncoderConfig:
    """Turn the content of an encoder's ``config.json`` into a checked EncoderConfig. Raises ModelLoadError."""
    family = ENCODERS[str(raw.get("model_type"))]
    fields = Fields(raw, where, family.defaults, family.keys, either=family.either_key)
    hidden = fields.integer("hidden_size", 1, 65_536)
    heads = fields.integer("num_attention_heads", 1, 1_024)
    if hidden % heads or hidden // heads % 2:
        fields.fail(f"hidden_size {hidden} is not an even multiple of num_attention_heads {heads}")
    activation = fields.get("hidden_act")
    if not isinstance(activation, str) or activation not in family.activations:
        known = ", ".join(family.activations)
        fields.fail(f"{fields.name('hidden_act')} {activation!r:.40} is not supported, only {known}")
    for key in ("add_cross_attention", "embedding_size", "quantization_config"):
        if raw.get(key):
            fields.fail(f"{key} = {raw[key]!r:.40} is not supported for this family")
    layers = fields.integer("num_hidden_layers", 1, 1_024)
    values: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": fields.integer("vocab_size", 1, 2**22),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", 1, 2**20),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "activation": family.activations[activation],
        "dtype": read_dtype(raw, where),
    }
    return EncoderConfig(**values, **family.read(fields, layers))


def _classifier(raw: Mapping[str, Any], network: NetworkConfig | EncoderConfig, where: str) -> dict[str, Any]:
    fields = Fields(raw, where)
    names = fields.get("id2label")
    if names is None:
        labels = tuple(f"LABEL_{index}" for index in range(fields.integer("num_labels", 1, 2**16, default=2)))
    elif isinstance(names, Mapping) and set(names) == {str(index) for index in range(len(names))} and names:
        labels = tuple(str(names[str(index)]) for index in range(len(names)))
    else:
        fields.fail(f"id2label must name classes from 0 on, got {names!r:.80}")
    activation = "sigmoid" if len(labels) == 1 else "softmax"
    problem = fields.get("problem_type")
    if problem is not None:
        if problem not in _PROBLEMS:
            fields.fail(f"problem_type must be one of {', '.join(_PROBLEMS)}; got {problem!r:.40}")
        activation = _PROBLEMS[problem] if len(labels) > 1 or problem == "regression" else "sigmoid"
    own = fields.get("sentence_transformers")
    given = own.get("activation_fn") if isinstance(own, Mapping) else None
    given = fields.get("sbert_ce_default_activation_function") if given is None else given
    if given is not None:
        name = str(given).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            fields.fail(f"the activation {given!r:.80} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        activation = _ACTIVATIONS[name]
    pooling = network.head_pooling if isinstance(network, EncoderConfig) else "LAST"
    return {"labels": labels, "activation": activation, "pooling": pooling, "normalize": False}


def _decoder_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The content of a ``config.json``, with the ``model_type`` that transformers has, if a publisher invented one."""
    known = _BOTH_WAYS.get(str(raw.get("model_type")))
    return raw if known is None else {**raw, "model_type": known, "is_causal": False}


def _embedder(path: Path, encoder: bool, old: Any) -> dict[str, Any]:
    """Pooling settings in ``modules.json``. Without that file, the type ``old`` in ``config.json``, or vLLM's defaults
    for an encoder or a decoder."""
    file = path / "modules.json"
    if not file.is_file() and old in _OLD_MODES:
        return {"pooling": _OLD_MODES[old], "normalize": True}
    if not file.is_file():
        pooling = "CLS" if encoder else "LAST"
        note = (
            f"the model has no modules.json, which says how texts are pooled: pooling_type is {pooling}, and embeddings"
            " have length 1; set pooling_type and pooling_normalize if it was trained otherwise"
        )
        return {"pooling": pooling, "normalize": True, "notes": (note,)}
    modules = _json_list(file)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds == ["Transformer", "LogitScore"]:
        raise ModelLoadError(
            f"{file}: the model scores pairs by the logits of an answer; if it is Qwen3-Reranker, set reranker to qwen3"
        )
    behind = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in behind):
        raise ModelLoadError(
            f"{file}: the steps {', '.join(kinds) or 'none'} are not supported; supported are Transformer, Pooling,"
            " then Dense (also several), and Normalize at the end"
        )
    if modules[0].get("path"):
        raise ModelLoadError(f"{file}: the network is in {modules[0]['path']!r:.80}; it must be beside modules.json")
    return {"pooling": _pooling(path, str(modules[1].get("path", ""))), "normalize": kinds[-1] == "Normalize"}


def _check_folder(path: Path, kind: str, folder: str) -> None:
    if not folder.replace("_", "").replace("-", "").isalnum():
        raise ModelLoadError(f"{path / 'modules.json'}: the folder of {kind} must be a plain name, got {folder!r:.80}")


def _dense(path: Path, width: int) -> tuple[DenseConfig, ...]:
    """The linear layers after the pooling, which ``modules.json`` lists. ``width`` is the width of the network."""
    file = path / "modules.json"
    found: list[DenseConfig] = []
    for module in _json_list(file) if file.is_file() else []:
        if str(module.get("type", "")).rpartition(".")[2] != "Dense":
            continue
        folder = str(module.get("path", ""))
        _check_folder(path, "Dense", folder)
        fields = Fields(read_json(path / folder / "config.json"), str(path / folder / "config.json"))
        if fields.integer("in_features", 1, 65_536) != width:
            fields.fail(f"in_features is {fields.get('in_features')}, but the step before gives {width} numbers")
        for key in ("module_input_name", "module_output_name"):
            if fields.get(key) not in (None, "sentence_embedding"):
                fields.fail(f"{key} {fields.get(key)!r:.40} is not supported, only sentence_embedding")
        name = str(fields.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
        if name not in _DENSE_ACTIVATIONS:
            known = ", ".join(_DENSE_ACTIVATIONS)
            fields.fail(f"activation_function {name!r:.40} is not supported; supported: {known}")
        out = fields.integer("out_features", 1, 65_536)
        found.append(
            DenseConfig(
                folder=folder,
                width=width,
                out_width=out,
                bias=fields.boolean("bias", True),
                activation=_DENSE_ACTIVATIONS[name],
            )
        )
        width = out
    return tuple(found)


def _pooling(path: Path, folder: str) -> str:
    _check_folder(path, "Pooling", folder)
    file = path / folder / "config.json"
    raw = read_json(file)
    if raw.get("include_prompt") is False:
        raise ModelLoadError(f"{file}: include_prompt is false, which is not supported")
    short = raw.get("pooling_mode")
    if isinstance(short, str):
        if short not in _SHORT_MODES:
            raise ModelLoadError(
                f"{file}: pooling_mode {short!r:.40} is not supported; supported: {', '.join(_SHORT_MODES)}"
            )
        return _SHORT_MODES[short]
    asked = [key for key, value in raw.items() if key.startswith("pooling_mode_") and value]
    if len(asked) != 1 or asked[0] not in _MODES:
        raise ModelLoadError(
            f"{file}: exactly one of {', '.join(_MODES)} must be true, got {', '.join(asked) or 'none'}"
        )
    return _MODES[asked[0]]


def _sentence_files(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    file = path / "sentence_bert_config.json"
    if file.is_file():
        fields = Fields(read_json(file), str(file))
        found["max_seq_length"] = fields.optional_integer("max_seq_length", 2, 2**24)
        if fields.boolean("do_lower_case", False):
            fields.fail("do_lower_case is true, which is not supported")
    file = path / "config_sentence_transformers.json"
    if file.is_file():
        raw = read_json(file)
        prompts = raw.get("prompts") or {}
        default = raw.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise ModelLoadError(f"{file}: prompts must be texts by name, got {prompts!r:.80}")
        if default is not None and default not in prompts:
            raise ModelLoadError(f"{file}: default_prompt_name {default!r:.80} is not one of the prompts")
        found |= {"prompts": prompts, "default_prompt": default}
    return found


def _dimensions(raw: Mapping[str, Any], width: int, where: str, asked: bool | None) -> tuple[int, ...] | None:
    sizes = raw.get("matryoshka_dimensions")
    if sizes is not None and asked is not False:
        good = isinstance(sizes, list) and all(type(size) is int and 1 <= size <= width for size in sizes)
        if not good:
            raise ModelLoadError(f"{where}: matryoshka_dimensions must be sizes from 1 to {width}, got {sizes!r:.80}")
        return tuple(sizes)
    return () if asked or (asked is None and raw.get("is_matryoshka") is True) else None


def _json_list(path: Path) -> list[dict[str, Any]]:
    modules = read_json(path, whole=list)
    if not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path} must hold a list of objects; download it again")
    return list(modules)
