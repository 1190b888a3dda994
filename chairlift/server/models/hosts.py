"""The engines of several models: starts and ends them as the policy says, and lets requests wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from starlette.applications import Starlette

from chairlift.errors import ChairliftError, ConfigError, EngineDeadError, ModelLoadError, TemplateFailedError
from chairlift.fleet.models.catalog import CatalogEntry
from chairlift.fleet.models.policy import Action, ActionKind, ModelPolicy, ModelState, ModelView, Refusal, Ticket
from chairlift.server.http.state import ServerState
from chairlift.server.operations.adapters import load_modules

__all__ = ["Host", "Hosts", "ModelRefusedError"]

_log: Final = logging.getLogger("chairlift.server")
_UNUSABLE: Final = (ConfigError, ModelLoadError, TemplateFailedError)
"""Errors of a load that would happen again."""


class ModelRefusedError(ChairliftError):
    """A request cannot wait for its model. ``retry_after`` is in seconds. ``failed``: the model itself cannot be
    loaded; otherwise too many requests wait."""

    def __init__(self, message: str, retry_after: float, failed: bool) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.failed = failed


class Host:
    """One model of the server, and its engine while it is loaded."""

    def __init__(self, entry: CatalogEntry) -> None:
        self.entry = entry
        self.state: ServerState | None = None
        """State that endpoints use for this model; None while the model is not loaded."""
        self.holder = Starlette()
        """``request.app`` of the model's requests."""
        self.task: asyncio.Task[None] | None = None
        """Loads, watches or unloads the engine."""


