"""Messages between the server's process and the engine's process: typed frames that contain only data, never code.

A frame is a length of four bytes (big endian) and a msgpack map. The map's ``type`` names the message. Decoding checks
every type. A frame that does not decode is dropped and counted by its receiver; it does not stop the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from chairlift.base.image_spans import ImageSpan, ImageTile
from chairlift.base.pooled_row import PooledRow
from chairlift.base.sampling_params import SamplingParams
from chairlift.core.request import Service
from chairlift.core.scheduler.forecast import Forecast
from chairlift.engine.adapters import AdapterLoad, AdapterState
from chairlift.engine.core_outputs import CoreOutputs
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_moves import MoveOrder
from chairlift.engine.kv_store.report import StoreReport
from chairlift.errors import RequestError
from chairlift.metrics.stats import EngineStats

__all__ = [
    "Action",
    "AdapterLoaded",
    "Add",
    "Control",
    "Controlled",
    "FrameError",
    "FrameReader",
    "Leave",
    "LoadAdapter",
    "Loading",
    "Log",
    "Message",
    "Move",
    "NotLoaded",
    "Paused",
    "Ready",
    "Refused",
    "SideOrder",
    "SideReply",
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
"""Maximum length of a frame, in bytes. The longest real frame has the log-probabilities of a long prompt."""
_LENGTH: Final = 4

Action = Literal["pause", "resume", "reset", "recompute"]
"""What a :class:`Control` message asks for."""


class Start(msgspec.Struct, tag="start", forbid_unknown_fields=True):
    """First message to the engine: its settings, including the model. ``settings`` are keyword arguments of
    EngineConfig."""

    settings: dict[str, Any]
    log_level: int


class Loading(msgspec.Struct, tag="loading", forbid_unknown_fields=True):
    label: str
    share: float


class Ready(msgspec.Struct, tag="ready", forbid_unknown_fields=True):
    """The model is loaded. The message is sent again after the weights were replaced; later steps then use the new
    weights."""

    info: EngineInfo


class NotLoaded(msgspec.Struct, tag="not_loaded", forbid_unknown_fields=True):
    """The settings, the model or the new weights cannot be used. ``kind`` is the name of the exception. If new weights
    cannot be used, the old weights stay in use."""

    kind: str
    message: str


class Log(msgspec.Struct, tag="log", forbid_unknown_fields=True):
    """A log record of the engine's process."""

    level: int
    name: str
    text: str


class Add(msgspec.Struct, tag="add", forbid_unknown_fields=True):
    """A validated request. ``params`` has only the sampling parameters that differ from their default."""

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
    image_spans: tuple[ImageSpan, ...] = ()
    image_tiles: tuple[ImageTile, ...] = ()
    answer_token_ids: list[int] = []
    pooled: PooledRow | None = None

    @classmethod
    def of(cls, request: PreparedRequest) -> Add:
        params = {
            name: value for name in _PARAMS if (value := getattr(request.params, name)) != getattr(_DEFAULTS, name)
        }
        return cls(params=params, **{name: getattr(request, name) for name in _AS_PREPARED})

    def request(self) -> PreparedRequest:
        """The request as it was before encoding. Raises RequestError for sampling parameters that the input checks
        would have refused."""
        same = {name: getattr(self, name) for name in _AS_PREPARED}
        params = SamplingParams.from_dict(self.params) if self.params else _DEFAULTS
        return PreparedRequest(prompt=None, params=params, **same)


_AS_PREPARED: Final = tuple(name for name in Add.__struct_fields__ if name != "params")


class Leave(msgspec.Struct, tag="leave", forbid_unknown_fields=True):
    """Ids of sequences to end, because their text has ended (``stopped``) or because their caller has left."""

    sequence_ids: list[str]
    stopped: bool


class Paused(msgspec.Struct, tag="paused", forbid_unknown_fields=True):
    """The answer of a sequence that has ended calls tools. The caller goes on with the conversation when they have
    run."""

    sequence_id: str
    tools: list[str]


class Refused(msgspec.Struct, tag="refused", forbid_unknown_fields=True):
    """The core refused a request. With ``failed``, the cause is an error of the engine, not of the request."""

    request_id: str
    too_long: bool
    message: str
    failed: bool = False


class Step(msgspec.Struct, tag="step", forbid_unknown_fields=True):
    """Results of one or more steps."""

    outputs: CoreOutputs
    stats: EngineStats
    forecast: Forecast | None = None
    """The newest forecast, if one was made since the last message."""


