"""Runs a model once on symbols and records its operations, so that they can be replayed without Python.

A model's Python code is the only description of its network. A :class:`Recorder` passes :class:`Value` objects to this
code instead of tensors. An :class:`Op` that receives such an object is recorded as a :class:`Node` instead of being
computed. This is tracing as in torch.fx, but without control flow: decisions in Python (which layers have a window, a
bias, a norm on q and k) are made once, and the result is a sequence of operations.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.recurrent import Cell

__all__ = ["Node", "Op", "Recorder", "Value", "add", "attention", "expect", "operation", "recurrence"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Value:
    """Placeholder of a tensor [T, width] in a recording, where T is the number of tokens in a step.

    ``role`` says what the numbers are: ``rows`` (activations in the model's dtype), ``token_ids``, ``positions``,
    ``rotary`` (a table of cosines and sines) or ``heads`` (q, k or v of one attention). ``node`` computes the value; it
    is None for inputs of the step.
    """

    __slots__ = ("node", "recorder", "role", "width")

    def __init__(self, recorder: Recorder, role: str, width: int) -> None:
        self.recorder = recorder
        self.role = role
        self.width = width
        self.node: Node | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor: the model's dtype, or int64 for token ids and positions."""
        return torch.int64 if self.role in ("token_ids", "positions") else self.recorder.dtype

    @property
    def device(self) -> torch.device:
        """The CPU, on which step programs run."""
        return torch.device("cpu")

    def flatten(self, start_dim: int) -> Value:
        """Concatenate the heads, [T, H, Dh] -> [T, H * Dh]. Heads already have this layout, so nothing is recorded."""
        if start_dim != 1:
            raise ValueError(f"flatten({start_dim}) cannot be recorded; flatten(1) keeps one row per token")
        return self

    def __add__(self, other: Value) -> Value:
        return cast(Value, add(self, other)) if isinstance(other, Value) else self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        self.__torch_function__("arithmetic", ())

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a model that is being recorded used {name!r} of an activation, which only tensors have; "
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


class Op(Generic[_P, _R]):
    """Definition of one operation. :func:`operation` creates it from a function in plain torch.

    A call with tensors runs that function, ``reference``. A call with :class:`Value` objects, which come before all
    other arguments, is recorded. ``widths`` takes the same arguments, checks them, and returns the width of the result,
    or a tuple of widths for several results; ``role`` is the role of the results. Each backend lists its kernels:
    ``kernels/cpu/lowering.py`` and ``kernels/triton/program.py``. A backend without a kernel calls ``reference``.
    """

    def __init__(
        self, reference: Callable[_P, _R], widths: Callable[..., int | tuple[int, ...]], role: str = "rows"
    ) -> None:
        self.name: str = getattr(reference, "__name__", "a function")
        self.reference = reference
        self.widths = widths
        self.role = role
        self.__doc__ = reference.__doc__

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if args and type(args[0]) is Value:
            return cast(_R, args[0].recorder.record(self, args, kwargs))
        return self.reference(*args, **kwargs)

    @functools.cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """Parameters of the function ``reference``, in order."""
        return list(inspect.signature(self.reference).parameters.values())


def operation(
    widths: Callable[..., int | tuple[int, ...]], role: str = "rows"
) -> Callable[[Callable[_P, _R]], Op[_P, _R]]:
    """Decorator that turns a function into an :class:`Op`."""
    return lambda reference: Op(reference, widths, role)


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One recorded call of an operation in a model's code."""

    op: Op[Any, Any]
    inputs: tuple[Value, ...]
    """Arguments of the call that are placeholders. They come before all other arguments."""
    attributes: dict[str, Any]
    """Other arguments of the call, by name: weights and numbers."""
    outs: tuple[Value, ...]

    @property
    def out(self) -> Value:
        """Placeholder of the first result. Most operations have only one result."""
        return self.outs[0]

    @property
    def label(self) -> str:
        """Name of the node's operation in messages."""
        role = self.inputs[0].role
        return self.op.name if role == "rows" else f"{self.op.name} of {role}"

    def compute(self, *inputs: Tensor) -> Any:
        """Result of the operation for ``inputs``, computed in plain torch."""
        return self.op.reference(*inputs, **self.attributes)


class Recorder:
    """Records the operations that a model applies to :attr:`token_ids` and :attr:`positions`.

    The recorder also serves as the :class:`~chairlift.models.context.AttentionContext` of that run.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.nodes: list[Node] = []
        """Recorded nodes, in the order of the calls."""
        self.token_ids = Value(self, "token_ids", 1)
        self.positions = Value(self, "positions", 1)

    def record(self, op: Op[Any, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Value | tuple[Value, ...]:
        """Record a call of ``op``. Returns placeholders of its results. Raises TypeError or ValueError for wrong
        arguments."""
        inputs = tuple(itertools.takewhile(lambda each: isinstance(each, Value), args))
        if any(value.recorder is not self for value in inputs):
            raise TypeError(
                f"{op.name}: expected {inputs[0].role} of this recording, got {inputs[0].role} of another recording"
            )
        attributes = dict(kwargs)
        if len(args) > len(inputs):
            names = [parameter.name for parameter in op.parameters]
            attributes |= dict(zip(names[len(inputs) :], args[len(inputs) :], strict=False))
        widths = op.widths(*inputs, **attributes)
        several = isinstance(widths, tuple)
        outs = tuple(Value(self, op.role, width) for width in (widths if isinstance(widths, tuple) else (widths,)))
        node = Node(op, inputs, attributes, outs)
        for value in outs:
            value.node = node
        self.nodes.append(node)
        return outs if several else outs[0]

    def given(self, width: int) -> Value:
        """Placeholder of activations [T, width] that no operation computes: the caller writes them before each run of
        the program."""
        return Value(self, "rows", width)

    def attend(
        self,
        layer: int,
        q: Value,
        k: Value,
        v: Value,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
        both_ways: bool = False,
    ) -> Value:
        """Record attention; see :class:`~chairlift.models.context.AttentionContext`. q, k and v come from one
        ``ops.rotary_heads``. With ``both_ways``, a token attends to all tokens of its text, including later tokens;
        with ``window``, to the nearest ``window`` tokens on each side, itself included."""
        given = {"layer": layer, "scale": scale, "window": window, "cap": cap, "sinks": sinks, "both_ways": both_ways}
        out = self.record(attention, (q, k, v), given)
        return cast(Value, out)

    def recur(self, layer: int, cell: Cell, *inputs: Value) -> Value:
        """Record a recurrent layer; see :class:`~chairlift.models.context.AttentionContext`."""
        return cast(Value, self.record(recurrence, inputs, {"layer": layer, "cell": cell}))


def expect(value: Value, role: str = "rows", width: int | None = None) -> int:
    """Width of ``value``. Raises TypeError if its role is not ``role``, and ValueError if its width is not
    ``width``."""
    if not isinstance(value, Value) or value.role != role:
        given = value.role if isinstance(value, Value) else type(value).__name__
        raise TypeError(f"expected {role} of this recording, got {given}")
    if width is not None and value.width != width:
        raise ValueError(f"the operation takes rows of {width}, got rows of {value.width}")
    return value.width


def _attention_width(q: Value, k: Value, v: Value, **_: Any) -> int:
    if q.role != "heads" or q.node is None or q.node.outs != (q, k, v):
        raise TypeError("attend takes q, k and v as one call of ops.rotary_heads gave them")
    return q.width


def _recurrence_width(*inputs: Value, layer: int, cell: Cell) -> int:
    return cell.width(*(expect(value) for value in inputs))


add = operation(lambda a, b: expect(b, "rows", expect(a)))(operator.add)


@operation(_attention_width)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    both_ways: bool = False,
) -> Tensor:
    """Attention in one layer, causal or in both directions: q, k and v, split into heads -> [T, Hq * Dh]. It has no
    definition in plain torch, because it also reads the KV cache."""
    raise InvariantError("attention has no call-out; see AttentionContext.attend")


@operation(_recurrence_width)
def recurrence(*inputs: Tensor, layer: int, cell: Cell) -> Tensor:
    """Computes a recurrent layer: ``inputs``, each [T, columns], give [T, width]. It has no definition in plain torch,
    because the result also depends on the recurrent states that earlier steps stored."""
    raise InvariantError("a recurrence has no call-out; see AttentionContext.recur")
