"""Several tokens of a request in one step: drafts are computed beside the newest token, and kept if they are right.

Sampling has no state: the token of a position follows from the logits there and from the request's own noise. A draft
is therefore accepted exactly when it equals the token that is drawn in its place. Where they differ, the token that was
drawn is already the right one. An answer with drafts is the answer without them, bit for bit, greedy or sampled.
Speculative decoding with rejection sampling (Leviathan et al., 2023; Chen et al., 2023) keeps the distribution only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from chairlift.request import Request
from chairlift.scheduler.batch import Batch
from chairlift.scheduler.cost_model import StepFeatures
from chairlift.scheduler.output import FAILED_ROW, Chunk
from chairlift.scheduler.step import Step

__all__ = ["Drafts", "Guide", "Speculator"]


class Speculator(Protocol):
    """Proposes drafts, and decides how many of them a step computes."""

    most: int
    """Most drafts of a row in one step."""
    only_known: bool
    """Whether drafts come only from a request's ``prediction`` or grammar, because there is no other proposer."""

    def choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        """(request, drafts) for some of ``rows``, at most ``budget`` drafts in all.

        ``rows`` has (decoding request, most drafts that it may have). ``step`` has the step's features without drafts.
        """
        ...

    def verified(self, request: Request, drafts: Sequence[int], num_accepted: int) -> None:
        """Called when the step with these drafts has ended. The first ``num_accepted`` drafts were right."""
        ...

    def forget(self, request: Request) -> None:
        """Called when a request has ended, also if it never had drafts."""
        ...


