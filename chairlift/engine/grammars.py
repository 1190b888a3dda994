"""Grammars of the requests in an engine. Another thread compiles a grammar; a matcher follows the answer token by
token, and makes the masks of allowed tokens.

Each grammar is compiled once and cached by its content; its request waits until then. Each answer has its own matcher.
The matcher consumes all known tokens, including tokens that steps in flight have sampled, and goes back when such a
token is dropped. So preemption needs no saved state. An answer gets only drafts that its grammar allows, and a mask is
made for the position after each draft.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from chairlift.cache_key import cache_key
from chairlift.engine.thinking import ThinkingMatcher
from chairlift.errors import RequestError
from chairlift.grammar.compiler import Compiled, Compiler, Matcher
from chairlift.request import Request
from chairlift.scheduler.output import FAILED_ROW, SchedulerOutput
from chairlift.step_batch import SampledTokens
from chairlift.structured_outputs import CANNOT_BE_FOLLOWED, Grammar
from chairlift.thinking import ThinkingBudget

__all__ = ["Compile", "GrammarRow", "Grammars", "SamplePlace"]

_log = logging.getLogger(__name__)

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


class SamplePlace(NamedTuple):
    """Sample positions that a step has for one request with a grammar or a thinking budget."""

    first: int
    """Sample position whose token the request gets. With drafts: the first of the row's sample positions."""
    row: GrammarRow
    drafts: tuple[int, ...] = ()
    """Drafts of the row. There is one more sample position after each draft."""

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
    requests: list[Request] = dataclasses.field(default_factory=list)


