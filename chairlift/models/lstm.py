"""A plain recurrent language model: an embedding, layers of LSTM, and an output head."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields
from chairlift.models.mixers import LSTMConfig

__all__ = ["LSTM"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    mixer = LSTMConfig(bias=fields.boolean("bias", True))
    return {
        "block": "chain",
        "head_bias": fields.boolean("head_bias", False),
        "intermediate_size": 4 * fields.integer("hidden_size", 1, 65_536),
        "layer_windows": (None,) * layers,
        "mixers": (mixer,) * layers,
        "mlp_layers": (False,) * layers,
    }


_WEIGHTS = {
    "in_proj.weight": "weight_ih",
    "in_proj.bias": "bias_ih",
    "recurrent": "weight_hh",
    "bias": "bias_hh",
}

LSTM = Family(
    model_type="lstm",
    architecture="LSTMForCausalLM",
    models="models that `chairlift train` makes",
    differences="layers of LSTM without norms and additions, under the names of `torch.nn.LSTM`",
    called_out="cells",
    read=_read,
    # Head sizes and the eps of norms are required keys, but an LSTM does not use them.
    defaults={
        "head_dim": 2,
        "hidden_act": "tanh",
        "max_position_embeddings": 131_072,
        "num_attention_heads": 1,
        "rms_norm_eps": 1e-5,
    },
    activations={"tanh": "swiglu"},
    rotary=False,
    tensors={"model.embed_tokens": ("embed_tokens",)},
    renamed={f"model.layers.*.mixer.{ours}": f"lstm.{theirs}_l*" for ours, theirs in _WEIGHTS.items()},
)
