"""Speculative decoding in the scheduler: a row computes its newest token and its drafts in one step, and keeps the
drafts that are right.

Sampling has no state: the token at a position depends only on the logits there and on the request's own noise. So a
draft is accepted if and only if it equals the token that is sampled at its position. If they differ, the sampled token
is already the right one. With drafts, a request gets the same tokens as without them, greedy or sampled. (Rejection
sampling, by Leviathan et al., 2023, and Chen et al., 2023, only keeps the distribution.)

K and V of wrong drafts are overwritten later. A recurrent state of wrong drafts is replaced by a copy of the state
before the step, and the row computes the tokens that were right once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from chairlift.core.kv_cache.state_backups import StateBackups
from chairlift.core.kv_cache.tables import NewBlocks
from chairlift.core.request import Request
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.output import FAILED_ROW, Chunk
from chairlift.core.scheduler.step import ScheduledStep

__all__ = ["Drafts", "Guide", "Speculator"]


class Speculator(Protocol):
    """Proposes drafts, and decides how many of them a step computes."""

    most: int
    """Maximum number of drafts for a row in one step."""
    only_known: bool
    """Whether drafts come only from a request's ``prediction`` or grammar, because there is no other source."""
    measures: bool
    """Whether the newest step has no drafts so that its time is measured. The caller sets it to False again."""
    drafting_seconds: float
    """Total seconds that a small model, a layer or heads took to make drafts."""

    def rests(self, num_rows: int) -> bool:
        """Whether :meth:`choose` would find no drafts for a step with ``num_rows`` decode rows, as far as is known
        without a look at the rows. Called once per step, before :meth:`choose`."""
        ...

    def choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        """(request, drafts) for some of ``rows``, with at most ``budget`` drafts in total.

        ``rows`` has (decoding request, maximum number of its drafts). ``step`` has the features of the step without
        drafts.
        """
        ...

    def verified(self, request: Request, drafts: Sequence[int], num_accepted: int) -> None:
        """Called when the step with these drafts has ended. The first ``num_accepted`` drafts were right."""
        ...

    def forget(self, request: Request) -> None:
        """Called when a request has ended, even if it never had drafts."""
        ...


