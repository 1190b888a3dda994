"""``bench serve``: sends requests to a server at planned times, and measures the answers.

By default this is an open loop, like real traffic: a slow server does not delay the next requests. With a limit of
concurrency, or a fixed number of users, it is a closed loop: a slow server gets fewer requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from chairlift.errors import ConfigError
from chairlift_lab.bench.other_load import OtherLoad
from chairlift_lab.bench.serve_client import NotReadyError, Server, clock, connect
from chairlift_lab.bench.serve_run import (
    Load,
    LoadOutcome,
    Progress,
    PromptDialect,
    ServeRun,
    Watch,
    fit,
    quiet_collector,
)
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["Plan", "measure", "raise_file_limit", "run_load"]

_MAX_ID: Final = 1 << 62
_WARM_UP_TOKENS: Final = 16
_POLL: Final = 0.5
"""Time in seconds between two checks whether a server is ready."""
_FILES_BESIDES: Final = 64
_MOMENT: Final = 0.2
"""Time in seconds over which the load of other programs is measured before each run of a comparison."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Loads to send one after another, to one server or to each of two servers that are compared."""

    urls: Sequence[str]
    loads: Sequence[Load]
    api_key: str | None = None
    model: str | None = None
    """Name of the model. None: the first model that each server lists."""
    chat: bool = False
    ignore_eos: bool = False
    num_warmups: int = 0
    timeout: float = 600.0
    """Maximum time of a request in seconds."""
    ready_timeout: float = 0.0
    """Maximum time in seconds to wait for a server that does not answer yet, or is still loading its model."""
    say: Callable[[str], None] | None = None
    """Function that is called with a message for the user when the client has to wait for a server."""


async def measure(plan: Plan, watch: Watch) -> AsyncIterator[tuple[int, int, ServeRun]]:
    """Run a plan. Yields (index of the load, index of the server, result).

    Two servers are measured in turn (A B, B A, A B, ...), so that other programs affect both alike. The prompts for the
    two servers have the same lengths and shared prefixes, but different tokens. An interrupted run is the last run.
    Raises ConfigError when a server cannot be measured.
    """
    async with connect(plan.urls, plan.api_key, plan.timeout) as servers:
        for server in servers:
            await _learn(server, plan)
        common = functools.reduce(PromptDialect.common, [server.dialect for server in servers])
        room = min([server.max_model_len for server in servers if server.max_model_len is not None], default=None)
        loads = []
        for load in plan.loads:
            requests, shortened = (load.requests, 0) if load.said is not None else fit(load.requests, room)
            loads.append(dataclasses.replace(load, requests=requests, shortened=shortened))
        for server in servers:
            server.dialect = common
            await _warm_up(server, loads[0], plan.num_warmups)
        for index, load in enumerate(loads):
            turn = list(enumerate(servers))
            for number, server in reversed(turn) if index % 2 else turn:
                # The two URLs may belong to the same server. The prompts for each URL differ, so that this server does
                # not find them in its cache.
                fresh = dataclasses.replace(load, salt=load.salt ^ number << 59)
                other_load = OtherLoad()
                if len(servers) > 1:  # the servers are idle now, so what runs is other programs
                    await asyncio.sleep(_MOMENT)
                busy = other_load.share()
                with watch(server.url, len(load.requests)) as progress:
                    run = dataclasses.replace(await run_load(server, fresh, progress), busy=busy)
                if not run.interrupted:
                    run = dataclasses.replace(run, collective_share=await server.collective_share())
                yield index, number, run
                if run.interrupted:
                    return


async def _learn(server: Server, plan: Plan) -> None:
    """Wait until a server is ready, and determine its model and the request fields that it supports.

    Raises ConfigError when the server cannot be measured, or is not ready in time.
    """
    end = clock() + plan.ready_timeout
    said = False
    while True:
        try:
            await server.learn(plan.model, chat=plan.chat, ignore_eos=plan.ignore_eos)
        except NotReadyError as error:
            if clock() >= end:
                raise
            if plan.say is not None and not said:
                plan.say(f"waiting up to {plan.ready_timeout:g} s: {error}")
            said = True
            await asyncio.sleep(min(_POLL, max(0.0, end - clock())))
        else:
            return


