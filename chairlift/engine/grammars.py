"""Grammars of the requests in an engine. They are compiled beside the loop, followed token by token, and turned into
masks.

Each grammar is compiled once and cached by its content; its request waits meanwhile. Each answer has its own matcher.
The matcher follows the tokens that are known, including those that steps in flight have sampled, and goes back when
such a token is dropped. So preemption needs no saved state. An answer has only drafts that its grammar allows, and each
draft has the mask of its place.
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

from chairlift.engine.thinking import ThinkingMatcher
from chairlift.errors import RequestError
from chairlift.grammar.compiler import Compiled, Compiler, Matcher
from chairlift.request import Request
from chairlift.scheduler.output import FAILED_ROW, SchedulerOutput
from chairlift.step_batch import SampledTokens
from chairlift.structured_outputs import CANNOT_BE_FOLLOWED, Grammar
from chairlift.thinking import ThinkingBudget

__all__ = ["Compile", "GrammarRow", "Grammars", "HeldPlace"]

_log = logging.getLogger(__name__)

_MOST_KEPT: Final = 256
_MOST_KEPT_CHARS: Final = 16 << 20
"""Largest total length, in characters, of the sources of cached grammars. Compiled size grows with it."""

Compile = Callable[[Callable[[], Compiled]], "Future[Compiled]"]
"""Compiles a grammar beside the loop."""
InFlight = Callable[[Request], list[int] | None]
"""Tokens that steps in flight have sampled for a request, oldest first; None where one of these steps failed."""


@dataclasses.dataclass(slots=True, eq=False)
class GrammarRow:
    """A request with a grammar or a thinking budget, and its matcher."""

    request: Request
    matcher: Matcher
    fresh: Callable[[], Matcher]
    """Makes a matcher at the beginning of the answer."""


class HeldPlace(NamedTuple):
    """Where a step samples for a request with a grammar."""

    first: int
    """The sample position whose token the request takes; with drafts the first of them."""
    row: GrammarRow
    drafts: tuple[int, ...] = ()
    """Each of them has a sample position behind it."""

    def right(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Sampled tokens that the request accepts: one, and one per correct draft."""
        count = 1
        for place, draft in enumerate(self.drafts):
            if token_ids[self.first + place] != draft:
                break
            count += 1
        return token_ids[self.first : self.first + count]


