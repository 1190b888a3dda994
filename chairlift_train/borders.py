"""Encodes a text so that no token spans the border between a prompt and an answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

__all__ = ["TextTokens", "encode_parts", "keep_spaces"]

_ANCHORS: Final = ("\n", "a", ".", "1", "|")
"""Texts before a part that begins inside a text. Without one, some tokenizers would add a space to the part."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextTokens:
    """Tokens of a text and the characters that each token stands for."""

    ids: list[int]
    starts: npt.NDArray[np.int64]
    """[L] index of the first character of each token."""
    ends: npt.NDArray[np.int64]
    """[L] index after the last character. Equal to the start for tokens without a character."""
    added: npt.NDArray[np.bool_]
    """[L] whether the tokenizer added the token before or after the text."""
    num_cuts: int = 0
    """Number of borders at which the text was encoded in two parts."""


def keep_spaces(backend: tokenizers.Tokenizer) -> None:
    """Change ``backend`` so that the offsets of a token include its spaces. Its token ids do not change."""
    if backend.post_processor is None:
        return
    given = json.loads(backend.post_processor.__getstate__())
    if (changed := _untrimmed(given)) != given:
        processor = tokenizers.processors.Sequence([])
        processor.__setstate__(json.dumps(changed).encode())
        backend.post_processor = processor


def _untrimmed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: False if key == "trim_offsets" else _untrimmed(item) for key, item in value.items()}
    return [_untrimmed(item) for item in value] if isinstance(value, list) else value


def encode_parts(backend: tokenizers.Tokenizer, text: str, borders: Iterable[int], *, special: bool) -> TextTokens:
    """Encode ``text``. Where a token would span one of the ``borders`` (indices of characters), the text before and the
    text after the border are encoded separately, as when the answer follows a prompt that is already encoded.

    ``special``: whether the tokenizer adds its special tokens around the text.
    """
    whole = _tokens(backend.encode(text, add_special_tokens=special))
    if len(whole.ids) > 1 and whole.added[0] and not whole.added[1] and whole.ids[0] == whole.ids[1]:
        whole = _slice(whole, slice(1, None))  # the text begins with the token that the tokenizer adds: one is enough
    inner = sorted({border for border in borders if 0 < border < len(text)})
    cuts: set[int] = set()
    found = whole
    while new := {border for border in inner if border not in cuts and _spans(found, border)}:
        cuts |= new
        found = _in_parts(backend, text, sorted(cuts), whole)
    return dataclasses.replace(found, num_cuts=len(cuts))


def _spans(tokens: TextTokens, border: int) -> bool:
    return bool(((tokens.starts < border) & (border < tokens.ends)).any())


def _tokens(encoding: tokenizers.Encoding) -> TextTokens:
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    added = np.array(encoding.special_tokens_mask, bool) & (starts == ends)
    return TextTokens(list(encoding.ids), starts, ends, added)


def _in_parts(backend: tokenizers.Tokenizer, text: str, cuts: list[int], whole: TextTokens) -> TextTokens:
    """Tokens of the parts of ``text`` between ``cuts``, with the tokens that the tokenizer added around the text."""
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        part = _part(backend, text[start:end], continues=start > 0)
        parts.append(dataclasses.replace(part, starts=part.starts + start, ends=part.ends + start))
    own = np.flatnonzero(~whole.added)
    first, last = (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)
    around = [_slice(whole, slice(0, first)), *parts, _slice(whole, slice(last, None))]
    return TextTokens(
        [token for part in around for token in part.ids],
        np.concatenate([part.starts for part in around]),
        np.concatenate([part.ends for part in around]),
        np.concatenate([part.added for part in around]),
    )


def _part(backend: tokenizers.Tokenizer, text: str, *, continues: bool) -> TextTokens:
    """Tokens of a part of a text. ``continues``: whether other text is before it."""
    for anchor in _ANCHORS if continues else ():
        tokens = _tokens(backend.encode(anchor + text, add_special_tokens=False))
        if not _spans(tokens, len(anchor)):
            # A token without a character stands at its start, which is the anchor's end if it belongs to the text.
            rest = _slice(tokens, slice(int(np.count_nonzero(tokens.ends <= len(anchor))), None))
            return dataclasses.replace(rest, starts=rest.starts - len(anchor), ends=rest.ends - len(anchor))
    return _tokens(backend.encode(text, add_special_tokens=False))


def _slice(tokens: TextTokens, part: slice) -> TextTokens:
    return TextTokens(tokens.ids[part], tokens.starts[part], tokens.ends[part], tokens.added[part])
