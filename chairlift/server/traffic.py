"""Traffic of the server in numbers: GET /v1/requests lists waiting and running requests, GET /v1/traffic records.

Neither contains any text. A recording shows which prompts have equal beginnings, by hashes with a secret that the
server draws for each recording and never reveals. So a reader of the file cannot test guesses of a prompt. Hash ids per
block are the idea of Mooncake's traces (Qin et al., 2024).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.intake import Place
from chairlift.engine.output_processor import RequestState
from chairlift.engine.output_stream import OutputStream
from chairlift.metrics.stats import FinishedRequest
from chairlift.outputs import FinishReason
from chairlift.server.auth import Caller
from chairlift.server.errors import ApiError
from chairlift.server.state import ServerState
from chairlift.server.streaming import EventStream, json_response

__all__ = ["Recording", "RequestsReply", "TrafficRecord", "prefix_hashes", "routes"]

_MOST_LISTED: Final = 1000
_MOST_RECORDINGS: Final = 8
_MOST_RECORDINGS_OF_ONE: Final = 3
"""Maximum number of recordings of one tenant, if keys distinguish tenants, so that no tenant takes all of them."""
_MOST_WAITING: Final = 4096
_MOST_WAITING_TOKENS: Final = 1 << 22
"""Most records that a slow listener may leave unread, and most prompt tokens kept with them."""
_MOST_TENANTS: Final = 10_000
_LONG_PROMPT: Final = 16_384
"""Tokens. Longer prompts are hashed on a thread."""
_HASH_BYTES: Final = 16
_LOOK_SECONDS: Final = 0.25
_HEARTBEAT_SECONDS: Final = 15.0
_KEPT_SECONDS: Final = 60.0
"""Seconds for which a recording waits for its listener to reconnect."""
_encode: Final = msgspec.json.encode


class LiveRequest(msgspec.Struct, kw_only=True):
    """One waiting or running request. A completion with several prompts is several requests."""

    id: str
    """Its X-Request-Id."""
    status: str
    """waiting, prefill, decode, or preempted (it lost its memory and has not recomputed it)."""
    service_tier: str
    priority: int
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    computed_tokens: int
    """Leading tokens of prompt and answer whose KV is in the cache. With several answers, those of the first unfinished
    one."""
    output_tokens: int
    """Generated so far, over all answers."""
    n: int
    max_tokens: int
    """Most tokens of each answer."""
    age_seconds: float
    queue_seconds: float
    """Wait before its first step, so far if it has not started."""
    first_token_seconds: float | None
    """From its arrival to its first token; null before that."""
    expected_start_seconds: float | None
    """For a waiting request: from now to its first step, by the forecast; null without a forecast."""
    expected_token_seconds: float | None
    """During a prefill of several steps: from now to its next token, by the cost model."""


class RequestsReply(msgspec.Struct, kw_only=True):
    """Waiting and running requests."""

    object: Literal["requests"] = "requests"
    running: int
    """Sequences in the batch, of all callers."""
    waiting: int
    """Requests that have not been in a step, of all callers."""
    requests: list[LiveRequest]
    """The caller's own requests (all, if keys do not distinguish callers): started ones, oldest first, then the
    queue."""


class TrafficRecord(msgspec.Struct, kw_only=True):
    """One ended request in numbers."""

    arrival_seconds: float
    """Seconds from the begin of the recording."""
    arrival_unix: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Delivered tokens, over all answers."""
    answer_tokens: list[int]
    """Tokens of each answer."""
    max_tokens: int | None
    """The request's own value."""
    finish_reason: str
    """stop, length, deadline, abort (its client left), or error (the server could not answer it)."""
    cancel_ms: float | None
    """Milliseconds after which its client left."""
    tenant: str
    """A pseudonym; empty without a tenant."""
    service_tier: str
    priority: int
    """The request's own value; 0 without one."""
    ttft_ms: float | None
    """Promises: time to the first token, per token after it, to the end."""
    tpot_ms: float | None
    deadline_ms: float | None
    ttft_seconds: float | None
    """Actual times: to the first token, per token after it, to the end, to the first step."""
    tpot_seconds: float | None
    e2e_seconds: float
    queue_seconds: float | None
    preemptions: int
    hash_ids: list[int]
    """One per block of the prompt; the last block may be partial. Equal hashes mean prompts that are equal up to the
    end of the block."""


