"""Turns records into token ids and weights that say which of them are learnt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers

from chairlift.errors import ConfigError
from chairlift.tokenizer.chat_template import ChatTemplate
from chairlift.tokenizer.messages import normalize_messages
from chairlift.tokenizer.tokenizer import Tokenizer
from chairlift.train.sequences import read_sample

__all__ = ["Encode", "Encoder", "fitting"]

Encode = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A record -> a mapping with ``input_ids``. Raises ChairliftError for a record that cannot be used."""

_PASSED_ON = ("labels", "loss_weight", "completion_mask", "weight", "attention_mask")


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    backend: tokenizers.Tokenizer
    template: ChatTemplate
    eos: int | None
    vocab_size: int


def fitting(encode: Encode, vocab_size: int | None, capacity: int | None) -> Encode:
    """``encode``, but ConfigError for a token that the model does not know, or more tokens than a pack takes.

    None is no limit. Raised here, it names the file and the line.
    """

    def read(record: Mapping[str, Any]) -> Mapping[str, Any]:
        found = encode(record)
        if vocab_size is not None and (highest := np.max(found["input_ids"])) >= vocab_size:
            raise ConfigError(
                f"it has the token id {highest}, but the model knows {vocab_size} tokens; use the model's tokenizer"
            )
        if capacity is not None and len(found["input_ids"]) > capacity:
            raise ConfigError(
                f"it has {len(found['input_ids']):,} tokens, but a pack takes {capacity:,}; raise the capacity, or let"
                " overflow split, truncate or drop what is longer"
            )
        return found

    return read


class Encoder:
    """A record -> ``{"input_ids": int32 [L], "loss_weight": float32 [L]}``.

    - ``input_ids`` (with ``labels``, ``loss_weight``, ``weight`` if any): taken as it is, but for its padding.
    - ``messages``: a chat, as the chat template of the tokenizer's directory writes it.
    - ``prompt`` and ``completion``: two texts, one after the other.
    - ``text_field``: a text.

    With ``train_on="answers"`` only what an assistant says, or the completion, has weight: exactly what the model would
    have to generate, the end of the turn included.
    """

    def __init__(
        self,
        tokenizer_dir: Path | None = None,
        *,
        text_field: str = "text",
        train_on: Literal["answers", "all"] = "answers",
        add_eos: bool = True,
    ) -> None:
        """Raises ModelLoadError for a directory without a readable tokenizer. Without one, only token ids are read."""
        self._text_field, self._train_on, self._add_eos = text_field, train_on, add_eos
        self._text: _Text | None = None
        if tokenizer_dir is not None:
            tokenizer = Tokenizer.from_dir(tokenizer_dir)
            eos = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
            template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens)
            self._text = _Text(tokenizer.backend, template, eos, tokenizer.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Every id of the tokenizer is below this; 0 without one."""
        return self._text.vocab_size if self._text else 0

    def __call__(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises ConfigError, RequestError or TemplateError for a record that cannot be used."""
        if "input_ids" in record:
            others = {name: record[name] for name in _PASSED_ON if record.get(name) is not None}
            given = {"input_ids": _token_ids(record["input_ids"]), **others}
            if others:  # read here, where file and line are known
                sample = read_sample(given, -1)
                given = {"input_ids": sample.tokens}
                if sample.weights is not None:
                    given["loss_weight"] = sample.weights
            return given
        if "messages" in record:
            return self._chat(record["messages"])
        if "prompt" in record and "completion" in record:
            prompt, completion = _string(record, "prompt"), _string(record, "completion")
            return self._encode(prompt + completion, [(len(prompt), len(prompt) + len(completion))], special=True)
        if self._text_field in record:
            text = _string(record, self._text_field)
            return self._encode(text, None, special=True)
        raise ConfigError(
            f"a record has input_ids, messages, prompt and completion, or {self._text_field}; this one has "
            f"{', '.join(sorted(map(str, record)))[:120] or 'nothing'}"
        )

    def _chat(self, messages: Any) -> Mapping[str, Any]:
        chat = normalize_messages(messages)
        template = self._tools().template
        text = template.render(chat, add_generation_prompt=False)
        if self._train_on == "all":
            return self._encode(text, None, special=False)
        spans = []
        for index, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = template.render(chat[:index], add_generation_prompt=True) if index else ""
            after = template.render(chat[: index + 1], add_generation_prompt=False)
            if not text.startswith(after) or not after.startswith(before):
                raise ConfigError(
                    f"the chat template writes the turns up to messages[{index}] in another way once more follow, so "
                    "this answer has no place of its own; give each answer a record in which it comes last, or set "
                    "train_on: all"
                )
            spans.append((len(before), len(after)))
        if not spans:
            raise ConfigError("the chat has no message of an assistant, so nothing to learn; set train_on: all")
        return self._encode(text, spans, special=False)

    def _encode(self, text: str, spans: Sequence[tuple[int, int]] | None, *, special: bool) -> Mapping[str, Any]:
        """Encode text. ``spans`` are the characters to learn, None for all. ``special`` adds special tokens."""
        tools = self._tools()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text has half a surrogate pair at character {error.start}; repair it") from None
        encoding = tools.backend.encode(text, add_special_tokens=special)
        ids: list[int] = encoding.ids
        weights = np.ones(len(ids), np.float32)
        if spans is not None and self._train_on == "answers":
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            places = np.where(ends > starts, starts, ends - 1)  # of spaces, some tokenizers say only where they end
            weights[:] = 0
            for start, end in spans:
                weights[(places >= start) & (places < end)] = 1
            _learn_closing_tokens(weights, np.array(encoding.special_tokens_mask, bool) & (ends == starts))
        if special and self._add_eos and tools.eos is not None and ids[-1:] != [tools.eos]:
            ids, weights = [*ids, tools.eos], np.append(weights, np.float32(1))
        if len(ids) < 2:
            raise ConfigError(f"the text {text[:40]!r} is {len(ids)} tokens long, which leaves nothing to predict")
        return {"input_ids": np.array(ids, np.int32), "loss_weight": weights}

    def _tools(self) -> _Text:
        if self._text is None:
            raise ConfigError("a record with text needs a tokenizer: name the directory that holds tokenizer.json")
        return self._text


def _learn_closing_tokens(weights: npt.NDArray[np.float32], added: npt.NDArray[np.bool_]) -> None:
    """Learn the end token that the tokenizer appends, if the text ends with an answer."""
    last = len(weights)
    while last and added[last - 1]:
        last -= 1
    if last and weights[last - 1]:
        weights[last:] = 1


def _token_ids(given: Any) -> npt.NDArray[np.int32]:
    ids = np.asarray(given) if isinstance(given, list) and all(type(entry) is int for entry in given) else None
    if ids is None or not ids.size or not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ConfigError(f"input_ids must be a list of token ids, at least one, from 0 up; got {str(given)[:60]}")
    return ids.astype(np.int32)


def _string(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or (not value and name != "prompt"):
        raise ConfigError(f"{name} must be text, got {str(value)[:60]!r}")
    return value
