"""Grammars of the requests in an engine. Another thread compiles a grammar; a matcher follows the answer token by
token, and makes the masks of allowed tokens.

Each grammar is compiled once and cached by its content; its request waits until then. Each answer has its own matcher.
The matcher consumes all known tokens, including tokens that steps in flight have sampled, and goes back when such a
token is dropped. So preemption needs no saved state. An answer gets only drafts that its grammar allows, and a mask is
made for the position after each draft.

A mask that is late, or that is expected to take long, is made while its answer waits in its row; see
:mod:`chairlift.engine.mask_work`. Other answers go on meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from chairlift.base.cache_key import cache_key
from chairlift.base.step_batch import SampledTokens
from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED, Grammar
from chairlift.base.thinking import ThinkingBudget
from chairlift.core.request import Request
from chairlift.core.scheduler.output import FAILED_ROW, SchedulerOutput
from chairlift.engine.fair_queue import FairQueue
from chairlift.engine.mask_limits import MaskBudget, MaskLedger
from chairlift.engine.mask_work import Filling, Mask, MaskJob, MaskWork
from chairlift.engine.thinking import ThinkingMatcher
from chairlift.errors import InvariantError, RequestError
from chairlift.text.grammar.compiler import Compiled, Compiler, Matcher

__all__ = ["LEAST_MASK_SECONDS", "Compile", "GrammarRow", "Grammars", "SamplePlace"]

_log = logging.getLogger(__name__)

LEAST_MASK_SECONDS: Final = 0.002
"""A step waits for its masks at most this many seconds, or the predicted time of a decode step, if that is longer."""

_MAX_CACHED: Final = 256
_MAX_CACHED_CHARS: Final = 16 << 20
"""Maximum total length, in characters, of the sources of all cached grammars. It limits the memory, because a longer
source gives a larger compiled grammar."""

Compile = Callable[[Callable[[], Compiled]], "Future[Compiled]"]
"""Runs a function that compiles a grammar outside the engine's thread; the future has its result."""
InFlight = Callable[[Request], list[int] | None]
"""Returns the tokens that steps in flight have sampled for a request, oldest first; None if one of these steps
failed."""


@dataclasses.dataclass(slots=True, eq=False)
class GrammarRow:
    """A request with a grammar or a thinking budget, with its matcher."""

    request: Request
    matcher: Matcher
    fresh: Callable[[], Matcher]
    """Function that makes a new matcher, which stands at the beginning of the answer."""
    budget: MaskBudget
    """Time of the masks of all answers of the request. The answers share the object."""
    job: MaskJob | None = None
    """The mask for which the request waits. Only the job may use the matcher."""
    made: MaskJob | None = None
    """The newest job that is complete."""
    waits: bool = False
    """Whether the request is not ready, because a mask is made or will be made."""