class Hosts:
    """All models of a server. ``start`` makes the state of one model, with an engine that begins to load. ``sizes`` has
    the memory in bytes that each model needs, or the reason why it cannot be loaded."""

    def __init__(
        self,
        entries: Sequence[CatalogEntry],
        sizes: Sequence[int | str],
        policy: ModelPolicy,
        start: Callable[[CatalogEntry], ServerState],
        *,
        keep_alive: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.hosts = {entry.name: Host(entry) for entry in entries}
        self._by_name = {
            name: host for host in self.hosts.values() for name in (*host.entry.names, *host.entry.adapters)
        }
        self._start = start
        self._clock = clock
        self._unreadable = {
            entry.name: size for entry, size in zip(entries, sizes, strict=True) if isinstance(size, str)
        }
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        for entry, size in zip(entries, sizes, strict=True):
            keep = keep_alive if entry.keep_alive is None else entry.keep_alive
            usable = isinstance(size, int)
            policy.add(
                entry.name,
                size if isinstance(size, int) else 0,
                pinned=entry.pinned and usable,
                keep_seconds=math.inf if keep is None else keep,
            )
            if isinstance(size, str):
                _log.error("model %s cannot be loaded: %s", entry.name, size)

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """All names of models and adapters, for clients."""
        return list(self._by_name)

    def named(self, name: str) -> Host | None:
        """The model that clients mean by ``name``, which may end with ``:latest``."""
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))

    def view(self, host: Host) -> ModelView:
        """State of a model."""
        return self.policy.view(host.entry.name)

    def problem(self, host: Host) -> str:
        """Reason why a model cannot be loaded; empty if it can."""
        return self._unreadable.get(host.entry.name) or self.view(host).reason

    def state_of(self, host: Host) -> str:
        """``unloaded``, ``loading``, ``loaded``, ``unloading`` or ``failed``."""
        return "failed" if host.entry.name in self._unreadable else self.view(host).state.value

    def loaded(self) -> list[Host]:
        """The models that are loaded now."""
        return [host for host in self.hosts.values() if self.view(host).state is ModelState.LOADED]

    # -- requests --------------------------------------------------------------------------------------------------

    def begin(self, host: Host) -> Ticket:
        """A request for a model arrives. The model is loaded if necessary. If the ticket is not admitted, call
        :meth:`wait`; call :meth:`leave` at the end. Raises ModelRefusedError."""
        if reason := self._unreadable.get(host.entry.name):
            raise ModelRefusedError(reason, 60.0, True)
        ticket = self.policy.enter(host.entry.name, self._clock())
        if isinstance(ticket, Refusal):
            raise ModelRefusedError(ticket.message, ticket.retry_after, ticket.failed)
        return ticket

    async def wait(self, ticket: Ticket) -> None:
        """Wait until the model of a request is loaded. Raises ModelRefusedError if it cannot be loaded."""
        opened = self._waiting[ticket.number] = asyncio.get_running_loop().create_future()
        try:
            self.turn()
            if not ticket.admitted and not ticket.failure:
                await opened
        finally:
            self._waiting.pop(ticket.number, None)
        if ticket.failure:
            raise ModelRefusedError(ticket.failure, self.policy.limits.cooldown, True)

    def leave(self, ticket: Ticket) -> None:
        """Note that a request has ended."""
        self.policy.leave(ticket, self._clock())
        self.turn()

    def keep(self, host: Host, seconds: float | None) -> None:
        """Unload a model after ``seconds`` without requests; see :meth:`ModelPolicy.keep`."""
        self.policy.keep(host.entry.name, seconds)
        self.turn()

    def _wake(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            opened = self._waiting.get(ticket.number)
            if opened is not None and not opened.done():
                opened.set_result(None)

    # -- engines ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Follow the policy. Called after every event, and by a timer."""
        if self._closed:
            return
        now = self._clock()
        actions, admitted = self.policy.next(now)
        self._wake(admitted)
        for action in actions:
            self._follow(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self.policy.wake_at(now)
        if wake < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wake - now) + 0.001, self.turn)

    def _follow(self, action: Action) -> None:
        host = self.hosts[action.model]
        if action.kind is ActionKind.CANCEL:
            if host.task is not None:
                host.task.cancel()
            return
        if host.task is not None:
            host.task.cancel()  # it watches the engine that is unloaded now
        work = self._load(host) if action.kind is ActionKind.LOAD else self._unload(host)
        host.task = asyncio.create_task(work, name=f"{action.kind.value} {action.model}")

    async def _load(self, host: Host) -> None:
        name = host.entry.name
        again = True
        _log.info("loading model %s", name)
        try:
            state = self._start(host.entry)
            try:
                await state.engine.wait_ready()
                await load_modules(state)
            except BaseException:
                await state.engine.shutdown()
                raise
        except asyncio.CancelledError:
            if self._closed:
                raise
            reason = f"the load took longer than {self.policy.limits.load_timeout:g} s"
        except _UNUSABLE as error:
            reason = str(error)
            again = False
        except (EngineDeadError, OSError) as error:
            reason = str(error) or type(error).__name__
        else:
            host.state = host.holder.state.server = state
            tickets = self.policy.loaded(name, self._clock())
            _log.info("loaded model %s in %.1f s", name, self.view(host).load_seconds)
            host.task = asyncio.create_task(self._watch(host, state), name=f"watch {name}")
            self._wake(tickets)
            self.turn()
            return
        _log.error("model %s was not loaded: %s", name, reason)
        self._wake(self.policy.failed(name, reason, self._clock(), again=again))
        self.turn()

    async def _watch(self, host: Host, state: ServerState) -> None:
        """Wait for the death of an engine. Its requests end with an error; the policy starts it again."""
        await state.engine.stopped.wait()
        name = host.entry.name
        _log.error("model %s: %s", name, state.engine.failure)
        host.state = None
        self._wake(self.policy.died(name, state.engine.failure, self._clock()))
        self.turn()
        await self._shut_down(state)

    async def _unload(self, host: Host) -> None:
        name = host.entry.name
        state = host.state
        host.state = None
        if state is not None:
            await self._shut_down(state)
        _log.info("unloaded model %s", name)
        self.policy.unloaded(name, self._clock())
        self.turn()

    async def _shut_down(self, state: ServerState) -> None:
        state.draining = True  # ends the streams of its viewers
        with contextlib.suppress(ChairliftError, OSError):
            await state.engine.shutdown()

    async def close(self) -> None:
        """End all engines. Waiting requests fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [host.task for host in self.hosts.values() if host.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        states = [host.state for host in self.hosts.values() if host.state is not None]
        await asyncio.gather(*(self._shut_down(state) for state in states))
        for opened in self._waiting.values():
            if not opened.done():
                opened.set_exception(EngineDeadError("the server is shutting down"))
