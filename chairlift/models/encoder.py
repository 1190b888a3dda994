"""The encoder: a flat batch with attention in both directions. Every supported family of encoders is an instance of
it."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.kernels.distances import biased_attention
from chairlift.kernels.recording import Recorder
from chairlift.models.context import LayerCache
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.layers.linear import Linear, TokenEmbedding
from chairlift.models.layers.norm import LayerNorm

__all__ = ["EncoderBatch", "EncoderNetwork", "kernel_attention_cache"]


@dataclasses.dataclass(slots=True)
class EncoderBatch:
    """Texts in a flat batch. One object serves all passes; :meth:`begin` sets its fields before each pass."""

    cu_seqlens: list[int] = dataclasses.field(default_factory=lambda: [0])
    """[N + 1] offsets of the N texts in the flat batch."""
    token_types: Tensor | None = None
    """int64 [T], the token type ids; None if all are 0."""
    recorder: Recorder | None = None
    """Recorder, while the network is recorded as a step program for the native kernels; None while tensors are
    computed."""
    _tables: dict[float, ops.Rotary] = dataclasses.field(default_factory=dict)

    def begin(self, cu_seqlens: list[int], token_types: Tensor | None) -> None:
        """Set the texts that the next forward pass computes."""
        self.cu_seqlens = cu_seqlens
        self.token_types = token_types
        self._tables.clear()

    def rotation(
        self, positions: Tensor, theta: float, divisor: float, head_dim: int, dtype: torch.dtype
    ) -> ops.Rotary:
        """Cosines and sines [T, 1, Dh / 2] of this batch's positions. All layers with the same base ``theta`` share one
        result. ``divisor`` divides the frequencies, and is the same for all layers.

        Angles are float64, because the rounding of torch's float32 cosine depends on an element's index in the tensor.
        """
        if theta not in self._tables:
            steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
            angles = (positions.float()[:, None, None] * (1.0 / theta ** (steps / head_dim) / divisor)).double()
            self._tables[theta] = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self._tables[theta]


class _Embeddings(nn.Module):
    """The embedding before its norm: token ids, positions and token types -> sum of their embeddings [T, D]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.words = TokenEmbedding(config.vocab_size, config.hidden_size)
        learned = config.num_positions
        types = config.num_token_types
        self.positions = TokenEmbedding(learned, config.hidden_size) if learned else None
        self.types = TokenEmbedding(types, config.hidden_size) if types else None
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
        self.offset = config.position_offset
        self.width = config.hidden_size

    def forward(self, token_ids: Tensor, positions: Tensor, batch: EncoderBatch) -> Tensor:
        def encoder_embeddings(ids: Tensor, places: Tensor) -> Tensor:
            hidden: Tensor = self.words(ids)
            if self.types is not None:
                kinds = torch.zeros_like(ids) if batch.token_types is None else batch.token_types
                hidden = hidden + self.types(kinds)
            return hidden if self.positions is None else hidden + self.positions(places + self.offset)

        out: Tensor = self.norm(ops.call_out(encoder_embeddings, token_ids, positions, width=self.width))
        return out