# --- what there is now ------------------------------------------------------------------------------------------------


async def list_requests(request: Request) -> Response:
    """List at most ``limit`` requests of the caller. Raises ApiError 400 for a limit outside 1 to 1,000."""
    state: ServerState = request.app.state.server
    caller: Caller = getattr(request.state, "caller", Caller())
    limit = _number(request, "limit", 100, 1, _MOST_LISTED)
    now, engine = time.monotonic(), state.engine
    places = {stream.request_id: place for stream, place in engine.line()}
    own = [stream for stream in engine.requests() if caller.sees(stream.tenant)]
    started = [stream for stream in own if stream.request_id not in places]
    line = [stream for stream in own if stream.request_id in places]
    line.sort(key=lambda stream: places[stream.request_id].position)
    listed = [_live(stream, places.get(stream.request_id), now) for stream in [*started, *line][: int(limit or 0)]]
    running = engine.stats.engine.num_running
    return json_response(RequestsReply(running=running, waiting=engine.num_queued, requests=listed))


def _live(stream: OutputStream, place: Place | None, now: float) -> LiveRequest:
    state, prepared = stream.state, stream.state.prepared
    progress, metrics = state.progress(), state.metrics
    arrival, first_token, started = metrics.arrival_time, metrics.first_token_time, metrics.first_scheduled_time
    until = progress.next_token_at
    return LiveRequest(
        id=stream.name,
        status=progress.phase,
        service_tier=stream.service_class,
        priority=prepared.priority,
        tenant=stream.tenant,
        prompt_tokens=len(prepared.prompt_token_ids),
        cached_tokens=state.num_cached_tokens,
        computed_tokens=progress.num_computed,
        output_tokens=state.num_tokens,
        n=len(state.answers),
        max_tokens=prepared.max_tokens,
        age_seconds=_rounded(now - arrival),
        queue_seconds=_rounded((now if started is None else started) - arrival),
        first_token_seconds=None if first_token is None else _rounded(first_token - arrival),
        expected_start_seconds=_rounded(place.expected_start) if place and place.expected_start is not None else None,
        expected_token_seconds=None if until is None else _rounded(max(0.0, until - now)),
    )


# --- recordings -------------------------------------------------------------------------------------------------------


def prefix_hashes(token_ids: Sequence[int], block_size: int, secret: bytes, salt: str = "") -> list[int]:
    """A number below 2**62 per block of ``block_size`` token ids (of 32 bits); the last block may be shorter.

    The numbers of two prompts are equal up to the first block in which they differ, and different afterwards.
    ``secret`` is 1 to 64 bytes; ``salt`` separates prompts that must not count as equal.
    """
    chain = hashlib.blake2b(salt.encode(), key=secret, digest_size=_HASH_BYTES).digest()
    numbers = []
    for start in range(0, len(token_ids), block_size):
        block = array("I", token_ids[start : start + block_size]).tobytes()
        chain = hashlib.blake2b(chain + block, key=secret, digest_size=_HASH_BYTES).digest()
        numbers.append(int.from_bytes(chain[:8], "big") >> 2)
    return numbers


