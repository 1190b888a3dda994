"""The server's side of the connection to an engine process: starts the process, exchanges messages, and notices its
death."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

from chairlift.base.parent import kill_child
from chairlift.engine.adapters import AdapterLoad, AdapterState
from chairlift.engine.core import EngineClient
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_moves import MoveOrder
from chairlift.engine.kv_store.report import StoreReport
from chairlift.engine.process.messages import (
    Action,
    AdapterLoaded,
    Add,
    AskKVStore,
    Control,
    Controlled,
    FrameReader,
    KVStoreReported,
    Leave,
    LoadAdapter,
    Loading,
    Log,
    Message,
    Move,
    NotLoaded,
    Paused,
    Ready,
    Refused,
    SideOrder,
    SideReply,
    Start,
    Step,
    UnloadAdapter,
    UpdateWeights,
    Watch,
    Watched,
    encode,
)
from chairlift.engine.replicas import Replicas, SingleProcess
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError

__all__ = [
    "EngineEvents",
    "EnginePlace",
    "EngineProgram",
    "ProcessClient",
    "ProcessCore",
    "RemoteCore",
    "ThisMachine",
    "describe_exit",
    "engine_command",
]

_log = logging.getLogger(__name__)
_ROOT: Final = str(Path(__file__).parents[3])


class EngineEvents(Protocol):
    """Receiver of the messages from the engine's process. Its methods are called in the event loop."""

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""

    def on_progress(self, label: str, share: float) -> None: ...

    def on_step(self, step: Step) -> None: ...

    def on_refused(self, refused: Refused) -> None: ...

    def on_watched(self, lines: bytes) -> None: ...

    def on_updated(self, info: EngineInfo) -> None: ...

    def on_adapter(self, state: AdapterState) -> None: ...


class RemoteCore(EngineClient, Protocol):
    """A core in another process, or several such cores that act as one. Its messages go to an :class:`EngineEvents`."""

    @property
    def replicas(self) -> Replicas:
        """The processes, if there are several."""

    @property
    def silent_since(self) -> float | None: ...

    async def start(self) -> EngineInfo: ...

    def watch(self, wanted: bool) -> None: ...

    def load_adapter(self, load: AdapterLoad) -> None: ...

    def unload_adapter(self, adapter_id: int) -> None: ...

    async def update_weights(self, source: str, version: int, in_flight: str) -> EngineInfo: ...

    async def kv_store(self, clear: str) -> list[StoreReport]: ...

    async def control(self, action: Action) -> None: ...

    async def side_work(self, order: bytes) -> bytes: ...

    async def died(self) -> str: ...

    async def close(self) -> None: ...


