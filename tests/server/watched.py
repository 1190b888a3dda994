"""A real engine core in this process with live views over HTTP, and an independent record of what the core did."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import CacheConfig, CacheGroup, SchedulerConfig, ServerConfig
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.engine.clock import VirtualClock
from chairlift.engine.engine import Engine
from chairlift.engine.events import Events
from chairlift.engine.input_processor import ModelLimits
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import HashLM
from chairlift.server.http.app import make_app
from chairlift.server.http.http_protocol import HttpServer
from chairlift.server.http.lifecycle import bind
from chairlift.server.http.state import ServerState
from chairlift.server.pages.live_feed import LiveFeed
from tests.server.harness import PATIENCE, StateOnlyEngine, make_state

__all__ = ["Truth", "WatchedEngine", "make_truth", "serve_watched"]

_VOCAB, _LENGTH, _BLOCK = 20, 96, 4
Row = tuple[int, int, int, str]
Tables = dict[str, list[list[int]]]


class _NotingExecutor(LocalExecutor):
    """An executor that records the block tables of each step."""

    note: Callable[[SchedulerOutput], None]

    def execute(self, out: SchedulerOutput) -> Any:
        self.note(out)
        return super().execute(out)


class Truth:
    """An engine under a load with bursts and aborts, and its true history: the rows of each request, and the block
    tables of all running requests in each step."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.core = engine.core
        self.rows: dict[str, list[Row]] = {}
        """Request id -> one (step, slot, number of tokens, reason) for each row that a step computed for the
        request."""
        self.tables: dict[int, Tables] = {}
        self.aborted: set[str] = set()
        self.answers: dict[str, int] = {}
        """Name of a sequence -> number of its generated tokens, for sequences whose request ended normally."""
        self._random = random.Random(seed)
        self._count = 0
        self.core.events.subscribe("the truth", self)
        executor = self.core.executor
        assert isinstance(executor, _NotingExecutor)
        executor.note = self._scheduled

    def _scheduled(self, out: SchedulerOutput) -> None:
        self._clock().advance(0.004 + 0.0003 * out.num_tokens)
        running = self.core.scheduler.running
        self.tables[out.step] = {name: [list(t) for t in request.block_ids] for name, request in running.items()}

    def landed(self, record: Any) -> None:
        for row in record.rows:
            self.rows.setdefault(row.request_id, []).append((record.step, row.slot, row.num_tokens, row.why))

    def _clock(self) -> VirtualClock:
        clock = self.core.clock
        assert isinstance(clock, VirtualClock)
        return clock

    def burst(self, count: int) -> None:
        """Add ``count`` requests at once. Some prompts have equal beginnings."""
        for _ in range(count):
            draw = self._random
            prompt = [3] * draw.choice([0, 8, 16]) + [draw.randrange(18) for _ in range(draw.randrange(2, 24))]
            params = SamplingParams(
                temperature=0.0, seed=1, max_tokens=draw.randrange(2, 30), ignore_eos=True, n=draw.choice([1, 1, 1, 2])
            )
            self.engine.add_request(prompt, params, request_id=f"request-{self._count}")
            self._count += 1

    def step(self) -> None:
        """Run one step, advance the clock, and abort a request at random times."""
        self._clock().advance(0.0001 * self._random.randrange(2, 20))
        for output in self.engine.step():
            if output.finished:
                several = len(output.outputs) > 1
                for answer in output.outputs:
                    name = f"{output.request_id}#{answer.index}" if several else output.request_id
                    self.answers[name] = len(answer.token_ids)
        if self._random.random() < 0.04 and (live := list(self.core.scheduler.requests)):
            name = self._random.choice(live).split("#")[0]
            if self.engine.abort(name):
                self.aborted.add(name)

    def churn(self, count: int) -> None:
        """Run requests that are aborted during their prefill. Each request uses the row of the request before it."""
        for number in range(count):
            name = f"churned-{number}"
            params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
            self.engine.add_request([number % 18] * 60, params, request_id=name)
            self.step()
            self.aborted.add(name)
            self.engine.abort(name)

    def run(self, bursts: int, most: int = 12) -> None:
        """Run bursts, each larger than the batch, until all requests have ended."""
        for _ in range(bursts):
            self.burst(self._random.randrange(3, most))
            for _ in range(self._random.randrange(10, 40)):
                self.step()
        while self.engine.has_unfinished:
            self.step()


def make_truth(
    seed: int = 0,
    *,
    num_blocks: int = 40,
    windows: tuple[int | None, ...] = (None,),
    host: int = 0,
    cache_eviction: str = "auto",
    **config: Any,
) -> Truth:
    scheduler = SchedulerConfig(**{"max_num_seqs": 5, "max_num_batched_tokens": 24, **config})
    groups = [CacheGroup(num_blocks, window, host) for window in windows]
    executor = _NotingExecutor(
        HashLM(groups, _BLOCK, _VOCAB, _LENGTH),
        num_slots=scheduler.max_num_seqs,
        max_model_len=_LENGTH,
        block_size=_BLOCK,
    )
    limits = ModelLimits(_VOCAB, _LENGTH, ())
    cache = CacheConfig(cache_eviction=cache_eviction)
    return Truth(Engine(executor, limits, scheduler, tokenizer=None, clock=VirtualClock(), cache=cache), seed)


class WatchedEngine(StateOnlyEngine):
    """A fake engine with only the parts that the live view page uses."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Any] = []
        self.events = Events("began", "ended", "steps")

    def requests(self) -> list[Any]:
        return self.streams


class ServedView:
    """A server with a live view page, running in its own thread."""

    def __init__(self, state: ServerState, engine: WatchedEngine, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.state, self.engine, self._loop = state, engine, loop
        self.url = f"http://127.0.0.1:{port}"

    def tell(self, lines: bytes) -> None:
        """Publish lines of the step log, as the engine's recorder would."""
        if lines:
            self._loop.call_soon_threadsafe(self.engine.events.tell, "steps", lines)


@contextmanager
def serve_watched(feed: Callable[[WatchedEngine], LiveFeed] | None = None, **settings: Any) -> Iterator[ServedView]:
    """Serve the whole application with a fake engine that has only the parts that the live view page uses."""
    ready, over, found = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        engine = WatchedEngine()
        state = make_state(engine, **settings)
        state.live = None if feed is None else feed(engine)
        server = HttpServer(make_app(state))
        sock = bind(ServerConfig(port=0), ())
        await server.start(sock)
        found.append(ServedView(state, engine, asyncio.get_running_loop(), sock.getsockname()[1]))
        ready.set()
        await over.wait()
        state.draining = True
        await server.close(5.0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE), "the server does not start"
    try:
        yield found[0]
    finally:
        found[0]._loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE)
