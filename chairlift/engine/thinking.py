"""Follows the reasoning of an answer with a thinking budget, and forces the reasoning to end when the budget is used
up.

It implements the same :class:`~chairlift.text.grammar.compiler.Matcher` interface as a grammar, so
:class:`~chairlift.engine.grammars.Grammars` handles rows, look-ahead, preemption and dropped tokens. Its state depends
only on the answer's tokens. llama.cpp (``reasoning-budget``) and vLLM (``thinking_token_budget``) have the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from chairlift.base.thinking import ThinkingBudget
from chairlift.text.grammar.compiler import Matcher

__all__ = ["ThinkingMatcher"]

_LATEST: Final = 4
"""Reasoning must begin within this many tokens of an answer, which leaves room for white space. Text that begins later
is not reasoning."""
_BEFORE: Final = 0
_INSIDE: Final = 1
_AFTER: Final = 2
_OVER: Final = 3
_State = tuple[int, int]
"""(phase, count) of the matcher. In each phase the count has another meaning: tokens of ``begin`` seen so far, tokens
of reasoning, or tokens of ``after`` that were forced."""


class ThinkingMatcher:
    """Matcher of one answer, for a model with ``vocab_size`` logits.

    ``grammar`` is the matcher of the answer's grammar, if it has one. If the grammar does not allow the end of the
    reasoning now (for example inside a character), the end is forced later.
    """

    def __init__(self, budget: ThinkingBudget, vocab_size: int, grammar: Matcher | None = None) -> None:
        self.num_consumed = 0
        self.error = ""
        self._budget = budget
        self._grammar = grammar
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._states: list[_State] = [(_BEFORE, 0) if budget.begin else (_INSIDE, 0)]
        """Entry i: state after i tokens of the answer. No entries are added after the reasoning has ended."""

    @property
    def stopped(self) -> bool:
        return self._grammar is not None and self._grammar.stopped

    @property
    def is_over(self) -> bool:
        """Whether the matcher has nothing more to do: the reasoning has ended, and there is no grammar."""
        return self._grammar is None and self._states[-1][0] == _OVER

    @property
    def was_ended(self) -> bool:
        """Whether the budget was used up, so that the end of the reasoning was forced."""
        return any(phase == _INSIDE and count >= self._budget.max_tokens for phase, count in self._states)

    def consume(self, token_id: int) -> bool:
        if self.error:
            return False
        if self._grammar is not None and not self._grammar.consume(token_id):
            self.error = self._grammar.error
            return False
        if self._states[-1][0] != _OVER:
            self._states.append(self._next(self._states[-1], token_id))
        self.num_consumed += 1
        return True

    def rewind(self, num_consumed: int) -> bool:
        if self._grammar is not None and not self._grammar.rewind(num_consumed):
            self.error = self._grammar.error
            return False
        if num_consumed < self.num_consumed:
            del self._states[num_consumed + 1 :]
            self.num_consumed = num_consumed
        return not self.error

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        count = len(token_ids) if self._grammar is None else self._grammar.num_allowed(token_ids)
        begin = self.num_consumed
        allowed = 0
        for token_id in token_ids[:count]:
            forced = self._forced(self._states[-1])  # if a grammar delays it, there are fewer drafts
            if forced not in (None, token_id) or not self.consume(token_id):
                break
            allowed += 1
        self.rewind(begin)
        return allowed

    def forced(self, limit: int) -> Sequence[int]:
        state = self._states[-1]
        found = list[int]()
        while len(found) < limit and (token_id := self._forced(state)) is not None:
            found.append(token_id)
            state = self._next(state, token_id)
        return found if found or self._grammar is None else self._grammar.forced(limit)

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Mask of the tokens that may come next. None if all tokens may come next, and after an :attr:`error`."""
        own = None
        forced = self._forced(self._states[-1])
        if self._grammar is not None:
            own = self._grammar.mask()
            if own is None:
                self.error = self._grammar.error
                return None
        if forced is None or (own is not None and not int(own[forced // 32]) >> forced % 32 & 1):
            return own
        self._bits[:] = 0
        self._bits[forced // 32] = np.uint32(1 << forced % 32)
        return self._bits

    def _forced(self, state: _State) -> int | None:
        """Token that must come next; None if the model may choose."""
        phase, count = state
        if phase == _INSIDE and count >= self._budget.max_tokens:
            return self._budget.end
        return self._budget.after[count] if phase == _AFTER else None

    def _next(self, state: _State, token_id: int) -> _State:
        phase, count = state
        budget = self._budget
        if phase == _BEFORE:
            begin = budget.begin
            seen = count + 1 if token_id == begin[count] else int(token_id == begin[0])
            if seen == len(begin):
                return _INSIDE, 0
            return (_BEFORE, seen) if seen or len(self._states) < _LATEST else (_OVER, 0)
        if phase == _INSIDE and token_id != budget.end:
            return _INSIDE, count + 1
        forced = 0 if phase == _INSIDE else count + 1
        goes_on = (phase == _AFTER and token_id == budget.after[count]) or (
            phase == _INSIDE and count >= budget.max_tokens  # otherwise the model continues freely
        )
        return (_AFTER, forced) if goes_on and forced < len(budget.after) else (_OVER, 0)