class Recording:
    """Stores ended requests until the listener takes them. It subscribes to the engine's events.

    Only requests that arrive during the recording count. It ends its intake after ``most`` requests or ``seconds``;
    requests that arrived before are recorded until they end, so that long ones are not missing. ``now`` is on the clock
    of the requests, ``unix`` the same moment in Unix time.
    """

    def __init__(
        self,
        caller: Caller,
        block_size: int,
        *,
        now: float,
        unix: float,
        most: float = math.inf,
        seconds: float = math.inf,
    ) -> None:
        self.id = secrets.token_hex(16)
        self.caller = caller
        self.block_size = block_size
        self.began_unix = unix
        self.num_lost = 0
        """Number of dropped records since the last report to the listener."""
        self.listener = 0
        """Number of the newest listener, which has replaced earlier ones."""
        self.news = asyncio.Event()
        self._secret = secrets.token_bytes(32)
        self._began = now
        self._ends = now + seconds
        self._left = most
        self._under_way: set[str] = set()
        self._ended: deque[tuple[int, TrafficRecord, list[int], str]] = deque()
        """(number, record, prompt token ids, salt). Answers may be large and are not kept."""
        self._num_tokens = self._number = 0
        self._tenants = {"": ""}

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def is_complete(self, now: float) -> bool:
        """Whether there will be no further records."""
        return not self._under_way and not self._ended and (self._left <= 0 or now >= self._ends)

    def close(self) -> None:
        """Accept no new requests."""
        self._left = 0

    def began(self, stream: OutputStream) -> None:
        arrival = stream.state.metrics.arrival_time
        if self._left <= 0 or not self._began <= arrival < self._ends or not self.caller.sees(stream.tenant):
            return
        self._left -= 1
        self._under_way.add(stream.request_id)
        if len(self._tenants) <= _MOST_TENANTS:
            self._tenants.setdefault(stream.tenant, f"tenant-{len(self._tenants)}")

    def ended(self, stream: OutputStream, cut_off: FinishReason | None, now: float) -> None:
        if stream.request_id not in self._under_way:
            return
        self._under_way.remove(stream.request_id)
        facts = stream.state.record(now, aborted=cut_off is not None)
        self._number += 1
        record, prepared = self._record(stream.state, facts, cut_off or facts.reason), stream.state.prepared
        self._ended.append((self._number, record, prepared.prompt_token_ids, prepared.cache_salt))
        self._num_tokens += facts.prompt_tokens
        while len(self._ended) > 1 and (len(self._ended) > _MOST_WAITING or self._num_tokens > _MOST_WAITING_TOKENS):
            self._num_tokens -= self._ended.popleft()[1].prompt_tokens
            self.num_lost += 1
        self.news.set()

    async def take(self) -> tuple[int, TrafficRecord] | None:
        """The oldest record and its number, counted from 1 including lost ones; None when there is none."""
        self.news.clear()
        if not self._ended:
            return None
        number, record, token_ids, salt = self._ended.popleft()
        self._num_tokens -= record.prompt_tokens
        arguments = (token_ids, self.block_size, self._secret, salt)
        if len(token_ids) > _LONG_PROMPT:
            record.hash_ids = await asyncio.to_thread(prefix_hashes, *arguments)
        else:
            record.hash_ids = prefix_hashes(*arguments)
        return number, record

    def _record(self, state: RequestState, facts: FinishedRequest, reason: str) -> TrafficRecord:
        service, arrival, params = state.prepared.service, state.metrics.arrival_time, state.prepared.params
        first_token = state.metrics.first_token_time
        return TrafficRecord(
            arrival_seconds=round(arrival - self._began, 6),
            arrival_unix=round(self.began_unix + arrival - self._began, 6),
            prompt_tokens=facts.prompt_tokens,
            cached_tokens=facts.cached_tokens,
            output_tokens=facts.generation_tokens,
            answer_tokens=[len(answer.token_ids[: answer.num_tokens]) for answer in state.answers],
            max_tokens=params.max_tokens,
            finish_reason=reason,
            cancel_ms=round(facts.e2e_seconds * 1000, 3) if reason == FinishReason.ABORT else None,
            tenant=self._tenants.get(service.tenant, "others"),
            service_tier=service.service_class,
            priority=params.priority or 0,
            ttft_ms=_milliseconds(service.first_token_by - arrival),
            tpot_ms=_milliseconds(service.seconds_per_token),
            deadline_ms=_milliseconds(service.finish_by - arrival),
            ttft_seconds=None if first_token is None else _rounded(first_token - arrival),
            tpot_seconds=None if facts.seconds_per_token is None else _rounded(facts.seconds_per_token),
            e2e_seconds=_rounded(facts.e2e_seconds),
            queue_seconds=None if facts.queue_seconds is None else _rounded(facts.queue_seconds),
            preemptions=facts.num_preemptions,
            hash_ids=[],
        )


