"""Shape of an encoder, read from ``config.json``. Needs no torch.

An encoder reads a text in both directions and generates nothing. Like decoders, each family has one file beside this
one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from chairlift.models.family import Fields

__all__ = ["EncoderConfig", "EncoderFamily"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A network of layers with bidirectional attention."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    norm_eps: float
    max_model_len: int
    """Longest text in tokens."""
    num_positions: int = 0
    """Rows of the table of learned positions; 0: q and k are rotated instead."""
    position_offset: int = 0
    """Row of that table for a text's first token."""
    num_token_types: int = 0
    """Rows of the table of token types; 0: no table."""
    pre_norm: bool = False
    """Whether norms come before attention and MLP, with one at the end. Otherwise they come after each sum."""
    gated: bool = False
    """Whether the MLP is down(gelu(a) * b) with a and b as one product. Otherwise it is down(gelu(up))."""
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    layer_windows: tuple[int | None, ...]
    """Per layer, the number of tokens that a token sees on each side; None sees all."""
    layer_thetas: tuple[float, ...] = ()
    """Per layer, the base of the rotation; empty with learned positions."""
    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16`` as in the config; None if it does not say."""
    head_bias: bool = True
    """Whether a classifier's first layer has a bias."""
    head_norm: bool = False
    """Whether a norm follows a classifier's first layer."""
    head_activation: str = "tanh"
    """Activation after a classifier's first layer: ``tanh`` or ``gelu``."""
    head_pooling: str = "CLS"
    """Input of a classifier: ``CLS`` or ``MEAN`` of a text."""

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """Everything that is specific to one ``model_type``."""

    model_type: str
    read: Callable[[Fields, int], Mapping[str, Any]]
    """(``config.json``, number of layers) -> fields of EncoderConfig that differ between families."""
    defaults: Mapping[str, Any]
    """Defaults of transformers for keys that ``config.json`` leaves out."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """BERT's names of keys -> the family's, where they differ."""
    prefix: str
    """Prefix of the body's tensor names in a checkpoint with a head; without a head it may be missing."""
    tensors: Mapping[str, tuple[str, ...]]
    """Layers here (``*`` is a number) -> their names without the prefix. Several names share the rows of one layer."""
    head_tensors: Mapping[str, str]
    """Layers of the classifier here -> their names with the prefix."""
    ignored_tensors: str
    """Regular expression of tensors that embeddings do not need."""
