"""A network for embeddings, scores and classes: a decoder or an encoder, and a head that makes one vector per text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from chairlift.kernels import ops
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.weights import PLAIN, WeightFormat
from chairlift.models.causal_lm import Decoder, lay_out_layers, lay_out_rest, quantization_of, weight_bytes_of
from chairlift.models.context import LayerCache
from chairlift.models.encoder import EncoderNetwork
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Linear, Matrix, TokenEmbedding
from chairlift.models.layers.norm import LayerNorm
from chairlift.models.pooling import PooledConfig

__all__ = ["PooledNetwork"]

_SHORTEST = 1e-12
"""Minimum divisor when an embedding is divided by its Euclidean length, so that a length of 0 causes no error."""


class _Head(nn.Module):
    """A classifier in float32 from one vector [D] to logits [L]. It takes one vector at a time, because a matmul of
    several vectors may round differently."""

    def __init__(self, config: PooledConfig) -> None:
        super().__init__()
        network = config.network
        labels = len(config.labels)
        self.dense: Linear | None = None
        self.norm: LayerNorm | None = None
        self.activation = ""
        self.eps = 0.0
        if isinstance(network, EncoderConfig):
            self.dense = Linear(network.hidden_size, network.hidden_size, bias=network.head_bias)
            self.activation = network.head_activation
            self.eps = network.norm_eps
            if network.head_norm:
                self.norm = LayerNorm(network.hidden_size, network.norm_eps, bias=network.norm_bias)
        self.out = Linear(network.hidden_size, labels, bias=isinstance(network, EncoderConfig))

    def forward(self, vector: Tensor) -> Tensor:
        x = vector.float()[None]
        if self.dense is not None:
            x = _product(self.dense, x)
            x = _activated(x, self.activation)
        if self.norm is not None:
            bias = None if self.norm.bias is None else self.norm.bias.float()
            x = ops.layer_norm(x, self.norm.weight.float(), bias, self.eps)
        return _product(self.out, x)[0]


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "tanh":
        return torch.tanh(x.double()).float()
    if activation == "identity":
        return x
    return ops.gelu(x) if activation == "gelu" else ops.relu(x)


def _product(layer: Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight.float(), None if layer.bias is None else layer.bias.float())


class PooledNetwork(nn.Module):
    """A network for embeddings, scores or classes. ``body`` computes hidden states of a flat batch; :meth:`pool` turns
    them into one vector per text."""

    rounds_floats = False
    """Whether numbers of the checkpoint were rounded to the model's dtype when they were loaded."""

    def __init__(self, config: PooledConfig) -> None:
        super().__init__()
        self.config = config
        network = config.network
        self.model: Decoder | EncoderNetwork = (
            EncoderNetwork(network) if isinstance(network, EncoderConfig) else Decoder(network)
        )
        self.head = _Head(config) if config.labels else None
        self.dense: Any = nn.ModuleList(Linear(each.width, each.out_width, bias=each.bias) for each in config.dense)

    @property
    def one_row(self) -> str | None:
        """``LAST`` or ``CLS`` if only one token's hidden state per text is used; None if the hidden states of all
        tokens are used."""
        return self.config.pooling if self.config.pooling in ("LAST", "CLS") else None

    def lay_out(
        self,
        weight_format: WeightFormat,
        dtype: torch.dtype,
        device: torch.device,
        kinds: Mapping[str, GroupKind] | None = None,
    ) -> None:
        """Allocate all parameters; see :meth:`~chairlift.models.causal_lm.CausalLM.lay_out`. Classifiers are never
        packed."""
        for name, layer in self.named_modules():
            if isinstance(layer, Matrix):
                layer.shape = layer.shape._replace(kind=(kinds or {}).get(f"{name}.weight"))
        body: dict[Matrix, WeightFormat] = {
            each: PLAIN if isinstance(each, TokenEmbedding) else weight_format
            for each in self.model.modules()
            if isinstance(each, Matrix)
        }
        behind = [self.dense] if self.head is None else [self.dense, self.head]
        head = [each for part in behind for each in part.modules() if isinstance(each, Matrix)]
        lay_out_layers({**body, **dict.fromkeys(head, PLAIN)}, dtype, device)
        lay_out_rest(self, dtype, device)

    def finish_head(self) -> None:
        """Do nothing: a pooled network has no tied head."""

    @property
    def quantization(self) -> str | None:
        """Names of the formats of the quantised weights, joined by ``+``; None if no weight is quantised."""
        return quantization_of(self)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights of the network."""
        return weight_bytes_of(self, dtype)

    def kv_cache_spec(self) -> list[LayerCache]:
        """Per layer of a decoder, the shape of its cache; empty for an encoder."""
        config = self.config.network
        if not isinstance(config, NetworkConfig):
            return []
        return [LayerCache(config.num_key_value_heads, config.head_dim, window) for window in config.layer_windows]

    def pool(self, hidden: Tensor, cu_seqlens: Sequence[int]) -> list[Tensor]:
        """One float32 vector per text: its embedding [D], or the classifier's result [L].

        Text i has rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` of ``hidden`` [T, D]. If :attr:`one_row` is set,
        ``hidden`` is [N, D]: the one row of each text.
        """
        if self.one_row:
            return [self._finished(vector.float()) for vector in hidden]
        return [self._finished(self._pooled(hidden[start:end].float())) for start, end in pairwise(cu_seqlens)]

    def _pooled(self, rows: Tensor) -> Tensor:
        """One vector [D] of the hidden states [n, D] of a text."""
        if self.config.pooling == "MAX":
            return rows.amax(0)
        if self.config.pooling == "WEIGHTED_MEAN":
            weights = torch.arange(1, len(rows) + 1, dtype=torch.float32, device=rows.device)[:, None]
            return (rows * weights).sum(0) / weights.sum()
        return rows.mean(0)

    def _finished(self, vector: Tensor) -> Tensor:
        for layer, how in zip(self.dense, self.config.dense, strict=True):
            vector = _activated(_product(layer, vector.float()[None]), how.activation)[0]
        if self.head is None:
            return vector / vector.norm().clamp_min(_SHORTEST) if self.config.normalize else vector
        logits: Tensor = self.head(vector)
        if self.config.activation == "sigmoid":
            return torch.sigmoid(logits.double()).float()
        return logits.softmax(-1) if self.config.activation == "softmax" else logits
