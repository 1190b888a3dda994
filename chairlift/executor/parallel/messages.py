"""Messages by which process 0 tells the other processes what to compute, in memory that they share.

No process but the first schedules. A step is sent as the arrays of its batch, a few kilobytes, which is all that the
step program reads: the others need no rows, no sampling parameters and no tokens of earlier steps. There is one place
for a message, which is free again as soon as every process has copied it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.base.step_batch import StepBatch
from chairlift.executor.kv_tensors import KVPlan
from chairlift.kernels.cpu.communicator import Communicator

__all__ = ["Message", "MessageKind", "Messages", "message_bytes"]

_Move = tuple[int, int, int]
_ALIGNED = 8
"""Each array of a message begins at a multiple of this number of bytes."""
_ARRAYS = 12
"""Maximum number of arrays of a message."""


class MessageKind(enum.IntEnum):
    """What a message asks for."""

    FORWARD = 0
    """Compute the layers of a step."""
    HEAD = 1
    """Compute logits of the step that was computed last."""
    MOVE = 2
    """Copy blocks of the KV cache."""
    ADAPTER = 3
    """Use an adapter that the process has read."""
    DROP = 4
    """Remove an adapter from memory."""
    STOP = 5
    """End the process."""


@dataclasses.dataclass(slots=True)
class Message:
    """A message as the other processes read it."""

    kind: MessageKind
    arrays: list[npt.NDArray[Any] | None]
    """FORWARD: the first six arrays of a :class:`StepBatch`, its ``axes``, ``seen_ends`` and ``adapters``, and the
    tokens whose hidden states are needed. HEAD: the indices of the hidden states, and the adapters of these rows. MOVE:
    swap_out, copies and swap_in. ADAPTER: number of the adapter, and the key under which it was read. DROP: number of
    the adapter."""

    def batch(self) -> StepBatch:
        """The batch of a FORWARD message."""
        axes, seen_ends, adapters, _ = self.arrays[6:]
        names = ("token_ids", "positions", "cu_seqlens", "seq_lens", "block_tables", "slot_mapping")
        given: dict[str, Any] = dict(zip(names, self.arrays, strict=False))
        return StepBatch(**given, axes=axes, seen_ends=seen_ends, adapters=adapters)

    def numbers(self) -> list[int]:
        """The numbers of an ADAPTER or DROP message."""
        return [] if self.arrays[0] is None else self.arrays[0].tolist()

    def moves(self) -> StepBatch:
        """A batch that has only the moves of a MOVE message."""
        empty = np.zeros(0, dtype=np.int32)
        swap_out, copies, swap_in = map(_moves, self.arrays)
        tables = np.zeros((0, 0, 0), dtype=np.int32)
        return StepBatch(
            *(empty, empty, empty, empty, tables, np.zeros((0, 0), dtype=np.int64)),
            swap_out=swap_out,
            copies=copies,
            swap_in=swap_in,
        )


def _moves(array: npt.NDArray[Any] | None) -> list[_Move]:
    return [] if array is None else [(a, b, c) for a, b, c in array.tolist()]


def message_bytes(max_tokens: int, max_rows: int, max_model_len: int, plan: KVPlan) -> int:
    """Maximum size of a message. Only the used part takes memory."""
    groups = len(plan.groups)
    tables = 4 * groups * min(max_rows, max_tokens) * (-(-max_model_len // plan.block_size) + 1)
    tokens = max_tokens * (4 * 8 + 8 * (groups + 1))
    moves = 24 * sum(2 * group.num_blocks + group.num_host_blocks for group in plan.groups)
    return max(tables + tokens + 8 * max_rows, moves) + (1 << 16)


class Messages:
    """The place for messages, at most ``nbytes`` large. Every process makes one over the same memory."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self._comm = comm
        self._head = comm.array(np.int64, (1 + _ARRAYS * 5,))
        """Kind, then for each array: number of dimensions plus one, shape, and the size of an item in bytes. All zeros:
        there is no such array."""
        self._body = comm.array(np.uint8, (nbytes,))

    def send_forward(self, batch: StepBatch, needed: npt.NDArray[np.intp] | None) -> None:
        """Ask for the layers of a step. ``needed``: indices of the tokens whose hidden states are needed; None: of
        all."""
        arrays = [batch.token_ids, batch.positions, batch.cu_seqlens, batch.seq_lens, batch.block_tables]
        more = [batch.slot_mapping, batch.axes, batch.seen_ends, batch.adapters]
        self._send(MessageKind.FORWARD, [*arrays, *more, needed])

    def send_head(self, token_rows: npt.NDArray[np.int32], adapters: npt.NDArray[Any] | None) -> None:
        """Ask for the logits of hidden states of the last step. ``adapters``: number of each row's adapter, 0 for none;
        None if no row has one."""
        self._send(MessageKind.HEAD, [token_rows, adapters])

    def send_adapter(self, adapter_id: int, key: int) -> None:
        """Ask to use the adapter that was read under ``key``, with the number ``adapter_id``."""
        self._send(MessageKind.ADAPTER, [np.array([adapter_id, key])])

    def send_drop(self, adapter_id: int) -> None:
        """Ask to remove an adapter from memory."""
        self._send(MessageKind.DROP, [np.array([adapter_id])])

    def send_moves(self, batch: StepBatch) -> None:
        """Ask to move blocks."""
        moves: list[Sequence[_Move]] = [batch.swap_out, batch.copies, batch.swap_in]
        self._send(MessageKind.MOVE, [np.array(each, dtype=np.int64) if each else None for each in moves])

    def send_stop(self) -> None:
        """Ask the other processes to end."""
        self._send(MessageKind.STOP, [])

    def receive(self) -> Message:
        """Wait for the next message, and copy it. Raises EngineDeadError."""
        self._comm.wait_for_message()
        head = self._head.tolist()
        arrays: list[npt.NDArray[Any] | None] = []
        at = 0
        for place in range(1, 1 + _ARRAYS * 5, 5):
            dimensions, *shape, size = head[place : place + 5]
            if dimensions < 0:
                break
            if dimensions == 0:
                arrays.append(None)
                continue
            shape = shape[: dimensions - 1]
            count = int(np.prod(shape)) * size
            arrays.append(self._body[at : at + count].view(np.int32 if size == 4 else np.int64).reshape(shape).copy())
            at += -(-count // _ALIGNED) * _ALIGNED
        self._comm.read()
        return Message(MessageKind(head[0]), arrays)

    def _send(self, kind: MessageKind, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        self._comm.wait_for_readers()
        head = self._head
        head[0] = kind
        at = 0
        place = 1
        for array in arrays:
            head[place] = 0
            if array is not None:
                head[place] = array.ndim + 1
                head[place + 1 : place + 1 + array.ndim] = array.shape
                head[place + 4] = array.itemsize
                self._body[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
                at += -(-array.nbytes // _ALIGNED) * _ALIGNED
            place += 5
        if place < len(head):
            head[place] = -1
        self._comm.send()
