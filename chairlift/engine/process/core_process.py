"""Runs the core in the engine process: commands arrive on a socket, and one frame per step goes back.

The process has one thread. Between two steps it reads commands and sends as many bytes as the socket accepts. It sleeps
in ``poll`` while there is nothing to compute. It never waits for a slow reader: results that cannot be sent yet are
merged with the results of the next step.
"""

from __future__ import annotations

import dataclasses
import logging
import select
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from chairlift.base.outputs import FinishReason
from chairlift.base.row_failures import output_reason
from chairlift.base.service_class import DEFAULT_CLASS, ServiceClass
from chairlift.core.scheduler.forecast import Forecast
from chairlift.engine.core import EngineCore
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence
from chairlift.engine.forecaster import Forecaster
from chairlift.engine.info import EngineInfo
from chairlift.engine.process.messages import (
    AdapterLoaded,
    Add,
    AskKVStore,
    Control,
    Controlled,
    FrameReader,
    KVStoreReported,
    Leave,
    LoadAdapter,
    Log,
    Message,
    Move,
    NotLoaded,
    Paused,
    Ready,
    Refused,
    SideOrder,
    SideReply,
    Step,
    UnloadAdapter,
    UpdateWeights,
    Watch,
    Watched,
    encode,
)
from chairlift.engine.process.side_work import SideWork
from chairlift.errors import ConfigError, ModelLoadError, PromptTooLongError, RequestError
from chairlift.executor.executor import OnProgress

__all__ = ["Connection", "CoreProcess", "FrameLogHandler", "GateOf", "StepGate"]

_log = logging.getLogger(__name__)

_READ: Final = 1 << 18
_WATCH_SECONDS: Final = 0.1
"""Seconds between two reports of steps to viewers. The period is short enough for a smooth picture, without a frame for
every step."""
_MAX_MERGED: Final = 1 << 21
"""Maximum number of tokens and log-probabilities in merged results. In a frame they take less than half of the maximum
frame size."""


class Connection:
    """A non-blocking stream of frames. ``closed`` is true after the other side has closed the connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.closed = False
        self.frames = FrameReader()
        self._sock = sock
        self._unsent = bytearray()

    @property
    def backlog(self) -> int:
        """Number of queued bytes that the socket has not accepted yet."""
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Queue a frame, and send as many bytes as the socket accepts."""
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send as many queued bytes as the socket accepts without waiting."""
        try:
            while self._unsent and not self.closed:
                sent = self._sock.send(memoryview(self._unsent)[: 1 << 20])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def receive(self, timeout: float | None) -> list[Message]:
        """Messages that have arrived. Waits until a message arrives or the socket accepts more bytes, at most
        ``timeout`` seconds (None: without limit)."""
        if self.closed:
            return []
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(None if timeout is None else timeout * 1000)
        self.flush()
        messages: list[Message] = []
        try:
            while not self.closed:
                data = self._sock.recv(_READ)
                if not data:
                    self.closed = True
                messages += self.frames.feed(data)
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # the other side has gone, or does not send valid frames
            self.closed = True
        return messages


class StepGate(Protocol):
    """Decides when a step may begin, for an engine that shares its processors."""

    def enter(self) -> bool:
        """Wait until a step may begin. Returns whether it had to wait."""
        ...

    def leave(self) -> None:
        """Note that the step has ended."""
        ...

    def rest(self) -> None:
        """Note that no step follows until there is new work."""
        ...


GateOf = Callable[[EngineCore, EngineInfo], StepGate]
"""Function that makes the gate for the steps of a core."""


class FrameLogHandler(logging.Handler):
    """Sends log records to the server process, which writes the log."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._deliver = send

    def emit(self, record: logging.LogRecord) -> None:
        self._deliver(Log(record.levelno, record.name, self.format(record)))


