"""The live view page ``/live`` shows which request is in each row at each step, and the KV blocks that it owns.

The page itself needs no key and has no data, like ``/``. The data comes from ``/live/events``. If the server has API
keys, this path needs a key. If keys distinguish tenants it needs the key named ``admin``, because the data covers all
tenants. The data has lengths, times and ids, but no text of prompts or outputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from chairlift.base.presets import BASELINE, PRESETS, RECORDED
from chairlift.base.workers.pool import WorkerPool
from chairlift.engine.step_export import to_perfetto
from chairlift.server.http.auth import Caller, check_sees_all
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import EventStream
from chairlift.server.pages.live_feed import LiveFeed, StepRing
from chairlift.server.pages.pages import assemble, page_response

__all__ = ["live_page", "routes"]

_MAX_VIEWERS: Final = 64
_MAX_CALLERS: Final = 8
_MAX_VIEWERS_OF_ONE: Final = 32
_MAX_CALLERS_OF_ONE: Final = 3
"""Maximum number of simultaneous simulator calls per key, if keys distinguish callers. The limit prevents that one key
uses all slots."""
_LOOK_SECONDS: Final = 1.0
_BEAT_SECONDS: Final = 15.0
_WORK_SECONDS: Final = 60.0
_FIRST_SECONDS: Final = 3.0
_NDJSON: Final = "application/x-ndjson"
_WORK_BYTES: Final = 4 << 30
_MAX_RESULT: Final = 256 << 20


@functools.cache
def live_page() -> str:
    """The live view page as one HTML document, with the names of the presets in its lists."""
    page = assemble("live.html")
    for place, chosen in (("upper", RECORDED), ("lower", BASELINE)):
        names = [f'<option value="{RECORDED}">as recorded</option>'] if place == "upper" else []
        names += [f"<option{' selected' * (name == chosen)}>{name}</option>" for name in PRESETS]
        page = page.replace(f'<select id="{place}">', f'<select id="{place}">{"".join(names)}')
    return page


async def _show(request: Request) -> Response:
    return page_response(live_page())


async def _to_page(request: Request) -> Response:
    return RedirectResponse("../live")  # relative: a proxy may serve it below another path


def _feed(request: Request) -> LiveFeed:
    """The data source of the live view page. Raises ApiError 403 if the caller may not see the requests of all
    tenants."""
    state: ServerState = request.app.state.server
    check_sees_all(request, "the live view")
    if state.live is None:
        state.live = LiveFeed(state.engine)
    return state.live


def _ring(request: Request, feed: LiveFeed) -> StepRing:
    """Buffer of the steps of the replica that the request names by its parameter ``replica``; by default, of the first
    replica. Raises ApiError 400 for a replica that does not exist."""
    text = request.query_params.get("replica", "0")
    count = feed.num_rings
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < count):
        allowed = f"a number from 0 to {count - 1}" if count > 1 else "0, because this server has one engine"
        raise ApiError(400, f"replica must be {allowed}; got {text!r:.40}", param="replica", code="invalid_value")
    return feed.ring(int(text))


@contextlib.contextmanager
def _count_use(feed: LiveFeed, what: str, holder: str, limit: int) -> Iterator[None]:
    """Context manager: count one use of ``what`` (viewers or simulator calls) for the API key of ``holder``. Raises
    ApiError 429 if ``limit`` uses of this key are in progress."""
    if holder and feed.num_uses[what, holder] >= limit:
        message = f"{limit} {what} of this key are under way already, as many as one key may have; end one of them"
        raise ApiError(429, message, code="too_many_of_one_key", headers={"retry-after": "30"})
    feed.num_uses[what, holder] += 1
    try:
        yield
    finally:
        feed.num_uses[what, holder] -= 1


def _holder(request: Request) -> str:
    caller: Caller = getattr(request.state, "caller", Caller())
    return caller.holder


async def _events(request: Request) -> Response:
    """Stream the engine's steps as server-sent events, beginning with the oldest buffered entry."""
    state: ServerState = request.app.state.server
    feed = _feed(request)
    ring = _ring(request, feed)
    if request.method == "HEAD":
        return Response(media_type=EventStream.media_type)
    if feed.num_viewers >= _MAX_VIEWERS:
        raise ApiError(503, f"{_MAX_VIEWERS} viewers look already; close one of them", headers={"retry-after": "30"})
    with _count_use(feed, "viewers", _holder(request), _MAX_VIEWERS_OF_ONE):
        headers = {"x-recording": "1"} if feed.is_recording else {}
    return EventStream(_follow(feed, ring, state, _holder(request)), headers)


