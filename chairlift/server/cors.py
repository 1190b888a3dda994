"""Which pages of other origins may ask this server from a browser: none, unless ``--cors-origin`` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

__all__ = ["ANY", "allows_origin", "with_cors"]

ANY: Final = "*"
"""Value of ``--cors-origin`` that stands for every origin."""
_EXPOSED: Final = ("x-request-id", "warning", "retry-after")
_MAX_AGE: Final = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app``, whose answers pages of ``origins`` may read; ``app`` itself where there are none.

    Credentials of the browser (cookies) are never allowed: an API key is a header, which the page writes itself.
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
    """Whether a request with these Origin headers comes from a page that is allowed to ask."""
    return len(given) == 1 and (ANY in origins or given[0].decode("latin-1") in origins)
