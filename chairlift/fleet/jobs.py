"""The requests of a fleet that have not ended: in the queue (the door), at a replica, or on the way to another one."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from chairlift.base.outputs import FinishReason
from chairlift.config import EngineConfig
from chairlift.core.request import Request
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.process.messages import Refused, Step
from chairlift.engine.process.process_client import RemoteCore
from chairlift.errors import RequestError
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.job import FleetJob
from chairlift.fleet.member import FleetEvents, Member
from chairlift.fleet.moves import Moves
from chairlift.fleet.prompt_keys import PromptKeys
from chairlift.fleet.routing import MeasuredPace
from chairlift.metrics.stats import merge_stats

__all__ = ["Jobs"]

_log = logging.getLogger(__name__)
_MOST_ENDED: Final = 4096
"""Number of ended requests for which it is known which replica had them."""


class Jobs:
    """The requests of a fleet that have not ended. Sends them from the ``door`` to ``members``, passes their results to
    ``events``, and moves them when a replica dies.

    ``keys`` makes the prefix keys of requests, ``pace`` learns from the steps, ``forecast`` describes the queue, and
    ``now`` is the fleet's clock.
    """

    def __init__(
        self,
        config: EngineConfig,
        events: FleetEvents,
        members: Sequence[Member],
        *,
        door: Door,
        keys: PromptKeys,
        pace: MeasuredPace,
        forecast: DoorForecast,
        now: Callable[[], float],
    ) -> None:
        self.movable = False
        """Whether an answer may continue on another replica: all replicas of a weight version compute the same bits."""
        self._keys = keys
        self._events = events
        self._members = members
        self._door = door
        self._pace = pace
        self._forecast = forecast
        self._now = now
        self._jobs: dict[str, FleetJob] = {}
        """Id of a request -> the request, until it has ended."""
        self._answers: dict[str, FleetJob] = {}
        """Id of an answer that has not ended -> the request that it belongs to."""
        self._any_died = False
        self._ended_at: OrderedDict[str, tuple[Member, str]] = OrderedDict()
        """Id of a request that has ended -> (replica that had it, its id there), for the newest requests."""
        self.moves = Moves(
            self._jobs,
            events,
            members,
            door=door,
            movable=lambda: self.movable,
            now=now,
            enabled=config.cache.kv_store is not None and config.scheduler.batching != "static",
        )

    # -- a request -------------------------------------------------------------------------------------------------

    def add(self, request: PreparedRequest) -> None:
        """Queue a request. Raises RequestError if it cannot be encoded as a message."""
        job = FleetJob(request, request.sequence_ids[0], set(request.sequence_ids), request.sequence_ids[0])
        for name in request.sequence_ids:
            self._answers[name] = job
        self._jobs[job.key] = job
        self._queue(job)
        error = self._send().get(job.key)
        if error is not None:
            raise error

    def leave(self, sequence_ids: Sequence[str], tell: Callable[[RemoteCore, list[str]], object]) -> None:
        """End answers, because their caller has left or a stop string was found. ``tell`` tells it to a replica."""
        names_by_replica: dict[int, list[str]] = {}
        for name in sequence_ids:
            job = self._answers.get(name)
            if job is not None and job.member is not None:
                names_by_replica.setdefault(job.member.view.index, []).append(job.wire if name == job.key else name)
            self._ended(name)
        for index, names in names_by_replica.items():
            core = self._members[index].core
            if core is not None:
                tell(core, names)
        self._send()

    def paused(self, sequence_id: str, tools: Sequence[str]) -> None:
        """Tell the replica that had a request that its answer calls tools. Ignores unknown requests."""
        member, name = self._ended_at.get(sequence_id, (None, ""))
        if member is not None and member.core is not None:
            member.core.paused(name, tools)

    def refused(self, refused: Refused) -> None:
        if self.moves.refused(refused.request_id):
            return
        job = self._answers.get(refused.request_id) or self._answers.get(f"{refused.request_id}#0")
        if job is not None:
            self._forget(job)
        self._events.on_refused(refused)
        self._send()

    def _queue(self, job: FleetJob) -> None:
        """Add a request to the queue of the router (the door)."""
        prepared = job.prepared
        job.member = None
        version = job.version if prepared.answer_token_ids else None
        self._door.add(prepared.make_sequences()[0], self._keys.of(prepared), self._now(), version)

    def _ended(self, name: str) -> None:
        """Record that an answer has ended. Ignores unknown answers."""
        job = self._answers.pop(name, None)
        if job is None:
            return
        job.left.discard(name)
        if name == job.key and job.member is not None:
            self._door.begun(name)  # the prompt is computed
        if not job.left:
            self._forget(job)

    def _forget(self, job: FleetJob) -> None:
        """Remove a request that has ended."""
        self.moves.ended(job)
        del self._jobs[job.key]
        if job.member is not None:
            self._ended_at[job.key] = job.member, job.wire
            if len(self._ended_at) > _MOST_ENDED:
                self._ended_at.popitem(last=False)
        for name in job.left:
            del self._answers[name]
        answers = self._events.delivered(job.prepared.request_id)
        self._door.ended(job.key, sum(map(len, answers)))
        if job.member is not None and not job.member.num_requests:
            job.member.quiet.set()

    # -- sending and results ---------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send as many waiting requests as the replicas have room for. A request that cannot be sent ends with an
        error."""
        for name, error in self._send().items():
            self._events.on_refused(Refused(name.partition("#")[0], False, str(error)))

    def _send(self) -> dict[str, RequestError]:
        """Send as many waiting requests as the replicas have room for. Returns request id -> error, for requests that
        could not be sent."""
        failed: dict[str, RequestError] = {}
        for request, view in self._door.send(self._now()):
            member = self._members[view.index]
            job = self._jobs[request.request_id]
            if member.core is None:
                continue
            if member.busy_since is None:
                member.busy_since = self._now()
            try:
                member.core.add(job.prepared)
            except RequestError as error:  # the request cannot be encoded as a message
                failed[job.key] = error
                self._forget(job)
                continue
            job.member = member
            job.wire = job.key
            member.num_sent += 1
            missing = [name for name in job.prepared.sequence_ids if name not in job.left]
            if missing:
                member.core.abort(missing)
        return failed

    def stepped(self, member: Member, step: Step) -> None:
        """Handle the results of a step of a replica."""
        for news in step.outputs.stored:  # the process may report them before the fleet uses it
            member.view.store_changed(news.added, news.removed, news.token_seconds)
        if not member.alive:
            return
        outputs = self.moves.arrived(member, step.outputs)
        now = self._now()
        view = member.view
        if view.unstarted:
            fresh = view.unstarted.keys() & set(outputs.sequence_ids)
            for name in [each for each in view.unstarted if each in fresh]:
                self._door.begun(name)
                self._computed_by(self._jobs[name], view.version)
                self._forecast.started(now)
        for progress in outputs.progress:
            self._door.progressed(progress.sequence_id, progress.num_computed)
        if member.busy_since is not None:
            self._pace.stepped(step.stats.step_tokens, now - member.busy_since)
        member.stats = step.stats
        if step.forecast is not None:  # clocks of other machines differ
            late = now - step.forecast.made_at
            member.loading = {name: when + late for name, when in step.forecast.loading.items()}
        for ended in outputs.finished:
            self._ended(ended.sequence_id)
        member.busy_since = now if member.num_requests else None
        self._tell(outputs, step.stats.step_tokens, view.index)
        for report in outputs.moves:
            self.moves.reported(member, report)
        self.moves.advance()
        self._send()

    def _tell(self, outputs: CoreOutputs, num_tokens: int = 0, replica: int | None = None) -> None:
        """Pass the results of a step of a replica to the receiver of events, with the statistics of the whole fleet."""
        known = [each.stats for each in self._members if each.wanted or each.alive]
        if self._any_died:
            known += [each.dead_stats for each in self._members]
        stats = known[0]  # not copied, which would take long: the receiver may change it, and it is not sent again
        if len(known) > 1 or stats.step_tokens != num_tokens:
            stats = merge_stats(known)
            stats.step_tokens = num_tokens
        loading = {name: when for each in self._members for name, when in each.loading.items()}
        self._events.on_step(Step(outputs, stats, self._forecast.make(self._door, self._now(), loading)), replica)

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights_changed(self, member: Member, version: int) -> None:
        """Note that all later tokens of the requests of a replica come from ``version`` of the weights."""
        self.moves.weights_changed(member)
        for job in self._jobs.values():
            if job.member is member:
                self._computed_by(job, version)
        self.end_stranded()

    def end_stranded(self) -> None:
        """End requests that no replica can continue, because no replica has the weights that computed their tokens."""
        stranded = [self._jobs[name] for name in self._door.versions_changed()]
        for job in stranded:
            self._forget(job)
        self._events.on_lost([job.prepared.request_id for job in stranded], "its weights were replaced everywhere")

    def _computed_by(self, job: FleetJob, version: int) -> None:
        """Record the version of the weights that compute the next tokens of a request."""
        job.version = version
        self._events.on_weights(list(job.left), version)

    # -- moves -----------------------------------------------------------------------------------------------------

    def take_from(self, member: Member) -> list[Request]:
        """Take the requests away from a replica that has died."""
        self._any_died = True
        self.moves.lost(member)
        unstarted, started = self._door.lose(member.view)
        member.quiet.set()
        member.loading = {}
        return [*unstarted, *started]

    def move(self, requests: Sequence[Request], member: Member, why: str) -> None:
        """Move the requests of ``member``, a dead replica, to others. Requests that cannot move end with an error that
        contains ``why``."""
        lost = list[FleetJob]()
        ended = list[FinishedSequence]()
        for request in requests:
            job = self._jobs[request.request_id]
            if (end := self._requeue(job)) is not None:
                ended.append(end)
            elif job.member is not None:
                lost.append(job)
        moved = len(requests) - len(lost)
        index = member.view.index
        if member.removal is not None and not moved and not lost:
            _log.info("replica %d is removed", index)
        else:
            level = logging.INFO if member.draining and member.wanted else logging.ERROR
            _log.log(level, "replica %d is gone: %s; %d requests move, %d end", index, why, moved, len(lost))
        for job in lost:
            self._forget(job)
        self._events.on_lost([job.prepared.request_id for job in lost], why)
        for each in ended:
            self._ended(each.sequence_id)
        self._tell(CoreOutputs(finished=ended))
        self.send()

    def _requeue(self, job: FleetJob) -> FinishedSequence | None:
        """Put a request of a dead replica back into the router's queue, if another replica can continue the request;
        otherwise do nothing. If all tokens of the request were already delivered, the request has ended: returns its
        result.
        """
        prepared = job.prepared
        answers = self._events.delivered(prepared.request_id)
        if any(answers) or job.left != set(prepared.sequence_ids):
            params = prepared.params
            same = any(each.alive and each.view.version == job.version for each in self._members)
            if not self.movable or params.n > 1 or not same:
                return None
            (known,) = answers
            if known[-1] in prepared.stop_token_ids:
                return FinishedSequence(job.key, FinishReason.STOP, stop_reason=known[-1])
            if len(known) >= prepared.max_tokens:
                return FinishedSequence(job.key, FinishReason.LENGTH)
            job.prepared = dataclasses.replace(prepared, answer_token_ids=known)
            self._events.on_moved("replay")
        self._queue(job)
        return None
