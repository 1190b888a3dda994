"""Cross-origin requests of web pages: none are allowed unless ``--cors-origin`` names their origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

__all__ = ["ANY", "allows_origin", "with_cors"]

ANY: Final = "*"
"""Value of ``--cors-origin`` for all origins."""
_EXPOSED: Final = ("x-request-id", "warning", "retry-after")
_MAX_AGE: Final = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow pages of ``origins`` to read answers of ``app``. Returns ``app`` itself if there are none.

    Credentials of the browser (cookies) are never allowed. An API key is a header that the page writes itself.
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
    """Whether a request with these Origin headers comes from an allowed page."""
    return len(given) == 1 and (ANY in origins or given[0].decode("latin-1") in origins)
