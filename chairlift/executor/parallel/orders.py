"""Work of the other processes that is not a step, such as reading an adapter: orders and answers, over their sockets.

Only a thread that gives an order waits for the answers. Steps go on at the same time, in the memory that the processes
share.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from chairlift.base.workers.frames import encode_frame, read_frame
from chairlift.errors import ChairliftError, EngineDeadError, ModelLoadError
from chairlift.kernels.cpu.communicator import Communicator

if TYPE_CHECKING:
    from chairlift.executor.parallel.parallel_runner import RankRunner

__all__ = ["OrderThread", "Orders"]

_log = logging.getLogger(__name__)
_LOOK_MILLISECONDS: Final = 1000


class Orders:
    """What process 0 uses to give orders to the others. ``sockets`` are its ends of their sockets, and ``pipes`` the
    same as files."""

    def __init__(self, sockets: Sequence[socket.socket], pipes: Sequence[IO[bytes]], comm: Communicator) -> None:
        self._sockets = sockets
        self._pipes = pipes
        self._comm = comm
        self._lock = threading.Lock()

    def give(self, order: Mapping[str, Any], *, between_steps: bool = False) -> list[dict[str, Any]]:
        """Have all other processes obey ``order``. Returns their answers. Any thread may call this; the thread that
        computes steps says so with ``between_steps``.

        Raises ModelLoadError with the words of a process that could not obey, and EngineDeadError if a process ended.
        """
        with self._lock:
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # the missing answer says so
                    pipe.write(encode_frame(order))
                    pipe.flush()
            pairs = zip(self._sockets, self._pipes, strict=True)
            answers = [self._answer(sock, pipe, between_steps) for sock, pipe in pairs]
        for rank, answer in enumerate(answers, 1):
            if "error" in answer:
                raise ModelLoadError(f"in process {rank} of tensor_parallel_size {self._comm.size}: {answer['error']}")
        return answers

    def _answer(self, sock: socket.socket, pipe: IO[bytes], between_steps: bool) -> dict[str, Any]:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(_LOOK_MILLISECONDS):
            if between_steps:
                self._comm.look()
            self._comm.check_end()
        answer = read_frame(pipe)
        if answer is None:
            raise EngineDeadError(f"a process of tensor_parallel_size {self._comm.size} ended; load the model again")
        return answer


class OrderThread:
    """What another process uses to obey orders, in a thread of its own, until process 0 closes ``pipe``."""

    def __init__(self, pipe: IO[bytes], runner: RankRunner) -> None:
        self._pipe = pipe
        self._runner = runner
        self._thread = threading.Thread(target=self._obey_all, name="orders", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _obey_all(self) -> None:
        with contextlib.suppress(OSError):  # process 0 ended
            while (order := read_frame(self._pipe)) is not None:
                try:
                    answer = self._obey(order)
                except Exception as error:
                    if not isinstance(error, ChairliftError):
                        _log.exception("an order could not be obeyed")
                    answer = {"error": f"{error}" or type(error).__name__}
                self._pipe.write(encode_frame(answer))
                self._pipe.flush()

    def _obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if order["do"] == "check weights":
            self._runner.check_weights(order["path"])
            return {}
        if order["do"] == "weights":
            self._runner.update_weights(order["path"])
            return {}
        for key in order["forget"]:
            self._runner.held.pop(key, None)
        root = None if order["root"] is None else Path(order["root"])
        held = self._runner.read_adapter(order["key"], Path(order["path"]), root)
        return {"digest": held.digest, "nbytes": held.nbytes}