class ProcessCore(RemoteCore, Protocol):
    """A core that is one process."""

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none, or if it runs on another machine."""

    def kill(self) -> None:
        """Kill the process. :meth:`died` then returns."""

    def move(self, order: MoveOrder) -> None:
        """Give an order for the move of a sequence. Reports about it come with the results of steps."""


class EnginePlace(Protocol):
    """A place where one engine process runs, such as this machine. It starts and ends the process."""

    @property
    def pid(self) -> int | None:
        """Id of the engine's process; None if the process does not run, or runs on another machine."""

    async def launch(self) -> tuple[socket.socket, dict[str, Any]]:
        """Start the process. Returns (this side's socket of the connection, settings that this place adds to the
        engine's settings). Raises ConfigError or EngineDeadError."""

    async def wait(self) -> str:
        """Wait until the process has ended. Returns a text that says how it ended. Several callers may wait."""

    def kill(self) -> None:
        """End the process at once. Does nothing if it does not run. :meth:`wait` then returns soon."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineProgram:
    """Main program of an engine process."""

    module: str = "chairlift.engine.process.engine_process"
    """Module whose ``main`` is called."""
    arguments: tuple[str, ...] = ()
    """Arguments after those of every engine process."""
    files: tuple[int, ...] = ()
    """Open file descriptors that the process inherits, with their numbers."""


class ThisMachine(EnginePlace):
    """Runs the engine as a child process of this process. ``processors`` are the processors that it may use; empty: the
    same processors as this process.

    The two processes communicate through a pair of sockets. One end is the child's standard input: no other process can
    open it, and it needs no file on disk.
    """

    def __init__(self, processors: Sequence[int] = (), program: EngineProgram | None = None) -> None:
        self._processors = processors
        self._program = program or EngineProgram()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def launch(self) -> tuple[socket.socket, dict[str, Any]]:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *engine_command(self._processors, self._program),
                stdin=theirs.fileno(),
                pass_fds=self._program.files,
                # Ctrl-C sends a signal to all processes in the terminal's group. The engine must not get it, because
                # only the server may end the engine.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours, {}

    async def wait(self) -> str:
        return describe_exit(None if self._process is None else await self._process.wait())

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            kill_child(self._process.pid)


class ProcessClient(ProcessCore):
    """One engine process at a ``place``, from its start to its end. It implements
    :class:`~chairlift.engine.core.EngineClient`."""

    silent_since: float | None = None

    def __init__(self, settings: Mapping[str, Any], events: EngineEvents, place: EnginePlace | None = None) -> None:
        self.silent_since: float | None = None
        """While a reply is expected: time of the engine's last message, or of the first unanswered request. None while
        no reply is expected. It does not change when a caller stops waiting."""
        self._settings = dict(settings)
        self._events = events
        self._place: EnginePlace = ThisMachine() if place is None else place
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._reports: deque[asyncio.Future[StoreReport]] = deque()  # in the order of the replies
        self._updates: deque[asyncio.Future[EngineInfo]] = deque()  # in the order of the replies
        self._controls: deque[asyncio.Future[None]] = deque()  # in the order of the replies
        self._asides: dict[int, asyncio.Future[bytes]] = {}
        """Number of an order for the work beside the steps -> its reply."""
        self._num_asides = 0
        self._is_paused = False
        self._lost = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._place.pid

    @property
    def replicas(self) -> Replicas:
        return SingleProcess(self.pid)

    async def start(self) -> EngineInfo:
        """Start the process and load the model.

        Raises ConfigError or ModelLoadError if the model cannot be loaded, and EngineDeadError if the process dies
        while it loads the model.
        """
        sock, more = await self._place.launch()
        loop = asyncio.get_running_loop()
        local = sock.family == socket.AF_UNIX
        connect = loop.create_unix_connection if local else loop.create_connection
        self._transport, _ = await connect(lambda: _Stream(self), sock=sock)
        level = logging.getLogger("chairlift").getEffectiveLevel()
        self._transport.write(encode(Start(self._settings | more, level)))
        info: EngineInfo = await self._outcome(self._ready)
        return info

    def add(self, request: PreparedRequest) -> None:
        send = self._send if self._is_paused else self._ask
        send(Add.of(request))

    def abort(self, sequence_ids: Sequence[str]) -> None:
        self._send(Leave(list(sequence_ids), stopped=False))

    def stop(self, sequence_ids: Sequence[str]) -> None:
        self._send(Leave(list(sequence_ids), stopped=True))

    def paused(self, sequence_id: str, tools: Sequence[str]) -> None:
        self._send(Paused(sequence_id, list(tools)))

    def move(self, order: MoveOrder) -> None:
        """Give an order for the move of a sequence."""
        self._send(Move.of(order))

    def watch(self, wanted: bool) -> None:
        """Start or stop reports of every step. The reports are lines of JSON for ``on_watched``."""
        self._send(Watch(wanted))

    def load_adapter(self, load: AdapterLoad) -> None:
        """Load an adapter. The result goes to ``on_adapter``."""
        self._send(LoadAdapter(load))

    def unload_adapter(self, adapter_id: int) -> None:
        """Remove an adapter after its last request."""
        self._send(UnloadAdapter(adapter_id))

    async def update_weights(self, source: str, version: int, in_flight: str) -> EngineInfo:
        """Replace the weights. Raises ConfigError or ModelLoadError if the new weights were refused and the old ones
        stay in use, and EngineDeadError.

        ``on_updated`` is called after the last step with the old weights and before the first step with the new
        weights, even if the caller no longer waits.
        """
        updated: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._ask(UpdateWeights(source, version, in_flight))
        self._updates.append(updated)  # only after sending, because a message that cannot be sent gets no reply
        info: EngineInfo = await self._outcome(updated)
        return info

    async def kv_store(self, clear: str) -> list[StoreReport]:
        """Report what is in the store of KV blocks; see :class:`~chairlift.engine.process.messages.AskKVStore`. Raises
        EngineDeadError."""
        reported: asyncio.Future[StoreReport] = asyncio.get_running_loop().create_future()
        self._reports.append(reported)
        self._send(AskKVStore(clear))
        return [await self._outcome(reported)]

    async def control(self, action: Action) -> None:
        """Pause or resume the engine, or forget KV; see :class:`~chairlift.engine.process.messages.Control`. Returns
        when it has happened. A paused engine owes no reply to its requests.

        Raises ConfigError if KV cannot be computed again, and EngineDeadError.
        """
        followed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._controls.append(followed)
        self._ask(Control(action))
        await self._outcome(followed)

    async def side_work(self, order: bytes) -> bytes:
        """Give an order to the work beside the engine's steps, and wait for its reply, which has no time limit. Raises
        ConfigError if the engine does no other work, and EngineDeadError."""
        replied: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._num_asides += 1
        number = self._num_asides
        self._asides[number] = replied
        self._send(SideOrder(number, order))
        try:
            reply: bytes = await self._outcome(replied)
            return reply
        finally:
            del self._asides[number]

    def kill(self) -> None:
        """Kill the process. :meth:`died` then returns."""
        self._place.kill()

    async def died(self) -> str:
        """Wait for the end of the process. Returns a text that says how it ended."""
        if self._transport is None:
            return "the engine was not started"
        lost = asyncio.ensure_future(self._lost.wait())
        ended = asyncio.ensure_future(self._place.wait())
        try:
            await asyncio.wait({lost, ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({lost}, timeout=0.5)  # its last messages may still be on the way
        finally:
            lost.cancel()
            ended.cancel()
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._place.wait(), 0.5)
        self._place.kill()
        return await self._place.wait()

    async def close(self) -> None:
        """End the process by closing the connection. If the process does not end, it is killed."""
        if self._transport is not None:
            self._transport.close()
            if self._ready.done() and not self._ready.cancelled():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._place.wait(), 2.0)
        self._place.kill()
        await self._place.wait()

    async def _outcome(self, future: asyncio.Future[Any]) -> Any:
        """Result of the future. Raises EngineDeadError if the process ends first."""
        if self._transport is None:
            raise EngineDeadError("the engine was not started")
        ended = asyncio.ensure_future(self._place.wait())
        try:
            await asyncio.wait({future, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                await asyncio.sleep(0)  # its last messages may still be on the way
                await asyncio.wait({future}, timeout=0.2)
            if future.done():
                return future.result()
            raise EngineDeadError(ended.result())
        finally:
            ended.cancel()
            if not future.done():
                future.cancel()

    def _ask(self, message: Message) -> None:
        """Send a message to which the engine will reply."""
        self._send(message)
        self.silent_since = self.silent_since or time.monotonic()

    def _send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def lost(self) -> None:
        """Note that the connection has ended."""
        self._lost.set()

    def take(self, message: Message) -> None:
        """Handle one message from the engine."""
        self._hand_on(message)
        owes_steps = self._events.num_requests and not self._is_paused
        self.silent_since = time.monotonic() if owes_steps or self._updates or self._controls else None

    def _hand_on(self, message: Message) -> None:
        if isinstance(message, Step):
            self._events.on_step(message)
        elif isinstance(message, Refused):
            self._events.on_refused(message)
        elif isinstance(message, AdapterLoaded):
            self._events.on_adapter(message.state)
        elif isinstance(message, KVStoreReported) and self._reports:
            reported = self._reports.popleft()
            if not reported.done():
                reported.set_result(message.report)
        elif isinstance(message, Controlled) and self._controls:
            self._is_paused = message.is_paused
            followed = self._controls.popleft()
            if followed.done():
                return
            if message.refusal:
                followed.set_exception(ConfigError(message.refusal))
            else:
                followed.set_result(None)
        elif isinstance(message, SideReply):
            replied = self._asides.get(message.number)
            if replied is not None and not replied.done():
                if message.refusal:
                    replied.set_exception(ConfigError(message.refusal))
                else:
                    replied.set_result(message.reply)
        elif isinstance(message, Watched):
            self._events.on_watched(message.lines)
        elif isinstance(message, Log):
            logging.getLogger(message.name).log(message.level, "%s", message.text)
        elif isinstance(message, Loading):
            self._events.on_progress(message.label, message.share)
        elif isinstance(message, (Ready, NotLoaded)) and (self._updates or not self._ready.done()):
            updated = self._ready.done()
            if updated and isinstance(message, Ready):
                self._events.on_updated(message.info)
            waiting = self._updates.popleft() if updated else self._ready
            if waiting.done():
                return
            if isinstance(message, Ready):
                waiting.set_result(message.info)
            else:
                kind = ModelLoadError if message.kind == ModelLoadError.__name__ else ConfigError
                waiting.set_exception(kind(message.message))


class _Stream(asyncio.Protocol):
    """The connection to the engine process, as an asyncio protocol."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not subclass asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._client.take(message)
        except ValueError:  # the other side sends invalid frames
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost()


# The processors are set before all imports, because libraries count the processors when they are imported. The
# package's folder comes last in the import path, so that no file in this folder or in the working directory can replace
# a library.
_BOOT: Final = """import os, sys
if sys.argv[3]:
    os.sched_setaffinity(0, map(int, sys.argv[3].split(",")))
sys.path.append(sys.argv[1])
from {module} import main
main()"""


def engine_command(processors: Sequence[int] = (), program: EngineProgram | None = None) -> list[str]:
    """Command that starts an engine process. Its standard input must be its socket. The process dies together with this
    process. It may use only ``processors``, if any are given."""
    program = program or EngineProgram()
    boot = _BOOT.format(module=program.module)
    allowed = ",".join(map(str, processors))
    return [sys.executable, "-P", "-c", boot, _ROOT, str(os.getpid()), allowed, *program.arguments]


def describe_exit(code: int | None) -> str:
    if code is None:
        return "the engine's process does not answer"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the engine's process was killed by {signal.Signals(-code).name}"
    return f"the engine's process ended with exit code {code}"
