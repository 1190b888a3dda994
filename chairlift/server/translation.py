"""Tools for endpoints that translate their requests into chats: names of fields, texts of parts, errors.

The chat is checked like any other. Errors use the names that the client used.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from chairlift.errors import RequestError, TemplateError
from chairlift.server.errors import ApiError, to_api_error
from chairlift.server.state import ServerState

__all__ = ["MAX_MESSAGES", "Names", "image_part", "texts_of", "wrong"]

MAX_MESSAGES: Final = 1024
_PLACE: Final = re.compile(r"messages\[[0-9]+\](\.tool_calls\[[0-9]+\])?")
_LONGEST: Final = 60


class Names:
    """The client's names for the fields of the chat that was made from its request.

    ``fields`` maps regular expressions of names in the chat to the client's names.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = [(re.compile(rf"(?<![\w.]){pattern}(?!\w)"), name) for pattern, name in fields.items()]
        self.places: dict[str, str] = {}
        """Place in the chat -> place in the request, for messages and their calls."""

    def told(self, text: str) -> str:
        """A message about the chat, with the client's names. Names after the first quote are not replaced."""
        told, quote, rest = _PLACE.sub(lambda found: self._place(found[0]), text).partition("'")
        for pattern, name in self._fields:
            told = pattern.sub(name, told)
        return told + quote + rest

    def _place(self, place: str) -> str:
        return self.places.get(place) or self.places.get(place.partition(".")[0], place)

    @contextlib.contextmanager
    def telling(self, state: ServerState, request_id: str) -> Iterator[None]:
        """Convert errors of a chat into ApiErrors about the client's fields."""
        try:
            yield
        except (ApiError, RequestError, TemplateError) as error:
            told = to_api_error(error, state, request_id, chat=True)
            told.message = self.told(told.message)
            told.param = None if told.param is None else self.told(told.param)
            raise told from None


def texts_of(
    where: str,
    parts: Any,
    kinds: Sequence[str],
    instead: str = "",
    others: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] | None = None,
) -> str | list[dict[str, Any]]:
    """Content of a chat's message: a text, or the text parts of a list whose types are among ``kinds``.

    ``others`` maps further types to what makes a chat's part of one, from its place and itself. Raises ApiError with
    the name of a part of another type; ``instead`` is the remedy.
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
        if make := (others or {}).get(str(kind)):
            found.append(make(place, part))
            continue
        if kind not in kinds:
            served = ", ".join([*kinds, *(others or ())])
            message = f"{place}.type is {str(kind)[:_LONGEST]!r}, which is not supported; send {served}{instead}"
            raise ApiError(400, message, code="unsupported_content", param=place)
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            wrong(f"{place}.{name}", "must be a text", part.get(name))
        found.append({"type": "text", "text": part[name]})
    return found[0]["text"] if len(found) == 1 and "text" in found[0] else found or ""


def image_part(url: Any, where: str) -> dict[str, Any]:
    """The part of a chat's message with the image at an address. Raises ApiError where that is no text."""
    if not isinstance(url, str):
        wrong(where, "must be a data URL (data:image/png;base64,...)", url)
    return {"type": "image_url", "image_url": {"url": url}}


def wrong(where: str, allowed: str, given: Any) -> NoReturn:
    """Raise ApiError 400 for the field at ``where``."""
    got = "nothing" if given is None else repr(given)[:_LONGEST]
    raise ApiError(400, f"{where} {allowed}; got {got}", code="invalid_value", param=where)
