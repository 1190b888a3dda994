"""The connection between server and engine as a simulated wire: one seed decides when bytes arrive, when the reader
stalls, and when the connection breaks.

Both sides are the real ones: :class:`AsyncEngine` in the event loop, and :class:`CoreProcess` with a real core of
HashLM. The core runs in a thread of its own, but only while the event loop waits for it, so an execution is repeatable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections import Counter, deque
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.info import EngineInfo
from chairlift.engine.preparers import Preparers
from chairlift.engine.process.core_process import CoreProcess
from chairlift.engine.process.messages import FrameReader, Message, encode
from chairlift.engine.process.process_client import EngineEvents, ProcessClient
from chairlift.loading.kv_store import open_store
from chairlift.loading.model import load_executor

__all__ = ["Border", "Wire"]

SECRET = b"a secret of the prefix cache"


class Wire:
    """One direction of a connection. Bytes arrive in order, late, and in pieces of any size."""

    def __init__(self, rng: random.Random, delay: int) -> None:
        self._rng, self._delay = rng, delay
        self._sent: deque[tuple[int, bytes]] = deque()
        self._turn = 0
        self.cuts = False
        """Whether bytes may arrive in pieces."""
        self._frames = FrameReader()

    def __len__(self) -> int:
        return sum(len(data) for _, data in self._sent)

    def send(self, message: Message) -> None:
        due = max(self._turn + self._rng.randint(0, self._delay), self._sent[-1][0] if self._sent else 0)
        self._sent.append((due, encode(message)))

    def turn(self) -> list[Message]:
        """Messages that are complete after the bytes of this turn have arrived."""
        self._turn += 1
        arrived = bytearray()
        while self._sent and self._sent[0][0] <= self._turn:
            arrived += self._sent.popleft()[1]
        if arrived and self.cuts and self._rng.random() < 0.3:  # the end of it comes later
            cut = self._rng.randrange(len(arrived))
            self._sent.appendleft((self._turn + 1, bytes(arrived[cut:])))
            del arrived[cut:]
        return list(self._frames.feed(bytes(arrived)))


class _Side:
    """The core's end of the connection, in the form of :class:`~chairlift.engine.process.core_process.Connection`."""

    def __init__(self, border: Border) -> None:
        self.closed = False
        self.frames = FrameReader()
        self._border = border

    @property
    def backlog(self) -> int:
        return len(self._border.back) if self._border.stalled else 0

    def send(self, message: Message) -> None:
        self._border.back.send(message)

    def receive(self, timeout: float | None) -> list[Message]:
        return self._border.core_waits()


class Border(ProcessClient):
    """The server's end. ``harm`` counts what the wire did to the connection."""

    def __init__(self, config: EngineConfig, events: EngineEvents, rng: random.Random, harm: Counter[str]) -> None:
        super().__init__({}, events)
        self._config, self._rng, self._harm = config, rng, harm
        delay = rng.choice((0, 1, 5))
        self.there, self.back = Wire(rng, delay), Wire(rng, delay)
        self.stalled = False
        """Whether the server reads nothing, so that the core's results pile up and are merged."""
        self._silent_turns = 0
        self._inbox: list[Message] = []
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._broken = asyncio.Event()
        self._side = _Side(self)
        self._pump: asyncio.Task[None] | None = None
        self.core: EngineCore

    # -- the thread of the core ------------------------------------------------------------------------------------

    def core_waits(self) -> list[Message]:
        """Called by the core where it would wait for messages: end its turn, and return the messages of its next."""
        self._done.release()
        self._go.acquire()
        messages, self._inbox = self._inbox, []
        return messages

    def _serve(self, info: EngineInfo) -> None:
        try:
            self._process(info)
        finally:
            self._done.release()

    def _process(self, info: EngineInfo) -> None:
        process = CoreProcess(self._side, self.core, info, None, lambda label, share: None)  # type: ignore[arg-type]
        self._go.acquire()
        process.run()

    # -- the event loop --------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        loaded = load_executor(self._config, lambda label, share: None)
        store = open_store(self._config, loaded.executor, loaded.info)
        self.core = EngineCore(
            loaded.executor,
            self._config.scheduler,
            max_model_len=loaded.info.max_model_len,
            cache=self._config.cache,
            cache_secret=SECRET if store is None else store.secret,
            preparers=Preparers(kv_store=store),
        )
        self.core.preparers.kv_blocks.wait_for_store()
        info = dataclasses.replace(loaded.info, capacity_tokens=self.core.kv.capacity_tokens)
        self._thread = threading.Thread(target=self._serve, args=(info,), daemon=True)
        self._thread.start()
        self._pump = asyncio.create_task(self._run())
        return await self._ready

    async def _run(self) -> None:
        try:
            await self._carry()
        finally:
            self._broken.set()

    async def _carry(self) -> None:
        while not self._broken.is_set():
            await asyncio.sleep(0)
            self._change()
            if self._silent_turns:
                self._silent_turns -= 1
                continue
            self._inbox += self.there.turn()
            self._turn_of_core()
            if not self.stalled:
                for message in self.back.turn():
                    self.take(message)

    def _change(self) -> None:
        """Let the wire stall, go on, fall silent or break, while there are requests."""
        if not self._events.num_requests:
            self.stalled = False
            return
        self.there.cuts = self.back.cuts = True
        chance = self._rng.random()
        if chance < 0.02:
            self.stalled = not self.stalled
            self._harm["stalled"] += self.stalled
        elif chance < 0.025:
            self._silent_turns = self._rng.randrange(1, 30)
            self._harm["silent"] += 1
        elif chance < 0.026:
            self._harm["broken"] += 1
            self._broken.set()

    def _turn_of_core(self) -> None:
        self._go.release()
        self._done.acquire()

    def _send(self, message: Message) -> None:
        self.there.send(message)

    async def died(self) -> str:
        await self._broken.wait()
        await self._end()
        return "the connection is broken"

    async def close(self) -> None:
        self._broken.set()
        await self._end()

    async def _end(self) -> None:
        if self._pump is None:
            return
        pump, self._pump = self._pump, None
        try:
            await pump
        finally:
            self._side.closed = True
            self._turn_of_core()  # it sees that the connection is closed, and ends
            self._thread.join()

    async def _outcome(self, future: asyncio.Future[Any]) -> Any:
        return await future

    def kill(self) -> None:
        self._broken.set()
