"""Cross-origin requests of web pages (CORS). No origin is allowed by default; ``--cors-origin`` allows one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

__all__ = ["ANY", "allows_origin", "with_cors"]

ANY: Final = "*"
"""Value of ``--cors-origin`` that allows all origins."""
_EXPOSED: Final = ("x-request-id", "warning", "retry-after")
_MAX_AGE: Final = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow pages of ``origins`` to read responses of ``app``. Returns ``app`` itself if ``origins`` is empty.

    The browser never sends its credentials (cookies). The page itself adds the API key as a header.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[ANY] if ANY in origins else list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_credentials=False,
        expose_headers=_EXPOSED,
        max_age=_MAX_AGE,
    )


def allows_origin(origins: Sequence[str], given: Sequence[bytes]) -> bool:
    """Whether a request with these Origin headers comes from a page of an allowed origin."""
    return len(given) == 1 and (ANY in origins or given[0].decode("latin-1") in origins)
