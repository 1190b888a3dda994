"""Records the events of a core as lines of JSON: steps, arrivals, joins, preemptions, ends, and owners of blocks.

Each line has only the changes since the previous line, so a steady step is one short line for any number of rows. Some
lines are snapshots, where a reader can begin. The live view page, recordings in files and simulated runs all use these
lines; docs/live-view.md describes the format. The lines contain the length of a prompt, never its text.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec

from chairlift.config import SchedulerConfig
from chairlift.core.kv_cache.eviction.turns import EndedTurn
from chairlift.core.request import Request, RequestStatus
from chairlift.core.scheduler.output import Chunk, SchedulerOutput
from chairlift.engine.step_log import StepRecord

if TYPE_CHECKING:
    from chairlift.engine.core import EngineCore

__all__ = ["FORMAT", "StepRecorder"]

FORMAT: Final = "chairlift-steps-1"
_PAST_STEPS: Final = 1024
_ENDED: Final = 4096
_KEY_BYTES: Final = 1 << 16
_KEY_SECONDS: Final = 30.0
_CACHE_SECONDS: Final = 1.0
_MOST_PAUSES: Final = 256
_log = logging.getLogger(__name__)
_encode: Final = msgspec.json.Encoder().encode
_Change = list[Any]


class StepRecorder:
    """Subscribes to the events of its core. :meth:`take` returns the new lines.

    The first lines are the steps in the core's log (with rows only), then a snapshot. Lines that wait to be taken use
    at most ``most_bytes`` bytes.
    """

    def __init__(self, core: EngineCore, *, most_bytes: int = 8 << 20) -> None:
        self._core = core
        self._most_bytes = most_bytes
        self._lines: list[bytes] = []
        self._num_bytes = self._since_key = self._key_size = 0
        self._key_at = core.clock.now()
        self._numbers: dict[str, int] = {}
        """Request id -> number that stands for the request in the lines. Numbers are not reused."""
        self._count = 0
        self._ended: deque[str] = deque()
        self._started: dict[str, float] = {}
        """Request id -> time at which the request first joined the batch, for unfinished requests."""
        self._changes: list[_Change] = []
        """Changes of the batch since the last line was written, or since the last step was scheduled."""
        self._flights: dict[int, list[_Change]] = {}
        """Index of a step in flight -> changes recorded before the step was scheduled; oldest step first."""
        self._decodes: tuple[tuple[str, int], ...] = ()
        self._status: tuple[Any, ...] = ()
        self._load = 0
        """Number of the newest reading of the expert load that was written to a line."""
        self._images: tuple[int, ...] = core.preparers.images.state()
        """State of the images in the newest line that has it."""
        self._cache = self._cache_state()
        """State of the prefix cache in the newest line that has it."""
        self._cache_at = -_CACHE_SECONDS
        self._held: set[str] = set()
        self._leaving: dict[str, int] = {}
        """Id of a request that ended while steps were in flight -> index of the newest of these steps. Later lines
        still mention such a request."""
        self._run = f"{time.time():.3f}"
        core.kv.tables.journal = []
        self._tell_past()
        self._write_key()
        core.events.subscribe("the record of steps", self)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the lines that wait to be taken."""
        return self._num_bytes

    def close(self) -> None:
        """Stop recording."""
        self._core.events.unsubscribe("the record of steps")
        self._core.kv.tables.journal = None

    def missed(self) -> None:
        """Stop recording after an error, because later lines would be wrong."""
        _log.error("the record of steps has ended; open the live view again")
        self.close()

    def take(self) -> bytes:
        """Lines recorded since the last call. If they contain a snapshot, it comes first, and a new reader may begin
        there."""
        self._end_idle()
        lines = self._lines
        self._lines = []
        self._num_bytes = 0
        now = self._core.clock.now()
        enough = max(_KEY_BYTES, 4 * self._key_size)
        if lines and (self._since_key >= enough or (self._since_key and now >= self._key_at + _KEY_SECONDS)):
            self._write_key()  # for the next call
        return b"\n".join(lines)

    # -- what happens ------------------------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """Record that the scheduler has accepted the request."""
        name = request.request_id
        prompt = request.num_prompt_tokens
        max_tokens = request.max_total_tokens - prompt
        service_class = request.service.service_class
        arrived = round(request.arrival_time, 6)
        self._changes.append(["add", self._number(name), arrived, name, prompt, max_tokens, service_class])

    def scheduled(self, out: SchedulerOutput, now: float) -> None:
        """Record that a step was scheduled. The step may be empty."""
        requests = self._core.scheduler.requests
        now = round(now, 6)
        joins = {row.request_id for row in out.joined}
        for name, by in out.preempted_for.items():
            request = requests.get(name)
            if request is not None:
                how = "tail" if request.slot >= 0 and name not in joins else "recompute"
                how = "swap" if request.status is RequestStatus.SWAPPED else how
                self._changes.append(["preempt", self._number(name), now, how, self._numbers.get(by, -1)])
        self._drain()
        if not out.num_tokens:
            return
        for row in out.joined:
            request = requests[row.request_id]
            number = self._number(row.request_id)
            self._started.setdefault(row.request_id, now)
            again = request.was_preempted
            fetched = [] if again else [request.num_host_tokens, request.num_disk_tokens]
            self._changes.append(
                ["join", number, now, row.slot, row.num_computed_tokens, again, *(fetched if any(fetched) else ())]
            )
            if (resumed := request.resumed) is not None and not again:
                earlier = self._numbers.get(resumed.sequence_id, -1)
                self._changes.append(["resume", number, now, earlier, round(resumed.gap, 6), resumed.cache.value])
        if out.num_held > len(self._held):
            done = {name for name, _ in out.decode_rows if requests[name].finish_reason is not None} - self._held
            self._held |= done
            self._changes += [["hold", self._numbers[name], now] for name in sorted(done)]
        if self._changes:
            self._flights[out.step], self._changes = self._changes, []

    def paused(self, turn: EndedTurn) -> None:
        """Record that the answer of a request that has ended calls tools."""
        self._changes.append(["pause", *self._pause(turn)])

    def ended(self, request: Request, now: float, causes: dict[str, float], preempted_by: list[str]) -> None:
        """Record that the request has ended."""
        self._drain()
        name = request.request_id
        self._changes.append(
            [
                *("end", self._number(name), round(now, 6), request.finish_reason, request.num_output_tokens),
                *(request.num_preemptions, {cause: round(seconds, 6) for cause, seconds in causes.items()}),
                [self._numbers.get(by, by) for by in preempted_by],
            ]
        )
        self._held.discard(name)
        if self._core.num_in_flight:
            self._leaving[name] = self._core.scheduler.step
        self._started.pop(name, None)
        self._ended.append(name)
        while len(self._ended) > _ENDED:
            old = self._ended.popleft()
            if old not in self._core.scheduler.requests:
                self._numbers.pop(old, None)

    def landed(self, record: StepRecord) -> None:
        """Record that the step's tokens, or its error, are known."""
        line = self._step_line(record, self._flights.pop(record.step, []))
        self._note_images(line)
        self._note_cache(line)
        self._write(line)
        if self._leaving:
            self._leaving = {name: step for name, step in self._leaving.items() if step >= record.step}
        # The buffer is over its limit, so no reader takes the lines: drop them, and write a new snapshot, with which
        # the next reader begins.
        if self._num_bytes > self._most_bytes + self._key_size:
            self._lines = []
            self._num_bytes = 0
            self._write_key()

    # -- lines -------------------------------------------------------------------------------------------------------

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._count
            self._count += 1
        return number

    def _drain(self) -> None:
        """Record the changes of block tables from the cache's journal."""
        kv = self._core.kv
        if not kv.tables.journal:
            return
        for name, group, first, blocks, given_back in kv.tables.journal:
            number = self._numbers.get(name)
            if number is not None:
                nodes = kv.pools[group].nodes
                known = [block for block in given_back if nodes[block] is not None]
                self._changes.append(["table", number, group, first, blocks, known])
        kv.tables.journal = []

    def _step_line(self, record: StepRecord, changes: list[_Change]) -> dict[str, Any]:
        line: dict[str, Any] = {"step": record.step, "t": [round(record.start, 6), round(record.end, 6)]}
        if changes:
            line["do"] = changes
        decodes = record.decodes
        if not decodes and self._decodes:
            line["rest"] = True  # the decode rows keep their slots, but are not in this step
        elif decodes is not self._decodes:
            before = set(self._decodes)
            now = set(decodes)
            line["off"] = [slot for name, slot in self._decodes if (name, slot) not in now]
            line["on"] = [(slot, self._number(name)) for name, slot in decodes if (name, slot) not in before]
            self._decodes = decodes
        if decodes:
            line["ctx"] = record.context_tokens
        if record.shared_tokens:
            line["shared"] = record.shared_tokens
        if record.adapter_bytes:
            line["adapters"] = record.adapter_bytes
        if record.chunks:
            line["chunks"] = [
                (*self._place(name, chunk), record.accepted.get(name, min(1, chunk.samples)), chunk.why)
                for name, chunk in record.chunks
            ]
        blocks = record.blocks
        status = (record.num_waiting, record.held_up_by, *dataclasses.astuple(blocks))
        if status != self._status:
            line["state"] = self._status = status
        load = self._core.expert_load
        if load is not None and load.number != self._load:
            line["experts"], self._load = load.loads(), load.number
        return line

    def _idle_status(self) -> tuple[Any, ...]:
        """The field ``state`` of a line while no step runs."""
        batch = self._core.scheduler.batch
        why = "" if batch.waiting else batch.unready_for
        return batch.num_waiting, why, *dataclasses.astuple(self._core.kv.counts())

    def _pause(self, turn: EndedTurn) -> list[Any]:
        """What the lines say of a pause: request, its end, tools, tokens of the conversation, end of the lease (0: no
        lease)."""
        number, ended, until = self._number(turn.request_id), round(turn.ended_at, 6), round(turn.until, 6)
        return [number, ended, turn.tools, turn.num_tokens, until]

    def _note_cache(self, line: dict[str, Any], *, at_once: bool = False) -> bool:
        """Add the state of the prefix cache to a line if it has changed, at most once a second or ``at_once``. Returns
        whether it was added."""
        now = self._core.clock.now()
        if now < self._cache_at + _CACHE_SECONDS and not at_once:
            return False
        self._cache_at = now
        state = self._cache_state()
        if state == self._cache:
            return False
        line["cache"] = self._cache = state
        return True

    def _cache_state(self) -> tuple[float, ...]:
        """(unused blocks with a lease, their maximum, reused blocks, seconds for which they had been unused, evicted
        blocks, seconds for which they had been unused)."""
        kv = self._core.kv
        leases = kv.eviction.leases()
        leased = (0, 0) if leases is None else (sum(leases.num_by_level.values()), leases.budget)
        times = [pool.times for pool in kv.pools]
        reused = sum(sum(each.reuse_gap.counts) for each in times), sum(each.reuse_gap.seconds for each in times)
        evicted = sum(sum(each.idle.counts) for each in times), sum(each.idle.seconds for each in times)
        return *leased, reused[0], round(reused[1], 3), evicted[0], round(evicted[1], 3)

    def _note_images(self, line: dict[str, Any]) -> bool:
        """Add the state of the images to a line if it has changed. Returns whether it has."""
        now = self._core.preparers.images.state()
        if now == self._images:
            return False
        line["images"] = self._images = now
        return True

    def _place(self, name: str, chunk: Chunk) -> tuple[int, int, int, int]:
        return self._number(name), chunk.slot, chunk.start, chunk.num_tokens

    def _write(self, line: dict[str, Any]) -> None:
        data = _encode(line)
        self._lines.append(data)
        self._num_bytes += len(data) + 1
        self._since_key += len(data) + 1

    def _end_idle(self) -> None:
        """If no step is in flight, write the changes since the last step as a separate line."""
        self._drain()
        line: dict[str, Any] = {"at": round(self._core.clock.now(), 6)}
        if self._core.num_in_flight:
            return
        has_images, has_cache = self._note_images(line), self._note_cache(line, at_once=True)
        if has_images or has_cache or self._changes:
            changes = self._changes
            self._changes = []
            status = self._idle_status()
            if changes:
                line["do"] = changes
            if status != self._status:
                line["state"] = self._status = status
            self._write(line)

    def _tell_past(self) -> None:
        records = list(self._core.step_log)[-_PAST_STEPS:]
        self._write({"key": self._about() | {"after": records[0].step - 1 if records else 0, "past": True}})
        for record in records:
            names = [row[0] for row in (*record.decodes, *record.chunks)] if record.decodes is not self._decodes else ()
            names = names or [name for name, _ in record.chunks]
            changes = [["seen", self._number(name), name] for name in names if name not in self._numbers]
            changes += [["preempt", self._number(name), round(record.start, 6), "", -1] for name in record.preempted]
            self._write(self._step_line(record, changes))
            ended = [["end", self._number(name), round(record.end, 6), "", 0, 0, {}, []] for name in record.finished]
            if ended:
                self._write({"at": round(record.end, 6), "do": ended})

    def _about(self) -> dict[str, Any]:
        core = self._core
        scheduler = self._core.scheduler
        return {
            "format": FORMAT,
            "run": self._run,
            "unix": round(time.time() - core.clock.now(), 3),
            "max_num_seqs": scheduler.batch.max_running,
            "max_num_batched_tokens": core.config.max_num_batched_tokens,
            "max_model_len": scheduler.prompts.max_model_len,
            "block_size": core.kv.block_size,
            "block_bytes": sum(core.executor.block_bytes),
            "reads_shared_once": scheduler.batch.reads_shared_once,
            "pools": [pool.num_blocks for pool in core.kv.pools],
            "settings": _settings(core.config),
        }

    def _write_key(self) -> None:
        """Write a snapshot. Steps in flight were scheduled before it, but their lines come after it; applying their
        changes twice does no harm."""
        core = self._core
        requests = self._core.scheduler.requests
        self._drain()
        if self._changes and not core.num_in_flight:
            self._end_idle()
        cached = [
            [block for block, node in enumerate(pool.nodes) if node is not None and not pool.ref_counts[block]]
            for pool in core.kv.pools
        ]
        key = self._about() | {
            "after": core.step_log[-1].step if len(core.step_log) else 0,
            "requests": [self._described(request) for request in requests.values()],
            "on": [(slot, self._number(name)) for name, slot in self._decodes],
            "state": self._status or self._idle_status(),
            "cached": cached,
            "cache": self._cache,
        }
        if open_turns := core.kv.eviction.turns.paused[-_MOST_PAUSES:]:
            key["pauses"] = [[*self._pause(turn), turn.request_id] for turn in open_turns]
        if (
            images := core.preparers.images.state()
        ):  # older readers skip the snapshot, so the next line may repeat this state
            key |= {"images": images, "max_image_bytes": core.preparers.images.limit or 0}
        size = self._num_bytes
        self._key_at = core.clock.now()
        self._write({"key": key})
        if seen := [["seen", self._number(name), name] for name in self._leaving]:
            self._write({"at": round(self._key_at, 6), "do": seen})
        self._key_size = max(0, self._num_bytes - size)
        self._since_key = 0

    def _described(self, request: Request) -> _Change:
        started = self._started.get(request.request_id)
        if started is None and (request.slot >= 0 or request.num_preemptions):
            started = -1.0  # it started before the recording
        return [
            *(self._number(request.request_id), request.request_id, round(request.arrival_time, 6)),
            *(request.num_prompt_tokens, request.max_total_tokens - request.num_prompt_tokens),
            *(request.service.service_class, request.status.value, request.slot, started),
            *(request.num_cached_tokens, request.num_output_tokens, request.num_preemptions, request.block_ids),
        ]


def _settings(config: SchedulerConfig) -> dict[str, Any]:
    """Name of a setting -> its value, for settings that differ from their default and have a plain value."""
    values = dataclasses.asdict(config)
    usual = dataclasses.asdict(SchedulerConfig())
    return {
        name: value
        for name, value in values.items()
        if value != usual[name] and isinstance(value, (str, int, float, bool))
    }
