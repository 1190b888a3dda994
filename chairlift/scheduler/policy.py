"""Who is next, and who gives way: a scheduling policy is a value, and the loop never asks which one it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from chairlift.request import Request

__all__ = ["FCFS", "Policy"]


class Policy(Protocol):
    """Orders the requests, and picks the victim when blocks are short."""

    name: str

    def order(self, request: Request) -> tuple[int, ...]:
        """Sort key; the smallest goes first. Must not change while the request lives."""
        ...

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        """The request to preempt. Candidates are never ahead of the one that is in need; None lets that one wait."""
        ...


class FirstComeFirstServed:
    """Arrival order; the latest arrival gives way (vLLM's and Orca's order)."""

    name = "fcfs"

    def order(self, request: Request) -> tuple[int, ...]:
        return (request.sequence,)

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        return max(candidates, key=self.order, default=None)


FCFS: Policy = FirstComeFirstServed()
