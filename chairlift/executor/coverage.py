"""One table of what runs where: for each operation, format of weights and kind of adapters, who computes it.

Nothing is listed here twice. The backends are asked: which operations have kernels, which models they cannot run, in
which format they keep a weight, and which adapters they compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from chairlift.executor.backends.backend import Backend
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.backends.torch.backend import TorchBackend
from chairlift.executor.backends.triton.backend import TritonBackend
from chairlift.kernels import ops
from chairlift.kernels.cells import GRU, LSTM
from chairlift.kernels.delta_rule import DeltaRule
from chairlift.kernels.grouped import GROUP, GroupKind
from chairlift.kernels.mamba2 import Mamba2
from chairlift.kernels.recording import Node, Op, Recorder, add, attention, recurrence
from chairlift.kernels.short_conv import ShortConv
from chairlift.kernels.weights import MatrixShape
from chairlift.lora.kinds import ALL_KINDS
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.mixers import CellConfig, DeltaNetConfig, Mamba2Config, ShortConvConfig

__all__ = ["Row", "adapter_rows", "markdown", "operation_rows", "rows_of_model", "weight_rows"]

_BACKENDS: Final[tuple[type[Backend], ...]] = (NativeBackend, TritonBackend)
_COLUMNS: Final = ("CPU", "GPU", "PyTorch")
_TORCH: Final = "PyTorch"
_WHOLE: Final = "PyTorch, the whole model"
_HEAD: Final = 64
_NETWORK: Final = NetworkConfig(
    model_type="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=_HEAD,
    max_position_embeddings=64,
    rope=None,
    layer_windows=(None,),
    layer_scales=(1.0,),
)
"""A model that all backends run. Others differ from it in one point."""


Row = tuple[str, ...]
"""A line of a table: a name, and who computes it on a CPU, on a GPU, and for weights with ``kernels='torch'``."""


class _Feature(NamedTuple):
    """Something that some models need of an operation."""

    name: str
    computes: object
    """The operation, or the type of a recurrent cell."""
    network: NetworkConfig


def _with(**fields: Any) -> NetworkConfig:
    return dataclasses.replace(_NETWORK, **fields)


def _features() -> list[_Feature]:
    mixers = {
        "short convolution": (ShortConv, ShortConvConfig(taps=3)),
        "Mamba-2": (Mamba2, Mamba2Config(heads=4, head_dim=16, state_size=16, groups=1, taps=4)),
        "gated delta rule": (
            DeltaRule,
            DeltaNetConfig(key_heads=2, value_heads=2, key_dim=16, value_dim=16, taps=4, by_key_head=True),
        ),
        "LSTM": (LSTM, CellConfig(kind="lstm")),
        "GRU": (GRU, CellConfig(kind="gru")),
    }
    return [
        _Feature("attention", attention, _NETWORK),
        _Feature("attention with a window", attention, _with(layer_windows=(8,))),
        _Feature("attention with a cap on its scores", attention, _with(score_cap=50.0)),
        _Feature("attention with sinks", attention, _with(sinks=True)),
        *(_Feature(f"recurrence: {name}", cell, _with(mixers=(mixer,))) for name, (cell, mixer) in mixers.items()),
    ]


def _place(backend: type[Backend], computes: object, network: NetworkConfig) -> str:
    if backend.lacks(network):
        return _WHOLE
    return backend.operations().get(computes, _TORCH)


def operation_rows() -> list[Row]:
    """A row for each operation of models, and for each variant of attention and recurrence."""
    found = [
        (each.name, *(_place(backend, each.computes, each.network) for backend in _BACKENDS)) for each in _features()
    ]
    # A linear layer has an operation for each format of weights, which the other table lists.
    others = {each for each in vars(ops).values() if isinstance(each, Op) and not each.name.endswith("_linear")}
    for op in sorted({add, *others}, key=lambda op: op.name):
        found.append((op.name, *(backend.operations().get(op, _TORCH) for backend in _BACKENDS)))
    return found


_KINDS: Final = {
    "GPTQ, AWQ, compressed-tensors, MLX, GGUF: 4 bits": GroupKind(4, 128),
    "the same with zero points or minimums": GroupKind(4, 128, True),
    "the same formats: 8 bits": GroupKind(8, 128),
    "8 bits with zero points or minimums": GroupKind(8, 128, True),
    "MXFP4": GroupKind(4, GROUP, e2m1=True),
    "FP8 in files, with scales of blocks, rows or the matrix": GroupKind(8, 128, e4m3=True),
}
ROUNDINGS: Final = ("int8", "int4", "fp8")
"""Values of the setting ``quantization`` that round weights at load."""


def weight_rows() -> list[Row]:
    """A row for each format of weights: whether the kernels keep its codes, multiply with floats made of them, or
    refuse it."""
    backends: tuple[type[Backend], ...] = (*_BACKENDS, TorchBackend)
    rows: list[Row] = [("bfloat16, float32", *("kernel" for _ in _BACKENDS), _TORCH)]
    for label, kind in _KINDS.items():
        for stack, where in ((1, ""), (2, ", experts")):
            shape = MatrixShape(64, 256, kind=kind, stack=stack)
            rows.append((label + where, *(_kept(backend, shape) for backend in backends)))
    rows.append(("NVFP4, and types of GGUF and GPTQ with other groups", *("as floats" for _ in backends)))
    for setting in ROUNDINGS:
        cells = ("kernel" if setting in each.abilities.weights else "refused" for each in backends)
        rows.append((f"`--quantization {setting}`", *cells))
    return rows


def _kept(backend: type[Backend], shape: MatrixShape) -> str:
    used = backend("auto").weight_format(None)
    used = used if shape.stack == 1 else used.stacked
    return "kernel, codes" if used.kind_of(shape) == shape.kind else "as floats"


def adapter_rows() -> list[Row]:
    """A row for each kind of changes that an adapter may make."""
    return [
        (
            kind,
            *("kernel" if kind in each.abilities.adapters else "refused" for each in _BACKENDS),
            _TORCH if kind in TorchBackend.abilities.adapters else "refused",
        )
        for kind in ALL_KINDS
    ]


def rows_of_model(network: NetworkConfig) -> list[Row]:
    """The rows of the operations that a model of this shape uses, in the order of their first use."""
    with torch.device("meta"):
        model = CausalLM(network)
    recorder = Recorder(torch.float32)
    hidden: Any = model(recorder.token_ids, recorder.positions, recorder)
    model.compute_logits(hidden)
    whole = [bool(backend.lacks(network)) for backend in _BACKENDS]
    used = dict.fromkeys(map(_used, recorder.nodes))
    return [
        (
            name,
            *(
                _WHOLE if lacks else backend.operations().get(computes, _TORCH)
                for backend, lacks in zip(_BACKENDS, whole, strict=True)
            ),
        )
        for name, computes in used
    ]


def _used(node: Node) -> tuple[str, object]:
    if node.op is recurrence:
        cell = type(node.attributes["cell"])
        return f"recurrence: {cell.__name__}", cell
    return node.op.name, node.op


def markdown() -> str:
    """The three tables of docs/gpu.md."""
    tables = (("operation", operation_rows()), ("weights", weight_rows()), ("adapters that change", adapter_rows()))
    return "\n".join(_table(first, rows) for first, rows in tables)


def _table(first: str, rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    head = (first, *_COLUMNS)[: len(rows[0])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *rows))
