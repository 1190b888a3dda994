"""Converts token ids to text, one token at a time. It emits only whole characters, and finds stop strings across token
borders."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol

from chairlift.base.sampling_params import SamplingParams
from chairlift.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "TokenText", "token_decoder"]

_CONTEXT_TOKENS: Final = 8
"""Number of last prompt tokens that a windowed decoder uses as context for the first generated token."""
_MAX_HELD_TOKENS: Final = 4
"""Maximum number of tokens that wait until a character is complete. A UTF-8 character has at most four bytes."""


class TokenText(Protocol):
    """Converts tokens to text. The returned pieces, joined in order, are the whole text."""

    def feed(self, token_id: int) -> str:
        """Text that this token completes. It is empty while the last character is incomplete."""

    def flush(self) -> str:
        """Text of an incomplete character at the end of the answer; empty if there is none."""


def token_decoder(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> TokenText:
    """A decoder for the tokens that follow a prompt."""
    kind = _WindowText if tokenizer.byte_decoding is None else _ByteText
    return kind(tokenizer, prompt_token_ids, skip_special_tokens)


class IncrementalDetokenizer:
    """The text of one answer while it is generated.

    Add tokens with :meth:`update`; read :attr:`text` or :meth:`take_delta`. The prompt is the left context, so prompt
    text + answer text is the text of the whole sequence. (If the prompt ends inside a character, the answer's text has
    that character.) The result does not depend on how tokens are grouped into calls. Each token costs O(1), whatever
    the length of the answer.

    There are two decoders. If each token is a fixed sequence of bytes (byte-level BPE, byte fallback), an incremental
    UTF-8 decoder is exact for every split character and every invalid byte. In other tokenizers the text of a token
    depends on its neighbours; there a short window is decoded twice, with and without the new token, and the difference
    is the new text (as in TGI and vLLM). ``DecodeStream`` of the tokenizers library is not used: it never emits a
    character that stays incomplete at the end, and its window grows while bytes are invalid.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._decoder = token_decoder(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        stops = tuple(params.stop or ())
        self._stop = _StopMatcher(stops)
        spelled = tuple(stop for stop in stops if any(text in stop for text in tokenizer.special_texts.values()))
        self._spelled = _SpelledStops(tokenizer, spelled) if spelled else None
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._fresh: list[str] = []
        self._length = 0
        self._taken = 0
        self._ended = False

    def update(self, token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        """Append generated tokens. Returns the stop string that the text now contains, or None.

        If there are several, the stop string that ends first is taken, and of those that end together the longest. The
        text is cut before the stop string (after it with ``include_stop_str_in_output``), and later tokens are ignored.
        A match counts only if its last character belongs to a token after the first ``min_tokens`` tokens.
        ``stop_terminated`` says that the last token ended the answer (end of sequence or a stop token id); the text of
        this token is left out unless ``include_stop_str_in_output``.

        A stop string that spells a special token matches that token, even if special tokens are left out of the text.
        With ``include_stop_str_in_output`` the text then ends with the stop string.
        """
        hidden = len(token_ids) - 1 if stop_terminated and not self._include_stop else len(token_ids)
        for index, token_id in enumerate(token_ids):
            if self._ended:
                return None
            self._num_tokens += 1
            piece = self._decoder.feed(token_id) if index < hidden else ""
            matched = self._append(piece, token_id)
            if matched is not None:
                return matched
        return None

    def finish(self) -> str | None:
        """End the text: a character that stayed incomplete becomes U+FFFD, and text that could have become a stop
        string is released.

        Returns the stop string that the last character completes, or None. ``take_delta(finished=True)`` calls this
        method.
        """
        if self._ended:
            return None
        matched = self._append(self._decoder.flush())
        self._ended = True
        return matched

    @property
    def text(self) -> str:
        """Visible text so far: all text except an end that may still become a stop string."""
        return self._whole()[: self._visible()]

    def take_delta(self, finished: bool) -> str:
        """Visible text since the last call; with ``finished``, all remaining text."""
        if finished:
            self.finish()
        count = self._visible() - self._taken
        if count <= 0:
            return ""
        fresh = "".join(self._fresh)
        self._fresh = [fresh[count:]] if count < len(fresh) else []
        self._taken += count
        return fresh[:count]

    def _append(self, piece: str, token_id: int | None = None) -> str | None:
        """Add the text of a token. Returns the stop string that it completes, or None."""
        if piece:
            self._pieces.append(piece)
            self._fresh.append(piece)
            self._length += len(piece)
        if not self._stop.stops:
            return None
        counts = self._num_tokens > self._min_tokens
        start = self._length - len(piece)
        # The stop string that ends first wins. If two end at the same place, min() returns the entry that was appended
        # first: the one found in the visible text.
        ends: list[tuple[int, int, str, str]] = []
        if piece and (found := self._stop.find(piece, counts)) is not None:
            stop, end = found
            end += start
            ends.append((end, -len(stop), stop, self._whole()[: end if self._include_stop else end - len(stop)]))
        if self._spelled is not None and (spelled := self._spelled.find(piece, token_id, counts)) is not None:
            stop, end, at = spelled
            text = self._whole()[:at] + (stop if self._include_stop else "")
            ends.append((start + end, -len(stop), stop, text))
        if not ends:
            return None
        _, _, stop, text = min(ends, key=lambda found: found[:2])
        self._pieces = [text]
        self._fresh = [text[self._taken :]]
        self._length = len(text)
        self._ended = True
        return stop

    def _visible(self) -> int:
        if self._ended:
            return self._length
        visible = self._length if self._include_stop else self._length - self._stop.held
        return visible if self._spelled is None else min(visible, self._spelled.safe)

    def _whole(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class _StopMatcher:
    """Finds stop strings in a stream of text. It stores no text, only how much of each stop string matches so far. Each
    character costs O(1) per stop string on average, for stop strings of any length (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.held = 0
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._tail = ""
        self._borders = [_borders(stop) for stop in stops]
        self._begun = [0] * len(stops)
        """Per stop string: number of its leading characters with which the text ends now. Always less than the length
        of the stop string."""

    def find(self, piece: str, counts: bool) -> tuple[str, int] | None:
        """(stop string, offset in ``piece`` after its last character) of the stop string that ends first inside
        ``piece``; None if none does. ``counts``: whether a match counts, because ``min_tokens`` tokens were generated
        before."""
        if counts:
            text = self._tail + piece
            old = len(self._tail)
            ends = [(at + len(stop), -len(stop), stop) for stop in self.stops if (at := self._at(text, stop, old)) >= 0]
            if ends:
                end, _, stop = min(ends)
                return stop, end - old
        self._tail = (self._tail + piece)[-self._keep :] if self._keep else ""
        self._begun = [self._follow(*each, piece) for each in zip(self.stops, self._borders, self._begun, strict=True)]
        self.held = max(self._begun, default=0)
        return None

    @staticmethod
    def _at(text: str, stop: str, old: int) -> int:
        return text.find(stop, max(0, old - len(stop) + 1))

    @staticmethod
    def _follow(stop: str, borders: tuple[int, ...], begun: int, piece: str) -> int:
        for char in piece:
            while begun and stop[begun] != char:
                begun = borders[begun - 1]
            begun += stop[begun] == char
            if begun == len(stop):  # a match that does not count yet, because of ``min_tokens``
                begun = borders[begun - 1]
        return begun


def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix of ``stop``: length of the longest shorter text with which the prefix begins and also ends."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return tuple(borders)


class _SpelledStops:
    """Finds stop strings that spell a special token.

    It searches a second version of the answer's text, in which each special token is spelled as in the vocabulary. The
    visible text may leave special tokens out. The returned offsets are offsets in the visible text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._matcher = _StopMatcher(stops)
        self._longest = max(map(len, stops))
        self._length = 0
        """Number of characters so far in the text with spelled special tokens."""
        self._special: list[tuple[int, int, int]] = []
        """One entry per special token near the end: (begin, end, length of the visible text there). Begin and end are
        offsets in the text with spelled special tokens."""
        self._excess = 0
        """Number of characters by which the text with spelled special tokens is longer than the visible text, because
        of earlier special tokens."""
        self.safe = 0
        """Number of leading characters of the visible text that no stop string can cut off any more."""

    def find(self, piece: str, token_id: int | None, counts: bool) -> tuple[str, int, int] | None:
        """Find the stop string that a token completes. ``piece`` is the visible text of the token. None if it completes
        none.

        The result is (stop string, offset of its end in ``piece``, offset of its beginning in the visible text).
        """
        spelling = None if token_id is None else self._tokenizer.special_texts.get(token_id)
        if token_id is None or not spelling:
            return self._read(piece, counts)
        if piece.endswith(spelling):
            shown = spelling
        elif piece:
            shown = self._tokenizer.token_text(token_id)
        else:
            shown = ""
        plain = piece.removesuffix(shown)
        found = self._read(plain, counts)
        if found is None:
            self._special.append((self._length, self._length + len(spelling), len(piece) - len(plain)))
            found = self._read(spelling, counts)
            found = found and (found[0], len(piece), found[2])
        return found

    def _read(self, piece: str, counts: bool) -> tuple[str, int, int] | None:
        if not piece:
            return None
        found = self._matcher.find(piece, counts)
        if found is not None:
            stop, end = found
            return stop, end, self._in_text(self._length + end - len(stop))
        self._length += len(piece)
        self.safe = self._in_text(self._length - self._matcher.held)
        while self._special and self._special[0][1] <= self._length - self._longest:
            begin, end, length = self._special.pop(0)
            self._excess += end - begin - length
        return None

    def _in_text(self, offset: int) -> int:
        excess = self._excess
        for begin, end, length in self._special:
            if begin < offset:
                excess += end - begin - length if end <= offset else offset - begin
        return offset - excess


class _ByteText:
    """Decoder for tokenizers in which each token is a fixed sequence of bytes."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        decoding = tokenizer.byte_decoding
        if decoding is None:
            raise TypeError("this tokenizer does not map tokens to bytes")
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(decoding.errors)
        self._fed = False
        tail = tokenizer.tail_bytes(prompt_token_ids, skip_special_tokens)
        # If the prompt ends with an incomplete character, its bytes stay in the decoder.
        self._utf8.decode(tail)
        self._at_start = decoding.strip_start and not tail

    def feed(self, token_id: int) -> str:
        piece = self._token_bytes(token_id, self._skip)
        if not piece:
            return ""
        self._fed = True
        return self._strip(self._utf8.decode(piece))

    def flush(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True)) if self._fed else ""

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text[1:] if text.startswith(" ") else text
        return text


class _WindowText:
    """Decoder for tokenizers in which the text of a token depends on its neighbours. It decodes a short window with and
    without the new token."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        # Skipped tokens are left out of the window: a decoder may treat the first token of a text differently, and
        # after skipped tokens it would treat the next token as the first.
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._vocab_size = tokenizer.vocab_size
        self._window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(self._window) == _CONTEXT_TOKENS:
                break
            if self._counts(token_id):
                self._window.insert(0, token_id)
        self._read = len(self._window)
        """Number of leading tokens of the window whose text was returned already."""
        self._before = self._text_of(self._window)

    def feed(self, token_id: int) -> str:
        if not self._counts(token_id):
            return ""
        self._window.append(token_id)
        text = self._text_of(self._window)
        pending = len(self._window) - self._read
        if text.endswith("\ufffd") and pending < _MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._text_of(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._before) :]
        # The tokens emitted last are enough context. The window never becomes empty, because the next token must not be
        # decoded as the first token of a text.
        self._window = self._window[self._read :] or self._window
        self._before = self._text_of(self._window)
        self._read = len(self._window)
        return piece

    def _counts(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size and token_id not in self._hidden

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, self._skip)
