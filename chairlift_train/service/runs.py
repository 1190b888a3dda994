"""The training runs of all clients: accepts their calls, runs them in order, and remembers what has happened.

A call is logged, then acknowledged. Calls of a model enter the scheduler in the order of their ids, whatever the order
in which they arrived. A worker takes the scheduler's work, lets the trainer compute it, and logs the answers before a
client can read them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from chairlift.errors import EngineDeadError, StorageError
from chairlift_train.service.compute.calls import AdapterConfig, TrainingError
from chairlift_train.service.groups import lengths_of_groups
from chairlift_train.service.host import CreateOrder, DropOrder, LoadOrder, Order, PackOrder, PartOrder, WorkResult
from chairlift_train.service.log.log_thread import LogThread
from chairlift_train.service.log.records import CallAnswer, LoggedCall, ModelRecord, SamplerRecord
from chairlift_train.service.places import Places
from chairlift_train.service.progress import TrainingProgress
from chairlift_train.service.schedule.scheduler import NoRoomError, TrainingScheduler
from chairlift_train.service.schedule.work import TrainingCall, TrainingPack, TrainingStep
from chairlift_train.service.steps import StepRunner
from chairlift_train.service.wire.passes import read_pass

__all__ = ["Compute", "RunSettings", "TooManyCallsError", "TrainingRuns", "error_answer", "request_id"]

_log: Final = logging.getLogger(__name__)
_PASSES: Final = ("pass", "forward")
_RETRIEVED_SECONDS: Final = 300.0
"""Seconds after which a result that was retrieved is dropped. Its client may not have received it, and asks again."""
_MAX_DEATHS: Final = 3
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 10.0
"""Seconds between two attempts to take up all runs."""


class Compute(Protocol):
    """The way to the trainer."""

    async def run(self, order: Order) -> WorkResult:
        """Follow an order. Orders are followed one at a time. Raises EngineDeadError if the trainer's process dies."""
        ...


