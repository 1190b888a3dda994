"""Moves running requests, with their KV, from a replica that is drained (the source) to others (the destinations).

The request decodes on while its full blocks go through the files of ``kv_store``: the source writes them, and the
destination reads them into its prefix cache. Then the source pauses the request between two steps, and the destination
gets it with all its tokens, and computes the few that no full block has. The destination owns the request from its
first token on. Until then the source keeps its row and its blocks, and goes on if anything fails. Each attempt has
another generation number, which is a part of the request's id at the destination, so late results of an earlier attempt
are not results of the request.

A move that fails leaves the request where it is, and a process that ends leaves its requests to be computed again from
their tokens (see :meth:`~chairlift.fleet.jobs.Jobs.move`). The stages are those of Llumnix (Sun et al., 2024), with
files instead of a connection between the engines.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from chairlift.base.outputs import FinishReason
from chairlift.engine.core_outputs import CoreOutputs, MoveReport, renamed
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_moves import MoveOrder
from chairlift.errors import RequestError
from chairlift.fleet.door import Door
from chairlift.fleet.job import FleetJob
from chairlift.fleet.member import FleetEvents, Member
from chairlift.fleet.routing import Replica

__all__ = ["Moves"]

_log = logging.getLogger(__name__)

_MOST_TRIES: Final = 3
_MOST_ROUNDS: Final = 8
"""Number of times that a destination fetches blocks while the source completes others."""
_NEAR_SECONDS: Final = 1.0
"""Seconds before the end of a drain at which requests move although not all of their blocks are written."""
_SECONDS: Final = {"fetch": 30.0, "pause": 10.0, "switch": 5.0}
"""Stage -> seconds after which a move has failed."""


class _Stage(enum.StrEnum):
    WRITE = "write"
    FETCH = "fetch"
    PAUSE = "pause"
    SWITCH = "switch"


@dataclasses.dataclass(slots=True)
class _Move:
    """A request on its way."""

    job: FleetJob
    source: Member
    since: float
    """Time at which the stage began."""
    stage: _Stage = _Stage.WRITE
    written: int = -1
    """Number of leading tokens whose blocks are in the files; -1: not known yet."""
    places: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    """Where these blocks are, as in the source's report."""
    destination: Member | None = None
    wire: str = ""
    """Id of the request at the destination."""
    asked: int = 0
    """Value of ``written`` when the destination was last asked to fetch."""
    fetched: int = -1
    """Number of leading tokens whose KV the destination has; -1: it is fetching."""
    num_rounds: int = 0


