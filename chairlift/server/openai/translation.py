"""Helpers for endpoints that translate their requests into chat requests: names of fields, texts of parts, errors.

The resulting chat is checked like any other chat. Error messages use the names of the client's own fields.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from chairlift.errors import RequestError, TemplateError
from chairlift.server.http.errors import ApiError, to_api_error
from chairlift.server.http.state import ServerState

__all__ = ["MAX_MESSAGES", "Names", "image_part", "texts_of", "thinking_switch", "wrong"]

MAX_MESSAGES: Final = 1024
_PLACE: Final = re.compile(r"(?:messages\[[0-9]+\](?:\.tool_calls\[[0-9]+\])?|(?<![\w.])tools\[[0-9]+\])")
_LONGEST: Final = 60
_THINKING: Final = re.compile(r"(?<![.\w])thinking is (?:not )?defined")


class Names:
    """Translates field names of a chat request back to names in the client's original request.

    ``fields`` maps regular expressions of names in the chat to the client's names.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = [(re.compile(rf"(?<![\w.]){pattern}(?!\w)"), name) for pattern, name in fields.items()]
        self.places: dict[str, str] = {}
        """Path in the chat request -> path in the client's request, for messages, the tool calls in them, and tools."""
        self.namespaces: dict[str, tuple[str, str]] = {}
        """Name of a tool in the chat -> (its namespace, its name there), for tools in namespaces."""

    def translated(self, text: str) -> str:
        """An error message with the client's field names. Only the text before the first quotation mark is translated,
        because quoted values come from the client."""
        translated, quote, rest = _PLACE.sub(lambda found: self._place(found[0]), text).partition("'")
        for pattern, name in self._fields:
            translated = pattern.sub(name, translated)
        return translated + quote + rest

    def _place(self, place: str) -> str:
        return self.places.get(place) or self.places.get(place.partition(".")[0], place)

    @contextlib.contextmanager
    def translated_errors(self, state: ServerState, request_id: str) -> Iterator[None]:
        """Context manager: replace errors that name fields of the translated chat request by ApiErrors that name the
        fields of the client's own request."""
        try:
            yield
        except (ApiError, RequestError, TemplateError) as error:
            api_error = to_api_error(error, state, request_id, chat=True)
            api_error.message = self.translated(api_error.message)
            api_error.param = None if api_error.param is None else self.translated(api_error.param)
            raise api_error from None


def texts_of(
    where: str,
    parts: Any,
    kinds: Sequence[str],
    instead: str = "",
    other_kinds: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] | None = None,
) -> str | list[dict[str, Any]]:
    """Content of a chat message, from ``parts``: a text, or a list of parts whose types are among ``kinds``.

    ``other_kinds`` maps further types to a function of (path, part) that makes the chat's part. Raises ApiError for a
    part of any other type; ``instead`` is a text that says what to send.
    """
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        wrong(where, "must be a text or a list of parts", parts)
    found = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            wrong(place, f'must be an object such as {{"type": "{kinds[0]}", ...}}', part)
        kind = part.get("type")
        if make := (other_kinds or {}).get(str(kind)):
            found.append(make(place, part))
            continue
        if kind not in kinds:
            served = ", ".join([*kinds, *(other_kinds or ())])
            message = f"{place}.type is {str(kind)[:_LONGEST]!r}, which is not supported; send {served}{instead}"
            raise ApiError(400, message, code="unsupported_content", param=place)
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            wrong(f"{place}.{name}", "must be a text", part.get(name))
        found.append({"type": "text", "text": part[name]})
    return found[0]["text"] if len(found) == 1 and "text" in found[0] else found or ""


def image_part(url: Any, where: str) -> dict[str, Any]:
    """Image part of a chat message, from a URL. Raises ApiError if the URL is not a text."""
    if not isinstance(url, str):
        wrong(where, "must be a data URL (data:image/png;base64,...)", url)
    return {"type": "image_url", "image_url": {"url": url}}


def thinking_switch(template: str) -> str | None:
    """Name of the variable by which a chat template turns thinking on and off; None if it has none."""
    if "enable_thinking" in template:
        return "enable_thinking"
    return "thinking" if _THINKING.search(template) else None


def wrong(where: str, allowed: str, given: Any) -> NoReturn:
    """Raise ApiError 400 with the text that the field at the path ``where`` has the value ``given``, but only
    ``allowed`` is allowed."""
    got = "nothing" if given is None else repr(given)[:_LONGEST]
    raise ApiError(400, f"{where} {allowed}; got {got}", code="invalid_value", param=where)