class CoreProcess:
    """Runs a core whose requests and results pass through a connection."""

    def __init__(
        self,
        connection: Connection,
        core: EngineCore,
        info: EngineInfo,
        classes: Mapping[str, ServiceClass] | None,
        progress: OnProgress,
        approximations: Callable[[], tuple[str, ...]] = tuple,
        *,
        one_step_each: bool = False,
    ) -> None:
        """``approximations`` returns those of the model with its newest weights.

        ``one_step_each``: each request ends with its first step, which may be long. Then the server learns of the start
        of a request before its step, and the queue is not forecast: a simulated step would cost as much as scheduling
        the step itself.
        """
        self._approximations = approximations
        self._connection = connection
        self._core = core
        self.info = info
        self._progress = progress
        priorities = {name: each.priority for name, each in (classes or {DEFAULT_CLASS: ServiceClass()}).items()}
        depth = core.num_lookahead_steps
        self._forecaster: Forecaster | None = None
        if one_step_each:
            core.on_joined = self._deliver
        else:
            loads = core.preparers.kv_blocks.expected
            self._forecaster = Forecaster(core.scheduler, core.costs, core.answer_lengths, priorities, depth, loads)
        self._forecast: Forecast | None = None
        """The newest forecast, if it has not been sent to the server's process yet; otherwise None."""
        self._pending: list[CoreOutputs] = []
        """Results of steps that wait until the socket has room for them; each entry becomes one frame. The results of
        later steps are merged into the last entry."""
        self._num_values = 0
        """Number of tokens and log-probabilities in the last entry of ``_pending``."""
        self._watched_at = 0.0
        self._heartbeat: float | None = getattr(core.executor, "heartbeat", None)
        """Seconds between two looks at the other processes of the model; None if there are none."""
        self._looked_at = 0.0
        self._gate: StepGate | None = None
        self._side: SideWork | None = None

    def do_beside(self, work: SideWork) -> None:
        """Let other work run between two steps. Call it before :meth:`run`."""
        self._side = work

    def share(self, gate_of: GateOf) -> None:
        """Let a gate decide when the steps begin. Call it before :meth:`run`."""
        self._gate = gate_of(self._core, self.info)

    def run(self) -> None:
        """Serve until the other side closes the connection."""
        connection = self._connection
        core = self._core
        connection.send(Ready(self.info))
        while not connection.closed:
            self._receive()
            self._look()
            if core.has_work:
                outputs = core.step() if self._gate is None else self._shared_step(self._gate)
                if self._forecaster is not None:
                    self._forecast = self._forecaster.advance(core.clock.now()) or self._forecast
                if outputs is not None or (self._forecast is not None and self._forecast.loading):
                    self._deliver(outputs or CoreOutputs())
            if reports := core.preparers.kv_moves.take_reports():
                self._deliver(CoreOutputs(moves=reports))
            if (news := core.preparers.kv_blocks.take_news()) is not None:
                self._deliver(CoreOutputs(stored=[news]))
            for state in self._core.preparers.adapters.take_states():
                connection.send(AdapterLoaded(state))
            for report in self._core.preparers.kv_blocks.take_reports():
                connection.send(KVStoreReported(report))
            if self._pending and not connection.backlog:
                self._deliver(CoreOutputs())
            self._show()
            self._work_aside()
        core.shutdown()

    def _look(self) -> None:
        """Look whether the other processes of the model live, also while there is no work. Raises EngineDeadError."""
        now = self._core.clock.now()
        if self._heartbeat is not None and now >= self._looked_at + self._heartbeat:
            self._looked_at = now
            self._core.check_processes()

    def _work_aside(self) -> None:
        """Give the work beside the steps a turn."""
        if self._side is not None:
            for number, reply in self._side.run(self._core.has_work):
                self._connection.send(SideReply(number, reply))

    def _receive(self) -> None:
        """Follow the messages that have arrived. Waits for messages if there is no work."""
        patience = self._patience()
        if self._gate is not None and patience != 0.0:
            self._gate.rest()
        for message in self._connection.receive(patience):
            self._obey(message)

    def _shared_step(self, gate: StepGate) -> CoreOutputs | None:
        """Make a step when it may begin, with the requests that have arrived until then."""
        if gate.enter():
            for message in self._connection.receive(0.0):
                self._obey(message)
        outputs = self._core.step()
        gate.leave()
        return outputs

    def _patience(self) -> float | None:
        own = self._own_patience()
        aside = None if self._side is None else self._side.patience(self._core.has_work)
        return min((each for each in (own, aside, self._heartbeat) if each is not None), default=None)

    def _own_patience(self) -> float | None:
        if not self._core.has_work:
            return None
        when = self._core.next_event()
        # The core waits for an event without a known time (a batch fills up, a block is freed), so look again soon.
        return 0.05 if when is None else max(0.0, when - self._core.clock.now())

    def _obey(self, message: Message) -> None:
        if isinstance(message, Add):
            try:
                self._core.add(message.request())
            except RequestError as error:
                too_long = isinstance(error, PromptTooLongError)
                self._connection.send(Refused(message.request_id, too_long, str(error)))
            except Exception as error:  # out of memory, for example; the core holds no part of the request
                _log.exception("request %s could not be taken", message.request_id)
                why = f"the engine could not take the request ({type(error).__name__}); send it again later"
                self._connection.send(Refused(message.request_id, False, why, failed=True))
        elif isinstance(message, Leave):
            end = self._core.stop if message.stopped else self._core.abort
            finished = end(message.sequence_ids)
            self._deliver(CoreOutputs(finished=finished))
        elif isinstance(message, Paused):
            self._core.paused(message.sequence_id, message.tools)
            self._deliver(CoreOutputs())  # with the new statistics
        elif isinstance(message, Move):
            self._move(message)
        elif isinstance(message, Watch):
            self._core.watch(message.wanted)
        elif isinstance(message, UpdateWeights):
            self._update(message)
        elif isinstance(message, LoadAdapter):
            self._core.preparers.adapters.load(message.load)
        elif isinstance(message, UnloadAdapter):
            self._core.preparers.adapters.unload(message.adapter_id)
        elif isinstance(message, AskKVStore):
            self._core.preparers.kv_blocks.ask(message.clear)
        elif isinstance(message, Control):
            self._control(message)
        elif isinstance(message, SideOrder):
            self._order_aside(message)
        else:
            self._connection.frames.num_bad += 1

    def _order_aside(self, message: SideOrder) -> None:
        if self._side is None:
            self._connection.send(SideReply(message.number, b"", "this engine does no other work"))
        else:
            self._side.take(message.number, message.order)

    def _land(self) -> None:
        """Wait for the steps in flight, and queue their results even if the socket is full."""
        landed = CoreOutputs()
        while (step := self._core.land()) is not None:
            landed.merge(step)
        self._deliver(landed, at_once=True)

    def _move(self, message: Move) -> None:
        """Follow an order for the move of a sequence. A sequence pauses between two steps."""
        try:
            order = message.order()
        except RequestError:
            self._connection.frames.num_bad += 1
            return
        if order.stage == "pause":
            self._land()
        self._core.preparers.kv_moves.follow(order)

    def _control(self, message: Control) -> None:
        """Pause or resume, or forget KV, after the steps in flight."""
        self._land()
        core = self._core
        refusal = ""
        if message.action in ("pause", "resume"):
            core.is_paused = message.action == "pause"
        else:
            try:
                core.reset_prefix_cache(recompute=message.action == "recompute")
            except ConfigError as error:
                refusal = str(error)
        self._connection.send(Controlled(core.is_paused, refusal))

    def _update(self, message: UpdateWeights) -> None:
        """Replace the weights, after the steps in flight."""
        self._land()
        try:
            self._core.update_weights(message.source, message.version, message.in_flight, self._progress)
        except (ConfigError, ModelLoadError) as error:
            self._connection.send(NotLoaded(type(error).__name__, str(error)))
        else:
            info = self.info.updated(message.source, message.version, self._approximations())
            self._connection.send(Ready(info))

    def _show(self) -> None:
        """Send the recorded steps to viewers if a report is due, or if there is no other work."""
        recorder = self._core.recorder
        now = self._core.clock.now()
        if recorder is None or self._connection.backlog:
            return
        if now >= self._watched_at + _WATCH_SECONDS or not self._core.has_work:
            self._watched_at = now
            try:
                if lines := recorder.take():
                    self._connection.send(Watched(lines))
            except Exception:
                _log.exception("the record of steps could not be sent")
                recorder.missed()

    def _deliver(self, outputs: CoreOutputs, *, at_once: bool = False) -> None:
        num_values = _num_values(outputs)
        if self._pending and (not num_values or self._num_values + num_values <= _MAX_MERGED):
            self._pending[-1].merge(outputs)
            self._num_values += num_values
        else:
            self._pending.append(outputs)
            self._num_values = num_values
        while self._pending and (at_once or not self._connection.backlog):
            self._send_step(self._pending.pop(0))
            self._forecast = None

    def _send_step(self, outputs: CoreOutputs) -> None:
        """Send the results of steps as one frame.

        If they do not fit into a frame, the sequence with the most log-probabilities ends with an error and its results
        are dropped; this repeats until the rest fits. If there are no log-probabilities, the error is raised.
        """
        while True:
            try:
                self._connection.send(Step(outputs, self._core.stats(), self._forecast))
                return
            except (MemoryError, RequestError) as error:
                largest = _largest(outputs)
                if largest is None:
                    raise
                reason = output_reason(error)
                _log.error("sequence %s ends with an error: %s", largest, reason)
                ended = {each.sequence_id: each for each in [*outputs.finished, *self._core.fail(largest, reason)]}
                known = ended.get(largest) or FinishedSequence(largest, FinishReason.ERROR)
                ended[largest] = dataclasses.replace(known, finish_reason=FinishReason.ERROR, error=reason)
                outputs = dataclasses.replace(_without(outputs, largest), finished=list(ended.values()))