async def _follow(feed: LiveFeed, ring: StepRing, state: ServerState, holder: str = "") -> AsyncGenerator[bytes, None]:
    with feed.viewing(), _count_use(feed, "viewers", holder, _MAX_VIEWERS):
        at = ring.first
        last_sent = time.monotonic()
        yield b"retry: 2000\n\n"
        while not state.draining:
            # Some entries that this viewer had not read were dropped. Send a notice, and continue with the newest
            # snapshot.
            if at < ring.first:
                at = ring.newest_key
                yield b"event: skipped\ndata: {}\n\n"
            elif at < ring.end:
                at += 1
                yield ring[at - 1]
                last_sent = time.monotonic()
            elif feed.is_recording:
                break
            else:
                await ring.wait_for_entry(_LOOK_SECONDS)
                if time.monotonic() - last_sent > _BEAT_SECONDS:
                    last_sent = time.monotonic()
                    yield b": still here\n\n"
        yield b"event: end\ndata: {}\n\n"


async def _recording(request: Request) -> bytes:
    """Lines of the recording that a request asks for: the recording of this engine, or the simulated example."""
    feed = _feed(request)
    ring = _ring(request, feed)
    if request.query_params.get("source") == "demo":
        return await _demo(request)
    with feed.viewing():
        end = time.monotonic() + _FIRST_SECONDS
        while ring.first == ring.end and time.monotonic() < end:
            await ring.wait_for_entry(_LOOK_SECONDS)
        return ring.lines()


async def _export(request: Request) -> Response:
    """The recording as a file. ``format=jsonl`` gives its lines, ``format=perfetto`` Chrome's trace events."""
    kind = request.query_params.get("format", "jsonl")
    if kind not in ("jsonl", "perfetto"):
        raise ApiError(400, f"format must be jsonl or perfetto, got {kind!r:.40}", param="format")
    name = "trace" if kind == "perfetto" else "steps"
    if kind == "jsonl":
        content = await _recording(request) + b"\n"
        suffix = "jsonl"
    elif request.query_params.get("source") == "demo":
        content = await asyncio.to_thread(to_perfetto, await _demo(request))
        suffix = "json"
    else:
        content = await _in_turn(request, lambda: _converted(request))
        suffix = "json"
    headers = {"content-disposition": f'attachment; filename="chairlift-{name}-{int(time.time())}.{suffix}"'}
    return Response(content, media_type="application/json" if suffix == "json" else _NDJSON, headers=headers)


async def _compare(request: Request) -> Response:
    """Simulate the recorded requests under two sets of rules. Returns one line with the comparison, then the simulated
    recordings."""
    _feed(request)  # raises for callers who may not see the view
    sides = _sides(request)
    if request.query_params.get("source") == "demo":
        example = await _demo(request)  # before this request's turn, because the example needs a turn, too
        return Response(await _once(request, "compare", example, *sides), media_type=_NDJSON)

    async def compared() -> bytes:
        return await _simulate(request, "compare", await _recording(request), *sides)

    return Response(await _in_turn(request, compared), media_type=_NDJSON)


def _sides(request: Request) -> tuple[str, str]:
    """Names of the upper and the lower side. Raises ApiError 400 for a name that is unknown."""
    upper = request.query_params.get("upper", RECORDED)
    lower = request.query_params.get("lower", BASELINE)
    for name, value, allowed in (("upper", upper, (RECORDED, *PRESETS)), ("lower", lower, tuple(PRESETS))):
        if value not in allowed:
            message = f"{name} must be one of {', '.join(allowed)}; got {value!r:.60}"
            raise ApiError(400, message, param=name, code="invalid_value")
    if upper == lower:
        raise ApiError(400, f"upper and lower are both {upper!r}; choose two", param="lower", code="invalid_value")
    return upper, lower


