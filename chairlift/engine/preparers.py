"""What prepares parts of requests beside the loop: a grammar, an adapter, images."""

from __future__ import annotations

from typing import Protocol

from chairlift.core.request import Request

__all__ = ["Preparer"]


class Preparer(Protocol):
    """Prepares one part of each request that has it. The request waits until all its parts are ready. Requests without
    the part are unknown to it."""

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """(requests whose part has become ready since the last call, (request, reason) of those whose part failed)."""
        ...

    def waits(self, request: Request) -> bool:
        """Whether the request waits for its part."""
        ...

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""
        ...

    def shutdown(self) -> None:
        """Drop all requests, and end the threads."""
        ...
