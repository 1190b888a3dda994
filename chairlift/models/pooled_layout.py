"""Maps the parameters of networks for embeddings and classes to the tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container

from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.formats.checkpoint import CheckpointPart, decoder_layout
from chairlift.models.pooled_network import PooledNetwork
from chairlift.models.pooling import ENCODERS
from chairlift.models.registry import FAMILIES

__all__ = ["SCORES", "PooledLayout", "pooled_layout"]

SCORES = "score.weight"
"""Name of the weight [L, D] with which a decoder classifies a text."""

_OLD_NAMES = {"weight": "gamma", "bias": "beta"}
"""Name of a parameter of LayerNorm -> its name in checkpoints that were converted from TensorFlow."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledLayout:
    """Tensors that a checkpoint must contain for a network of embeddings, scores or classes."""

    parts: list[CheckpointPart]
    ignored: str
    """Regular expression of tensor names that may be present but are not needed."""


def pooled_layout(model: PooledNetwork, stored: Container[str]) -> PooledLayout:
    """Checkpoint tensor of every parameter of the model. The names are chosen among ``stored``, the names in the files.

    In a checkpoint without a head (class names ``...Model``), the prefix of the body's names may be missing.
    """
    if isinstance(model.config.network, EncoderConfig):
        return _encoder_layout(model, stored)
    network = model.config.network
    parts = [part for part in decoder_layout(model, network, left_out="head.") if not _is_dense(part.parameter)]
    embedding = next(part.name for part in parts if part.parameter == "model.embed_tokens.weight")
    if embedding not in stored:
        prefix = embedding.partition(".")[0] + "."
        parts = [dataclasses.replace(part, name=part.name.removeprefix(prefix)) for part in parts]
    for name, tensor in model.named_parameters():
        if name.startswith("head."):
            parts.append(CheckpointPart(SCORES, name, 0, tuple(tensor.shape)))
    parts += _dense_parts(model)
    head = r"^lm_head\.|^embed_out\." if model.head is None else r"^lm_head\."
    return PooledLayout(parts, f"{FAMILIES[network.model_type].ignored_tensors}|{head}")


def _encoder_layout(model: PooledNetwork, stored: Container[str]) -> PooledLayout:
    family = ENCODERS[model.config.network.model_type]
    words = f"{family.tensors['embeddings.words'][0]}.weight"
    prefix = family.prefix if f"{family.prefix}{words}" in stored or words not in stored else ""
    parts: list[CheckpointPart] = []
    for parameter, tensor in model.named_parameters():
        if _is_dense(parameter):
            continue
        layer, _, attribute = parameter.rpartition(".")
        if layer.startswith("head."):
            names: tuple[str, ...] = (family.head_tensors[layer],)
        else:
            layer = layer.removeprefix("model.")
            number = re.search(r"\d+", layer)
            names = tuple(
                prefix + name.replace("*", number.group() if number else "")
                for name in family.tensors[re.sub(r"\.\d+\.", ".*.", layer)]
            )
        count = tensor.shape[0] // len(names)
        for index, name in enumerate(names):
            whole = f"{name}.{attribute}"
            old = f"{name}.{_OLD_NAMES.get(attribute, '')}"
            stored_as = old if whole not in stored and old in stored else whole
            order = _gates_first(count) if layer.endswith(".up") and family.gates_behind else ()
            shape = (count, *tensor.shape[1:])
            parts.append(CheckpointPart(stored_as, parameter, index * count, shape, order=order, ordered=len(order)))
    return PooledLayout([*parts, *_dense_parts(model)], family.ignored_tensors)


def _gates_first(count: int) -> tuple[int, ...]:
    """Order that moves the second half of ``count`` rows, which are the gate's, before the first."""
    return (*range(count // 2, count), *range(count // 2))


def _is_dense(parameter: str) -> bool:
    return parameter.startswith("dense.")


def _dense_parts(model: PooledNetwork) -> list[CheckpointPart]:
    """Tensors of the linear layers after the pooling. Each is in a file of its own, in the folder of its step."""
    return [
        CheckpointPart(
            f"{config.folder}/linear.{name}", f"dense.{index}.{name}", 0, tuple(layer.get_parameter(name).shape)
        )
        for index, (layer, config) in enumerate(zip(model.dense, model.config.dense, strict=True))
        for name in ("weight", *(["bias"] if config.bias else []))
    ]
