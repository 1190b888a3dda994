"""Bodies of ``forward_backward``: from Protocol Buffers to arrays, and from results back.

A body is read twice: the server reads the lengths of its data and checks them, and the process that computes reads the
arrays. Both use :func:`read_data`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from chairlift_train.service.compute.calls import Datum, PassCall, PassOutcome, TrainingError
from chairlift_train.service.wire.proto import DTYPES, ForwardBackwardOutputMessage, ForwardBackwardRequestMessage

__all__ = ["BadBodyError", "PassBody", "pass_answer", "read_pass"]

_MAX_CELLS: Final = 1 << 24
"""Maximum number of values of one tensor, also of one that was sent as a sparse one."""


class BadBodyError(Exception):
    """Raised for a body that is not a message of the protocol."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassBody:
    """A request for a pass."""

    model_id: str
    seq_id: int
    forward_only: bool
    canonical: bytes
    """The request in the one encoding that equal requests have."""
    message: Any

    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each datum. Raises TrainingError for input that is no text."""
        return tuple(len(_tokens(index, datum)) for index, datum in enumerate(self.message.data))

    def call(self) -> PassCall:
        """The call with its arrays. Raises TrainingError, which gives the index of the datum."""
        config: dict[str, float | str] = dict(self.message.loss_fn_config)
        for name, value in self.message.loss_fn_config_v2.items():
            config[name] = value.text if value.HasField("text") else value.number
        data = [_datum(index, datum) for index, datum in enumerate(self.message.data)]
        return PassCall(self.model_id, data, self.message.loss_fn, config, self.forward_only)


def read_pass(body: bytes) -> PassBody:
    """Read the body of a ``forward_backward`` request. Raises BadBodyError."""
    message = ForwardBackwardRequestMessage()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise BadBodyError("the body is not a ForwardBackwardRequest in Protocol Buffers") from None
    canonical = message.SerializeToString(deterministic=True)
    return PassBody(message.model_id, message.seq_id, message.forward_only, canonical, message)


def _tokens(index: int, datum: Any) -> NDArray[np.int32]:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            kind = "an image" if chunk.HasField("image") else "audio" if chunk.HasField("dmel") else "an unknown chunk"
            raise TrainingError(f"datum {index} has {kind}, and this server trains on text only; leave it out")
        tokens = chunk.encoded_text.tokens
        if len(tokens) % 4:
            raise TrainingError(f"datum {index}: its tokens have {len(tokens)} bytes, which is no list of int32")
        parts.append(np.frombuffer(tokens, "<i4"))
    if not parts:
        raise TrainingError(f"datum {index} has no tokens; leave it out")
    return np.concatenate(parts)


def _datum(index: int, datum: Any) -> Datum:
    tokens = _tokens(index, datum)
    inputs = {name: _array(f"datum {index}: {name}", tensor) for name, tensor in sorted(datum.loss_fn_inputs.items())}
    return Datum(tokens, inputs)


def _array(what: str, tensor: Any) -> NDArray[Any]:
    """A tensor as an array. Cells that a sparse one does not list are 0."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TrainingError(f"{what} has elements of an unknown type; send float32 or int64")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > _MAX_CELLS:
        raise TrainingError(f"{what} has the shape {list(shape)}; at most {_MAX_CELLS:,} values are allowed")
    try:
        if tensor.HasField("sparse_csr"):
            return _dense(tensor.sparse_csr, shape, dtype)
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape) if shape else values
    except ValueError:
        raise TrainingError(f"{what}: its values do not fill the shape {list(shape)}") from None


def _dense(csr: Any, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    values = np.frombuffer(csr.values, dtype)
    rows = np.frombuffer(csr.crow_indices, "<i8")
    columns = np.frombuffer(csr.col_indices, "<i8")
    counts = np.diff(rows)
    if (
        len(shape) != 2
        or len(rows) != shape[0] + 1
        or len(columns) != len(values)
        or (counts < 0).any()
        or (len(rows) and (rows[0] != 0 or rows[-1] != len(values)))
        or ((columns < 0) | (columns >= shape[1])).any()
    ):
        raise ValueError("the indices do not fit to the shape")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def pass_answer(outcome: PassOutcome) -> bytes:
    """The outcome of a call as a ForwardBackwardOutput. Each metric's name gets the reduction ``sum`` if it has
    none."""
    message = ForwardBackwardOutputMessage(loss_fn_output_type="ArrayRecord")
    for name, value in outcome.metrics.items():
        message.metrics[name if ":" in name else f"{name}:sum"] = value
    if "loss:sum" not in message.metrics:
        message.metrics["loss:sum"] = 0.0
    for arrays in _rectangles(outcome.logprobs):
        _add_record(message, {"logprobs": arrays})
    return bytes(message.SerializeToString(deterministic=True))


def _rectangles(arrays: Sequence[NDArray[np.float32]]) -> list[list[NDArray[np.float32]]]:
    """Runs of arrays whose shapes differ only in the first size, because one record has one size for the others."""
    runs: list[list[NDArray[np.float32]]] = []
    for array in arrays:
        if runs and runs[-1][0].shape[1:] == array.shape[1:]:
            runs[-1].append(array)
        else:
            runs.append([array])
    return runs


def _add_record(message: Any, fields: Mapping[str, Sequence[NDArray[np.float32]]]) -> None:
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(next(iter(fields.values()))))
    for name, arrays in fields.items():
        field = record.fields[name]
        field.dtype = 1
        field.data = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(4 * array.size for array in arrays)], dtype="<i8").tobytes()
        field.trailing_shape.extend(arrays[0].shape[1:])
