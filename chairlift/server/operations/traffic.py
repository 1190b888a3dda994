"""Traffic of the server in numbers: GET /v1/requests lists waiting and running requests, GET /v1/traffic records ended
requests.

Neither contains any text but the names of tools. A recording shows which prompts begin alike, by hashes per block of
tokens. The server draws a secret for each recording and never reveals it, so a reader of the file cannot test guesses
of a prompt. Hash ids per block are the idea of Mooncake's traces (Qin et al., 2024).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.base.outputs import FinishReason
from chairlift.engine.intake import Place
from chairlift.engine.output_processor import RequestState
from chairlift.engine.output_stream import OutputStream
from chairlift.metrics.stats import FinishedRequest
from chairlift.server.http.auth import Caller
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import EventStream, json_response

__all__ = ["RequestsReply", "TrafficRecord", "TrafficRecording", "prefix_hashes", "routes"]

_MAX_LISTED: Final = 1000
_MAX_RECORDINGS: Final = 8
_MAX_RECORDINGS_OF_ONE: Final = 3
"""Maximum number of recordings of one tenant, if keys distinguish tenants, so that no tenant takes all of them."""
_MAX_WAITING: Final = 4096
"""Maximum number of records that wait for a slow listener. Further records are dropped."""
_MAX_WAITING_TOKENS: Final = 1 << 22
"""Maximum number of prompt tokens in the records that wait for a slow listener, summed over the records."""
_MAX_TENANTS: Final = 10_000
_MAX_TURNS: Final = 10_000
"""Number of ended requests for which it is known which record they have."""
_LONG_PROMPT: Final = 16_384
"""Number of tokens above which a prompt is hashed on a thread."""
_HASH_BYTES: Final = 16
_CHECK_SECONDS: Final = 0.25
_HEARTBEAT_SECONDS: Final = 15.0
_RECONNECT_SECONDS: Final = 60.0
"""Seconds for which a recording waits for a disconnected listener."""
_encode: Final = msgspec.json.encode


class LiveRequest(msgspec.Struct, kw_only=True):
    """One waiting or running request. Each prompt of a completion is a separate request."""

    id: str
    """The X-Request-Id of the HTTP request."""
    status: str
    """``waiting``, ``loading`` (it waits until its KV is read from ``--kv-store``), ``prefill``, ``decode``, or
    ``preempted`` (the request lost its KV cache and has not recomputed it)."""
    service_tier: str
    priority: int
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    host_tokens: int
    """Number of cached tokens whose KV came back from host memory. The next field counts those from disk."""
    disk_tokens: int
    computed_tokens: int
    """Number of leading tokens, of prompt and output, whose KV is in the cache. With several outputs, the first
    unfinished one is reported."""
    output_tokens: int
    """Number of tokens generated so far, over all outputs."""
    n: int
    max_tokens: int
    """Maximum number of tokens of each output."""
    age_seconds: float
    queue_seconds: float
    """Seconds from arrival to the first step; to now if the request has not started."""
    first_token_seconds: float | None
    """Seconds from arrival to the first token; null before the first token."""
    expected_start_seconds: float | None
    """Expected seconds from now to the first step, for a waiting request; null if there is no forecast."""
    expected_load_seconds: float | None
    """Expected seconds from now until the request's KV is read from files; null unless it is loading."""
    expected_token_seconds: float | None
    """Expected seconds from now to the next token, during a prefill of several steps. The cost model computes it."""


class RequestsReply(msgspec.Struct, kw_only=True):
    """Waiting and running requests."""

    object: Literal["requests"] = "requests"
    running: int
    """Number of sequences in the batch, over all callers."""
    waiting: int
    """Number of requests that have not been in a step, over all callers."""
    requests: list[LiveRequest]
    """The caller's own requests: started requests, oldest first, then waiting requests. If keys do not distinguish
    callers: the requests of all callers."""


