"""Worker processes that answer requests and can be killed. The only place where a request is tried again.

A thread cannot be stopped, and a library may take all memory or end its process. So work on callers' data that may do
so runs in a worker process under the kernel's limits on memory and processor time. The server kills and replaces a
worker that takes too long. The server checks replies like any other input.

A worker may also die without any fault of its request: an operator kills it, or the kernel does when the machine has no
free memory. So a request whose worker dies is tried once more, on a worker that starts afterwards. It does not matter
when the worker dies: before the request, while it is written, or before or within the reply. A request that kills its
second worker, too, gets an error. A worker that dies at its start has not seen a request, so it is replaced more often.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from chairlift.base.workers.frames import encode_frame
from chairlift.base.workers.process import Ending, WorkerProcess
from chairlift.base.workers.turns import Turns
from chairlift.errors import OverloadedError, WorkerLostError

__all__ = ["WorkerPool"]

_log = logging.getLogger(__name__)

_START_SECONDS: Final = 30.0
_MAX_STARTS: Final = 2
"""Maximum number of workers that are started in a row if each dies by itself at its start."""
_MAX_KILLED_STARTS: Final = 6
"""Maximum number of workers that are started in a row if each is killed from outside at its start."""
_MAX_SETUP_REPLY: Final = 1000
_PATIENCE: Final = 10.0
"""Maximum elapsed time of a request divided by its limit on processor time. The factor is above 1, because a busy
machine gives a worker only a part of a processor."""
_SHORTEST_WAIT: Final = 0.01
"""Minimum number of seconds between two looks at a worker's processor time, which the kernel counts in such units."""


class _DiedError(Exception):
    """A worker has died, or sent a reply that cannot be read (``nonsense`` says why)."""

    def __init__(self, ending: Ending, nonsense: str = "") -> None:
        super().__init__(nonsense or ending.value)
        self.ending = ending
        self.nonsense = nonsense


