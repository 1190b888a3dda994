"""A dialect: a part of the HTTP interface, with its routes and what ``/openapi.json`` says about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from chairlift.server.http.errors import ErrorForm

__all__ = ["Dialect"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The endpoints of one API. Each folder of endpoints declares one in its module ``dialect``, and
    :data:`chairlift.server.dialects.DIALECTS` lists them."""

    routes: Sequence[BaseRoute]
    types: Sequence[type[msgspec.Struct]] = ()
    """Types of requests and responses, for the schemas of ``/openapi.json``."""
    paths: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Path -> method -> operation, in OpenAPI's form; see :mod:`chairlift.server.http.api_docs`."""
    prefixes: Sequence[str] = ()
    """Paths below which all requests belong to this API, such as ``/v1``. The server counts these requests."""
    computing: Collection[str] = ()
    """Paths whose requests a model answers; the field ``model`` of the body names it."""
    of_server: Collection[str] = ()
    """Paths that need no engine. All others are about one engine."""
    error_form: ErrorForm | None = None
    """Form of errors at ``prefixes`` and below them; None for OpenAI's form."""