class TrafficRecord(msgspec.Struct, kw_only=True):
    """One ended request, in numbers."""

    arrival_seconds: float
    """Seconds from the start of the recording to the request's arrival."""
    arrival_unix: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Number of delivered tokens, over all outputs."""
    answer_tokens: list[int]
    """Number of generated tokens of each output."""
    max_tokens: int | None
    """The ``max_tokens`` of the request; null if it had none."""
    finish_reason: str
    """``stop``, ``length``, ``deadline``, ``abort`` (the client disconnected) or ``error`` (the server could not
    finish the request)."""
    cancel_ms: float | None
    """Milliseconds from arrival until the client disconnected; null if it did not."""
    tenant: str
    """A pseudonym for the tenant; empty if the request has no tenant."""
    service_tier: str
    priority: int
    """The ``priority`` of the request; 0 if it had none."""
    ttft_ms: float | None
    """Requested maximum time to the first token, in milliseconds. The next two fields: maximum time per later token,
    and time to the end."""
    tpot_ms: float | None
    deadline_ms: float | None
    ttft_seconds: float | None
    """Measured time to the first token, in seconds. The next fields: time per later token, time to the end, time to the
    first step."""
    tpot_seconds: float | None
    e2e_seconds: float
    queue_seconds: float | None
    preemptions: int
    previous: int | None
    """For the first turn after tools were called: number of the record of the turn that called them; null if it is not
    in this recording. Null for other requests."""
    tools: list[str]
    """Names of the tools that ran before this turn. Empty for other requests."""
    gap_ms: float | None
    """Milliseconds from the end of the turn that called the tools to the arrival of this one; null for other
    requests."""
    hash_ids: list[int]
    """One hash per block of the prompt; the last block may be partial. If two prompts have the same hash at an index,
    they are equal up to the end of that block."""


# --- what there is now ------------------------------------------------------------------------------------------------


async def list_requests(request: Request) -> Response:
    """List up to ``limit`` requests of the caller. Raises ApiError 400 for a limit outside 1 to 1,000."""
    state: ServerState = request.app.state.server
    caller: Caller = getattr(request.state, "caller", Caller())
    limit = _number(request, "limit", 100, 1, _MAX_LISTED)
    now = time.monotonic()
    engine = state.engine
    positions = {stream.request_id: place for stream, place in engine.line()}
    own = [stream for stream in engine.requests() if caller.sees(stream.tenant)]
    started = [stream for stream in own if stream.request_id not in positions]
    line = [stream for stream in own if stream.request_id in positions]
    line.sort(key=lambda stream: positions[stream.request_id].position)
    listed = [_live(stream, positions.get(stream.request_id), now) for stream in [*started, *line][: int(limit or 0)]]
    running = engine.stats.engine.num_running
    return json_response(RequestsReply(running=running, waiting=engine.num_queued, requests=listed))


def _live(stream: OutputStream, place: Place | None, now: float) -> LiveRequest:
    state = stream.state
    prepared = stream.state.prepared
    progress = state.progress()
    metrics = state.metrics
    arrival = metrics.arrival_time
    first_token = metrics.first_token_time
    started = metrics.first_scheduled_time
    until = progress.next_token_at
    return LiveRequest(
        id=stream.name,
        status=progress.phase if place is None or place.loading is None else "loading",
        service_tier=stream.service_class,
        priority=prepared.priority,
        tenant=stream.tenant,
        prompt_tokens=len(prepared.prompt_token_ids),
        cached_tokens=state.num_cached_tokens,
        host_tokens=state.num_host_tokens,
        disk_tokens=state.num_disk_tokens,
        computed_tokens=progress.num_computed,
        output_tokens=state.num_tokens,
        n=len(state.answers),
        max_tokens=prepared.max_tokens,
        age_seconds=_rounded(now - arrival),
        queue_seconds=_rounded((now if started is None else started) - arrival),
        first_token_seconds=None if first_token is None else _rounded(first_token - arrival),
        expected_start_seconds=_rounded(place.expected_start) if place and place.expected_start is not None else None,
        expected_load_seconds=_rounded(place.loading) if place and place.loading is not None else None,
        expected_token_seconds=None if until is None else _rounded(max(0.0, until - now)),
    )


# --- recordings -------------------------------------------------------------------------------------------------------


def prefix_hashes(token_ids: Sequence[int], block_size: int, secret: bytes, salt: str = "") -> list[int]:
    """One number below 2**62 per block of ``block_size`` token ids (of 32 bits each); the last block may be shorter.

    The numbers of two prompts are equal before the first block in which the prompts differ, and different from that
    block on. ``secret`` is 1 to 64 bytes. Prompts with different ``salt`` never have equal numbers.
    """
    chain = hashlib.blake2b(salt.encode(), key=secret, digest_size=_HASH_BYTES).digest()
    numbers = []
    for start in range(0, len(token_ids), block_size):
        block = array("I", token_ids[start : start + block_size]).tobytes()
        chain = hashlib.blake2b(chain + block, key=secret, digest_size=_HASH_BYTES).digest()
        numbers.append(int.from_bytes(chain[:8], "big") >> 2)
    return numbers


class TrafficRecording:
    """Collects the records of ended requests until the listener takes them. It subscribes to the engine's events.

    Only requests that arrive during the recording are recorded. The recording stops accepting requests after
    ``max_requests`` requests or ``seconds``. Accepted requests are recorded until they end, so that long requests are
    not missing. ``now`` is the current time on the clock of the requests, ``unix`` the same time as Unix time.
    """

    def __init__(
        self,
        caller: Caller,
        block_size: int,
        *,
        now: float,
        unix: float,
        max_requests: float = math.inf,
        seconds: float = math.inf,
    ) -> None:
        self.id = secrets.token_hex(16)
        self.caller = caller
        self.block_size = block_size
        self.began_unix = unix
        self.num_lost = 0
        """Number of dropped records since the last report to the listener."""
        self.listener = 0
        """Number of the newest listener; earlier listeners are disconnected."""
        self.news = asyncio.Event()
        self._secret = secrets.token_bytes(32)
        self._began = now
        self._ends = now + seconds
        self._remaining = max_requests
        self._under_way: set[str] = set()
        self._ended: deque[tuple[int, TrafficRecord, list[int], str]] = deque()
        """(record number, record, prompt token ids, salt) of ended requests. The outputs themselves may be large and
        are not kept."""
        self._num_tokens = self._number = 0
        self._tenants = {"": ""}
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """Id of an ended request -> number of its record."""

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def is_complete(self, now: float) -> bool:
        """Whether no further record will be added."""
        return not self._under_way and not self._ended and (self._remaining <= 0 or now >= self._ends)

    def close(self) -> None:
        """Stop accepting new requests."""
        self._remaining = 0

    def began(self, stream: OutputStream) -> None:
        arrival = stream.state.metrics.arrival_time
        if self._remaining <= 0 or not self._began <= arrival < self._ends or not self.caller.sees(stream.tenant):
            return
        self._remaining -= 1
        self._under_way.add(stream.request_id)
        if len(self._tenants) <= _MAX_TENANTS:
            self._tenants.setdefault(stream.tenant, f"tenant-{len(self._tenants)}")

    def ended(self, stream: OutputStream, cut_off: FinishReason | None, now: float) -> None:
        if stream.request_id not in self._under_way:
            return
        self._under_way.remove(stream.request_id)
        facts = stream.state.record(now, aborted=cut_off is not None)
        self._number += 1
        self._numbers[stream.request_id] = self._number
        if len(self._numbers) > _MAX_TURNS:
            self._numbers.popitem(last=False)
        record = self._record(stream.state, facts, cut_off or facts.reason)
        prepared = stream.state.prepared
        self._ended.append((self._number, record, prepared.prompt_token_ids, prepared.cache_salt))
        self._num_tokens += facts.prompt_tokens
        while len(self._ended) > 1 and (len(self._ended) > _MAX_WAITING or self._num_tokens > _MAX_WAITING_TOKENS):
            self._num_tokens -= self._ended.popleft()[1].prompt_tokens
            self.num_lost += 1
        self.news.set()

    async def take(self) -> tuple[int, TrafficRecord] | None:
        """Return and remove the oldest record, as (number of the record, record); None when there is none. Numbers
        start at 1 and include dropped records."""
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
        service = state.prepared.service
        arrival = state.metrics.arrival_time
        params = state.prepared.params
        first_token = state.metrics.first_token_time
        resumed = state.metrics.resumed
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
            previous=None if resumed is None else self._numbers.get(resumed.sequence_id),
            tools=[] if resumed is None else sorted(set(resumed.tools)),
            gap_ms=None if resumed is None else round(1000 * max(0.0, resumed.gap), 3),
            hash_ids=[],
        )


async def stream_traffic(request: Request) -> Response:
    """Start a recording, or continue the one that the parameter ``recording`` names.

    Raises ApiError 400 for a bad parameter, 404 for an unknown recording, 429 when there are too many recordings.
    """
    state: ServerState = request.app.state.server
    caller: Caller = getattr(request.state, "caller", Caller())
    events = state.engine.events
    block_size = _number(request, "block_size", 64, 16, 512)
    max_requests = _number(request, "requests", None, 1, 10**9)
    seconds = _number(request, "duration", None, 0.001, 1e9, whole=False)
    recording_id = request.query_params.get("recording")
    if request.method == "HEAD":
        return Response(media_type=EventStream.media_type)
    if recording_id is not None:
        recording = events.subscribers.get(recording_id)
        if not isinstance(recording, TrafficRecording) or recording.caller.tenant != caller.tenant:
            message = f"there is no recording {recording_id!r:.80}; it has ended, or the server was started again"
            raise ApiError(404, message, code="recording_not_found", param="recording")
        return _listen(state, recording)
    recordings = [each for each in events.subscribers.values() if isinstance(each, TrafficRecording)]
    own = sum(each.caller.tenant == caller.tenant for each in recordings)
    full = ""
    if caller.holder and own >= _MAX_RECORDINGS_OF_ONE:
        full = f"{own} recordings of this key's tenant run already, and {_MAX_RECORDINGS_OF_ONE} may; end one of them"
        full += f" and wait {_RECONNECT_SECONDS:.0f} s, or continue it (recording=ID)"
    elif len(recordings) >= _MAX_RECORDINGS:
        full = f"{_MAX_RECORDINGS} recordings run already; end one of them, and wait {_RECONNECT_SECONDS:.0f} s"
    if full:
        raise ApiError(429, full, code="too_many_recordings", headers={"retry-after": f"{_RECONNECT_SECONDS:.0f}"})
    recording = TrafficRecording(
        caller,
        int(block_size or 0),
        now=time.monotonic(),
        unix=time.time(),
        max_requests=math.inf if max_requests is None else max_requests,
        seconds=math.inf if seconds is None else seconds,
    )
    events.subscribe(recording.id, recording)
    return _listen(state, recording)


def _listen(state: ServerState, recording: TrafficRecording) -> EventStream:
    """Stream of a recording's events for a new listener. An earlier listener is disconnected."""
    recording.listener += 1
    recording.news.set()
    number = recording.listener

    def forget() -> None:
        if recording.listener == number:
            state.engine.events.unsubscribe(recording.id)

    def over() -> None:
        """End or pause the recording when its listener has disconnected. An incomplete recording is kept for
        ``_RECONNECT_SECONDS``."""
        if recording.is_complete(time.monotonic()):
            forget()
        else:
            asyncio.get_running_loop().call_later(_RECONNECT_SECONDS, forget)

    return EventStream(_recording_events(state, recording, number), over=over)