class _Layer(nn.Module):
    """One encoder layer: attention and an MLP, each added to its input: [T, D] -> [T, D]."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.qkv = Linear(hidden, 3 * hidden, bias=config.attention_bias)
        self.out = Linear(hidden, hidden, bias=config.attention_bias)
        silu = config.activation == "silu"  # whose kernel reads gate and up in turn
        self.up = Linear(
            hidden, 2 * inner if config.gated else inner, bias=config.mlp_bias and config.up_bias, interleaved=silu
        )
        self.down = Linear(inner, hidden, bias=config.mlp_bias)
        self.pre_norm = config.pre_norm
        self.gated = config.gated
        self.activation = config.activation
        # The first layer of ModernBERT has no norm of its own: its input already passed the norm of the embeddings.
        self.attention_norm = None if config.pre_norm and layer == 0 else _norm(config)
        self.mlp_norm = _norm(config)
        self.window = config.layer_windows[layer]
        self.theta = config.layer_thetas[layer] if config.layer_thetas else None
        self.divisor = config.rope_divisor
        self.head_dim = config.head_dim
        self.width = hidden
        self.in_kernels = kernel_attention_cache(config) is not None

    def forward(self, x: Tensor, positions: Tensor, batch: EncoderBatch, distances: Tensor | None = None) -> Tensor:
        """``distances`` are biases on attention scores, [classes of distances, heads]."""
        if self.pre_norm:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            x = x + self.out(self._attend(self.qkv(normed), positions, batch, distances))
            return x + self._mlp(self.mlp_norm(x))
        attended = self.out(self._attend(self.qkv(x), positions, batch, distances))
        x = x + attended if self.attention_norm is None else self.attention_norm(x + attended)
        out: Tensor = self.mlp_norm(x + self._mlp(x))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        gate = ops.silu_and_mul if self.activation == "silu" else ops.gelu_and_mul
        out: Tensor = self.down(gate(inner) if self.gated else ops.gelu(inner))
        return out

    def _attend(self, qkv: Tensor, positions: Tensor, batch: EncoderBatch, distances: Tensor | None) -> Tensor:
        if batch.recorder is not None and self.in_kernels:
            heads = self.width // self.head_dim
            found: Any = ops.rotary_heads(qkv, None, heads, heads, self.head_dim)
            # Layers run one after another, so all layers can write the pass's K and V to the same cache.
            out: Any = batch.recorder.attend(0, *found, scale=self.head_dim**-0.5, window=None, both_ways=True)
            return cast(Tensor, out)

        def encoder_attention(rows: Tensor, places: Tensor) -> Tensor:
            q, k, v = rows.reshape(len(rows), 3, -1, self.head_dim).unbind(1)
            if self.theta is not None:
                rotary = batch.rotation(places, self.theta, self.divisor, self.head_dim, rows.dtype)
                q = ops.apply_rotary(q, *rotary)
                k = ops.apply_rotary(k, *rotary)
            scale = self.head_dim**-0.5
            if distances is not None:
                return biased_attention(q, k, v, batch.cu_seqlens, distances, scale=scale).flatten(1)
            return ops.bidirectional_attention(q, k, v, batch.cu_seqlens, scale=scale, window=self.window).flatten(1)

        return ops.call_out(encoder_attention, qkv, positions, width=self.width)


def kernel_attention_cache(config: EncoderConfig) -> LayerCache | None:
    """Shape of the cache for K and V of one pass, shared by all layers, if the native kernels compute attention. None
    if PyTorch computes attention, because heads are rotated, scores have biases, layers have windows, or the head size
    is not a multiple of 16."""
    if (
        config.distance_classes
        or config.layer_thetas
        or any(config.layer_windows)
        or config.head_dim % 16
        or config.head_dim > _WIDEST_HEAD
    ):
        return None
    return LayerCache(config.num_attention_heads, config.head_dim, None)


_WIDEST_HEAD = 256
"""Largest head size that the native attention kernels support."""


def _norm(config: EncoderConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


class EncoderNetwork(nn.Module):
    """``encoder(token_ids[T], positions[T], batch) -> hidden[T, D]``; positions restart at 0 in each text.

    Ids and positions are int64, hidden states have the model's dtype.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_hidden_layers))
        classes = config.distance_classes
        self.distances = TokenEmbedding(classes, config.num_attention_heads) if classes else None
        self.final_norm = _norm(config) if config.pre_norm else None

    def forward(self, token_ids: Tensor, positions: Tensor, batch: EncoderBatch) -> Tensor:
        hidden: Tensor = self.embeddings(token_ids, positions, batch)
        distances = None if self.distances is None else self.distances.weight
        for layer in self.layers:
            hidden = layer(hidden, positions, batch, distances)
        return hidden if self.final_norm is None else self.final_norm(hidden)
