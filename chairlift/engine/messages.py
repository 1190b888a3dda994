"""What crosses between the server's process and the engine's: typed frames, and nothing that could run.

A frame is four bytes of length (big endian) and a msgpack map whose ``type`` names the message. Decoding checks every
type; what does not decode is dropped and counted by whoever receives it, never trusted and never fatal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from chairlift.engine.adapters import AdapterLoad, AdapterState
from chairlift.engine.core import CoreOutputs
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.pooling_core import PooledVector
from chairlift.errors import RequestError
from chairlift.metrics.stats import EngineStats
from chairlift.request import Service
from chairlift.sampling_params import SamplingParams
from chairlift.scheduler.forecast import Forecast

__all__ = [
    "AdapterLoaded",
    "Add",
    "FrameError",
    "FrameReader",
    "Leave",
    "LoadAdapter",
    "Loading",
    "Log",
    "Message",
    "NotLoaded",
    "PassBegun",
    "Pool",
    "Pooled",
    "Ready",
    "Refused",
    "Start",
    "Step",
    "UnloadAdapter",
    "UpdateWeights",
    "Watch",
    "Watched",
    "decode",
    "encode",
]

MAX_FRAME: Final = 256 * 1024 * 1024
"""Bytes; a step that reports the log-probabilities of a long prompt is the largest there is."""
_LENGTH: Final = 4


class Start(msgspec.Struct, tag="start", forbid_unknown_fields=True):
    """First to the engine: what to load. ``settings`` are keywords of EngineConfig."""

    settings: dict[str, Any]
    log_level: int


class Loading(msgspec.Struct, tag="loading", forbid_unknown_fields=True):
    label: str
    share: float


class Ready(msgspec.Struct, tag="ready", forbid_unknown_fields=True):
    """The model is loaded; later: its weights were replaced, and steps told after this are of the new ones."""

    info: EngineInfo


class NotLoaded(msgspec.Struct, tag="not_loaded", forbid_unknown_fields=True):
    """The settings, the model or (nothing was changed) the new weights cannot be used; ``kind`` names the exception."""

    kind: str
    message: str


class Log(msgspec.Struct, tag="log", forbid_unknown_fields=True):
    """A log record of the engine's process."""

    level: int
    name: str
    text: str


class Add(msgspec.Struct, tag="add", forbid_unknown_fields=True):
    """A request, checked already. ``params`` holds the sampling parameters that are not at their default."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]
    cache_salt: str
    arrival_time: float
    priority: int
    service: Service
    adapter_id: int = 0

    @classmethod
    def of(cls, request: PreparedRequest) -> Add:
        params = {
            name: value for name in _PARAMS if (value := getattr(request.params, name)) != getattr(_DEFAULTS, name)
        }
        return cls(params=params, **{name: getattr(request, name) for name in _AS_PREPARED})

    def request(self) -> PreparedRequest:
        """Raises RequestError for sampling parameters that no door would have let in."""
        same = {name: getattr(self, name) for name in _AS_PREPARED}
        return PreparedRequest(prompt=None, params=SamplingParams.from_dict(self.params), **same)


_AS_PREPARED: Final = tuple(name for name in Add.__struct_fields__ if name != "params")


class Leave(msgspec.Struct, tag="leave", forbid_unknown_fields=True):
    """Sequences that end for the front's reasons: their text did (``stopped``), or their caller left."""

    sequence_ids: list[str]
    stopped: bool


class Refused(msgspec.Struct, tag="refused", forbid_unknown_fields=True):
    """The core would not take a request, or (``failed``) could not, which is no fault of the request."""

    request_id: str
    too_long: bool
    message: str
    failed: bool = False


class Step(msgspec.Struct, tag="step", forbid_unknown_fields=True):
    """What the newest steps brought."""

    outputs: CoreOutputs
    stats: EngineStats
    forecast: Forecast | None = None
    """A new one, when there is one."""


class Pool(msgspec.Struct, tag="pool", forbid_unknown_fields=True):
    """A text for a model of embeddings, scores or classes, checked already."""

    request_id: str
    token_ids: list[int]
    token_types: list[int] | None = None


class PassBegun(msgspec.Struct, tag="pass_begun", forbid_unknown_fields=True):
    """These texts are computed now."""

    request_ids: list[str]


class Pooled(msgspec.Struct, tag="pooled", forbid_unknown_fields=True):
    """What a pass brought."""

    vectors: list[PooledVector]
    stats: EngineStats


class Watch(msgspec.Struct, tag="watch", forbid_unknown_fields=True):
    """Somebody wants to see every step from now on, or (``wanted`` false) nobody does any more."""

    wanted: bool


class Watched(msgspec.Struct, tag="watched", forbid_unknown_fields=True):
    """What a :class:`~chairlift.engine.step_recorder.StepRecorder` gave: lines of JSON."""

    lines: bytes


class UpdateWeights(msgspec.Struct, tag="update_weights", forbid_unknown_fields=True):
    """Have the weights of a directory serve from the next step on. Answered by Ready or NotLoaded."""

    source: str
    version: int
    in_flight: str


class LoadAdapter(msgspec.Struct, tag="load_adapter", forbid_unknown_fields=True):
    """Know an adapter from now on. Answered by AdapterLoaded."""

    load: AdapterLoad


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", forbid_unknown_fields=True):
    """Forget an adapter behind its last request. Not answered."""

    adapter_id: int


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", forbid_unknown_fields=True):
    """How a load ended."""

    state: AdapterState


Message = (
    Start
    | Loading
    | Ready
    | NotLoaded
    | Log
    | Add
    | Leave
    | Refused
    | Step
    | Watch
    | Watched
    | UpdateWeights
    | Pool
    | PassBegun
    | Pooled
    | LoadAdapter
    | UnloadAdapter
    | AdapterLoaded
)

_PARAMS = [field.name for field in dataclasses.fields(SamplingParams)]
_DEFAULTS = SamplingParams()


def _plain(value: object) -> str | int | float:
    """Callers' own kinds of text and numbers, NumPy's among them, cross as what they are kinds of."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a message cannot hold {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class FrameError(ValueError):
    """Bytes that are no message."""


def encode(message: Message) -> bytes:
    """A whole frame. Raises RequestError for a message that is longer than a frame may be, or has half a character."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:  # of a file's name, mostly
        raise RequestError(f"text must be UTF-8 to reach the engine, got {error.object!a:.200}; rename it") from None
    if len(body) > MAX_FRAME:
        raise RequestError(f"a message of {len(body):,} bytes is too long for the engine; {MAX_FRAME:,} are allowed")
    return len(body).to_bytes(_LENGTH, "big") + body


def decode(body: bytes | bytearray | memoryview) -> Message:
    """A frame's body. Raises FrameError."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        raise FrameError(f"not a message: {error}") from None


class FrameReader:
    """Cuts a stream of bytes into messages. ``num_bad`` counts frames that were none."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.num_bad = 0
        self._max = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises FrameError, for good, when a length is beyond all bounds."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH:
                length = int.from_bytes(buffer[start : start + _LENGTH], "big")
                if length > self._max:
                    raise FrameError(f"a frame of {length:,} bytes; at most {self._max:,} are allowed")
                end = start + _LENGTH + length
                if len(buffer) < end:
                    break
                body = bytes(buffer[start + _LENGTH : end])
                start = end
                try:
                    message = decode(body)
                except FrameError:
                    self.num_bad += 1
                else:
                    yield message
        finally:
            del buffer[:start]