async def _recording_events(
    state: ServerState, recording: TrafficRecording, number: int
) -> AsyncGenerator[bytes, None]:
    """Events of a recording: ``start``, an unnamed event per request, ``lost`` if records were dropped, and ``end``."""
    head = {"recording": recording.id, "block_size": recording.block_size, "began_unix": recording.began_unix}
    yield _event("start", {**head, "model": state.model_names[0]})
    last_sent = time.monotonic()
    while recording.listener == number:
        if state.draining:
            recording.close()
        if recording.num_lost:
            lost = recording.num_lost
            recording.num_lost = 0
            yield _event("lost", {"lost": lost})
        entry = await recording.take()
        now = time.monotonic()
        if entry is not None:
            last_sent = now
            yield b"id: %d\ndata: %b\n\n" % (entry[0], _encode(entry[1]))
        elif recording.is_complete(now):
            yield _event("end", {"reason": "draining" if state.draining else "complete"})
            return
        elif now - last_sent >= _HEARTBEAT_SECONDS:
            last_sent = now
            yield b": %d requests are under way\n\n" % recording.num_under_way
        else:  # a short wait, because the drain has no event
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await recording.news.wait()


def _event(name: str, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(content))


def _number(
    request: Request, name: str, default: int | None, low: float, high: float, *, whole: bool = True
) -> float | None:
    """Number in the query parameter ``name``. Raises ApiError 400 if the parameter's value is not a number in the
    allowed range."""
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
