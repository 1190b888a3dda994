"""Thinking budgets: a maximum number of reasoning tokens, and the tokens that mark reasoning. Plain data.

In requests, the field is vLLM's ``thinking_token_budget``. Marks are token ids, so that no text has to be decoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from chairlift.errors import RequestError

__all__ = ["ThinkingBudget"]

_MAX_MARKS = 64
_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """After ``max_tokens`` tokens of reasoning, the engine forces the end mark (the token ``end``), and then the tokens
    ``after``, which the model's format needs before the answer. Later tokens are free.

    The tokens ``begin``, ``end`` and ``after`` are marks, and do not count as reasoning tokens. A model that ends its
    reasoning earlier is not affected. Raises RequestError on construction for values of the wrong type or out of range.
    """

    max_tokens: int
    """Maximum number of reasoning tokens, 0 or more."""
    end: int
    """Id of the token that ends the reasoning."""
    begin: tuple[int, ...] = ()
    """Ids of the tokens that begin the reasoning, at the start of the answer. Empty: the prompt ends with these
    tokens."""
    after: tuple[int, ...] = ()
    """Ids of the tokens that the model's format needs between the end of the reasoning and the answer."""

    def __post_init__(self) -> None:
        for name in ("begin", "after"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if len(getattr(self, name)) > _MAX_MARKS:
                raise RequestError(f"thinking.{name} must have at most {_MAX_MARKS} token ids")
        fields = {"max_tokens": (self.max_tokens,), "end": (self.end,), "begin": self.begin, "after": self.after}
        for name, values in fields.items():
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX:
                    raise RequestError(f"thinking.{name} must be of whole numbers from 0 to {_MAX}, got {value!r:.80}")

    @classmethod
    def of(cls, value: Any) -> ThinkingBudget:
        """Convert a mapping with the names of the fields. An object of this class is returned as it is. Raises
        RequestError."""
        if isinstance(value, cls):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(value, Mapping) or not {"max_tokens", "end"} <= set(value) <= set(known):
            raise RequestError(f"thinking must be a ThinkingBudget, or an object with {', '.join(known)}")
        return cls(**value)

    @property
    def marks(self) -> tuple[int, ...]:
        """All token ids of the budget: ``begin``, ``end`` and ``after``."""
        return (*self.begin, self.end, *self.after)
