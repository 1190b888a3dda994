"""The tensors of a GGUF file as weights of a network, unpacked and converted back as they are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chairlift.kernels.grouped import GROUP, GroupedRows, GroupKind
from chairlift.models.formats.checkpoint import CheckpointPart, decoder_layout
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import FREQUENCY_DIVISORS
from chairlift.models.formats.gguf_families import GGUF_FAMILIES, ROPE_FACTORS
from chairlift.models.formats.gguf_names import gguf_naming
from chairlift.models.formats.stored_rows import StoredRows
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.mixers import DeltaNetConfig

__all__ = ["GGUFTensor", "GGUFTensors"]

_Order = npt.NDArray[np.intp] | None
_Values = npt.NDArray[np.float32]
_LAYER: Final = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_PLAIN_NORMS: Final = ("ssm_norm",)
"""Norms to whose weights llama.cpp adds nothing, also where it adds one to those of all others."""


class GGUFTensor(StoredRows):
    """One tensor of a GGUF file. If its type stores integers, slices of it are these integers, unchanged.

    Types whose numbers are not integers in groups of 32 are the exception, because the smallest groups of the kernels
    have 32 columns: slices of them are float32, without rounding. Only a layer that stores integers rounds them again,
    to 8 bits; the error is at most 1/254 of the largest number in a group.

    ``order`` is the index of the file's row for each row; ``columns`` is the same for columns. ``offset`` is subtracted
    from the numbers of a tensor with one dimension, and ``value`` is applied to them. ``expert`` selects the matrix (or
    the vector) of one expert in a stack, without ``order``. ``shape`` replaces the file's shape; it has the same
    numbers in the same order.
    """

    stacked = True

    def __init__(
        self,
        model: GGUFModel,
        name: str,
        order: _Order,
        offset: float = 0.0,
        *,
        columns: _Order = None,
        expert: int | None = None,
        shape: tuple[int, ...] | None = None,
        value: Callable[[_Values], _Values] | None = None,
    ) -> None:
        self._model = model
        self._name = name
        self._order = order
        self._columns = columns
        self._offset = offset
        self._value = value
        info = model.info(name)
        self._shape = shape or (info.shape if expert is None else info.shape[1:])
        self._first = 0 if expert is None else expert * (info.rows // info.shape[0])
        self._type = info.type
        self._exact = self._type.group == GROUP and columns is None
        matrix = len(self._shape) == 2 and self._shape[-1] == info.shape[-1]
        if self._type.kind_bits and matrix:
            minimum = self._exact and self._type.minimum
            self.kind = GroupKind(self._type.kind_bits if self._exact else 8, GROUP, minimum)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, rows: slice) -> Tensor | GroupedRows:
        shape = self._shape
        if len(shape) == 1:  # fewer rows in the file than numbers here
            return torch.from_numpy(self._vector()[rows])
        first, last, _ = rows.indices(shape[0])
        place = (self._name, self._first + first, self._first + last, self._order)
        if self.kind is None or not self._exact:
            found = self._model.read(*place)
            found = found if self._columns is None else found[:, self._columns]
            return torch.from_numpy(found.reshape(last - first, *shape[1:]))
        codes, scales, minimums = self._model.read_groups(*place)
        lows = None if minimums is None else torch.from_numpy(minimums)
        return GroupedRows(self.kind, torch.from_numpy(codes), torch.from_numpy(scales), lows)

    def _vector(self) -> _Values:
        info = self._model.info(self._name)
        count = self._shape[0] // info.shape[-1]
        values = self._model.read(self._name, self._first, self._first + count).reshape(-1)
        values = values if self._order is None else values[self._order]
        values = values - np.float32(self._offset)
        return values if self._value is None else self._value(values)


class GGUFTensors(dict[str, GGUFTensor]):
    """Name of a tensor -> tensor, for all weights of a GGUF file. An expert's matrix in the stack ``blk.0.x_exps`` is
    ``blk.0.x_exps.3``.

    llama.cpp's converter changes some weights, and reading changes them back: it adds one to the weights of some norms,
    stores -exp(A) in place of A, and repeats the heads of some delta nets in another order.
    """

    def __init__(self, model: GGUFModel, config: NetworkConfig) -> None:
        super().__init__()
        self._model = model
        self._config = config
        self._family = GGUF_FAMILIES[model.metadata["general.architecture"]]
        for name in model:
            layer = _LAYER.fullmatch(name)
            unread = name == FREQUENCY_DIVISORS or name in ROPE_FACTORS.values()
            if unread or (layer and int(layer[1]) >= config.num_hidden_layers):  # those predict several tokens ahead
                continue
            kind = layer[2] if layer else name.rpartition(".")[0]
            if kind.endswith("_exps"):
                stem, _, attribute = name.rpartition(".")
                for expert in range(model.info(name).shape[0]):
                    self[f"{stem}.{expert}.{attribute}"] = GGUFTensor(model, name, None, expert=expert)
            else:  # files of Falcon-H1 have a norm without the ending
                self[f"{name}.weight" if kind == "ffn_norm" and name.endswith(kind) else name] = self._tensor(
                    name, kind
                )

    def layout(self, model: nn.Module) -> list[CheckpointPart]:
        """Tensors of the file that fill the parameters of ``model``, in the order of its parameters."""
        return decoder_layout(model, self._config, naming=gguf_naming(self._model, self._config, self._family))

    def _tensor(self, name: str, kind: str) -> GGUFTensor:
        shape = self._model.info(name).shape
        flat: tuple[int, ...] | None = None
        if kind in ("ssm_a", "ssm_d", "ssm_norm"):
            flat = (int(np.prod(shape)),)
        elif kind in ("ssm_conv1d", "shortconv.conv") and len(shape) == 2:
            flat = (shape[0], 1, shape[1])
        offset = 0.0
        if name.endswith("norm.weight") and kind not in _PLAIN_NORMS:
            offset = self._family.norm_offset
        order, columns = self._heads(name, kind)
        value = _logarithm if kind == "ssm_a" else None
        return GGUFTensor(self._model, name, order, offset, columns=columns, shape=flat, value=value)

    def _heads(self, name: str, kind: str) -> tuple[_Order, _Order]:
        """(order of rows, order of columns) of a tensor of a delta net whose value heads the file has in another
        order: first the first value head of every key head, then the second, and so on."""
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        net = self._config.mixer(layer) if self._family.tiled_heads and name.startswith("blk.") else None
        if not isinstance(net, DeltaNetConfig) or net.key_heads == net.value_heads:
            return None, None
        each = net.value_heads // net.key_heads
        heads = np.arange(net.value_heads).reshape(each, net.key_heads).T.reshape(-1)
        rows = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).reshape(-1)
        if kind in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
            return heads, None
        if kind == "attn_gate":
            return rows, None
        if kind in ("attn_qkv", "ssm_conv1d"):
            before = net.channels - len(rows)
            return np.concatenate([np.arange(before), before + rows]), None
        return (None, rows) if kind == "ssm_out" else (None, None)


def _logarithm(values: _Values) -> _Values:
    with np.errstate(invalid="ignore", divide="ignore"):  # the loader refuses what is not finite, by name
        return np.log(-values)