class Guide(Protocol):
    """Knows what may come next in answers that follow a grammar (:attr:`Request.is_guided`)."""

    def num_allowed(self, request: Request, drafts: Sequence[int]) -> int:
        """Leading ``drafts`` that may come next, and behind each of which the answer goes on."""
        ...

    def forced(self, request: Request, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that must come next, as far as anybody can say."""
        ...


class Drafts:
    """Gives drafts to decode rows, and takes the tokens that their step sampled.

    A row with k drafts leaves the decode rows for one step. It computes its newest token and its drafts as one chunk
    with k + 1 sample positions. Until that step has landed only the newest token counts as computed, so nothing that
    is read meanwhile depends on a draft. No other step may be in flight.
    """

    def __init__(self, batch: Batch, speculator: Speculator, guide: Guide | None = None) -> None:
        self._batch, self._kv, self._decodes = batch, batch.kv, batch.decodes
        self.speculator = speculator
        self.guide = guide
        """None: requests that follow a grammar have no drafts."""
        self.num_drafts = self.num_accepted = self.num_verified = 0
        """Drafts that were computed, drafts that were right, and rows that were verified."""
        self.accepted_at = [0] * speculator.most
        """Number of accepted drafts at each place in a row's drafts."""
        self.predicted: list[Request] = []
        """Requests that expect a text and had drafts verified, since the caller emptied the list."""
        self._known: dict[str, Request] = {}
        """Requests that expect a text or follow a grammar."""

    def added(self, request: Request) -> None:
        """Note that a request has come."""
        if request.prediction or request.is_guided:
            self._known[request.request_id] = request

    def left(self, request: Request) -> None:
        """Forget a request that has left for good."""
        self._known.pop(request.request_id, None)
        self.speculator.forget(request)

    def add(self, step: Step) -> None:
        """Add drafts to a step. Called last: drafts use leftover budget and blocks only, and preempt no request."""
        out = step.out
        if not step.runs_decodes:
            return
        only_known = self.speculator.only_known
        if only_known and not self._known:
            return
        if self._decodes.stale:
            self._decodes.rebuild()
        asking = [r for r in self._known.values() if r.decoding] if only_known else self._decodes.requests
        rows = [(request, most) for request in asking if (most := self._most(request)) > 0]
        if not rows:
            return
        chunks = [chunk for _, chunk in step.chunks]
        num_decodes = len(self._decodes.requests)
        budget = self._batch.token_budget - num_decodes - sum(chunk.num_tokens for chunk in chunks)
        if budget <= 0:
            return
        adapter_bytes = self._batch.adapter_bytes(step.chunks, with_decodes=True)
        features = StepFeatures.of(num_decodes, self._batch.num_computed_tokens, chunks, adapter_bytes)
        for request, drafts in self.speculator.choose(rows, features, budget):
            kept = tuple(drafts[: self._num_fitting(request, min(len(drafts), self.speculator.most, budget))])
            if self._batch.membership.held:  # the executor goes on behind the last right draft, and so must the row
                kept = _before_a_stop(kept, request.stop_token_ids)
            if request.is_guided and self.guide is not None:
                kept = kept[: self.guide.num_allowed(request, kept)]
            if not kept:
                continue
            chunk = Chunk(request.slot, len(request.token_ids) - 1, 1 + len(kept), 1 + len(kept), "verify", kept)
            if self._make_room(request, chunk, step):
                budget -= len(kept)
                out.chunks.append(chunk)
                step.chunks.append((request, chunk))
                step.verifies.append((request, chunk))

    def _most(self, request: Request) -> int:
        """Drafts that the request may have: each sample position yields a token, and each draft takes a KV position."""
        known = len(request.token_ids)
        if request.num_computed_tokens != known or request.finish_reason is not None:
            return 0
        if not request.may_draft or (request.is_guided and self.guide is None):
            return 0
        return min(request.max_total_tokens - known - 1, request.limit - known)

    def _num_fitting(self, request: Request, count: int) -> int:
        """Number of the ``count`` drafts that have blocks. A new block is taken only while each running request could
        get one too."""
        kv, known = self._kv, len(request.token_ids)
        count = min(count, self._most(request))
        room = min(len(table) for table in request.block_ids) * kv.block_size - known
        scarce = min(pool.num_free for pool in kv.pools) <= len(self._batch.running)
        if count > room and (scarce or not kv.tables.has_room(request, known + count)):
            return room
        return count

    def _make_room(self, request: Request, chunk: Chunk, step: Step) -> bool:
        """Take the request out of the decode rows and get blocks for its drafts. False if the cache is short of blocks;
        the request then decodes without drafts."""
        self._decodes.stop(request)
        request.num_computed_tokens = chunk.start  # its newest token still reads what a window is about to leave behind
        grown = self._kv.tables.extend(request, chunk.end, self._batch.step)
        request.num_computed_tokens = chunk.start + 1
        if grown is None:
            self._decodes.rebuild()
            self._decodes.start([request])
            return False
        step.out.new_blocks += [(request.slot, blocks) for blocks in grown]
        return True

    def accept(self, flight: Step, tokens: Sequence[int], sampled: Sequence[Request | None]) -> list[Request | None]:
        """Append the right tokens of rows with drafts. Returns ``sampled`` with these rows filled in."""
        found = list(sampled)
        place = len(tokens) - sum(chunk.samples for _, chunk in flight.verifies)
        for request, chunk in flight.verifies:
            own = tokens[place : place + chunk.samples]
            if request.slot >= 0 and request.finish_reason is None and request.resumed_at_step <= flight.out.step:
                accepted = chunk.num_accepted(own)
                self._take(request, own[: accepted + 1], found, place)
                if len(request.token_ids) == request.max_total_tokens:
                    flight.finals.append(request)
                self._count(request, chunk.drafts, accepted)
            place += chunk.samples
        return found

    def _take(self, request: Request, right: Sequence[int], sampled: list[Request | None], place: int) -> None:
        """Append tokens up to one that ends the request."""
        count = 0
        for token in right:
            request.token_ids.append(token)
            sampled[place + count] = request
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

    def rejoin(self, flight: Step) -> None:
        """Let rows with verified drafts compute one token per step again, unless they have ended. Rows of a static
        batch do so in any case."""
        held = self._batch.membership.held
        rows = [r for r, _ in flight.verifies if r.slot >= 0 and (held or r.finish_reason is None)]
        rows = [r for r in rows if r.resumed_at_step <= flight.out.step and r.num_computed_tokens < r.limit]
        if rows:
            self._decodes.start(rows)


def _before_a_stop(drafts: tuple[int, ...], stop_token_ids: Collection[int]) -> tuple[int, ...]:
    """The drafts up to the first that would end the answer."""
    for place, token in enumerate(drafts):
        if token in stop_token_ids:
            return drafts[:place]
    return drafts