class Grammars:
    """Compiled grammars and the matchers of running answers.

    Without a ``compiler``, requests with a grammar are refused. ``beside`` runs the compiler (default: in a thread of
    this object). With ``fill_beside``, another thread fills the masks of a step while the model runs, if all earlier
    tokens are known. ``vocab_size`` is the number of logits; thinking budgets need it. Only one thread may call the
    methods.
    """

    def __init__(
        self,
        compiler: Compiler | None,
        beside: Compile | None = None,
        *,
        fill_beside: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._beside = beside
        self._fill_beside = fill_beside
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._kept: OrderedDict[bytes, tuple[Compiled, int]] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        self._rows: dict[str, GrammarRow] = {}
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
    def is_compiling(self) -> bool:
        return bool(self._jobs)

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
        compiler, key = self._compiler_of(), cache_key("grammar", requests[0].cache_salt, grammar.key)
        for request in requests:
            request.is_guided = True
        if key in self._kept:
            self._kept.move_to_end(key)
            self.num_hits += 1
            self._start(requests, self._kept[key][0])
            return
        if key not in self._jobs:
            self._jobs[key] = _Job(grammar, self._submit(lambda: compiler.compile(grammar)))
        self._jobs[key].requests += requests
        for request in requests:
            request.is_ready = False

    def limit(self, requests: Sequence[Request], budget: ThinkingBudget) -> None:
        """Limit the reasoning of all sequences of one request that has no grammar. Raises RequestError."""
        for request in requests:
            request.is_guided = True
            self._follow_new(request, lambda: self._limited(budget, None))

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """(requests whose grammar was compiled since the last call, (request, reason) of requests whose grammar
        failed). Requests that have ended are not included."""
        ready: list[Request] = []
        failed: list[tuple[Request, str]] = []
        for key in [key for key, job in self._jobs.items() if job.future.done()]:
            job = self._jobs.pop(key)
            waiting = [request for request in job.requests if not request.is_finished]
            try:
                compiled = job.future.result()
                self._keep(key, job.grammar, compiled)
                self._start(waiting, compiled)
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
        """Whether the request waits until its grammar is compiled."""
        return any(each is request for job in self._jobs.values() for each in job.requests)

    def forget(self, request_id: str) -> None:
        """Drop the matcher of a request that has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._count_thinking(row)

    def shutdown(self) -> None:
        """Drop all requests, and end the threads."""
        self._rows.clear()
        self._jobs.clear()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._threads.clear()

    def _compiler_of(self) -> Compiler:
        if self._compiler is None:
            raise RequestError("structured_outputs needs a tokenizer, and this engine has none; leave it out")
        return self._compiler

    def _submit(self, work: Callable[[], Compiled]) -> Future[Compiled]:
        if self._beside is not None:
            return self._beside(work)
        return self._thread("compile").submit(self._timed, work)

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

    def _thread(self, name: str) -> ThreadPoolExecutor:
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, f"grammar-{name}")
        return self._threads[name]

    def _keep(self, key: bytes, grammar: Grammar, compiled: Compiled) -> None:
        self.num_compiled += 1
        self._kept[key] = compiled, len(grammar.text)
        while len(self._kept) > _MAX_CACHED or sum(size for _, size in self._kept.values()) > _MAX_CACHED_CHARS:
            self._kept.popitem(last=False)

    def _start(self, requests: Sequence[Request], compiled: Compiled) -> None:
        for request in requests:
            self._follow_new(request, lambda request=request: self._matcher_of(request, compiled))  # type: ignore[misc]

    def _matcher_of(self, request: Request, compiled: Compiled) -> Matcher:
        matcher = compiled.matcher(sorted(request.stop_token_ids))
        budget = getattr(request.params, "thinking", None)
        return matcher if budget is None else self._limited(budget, matcher)

    def _limited(self, budget: ThinkingBudget, matcher: Matcher | None) -> ThinkingMatcher:
        if self._vocab_size is None or max(budget.marks) >= self._vocab_size:
            raise RequestError(f"thinking has token ids that the model does not know: {budget.marks!r:.80}")
        return ThinkingMatcher(budget, self._vocab_size, matcher)

    def _follow_new(self, request: Request, fresh: Callable[[], Matcher]) -> None:
        self._rows[request.request_id] = GrammarRow(request, fresh(), fresh)

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
        matcher, begin, count = row.matcher, row.matcher.num_consumed, 0
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
        row.matcher, row.request.may_draft = row.fresh(), False

    # -- following -----------------------------------------------------------------------------------------------

    def rows_of(self, out: SchedulerOutput) -> list[SamplePlace]:
        """Sample positions of a step that belong to requests with a grammar or a thinking budget."""
        if not self._rows:
            return []
        if out.decode_rows is not self._decode_rows:
            names = (self._rows.get(name) for name, _ in out.decode_rows)
            self._decode_rows = out.decode_rows
            self._decoding = [SamplePlace(index, row) for index, row in enumerate(names) if row is not None]
        rows, index = list(self._decoding), len(out.decode_rows)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            index += chunk.samples
            if chunk.samples and name in self._rows:
                rows.append(SamplePlace(index - 1 - len(chunk.drafts), self._rows[name], chunk.drafts))
        return rows

    def begin(self, rows: Sequence[SamplePlace], in_flight: InFlight) -> Future[dict[int, npt.NDArray[np.uint32]]]:
        """Start to fill the masks of a step. The future's result maps sample position -> mask. The matchers must not be
        used until the future is done."""
        todo: list[SamplePlace] = []
        for place in rows:
            if place.row.request.finish_reason is None:
                drawn = in_flight(place.row.request)
                if drawn is not None and self._follow(place.row, drawn):
                    todo.append(place)
        if self._fill_beside and todo:
            return self._thread("masks").submit(_fill, todo)
        filled: Future[dict[int, npt.NDArray[np.uint32]]] = Future()
        filled.set_result(_fill(todo))
        return filled

    def landed(self, rows: Sequence[SamplePlace], step: int, tokens: SampledTokens) -> None:
        """Check the sampled tokens of a step before the scheduler gets them. A token that its grammar forbids becomes a
        failed token."""
        for place in rows:
            row, request = place.row, place.row.request
            late = request.finish_reason is not None or request.slot < 0 or request.resumed_at_step > step
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
            matcher = row.matcher
            done = isinstance(matcher, ThinkingMatcher) and matcher.is_over
            if done and matcher.num_consumed <= row.request.num_output_tokens:
                self.forget(row.request.request_id)
                self._decode_rows, self._decoding = (), []
                row.request.is_guided = False
        return [
            row.request
            for _, row, _ in rows
            if row.matcher.num_consumed == row.request.num_output_tokens
            and not row.matcher.error
            and row.matcher.stopped
        ]

    @staticmethod
    def _follow(row: GrammarRow, drawn: Sequence[int]) -> bool:
        """Advance the matcher to the newest token. ``drawn`` are tokens that steps in flight have sampled after the
        request's known tokens. Returns False if no token may follow."""
        request, matcher = row.request, row.matcher
        begin, own = request.num_prompt_tokens, request.num_output_tokens
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


def _fill(todo: Sequence[SamplePlace]) -> dict[int, npt.NDArray[np.uint32]]:
    """Fill the masks of allowed tokens for these sample positions. Returns sample position -> mask."""
    masks: dict[int, npt.NDArray[np.uint32]] = {}
    for first, row, drafts in todo:
        matcher, begin = row.matcher, row.matcher.num_consumed
        for place in range(len(drafts) + 1):
            mask = matcher.mask()
            if mask is not None:
                masks[first + place] = mask.copy() if drafts else mask
            elif matcher.error:
                break
            if place < len(drafts) and not matcher.consume(drafts[place]):
                break
        if not matcher.error:
            matcher.rewind(begin)
    return masks
