"""Run a model once on symbols and keep what it did, so that it can be replayed without Python.

A model's Python code is the only description of its network. A :class:`Recorder` hands it :class:`Value` objects in
place of tensors, and every operation of :mod:`~chairlift.kernels.ops` that meets one is written down as a node instead
of computed. This is tracing as torch.fx does it, without control flow: what a model decides in Python (which layers
have a window, a bias, a norm on q and k) is decided once, and the rest is a straight line.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from chairlift.kernels.fp8 import Fp8Weight, fp8_linear
from chairlift.kernels.onednn import packed_linear
from chairlift.kernels.reference import linear

if TYPE_CHECKING:
    from chairlift.kernels.cpu.packing import PackedWeight

__all__ = [
    "Add",
    "Attention",
    "Call",
    "Embedding",
    "Linear",
    "Node",
    "RMSNorm",
    "Recorder",
    "RotaryHeads",
    "RotaryTable",
    "SiluAndMul",
    "Value",
]


class Value:
    """What stands for a tensor while a model is recorded: [T, width] with T the tokens of whatever step comes.

    ``role`` says what the numbers are: ``rows`` (activations in the model's dtype), ``token_ids``, ``positions``,
    ``rotary`` (a table of cosines and sines) or ``heads`` (q, k or v of one attention).
    """

    __slots__ = ("recorder", "role", "width")

    def __init__(self, recorder: Recorder, role: str, width: int) -> None:
        self.recorder = recorder
        self.role = role
        self.width = width

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype; int64 for token ids and positions."""
        return torch.int64 if self.role in ("token_ids", "positions") else self.recorder.dtype

    @property
    def device(self) -> torch.device:
        """Programs run on the CPU."""
        return torch.device("cpu")

    def flatten(self, start_dim: int) -> Value:
        """Heads side by side, [T, H, Dh] -> [T, H * Dh], which is how they lie already."""
        if start_dim != 1:
            raise ValueError(f"flatten({start_dim}) cannot be recorded; flatten(1) keeps one row per token")
        return self

    def __add__(self, other: Value) -> Value:
        return self.recorder.add(self, other) if isinstance(other, Value) else self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        self.__torch_function__("arithmetic", ())

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a model that is being recorded asked its activations for {name!r}, which only tensors have; "
            "put that part into a function and use ops.call_out(function, *values, width=...)"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise TypeError(
            f"torch's {name} cannot be recorded; use an operation of chairlift.kernels.ops, "
            "or put it into a function and use ops.call_out(function, *values, width=...)"
        )


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One operation of the model."""

    out: Value
    inputs: tuple[Value, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Embedding(Node):
    """Rows of ``weight`` [V, D] for the token ids."""

    weight: Tensor | PackedWeight


@dataclasses.dataclass(slots=True, eq=False)
class RotaryTable(Node):
    """Cosines and sines of the positions."""

    frequencies: Tensor
    factor: float


@dataclasses.dataclass(slots=True, eq=False)
class RMSNorm(Node):
    weight: Tensor
    eps: float


@dataclasses.dataclass(slots=True, eq=False)
class Linear(Node):
    """Product with a weight laid out for the native kernels."""

    weight: PackedWeight


@dataclasses.dataclass(slots=True, eq=False)
class SiluAndMul(Node):
    """silu of the first half of the columns times the second half."""


@dataclasses.dataclass(slots=True, eq=False)
class RotaryHeads(Node):
    """q, k and v out of one product. ``out`` stands for all three; ``inputs`` are the product and the rotary table."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


@dataclasses.dataclass(slots=True, eq=False)
class Attention(Node):
    """Causal attention of ``heads`` in one layer, [T, H * Dh]. ``inputs`` is the ``out`` of ``heads``."""

    heads: RotaryHeads
    layer: int
    scale: float
    window: int | None


@dataclasses.dataclass(slots=True, eq=False)
class Add(Node):
    pass


@dataclasses.dataclass(slots=True, eq=False)
class Call(Node):
    """Whatever has no native operation: an ordinary function of tensors [T, width]."""

    function: Callable[..., Tensor]


class Recorder:
    """Writes down what a model does to :attr:`token_ids` and :attr:`positions`.

    It is also the :class:`~chairlift.models.context.AttentionContext` of that run. Its methods are the operations of
    :mod:`~chairlift.kernels.ops` that can be recorded, under the same names.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.nodes: list[Node] = []
        """In the order in which they were called."""
        self.token_ids = Value(self, "token_ids", 1)
        self.positions = Value(self, "positions", 1)
        self._triples: dict[Value, tuple[RotaryHeads, int]] = {}

    def embedding(self, token_ids: Value, weight: Tensor | PackedWeight) -> Value:
        if token_ids is self.token_ids:
            width = weight.shape[1] if isinstance(weight, Tensor) else weight.k
            return self._write(Embedding(Value(self, "rows", width), (token_ids,), weight))
        if not isinstance(weight, Tensor):
            raise TypeError("a packed embedding can be looked up by the batch's token ids only")
        table = weight
        return self.call_out(lambda ids: torch.nn.functional.embedding(ids, table), token_ids, width=table.shape[1])

    def rotary_table(self, positions: Value, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Value:
        self._expect(positions, "positions")
        return self._write(RotaryTable(Value(self, "rotary", 2 * len(frequencies)), (positions,), frequencies, factor))

    def rms_norm(self, x: Value, weight: Tensor, eps: float) -> Value:
        self._expect(x, "rows", len(weight))
        return self._write(RMSNorm(Value(self, "rows", x.width), (x,), weight, eps))

    def linear(self, x: Value, weight: Tensor, bias: Tensor | None) -> Value:
        """A layer that was not laid out for the native kernels runs as torch runs it."""
        self._expect(x, "rows", weight.shape[1])
        return self.call_out(functools.partial(linear, weight=weight, bias=bias), x, width=weight.shape[0])

    def packed_linear(self, x: Value, packed: Tensor, bias: Tensor | None) -> Value:
        self._expect(x, "rows", packed.shape[1])
        return self.call_out(functools.partial(packed_linear, packed=packed, bias=bias), x, width=packed.shape[0])

    def native_linear(self, x: Value, weight: PackedWeight) -> Value:
        self._expect(x, "rows", weight.k)
        return self._write(Linear(Value(self, "rows", weight.out_features), (x,), weight))

    def fp8_linear(self, x: Value, weight: Fp8Weight, bias: Tensor | None) -> Value:
        self._expect(x, "rows", weight.values.shape[1])
        return self.call_out(functools.partial(fp8_linear, weight=weight, bias=bias), x, width=len(weight.values))

    def silu_and_mul(self, x: Value) -> Value:
        self._expect(x, "rows")
        return self._write(SiluAndMul(Value(self, "rows", x.width // 2), (x,)))

    def rotary_heads(
        self,
        qkv: Value,
        rotary: Value | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Value, Value, Value]:
        self._expect(qkv, "rows", (num_heads + 2 * num_kv_heads) * head_dim)
        inputs: tuple[Value, ...] = (qkv,)
        if rotary is not None:
            self._expect(rotary, "rotary", head_dim)
            inputs = (qkv, rotary)
        out = Value(self, "heads", num_heads * head_dim)
        node = RotaryHeads(out, inputs, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps)
        self.nodes.append(node)
        k, v = (Value(self, "heads", num_kv_heads * head_dim) for _ in range(2))
        for place, value in enumerate((out, k, v)):
            self._triples[value] = node, place
        return out, k, v

    def attend(self, layer: int, q: Value, k: Value, v: Value, *, scale: float, window: int | None) -> Value:
        """See :class:`~chairlift.models.context.AttentionContext`; q, k and v come from one :meth:`rotary_heads`."""
        found = [self._triples.get(value) for value in (q, k, v)]
        heads = found[0][0] if found[0] is not None else None
        if heads is None or found != [(heads, 0), (heads, 1), (heads, 2)]:
            raise TypeError("attend takes q, k and v as one call of ops.rotary_heads gave them")
        out = Value(self, "rows", heads.num_heads * heads.head_dim)
        return self._write(Attention(out, (heads.out,), heads, layer, scale, window))

    def add(self, a: Value, b: Value) -> Value:
        self._expect(a, "rows")
        self._expect(b, "rows", a.width)
        return self._write(Add(Value(self, "rows", a.width), (a, b)))

    def call_out(self, function: Callable[..., Tensor], *values: Value, width: int) -> Value:
        for value in values:
            if value.role not in ("rows", "token_ids", "positions"):
                raise TypeError(f"call_out takes activations, token ids and positions, got {value.role}")
        return self._write(Call(Value(self, "rows", width), values, function))

    def _write(self, node: Node) -> Value:
        self.nodes.append(node)
        return node.out

    def _expect(self, value: Value, role: str, width: int | None = None) -> None:
        if not isinstance(value, Value) or value.recorder is not self or value.role != role:
            given = value.role if isinstance(value, Value) else type(value).__name__
            raise TypeError(f"expected {role} of this recording, got {given}")
        if width is not None and value.width != width:
            raise ValueError(f"the operation takes rows of {width}, got rows of {value.width}")
