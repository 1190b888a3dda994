"""A pre-norm decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.context import AttentionContext
from chairlift.models.hf_config import ModelConfig
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.mlp import MLP
from chairlift.models.layers.norm import make_norm

__all__ = ["DecoderLayer"]


class DecoderLayer(nn.Module):
    """Attention and an MLP, each behind a norm and added to the residual stream: [T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: ops.Rotary | None, ctx: AttentionContext) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, ctx)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