class SamplePlace(NamedTuple):
    """Sample positions that a step has for one request with a grammar or a thinking budget."""

    first: int
    """Sample position whose token the request gets. With drafts: the first of the row's sample positions."""
    row: GrammarRow
    drafts: tuple[int, ...] = ()
    """Drafts of the row. There is one more sample position after each draft."""

    @property
    def matcher(self) -> Matcher:
        return self.row.matcher

    @property
    def budget(self) -> MaskBudget:
        return self.row.budget

    def accepted(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Sampled tokens that the request gets: one, and one more for each correct draft."""
        count = 1
        for place, draft in enumerate(self.drafts):
            if token_ids[self.first + place] != draft:
                break
            count += 1
        return token_ids[self.first : self.first + count]


@dataclasses.dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, and the requests that wait for this grammar."""

    grammar: Grammar
    future: Future[Compiled]
    requests: list[tuple[Sequence[Request], MaskBudget]] = dataclasses.field(default_factory=list)
    """(sequences of one request, time of their masks)."""


@dataclasses.dataclass(slots=True)
class _Kept:
    """A compiled grammar in the cache."""

    compiled: Compiled
    num_chars: int
    """Length of its source."""
    newest: MaskBudget | None = None
    """Time of the masks of the newest request with this grammar."""


class Grammars:
    """Compiled grammars and the matchers of running answers.

    Without a ``compiler``, requests with a grammar are refused. ``beside`` runs the compiler (default: in a thread of
    this object). ``masks`` computes masks (default: on threads of this object). ``ledger`` limits their time.
    ``vocab_size`` is the number of logits; thinking budgets need it. Only one thread may call the methods.
    """

    def __init__(
        self,
        compiler: Compiler | None,
        beside: Compile | None = None,
        *,
        masks: MaskWork | None = None,
        ledger: MaskLedger | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._beside = beside
        self.masks = masks or MaskWork()
        self.ledger = ledger or MaskLedger()
        self._thread: ThreadPoolExecutor | None = None
        """The thread that compiles. It begins with the first grammar."""
        self._to_compile: FairQueue[tuple[Callable[[], Compiled], Future[Compiled]]] = FairQueue()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        self.made_ahead = False
        """Whether masks that may be slow are made before a step computes the answer: the first mask, and the masks
        after a slow one. Needed if a step cannot drop an answer whose mask is late."""
        self._rows: dict[str, GrammarRow] = {}
        self._released: list[Request] = []
        """Requests that waited for a mask and are ready without one."""
        self._decode_rows: tuple[tuple[str, int], ...] = ()
        self._decoding: list[SamplePlace] = []
        self.num_compiled = self.num_hits = self.num_failed = 0
        """Counters: grammars that were compiled; requests whose grammar was cached; grammars that could not be
        compiled."""
        self.compile_seconds = 0.0
        """Seconds that this object has spent compiling grammars: in its compiler thread, and in :meth:`check`."""
        self.num_limited = self.num_ended_thinking = 0
        """Counters: ended answers that had a thinking budget; ended answers whose reasoning was ended by the budget."""

    def __len__(self) -> int:
        """Number of answers that have a matcher."""
        return len(self._rows)

    @property
    def is_busy(self) -> bool:
        """Whether a grammar is being compiled, or the result has not been taken yet."""
        return bool(self._jobs)

    def counts(self) -> dict[str, Any]:
        """Fields of :class:`~chairlift.metrics.stats.EngineStats`."""
        return {
            "num_grammars_compiled": self.num_compiled,
            "num_grammar_hits": self.num_hits,
            "num_grammars_failed": self.num_failed,
            "grammar_compile_seconds": self.compile_seconds,
            "num_thinking_limited": self.num_limited,
            "num_thinking_ended": self.num_ended_thinking,
        }

    # -- compiling -----------------------------------------------------------------------------------------------

    def check(self, grammar: Grammar, salt: str = "") -> None:
        """Compile the grammar in this thread, unless it is cached for this ``salt``. Raises RequestError for a bad
        grammar."""
        key = cache_key("grammar", salt, grammar.key)
        if key not in self._kept:
            compiler = self._compiler_of()
            self._keep(key, grammar, self._timed(lambda: compiler.compile(grammar)))

    def add(self, requests: Sequence[Request], grammar: Grammar) -> None:
        """Set the grammar of all sequences of one request. Sequences that must wait for the compiler are marked as not
        ready."""
        compiler = self._compiler_of()
        key = cache_key("grammar", requests[0].cache_salt, grammar.key)
        tenant = requests[0].service.tenant
        budget = MaskBudget(self.ledger, tenant)
        for request in requests:
            request.is_guided = True
        if key in self._kept:
            self._kept.move_to_end(key)
            self.num_hits += 1
            self._start(requests, self._kept[key], budget)
            return
        if key not in self._jobs:
            self._jobs[key] = _Job(grammar, self._submit(tenant, lambda: compiler.compile(grammar)))
        self._jobs[key].requests.append((requests, budget))
        for request in requests:
            request.is_ready = False

    def limit(self, requests: Sequence[Request], budget: ThinkingBudget) -> None:
        """Limit the reasoning of all sequences of one request that has no grammar. Raises RequestError."""
        mask_budget = MaskBudget(self.ledger, requests[0].service.tenant)
        for request in requests:
            request.is_guided = True
            self._follow_new(request, lambda: self._limited(budget, None), mask_budget)

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """(requests whose grammar was compiled, or whose mask was made, since the last call; (request, reason) of
        requests whose grammar failed). Requests that have ended are not included."""
        ready = self._take_masks()
        failed: list[tuple[Request, str]] = []
        for key in [key for key, job in self._jobs.items() if job.future.done()]:
            job = self._jobs.pop(key)
            groups = [([each for each in group if not each.is_finished], budget) for group, budget in job.requests]
            waiting = [request for group, _ in groups for request in group]
            try:
                compiled = job.future.result()
                kept = self._keep(key, job.grammar, compiled)
                for group, budget in groups:
                    self._start(group, kept, budget)
                ready += waiting
            except Exception as error:
                self.num_failed += 1
                reason = str(error)
                if not isinstance(error, RequestError):
                    _log.exception("a grammar could not be compiled")
                    reason = f"its grammar could not be compiled ({type(error).__name__})"
                elif not reason.startswith(CANNOT_BE_FOLLOWED):
                    reason = CANNOT_BE_FOLLOWED + reason
                failed += [(request, reason) for request in waiting]
        return ready, failed

    def waits(self, request: Request) -> bool:
        """Whether the request waits until its grammar is compiled or a mask is made."""
        row = self._rows.get(request.request_id)
        if row is not None and row.waits:
            return True
        return any(each is request for job in self._jobs.values() for group, _ in job.requests for each in group)

    def next_event(self, now: float) -> float | None:
        """None: no step is made for a grammar or a mask for which no request waits."""
        return None

    def forget(self, request: Request) -> None:
        """Drop the matcher of a request that has ended. A mask or a grammar that no other request needs is not made,
        unless it was begun."""
        row = self._rows.get(request.request_id)
        if row is not None and row.request is request:
            del self._rows[request.request_id]
            self._count_thinking(row)
            row.budget.num_answers -= 1
            if row.job is not None:
                row.job.is_dropped = True
        elif self._jobs:
            for key, job in list(self._jobs.items()):
                if all(each.is_finished for group, _ in job.requests for each in group) and job.future.cancel():
                    del self._jobs[key]

    def shutdown(self) -> None:
        """Drop all requests, and end the threads."""
        self._rows.clear()
        self._jobs.clear()
        self.masks.shutdown()
        self._to_compile.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _compiler_of(self) -> Compiler:
        if self._compiler is None:
            raise RequestError("structured_outputs needs a tokenizer, and this engine has none; leave it out")
        return self._compiler

    def _submit(self, tenant: str, work: Callable[[], Compiled]) -> Future[Compiled]:
        if self._beside is not None:
            return self._beside(work)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-compile")
        future: Future[Compiled] = Future()
        self._to_compile.add(tenant, (work, future))
        self._thread.submit(self._compile_next)
        return future

    def _compile_next(self) -> None:
        """Compile the oldest grammar of the tenant whose grammars took the least time."""
        taken = self._to_compile.take()
        if taken is None:
            return
        tenant, (work, future) = taken
        begin = time.perf_counter()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._timed(work))
            except BaseException as error:
                future.set_exception(error)
        self._to_compile.took(tenant, time.perf_counter() - begin)

    def _timed(self, work: Callable[[], Compiled]) -> Compiled:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.compile_seconds += time.perf_counter() - begin

    def _count_thinking(self, row: GrammarRow) -> None:
        if isinstance(row.matcher, ThinkingMatcher):
            self.num_limited += 1
            self.num_ended_thinking += row.matcher.was_ended

    def _keep(self, key: bytes, grammar: Grammar, compiled: Compiled) -> _Kept:
        self.num_compiled += 1
        self._kept[key] = kept = _Kept(compiled, len(grammar.text))
        while len(self._kept) > _MAX_CACHED or sum(each.num_chars for each in self._kept.values()) > _MAX_CACHED_CHARS:
            self._kept.popitem(last=False)
        return kept

    def _start(self, requests: Sequence[Request], kept: _Kept, budget: MaskBudget) -> None:
        if kept.newest is not None:  # its masks will take about as long as those of the same grammar before
            budget.price = kept.newest.price
            budget.peak = kept.newest.peak
        kept.newest = budget
        for request in requests:
            self._follow_new(request, functools.partial(self._matcher_of, request, kept.compiled), budget)
            request.mask_seconds = budget.price if budget.price > LEAST_MASK_SECONDS else 0.0
            if self.made_ahead:
                request.is_ready = False
                self._make_apart(self._rows[request.request_id])

    def _matcher_of(self, request: Request, compiled: Compiled) -> Matcher:
        matcher = compiled.matcher(sorted(request.stop_token_ids))
        budget = getattr(request.params, "thinking", None)
        return matcher if budget is None else self._limited(budget, matcher)

    def _limited(self, budget: ThinkingBudget, matcher: Matcher | None) -> ThinkingMatcher:
        if self._vocab_size is None or max(budget.marks) >= self._vocab_size:
            raise RequestError(f"thinking has token ids that the model does not know: {budget.marks!r:.80}")
        return ThinkingMatcher(budget, self._vocab_size, matcher)

    def _follow_new(self, request: Request, fresh: Callable[[], Matcher], budget: MaskBudget) -> None:
        self._rows[request.request_id] = GrammarRow(request, fresh(), fresh, budget)
        budget.num_answers += 1

    # -- drafts --------------------------------------------------------------------------------------------------

    def forced(self, request: Request, limit: int) -> Sequence[int]:
        """Up to ``limit`` tokens that the grammar forces next; see :meth:`Matcher.forced`. No step may be in flight."""
        row = self._rows.get(request.request_id)
        if row is None or not self._follow(row, ()):
            return ()
        found = row.matcher.forced(limit)
        if row.matcher.error:
            self._begin_again(row)
        return found

    def num_allowed(self, request: Request, drafts: Sequence[int]) -> int:
        """Number of leading ``drafts`` that the grammar allows and that do not end the answer. No step may be in
        flight."""
        row = self._rows.get(request.request_id)
        if row is None or not self._follow(row, ()):
            return 0
        matcher = row.matcher
        begin = row.matcher.num_consumed
        count = 0
        for token in drafts[: matcher.num_allowed(drafts)]:
            if token in request.stop_token_ids or not matcher.consume(token) or matcher.stopped:
                break
            count += 1
        if matcher.error or not matcher.rewind(begin):
            self._begin_again(row)
            return 0
        return count

    @staticmethod
    def _begin_again(row: GrammarRow) -> None:
        """Replace a matcher that failed on a draft. The draft might never be sampled, so the request does not fail; but
        it gets no more drafts."""
        row.matcher = row.fresh()
        row.request.may_draft = False

    # -- following -----------------------------------------------------------------------------------------------

    def rows_of(self, out: SchedulerOutput) -> list[SamplePlace]:
        """Sample positions of a step that belong to requests with a grammar or a thinking budget."""
        if not self._rows:
            return []
        if out.decode_rows is not self._decode_rows:
            names = (self._rows.get(name) for name, _ in out.decode_rows)
            self._decode_rows = out.decode_rows
            self._decoding = [SamplePlace(index, row) for index, row in enumerate(names) if row is not None]
        rows = list(self._decoding)
        index = len(out.decode_rows)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            index += chunk.samples
            if chunk.samples and name in self._rows:
                rows.append(SamplePlace(index - 1 - len(chunk.drafts), self._rows[name], chunk.drafts))
        return rows

    def begin(self, rows: Sequence[SamplePlace], in_flight: InFlight) -> Filling:
        """Start to fill the masks of a step; :meth:`masks_of` returns them. Until then, the matchers must not be
        used."""
        todo: list[SamplePlace] = []
        for place in rows:
            if place.row.job is not None:
                raise InvariantError(f"a step computes {place.row.request!r}, which waits for a mask")
            if place.row.request.finish_reason is None:
                drawn = in_flight(place.row.request)
                if drawn is not None and self._follow(place.row, drawn) and not self._is_made(place):
                    todo.append(place)
        return self.masks.begin(todo)

    @staticmethod
    def _is_made(place: SamplePlace) -> bool:
        """Whether a job has made the mask that the row needs now. With drafts it needs more masks."""
        made = place.row.made
        return made is not None and made.at == place.row.matcher.num_consumed and not place.drafts

    def masks_of(
        self, filling: Filling, rows: Sequence[SamplePlace], bound: float | None
    ) -> tuple[dict[int, Mask], list[Request]]:
        """(sample position -> mask, requests whose mask is late). The requests must be withdrawn from the step, and
        wait until :meth:`take_ready` returns them. ``bound``: seconds to wait for the masks; None: wait for all."""
        masks, late = filling.result(bound)
        for job in late:
            job.place.row.job = job
            job.place.row.waits = True
        for place in rows:
            made = place.row.made
            if made is not None and place.row.job is None:
                if self._is_made(place) and made.masks[0] is not None:
                    masks[place.first] = made.masks[0]
                place.row.made = None
        return masks, [job.place.row.request for job in late]

    def slow(self, rows: Sequence[SamplePlace], seconds: float) -> list[SamplePlace]:
        """Rows of a step whose next masks are not expected to be ready within ``seconds`` of processor time. Cheaper
        masks come first."""
        found: list[SamplePlace] = []
        if self.made_ahead:
            found = [place for place in rows if place.row.budget.peak > seconds]
            rows = [place for place in rows if place.row.budget.peak <= seconds]
        if sum([place.row.budget.price for place in rows]) <= seconds:
            return found
        for place in sorted(rows, key=lambda place: place.budget.price):
            seconds -= place.budget.price
            if seconds < 0:
                found.append(place)
        return found

    def work_ahead(self, row: GrammarRow) -> None:
        """Make the mask of the next token of a request that waits for it. All its tokens are known."""
        if row.job is not None or not row.waits:
            return
        if row.request.finish_reason is None and self._follow(row, ()):
            self._make_apart(row)
        else:  # the next step finds the error or the end
            row.waits = False
            self._released.append(row.request)

    def _make_apart(self, row: GrammarRow) -> None:
        row.job = MaskJob(SamplePlace(0, row), row.matcher.num_consumed)
        row.waits = True
        self.masks.later(row.job)

    def _take_masks(self) -> list[Request]:
        """Requests whose mask was made since the last call."""
        ready = self._released
        self._released = []
        for job in self.masks.take_done():
            row = job.place.row
            row.job = None
            row.made = job
            row.waits = False
            row.request.mask_seconds = row.budget.price if row.budget.price > LEAST_MASK_SECONDS else 0.0
            ready.append(row.request)
        return [request for request in ready if not request.is_finished]

    def landed(self, rows: Sequence[SamplePlace], step: int, tokens: SampledTokens) -> None:
        """Check the sampled tokens of a step before the scheduler gets them. A token that its grammar forbids becomes a
        failed token."""
        for place in rows:
            row = place.row
            request = place.row.request
            late = request.finish_reason is not None or request.slot < 0 or request.resumed_at_step > step
            late = late or row.job is not None  # its token is dropped, or the job has followed it already
            right = place.accepted(tokens.token_ids)
            last = request.num_output_tokens + len(right) - 1  # number of output tokens before the newest sampled token
            if late or right[-1] == FAILED_ROW:
                continue
            if place.drafts and row.matcher.error and row.matcher.num_consumed > last:
                self._begin_again(row)
            if row.matcher.num_consumed <= last:
                self._follow(row, right)
            matcher = row.matcher
            if matcher.error and matcher.num_consumed <= last:  # an error further on belongs to a later token
                broken = place.first + max(0, matcher.num_consumed - request.num_output_tokens)
                tokens.token_ids[broken], tokens.errors[broken] = FAILED_ROW, matcher.error

    def complete(self, rows: Sequence[SamplePlace]) -> list[Request]:
        """Requests of a step whose answer is complete, because the grammar allows no further token. Call this after the
        scheduler got the step's tokens. It also drops matchers whose reasoning has ended, so that their requests may
        have drafts again."""
        for _, row, _ in rows:
            if row.job is not None:
                continue
            matcher = row.matcher
            done = isinstance(matcher, ThinkingMatcher) and matcher.is_over
            if done and matcher.num_consumed <= row.request.num_output_tokens:
                self.forget(row.request)
                self._decode_rows = ()
                self._decoding = []
                row.request.is_guided = False
        return [
            row.request
            for _, row, _ in rows
            if row.job is None
            and row.matcher.num_consumed == row.request.num_output_tokens
            and not row.matcher.error
            and row.matcher.stopped
        ]

    @staticmethod
    def _follow(row: GrammarRow, drawn: Sequence[int]) -> bool:
        """Advance the matcher to the newest token. ``drawn`` are tokens that steps in flight have sampled after the
        request's known tokens. Returns False if no token may follow."""
        request = row.request
        matcher = row.matcher
        begin = request.num_prompt_tokens
        own = request.num_output_tokens
        known = own + len(drawn)
        if not matcher.rewind(known):
            return False
        for place in range(matcher.num_consumed, known):
            token = request.token_ids[begin + place] if place < own else drawn[place - own]
            if token == FAILED_ROW or token in request.stop_token_ids or matcher.stopped:
                return False
            if not matcher.consume(token):
                return False
        return not matcher.error and not matcher.stopped
