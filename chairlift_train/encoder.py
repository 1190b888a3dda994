"""Converts records to token ids and loss weights. A weight of 0 marks a token that is not a target."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers

from chairlift.errors import ConfigError
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift_train.borders import TextTokens, encode_parts, keep_spaces
from chairlift_train.chats import Answers, text_after, write_chat, write_whole
from chairlift_train.marks import PER_TOKEN, leaves_out, sequence_weight
from chairlift_train.records import Chat, chat_of
from chairlift_train.sequences import packed_lengths, read_sample

__all__ = ["Encode", "Encoded", "Encoder", "fitting"]


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Training examples made from one record."""

    items: tuple[Mapping[str, Any], ...]
    """Mappings with ``input_ids`` and optionally ``loss_weight``."""
    notes: frozenset[str] = frozenset()
    """Remarks for the user about the record. Each is the end of a sentence such as "Records have the field 'id', which
    is ignored"."""


Encode = Callable[[Mapping[str, Any]], Mapping[str, Any] | Encoded]
"""Function from a record to a mapping with ``input_ids``, or to :class:`Encoded`. Raises ChairliftError for an invalid
record."""

_PASSED_ON = (*PER_TOKEN, "weight", "attention_mask")
_PACKED = ("seq_lengths", "position_ids")
"""Fields that say where the sequences of a packed record begin."""
_CUT = "have a token across the border of an answer: the parts before and after the border are encoded separately"
_ONLY_END = "have no target but the end token of the answer"
_NO_END = "have answers whose end is not learnt: the chat template writes no end token that is part of the answer"
_DROPPED = "have answers with characters that the tokenizer drops"
_KTO = ("label", "kto_tag")
"""Fields that say whether an answer is good."""
_OTHER_FORMS = {
    "chosen": "a pair of answers, one of them preferred: rename chosen to completion to learn it (data.columns)",
    "prompt": "a prompt without a completion: there is nothing to learn in it",
}
"""Field of a record in TRL's formats for other trainers -> description of the record, for the error message."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    backend: tokenizers.Tokenizer
    template: ChatTemplate
    eos: int | None
    specials: frozenset[int]
    endings: frozenset[int]
    """Tokens that may end an answer. Some tokenizers do not declare their end tokens as special ones."""
    vocab_size: int
    stops: frozenset[int]
    """Tokens at which an engine ends an answer: the tokenizer's, and those of ``generation_config.json``."""


def fitting(encode: Encode, vocab_size: int | None, capacity: int | None) -> Encode:
    """Wrap ``encode`` so that it raises ConfigError for token ids of ``vocab_size`` or more, and for examples with more
    than ``capacity`` tokens.

    None means no limit. The caller adds the file and the line to the error.
    """

    def check(found: Mapping[str, Any]) -> None:
        if vocab_size is not None and (highest := np.max(found["input_ids"])) >= vocab_size:
            raise ConfigError(
                f"it has the token id {highest}, but the model knows {vocab_size} tokens; use the model's tokenizer"
            )
        if capacity is not None and len(found["input_ids"]) > capacity:
            raise ConfigError(
                f"it has {len(found['input_ids']):,} tokens, but a pack takes {capacity:,}; raise the capacity, or set"
                " overflow to split, truncate or drop"
            )

    def read(record: Mapping[str, Any]) -> Encoded:
        found = encode(record)
        encoded = found if isinstance(found, Encoded) else Encoded((found,))
        for item in encoded.items:
            check(item)
        return encoded

    return read