async def stream_traffic(request: Request) -> Response:
    """Begin a recording, or continue the one that ``recording`` names.

    Raises ApiError 400 for a bad parameter, 404 for an unknown recording, 429 when there are too many.
    """
    state: ServerState = request.app.state.server
    caller: Caller = getattr(request.state, "caller", Caller())
    events = state.engine.events
    block_size = _number(request, "block_size", 64, 16, 512)
    most = _number(request, "requests", None, 1, 10**9)
    seconds = _number(request, "duration", None, 0.001, 1e9, whole=False)
    wanted = request.query_params.get("recording")
    if request.method == "HEAD":
        return Response(media_type=EventStream.media_type)
    if wanted is not None:
        recording = events.subscribers.get(wanted)
        if not isinstance(recording, Recording) or recording.caller.tenant != caller.tenant:
            message = f"there is no recording {wanted!r:.80}; it has ended, or the server was started again"
            raise ApiError(404, message, code="recording_not_found", param="recording")
        return _listen(state, recording)
    recordings = [each for each in events.subscribers.values() if isinstance(each, Recording)]
    own = sum(each.caller.tenant == caller.tenant for each in recordings)
    full = ""
    if caller.holder and own >= _MOST_RECORDINGS_OF_ONE:
        full = f"{own} recordings of this key's tenant run already, and {_MOST_RECORDINGS_OF_ONE} may; end one of them"
        full += f" and wait {_KEPT_SECONDS:.0f} s, or go on with it (recording=ID)"
    elif len(recordings) >= _MOST_RECORDINGS:
        full = f"{_MOST_RECORDINGS} recordings run already; end one of them, and wait {_KEPT_SECONDS:.0f} s"
    if full:
        raise ApiError(429, full, code="too_many_recordings", headers={"retry-after": f"{_KEPT_SECONDS:.0f}"})
    recording = Recording(
        caller,
        int(block_size or 0),
        now=time.monotonic(),
        unix=time.time(),
        most=math.inf if most is None else most,
        seconds=math.inf if seconds is None else seconds,
    )
    events.subscribe(recording.id, recording)
    return _listen(state, recording)


def _listen(state: ServerState, recording: Recording) -> EventStream:
    """Send the recording to a new listener, which replaces the one before."""
    recording.listener += 1
    recording.news.set()
    number = recording.listener

    def forget() -> None:
        if recording.listener == number:
            state.engine.events.unsubscribe(recording.id)

    def over() -> None:
        """The listener has left, unless another one replaced it. The recording is kept for a while."""
        if recording.is_complete(time.monotonic()):
            forget()
        else:
            asyncio.get_running_loop().call_later(_KEPT_SECONDS, forget)

    return EventStream(_told(state, recording, number), over=over)


async def _told(state: ServerState, recording: Recording, number: int) -> AsyncGenerator[bytes, None]:
    """Events: ``start``, an unnamed event per request, ``lost`` where some are missing, and ``end``."""
    began = {"recording": recording.id, "block_size": recording.block_size, "began_unix": recording.began_unix}
    yield _event("start", {**began, "model": state.model_names[0]})
    spoken = time.monotonic()
    while recording.listener == number:
        if state.draining:
            recording.close()
        if recording.num_lost:
            lost, recording.num_lost = recording.num_lost, 0
            yield _event("lost", {"lost": lost})
        taken = await recording.take()
        now = time.monotonic()
        if taken is not None:
            spoken = now
            yield b"id: %d\ndata: %b\n\n" % (taken[0], _encode(taken[1]))
        elif recording.is_complete(now):
            yield _event("end", {"reason": "draining" if state.draining else "complete"})
            return
        elif now - spoken >= _HEARTBEAT_SECONDS:
            spoken = now
            yield b": %d requests are under way\n\n" % recording.num_under_way
        else:  # a short wait, because the drain has no event
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await recording.news.wait()


def _event(name: str, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(content))


def _number(
    request: Request, name: str, default: int | None, low: float, high: float, *, whole: bool = True
) -> float | None:
    """A number in the query. Raises ApiError 400 for any other text."""
    given = request.query_params.getlist(name)
    if not given:
        return default
    try:
        value: float = int(given[0]) if whole else float(given[0])
    except ValueError:
        value = math.nan
    if len(given) > 1 or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        message = f"{name} must be {kind} from {low:,.10g} to {high:,.10g}, got {', '.join(given)!r:.80}"
        raise ApiError(400, message, code="invalid_value", param=name)
    return value


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 6)


def _milliseconds(seconds: float) -> float | None:
    return None if seconds == math.inf else round(seconds * 1000, 3)


routes: Final = [
    Route("/v1/requests", list_requests, methods=["GET"]),
    Route("/v1/traffic", stream_traffic, methods=["GET"]),
]
