"""Encodes rendered chats so that only the chat template writes control tokens (``plain_text_messages``)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers

from chairlift.errors import ModelLoadError, RequestError
from chairlift.text.tokenizer.shield import ControlTexts, Shielded, mark_characters
from chairlift.text.tokenizer.tokenizer import Span, Tokenizer
from chairlift.text.tool_calls.formats import reasoning_format_of

__all__ = ["PlainTextEncoder"]

_CONTROL_FORM: Final = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


class PlainTextEncoder:
    """Encodes rendered chats. Text of the caller that spells a control token becomes ordinary tokens.

    Control tokens are the special tokens, and those added tokens that look like one (``<|...|>``) or that the chat
    template names (``<think>``, ``<tool_call>``). Other added tokens are ordinary text: vocabularies have some for runs
    of spaces and HTML tags.

    A copy of the tokenizer has random names for the control tokens. So no text can spell them there, and the vocabulary
    cannot make them from pieces. Raises :class:`~chairlift.errors.ModelLoadError` if such a copy cannot be made.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        self.template: Final = template
        self._texts = _control_texts(tokenizer, template or "")
        word = secrets.token_hex(8)  # nobody can write it into a message
        self._names = {token_id: f"c{word}x{token_id}c" for token_id in self._texts}
        self._renamed, self._unknown = self._copy()

    @property
    def controls(self) -> ControlTexts:
        """Texts of the control tokens."""
        texts = sorted(set(self._texts.values()))
        marks = reasoning_format_of(self.template)
        if marks is None:
            return ControlTexts(texts)
        begin = [text for text in texts if text in marks.begin]
        # gpt-oss begins each part of an answer with several tokens. Its template refuses them in a content.
        return ControlTexts(texts, [] if len(begin) > 1 else [*begin, *(text for text in texts if text == marks.end)])

    def encode(self, chat: Shielded) -> list[int]:
        """Token ids of a rendered chat. If no text of the caller forms a control token, they are those of
        :meth:`Tokenizer.encode <chairlift.text.tokenizer.Tokenizer.encode>`.

        Raises RequestError like ``encode``, and if the control tokens of the template cannot be told from the others.
        """
        if chat.covered is None:
            return self._tokenizer.encode(chat.text, add_special_tokens=False)
        ids, formed = self._found(chat.text)
        covered_ids, written = self._found(chat.covered)
        if chat.bare is not None:
            _, expected = self._found(chat.bare)
            if [span.token_id for span in expected] != [span.token_id for span in written]:
                raise _cannot_tell()
        if formed == written:
            return ids
        plain = str.maketrans(dict(chat.symbols))
        # The copy must encode the whole text with symbols in the same way. Then it does so with the plain text.
        if self._renamed_ids(chat.covered, written, {}) != covered_ids:
            raise _cannot_tell()
        ids = self._renamed_ids(chat.covered, written, plain)
        controls = [token_id for token_id in ids if token_id in self._texts and token_id != self._unknown]
        if controls != [span.token_id for span in written if span.token_id != self._unknown]:
            raise _cannot_tell()
        return ids

    def _found(self, text: str) -> tuple[list[int], list[Span]]:
        """(token ids, control tokens with their places) of a text."""
        ids, found = self._tokenizer.encode_with_spans(text, self._texts)
        # A character that the vocabulary does not have becomes the unknown token, too.
        unknown = self._texts.get(self._unknown, "")
        return ids, [s for s in found if s.token_id != self._unknown or unknown in text[s.start : s.end]]

    def _renamed_ids(self, covered: str, written: Sequence[Span], plain: Mapping[int, str]) -> list[int]:
        """Token ids of a text by the copy of the tokenizer. The control tokens in ``written`` get their names there;
        ``plain`` (as for ``str.translate``) is applied to the text between them."""
        pieces = list[str]()
        end = 0
        for span in written:
            given = covered[span.start : span.end]
            name = self._names[span.token_id]
            content = self._texts[span.token_id]
            # A span also has the white space that the token takes from its neighbours.
            pieces += [covered[end : span.start].translate(plain), given.replace(content, name, 1)]
            if content not in given:
                pieces[-1] = name
            end = span.end
        return self._renamed.encode("".join([*pieces, covered[end:].translate(plain)]), add_special_tokens=False)

    def _copy(self) -> tuple[Tokenizer, int]:
        """(copy of the tokenizer with other names for the control tokens, id of the unknown token or -1)."""
        backend = self._tokenizer.backend
        parts = json.loads(backend.to_str())
        names = {text: self._names[token_id] for token_id, text in self._texts.items()}
        unknown = _rename(parts, names)
        try:
            copy = tokenizers.Tokenizer.from_str(json.dumps(parts))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the native library is no Exception
            raise _unfit(" ".join(str(error).split())[:200]) from None
        copy.encode_special_tokens = backend.encode_special_tokens
        for token_id, name in self._names.items():
            if copy.token_to_id(name) != token_id:
                raise _unfit(f"{self._texts[token_id][:60]!r} would get another id")
        found = None if unknown is None else backend.token_to_id(unknown)
        return Tokenizer(copy), -1 if found is None else found


def _control_texts(tokenizer: Tokenizer, template: str) -> dict[int, str]:
    """Id -> text of the control tokens."""
    found = {token_id: text for token_id, text in tokenizer.special_texts.items() if text}
    for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
        text = token.content
        is_mark = bool(mark_characters(text)) and any(char.isalpha() for char in text)
        if _CONTROL_FORM.fullmatch(text) or (is_mark and text in template):
            found[token_id] = text
    return found


def _rename(parts: dict[str, Any], names: Mapping[str, str]) -> str | None:
    """Rename tokens in the contents of a ``tokenizer.json``. Returns the old name of the unknown token; None if there
    is none."""
    for token in parts["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    parts["post_processor"] = None  # it adds tokens around a text, which a chat template does itself
    model = parts["model"]
    unknown = model.get("unk_token")
    if unknown in names:
        model["unk_token"] = names[unknown]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:  # Unigram: pairs of text and score, in the order of the ids
        if model.get("unk_id") is not None:
            unknown = model["vocab"][model["unk_id"]][0]
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if "merges" in model:
        pairs = ((each, each.split(" ", 1) if isinstance(each, str) else each) for each in model["merges"])
        model["merges"] = [each for each, (a, b) in pairs if not {a, b, a + b} & names.keys()]
    return None if unknown is None else str(unknown)


def _cannot_tell() -> RequestError:
    return RequestError(
        "a message or tool spells a control token of the model in a way that cannot be encoded as plain text "
        "(plain_text_messages); leave it out or put a space into it"
    )


def _unfit(reason: str) -> ModelLoadError:
    return ModelLoadError(
        "plain_text_messages is not possible with the model's tokenizer, because its control tokens cannot be renamed "
        f"({reason}); leave the setting out"
    )
