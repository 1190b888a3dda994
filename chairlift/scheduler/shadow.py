"""A second policy that is asked the same questions while the first decides: what would it have done otherwise?"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

from chairlift.request import Request
from chairlift.scheduler.admission import WaitingQueue
from chairlift.scheduler.policy import Policy

__all__ = ["ShadowPolicy"]

_log = logging.getLogger(__name__)


class _View:
    """A request as the shadow sees it: what either policy writes on it stays with that policy."""

    def __init__(self, request: Request) -> None:
        self.__dict__["_request"] = request
        self.service = request.service
        self.start_by = math.inf
        self.num_charged_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_request"], name)

    def __repr__(self) -> str:
        return repr(self.__dict__["_request"])


class ShadowPolicy:
    """Answers as ``primary`` does, which is also asked whatever is not defined here.

    ``shadow`` sees every request come and go. Once per step in which somebody is let in, both are asked who is first
    in line; whenever running work must give way, both are asked for the victim, among the candidates the primary
    allows. It costs a second line of waiting requests, and as much thought per question as the primary's. A shadow
    that raises is switched off, and nobody notices but the log.
    """

    def __init__(self, primary: Policy, shadow: Policy) -> None:
        self.primary = primary
        self.shadow: Policy | None = shadow
        """None after it has failed."""
        self.name = primary.name
        self.preemptive = primary.preemptive
        self.num_lines = self.num_lines_differing = 0
        """Steps in which both were asked who is first in line, and those in which they differed."""
        self.num_victims = self.num_victims_differing = 0
        """The same for victims."""
        self.num_failures = 0
        self._own_line = WaitingQueue(primary)
        self._line = WaitingQueue(shadow)
        self._views: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._now = 0.0
        self._asked = False

    def __getattr__(self, name: str) -> Any:
        if name == "primary":  # not there yet
            raise AttributeError(name)
        return getattr(self.primary, name)

    def fork(self) -> Policy:
        return self.primary.fork()

    def catch_up(self, original: Policy) -> None:
        """Never asked: a fork is one of the primary."""

    # -- compared ------------------------------------------------------------------------------------------------

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        able = list(candidates)
        chosen = self.primary.victim(able)
        if able:
            self._try(lambda shadow: self._compare_victims(shadow, able, chosen))
        return chosen

    def late(self, now: float) -> Iterable[Request]:
        """Called in every step, before anything else."""
        self._now, self._asked = now, False
        self._try(lambda shadow: self._file_anew(self._line, shadow.late(now)))
        return self._noted(self.primary.late(now))

    def moved(self) -> Iterable[Request]:
        self._try(lambda shadow: self._file_anew(self._line, shadow.moved()))
        return self._noted(self.primary.moved())

    def _noted(self, requests: Iterable[Request]) -> Iterable[Request]:
        for request in requests:
            if self.shadow is not None:
                self._file_anew(self._own_line, (request,))
            yield request

    def observe(self, running: Iterable[Request], now: float) -> None:
        self.primary.observe(running, now)
        self._try(lambda shadow: shadow.observe(self._running.values(), now))

    # -- hooks ---------------------------------------------------------------------------------------------------

    def queued(self, request: Request, now: float) -> None:
        self.primary.queued(request, now)
        self._try(lambda shadow: self._queue(shadow, request, now))

    def joined(self, request: Request) -> None:
        self._try(lambda shadow: self._compare_lines(request))
        self.primary.joined(request)
        self._try(lambda shadow: self._join(shadow, request))

    def left(self, request: Request) -> None:
        self.primary.left(request)
        self._try(lambda shadow: self._leave(shadow, request))

    def forgotten(self, request: Request) -> None:
        self.primary.forgotten(request)
        self._try(lambda shadow: self._forget(shadow, request))

    # -- inside --------------------------------------------------------------------------------------------------

    def _try(self, work: Callable[[Policy], None]) -> None:
        if self.shadow is None:
            return
        try:
            work(self.shadow)
        except Exception:
            self.num_failures += 1
            _log.exception(
                "shadow policy %r failed and is switched off; it had differed in %d of %d lines and %d of %d victims",
                self.shadow.name,
                self.num_lines_differing,
                self.num_lines,
                self.num_victims_differing,
                self.num_victims,
            )
            self.shadow = None
            self._own_line, self._line = WaitingQueue(self.primary), WaitingQueue(self.primary)
            self._views, self._running = {}, {}

    def _view(self, request: Request) -> Request:
        return self._views.setdefault(request.request_id, cast(Request, _View(request)))

    def _queue(self, shadow: Policy, request: Request, now: float) -> None:
        view = self._view(request)
        shadow.queued(view, now)
        self._own_line.add(request)
        self._line.add(view)

    def _join(self, shadow: Policy, request: Request) -> None:
        view = self._view(request)
        if view in self._line:
            self._own_line.remove(request, self._now)
            self._line.remove(view, self._now)
        self._running[request.request_id] = view
        shadow.joined(view)

    def _leave(self, shadow: Policy, request: Request) -> None:
        shadow.left(self._running.pop(request.request_id))

    def _forget(self, shadow: Policy, request: Request) -> None:
        view = self._view(request)
        if view in self._line:
            self._own_line.remove(request)
            self._line.remove(view)
        del self._views[request.request_id]
        shadow.forgotten(view)

    def _compare_lines(self, request: Request) -> None:
        """Before ``request`` joins, the first to do so in this step."""
        if not self._asked and request in self._own_line:
            self._asked = True
            mine, other = next(self._own_line.line(self._now)), next(self._line.line(self._now))
            self.num_lines += 1
            self.num_lines_differing += mine.request_id != other.request_id

    def _compare_victims(self, shadow: Policy, able: list[Request], chosen: Request | None) -> None:
        other = shadow.victim([self._view(request) for request in able])
        self.num_victims += 1
        self.num_victims_differing += (chosen and chosen.request_id) != (other and other.request_id)

    @staticmethod
    def _file_anew(line: WaitingQueue, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in line:  # its place in the line has changed
                line.remove(request)
                line.add(request)
