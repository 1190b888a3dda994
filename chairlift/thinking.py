"""Thinking budgets: a limit of reasoning tokens, and the marks that show reasoning. Plain data.

The field of requests is vLLM's ``thinking_token_budget``. Marks are token ids here, so that no text has to be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from chairlift.errors import RequestError

__all__ = ["ThinkingBudget"]

_MOST_MARKS = 64
_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """After ``max_tokens`` tokens of reasoning, ``end`` and then ``after`` are forced. Later tokens are free.

    Marks are not counted. A model that ends its reasoning earlier is not affected. Raises RequestError on construction
    for values of the wrong type or out of range.
    """

    max_tokens: int
    """Most tokens of reasoning, 0 or more."""
    end: int
    """The token that ends the reasoning."""
    begin: tuple[int, ...] = ()
    """Tokens that begin the reasoning, at the start of the answer. Empty: the prompt ends with them."""
    after: tuple[int, ...] = ()
    """Tokens that the model's format needs between the end of the reasoning and the answer."""

    def __post_init__(self) -> None:
        for name in ("begin", "after"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if len(getattr(self, name)) > _MOST_MARKS:
                raise RequestError(f"thinking.{name} must have at most {_MOST_MARKS} token ids")
        given = {"max_tokens": (self.max_tokens,), "end": (self.end,), "begin": self.begin, "after": self.after}
        for name, values in given.items():
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX:
                    raise RequestError(f"thinking.{name} must be of whole numbers from 0 to {_MAX}, got {value!r:.80}")

    @classmethod
    def of(cls, given: Any) -> ThinkingBudget:
        """Convert an object of this class, or a mapping with the names of its fields. Raises RequestError."""
        if isinstance(given, cls):
            return given
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(given, Mapping) or not {"max_tokens", "end"} <= set(given) <= set(known):
            raise RequestError(f"thinking must be a ThinkingBudget, or an object with {', '.join(known)}")
        return cls(**given)

    @property
    def marks(self) -> tuple[int, ...]:
        """All token ids in it."""
        return (*self.begin, self.end, *self.after)