async def _warm_up(server: Server, load: Load, count: int) -> None:
    """Send the first ``count`` requests at once, with short answers. Raises ConfigError when all of them fail."""
    chosen = [
        dataclasses.replace(
            each, arrival=0.0, output_tokens=min(each.output_tokens, _WARM_UP_TOKENS), session="", turn=0
        )
        for each in load.requests[:count]
    ]
    run = await run_load(server, dataclasses.replace(load, requests=chosen, salt=load.salt ^ 1 << 60))
    if run.interrupted:
        raise asyncio.CancelledError
    failed = [each for each in run.outcomes if each.status == "failed"]
    if failed and len(failed) == len(run.outcomes):
        raise ConfigError(f"{server.url} answers none of the warm-up requests: {failed[0].kind}: {failed[0].message}")


async def run_load(server: Server, load: Load, progress: Progress | None = None) -> ServeRun:
    """Send each request of the load at its planned time, and wait for all answers.

    When the task is cancelled (Ctrl-C), the run stops and the outcomes so far are returned.
    """
    with quiet_collector():
        return await _Sender(server, load, progress).run()


class _Sender:
    """Sends the requests of one load."""

    def __init__(self, server: Server, load: Load, progress: Progress | None) -> None:
        self._server = server
        self._load = load
        self._progress = progress
        self._outcomes: list[LoadOutcome] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = None if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
        self._turns: dict[str, asyncio.Event] = {}
        """Session -> event that is set when the session's latest turn has ended."""
        self._num_running = 0
        self._begin = 0.0

    async def run(self) -> ServeRun:
        date = datetime.datetime.now()
        cpu = time.process_time()
        interrupted = False
        self._begin = clock()
        try:
            await self._dispatch()
            while self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            interrupted = True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            for each in self._tasks:
                each.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        seconds = max(clock() - self._begin, 1e-9)
        return ServeRun(
            server=self._server,
            load=self._load,
            outcomes=self._outcomes,
            date=date,
            begin=self._begin,
            seconds=seconds,
            cpu_share=(time.process_time() - cpu) / seconds,
            interrupted=interrupted,
        )

    async def _dispatch(self) -> None:
        """Start a task for each request at its time. The request body is made before that time."""
        load = self._load
        for due, index, request in _planned(load.requests):
            if request.prefix_ids:
                fresh = tuple((each + load.salt) % _MAX_ID for each in request.prefix_ids)
                request = dataclasses.replace(request, prefix_ids=fresh)
            said = None if load.said is None else load.said[index]
            body = self._server.body(request, load.salt + index, load.temperature, load.promises, said)
            due += self._begin
            await asyncio.sleep(max(0.0, due - clock()))
            while (early := due - clock()) > 0:  # timers of event loops may be a millisecond early
                await asyncio.sleep(early)
            outcome = LoadOutcome(
                index=index, scheduled=due, wanted_tokens=request.output_tokens, prompt_tokens=request.prompt_tokens
            )
            self._outcomes.append(outcome)
            before = self._turns.get(request.session)
            ended = asyncio.Event()
            if request.session:
                self._turns[request.session] = ended
            gap = 0.0 if request.gap_ms is None else request.gap_ms / 1000
            task = asyncio.create_task(self._one(outcome, body, request.cancel_ms, before, gap, ended))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(
        self,
        outcome: LoadOutcome,
        body: bytes,
        cancel_ms: float | None,
        before: asyncio.Event | None,
        gap: float,
        ended: asyncio.Event,
    ) -> None:
        try:
            if before is not None and (gap or not before.is_set()):
                outcome.held = True
                await before.wait()
                await asyncio.sleep(gap)
                outcome.scheduled = clock()
            if self._slots is not None and self._slots.locked():
                outcome.held = True
            async with self._slots or contextlib.nullcontext():
                if outcome.held:
                    outcome.scheduled = clock()
                self._num_running += 1
                try:
                    await self._server.send(body, outcome, cancel_ms)
                finally:
                    self._num_running -= 1
        finally:
            ended.set()
        if self._progress is not None:
            self._progress(self._num_running, outcome)


def _planned(requests: Sequence[TracedRequest]) -> list[tuple[float, int, TracedRequest]]:
    """(seconds from the start, index, request) in the order in which tasks for the requests begin. A turn with a gap
    begins with the turn before it, for whose end it then waits."""
    begins: dict[str, float] = {}
    planned: list[tuple[float, int, TracedRequest]] = []
    for index, request in enumerate(requests):
        due = request.arrival if request.gap_ms is None else begins.get(request.session, request.arrival)
        if request.session:
            begins[request.session] = due
        planned.append((due, index, request))
    return sorted(planned, key=lambda each: each[:2])


def raise_file_limit(connections: int) -> None:
    """Raise the limit of open files of this process to ``connections`` and a few more, as far as the system permits."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = connections + _FILES_BESIDES
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
