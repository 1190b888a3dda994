"""Conversations as ShareGPT's users shared them: a JSON list of chats with texts, and without times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.workbench.workload.arrivals import Arrivals
from chairlift.workbench.workload.source import Row, Source

__all__ = ["read_sharegpt"]

_PEOPLE: Final = {"human", "user"}
_MODELS: Final = {"gpt", "chatgpt", "assistant", "model", "bing", "bard"}
_BLOCK: Final = 16
"""Tokens per prefix id: turns share all that was said before, to within so many tokens."""
_CHARACTERS_PER_TOKEN: Final = 4
_LONGEST_CHAT: Final = 1 << 26


@dataclasses.dataclass(frozen=True, slots=True)
class _Turn:
    prompt_tokens: int
    output_tokens: int


def read_sharegpt(
    source: Source, arrivals: Arrivals, tokenizer: Callable[[str], int] | None, seed: int
) -> Iterator[Row]:
    """One row per answer; the prompt is all that was said before it.

    A chat starts at a time that ``arrivals`` gives, and its later turns follow as soon as the one before is answered.
    Only the lengths of texts are kept. Without a ``tokenizer`` they are estimated. Raises ConfigError that names the
    line.
    """
    count = tokenizer or (lambda text: max(1, round(len(text) / _CHARACTERS_PER_TOKEN)))
    chats: list[tuple[int, list[_Turn]]] = []
    for line, chat in _list_items(source):
        turns = _turns(f"line {line} of {source.path}", chat, count)
        if turns:
            chats.append((line, turns))
        else:
            source.left_out["conversations without a question and its answer"] += 1
    times = arrivals.times(sum(len(turns) for _, turns in chats), seed)
    start = next_id = 0
    for number, (line, turns) in enumerate(chats):
        for place, turn in enumerate(turns):
            own: dict[str, Any] = {}
            if len(turns) > 1:
                ids = range(next_id, next_id - (-turn.prompt_tokens // _BLOCK))
                own = {"session": str(number), "turn": place, "prefix_ids": tuple(ids), "prefix_block": _BLOCK}
            yield line, times[start], turn.prompt_tokens, turn.output_tokens, own
        # Chats start so far apart that the requests, not the chats, come at the rate of the arrivals.
        start += len(turns)
        next_id -= -turns[-1].prompt_tokens // _BLOCK


def _turns(where: str, chat: Any, count: Callable[[str], int]) -> list[_Turn]:
    messages = chat.get("conversations") if isinstance(chat, dict) else None
    if not isinstance(messages, list):
        raise ConfigError(f"the conversation on {where} has no list of 'conversations'")
    turns: list[_Turn] = []
    said = 0
    asked = False
    for message in messages:
        author = message.get("from") if isinstance(message, dict) else None
        text = message.get("value") if isinstance(message, dict) else None
        if not isinstance(author, str) or not isinstance(text, str):
            raise ConfigError(f"a message of the conversation on {where} lacks 'from' or 'value'")
        tokens = max(1, count(text))
        if author in _MODELS and not asked:
            continue  # a split chat begins with an answer whose question is not there
        if author in _MODELS:
            turns.append(_Turn(said, tokens))
        said += tokens
        asked = author not in _MODELS and (asked or author in _PEOPLE)
    return turns


def _list_items(source: Source) -> Iterator[tuple[int, Any]]:
    """The items of one JSON list, each with its line, without the whole of it in memory."""
    decoder, pieces = json.JSONDecoder(), source.pieces()
    text, place, line, inside, more, wanted = "", 0, 1, False, True, 0
    while True:
        while place < len(text) and (text[place].isspace() or (inside and text[place] == ",")):
            line += text[place] == "\n"
            place += 1
        there = len(text) - place
        if there and not inside:
            if text[place] != "[":
                raise ConfigError(f"line {line} of {source.path} is not the beginning of a JSON list")
            inside, place = True, place + 1
            continue
        if there and text[place] == "]":
            return
        if there > wanted or not more:
            try:
                item, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                if not more or there > _LONGEST_CHAT:
                    raise ConfigError(f"the conversation on line {line} of {source.path} is not valid JSON") from None
                wanted = 2 * there  # it is cut off: not tried again before there is much more
            else:
                yield line, item
                line += text.count("\n", place, end)
                place, wanted = end, 0
                continue
        piece = next(pieces, "")
        text, place, more = text[place:] + piece, 0, bool(piece)