@dataclasses.dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, and the requests that wait for it."""

    grammar: Grammar
    future: Future[Compiled]
    requests: list[Request] = dataclasses.field(default_factory=list)


class Grammars:
    """Compiled grammars and the matchers of running answers.

    ``compiler`` is None in an engine without one; requests with a grammar are then refused. ``beside`` runs the
    compiler (default: on a thread). With ``fill_beside`` masks are filled on another thread while the model runs, if
    all tokens before are known. ``vocab_size`` is the number of logits; thinking budgets need it. One thread owns the
    object.
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
        self._decoding: list[HeldPlace] = []
        self.num_compiled = self.num_hits = self.num_failed = 0
        """Grammars compiled; requests whose grammar was cached; grammars that failed."""
        self.compile_seconds = 0.0
        """Time of all compilations that this object timed: those on its own thread, and those of :meth:`check`."""
        self.num_limited = self.num_ended_thinking = 0
        """Answers with a thinking budget that have left; those whose reasoning the budget ended."""

    def __len__(self) -> int:
        """Number of answers that have a matcher."""
        return len(self._rows)

    @property
    def is_compiling(self) -> bool:
        return bool(self._jobs)

    # -- compiling -----------------------------------------------------------------------------------------------

    def check(self, grammar: Grammar) -> None:
        """Compile the grammar now, unless it is cached. Raises RequestError."""
        if grammar.key not in self._kept:
            compiler = self._compiler_of()
            self._keep(grammar, self._timed(lambda: compiler.compile(grammar)))

    def add(self, requests: Sequence[Request], grammar: Grammar) -> None:
        """Set the grammar of the answers of one request. Answers that must wait for the compiler are marked as not
        ready."""
        compiler, key = self._compiler_of(), grammar.key
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
        """Limit the reasoning of the answers of one request that has no grammar. Raises RequestError."""
        for request in requests:
            request.is_guided = True
            self._follow_new(request, lambda: self._limited(budget, None))

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests whose grammar was compiled since the last call, and (request, reason) of those whose grammar failed.
        Requests that have left are not included."""
        ready: list[Request] = []
        failed: list[tuple[Request, str]] = []
        for key in [key for key, job in self._jobs.items() if job.future.done()]:
            job = self._jobs.pop(key)
            waiting = [request for request in job.requests if not request.is_finished]
            try:
                compiled = job.future.result()
                self._keep(job.grammar, compiled)
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
        """Whether the grammar of a request is being compiled."""
        return any(each is request for job in self._jobs.values() for each in job.requests)

    def forget(self, request_id: str) -> None:
        """Drop a request that has left."""
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

    def _keep(self, grammar: Grammar, compiled: Compiled) -> None:
        self.num_compiled += 1
        self._kept[grammar.key] = compiled, len(grammar.text)
        while len(self._kept) > _MOST_KEPT or sum(size for _, size in self._kept.values()) > _MOST_KEPT_CHARS:
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

    def forced(self, request: Request, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that a grammar makes follow; see :meth:`Matcher.forced`. No step may be in flight."""
        row = self._rows.get(request.request_id)
        if row is None or not self._follow(row, ()):
            return ()
        found = row.matcher.forced(most)
        if row.matcher.error:
            self._begin_again(row)
        return found

    def num_allowed(self, request: Request, drafts: Sequence[int]) -> int:
        """Leading ``drafts`` behind which the answer goes on: its grammar allows each of them, and none may be its
        end. No step may be in flight."""
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
        """Replace a matcher that failed after a draft, which may never be sampled. The request gets no further
        drafts."""
        row.matcher, row.request.may_draft = row.fresh(), False

    # -- following -----------------------------------------------------------------------------------------------

    def rows_of(self, out: SchedulerOutput) -> list[HeldPlace]:
        """The step's sample positions that belong to requests with a grammar."""
        if not self._rows:
            return []
        if out.decode_rows is not self._decode_rows:
            names = (self._rows.get(name) for name, _ in out.decode_rows)
            self._decode_rows = out.decode_rows
            self._decoding = [HeldPlace(index, row) for index, row in enumerate(names) if row is not None]
        rows, index = list(self._decoding), len(out.decode_rows)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            index += chunk.samples
            if chunk.samples and name in self._rows:
                rows.append(HeldPlace(index - 1 - len(chunk.drafts), self._rows[name], chunk.drafts))
        return rows

    def begin(self, rows: Sequence[HeldPlace], in_flight: InFlight) -> Future[dict[int, npt.NDArray[np.uint32]]]:
        """Start to fill the masks of a step. The result maps sample positions to masks. The matchers must not be used
        until it is ready."""
        todo: list[HeldPlace] = []
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

    def landed(self, rows: Sequence[HeldPlace], step: int, tokens: SampledTokens) -> None:
        """Check the tokens of a step before they are taken. Tokens that their grammar forbids become failed tokens."""
        for place in rows:
            row, request = place.row, place.row.request
            late = request.finish_reason is not None or request.slot < 0 or request.resumed_at_step > step
            right = place.right(tokens.token_ids)
            last = request.num_output_tokens + len(right) - 1  # tokens before the newest that was drawn
            if late or right[-1] == FAILED_ROW:
                continue
            if place.drafts and row.matcher.error and row.matcher.num_consumed > last:
                self._begin_again(row)
            if row.matcher.num_consumed <= last:
                self._follow(row, right)
            matcher = row.matcher
            if matcher.error and matcher.num_consumed <= last:  # otherwise the error concerns a later token
                broken = place.first + max(0, matcher.num_consumed - request.num_output_tokens)
                tokens.token_ids[broken], tokens.errors[broken] = FAILED_ROW, matcher.error

    def complete(self, rows: Sequence[HeldPlace]) -> list[Request]:
        """Requests of a step whose answer is complete: the grammar allows no further token. Call it after the step's
        tokens are taken. Matchers whose reasoning has ended are dropped, so their requests may have drafts again."""
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
        """Advance the matcher to the newest token, the last of ``drawn``. ``drawn`` follows the request's known tokens.
        False where no token may follow."""
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


def _fill(todo: Sequence[HeldPlace]) -> dict[int, npt.NDArray[np.uint32]]:
    """The masks of all places. With drafts the matcher goes on along them, and comes back."""
    masks: dict[int, npt.NDArray[np.uint32]] = {}
    for first, row, drafts in todo:
        matcher, begin = row.matcher, row.matcher.num_consumed
        for place in range(len(drafts) + 1):
            mask = matcher.mask()
            if mask is None:
                break
            masks[first + place] = mask.copy() if drafts else mask
            if place < len(drafts) and not matcher.consume(drafts[place]):
                break
        if not matcher.error:
            matcher.rewind(begin)
    return masks
