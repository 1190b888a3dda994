"""Self-attention of a decoder layer, up to the question who attends to whom."""

from __future__ import annotations

from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.context import AttentionContext
from chairlift.models.hf_config import ModelConfig
from chairlift.models.layers.linear import Linear
from chairlift.models.layers.norm import RMSNorm

__all__ = ["Attention"]


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023); q, k and v are one product: [T, D] -> [T, D].

    With ``config.qk_norm`` each head of q and k is normalised (Qwen3); then they are rotated where there is a table.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.layer_windows[layer]
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.layer_scales[layer]
        self.eps = config.norm_eps
        width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, width + 2 * kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: ops.Rotary | None, ctx: AttentionContext) -> Tensor:
        q, k, v = ops.rotary_heads(
            self.qkv_proj(x),
            rotary,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.q_norm.weight if self.q_norm is not None else None,
            self.k_norm.weight if self.k_norm is not None else None,
            self.eps,
        )
        out = ctx.attend(self.layer, q, k, v, scale=self.scale, window=self.window)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected
