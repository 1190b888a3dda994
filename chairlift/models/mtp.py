"""Layers for a further token that models are published with (multi-token prediction; DeepSeek-AI, 2024).

Like the layer of EAGLE-3, the layer's input at position p is the embedding of token p + 1 and a feature of position p,
and its result predicts token p + 2. Both are normalised, and a matrix turns them into the input of one decoder layer of
the model's own kind. Where the model has computed position p, the feature is its last hidden state, behind its last
norm (as in vLLM). After the newest known token, the feature is the layer's own previous result. Embedding and output
head are those of the model.

Further layers that a model may have, each for a token further ahead, are not used: the first one is applied again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.weights import WeightFormat
from chairlift.models.causal_lm import lay_out_layers, lay_out_rest
from chairlift.models.context import AttentionContext, LayerCache, LayerState
from chairlift.models.formats.checkpoint import CheckpointPart, decoder_layout
from chairlift.models.formats.gguf.files import is_gguf
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.decoder import DecoderLayer
from chairlift.models.layers.linear import Linear, Matrix, Stack
from chairlift.models.layers.norm import make_norm
from chairlift.models.layers.rotary import RotaryEmbedding
from chairlift.models.loader import open_tensors, write_parts

__all__ = ["MTP_FAMILIES", "Mtp", "MtpConfig", "MtpFamily", "load_mtp"]


@dataclasses.dataclass(frozen=True, slots=True)
class MtpFamily:
    """How the files of a family name the layer."""

    prefix: str
    """Prefix of its tensors; ``*`` is the number of the model's decoder layers."""
    layer: str
    """What the tensors of its decoder layer have behind the prefix."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool
    """Whether the projection's first columns belong to the hidden state, not to the embedding."""
    feeds_normed: bool
    """Whether the feature of the next position is the result behind the last norm, or the result itself."""


_QWEN: Final = MtpFamily(
    *("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), False, True
)
MTP_FAMILIES: Final[Mapping[str, MtpFamily]] = {
    "glm4_moe": MtpFamily("model.layers.*.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm", False, False),
    "mimo": MtpFamily(
        *("model.mtp_layers.0.", "", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), True, True
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _QWEN),
}
"""Value of ``model_type`` -> the layer of this family."""


@dataclasses.dataclass(frozen=True, slots=True)
class MtpConfig:
    """Shape of the layer, and how it is connected to the served model."""

    layer: NetworkConfig
    """Config of a model that has this layer alone."""
    taps: tuple[int, ...]
    """Number of the model's layers: the hidden states behind all of them are the layer's input."""
    target_hidden_size: int
    """Width of the served model's hidden states."""
    family: MtpFamily


class _Inner(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(config, 0)])
        self.norm = make_norm(config)


class Mtp(nn.Module):
    """The layer for a further token. Its methods and attributes are those of
    :class:`~chairlift.models.eagle3.Eagle3`."""

    target_ids = None
    embed_tokens = None
    lm_head = None

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        layer = config.layer
        self.config = config
        hidden = layer.hidden_size
        self.model = _Inner(layer)
        self.embedding_norm = make_norm(layer)
        self.hidden_norm = make_norm(layer)
        self.embedding_proj = Linear(hidden, hidden)
        self.hidden_proj = Linear(hidden, hidden)
        self.final_norm = make_norm(layer)
        rope = layer.layer_ropes[0]
        self.rotary = None if rope is None else RotaryEmbedding(layer.head_dim, rope, layer.max_position_embeddings)

    def project(self, features: Tensor) -> Tensor:
        """The model's last norm of its last hidden states [T, D]."""
        normed: Tensor = self.model.norm(features)
        return normed

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """(features of the next positions, hidden states for the output head), each [T, D]. ``embedded`` [T, D] are
        embeddings of the tokens after ``positions``."""
        x = self.embedding_proj(self.embedding_norm(embedded)) + self.hidden_proj(self.hidden_norm(features))
        rotary = None if self.rotary is None else self.rotary(positions, features.dtype)
        hidden = self.model.layers[0](x, rotary, positions, ctx)
        out: Tensor = self.final_norm(hidden)
        return (out if self.config.family.feeds_normed else hidden), out

    def kv_cache_spec(self) -> list[LayerCache | LayerState]:
        """Shape of the KV cache of the layer."""
        layer = self.config.layer
        return [LayerCache(layer.num_key_value_heads, layer.head_dim, None)]

    def finish_head(self) -> None:
        """Do nothing: the output head is the model's."""

    rounds_floats = False


