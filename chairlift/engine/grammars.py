"""Grammars of the requests in an engine: compiled beside the loop, followed token by token, turned into masks.

A grammar is compiled once and kept by its content. Its request waits meanwhile. Each answer has a matcher of its own,
which follows the tokens that the answer is known to have: also those that steps in flight have drawn, and back again
where such a token is dropped. So preemption has nothing to save.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

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

__all__ = ["Compile", "GrammarRow", "Grammars"]

_log = logging.getLogger(__name__)

_MOST_KEPT: Final = 256
_MOST_KEPT_CHARS: Final = 16 << 20
"""Largest total length of the texts of all compiled grammars that are kept. Compiled size grows with it."""

Compile = Callable[[Callable[[], Compiled]], "Future[Compiled]"]
"""Has a grammar compiled beside the loop."""
InFlight = Callable[[Request], list[int] | None]
"""Tokens that steps in flight have drawn for a request, oldest first; None where one of these steps failed."""


@dataclasses.dataclass(slots=True, eq=False)
class GrammarRow:
    """A request with a grammar or a thinking budget, and where it is in it."""

    request: Request
    matcher: Matcher


@dataclasses.dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, and who waits for it."""

    grammar: Grammar
    future: Future[Compiled]
    requests: list[Request] = dataclasses.field(default_factory=list)


class Grammars:
    """``compiler`` is None where the engine has none: then requests with a grammar are refused.

    ``beside`` compiles (default: on a thread). ``fill_beside``: masks are filled on another thread, while the model
    runs, where all tokens are known before. ``vocab_size`` is the number of logits, which thinking budgets need. One
    thread owns the object.
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
        self._decoding: list[tuple[int, GrammarRow]] = []
        self.num_compiled = self.num_hits = self.num_failed = 0
        """Grammars compiled, requests whose grammar was there, grammars that could not be followed."""

    def __len__(self) -> int:
        """Answers that have a matcher."""
        return len(self._rows)

    @property
    def is_compiling(self) -> bool:
        return bool(self._jobs)

    # -- compiling -----------------------------------------------------------------------------------------------

    def check(self, grammar: Grammar) -> None:
        """Compile it now, unless it is there. Raises RequestError."""
        if grammar.key not in self._kept:
            self._keep(grammar, self._compiler_of().compile(grammar))

    def add(self, requests: Sequence[Request], grammar: Grammar) -> None:
        """The answers of one request are to follow a grammar: those that have to wait for it are not ready then."""
        compiler, key = self._compiler_of(), grammar.key
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
        """The answers of one request may think so long, and follow no grammar. Raises RequestError."""
        for request in requests:
            self._follow_new(request, self._limited(budget, None))

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests whose grammar has been compiled since, and those whose grammar cannot be followed, with the reason.
        Those that have left meanwhile are not among them."""
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

    def forget(self, request_id: str) -> None:
        """The request has left."""
        self._rows.pop(request_id, None)

    def shutdown(self) -> None:
        """Forget all requests, and end the threads."""
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
        return self._thread("compile").submit(work) if self._beside is None else self._beside(work)

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
            matcher = compiled.matcher(sorted(request.stop_token_ids))
            budget = getattr(request.params, "thinking", None)
            self._follow_new(request, matcher if budget is None else self._limited(budget, matcher))

    def _limited(self, budget: ThinkingBudget, matcher: Matcher | None) -> ThinkingMatcher:
        if self._vocab_size is None or max(budget.marks) >= self._vocab_size:
            raise RequestError(f"thinking has token ids that the model does not know: {budget.marks!r:.80}")
        return ThinkingMatcher(budget, self._vocab_size, matcher)

    def _follow_new(self, request: Request, matcher: Matcher) -> None:
        request.may_draft = False
        self._rows[request.request_id] = GrammarRow(request, matcher)

    # -- following -----------------------------------------------------------------------------------------------

    def rows_of(self, out: SchedulerOutput) -> list[tuple[int, GrammarRow]]:
        """Per request with a grammar that samples in a step the sample position whose token it takes."""
        if not self._rows:
            return []
        if out.decode_rows is not self._decode_rows:
            names = (self._rows.get(name) for name, _ in out.decode_rows)
            self._decode_rows = out.decode_rows
            self._decoding = [(index, row) for index, row in enumerate(names) if row is not None]
        rows, index = list(self._decoding), len(out.decode_rows)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            index += chunk.samples
            if chunk.samples and name in self._rows:
                rows.append((index - 1, self._rows[name]))
        return rows

    def begin(
        self, rows: Sequence[tuple[int, GrammarRow]], in_flight: InFlight
    ) -> Future[dict[int, npt.NDArray[np.uint32]]]:
        """Start to fill the masks of a step; by index of the sample position. The matchers must be left alone until
        they are filled."""
        todo: list[tuple[int, Matcher]] = []
        for index, row in rows:
            if row.request.finish_reason is None:
                drawn = in_flight(row.request)
                if drawn is not None and self._follow(row, drawn):
                    todo.append((index, row.matcher))
        if self._fill_beside and todo:
            return self._thread("masks").submit(_fill, todo)
        filled: Future[dict[int, npt.NDArray[np.uint32]]] = Future()
        filled.set_result(_fill(todo))
        return filled

    def landed(self, rows: Sequence[tuple[int, GrammarRow]], step: int, tokens: SampledTokens) -> None:
        """The tokens of a step are known, and about to be taken: those that no grammar allows become failed ones."""
        for index, row in rows:
            request, matcher = row.request, row.matcher
            late = request.finish_reason is not None or request.slot < 0 or request.resumed_at_step > step
            if late or tokens.token_ids[index] == FAILED_ROW:
                continue
            if matcher.num_consumed <= request.num_output_tokens:
                self._follow(row, [tokens.token_ids[index]])
            if matcher.error and matcher.num_consumed <= request.num_output_tokens:  # else it concerns a later token
                tokens.token_ids[index], tokens.errors[index] = FAILED_ROW, matcher.error

    def complete(self, rows: Sequence[tuple[int, GrammarRow]]) -> list[Request]:
        """Requests of a step whose answer nothing may follow, now that its tokens are taken. Those whose reasoning is
        over are followed no more: they may have drafts again."""
        for _, row in rows:
            matcher = row.matcher
            done = isinstance(matcher, ThinkingMatcher) and matcher.is_over
            if done and matcher.num_consumed <= row.request.num_output_tokens:
                self._rows.pop(row.request.request_id, None)
                self._decode_rows, self._decoding = (), []
                row.request.may_draft = True
        return [
            row.request
            for _, row in rows
            if row.matcher.num_consumed == row.request.num_output_tokens
            and not row.matcher.error
            and row.matcher.stopped
        ]

    @staticmethod
    def _follow(row: GrammarRow, drawn: Sequence[int]) -> bool:
        """Bring the matcher to the newest token: the last of ``drawn``, which follow those that the request has. False
        where nothing may follow it."""
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


def _fill(todo: Sequence[tuple[int, Matcher]]) -> dict[int, npt.NDArray[np.uint32]]:
    masks: dict[int, npt.NDArray[np.uint32]] = {}
    for index, matcher in todo:
        mask = matcher.mask()
        if mask is not None:
            masks[index] = mask
    return masks
