"""Gives the tensors of a GGUF file Hugging Face's names, and unpacks them as they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GROUP, GroupedRows, GroupKind
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import FREQUENCY_DIVISORS
from chairlift.models.formats.gguf_families import GGUF_FAMILIES, ROPE_FACTORS, GGUFFamily
from chairlift.models.formats.stored_rows import StoredRows
from chairlift.models.hf_config import NetworkConfig

__all__ = ["GGUFTensor", "gguf_tensors"]

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFTensor(StoredRows):
    """One tensor of a GGUF file. If its type stores integers, slices of it are these integers, unchanged.

    Types with groups of 16 (Q6_K, Q3_K, Q2_K) are the exception, because the smallest groups of the kernels have 32
    columns: slices of them are float32, without rounding. Only a layer that stores integers rounds them again, to 8
    bits; the error is at most 1/254 of the largest number in a group. ``offset`` is subtracted from the numbers of a
    tensor with one dimension.
    """

    def __init__(self, model: GGUFModel, name: str, order: npt.NDArray[np.intp] | None, offset: float = 0.0) -> None:
        self._model = model
        self._name = name
        self._order = order
        self._offset = offset
        info = model.info(name)
        self._type = info.type
        self._exact = self._type.group == GROUP
        if self._type.bits and len(info.shape) == 2:
            minimum = self._exact and self._type.minimum
            self.kind = GroupKind(self._type.bits, GROUP, minimum)

    def get_shape(self) -> list[int]:
        return list(self._model.info(self._name).shape)

    def __getitem__(self, rows: slice) -> Tensor | GroupedRows:
        shape = self.get_shape()
        if len(shape) == 1:  # one row in the file, but one row per number here
            order = slice(None) if self._order is None else self._order
            return torch.from_numpy(self._model.read(self._name, 0, 1)[0][order][rows] - self._offset)
        first, last, _ = rows.indices(shape[0])
        place = (self._name, first, last, self._order)
        if self.kind is None or not self._exact:
            return torch.from_numpy(self._model.read(*place))
        codes, scales, minimums = self._model.read_groups(*place)
        lows = None if minimums is None else torch.from_numpy(minimums)
        return GroupedRows(self.kind, torch.from_numpy(codes), torch.from_numpy(scales), lows)


def gguf_tensors(model: GGUFModel, config: NetworkConfig) -> dict[str, GGUFTensor]:
    """Hugging Face's tensor name -> tensor. Raises ModelLoadError for an unknown name.

    For ``llama`` models, llama.cpp reorders the rows of q and k so that rotated pairs are neighbours; this function
    restores the original order. For Gemma, llama.cpp adds one to the weights of norms; this function subtracts it.
    """
    family = GGUF_FAMILIES[model.metadata["general.architecture"]]
    orders: dict[str, Callable[[], npt.NDArray[np.intp]]] = {}
    if family.pairs:
        orders["attn_q"] = lambda: _half_by_half(config.num_attention_heads, config.head_dim)
        orders["attn_k"] = lambda: _half_by_half(config.num_key_value_heads, config.head_dim)
    found = {}
    for name in model:
        if name == FREQUENCY_DIVISORS or name in ROPE_FACTORS.values():
            continue
        order = orders.get(name.split(".")[2]) if name.startswith("blk.") and name.count(".") == 3 else None
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        found[_hf_name(name, model, family)] = GGUFTensor(model, name, None if order is None else order(), offset)
    return found


def _half_by_half(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Index of a row of q or k in the file, for each of our rows. Rotated pairs of rows are neighbours in the file;
    here they are in the two halves of a head."""
    pairs = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _hf_name(name: str, model: GGUFModel, family: GGUFFamily) -> str:
    parts = name.split(".")
    layer_names = {**_LAYER_NAMES, **family.layer_names}
    if len(parts) == 2 and parts[0] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    raise ModelLoadError(f"{model.path}: tensor {name!r} is not one of {model.metadata['general.architecture']!r}")
