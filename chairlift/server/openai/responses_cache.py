"""The breakpoints of the prompt cache in the input items of a response."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from chairlift.server.caching.breakpoints import Breakpoints
from chairlift.server.http.state import ServerState
from chairlift.server.openai.prompt_cache import SECONDS, PartMarking, num_skipped, whole_prompt
from chairlift.server.openai.protocol import ChatRequest
from chairlift.server.openai.responses_types import ResponsesRequest

__all__ = ["response_breakpoints"]


def response_breakpoints(
    state: ServerState, payload: ResponsesRequest, to_chat: Callable[[ResponsesRequest], ChatRequest]
) -> Breakpoints | None:
    """The breakpoints of a request for a response; None if it has none. ``to_chat`` translates a request to a chat. The
    items of the request must have been checked. Raises ApiError 400."""
    items = () if isinstance(payload.input, str) else payload.input
    count = PartMarking(0)
    for index, item in enumerate(items):
        for key in ("content", "output"):
            count.without(f"input[{index}]", item, key)
    whole = whole_prompt(state, payload, count.num_seen > 0)
    if not count.num_seen:
        return Breakpoints(whole=whole) if whole else None
    marking = PartMarking(num_skipped(count.num_seen, whole))
    marked = [marking.marked(marking.marked(item, "content", "input_text"), "output", "input_text") for item in items]
    chat = to_chat(msgspec.structs.replace(payload, input=marked))
    return Breakpoints((SECONDS,) * marking.num_made, chat.messages, chat.tools or (), whole)