class Guide(Protocol):
    """Knows which tokens may come next in answers that follow a grammar (:attr:`Request.is_guided`)."""

    def num_allowed(self, request: Request, drafts: Sequence[int]) -> int:
        """Number of leading ``drafts`` that the grammar allows and that do not end the answer."""
        ...

    def forced(self, request: Request, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that probably come next, because the grammar allows only one text."""
        ...


class Drafts:
    """Adds drafts to the decode rows of a step, and stores the tokens that the step sampled.

    A row with k drafts leaves the decode rows for one step. It computes its newest token and its drafts as one chunk
    with k + 1 sample positions. Until this step has ended, only the newest token counts as computed, so no other code
    depends on a draft. No other step may be in flight.
    """

    def __init__(self, batch: Batch, speculator: Speculator, guide: Guide | None = None) -> None:
        self._batch = batch
        self._kv = batch.kv
        self._decodes = batch.decodes
        self.speculator = speculator
        self.guide = guide
        """Restricts the drafts of requests that follow a grammar. None: requests with a grammar get no drafts."""
        self.num_drafts = self.num_accepted = self.num_verified = 0
        """Counters: drafts that were computed; drafts that were right; rows with drafts whose results are known."""
        self.accepted_at = [0] * speculator.most
        """Entry i: how often the draft number i (counted from 0) of a row was accepted."""
        self.predicted: list[Request] = []
        """Requests with a ``prediction`` whose drafts were checked since the caller last emptied the list."""
        self._known: dict[str, Request] = {}
        """Request id -> request that has a ``prediction`` or follows a grammar."""
        self._states = StateBackups(batch.kv.tables)
        self._restored: list[tuple[Request, NewBlocks]] = []
        """Table entries that went back to their state before the drafts, and of which no step has told the executor."""

    def added(self, request: Request) -> None:
        """Note that a request was added to the scheduler."""
        if request.prediction or request.is_guided:
            self._known[request.request_id] = request

    def left(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._known.pop(request.request_id, None)
        self._restored = [each for each in self._restored if each[0] is not request]
        self.speculator.forget(request)

    def add(self, step: ScheduledStep) -> None:
        """Add drafts to a step. It must be called last: drafts use only remaining budget and blocks, and preempt no
        request.

        A step that preempts or saves blocks gets no drafts (the caller knows about saved blocks: requests may be
        preempted between steps). A proposer with KV of its own writes while it makes drafts, but the blocks of a
        preempted request are saved when the step runs. One of them may already belong to a row with drafts.
        """
        out = step.out
        if not step.runs_decodes or out.preempted:
            return
        if self._states and self._batch.membership.held:  # the rows of a static batch never compute tokens again
            return
        only_known = self.speculator.only_known
        if only_known and not self._known:
            return
        if self._decodes.stale:
            self._decodes.rebuild()
        if not self._known and self.speculator.rests(len(self._decodes.requests)):
            return
        candidates = [r for r in self._known.values() if r.decoding] if only_known else self._decodes.requests
        rows = [(request, limit) for request in candidates if (limit := self._max_drafts(request)) > 0]
        if not rows:
            return
        chunks = [chunk for _, chunk in step.chunks]
        num_decodes = len(self._decodes.requests)
        budget = self._batch.token_budget - num_decodes - sum(chunk.num_tokens for chunk in chunks)
        if budget <= 0:
            return
        kind_bytes = self._batch.kind_bytes(step.chunks, with_decodes=True)
        rows_alone = self._batch.features(num_decodes)
        features = StepFeatures.of(num_decodes, rows_alone.context_tokens, chunks, kind_bytes, rows_alone.shared_tokens)
        for request, drafts in self.speculator.choose(rows, features, budget):
            chosen = tuple(drafts[: self._num_fitting(request, min(len(drafts), self.speculator.most, budget))])
            if self._batch.membership.held:  # in a static batch the row computes on after its end
                chosen = _before_a_stop(chosen, request.stop_token_ids)
            if request.is_guided and self.guide is not None:
                chosen = chosen[: self.guide.num_allowed(request, chosen)]
            if not chosen:
                continue
            chunk = Chunk(request.slot, len(request.token_ids) - 1, 1 + len(chosen), 1 + len(chosen), "verify", chosen)
            if self._states.has_room(request) and self._make_room(request, chunk, step):
                out.copies += self._states.save(request, chunk.start)
                budget -= len(chosen)
                out.chunks.append(chunk)
                step.chunks.append((request, chunk))
                step.verifies.append((request, chunk))

    def _max_drafts(self, request: Request) -> int:
        """Maximum number of drafts for the request. Two limits apply: each sample position yields one of its remaining
        tokens, and each draft takes one KV position."""
        known = len(request.token_ids)
        if request.num_computed_tokens != known or request.finish_reason is not None:
            return 0
        if not request.may_draft or (request.is_guided and (self.guide is None or self._states)):
            return 0
        most = min(request.max_total_tokens - known - 1, request.limit - known)
        return min(most, self._states.num_positions(known - 1) - 1) if self._states else most

    def _num_fitting(self, request: Request, count: int) -> int:
        """Number of drafts, at most ``count``, for which the request gets blocks. It takes a new block only if every
        other running request could get one too."""
        kv = self._kv
        known = len(request.token_ids)
        count = min(count, self._max_drafts(request))
        room = kv.tables.num_positions_in(request) - known
        scarce = min(pool.num_free for pool in kv.pools) <= len(self._batch.running)
        if count > room and (scarce or not kv.tables.has_room(request, known + count)):
            return room
        return count

    def _make_room(self, request: Request, chunk: Chunk, step: ScheduledStep) -> bool:
        """Remove the request from the decode rows and get blocks for its drafts. Returns False if there are too few
        blocks; the request then decodes without drafts."""
        self._decodes.stop(request)
        request.num_computed_tokens = chunk.start  # its newest token still reads the blocks that a window is leaving
        grown = self._kv.tables.extend(request, chunk.end, self._batch.step)
        request.num_computed_tokens = chunk.start + 1
        if grown is None:
            self._decodes.rebuild()
            self._decodes.start([request])
            return False
        step.out.new_blocks += [(request.slot, blocks) for blocks in grown]
        return True

    def accept(
        self, flight: ScheduledStep, tokens: Sequence[int], sampled: Sequence[Request | None]
    ) -> list[Request | None]:
        """Store the tokens that rows with drafts got: the right drafts, and one more token each. Returns ``sampled``
        with the requests of these rows filled in."""
        found = list(sampled)
        position = len(tokens) - sum(chunk.samples for _, chunk in flight.verifies)
        for request, chunk in flight.verifies:
            own = tokens[position : position + chunk.samples]
            alive = request.slot >= 0 and request.finish_reason is None and request not in flight.withdrawn
            if alive and request.resumed_at_step <= flight.out.step:
                accepted = chunk.num_accepted(own)
                self._take(request, own[: accepted + 1], found, position)
                if len(request.token_ids) == request.max_total_tokens:
                    flight.finals.append(request)
                self._count(request, chunk.drafts, accepted)
                if accepted < len(chunk.drafts):
                    self._go_back(request, chunk)
            self._states.drop(request)
            position += chunk.samples
        return found

    def failed(self, flight: ScheduledStep) -> None:
        """Note that a step has failed."""
        for request, _ in flight.verifies:
            self._states.drop(request)

    def _go_back(self, request: Request, chunk: Chunk) -> None:
        """Let a row with recurrent states compute the chunk's tokens again, except the wrong drafts."""
        changed = self._states.restore(request)
        if not changed:
            return
        self._restored += [(request, blocks) for blocks in changed]
        self._batch.num_computed_tokens -= request.num_computed_tokens - chunk.start
        request.num_computed_tokens = chunk.start
        self._batch.catching_up.append(request)

    def take_restored(self) -> list[tuple[int, NewBlocks]]:
        """(slot, table entries) that went back, for the step that is executed next."""
        restored = self._restored
        self._restored = []
        return [
            (request.slot, blocks)
            for request, blocks in restored
            if request.slot >= 0
            and request.block_ids[blocks.group][blocks.first : blocks.first + 1] == blocks.block_ids
        ]

    def _take(self, request: Request, right: Sequence[int], sampled: list[Request | None], position: int) -> None:
        """Append ``right`` tokens to the request, up to the first token that ends it."""
        count = 0
        for token in right:
            request.token_ids.append(token)
            sampled[position + count] = request
            count += 1
            if token == FAILED_ROW or token in request.stop_token_ids:
                break
        request.num_computed_tokens += count - 1
        self._batch.num_computed_tokens += count - 1

    def _count(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        self.num_verified += 1
        self.num_drafts += len(drafts)
        self.num_accepted += accepted
        for at in range(accepted):
            self.accepted_at[at] += 1
        self.speculator.verified(request, drafts, accepted)
        if request.prediction:
            self.predicted.append(request)

    def measures(self) -> bool:
        """Whether the newest step has no drafts so that its time is measured. True only once for such a step."""
        found = self.speculator.measures
        self.speculator.measures = False
        return found

    def rejoin(self, flight: ScheduledStep) -> None:
        """Let rows whose drafts were checked compute one token per step again, unless they have ended or went back.
        Rows of a static batch do so even after their end."""
        is_static = self._batch.membership.held
        rows = [r for r, _ in flight.verifies if r.slot >= 0 and (is_static or r.finish_reason is None)]
        rows = [r for r in rows if r.resumed_at_step <= flight.out.step and r.num_computed_tokens < r.limit]
        rows = [r for r in rows if r not in flight.withdrawn and r not in self._batch.catching_up]
        if rows:
            self._decodes.start(rows)


def _before_a_stop(drafts: tuple[int, ...], stop_token_ids: Collection[int]) -> tuple[int, ...]:
    """Drafts before the first draft that would end the answer."""
    for index, token in enumerate(drafts):
        if token in stop_token_ids:
            return drafts[:index]
    return drafts
