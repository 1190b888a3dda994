"""Plain recurrent language models: an embedding, layers of LSTM or GRU cells, and an output head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chairlift.models.family import Family, Fields
from chairlift.models.mixers import CellConfig

__all__ = ["GRU", "LSTM"]


def _reader(kind: str) -> Callable[[Fields, int], dict[str, Any]]:
    """Return a function that reads the ``config.json`` of a model with cells of ``kind``."""

    def read(fields: Fields, layers: int) -> dict[str, Any]:
        mixer = CellConfig(kind=kind, bias=fields.boolean("bias", True))
        return {
            "block": "chain",
            "head_bias": fields.boolean("head_bias", False),
            "intermediate_size": 4 * fields.integer("hidden_size", 1, 65_536),
            "layer_windows": (None,) * layers,
            "mixers": (mixer,) * layers,
            "mlp_layers": (False,) * layers,
        }

    return read


_WEIGHTS = {
    "in_proj.weight": "weight_ih",
    "in_proj.bias": "bias_ih",
    "recurrent": "weight_hh",
    "bias": "bias_hh",
}


def _family(kind: str) -> Family:
    """Family of models whose layers are cells of ``kind``, under the names of ``torch.nn.LSTM`` or ``torch.nn.GRU``."""
    name = kind.upper()
    return Family(
        model_type=kind,
        architecture=f"{name}ForCausalLM",
        models="models that `chairlift train` makes",
        differences=f"layers of {name} without norms and additions, under the names of `torch.nn.{name}`",
        called_out="cells",
        read=_reader(kind),
        # A recurrent model has no attention heads and no norms, so their sizes and eps have no effect.
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
        renamed={f"model.layers.*.mixer.{ours}": f"{kind}.{theirs}_l*" for ours, theirs in _WEIGHTS.items()},
    )


LSTM = _family("lstm")
GRU = _family("gru")