class TooManyCallsError(Exception):
    """Raised for a call for which the queue has no room. It was not logged, so it may be sent again."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunSettings:
    """Limits of the service, in seconds and bytes."""

    gap_seconds: float = 300.0
    """A call that waits this long for an earlier one, while its client is silent, fails."""
    lease_seconds: float = 900.0
    """A session that is silent this long ends, and its models leave the memory."""
    state_seconds: float = 60.0
    """Seconds of computing after which the state of a model is saved at its next step. After a crash, at most these
    are computed again."""
    result_seconds: float = 86_400.0
    """A result is dropped after this time, also if its client has not retrieved it."""
    max_queued_bytes: int = 256 << 20
    """Maximum size of the calls of one model that have not ended."""


def request_id(model_id: str, seq_id: int) -> str:
    """Id by which a client retrieves the answer of a call."""
    return f"{model_id}:{seq_id}"


def error_answer(message: str, category: str = "user") -> CallAnswer:
    """The answer of a call that failed. ``category`` is ``user`` or ``server``."""
    return CallAnswer("error", msgspec.json.encode({"error": message, "category": category}))


def _category(answer: CallAnswer) -> str:
    return str(msgspec.json.decode(answer.payload)["category"]) if answer.form == "error" else ""


async def _nothing(sampler: SamplerRecord) -> None:
    """Do nothing."""


@dataclasses.dataclass(slots=True)
class _Run:
    """A model whose calls are taken."""

    record: ModelRecord
    next_seq: int = 0
    """Id of the next call to enter the scheduler."""
    waiting: dict[int, tuple[str, bytes]] = dataclasses.field(default_factory=dict)
    """Seq id -> (kind, request) of calls that wait for an earlier one."""
    over: set[int] = dataclasses.field(default_factory=set)
    """Ids from ``next_seq`` on whose calls have an answer already."""
    heard_at: float = 0.0
    """When the newest call arrived."""
    queued_bytes: int = 0
    unsaved_seconds: float = 0.0
    """Seconds of computing since the newest saved state."""
    last_done: int = -1
    """Id of the newest call that has ended."""


class TrainingRuns:
    """Training runs in memory. All methods run on one event loop.

    ``price`` tells the bytes of an adapter. ``clock`` is in seconds, ``wall_clock`` in seconds since 1970.
    """

    def __init__(
        self,
        log: LogThread,
        compute: Compute,
        scheduler: TrainingScheduler,
        places: Places,
        price: Callable[[AdapterConfig], int],
        settings: RunSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.log = log
        self.compute = compute
        self.scheduler = scheduler
        self.places = places
        self.settings = settings or RunSettings()
        self.clock = clock
        self.wall_clock = wall_clock
        self.model_names: Sequence[str] = ()
        """Names of the model that is trained."""
        self.trouble = ""
        """Why no work is done now; empty if work is done."""
        self.publish: Callable[[SamplerRecord], Awaitable[object]] = _nothing
        """Called with each new sampling session of a training run, when its weights are on disk."""
        self.progress = TrainingProgress(clock)
        self._price = price
        self._runs: dict[str, _Run] = {}
        self._calls: dict[tuple[str, int], tuple[str, bytes]] = {}
        """Calls in the scheduler: (kind, request)."""
        self._answered: dict[str, asyncio.Event] = {}
        """Request id -> event that is set when the call has its answer."""
        self._news = asyncio.Event()
        self._steps = StepRunner(self)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gate = asyncio.Lock()
        """Held while a call is logged and enters, and while the log is read again. So no call enters twice."""
        self._is_restored = asyncio.Event()
        """Set when the runs of the log are known. Before that, no call is accepted."""
        self._retrieved: dict[tuple[str, int], float] = {}
        """(model id, seq id) -> when a client first read the result; the oldest is first."""
        self._deaths: Counter[tuple[str, int]] = Counter()
        """Call -> number of deaths of the trainer's process while the call was computed."""

    # -- calls -----------------------------------------------------------------------------------------------------

    def run(self, model_id: str) -> ModelRecord | None:
        """The record of a model that takes calls; None if there is none."""
        run = self._runs.get(model_id)
        return None if run is None else run.record

    async def accept(self, model: ModelRecord, seq_id: int, kind: str, body: bytes) -> str:
        """Log a call and let it run in its turn. Returns its request id when the log is on disk.

        A call that was accepted before is known. Raises ReusedSeqError, TooManyCallsError and StorageError.
        """
        task = asyncio.ensure_future(self._accept(model, seq_id, kind, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)  # a caller that leaves does not undo the call
        return request_id(model.model_id, seq_id)

    async def _accept(self, model: ModelRecord, seq_id: int, kind: str, body: bytes) -> None:
        await self._is_restored.wait()
        async with self._gate:
            await self._log_call(model, seq_id, kind, body)

    async def _log_call(self, model: ModelRecord, seq_id: int, kind: str, body: bytes) -> None:
        model_id = model.model_id
        run = self._runs.get(model_id)
        is_full = run is not None and run.queued_bytes + len(body) > self.settings.max_queued_bytes
        if is_full and await self.log(lambda log: log.call(model_id, seq_id)) is None:
            raise TooManyCallsError(
                f"calls of more than {self.settings.max_queued_bytes:,} bytes would wait; wait for results before you"
                " send more"
            )
        new = model if seq_id == 0 else None
        if not await self.log(lambda log: log.append(model_id, seq_id, kind, body, new)):
            return
        if new is not None:
            self._runs[model_id] = _Run(model)
        run = self._runs.get(model_id)
        if run is None:
            await self._answer(model_id, seq_id, error_answer("this training run has ended; load its checkpoint"))
            return
        run.heard_at = self.clock()
        await self._arrived(run, seq_id, kind, body)

    async def _arrived(self, run: _Run, seq_id: int, kind: str, body: bytes) -> None:
        """Let a logged call enter the scheduler, and those that waited for it."""
        if seq_id < run.next_seq:
            why = f"call {seq_id} came after call {run.next_seq - 1} had begun; make a new training client"
            await self._answer(run.record.model_id, seq_id, error_answer(why))
            return
        run.waiting[seq_id] = kind, body
        run.queued_bytes += len(body)
        while run.next_seq in run.waiting or run.next_seq in run.over:
            seq_id = run.next_seq
            run.next_seq += 1
            if seq_id in run.over:
                run.over.remove(seq_id)
                continue
            kind, body = run.waiting.pop(seq_id)
            try:
                self._enter(run, seq_id, kind, body)
            except TrainingError as error:
                run.queued_bytes -= len(body)
                await self._answer(run.record.model_id, seq_id, error_answer(str(error)))
                if seq_id == 0:
                    await self.forget(run.record.model_id)

    def _enter(self, run: _Run, seq_id: int, kind: str, body: bytes) -> None:
        """Check a call and give it to the scheduler. Raises TrainingError."""
        model_id = run.record.model_id
        lengths: tuple[int, ...] = ()
        forward_only = False
        if kind in _PASSES:
            message = read_pass(body)
            lengths = lengths_of_groups(message.lengths())
            forward_only = message.forward_only
            if not lengths:
                raise TrainingError("the call has no data; give at least one datum")
        self._steps.check(run.record, kind, body)
        if model_id not in self.scheduler.model_ids:
            if seq_id:
                raise TrainingError("this model was not created; look at the answer of create_model")
            self._admit(run)
        kinds = {"forward": "pass", "save_sampler": "save", "load": "load" if seq_id else "create"}
        self._calls[model_id, seq_id] = kind, body
        call = TrainingCall(model_id, seq_id, kinds.get(kind, kind), lengths, forward_only)
        self.scheduler.add(call)
        self.progress.entered(run.record, call)
        self._news.set()

    def _admit(self, run: _Run) -> None:
        try:
            owner = run.record.owner or run.record.session_id  # without API keys, each client has a share
            self.scheduler.admit(run.record.model_id, owner, self._price(run.record.config))
        except NoRoomError as error:
            raise TrainingError(str(error)) from None

    # -- answers ---------------------------------------------------------------------------------------------------

    async def answer(self, model_id: str, seq_id: int, timeout: float) -> CallAnswer | None:
        """The answer of a call. Waits for it up to ``timeout`` seconds; None if it has none yet. Raises KeyError for a
        call that was not logged."""
        answer = await self._read(model_id, seq_id)
        if answer is not None or timeout <= 0:
            return answer
        event = self._answered.setdefault(request_id(model_id, seq_id), asyncio.Event())
        if (answer := await self._read(model_id, seq_id)) is not None:  # it may have ended before the event was there
            return answer
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            return None
        return await self._read(model_id, seq_id)

    async def _read(self, model_id: str, seq_id: int) -> CallAnswer | None:
        """The answer of a call, which is dropped some time after it was first read; None if it has none yet. Raises
        KeyError for a call that was not logged, or whose session has ended."""
        call = await self.log(lambda log: log.call(model_id, seq_id))
        if call is None:
            raise KeyError(request_id(model_id, seq_id))
        if call.is_dropped:
            return error_answer("this result was retrieved long ago, or is too old, and is kept no longer")
        if call.answer is not None:
            self._retrieved.setdefault((model_id, seq_id), self.clock())
        return call.answer

    async def drop_results(self) -> None:
        """Drop results that clients have retrieved, and those that are too old."""
        limit = self.clock() - _RETRIEVED_SECONDS
        retrieved = [call for call, at in self._retrieved.items() if at < limit]
        before = self.wall_clock() - self.settings.result_seconds
        await self.log(lambda log: log.drop_results(retrieved, before))
        for call in retrieved:
            del self._retrieved[call]

    async def measure(self, num_sessions: int) -> None:
        """Note what the runs take of memory and disk."""
        stats = self.progress.stats
        stats.num_sessions = num_sessions
        stats.num_adapters = len(self.scheduler.model_ids)
        stats.adapter_bytes, stats.adapter_limit_bytes = self.scheduler.num_bytes, self.scheduler.memory
        stats.num_waiting = self.progress.num_waiting()
        stats.disk_bytes = await self.log(lambda log: log.num_bytes())
        stats.disk_limit_bytes = self.log.log.max_bytes

    def queue_state(self, model_id: str, seq_id: int) -> tuple[str, str]:
        """(state, reason) of a call without an answer, in the client's words."""
        run = self._runs.get(model_id)
        if self.trouble:
            return "paused_capacity", self.trouble
        if run is not None and seq_id in run.waiting:
            return "paused_capacity", f"call {run.next_seq} has not arrived"
        return "active", ""

    async def _answer(self, model_id: str, seq_id: int, answer: CallAnswer) -> None:
        now = self.wall_clock()
        await self.log(lambda log: log.finish([(model_id, seq_id, answer)], now=now))
        self.note(model_id, seq_id, failed=_category(answer))

    def note(self, model_id: str, seq_id: int, *, failed: str = "", loss: float | None = None) -> None:
        """Wake those that wait for the answer of a call. ``failed`` is the category of its error, and ``loss`` the sum
        of its losses."""
        self.progress.ended(model_id, seq_id, failed=failed, loss=loss)
        run = self._runs.get(model_id)
        known = self._calls.pop((model_id, seq_id), None)
        if run is not None and known is not None:
            run.queued_bytes -= len(known[1])
            run.last_done = max(run.last_done, seq_id)
        event = self._answered.pop(request_id(model_id, seq_id), None)
        if event is not None:
            event.set()

    # -- work ------------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Run calls until cancelled."""
        while True:
            self._news.clear()
            work = self.scheduler.next()
            if work is None:
                await self._news.wait()
                continue
            start = self.clock()
            self.progress.begins(work)
            try:
                await (self._pack(work) if isinstance(work, TrainingPack) else self._step(work))
            except (EngineDeadError, StorageError) as error:
                self.trouble = str(error)
                _log.error("training stops for now: %s", error)
                if isinstance(error, EngineDeadError):
                    await self._note_death(work)
                await self.again(work)
                continue
            self.scheduler.done(work, self.clock() - start)
            self.progress.done(work, self.clock() - start)
            await self._save_state(work)

    async def _note_death(self, work: TrainingPack | TrainingStep) -> None:
        """Fail calls with which the trainer's process has died several times: they may be the reason."""
        calls = [work.call] if isinstance(work, TrainingStep) else work.parts
        for model_id, seq_id in {(each.model_id, each.seq_id) for each in calls}:
            self._deaths[model_id, seq_id] += 1
            if self._deaths[model_id, seq_id] >= _MAX_DEATHS:
                del self._deaths[model_id, seq_id]
                why = "the server's trainer died several times while it computed this call"
                await self._answer(model_id, seq_id, error_answer(why, "server"))

    async def _pack(self, pack: TrainingPack) -> None:
        """Compute a pack, and log the answers of the calls that end with it."""
        start = self.clock()
        parts = [
            PartOrder(
                *(part.model_id, part.seq_id, part.first, part.count, part.is_last),
                body=b"" if part.first else self._calls[part.model_id, part.seq_id][1],
            )
            for part in pack.parts
        ]
        result = await self.compute.run(PackOrder(parts))
        self.progress.sliced(result.slice_seconds)
        if result.error:  # the pass itself failed, and what it has left in the trainer is unknown
            failed = error_answer(f"the server could not compute this call: {result.error}", "server")
            calls = {(part.model_id, part.seq_id) for part in pack.parts}
            now = self.wall_clock()
            await self.log(lambda log: log.finish([(*call, failed) for call in calls], now=now))
            for call in calls:
                self.note(*call, failed="server")
            raise EngineDeadError(result.error)
        answers = []
        for each in result.passes:
            answer = error_answer(each.error) if each.error else CallAnswer("proto", each.output)
            answers.append((each.model_id, each.seq_id, answer))
        now = self.wall_clock()
        await self.log(lambda log: log.finish(answers, now=now))
        ended = {(part.model_id, part.seq_id) for part in pack.parts if part.is_last}
        for each in result.passes:
            if (each.model_id, each.seq_id) not in ended:
                self.scheduler.cancel(each.model_id, each.seq_id)
            category = "user" if each.error else ""
            self.note(each.model_id, each.seq_id, failed=category, loss=None if category else each.loss)
        for part in pack.parts:
            if part.model_id in self._runs:
                share = part.num_tokens / pack.num_tokens
                self._runs[part.model_id].unsaved_seconds += share * (self.clock() - start)

    async def _step(self, step: TrainingStep) -> None:
        """Run a step and log its answer."""
        model_id, seq_id = step.call.model_id, step.call.seq_id
        kind, body = self._calls[model_id, seq_id]
        run = self._runs[model_id]
        try:
            await self._steps.run(run.record, seq_id, kind, body)
        except TrainingError as error:
            await self._answer(model_id, seq_id, error_answer(str(error)))
            if seq_id == 0:
                await self.forget(model_id)
            return
        if kind == "load":
            run.unsaved_seconds = 0.0
        self.note(model_id, seq_id)

    async def _save_state(self, work: TrainingPack | TrainingStep) -> None:
        """Save the state of a model whose step has ended, if computing it again would take long."""
        if not isinstance(work, TrainingStep) or work.call.kind != "optim_step":
            return
        run = self._runs.get(work.call.model_id)
        if run is not None and run.unsaved_seconds >= self.settings.state_seconds:
            run.unsaved_seconds = 0.0  # also if it cannot be saved: that would be as slow at each further step
            try:
                await self._steps.save_state(run.record.model_id, work.call.seq_id)
            except (EngineDeadError, StorageError, TrainingError) as error:
                _log.error("the state of %s was not saved: %s", run.record.model_id, error)

    # -- after a crash ---------------------------------------------------------------------------------------------

    async def again(self, work: TrainingPack | TrainingStep | None = None) -> None:
        """Begin anew after the trainer's process has died, and try until it is there again."""
        if work is not None:
            self.scheduler.done(work, work.seconds)
        pause = _FIRST_PAUSE
        while True:
            try:
                await self.restore()
            except (EngineDeadError, StorageError) as error:
                self.trouble = str(error)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
                continue
            self.trouble = ""
            self._is_restored.set()
            return

    async def restore(self) -> None:
        """Take up all runs of the log: load their newest states, and compute again what has followed."""
        async with self._gate:
            await self._restore_all()

    async def _restore_all(self) -> None:
        for model_id in list(self.scheduler.model_ids):
            await self.compute.run(DropOrder(model_id))
            self.scheduler.remove(model_id)
        self._calls.clear()
        self.progress.restarted()
        for record in await self.log(lambda log: log.models(ended=False)):
            calls = await self.log(lambda log, name=record.model_id: log.calls_after(name, -1))  # type: ignore[misc]
            run = self._runs[record.model_id] = _Run(record, heard_at=self.clock())
            try:
                await self._restore(run, calls)
            except TrainingError as error:
                _log.error("the training run %s cannot go on: %s", record.model_id, error)
                for call in calls:
                    if call.answer is None:
                        await self._answer(record.model_id, call.seq_id, error_answer(str(error), "server"))
                await self.forget(record.model_id)

    async def _restore(self, run: _Run, calls: Sequence[LoggedCall]) -> None:
        """Take up one run. Calls without an answer run in their turn."""
        record = run.record
        state = -1 if record.state_seq is None else record.state_seq
        created = any(call.seq_id == 0 and call.answer is not None and call.answer.form != "error" for call in calls)
        if created:
            self._admit(run)
            if record.state_seq is not None:
                directory = self.places.state(record.model_id, state)
                self._raise(await self.compute.run(LoadOrder(record.model_id, str(directory), optimizer=True)))
            else:
                self._raise(await self.compute.run(CreateOrder(record.model_id, record.config)))
        for call in calls:
            if call.answer is None:
                continue
            if call.seq_id == run.next_seq:
                run.next_seq += 1
            else:
                run.over.add(call.seq_id)
            if call.seq_id > state and call.answer.form != "error" and call.body is not None:
                await self._steps.repeat(record, call)
        for call in calls:
            if call.answer is None and call.body is not None:
                await self._arrived(run, call.seq_id, call.kind, call.body)

    @staticmethod
    def _raise(result: WorkResult) -> None:
        if result.error:
            raise TrainingError(result.error)

    # -- ends ------------------------------------------------------------------------------------------------------

    async def forget(self, model_id: str) -> None:
        """End a run: it leaves the memory, and calls that wait fail. Its checkpoints stay."""
        run = self._runs.pop(model_id, None)
        if run is None:
            return
        left = list(run.waiting)
        if model_id in self.scheduler.model_ids:
            left += self.scheduler.remove(model_id)
            await self.compute.run(DropOrder(model_id))
        for seq_id in left:
            await self._answer(model_id, seq_id, error_answer("the training run has ended; load its checkpoint"))
        await self.log(lambda log: log.end_model(model_id))
        self.places.forget_model(model_id)
        self.progress.forgot(model_id)

    async def end_gaps(self) -> None:
        """Fail calls that have waited too long for an earlier one, whose client is taken for dead."""
        limit = self.clock() - self.settings.gap_seconds
        for run in list(self._runs.values()):
            if run.waiting and run.heard_at <= limit:
                async with self._gate:
                    await self._end_gap(run)

    async def _end_gap(self, run: _Run) -> None:
        model_id = run.record.model_id
        last = max(run.waiting)
        missing = [each for each in range(run.next_seq, last) if each not in run.waiting and each not in run.over]
        why = f"call {missing[0]} did not arrive within {self.settings.gap_seconds:g} s, and later calls need it"
        # A call that comes later than that is another one than the one that is logged here, and is refused.
        await self.log(lambda log: [log.append(model_id, seq_id, "missing", b"") for seq_id in missing])
        for seq_id in (*missing, *run.waiting):
            await self._answer(model_id, seq_id, error_answer(why))
        run.queued_bytes -= sum(len(body) for _, body in run.waiting.values())
        run.waiting.clear()
        run.over.clear()
        run.next_seq = last + 1
