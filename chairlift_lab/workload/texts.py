"""Reads data sets of texts (conversations, prompts and batch files) as requests with their contents.

Conversations are in ShareGPT's format (a JSON list, or one conversation per line), or are lists of OpenAI messages.
Files of prompts are those of ``vllm bench serve --dataset-name custom``. Batch files are those of OpenAI's batch API.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift_lab.workload.arrivals import Arrivals
from chairlift_lab.workload.source import Row, TraceSource

__all__ = ["DEFAULT_OUTPUT", "TEXT_FORMATS", "Said", "read_texts", "text_format_of", "text_rows"]

TEXT_FORMATS: Final = {
    "sharegpt": "a JSON list of conversations, with texts but no times",
    "chats": "JSON lines with conversations (as in ShareGPT) or messages (as in OpenAI's API)",
    "custom": "JSON lines with prompt, and optionally output_tokens: vLLM's custom data sets",
    "openai-batch": "JSON lines with custom_id and body: a file for OpenAI's batch API",
}
"""Name of a format with texts -> description."""

DEFAULT_OUTPUT: Final = 256
"""Number of output tokens of a request if the file does not give one. It is the default of ``vllm bench serve``."""

_PEOPLE: Final = {"human", "user"}
_MODELS: Final = {"gpt", "chatgpt", "assistant", "model", "bing", "bard"}
_BLOCK: Final = 16
"""Number of prompt tokens that one prefix id covers. Turns of a chat share whole blocks of this size."""
_CHARACTERS_PER_TOKEN: Final = 4
_LONGEST_CHAT: Final = 1 << 26
_IMAGE_MARK: Final = "<image>"


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """Content of one request: a plain prompt or a chat, and its lengths."""

    prompt_tokens: int
    output_tokens: int
    text: str | None
    """The plain prompt. None for a chat."""
    messages: tuple[Mapping[str, Any], ...]
    """Messages of a chat in the format of OpenAI's API. Empty for a plain prompt."""
    images: int = 0
    """Number of images in the prompt. Their tokens are not in ``prompt_tokens``."""
    unsaid: bool = False
    """Whether the data set omits the length of the answer, so that ``output_tokens`` is a default."""


def text_format_of(head: str) -> str | None:
    """Format of a file of texts, recognised by the first line ``head``. None if the file is not in such a format."""
    if head.startswith("["):
        return "sharegpt" if head[1:].lstrip()[:1] in ("", "{") else None
    try:
        fields = json.loads(head)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or "input_length" in fields:
        return None
    if isinstance(fields.get("body"), dict):
        return "openai-batch"
    if isinstance(fields.get("conversations"), list) or isinstance(fields.get("messages"), list):
        return "chats"
    return "custom" if isinstance(fields.get("prompt"), str) else None


def text_rows(
    source: TraceSource, format: str, arrivals: Arrivals, tokenizer: Callable[[str], int] | None, seed: int
) -> Iterator[Row]:
    """Yield one row per request, with lengths but without texts; see :func:`read_texts`.

    ``arrivals`` gives the start time of each chat. A later turn is sent as soon as the previous turn is answered.
    """
    for row, _ in read_texts(source, format, arrivals, tokenizer, seed, keep=False):
        yield row


