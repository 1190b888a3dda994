"""Self-attention of a decoder layer. The context decides which tokens attend to which tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.context import AttentionContext
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Linear
from chairlift.models.layers.norm import RMSNorm
from chairlift.models.layers.rotary import RotaryEmbedding

__all__ = ["Attention"]


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023); q, k and v are computed by one matmul: [T, D] -> [T, D].

    q and k are normalised according to ``config.qk_norm``, and rotated if there is a table of cosines and sines. With
    ``config.output_gate``, the first rows of that matmul's result are a gate for each head's attention result
    (Qwen3-Next). If a norm follows the rotation (:attr:`NetworkConfig.rotates_apart`), both are applied before q, k and
    v are split.
    """

    def __init__(self, config: NetworkConfig, layer: int) -> None:
        super().__init__()
        self.layer = config.cache_number(layer, state=False)
        self.window = config.layer_windows[layer]
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.stored_kv_heads = self.num_kv_heads
        """Number of heads whose K and V this process stores: fewer if several processes share the layer."""
        self.head_dim = config.head_dim
        self.scale = config.layer_scales[layer]
        self.eps = config.norm_eps
        width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        self.width = width + 2 * kv_width
        self.gate_width = width if config.output_gate else 0
        self.qkv_proj = Linear(config.hidden_size, self.gate_width + self.width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        sizes = (width, kv_width) if config.qk_norm == "all" else (self.head_dim, self.head_dim)
        self.norm_offset = config.norm_offset
        self.q_norm, self.k_norm = (
            RMSNorm(n, config.norm_eps, offset=self.norm_offset) if config.qk_norm else None for n in sizes
        )
        self.query_scaling = config.query_scaling
        self.clip = config.qkv_clip
        self.cap = config.score_cap
        self.sinks = nn.Parameter(torch.zeros(self.num_heads)) if config.sinks else None
        rope = config.layer_ropes[layer]
        self.rotary = None
        if rope is not None and config.rotates_apart:
            self.rotary = RotaryEmbedding(self.head_dim, rope, config.max_position_embeddings)

    @property
    def splits_by_heads(self) -> bool:
        """Whether the heads can be divided among processes: nothing between the matmul and attention needs all of
        them. Otherwise each process computes all heads."""
        apart = self.gate_width or self.qk_norm == "all" or self.clip is not None
        return not (apart or self.rotary is not None or self.query_scaling is not None)

    def forward(self, x: Tensor, rotary: ops.Rotary | None, positions: Tensor, ctx: AttentionContext) -> Tensor:
        product: Tensor = self.qkv_proj(x)
        qkv = ops.columns(product, self.gate_width, self.width) if self.gate_width else product
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        if self.qk_norm == "all" and q_norm is not None and k_norm is not None:
            qkv = ops.norm_all_heads(qkv, q_norm, k_norm, self.eps, self.norm_offset)
            q_norm = k_norm = None
        if self.clip is not None:  # no family has both a clip and norms per head
            qkv = ops.clip(qkv, self.clip)
        if self.rotary is not None:
            frequencies = self.rotary.frequencies(positions.device)
            factor = self.rotary.attention_factor
            qkv = ops.rotate_and_norm(
                qkv, positions, frequencies, factor, *heads, q_norm, k_norm, self.eps, self.norm_offset
            )
            q_norm = k_norm = None
        if self.query_scaling is not None:
            qkv = ops.scale_queries(qkv, positions, self.num_heads * self.head_dim, *self.query_scaling)
        q, k, v = ops.rotary_heads(qkv, rotary, *heads, q_norm, k_norm, self.eps, self.norm_offset)
        how: dict[str, Any] = {"scale": self.scale, "window": self.window, "cap": self.cap, "sinks": self.sinks}
        out = ctx.attend(self.layer, q, k, v, **how).flatten(1)
        if self.gate_width:
            out = ops.sigmoid_gate(out, ops.columns(product, 0, self.gate_width))
        projected: Tensor = self.o_proj(out)
        return projected
