"""The session of a request: the name of its conversation.

A session is a hint for the router of a fleet and for scheduling policies. It gives no access: requests share blocks
only with the same API key, salt and tokens. What Triton's sequence batcher calls a correlation id is a session here.
"""

from __future__ import annotations

from typing import Final, Protocol

from starlette.requests import Request

from chairlift.server.http.errors import ApiError

__all__ = ["SESSION_HEADERS", "session_of"]

SESSION_HEADERS: Final = ("x-session-id", "x-session-affinity", "x-claude-code-session-id", "session_id", "session-id")
"""Headers with a session, in the order in which they are read: those of OpenRouter, OpenCode, Claude Code and (the last
two) Codex."""
_LONGEST: Final = 256


class _Named(Protocol):
    """A request's body. Those that generate text also have ``session_id``, and most have ``prompt_cache_key``."""

    user: str | None


def session_of(request: Request, payload: _Named) -> str:
    """Name of the session; empty if none is given.

    The first of these counts: the field ``session_id``, a header of :data:`SESSION_HEADERS`, ``prompt_cache_key``, and
    ``user`` (in Anthropic's API ``metadata.user_id``). Headers that are too long or not printable are ignored. Raises
    ApiError 400 for a field that is not printable.
    """
    fields = ("session_id", "prompt_cache_key")
    named = {name: getattr(payload, name, None) or "" for name in fields}
    for name, value in named.items():
        if not value.isprintable():
            raise ApiError(400, f"{name} must be of printable characters", code="invalid_value", param=name)
    headers = [value for name in SESSION_HEADERS for value in request.headers.getlist(name)]
    usable = [value for value in headers if value.isprintable() and len(value) <= _LONGEST]
    user = payload.user if payload.user and payload.user.isprintable() else ""
    return next(filter(None, [named["session_id"], *usable, named["prompt_cache_key"], user]), "")
