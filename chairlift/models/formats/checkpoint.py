"""Maps parameters to the tensor names of a Hugging Face checkpoint.

A model's :class:`~chairlift.models.family.Family` lists the names that differ. It also lists the layers whose weight a
checkpoint stores in several tensors: q, k and v are row ranges of our ``qkv_proj``, and gate and up are row ranges of
our ``gate_up_proj``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError
from chairlift.kernels.grouped import GroupedRows
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.stored_rows import StoredRows, TransposedStack
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Matrix, Stack
from chairlift.models.mixers import DeltaNetConfig, StoredPart
from chairlift.models.registry import FAMILIES

Rows = TypeVar("Rows", Tensor, GroupedRows)

__all__ = ["CheckpointPart", "Naming", "checkpoint_layout", "decoder_layout", "hf_state_dict", "usual_naming"]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One tensor of a Hugging Face checkpoint, and the rows of the parameter that it fills."""

    name: str
    """The tensor's name in the checkpoint."""
    parameter: str
    """Our parameter's name, as in ``model.named_parameters()``."""
    start: int
    """First row that this tensor fills in our parameter."""
    shape: tuple[int, ...]
    """Shape of the rows that this tensor fills in our parameter; ``shape[0]`` is the number of rows."""
    transposed: bool = False
    """Whether the checkpoint stores this tensor transposed."""
    order: tuple[int, ...] = ()
    """Order of the rows within each head of q or k: row i of our head is row ``order[i]`` of the same head in the
    checkpoint. Empty if the order is the same."""
    ordered: int = 0
    """Number of leading rows to which :attr:`order` applies. All later rows have the same order in both."""
    stack: int = 1
    """Number of weights (experts) in a stack. The checkpoint stores a stack as one tensor [stack, rows / stack,
    ...]."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        if self.stack > 1:
            each = (self.shape[0] // self.stack, *self.shape[1:])
            return (self.stack, *(each[::-1] if self.transposed else each))
        return self.shape[::-1] if self.transposed else self.shape

    def rows_of(self, stored: Tensor) -> Tensor | StoredRows:
        """The checkpoint's tensor ``stored`` as rows with the shape :attr:`shape`, without a copy."""
        if self.stack > 1:
            return TransposedStack(stored) if self.transposed else stored.flatten(0, 1)
        return stored.t() if self.transposed else stored

    def stored(self, rows: Tensor) -> Tensor:
        """Inverse of :meth:`rows_of`: convert ``rows``, which have the shape :attr:`shape`, to the checkpoint's tensor,
        in the checkpoint's row order."""
        if not self.transposed:
            return rows.view(self.stored_shape)
        return rows.view(self.stack, -1, rows.shape[1]).transpose(1, 2) if self.stack > 1 else rows.t()

    def in_stored_order(self, first: int, rows: Rows) -> Rows:
        """``rows`` of our parameter, from row ``first`` of this part on, in the checkpoint's row order. They must be
        whole heads: ``first`` and the number of rows are multiples of the length of :attr:`order`, or reach the end."""
        return rows[(self.sources(first, len(rows)) - first).argsort()] if self.order else rows

    def sources(self, first: int, count: int) -> Tensor:
        """int64 [count]: index of the checkpoint's row for each of ``count`` rows from ``first`` on. ``first`` must be
        the first row of a head."""
        rows = torch.arange(first, first + count)
        inside = rows % len(self.order)
        return torch.where(rows < self.ordered, rows - inside + torch.tensor(self.order)[inside], rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How one kind of file names and arranges the weights of a network."""

    names: Callable[[str], tuple[str, ...]]
    """Function from the name of a layer to the names of the tensors that fill it. ``*`` in these names is the number of
    the decoder layer, ``#`` the number of an expert; see :attr:`~chairlift.models.family.Family.tensors`."""
    renamed: Mapping[str, str]
    transposed: tuple[str, ...] = ()
    qkv_by_head: bool = False
    paired_gates: bool = False
    """These four are as in :class:`~chairlift.models.family.Family`."""
    interleaved: bool | None = None
    """Whether the file stores the rows of q and k that are rotated together as neighbours; None: as
    :attr:`~chairlift.models.rope_config.RopeConfig.interleaved` says."""
    stored: Callable[[str], list[StoredPart]]
    """Function from the name of a layer to the tensors that fill it, if these have different numbers of rows or another
    order of rows; otherwise an empty list."""


def usual_naming(config: NetworkConfig) -> Naming:
    """How Hugging Face's checkpoints name the weights."""
    family = FAMILIES[config.model_type]
    tensors = {**family.tensors, **family.block_tensors.get(config.block, {})}
    return Naming(
        names=lambda layer: tensors.get(_kind(layer), (_kind(layer),)),
        renamed=family.renamed,
        transposed=family.transposed,
        qkv_by_head=family.qkv_by_head,
        paired_gates=family.paired_gates,
        stored=lambda layer: _stored_rows(config, layer),
    )


def _kind(layer: str) -> str:
    """Name of a layer, with ``*`` for its number."""
    return re.sub(r"\.\d+\.", ".*.", layer)


def checkpoint_layout(model: CausalLM, stored: Mapping[str, Any] | None = None) -> list[CheckpointPart]:
    """All checkpoint tensors of the model, in the order of ``model.named_parameters()``.

    A tied output head has no tensor of its own. The model may be on the meta device. ``stored`` maps name -> open file:
    transformers 5 saves stacks of experts in another layout than some publishers, and the shapes of ``stored`` decide.
    """
    parts = decoder_layout(model, model.config)
    return parts if stored is None else [_as_stored(part, stored) for part in parts]


def _as_stored(part: CheckpointPart, tensors: Mapping[str, Any]) -> CheckpointPart:
    """``part``, not transposed if it is stored so."""
    if part.stack == 1 or not part.transposed or part.name not in tensors:
        return part
    other = dataclasses.replace(part, transposed=False)
    shape = tuple(tensors[part.name].get_slice(part.name).get_shape())
    return other if shape == other.stored_shape != part.stored_shape else part


def decoder_layout(
    model: nn.Module, config: NetworkConfig, left_out: str = "", naming: Naming | None = None
) -> list[CheckpointPart]:
    """Checkpoint tensors of a module that has a decoder like that of :class:`CausalLM`, in the order of its parameters.

    Parameters whose names begin with ``left_out`` are excluded. ``naming`` is that of the file, by default that of
    Hugging Face's checkpoints.
    """
    naming = naming or usual_naming(config)
    width, kv_width = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    order = _head_order(config, naming.interleaved)
    gates = width if config.output_gate else 0
    shared = config.num_attention_heads // config.num_key_value_heads
    by_head = _by_head(order or tuple(range(config.head_dim)), config.num_key_value_heads, shared)
    gated = _behind_gates(order or tuple(range(config.head_dim)), config.num_attention_heads)
    turned = {"qkv_proj": gates + width + kv_width, "q_norm": width, "k_norm": kv_width} if order else {}
    parts: list[CheckpointPart] = []
    for parameter, tensor in model.named_parameters():
        if left_out and parameter.startswith(left_out):
            continue
        layer, _, attribute = parameter.rpartition(".")
        kind = _kind(layer)
        last = layer.rpartition(".")[2]
        number = re.search(r"\d+", layer)
        names = naming.names(layer)
        module = model.get_submodule(layer)
        stack = module.shape.stack if isinstance(module, Stack) else 1
        stored = naming.stored(layer)
        if stored:
            counts = tuple(rows for rows, _ in stored)
        elif last == "qkv_proj":
            counts = (gates + width, kv_width, kv_width)
        else:
            counts = (len(tensor) // stack // len(names),) * len(names)
        if "#" in names[0]:
            names = tuple(name.replace("#", str(member)) for member in range(stack) for name in names)
            counts = counts * stack
            stack = 1
        counts = counts if len(names) > 1 else (len(tensor),)
        transposed = tensor.dim() == 2 and last in naming.transposed
        start = 0
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            whole = naming.renamed.get(f"{kind}.{attribute}", f"{name}.{attribute}")
            whole = whole.replace("*", number.group() if number else "")
            shape = (count, *tensor.shape[1:])
            ordered = min(count, max(turned.get(last, 0) - start, 0))
            how = (order, ordered) if ordered else ((), 0)
            if last == "qkv_proj" and naming.qkv_by_head:
                how = (by_head, len(by_head))
            if last == "qkv_proj" and gates and start == 0:
                how = (gated, len(gated))
            if stored and stored[place][1]:
                how = (stored[place][1], count)
            if last == "gate_up_proj" and naming.paired_gates and stack > 1:
                each = count // stack
                how = ((*range(0, each, 2), *range(1, each, 2)), count)
            parts.append(CheckpointPart(whole, parameter, start, shape, transposed, *how, stack))
            start += count
    return parts


def _head_order(config: NetworkConfig, neighbours: bool | None) -> tuple[int, ...]:
    """Row order within a head of q or k: entry i is the index of the checkpoint's row for our row i. Empty if the order
    is the same.

    The rotation here pairs a dimension of the first half of a head with its counterpart in the second half. If a
    checkpoint pairs neighbours, or rotates only the first dimensions, its rows are reordered. Attention scores do not
    change, because each is a sum over all dimensions of a head. ``neighbours`` says whether the checkpoint pairs
    neighbours; None: as the rotation's own setting says.
    """
    rope = config.rope
    if rope is None:
        return ()
    dim = rope.dim or config.head_dim
    half = dim // 2
    rest = tuple(range(dim, config.head_dim))
    if rope.interleaved if neighbours is None else neighbours:
        first, second = tuple(range(0, dim, 2)), tuple(range(1, dim, 2))
    else:
        first, second = tuple(range(half)), tuple(range(half, dim))
    order = (*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :])
    return () if order == tuple(range(config.head_dim)) else order


def _by_head(order: tuple[int, ...], kv_heads: int, shared: int) -> tuple[int, ...]:
    """Index of the checkpoint's row for each of our rows of q, k and v, for a checkpoint that stores the ``shared``
    heads of q that belong to the first head of k and v, then this k and this v, then those of the second, and so on.

    ``order`` is the row order within a head of q or k, as :func:`_head_order` returns it.
    """
    size = len(order)
    queries = [(head // shared * (shared + 2) + head % shared, order) for head in range(kv_heads * shared)]
    keys = [(head * (shared + 2) + shared, order) for head in range(kv_heads)]
    values = [(head * (shared + 2) + shared + 1, tuple(range(size))) for head in range(kv_heads)]
    return tuple(size * place + row for place, rows in (*queries, *keys, *values) for row in rows)


def _behind_gates(order: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Index of the checkpoint's row for each of our rows, for a checkpoint that stores q and gate of head 0, then of
    head 1, and so on. Our rows are the gates of all heads, then q of all heads.

    ``order`` is the row order within a head of q, as :func:`_head_order` returns it.
    """
    size = len(order)
    kinds = (tuple(range(size, 2 * size)), order)
    return tuple(2 * size * head + row for rows in kinds for head in range(heads) for row in rows)


def _stored_rows(config: NetworkConfig, layer: str) -> list[StoredPart]:
    """Checkpoint tensors that fill ``layer`` of a delta-net mixer. Empty for every other layer, and where the
    checkpoint's tensors simply have equal numbers of rows."""
    found = re.fullmatch(r".*\.(\d+)\.mixer\.(\w+)", layer)
    mixer = config.mixer(int(found[1])) if found else None
    return mixer.stored(found[2]) if found and isinstance(mixer, DeltaNetConfig) else []


def hf_state_dict(model: CausalLM) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, detached and contiguous, ready for ``safetensors``.

    Raises :class:`~chairlift.errors.ConfigError` for a model whose weights are in a packed format, because its plain
    weights no longer exist.
    """
    if any(isinstance(module, Matrix) and module.format != PLAIN for module in model.modules()):
        raise ConfigError(
            "the model's weights were packed for serving and cannot be saved; load it with weight_format=PLAIN"
        )
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for part in checkpoint_layout(model):
        whole = parameters[part.parameter].detach()
        rows = whole[part.start : part.start + part.shape[0]]
        rows = part.in_stored_order(0, rows)
        tensors[part.name] = part.stored(rows.contiguous()).contiguous()
    return tensors
