"""Pages for browsers: the routes."""

from __future__ import annotations

from typing import Final

from chairlift.server.http.dialect import Dialect
from chairlift.server.pages import live, pages

__all__ = ["PAGES"]

PAGES: Final = Dialect(
    routes=[*pages.routes, *live.routes], of_server={"/live", "/live/", *(route.path for route in pages.routes)}
)
