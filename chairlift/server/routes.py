"""The routes of all endpoints: those of the dialects, and the document about them."""

from __future__ import annotations

from starlette.routing import BaseRoute

from chairlift.server.dialects import DIALECTS
from chairlift.server.http import openapi

__all__ = ["all_routes"]


def all_routes() -> list[BaseRoute]:
    """The routes of all endpoints."""
    return [*(route for dialect in DIALECTS for route in dialect.routes), *openapi.routes]