def read_texts(
    source: TraceSource,
    format: str,
    arrivals: Arrivals,
    tokenizer: Callable[[str], int] | None,
    seed: int,
    *,
    keep: bool = True,
) -> Iterator[tuple[Row, Said]]:
    """Yield one row per answer, with the content of its request. The prompt of a chat turn is all earlier text of the
    chat.

    Without a ``tokenizer``, lengths are estimated from the number of characters. If ``keep`` is false, texts are
    dropped after their tokens are counted. Raises ConfigError with the line number for an invalid line.
    """
    count = tokenizer or (lambda text: max(1, round(len(text) / _CHARACTERS_PER_TOKEN)))
    reader = {"custom": _prompt, "openai-batch": _batch}.get(format, _chat)
    items = list_items(source) if format == "sharegpt" else _line_items(source)
    groups: list[tuple[int, list[Said]]] = []
    images = 0
    for line, item in items:
        said = reader(f"line {line} of {source.path}", item, count)
        images += sum(each.images for each in said)
        if not keep:
            said = [dataclasses.replace(each, text=None, messages=()) for each in said]
        if said:
            groups.append((line, said))
        else:
            source.left_out[
                "requests that are no chat and no completion"
                if format == "openai-batch"
                else "conversations without a question and its answer"
            ] += 1
    source.images = images
    times = arrivals.times(sum(len(said) for _, said in groups), seed)
    start = next_id = 0
    for number, (line, said) in enumerate(groups):
        for turn, each in enumerate(said):
            own: dict[str, Any] = {}
            if len(said) > 1:
                ids = range(next_id, next_id - (-each.prompt_tokens // _BLOCK))
                own = {"session": str(number), "turn": turn, "prefix_ids": tuple(ids), "prefix_block": _BLOCK}
            yield (line, times[start], each.prompt_tokens, each.output_tokens, own), each
        # A chat with n turns uses n arrival times, so that the rate of ``arrivals`` counts requests, not chats.
        start += len(said)
        next_id -= -said[-1].prompt_tokens // _BLOCK


# --- what an item says -----------------------------------------------------------------------------------------------


def _chat(where: str, chat: Any, count: Callable[[str], int]) -> list[Said]:
    """One request for each answered question of a conversation.

    A question at the end of OpenAI messages gives a request, too, although it has no answer.
    """
    lists = [chat.get(name) for name in ("conversations", "messages")] if isinstance(chat, dict) else []
    found = next((each for each in lists if isinstance(each, list)), None)
    if found is None:
        raise ConfigError(f"the conversation on {where} has no list of 'conversations' or 'messages'")
    shared = isinstance(lists[0], list)
    images = len(chat["image"]) if isinstance(chat.get("image"), list) else int("image" in chat)
    turns: list[Said] = []
    said: list[Mapping[str, Any]] = []
    tokens = 0
    has_question = False
    marked = 0
    for message in found:
        author, text, pictures, content = _message(where, message, shared)
        length = max(1, count(text))
        if author in _MODELS and not has_question:
            continue  # some data sets split long chats, so that a part begins with an answer
        if author in _MODELS:
            turns.append(Said(tokens, length, None, tuple(said), max(marked, images)))
        tokens += length
        marked += pictures
        if author in _MODELS:
            role = "assistant"
        elif author in _PEOPLE:
            role = "user"
        else:
            role = author
        said.append({**_rest(message, shared), "role": role, "content": content})
        has_question = author not in _MODELS and (has_question or author in _PEOPLE)
    if has_question and not shared:
        turns.append(Said(tokens, DEFAULT_OUTPUT, None, tuple(said), max(marked, images), unsaid=True))
    return turns


def _rest(message: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    """Fields of an OpenAI message besides role and content, such as tool calls. Empty for a ShareGPT message."""
    return {} if shared else {name: value for name, value in message.items() if name not in ("role", "content")}


def _message(where: str, message: Any, shared: bool) -> tuple[str, str, int, Any]:
    """(author, text, number of images, content to send) of a message. Raises ConfigError if a part is missing."""
    names = ("from", "value") if shared else ("role", "content")
    author, content = (message.get(name) if isinstance(message, dict) else None for name in names)
    parts = content if isinstance(content, list) and not shared else [{"type": "text", "text": content}]
    if content is None and not shared and isinstance(author, str) and message.get("tool_calls"):
        return author, "", 0, None
    texts = []
    images = 0
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        images += kind in ("image_url", "image", "input_image")
        texts += [text] if isinstance(text, str) else []
    if not isinstance(author, str) or not (texts or images):
        raise ConfigError(f"a message of the conversation on {where} lacks {names[0]!r} or {names[1]!r}")
    text = "".join(texts)
    return author, text, images + (text.count(_IMAGE_MARK) if shared else 0), content


def _prompt(where: str, item: Any, count: Callable[[str], int]) -> list[Said]:
    """The request of a record with a plain ``prompt``."""
    text = item.get("prompt") if isinstance(item, dict) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where} has no text in 'prompt'")
    answer = next(
        (item[name] for name in ("completion", "output", "response") if isinstance(item.get(name), str)), None
    )
    wanted = _wanted(where, item, ("output_tokens", "output_len", "max_tokens"))
    tokens = wanted or (max(1, count(answer)) if answer else DEFAULT_OUTPUT)
    images = len(item["image"]) if isinstance(item.get("image"), list) else int("image" in item)
    return [Said(max(1, count(text)), tokens, text, (), images, unsaid=wanted is None and not answer)]


def _batch(where: str, item: Any, count: Callable[[str], int]) -> list[Said]:
    """The request of one line of a batch file. Empty for requests without generated text, such as embeddings."""
    body = item.get("body") if isinstance(item, dict) else None
    if not isinstance(body, dict):
        raise ConfigError(f"{where} has no object 'body', as each line of a batch file has")
    wanted = _wanted(where, body, ("max_completion_tokens", "max_tokens"))
    if isinstance(body.get("prompt"), str):
        return _prompt(where, body, count)
    if not isinstance(body.get("messages"), list):
        return []
    # All messages belong to the prompt, including earlier answers.
    parts = [_message(where, message, False) for message in body["messages"]]
    tokens = sum(max(1, count(text)) for _, text, _, _ in parts)
    images = sum(pictures for _, _, pictures, _ in parts)
    messages = tuple(message for message in body["messages"] if isinstance(message, dict))
    return [Said(max(1, tokens), wanted or DEFAULT_OUTPUT, None, messages, images, unsaid=wanted is None)]


def _wanted(where: str, fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Requested output tokens of a record. Raises ConfigError for an invalid number."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ConfigError(f"{where}: {name} must be a whole number above 0, got {value!r:.40}")
            return value
    return None


# --- items -----------------------------------------------------------------------------------------------------------


def _line_items(source: TraceSource) -> Iterable[tuple[int, Any]]:
    for line in source:
        if not line.isspace():
            yield source.number, source.object(line)


def list_items(source: TraceSource) -> Iterator[tuple[int, Any]]:
    """(line number, item) of each item of a JSON list, without reading the whole list into memory."""
    decoder = json.JSONDecoder()
    pieces = source.pieces()
    text = ""
    place = 0
    line = 1
    inside = False
    more = True
    wanted = 0
    while True:
        while place < len(text) and (text[place].isspace() or (inside and text[place] == ",")):
            line += text[place] == "\n"
            place += 1
        there = len(text) - place
        if there and not inside:
            if text[place] != "[":
                raise ConfigError(f"line {line} of {source.path} is not the beginning of a JSON list")
            inside = True
            place = place + 1
            continue
        if there and text[place] == "]":
            return
        if there > wanted or not more:
            try:
                item, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                if not more or there > _LONGEST_CHAT:
                    raise ConfigError(f"the conversation on line {line} of {source.path} is not valid JSON") from None
                wanted = 2 * there  # the item is incomplete: parse again when twice as much text is there
            else:
                yield line, item
                line += text.count("\n", place, end)
                place = end
                wanted = 0
                continue
        piece = next(pieces, "")
        text = text[place:] + piece
        place = 0
        more = bool(piece)