class Encoder:
    """Converts a record to training examples ``{"input_ids": int32 [L], "loss_weight": float32 [L]}``.

    A record has one of these forms:

    - ``input_ids``, and optionally ``labels``, ``loss_weight`` and ``weight``. Only padding is removed. A record that
      another program has packed (``seq_lengths``, or ``position_ids`` that begin again) gives one example for each of
      its sequences.
    - A chat: ``messages``, ``conversations``, ``instruction`` with ``output``, and other formats (see
      :func:`~chairlift_train.records.chat_of`). The chat template renders it.
    - ``prompt`` and ``completion``: two texts that are joined.
    - ``prompt_token_ids``, and ``outputs`` with ``token_ids``, as ``chairlift generate`` writes them. Each output gives
      an example.
    - The field named ``text_field``: a text.

    Fields that exclude a record or a message are obeyed (:mod:`~chairlift_train.marks`). Other fields are ignored, and
    the user gets a note about them. With ``train_on="answers"``, only the answers of an
    assistant or the completion are targets: the tokens that the model would have to generate, including the end of the
    turn. A chat can give several examples (:data:`~chairlift_train.chats.Answers`).
    """

    def __init__(
        self,
        tokenizer_dir: Path | None = None,
        *,
        text_field: str = "text",
        train_on: Literal["answers", "all"] = "answers",
        add_eos: bool = True,
        chat_template: Path | None = None,
        answers: Answers = "auto",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        """Create an encoder.

        ``chat_template`` is a file with a template that replaces the tokenizer's template. ``columns`` maps field names
        of the records to the names above. Without ``tokenizer_dir``, only records with token ids can be encoded.

        Raises ModelLoadError for a directory without a readable tokenizer, and ConfigError for a template file that
        cannot be read.
        """
        self._text_field = text_field
        self._train_on = train_on
        self._add_eos = add_eos
        self._answers: Answers = answers
        self._columns = dict(columns or {})
        self._text: _Text | None = None
        self._digests: dict[str, str] = {}
        if tokenizer_dir is not None:
            tokenizer = Tokenizer.from_dir(tokenizer_dir)
            eos = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
            source = tokenizer.chat_template if chat_template is None else _read_template(chat_template)
            template = ChatTemplate(source, tokenizer.named_tokens)
            files = [tokenizer_dir / "tokenizer.json"] if tokenizer_dir.is_dir() else [tokenizer_dir]
            content = b"".join(file.read_bytes() for file in files if file.is_file())
            named = repr(sorted(tokenizer.named_tokens.items())).encode()
            self._digests = {"tokenizer": _digest(content + named), "chat_template": _digest((source or "").encode())}
            keep_spaces(tokenizer.backend)
            specials = tokenizer.special_ids
            endings = specials | {*tokenizer.backend.get_added_tokens_decoder(), *tokenizer.eos_token_ids}
            stops = frozenset({*tokenizer.eos_token_ids, *_generation_stops(tokenizer_dir)})
            self._text = _Text(tokenizer.backend, template, eos, specials, endings, tokenizer.vocab_size, stops)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer. 0 without a tokenizer."""
        return self._text.vocab_size if self._text else 0

    @property
    def meaning(self) -> dict[str, Any]:
        """Settings that determine the examples of a record, as plain data. Files are given by their checksums."""
        return {
            "text_field": self._text_field,
            "columns": self._columns,
            "train_on": self._train_on,
            "answers": self._answers,
            "add_eos": self._add_eos,
            **self._digests,
        }

    def __call__(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Encode a record that gives exactly one example. Raises ConfigError for several examples, and the
        errors of :meth:`examples`."""
        encoded = self.examples(record)
        if len(encoded.items) != 1:
            raise ConfigError(f"the record makes {len(encoded.items)} examples; call examples(record)")
        return encoded.items[0]

    def examples(self, record: Mapping[str, Any]) -> Encoded:
        """Encode a record to one or more examples. Raises ConfigError, RequestError or TemplateError for an invalid
        record."""
        if self._columns:
            record = {self._columns.get(name, name): value for name, value in record.items()}
        notes: list[str] = []
        is_text = not {"input_ids", "messages", "conversations", "conversation", "completion", "output"} & set(record)
        if (mark := leaves_out(record, is_text=is_text)) is not None:
            return Encoded((), frozenset({f"are marked as not to be learnt ({mark}), and are left out"}))
        items, fields = self._read(record, notes)
        if "weight" in record and "input_ids" not in record:
            factor = np.float32(sequence_weight(record))
            items = [{**item, "loss_weight": item["loss_weight"] * factor} for item in items]
        obeyed = {name for name in _KTO if record.get(name) is True and not is_text}
        fields = {*fields, "weight", *obeyed}
        ignored = [name for name in record if name not in fields]
        notes += [f"have the field {str(name)[:40]!r}, which is ignored" for name in ignored]
        return Encoded(tuple(items), frozenset(notes))

    def _read(self, record: Mapping[str, Any], notes: list[str]) -> tuple[list[Mapping[str, Any]], Collection[str]]:
        """Encode a record. Returns (examples, names of the fields that were used)."""
        if "input_ids" in record:
            return _of_ids(record), {"input_ids", *_PASSED_ON, *_PACKED}
        if "prompt_token_ids" in record and "outputs" in record:
            return self._generated(record), record
        if (chat := chat_of(record)) is not None:
            if any(chat.excluded) and not any(chat.learnt) and self._train_on == "answers":
                notes.append("have only answers that are marked as not to be learnt, and are left out")
                return [], chat.fields
            return self._chat(chat, notes), chat.fields
        if "prompt" in record and "completion" in record:
            prompt = _string(record, "prompt")
            completion = _string(record, "completion")
            answer = [(len(prompt), len(prompt) + len(completion))]
            spans = answer if self._train_on == "answers" else None
            return [self._encode(prompt + completion, spans, notes, special=True)], {"prompt", "completion"}
        if self._text_field in record:
            return [self._encode(_string(record, self._text_field), None, notes, special=True)], {self._text_field}
        for name, what in _OTHER_FORMS.items():
            if name in record:
                raise ConfigError(f"the record is {what}")
        raise ConfigError(
            f"a record has input_ids, messages, conversations, prompt and completion, instruction and output, or "
            f"{self._text_field}; this one has {', '.join(sorted(map(str, record)))[:120] or 'nothing'}: name its "
            "fields in data.columns"
        )

    def _generated(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        answers = record["outputs"]
        if not isinstance(answers, list) or not all(isinstance(each, Mapping) for each in answers):
            raise ConfigError(f"outputs must be a list of answers with token_ids, got {str(answers)[:60]!r}")
        if not answers:
            raise ConfigError(f"the prompt has no answer ({str(record.get('error'))[:60]}); leave it out, or skip it")
        prompt = _token_ids(record["prompt_token_ids"], "prompt_token_ids")
        examples: list[Mapping[str, Any]] = []
        for answer in answers:
            tokens = _token_ids(answer.get("token_ids"), "token_ids of an answer")
            weights = np.ones(len(prompt) + len(tokens), np.float32)
            weights[: len(prompt)] = self._train_on == "all"
            examples.append({"input_ids": np.concatenate((prompt, tokens)), "loss_weight": weights})
        return examples

    def _chat(self, chat: Chat, notes: list[str]) -> list[Mapping[str, Any]]:
        template = self._tools().template
        if self._train_on == "all":
            written = [write_whole(template, chat, notes)]
        else:
            written = write_chat(template, chat, self._answers, notes)
        return [
            self._encode(
                example.text,
                example.spans,
                notes,
                special=False,
                after=None if template.marks_answers else functools.partial(text_after, template, chat, example),
            )
            for example in written
        ]

    def _encode(
        self,
        text: str,
        spans: Sequence[tuple[int, int]] | None,
        notes: list[str],
        *,
        special: bool,
        after: Callable[[], str] | None = None,
    ) -> Mapping[str, Any]:
        """Encode a text. ``spans`` has the (start, end) of the characters that are targets; None: all are targets. No
        token spans the border of a target. ``special``: whether to add special tokens. ``after`` returns the text that
        would follow in a longer chat; None if the template itself marks all that is learnt."""
        tools = self._tools()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text has half a surrogate pair at character {error.start}; repair it") from None
        tokens = encode_parts(tools.backend, text, (place for span in spans or () for place in span), special=special)
        ids = tokens.ids
        weights = np.ones(len(ids), np.float32) if spans is None else _target_weights(tokens, spans)
        if tokens.num_cuts:
            notes.append(_CUT)
        if spans is not None and _has_dropped(text, tokens, spans):
            notes.append(_DROPPED)
        if spans is not None and not _says_something(text, tokens, weights, tools.specials):
            notes.append(_ONLY_END)
        elif spans and not special and self._train_on == "answers" and not _ends(text, tokens, spans, tools.endings):
            has_ends = False
            if after is not None:
                ids, weights, has_ends = self._stopped(text, tokens, spans, weights, after)
            notes += [] if has_ends else [_NO_END]
        if special and self._add_eos and tools.eos is not None and ids[-1:] != [tools.eos]:
            ids = [*ids, tools.eos]
            weights = np.append(weights, np.float32(1))
        if len(ids) < 2:
            raise ConfigError(f"the text {text[:40]!r} has only {len(ids)} tokens, so there is nothing to predict")
        return {"input_ids": np.array(ids, np.int32), "loss_weight": weights}

    def _stopped(
        self,
        text: str,
        tokens: TextTokens,
        spans: Sequence[tuple[int, int]],
        weights: npt.NDArray[np.float32],
        after: Callable[[], str],
    ) -> tuple[list[int], npt.NDArray[np.float32], bool]:
        """Let answers without an end token learn the token with which the next message begins, if engines end answers
        at it, as in GLM-4.5. Returns (token ids, weights, whether each answer has an end now)."""
        tools = self._tools()
        ids, weights, has_ends = tokens.ids, weights.copy(), True
        for start, end in spans:
            if _ends(text, tokens, [(start, end)], tools.endings):
                continue
            place = int(np.searchsorted(tokens.starts, end))
            while place < len(ids) and text[tokens.starts[place] : tokens.ends[place]].isspace():
                place += 1
            if place < len(ids):
                first, found = int(np.searchsorted(tokens.starts, end)), ids[place] in tools.stops
                weights[first : place + 1] = 1 if found else weights[first : place + 1]
                has_ends = has_ends and found
                continue
            following = tools.backend.encode(after().lstrip(), add_special_tokens=False).ids
            if not following or following[0] not in tools.stops:
                has_ends = False
                continue
            ids = [*ids, following[0]]
            weights = np.append(weights, np.float32(1))
        return ids, weights, has_ends

    def _tools(self) -> _Text:
        if self._text is None:
            raise ConfigError("a record with text needs a tokenizer: name the directory that holds tokenizer.json")
        return self._text


def _target_weights(tokens: TextTokens, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
    """Weights [L]: 1 for the tokens of the characters in ``spans``, 0 for all others."""
    # Some tokenizers give tokens of white space an empty range at its end.
    positions = np.where(tokens.ends > tokens.starts, tokens.starts, tokens.ends - 1)
    weights = np.zeros(len(tokens.ids), np.float32)
    for start, end in spans:
        weights[(positions >= start) & (positions < end) & ~tokens.added] = 1
    _learn_closing_tokens(weights, tokens.added)
    return weights


def _has_dropped(text: str, tokens: TextTokens, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a character of a target, other than white space, belongs to no token."""
    changes = np.zeros(len(text) + 1, np.int64)
    np.add.at(changes, tokens.starts, 1)
    np.add.at(changes, tokens.ends, -1)
    bare = np.flatnonzero(np.cumsum(changes)[:-1] == 0)
    return any(start <= place < end and not text[place].isspace() for place in bare for start, end in spans)


def _says_something(text: str, tokens: TextTokens, weights: npt.NDArray[np.float32], specials: frozenset[int]) -> bool:
    """Whether a target is more than white space and special tokens."""
    return any(
        tokens.ids[place] not in specials and not text[tokens.starts[place] : tokens.ends[place]].isspace()
        for place in np.flatnonzero(weights)
    )


def _ends(text: str, tokens: TextTokens, spans: Sequence[tuple[int, int]], endings: frozenset[int]) -> bool:
    """Whether each target ends with one of these tokens, apart from white space, or the tokenizer appends one.

    Targets with nothing but white space between them are one target: some templates mark an answer and its end apart.
    """
    if tokens.ids and tokens.added[-1] and tokens.ids[-1] in endings:
        spans = spans[:-1]
    for index, (start, end) in enumerate(spans):
        if index + 1 < len(spans) and not text[end : spans[index + 1][0]].strip():
            continue
        inside = np.flatnonzero((tokens.starts >= start) & (tokens.ends <= end) & (tokens.ends > tokens.starts))
        said = (int(place) for place in inside[::-1] if not text[tokens.starts[place] : tokens.ends[place]].isspace())
        last = next(said, None)
        if last is None or tokens.ids[last] not in endings:
            return False
    return True


def _learn_closing_tokens(weights: npt.NDArray[np.float32], added: npt.NDArray[np.bool_]) -> None:
    """Set the weight of end tokens that the tokenizer has appended (``added``) to 1, if the text ends with a target."""
    last = len(weights)
    while last and added[last - 1]:
        last -= 1
    if last and weights[last - 1]:
        weights[last:] = 1


def _generation_stops(tokenizer_dir: Path) -> list[int]:
    """Stop tokens that ``generation_config.json`` beside the tokenizer names."""
    file = tokenizer_dir / "generation_config.json"
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError):
        return []  # the loader of the model tells what is wrong with it
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"chat_template {path} cannot be read: {error}; name a file with a Jinja template") from None


def _of_ids(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sequences of a record of token ids. It has several if another program has packed them."""
    ids = _token_ids(record["input_ids"])
    lengths = packed_lengths(record, len(ids))
    if len(lengths) == 1:
        return [_sequence(record, ids)]
    per_token = [name for name in (*PER_TOKEN, "attention_mask") if record.get(name) is not None]
    if wrong := [name for name in per_token if np.shape(record[name]) != np.shape(ids)]:
        raise ConfigError(f"{wrong[0]} must have one number for each of {len(ids)} token ids")
    ends = itertools.accumulate(lengths)
    places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return [_sequence({**record, **{name: record[name][place] for name in per_token}}, ids[place]) for place in places]


def _sequence(record: Mapping[str, Any], ids: npt.NDArray[np.int32]) -> Mapping[str, Any]:
    others = {name: record[name] for name in _PASSED_ON if record.get(name) is not None}
    given: Mapping[str, Any] = {"input_ids": ids, **others}
    if others:  # checked here, because the caller adds file and line to errors
        sample = read_sample(given, -1)
        given = {"input_ids": sample.tokens}
        if sample.weights is not None:
            given["loss_weight"] = sample.weights
    return given


def _token_ids(given: Any, name: str = "input_ids") -> npt.NDArray[np.int32]:
    ids = np.asarray(given) if isinstance(given, list) and all(type(entry) is int for entry in given) else None
    if ids is None or not ids.size or not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ConfigError(f"{name} must be a list of token ids, at least one, from 0 up; got {str(given)[:60]}")
    return ids.astype(np.int32)


def _string(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or (not value and name != "prompt"):
        wanted = "a text that is not empty" if value == "" else "text"
        raise ConfigError(f"{name} must be {wanted}, got {str(value)[:60]!r}")
    return value
