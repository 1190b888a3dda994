"""Shape of an encoder, read from ``config.json``. The module does not import torch.

In an encoder each token attends to all tokens of its text, and no text is generated. Each family of encoders has one
file in this directory, as each family of decoders has.
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
    """Maximum length of a text in tokens."""
    num_positions: int = 0
    """Number of rows in the table of learned positions; 0 if q and k are rotated instead."""
    position_offset: int = 0
    """Row of the position table for the first token of a text."""
    num_token_types: int = 0
    """Number of rows in the table of token types; 0 if the network has no such table."""
    pre_norm: bool = False
    """Whether norms come before attention and MLP, with one more norm at the end. Otherwise a norm follows each
    addition to the residual stream."""
    gated: bool = False
    """Whether the MLP is down(activation(a) * b), with a and b computed by one matmul. Otherwise the MLP is
    down(activation(up))."""
    activation: str = "gelu"
    """Activation of the MLP: ``gelu``, or ``silu`` if the MLP is gated."""
    distance_classes: int = 0
    """Number of rows in the table of biases on attention scores, one row per class of distances between two tokens; 0
    if scores have no biases."""
    attention_bias: bool = True
    mlp_bias: bool = True
    up_bias: bool = True
    """Whether the first layer of the MLP has a bias, if the MLP has any."""
    norm_bias: bool = True
    layer_windows: tuple[int | None, ...]
    """Per layer, the number of tokens on each side that a token attends to; None: it attends to all tokens."""
    layer_thetas: tuple[float, ...] = ()
    """Per layer, the base of the rotation of q and k; empty for learned positions."""
    rope_divisor: float = 1.0
    """Number by which the frequencies of the rotation are divided."""
    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16`` from the config; None if the config has no dtype."""
    head_bias: bool = True
    """Whether a classifier's first layer has a bias."""
    head_norm: bool = False
    """Whether a norm follows a classifier's first layer."""
    head_activation: str = "tanh"
    """Activation after a classifier's first layer: ``tanh``, ``gelu`` or ``relu``."""
    head_pooling: str = "CLS"
    """Input of a classifier: ``CLS`` (hidden state of the first token) or ``MEAN`` (mean over the text)."""

    def step_bytes(self, itemsize: int) -> int:
        """Bytes per token of the intermediate results in a layer. ``itemsize`` is the number of bytes of one
        element."""
        return (6 * self.hidden_size + (2 + self.gated) * self.intermediate_size) * itemsize

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """Everything that is specific to one ``model_type`` of encoders."""

    model_type: str
    read: Callable[[Fields, int], Mapping[str, Any]]
    """Function from (``config.json``, number of layers) to the fields of EncoderConfig that differ between families."""
    defaults: Mapping[str, Any]
    """Key of ``config.json`` -> transformers' default, for keys that a file may leave out."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """BERT's key of ``config.json`` -> this family's key, where they differ."""
    either_key: bool = False
    """Whether files may have BERT's keys in place of those in :attr:`keys`, as transformers 5 saves them."""
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"gelu": "gelu"})
    """Value of ``hidden_act`` in a ``config.json`` -> value of :attr:`EncoderConfig.activation`."""
    prefix: str
    """Prefix of the tensor names of the encoder itself. A checkpoint without a head may leave the prefix out."""
    tensors: Mapping[str, tuple[str, ...]]
    """Layer name in this package (``*`` is a layer number) -> tensor names in the checkpoint, without :attr:`prefix`.
    Several tensors together fill the rows of one layer."""
    gates_behind: bool = False
    """Whether the MLP's first tensor has the rows of the gate behind those of the other half, instead of before."""
    head_tensors: Mapping[str, str]
    """Name of a layer of the classifier in this package -> its full name in the checkpoint, for example ``head.out`` ->
    ``classifier``. Empty if classifiers of the family are not supported."""
    ignored_tensors: str
    """Regular expression of the names of tensors in a checkpoint that a model for embeddings does not need."""