async def _show_demo(request: Request) -> Response:
    """Send a simulated recording, for viewers of an idle server."""
    return Response(await _demo(request), media_type=_NDJSON)


_made: dict[tuple[str, ...], bytes] = {}
"""Example, or its comparison with the names of both sides -> the simulated recordings. They never change, so each is
simulated once, except when more were asked for than are kept."""
_MOST_MADE: Final = 12


async def _demo(request: Request) -> bytes:
    return await _once(request, "demo", b"")


async def _once(request: Request, what: str, lines: bytes, *sides: str) -> bytes:
    """Simulated recording of the example, or its comparison. It is made at the first request and then kept."""
    _feed(request)  # raises for callers who may not see the view
    key = (what, *sides)

    async def make() -> bytes:
        if key not in _made:  # another request may have made it meanwhile
            made = await _simulate(request, what, lines, *sides)
            for old in [each for each in _made if each != ("demo",)][: max(0, len(_made) + 1 - _MOST_MADE)]:
                del _made[old]
            _made[key] = made
        return _made[key]

    return _made.get(key) or await _in_turn(request, make)


async def _converted(request: Request) -> bytes:
    return await asyncio.to_thread(to_perfetto, await _recording(request))


async def _in_turn(request: Request, work: Callable[[], Awaitable[bytes]]) -> bytes:
    """Run ``work`` when no other simulation runs, and return its result. ``work`` copies the recording only when it
    starts.

    Raises the ApiErrors of ``work``, 503 when too many requests wait, and 429 when too many requests of one key wait.
    """
    feed = _feed(request)
    if feed.num_callers >= _MAX_CALLERS:
        message = f"{feed.num_callers} simulations are asked for already; try again later"
        raise ApiError(503, message, code="overloaded", headers={"retry-after": "30"})
    with _count_use(feed, "simulations", _holder(request), _MAX_CALLERS_OF_ONE):
        feed.num_callers += 1
        try:
            async with feed.working:
                return await work()
        finally:
            feed.num_callers -= 1


async def _simulate(request: Request, what: str, lines: bytes, upper: str = "", lower: str = "") -> bytes:
    """Simulate the example, or a recording under the rules of two sides, in a worker process. Raises ApiError with the
    reason if the simulation fails, and if the server was started without a program for simulations."""
    state: ServerState = request.app.state.server
    if state.comparison is None:
        raise ApiError(404, "this server has no simulator; start it with chairlift serve", code="cannot_simulate")
    setup = {"memory_bytes": _WORK_BYTES}
    pool = WorkerPool(
        state.comparison, setup, "simulations", _MAX_RESULT, num_workers=1, max_waiting=1, patience=1, spare=False
    )
    fields = {"what": what, "data": lines, "upper": upper, "lower": lower, "cpu_seconds": math.ceil(_WORK_SECONDS)}
    try:
        reply = await pool.ask(fields, _WORK_SECONDS)
    except TimeoutError:
        raise ApiError(503, "the simulation took too long; record a shorter time", code="too_long") from None
    except (EOFError, ValueError):
        message = "the simulation takes more time or memory than it may; record a shorter time"
        raise ApiError(422, message, code="cannot_simulate") from None
    finally:
        await pool.close()
    if "error" in reply:
        raise ApiError(422, str(reply["error"])[:1000], code="cannot_simulate")
    return bytes(reply["data"])


routes: Final = [
    Route("/live", _show, methods=["GET"]),
    Route("/live/", _to_page, methods=["GET"]),
    Route("/live/events", _events, methods=["GET"]),
    Route("/live/export", _export, methods=["GET"]),
    Route("/live/compare", _compare, methods=["GET"]),
    Route("/live/demo", _show_demo, methods=["GET"]),
]