class WorkerPool:
    """Worker processes that handle one request at a time, and are killed when a request takes too long.

    ``module`` is the program of a worker; it calls :func:`chairlift.base.workers.child.serve`. Each worker gets
    ``setup`` at its start, with ``memory_bytes``, the memory that it may take after its setup. ``what`` names the
    requests in error messages. ``max_reply`` is the maximum length of a reply in bytes. ``patience`` is the maximum
    elapsed time of a request divided by its limit on processor time.

    ``num_workers`` requests run at a time. One further worker is kept ready, so that after a kill no request waits for
    the start of an interpreter; without ``spare`` there is none. At most ``max_waiting`` requests wait in the queue.
    All methods run on one event loop.
    """

    def __init__(
        self,
        module: str,
        setup: dict[str, Any],
        what: str,
        max_reply: int,
        num_workers: int,
        max_waiting: int,
        *,
        patience: float = _PATIENCE,
        spare: bool = True,
    ) -> None:
        self._module = module
        self._setup = setup
        self._what = what
        self._max_reply = max_reply
        self._turns = Turns(num_workers, max_waiting, what)
        self._most = num_workers + spare
        self._patience = patience
        self._spare = spare
        self._processes: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting = False
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of all workers, busy or idle."""
        return [process.pid for process in self._processes]

    @property
    def busy_pids(self) -> list[int]:
        """Process ids of the workers that have a request."""
        return [process.pid for process in self._busy]

    async def start(self) -> None:
        """Start a worker before the first request. Raises OverloadedError if no worker can be started."""
        if not self._idle:
            self._idle.append(await self._start_process())

    async def ask(self, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request to a worker and return the reply. The request may take ``seconds`` of processor time.

        The field ``data`` of requests and replies holds bytes; every other field is JSON. ``cpu_seconds`` (an int) in
        a request is the kernel's own limit on processor time.

        Raises TimeoutError if the request takes longer, EOFError if it kills two workers in a row or reaches the
        kernel's limit on processor time, and ValueError if two workers in a row send an invalid reply. Raises
        OverloadedError if no process can be started or the process gets no processor time, QueueFullError if too many
        requests wait, and WorkerLostError if two workers in a row were killed from outside.
        """
        # If the caller is cancelled, the worker still finishes the request, because killing the worker would cost more.
        return await self._turns.take(lambda: self._background(self._exchange(fields, seconds)))

    async def _exchange(self, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return its reply. Raises the errors of :meth:`ask`."""
        frame = encode_frame(fields)

        async def attempt(again: bool) -> dict[str, Any]:
            # The worker of the second try starts after the death of the first one, so that a signal to all workers
            # cannot end both.
            process = await (self._start_process() if again else self._take())
            return await self._ask_one(process, frame, seconds)

        try:
            return await self._tried_again(attempt)
        except _DiedError as died:
            if died.nonsense:
                raise ValueError(died.nonsense) from None
            if died.ending is not Ending.OUTSIDE:
                raise EOFError from None
            raise WorkerLostError(
                f"the process for {self._what} was ended from outside (out of memory, perhaps); send the request again"
            ) from None

    async def _tried_again(self, attempt: Callable[[bool], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Result of ``attempt(False)``, or of ``attempt(True)`` if the first worker died. Raises _DiedError if both
        workers died, or the first one reached its limit of processor time."""
        try:
            return await attempt(False)
        except _DiedError as died:
            if died.ending is Ending.TIME:
                raise
            _log.warning("a process for %s ended early (%s); its work is tried again", self._what, died)
        return await attempt(True)

    async def _ask_one(self, process: WorkerProcess, frame: bytes, seconds: float) -> dict[str, Any]:
        """Reply of a worker. The worker is then idle, or replaced. Raises _DiedError and the errors of
        :meth:`_in_time`."""
        self._busy.add(process)
        try:
            reply = await self._in_time(process, frame, seconds)
        except (TimeoutError, OverloadedError):
            self._discard(process)
            raise
        except (EOFError, OSError, ValueError) as error:
            raise await self._died(process, error) from None
        finally:
            self._busy.discard(process)
        if reply.get("retire") or self._closed or len(self._processes) > self._most:
            self._discard(process)
        else:
            self._idle.append(process)
        return reply

    async def _died(self, process: WorkerProcess, error: Exception) -> Exception:
        """The error for a worker that raised ``error`` instead of replying. The worker is discarded."""
        nonsense = str(error) if isinstance(error, ValueError) else ""
        ending = Ending.OWN if nonsense else await process.ending()
        self._discard(process)
        return OverloadedError("the server is stopping") if self._closed else _DiedError(ending, nonsense)

    async def close(self) -> None:
        """End all workers. Requests in progress fail."""
        self._closed = True
        self._idle.clear()
        while self._processes or self._tasks:
            for process in self._processes:
                process.kill()
            await asyncio.gather(*map(self._reap, self._processes), *self._tasks, return_exceptions=True)

    async def _in_time(self, process: WorkerProcess, frame: bytes, limit: float) -> dict[str, Any]:
        """The reply of a worker. Raises TimeoutError if the worker has computed for too long. Raises OverloadedError
        if it got too little processor time, so that the request is not at fault."""
        task = asyncio.ensure_future(process.ask(frame, self._max_reply))
        begin = process.seconds_computed()
        used = 0.0
        waited = 0.0
        try:
            while waited < self._patience * limit:
                timeout = max(_SHORTEST_WAIT, limit - used)
                await asyncio.wait({task}, timeout=timeout)
                if task.done():
                    return task.result()
                # The waits are added up instead of reading the clock: while this process is suspended, it cannot
                # receive the reply.
                waited += timeout
                now = process.seconds_computed()
                if now is not None and begin is not None:  # else it has died, and the task ends soon
                    used = now - begin
                if used >= limit:
                    raise TimeoutError
            raise OverloadedError(f"the machine is too busy for {self._what}; try again later")
        finally:
            task.cancel()

    async def _take(self) -> WorkerProcess:
        """An idle worker. If it was the last idle one, another worker is started."""
        process = None
        while self._idle and process is None:
            process = self._idle.pop()
            if not process.alive:
                self._discard(process)
                process = None
        if process is None:
            process = await self._start_process()
        self._keep_spare()
        return process

    def _keep_spare(self) -> None:
        if self._spare and not self._idle and not self._starting and not self._closed:
            self._starting = True
            self._background(self._start_spare())

    async def _start_spare(self) -> None:
        try:
            self._idle.append(await self._start_process())
        except OverloadedError as error:
            if not self._closed:
                _log.warning("no spare worker for %s: %s", self._what, error)
        finally:
            self._starting = False

    async def _start_process(self) -> WorkerProcess:
        """A new worker that has taken its setup. Raises OverloadedError if the system cannot start one, or if several
        in a row die at their start."""
        num_died: Counter[Ending] = Counter()
        while True:
            try:
                return await self._start_one()
            except _DiedError as died:
                num_died[died.ending] += 1
                num_killed = num_died[Ending.OUTSIDE]
                if num_killed < _MAX_KILLED_STARTS and num_died.total() - num_killed < _MAX_STARTS:
                    continue
                why = f"{num_died.total()} in a row have ended early ({died})"
            except OSError as error:  # TimeoutError is an OSError
                why = repr(error)[:200]
            raise OverloadedError(f"the process for {self._what} does not start: {why}; try again")

    async def _start_one(self) -> WorkerProcess:
        if self._closed:
            raise OverloadedError("the server is stopping")
        process = await WorkerProcess.start(self._module)
        self._processes.add(process)
        try:
            await asyncio.wait_for(process.ask(encode_frame(self._setup), _MAX_SETUP_REPLY), _START_SECONDS)
        except TimeoutError:
            self._discard(process)
            raise
        except (EOFError, OSError, ValueError) as error:
            raise await self._died(process, error) from None
        return process

    def _discard(self, process: WorkerProcess) -> None:
        process.kill()
        self._background(self._reap(process))
        self._keep_spare()

    async def _reap(self, process: WorkerProcess) -> None:
        await process.wait()
        self._processes.discard(process)

    def _background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have left, and an error that is never fetched would be logged