class Move(msgspec.Struct, tag="move", forbid_unknown_fields=True):
    """An order for the move of a sequence to another engine. Reports about it come in Step messages."""

    sequence_id: str
    stage: str
    request: Add | None = None
    places: list[tuple[int, int, int, int]] = []
    generation: int = 0

    @classmethod
    def of(cls, order: MoveOrder) -> Move:
        request = None if order.request is None else Add.of(order.request)
        return cls(order.sequence_id, order.stage, request, order.places, order.generation)

    def order(self) -> MoveOrder:
        """The order as it was before encoding. Raises RequestError as :meth:`Add.request` does."""
        request = None if self.request is None else self.request.request()
        return MoveOrder(self.sequence_id, self.stage, request, self.places, self.generation)


class Watch(msgspec.Struct, tag="watch", forbid_unknown_fields=True):
    """Start (``wanted`` is true) or stop to report every step."""

    wanted: bool


class Watched(msgspec.Struct, tag="watched", forbid_unknown_fields=True):
    """Lines of JSON from the :class:`~chairlift.engine.step_recorder.StepRecorder`."""

    lines: bytes


class UpdateWeights(msgspec.Struct, tag="update_weights", forbid_unknown_fields=True):
    """Load the weights of a directory and use them from the next step on. The reply is Ready or NotLoaded."""

    source: str
    version: int
    in_flight: str


class LoadAdapter(msgspec.Struct, tag="load_adapter", forbid_unknown_fields=True):
    """Load an adapter. The reply is AdapterLoaded."""

    load: AdapterLoad


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", forbid_unknown_fields=True):
    """Remove an adapter after its last request. There is no reply."""

    adapter_id: int


class AskKVStore(msgspec.Struct, tag="ask_kv_store", forbid_unknown_fields=True):
    """Report what is in the store of KV blocks. With ``clear``, first remove the blocks of this namespace (``own``) or
    of all namespaces (``all``). The reply is KVStoreReported."""

    clear: str


class Control(msgspec.Struct, tag="control", forbid_unknown_fields=True):
    """Start no further step (``pause``), go on (``resume``), share no KV computed so far (``reset``), or compute the KV
    of running requests again, too (``recompute``). The reply is Controlled."""

    action: Action


class Controlled(msgspec.Struct, tag="controlled", forbid_unknown_fields=True):
    """A Control message was followed. With ``refusal``, it was not, for this reason."""

    is_paused: bool
    refusal: str = ""


class KVStoreReported(msgspec.Struct, tag="kv_store_reported", forbid_unknown_fields=True):
    """Result of an AskKVStore message."""

    report: StoreReport


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", forbid_unknown_fields=True):
    """Result of a LoadAdapter message."""

    state: AdapterState


class SideOrder(msgspec.Struct, tag="side_order", forbid_unknown_fields=True):
    """An order for the work beside the engine's steps. The reply is a SideReply with its ``number``."""

    number: int
    order: bytes


class SideReply(msgspec.Struct, tag="side_reply", forbid_unknown_fields=True):
    """The reply to a SideOrder. With ``refusal``, there is no such work."""

    number: int
    reply: bytes
    refusal: str = ""


Message = (
    Start
    | Loading
    | Ready
    | NotLoaded
    | Log
    | Add
    | Leave
    | Paused
    | Refused
    | Step
    | Move
    | Watch
    | Watched
    | UpdateWeights
    | LoadAdapter
    | UnloadAdapter
    | AdapterLoaded
    | AskKVStore
    | KVStoreReported
    | Control
    | Controlled
    | SideOrder
    | SideReply
)

_PARAMS = [field.name for field in dataclasses.fields(SamplingParams)]
_DEFAULTS = SamplingParams()


def _plain(value: object) -> str | int | float:
    """Convert subclasses of str, int and float, such as NumPy's numbers, to the plain type."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a message cannot hold {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class FrameError(ValueError):
    """Raised for bytes that are not a valid message."""


def encode(message: Message) -> bytes:
    """The message as a frame. Raises RequestError for a message that is too long, or whose text has half of a surrogate
    pair."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:  # usually from a file's name
        raise RequestError(f"text must be UTF-8 to reach the engine, got {error.object!a:.200}; rename it") from None
    if len(body) > MAX_FRAME:
        raise RequestError(f"a message of {len(body):,} bytes is too long for the engine; {MAX_FRAME:,} are allowed")
    return len(body).to_bytes(_LENGTH, "big") + body


def decode(body: bytes | bytearray | memoryview) -> Message:
    """Decode the body of a frame to a message. Raises FrameError."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        raise FrameError(f"not a message: {error}") from None


class FrameReader:
    """Splits a stream of bytes into messages. ``num_bad`` is the number of invalid frames so far."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.num_bad = 0
        self._max = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete now. If a frame's length exceeds MAX_FRAME, this call and all later
        calls raise FrameError."""
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