def mtp_config(target: NetworkConfig) -> MtpConfig:
    """Shape of the layer of the model ``target``. Raises ConfigError for a family whose layer is not read."""
    family = MTP_FAMILIES.get(target.model_type)
    if family is None:
        raise ConfigError(
            f"speculative_config: mtp is for models of the types {', '.join(MTP_FAMILIES)}, and this one is"
            f" {target.model_type}; use method ngram or suffix, or a draft_model"
        )
    last: dict[str, Any] = {
        name: getattr(target, name)[-1:]
        for name in ("layer_windows", "layer_scales", "rope_layers", "attention_layers", "mlp_layers")
    }
    if target.mixers:  # the layer has attention even where the model's last layer has a recurrent state
        last |= {"mixers": (), "layer_windows": (None,), "rope_layers": (True,)}
    if target.experts is not None:
        last["experts"] = dataclasses.replace(target.experts, layers=target.experts.layers[-1:])
    layer = dataclasses.replace(target, num_hidden_layers=1, tie_word_embeddings=False, **last)
    return MtpConfig(layer, (target.num_hidden_layers,), target.hidden_size, family)


def load_mtp(model_dir: Path, target: NetworkConfig, dtype: torch.dtype, weight_format: WeightFormat) -> Mtp:
    """Read the layer in the model's own directory. Raises ConfigError and ModelLoadError."""
    if is_gguf(model_dir):
        raise ConfigError(
            f"speculative_config: mtp reads the layer from a directory of safetensors files, and {model_dir} is a GGUF"
            " file; use method ngram or suffix"
        )
    config = mtp_config(target)
    prefix = config.family.prefix.replace("*", str(target.num_hidden_layers))
    with torch.device("meta"):
        network = Mtp(config)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(model_dir, target, stack)
        parts = _parts(network, prefix)
        names = {f"{prefix}{config.family.projection}.weight", *(part.name for part in parts)}
        if missing := sorted(names - tensors.keys()):
            raise ModelLoadError(
                f"{model_dir} lacks {missing[0]!r} ({len(missing)} tensors in all), so it has no layer for a further"
                " token; leave speculative_config out, or use method ngram"
            )
        for part in parts:
            shape = tuple(tensors[part.name].get_slice(part.name).get_shape())
            if shape != part.stored_shape:
                raise ModelLoadError(
                    f"{model_dir}: {part.name} has shape {list(shape)}, and this model needs {list(part.stored_shape)};"
                    " download it again"
                )
        linears: dict[Matrix, WeightFormat] = {
            each: weight_format.stacked if isinstance(each, Stack) else weight_format
            for each in network.modules()
            if isinstance(each, Matrix)
        }
        lay_out_layers(linears, dtype, torch.device("cpu"))
        lay_out_rest(network, dtype, torch.device("cpu"))
        write_parts(network, parts, tensors)
        _write_projection(network, tensors, f"{prefix}{config.family.projection}.weight", model_dir)
    return network.eval().requires_grad_(False)


def _parts(network: Mtp, prefix: str) -> list[CheckpointPart]:
    """Tensors of the files that fill the layer's parameters, without the projection."""
    family = network.config.family
    names = {
        "embedding_norm": family.embedding_norm,
        "hidden_norm": family.hidden_norm,
        "final_norm": family.final_norm,
    }
    found = []
    for part in decoder_layout(network, network.config.layer):
        layer, _, attribute = part.parameter.rpartition(".")
        if layer in ("embedding_proj", "hidden_proj"):
            continue
        name = part.name.replace("model.layers.0.", prefix + family.layer, 1)
        if layer in names:
            name = f"{prefix}{names[layer]}.{attribute}"
        found.append(dataclasses.replace(part, name=name))
    return found


def _write_projection(network: Mtp, tensors: Mapping[str, Any], name: str, where: Path) -> None:
    """Write the two halves of the projection, which are halves of its columns."""
    width = network.config.layer.hidden_size
    stored = tensors[name]
    if tuple(stored.get_slice(name).get_shape()) != (width, 2 * width):
        raise ModelLoadError(f"{where}: {name} must have the shape {[width, 2 * width]}; download it again")
    whole: Tensor = stored.get_tensor(name)
    order = (network.hidden_proj, network.embedding_proj)
    for half, layer in zip(
        whole.chunk(2, 1), order if network.config.family.hidden_first else order[::-1], strict=True
    ):
        layer.format.write(layer.weight, 0, half.contiguous(), mapped=False)
        layer.finish()
