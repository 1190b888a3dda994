"""What an encoder looks like, read from ``config.json``. Needs no torch.

An encoder sees a text from both sides and generates nothing. A family is one file beside this one, as for decoders.
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
    """The longest text in tokens."""
    num_positions: int = 0
    """Rows of the table of learned positions; 0: q and k are rotated."""
    position_offset: int = 0
    """Row of that table that belongs to a text's first token."""
    num_token_types: int = 0
    """Rows of the table of token types; 0: there is none."""
    pre_norm: bool = False
    """Norms stand before attention and MLP, and one at the end; else behind each sum."""
    gated: bool = False
    """The MLP is down(gelu(a) * b) with a and b as one product; else down(gelu(up))."""
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    layer_windows: tuple[int | None, ...]
    """Per layer, how many tokens a token sees to each side; None sees all."""
    layer_thetas: tuple[float, ...] = ()
    """Per layer, the base of the rotation; empty where positions are learned."""
    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16`` as the config says; None where it is silent."""
    head_bias: bool = True
    """Whether a classifier's first layer has a bias."""
    head_norm: bool = False
    """Whether a norm follows a classifier's first layer."""
    head_activation: str = "tanh"
    """``tanh`` or ``gelu``, behind a classifier's first layer."""
    head_pooling: str = "CLS"
    """What a classifier reads of a text: ``CLS`` or ``MEAN``."""

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """All that is particular to one ``model_type``."""

    model_type: str
    read: Callable[[Fields, int], Mapping[str, Any]]
    """(``config.json``, number of layers) -> fields of EncoderConfig that are not read alike for all families."""
    defaults: Mapping[str, Any]
    """What transformers takes for keys that ``config.json`` leaves out."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Our names of keys (BERT's) -> the family's, where they differ."""
    prefix: str
    """What the names of the body begin with in a checkpoint with a head; without a head it may be left out."""
    tensors: Mapping[str, tuple[str, ...]]
    """Our layers (``*`` is a number) -> their names without the prefix; several share our rows."""
    head_tensors: Mapping[str, str]
    """Layers of our classifier -> their names with the prefix."""
    ignored_tensors: str
    """Tensors that embeddings do not need: a regular expression."""