def _largest(outputs: CoreOutputs) -> str | None:
    """Id of the sequence with the most log-probabilities; None if no sequence has any."""
    sizes: Counter[str] = Counter()
    for name, _, entries in outputs.prompt_logprobs:
        sizes[name] += sum(len(record.token_ids) for record in entries)
    for name, record in zip(outputs.sequence_ids, outputs.logprobs or (), strict=False):
        sizes[name] += 0 if record is None else len(record.token_ids)
    return max(sizes, key=lambda name: sizes[name]) if sizes.total() else None


def _without(outputs: CoreOutputs, name: str) -> CoreOutputs:
    """The results without the tokens and log-probabilities of the sequence ``name``."""
    rows = [row for row, each in enumerate(outputs.sequence_ids) if each != name]
    return dataclasses.replace(
        outputs,
        sequence_ids=[outputs.sequence_ids[row] for row in rows],
        token_ids=[outputs.token_ids[row] for row in rows],
        logprobs=None if outputs.logprobs is None else [outputs.logprobs[row] for row in rows],
        prompt_logprobs=[each for each in outputs.prompt_logprobs if each[0] != name],
    )


def _num_values(outputs: CoreOutputs) -> int:
    """Number of tokens and log-probabilities in ``outputs``. Only these can grow without limit while results wait to be
    sent."""
    records = [record for _, _, entries in outputs.prompt_logprobs for record in entries]
    records += filter(None, outputs.logprobs or ())
    return len(outputs.token_ids) + sum(len(record.token_ids) for record in records)