class Moves:
    """The moves of a fleet. Its caller reports what happens, and calls :meth:`advance` from time to time.

    ``jobs`` are the fleet's requests by key. ``movable`` says whether an answer may continue on another replica. With
    ``enabled`` False nothing moves.
    """

    def __init__(
        self,
        jobs: Mapping[str, FleetJob],
        events: FleetEvents,
        members: Sequence[Member],
        *,
        door: Door,
        movable: Callable[[], bool],
        now: Callable[[], float],
        enabled: bool,
    ) -> None:
        self._jobs = jobs
        self._events = events
        self._members = members
        self._door = door
        self._movable = movable
        self._now = now
        self._enabled = enabled
        self._moves: dict[str, _Move] = {}
        """Key of a job -> its move."""
        self._drained: dict[int, float] = {}
        """Index of each replica whose requests are to move -> time until which they may."""
        self._stay: set[str] = set()
        """Keys of jobs that cannot move."""

    # -- the drain of a replica ------------------------------------------------------------------------------------

    def begin(self, member: Member, patience: float | None) -> None:
        """Move the requests of a replica that accepts none, for at most ``patience`` seconds. None: without a limit."""
        if self._enabled:
            self._drained[member.view.index] = math.inf if patience is None else self._now() + patience
            self.advance()

    def end(self, member: Member) -> None:
        """Begin no further moves of this replica's requests. Those that another replica has already got go on."""
        self._drained.pop(member.view.index, None)
        for move in self._of(source=member):
            if move.stage is not _Stage.SWITCH:
                self._cancel(move)

    def advance(self) -> None:
        """Begin the moves that can begin, and give up those that take too long."""
        now = self._now()
        for move in list(self._moves.values()):
            if now - move.since > _SECONDS.get(move.stage, math.inf):
                self._fail(move, f"it took longer than {_SECONDS[move.stage]:.0f} s")
        for index, until in list(self._drained.items()):
            member = self._members[index]
            if member.alive and member.core is not None and self._movable():
                self._advance(member, now > until - _NEAR_SECONDS)

    def _advance(self, member: Member, is_near: bool) -> None:
        """Let all requests of a replica write, and one of them move."""
        for key in sorted(member.view.started):
            job = self._jobs.get(key)
            if job is not None and key not in self._moves and key not in self._stay:
                self._begin(job, member)
        moves = self._of(source=member)
        if any(each.stage is not _Stage.WRITE for each in moves):
            return
        for move in moves:
            missing = self._num_known(move.job) - move.written
            if is_near or (move.written >= 0 and missing <= 2 * self._block_size(member)):
                if not self._place(move):
                    continue
                if is_near:
                    self._pause(move)
                else:
                    self._fetch(move)
                return

    def _begin(self, job: FleetJob, member: Member) -> None:
        params = job.prepared.params
        if member.core is None:
            return
        if params.n > 1 or params.prompt_logprobs is not None or job.num_failed_moves >= _MOST_TRIES:
            self._stay.add(job.key)
            return
        self._moves[job.key] = _Move(job, member, self._now())
        member.core.move(MoveOrder(job.wire, "write"))

    def _of(self, *, source: Member | None = None, destination: Member | None = None) -> list[_Move]:
        moves = list(self._moves.values())
        if source is not None:
            return [each for each in moves if each.source is source]
        return [each for each in moves if each.destination is destination]

    def _num_known(self, job: FleetJob) -> int:
        return len(job.prepared.prompt_token_ids) + sum(map(len, self._events.delivered(job.prepared.request_id)))

    @staticmethod
    def _block_size(member: Member) -> int:
        return 1 if member.info is None else member.info.block_size

    # -- the stages ------------------------------------------------------------------------------------------------

    def reported(self, member: Member, report: MoveReport) -> None:
        """Handle a report of a replica, after the tokens that came with it."""
        for move in list(self._moves.values()):
            if report.stage == "fetch":
                concerned = move.wire == report.sequence_id and move.destination is member
            else:
                concerned = move.job.wire == report.sequence_id and move.source is member
            if concerned:
                self._take(move, report)

    def _take(self, move: _Move, report: MoveReport) -> None:
        if report.failure:
            if report.stage != "pause" or (move.stage is _Stage.PAUSE and report.generation == move.job.generation):
                self._stay.update({move.job.key} if report.stage == "write" else ())
                self._fail(move, report.failure)
        elif report.stage == "write":
            move.written = report.num_tokens
            move.places = report.places
            if move.stage is _Stage.FETCH and move.fetched >= 0:
                self._go_on(move)
        elif report.stage == "fetch" and move.stage is _Stage.FETCH and move.fetched < 0:
            if report.num_tokens < move.asked:
                self._fail(move, f"the destination has {report.num_tokens} of {move.asked} tokens")
                return
            move.fetched = report.num_tokens
            self._go_on(move)
        elif report.stage == "pause" and move.stage is _Stage.PAUSE and report.generation == move.job.generation:
            self._switch(move)

    def _place(self, move: _Move) -> bool:
        """Choose the destination. Returns False if no replica has room."""
        needed = self._num_known(move.job)
        view = self._door.place_for(move.job.key, move.job.version, lambda each: self._fits(each, needed))
        if view is None:
            return False
        move.destination = self._members[view.index]
        move.job.generation += 1
        move.wire = f"{move.job.key}~{move.job.generation}"
        return True

    def _fits(self, view: Replica, num_tokens: int) -> bool:
        """Whether a replica has blocks that are not in use for so many tokens."""
        member = self._members[view.index]
        stats = member.stats
        unused = stats.free_blocks + stats.cached_blocks
        if member.core is None or member.info is None:
            return False
        return unused * member.info.pool_tokens >= num_tokens * max(1, stats.used_blocks + unused)

    def _fetch(self, move: _Move) -> None:
        if move.destination is None or move.destination.core is None:
            return
        move.stage = _Stage.FETCH
        move.since = self._now()
        move.asked = move.written
        move.fetched = -1
        move.num_rounds += 1
        request = dataclasses.replace(self._as_known(move), image_tiles=())  # the keys need no images
        move.destination.core.move(MoveOrder(move.wire, "fetch", request, move.places))

    def _as_known(self, move: _Move) -> PreparedRequest:
        """The request as the destination gets it: with the tokens that are known now."""
        (known,) = self._events.delivered(move.job.prepared.request_id)
        return dataclasses.replace(move.job.prepared, request_id=move.wire, answer_token_ids=known)

    def _go_on(self, move: _Move) -> None:
        """Pause the request if the destination has nearly all of it. Otherwise it fetches what the source has completed
        meanwhile, or waits for that."""
        missing = self._num_known(move.job) - move.fetched
        if missing <= self._block_size(move.source) or move.num_rounds >= _MOST_ROUNDS:
            self._pause(move)
        elif move.written > move.fetched:
            self._fetch(move)

    def _pause(self, move: _Move) -> None:
        if move.source.core is not None:
            move.stage = _Stage.PAUSE
            move.since = self._now()
            move.source.core.move(MoveOrder(move.job.wire, "pause", generation=move.job.generation))

    def _switch(self, move: _Move) -> None:
        """Give the paused request to the destination."""
        member = move.destination
        if member is None or member.core is None or not member.view.accepting:
            self._fail(move, "the destination accepts no requests")
            return
        request = self._as_known(move)
        try:
            member.core.add(request)
        except RequestError as error:  # the request cannot be encoded as a message
            self._fail(move, str(error))
            return
        move.stage = _Stage.SWITCH
        move.since = self._now()
        member.guests[move.wire] = move.job.key
        member.view.sent(move.wire, max(1, self._num_known(move.job) - max(0, move.fetched)), ())
        member.num_sent += 1
        if member.busy_since is None:
            member.busy_since = self._now()

    # -- the ends --------------------------------------------------------------------------------------------------

    def arrived(self, member: Member, outputs: CoreOutputs) -> CoreOutputs:
        """Results of a replica's step under the ids of the fleet, without those of requests that the replica does not
        own. A first result of a destination makes it the owner."""
        if not member.guests and not member.former:
            return outputs
        ended = {each.sequence_id: each.finish_reason for each in outputs.finished}
        for move in self._of(destination=member):
            if move.stage is not _Stage.SWITCH:
                continue
            reason = ended.get(move.wire)
            if reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                self._fail(move, f"the destination ended it: {reason}")
            elif reason is not None or move.wire in outputs.sequence_ids:
                self._own(move)
        names: dict[str, str | None] = dict.fromkeys(member.former)
        for wire, key in member.guests.items():
            job = self._jobs.get(key)
            names[wire] = key if job is not None and job.wire == wire and job.member is member else None
        member.former -= ended.keys()
        return renamed(outputs, names)

    def _own(self, move: _Move) -> None:
        """Make the destination the owner, and let the source forget the request."""
        job, member, source = move.job, move.destination, move.source
        if member is None:
            return
        del self._moves[job.key]
        before = job.wire
        job.wire = move.wire
        job.member = member
        member.view.ended(move.wire)
        self._door.moved(job.key, member.view)
        source.guests.pop(before, None)
        if source.core is not None:
            source.former.add(before)
            source.core.abort([before])
        self._events.on_moved("kv")
        if not source.num_requests:
            source.quiet.set()

    def _cancel(self, move: _Move) -> None:
        """End a move. The source goes on with the request."""
        del self._moves[move.job.key]
        self._withdraw(move)
        if move.stage in (_Stage.PAUSE, _Stage.SWITCH) and move.source.core is not None:
            move.source.core.move(MoveOrder(move.job.wire, "resume"))

    def _withdraw(self, move: _Move) -> None:
        """Take the request away from the destination."""
        member = move.destination
        if member is None or move.stage is not _Stage.SWITCH:
            return
        member.view.ended(move.wire)
        del member.guests[move.wire]
        if member.core is not None:
            member.former.add(move.wire)
            member.core.abort([move.wire])

    def _fail(self, move: _Move, why: str) -> None:
        job = move.job
        _log.info("request %s stays at replica %d: %s", job.key, move.source.view.index, why)
        job.num_failed_moves += 1
        self._cancel(move)
        self._events.on_moved("failed")

    def refused(self, wire: str) -> bool:
        """Note that a replica has refused a request. Returns whether the request was one that moves there."""
        move = next((each for each in self._moves.values() if each.wire == wire), None)
        if move is not None:
            self._fail(move, "the destination refused it")
        return move is not None

    def ended(self, job: FleetJob) -> None:
        """Note that a request has ended."""
        self._stay.discard(job.key)
        if job.member is not None:
            job.member.guests.pop(job.wire, None)
        move = self._moves.pop(job.key, None)
        if move is not None:
            self._withdraw(move)

    def lost(self, member: Member) -> None:
        """Note that the process of a replica has died, before its requests are taken away from it."""
        for move in self._of(destination=member):
            self._fail(move, "the destination died")
        for move in self._of(source=member):
            if move.stage is _Stage.SWITCH:
                self._own(move)
            else:
                self._cancel(move)
        member.guests.clear()
        member.former.clear()

    def weights_changed(self, member: Member) -> None:
        """Give up the moves from and to a replica that computes with other weights from now on."""
        for move in [*self._of(source=member), *self._of(destination=member)]:
            if self._moves.get(move.job.key) is move:
                self._fail(move, "the weights were replaced")
