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
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions; q, k and v are one product.

    [T, D] -> [T, D]. With ``config.qk_norm`` each head of q and k is normalised before the rotation (Qwen3).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.layer_windows[layer]
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, width + 2 * kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: AttentionContext) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        split = self.num_heads + self.num_kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.apply_rotary(self.q_norm(heads[:, : self.num_heads]), cos, sin)
            k = ops.apply_rotary(self.k_norm(heads[:, self.num_heads : split]), cos, sin)
        else:
            rotated = ops.apply_rotary(heads[:, :split], cos, sin)
            q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        out = ctx.attend(self.layer, q, k, heads[:, split:], scale=self.scale, window=self.window)
        projected: Tensor = self.o_proj(out.reshape(x.shape[0], -1))
        return projected
