"""Computes how much longer a tokenizer can make a text, from ``tokenizer.json`` and before any text is encoded.

A few nested replacements can turn one letter into a terabyte, and a regular expression can take years to fail. Both
can be found only in the file. A file that makes texts far longer is refused. If the file does not show a limit on the
time, encoding runs in a process that can be killed (:mod:`~chairlift.text.tokenizer.text_worker`).
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.text.tokenizer.patterns import is_steady, shortest

__all__ = ["check_growth", "doubt_about", "read_parts"]

MAX_GROWTH: Final = 64
"""Maximum allowed factor by which a text may grow, in bytes. For comparison: NFKC can grow a text 11 times, ``▁`` for
a space 3 times."""
MAX_ADDED: Final = 4096
"""Maximum number of bytes or tokens that may be added to any text, in addition to its growth."""
_MAX_PASSES: Final = 4
"""Maximum number of copies of a text that a post-processor may make."""
_UNICODE: Final = {"NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11, "BertNormalizer": 3, "ByteLevel": 2, "Metaspace": 3}
"""Normalizer -> maximum factor by which it makes a text longer. The factor is counted from the second normalizer of the
same kind on. The first one of a kind is always allowed."""
_LONGEST_CHARSMAP: Final = 36
"""Maximum number of bytes that SentencePiece's normalization makes of one character."""


def check_growth(files: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if a ``tokenizer.json`` can make a short text too long.

    ``files`` is its contents. Parts with an unknown form are skipped here, because the tokenizers library refuses
    them.
    """
    for part, verb in (("normalizer", "text"), ("decoder", "token")):
        steps = [step for step in _flat(files.get(part)) if step.get("type") in ("Replace", "Prepend")]
        seed = _grows(steps)
        if seed is not None:
            raise ModelLoadError(
                f"the {part} in tokenizer.json makes a {verb} more than {MAX_GROWTH} times as long (it does with "
                f"{seed!a:.40}), which would take all memory; use the tokenizer of another release of this model, or "
                "send token ids with skip_tokenizer_init"
            )
    added = passes = 0
    for step in _flat(files.get("post_processor")):
        pieces = step.get("single")
        pieces = pieces if isinstance(pieces, list) else []
        ids = _special_sizes(step)
        specials = [piece["SpecialToken"] for piece in pieces if isinstance(piece, Mapping) and "SpecialToken" in piece]
        added += sum(ids.get(str(each.get("id")), 1) for each in specials if isinstance(each, Mapping))
        here = sum(isinstance(piece, Mapping) and "Sequence" in piece for piece in pieces)
        passes = max(1, passes) * max(1, here)
    if passes > _MAX_PASSES or added > MAX_ADDED:
        raise ModelLoadError(
            f"the post_processor in tokenizer.json repeats a text {passes} times and adds {added} tokens; at most "
            f"{_MAX_PASSES} and {MAX_ADDED} are allowed: save the tokenizer again"
        )
    if any(_pattern_doubt(step) for step in _flat(files.get("decoder"))) or _factor(files.get("decoder")) > MAX_GROWTH:
        raise ModelLoadError(
            "the decoder in tokenizer.json has replacements or patterns that may take for ever; use the tokenizer of "
            "another release of this model, or send token ids with skip_tokenizer_init"
        )


def doubt_about(files: Mapping[str, Any]) -> str:
    """Reason why the time or memory for encoding has no known limit; empty if it has."""
    for part in ("normalizer", "pre_tokenizer"):
        for step in _flat(files.get(part)):
            if doubt := _pattern_doubt(step):
                return f"the {part} has a pattern that may take for ever ({doubt!a:.60})"
    growth = _factor(files.get("normalizer")) * _factor(files.get("pre_tokenizer"))
    if growth > MAX_GROWTH or _constant(files.get("normalizer")) > MAX_ADDED:
        return f"the normalizer may make a text more than {MAX_GROWTH} times as long"
    model = files.get("model")
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if isinstance(model, Mapping) and any(len(str(model.get(name) or "")) > MAX_GROWTH for name in affixes):
        return "the model adds a long text to every part of a word"
    return ""


def _flat(part: Any) -> Iterator[Mapping[str, Any]]:
    """Steps of a normalizer or pre-tokenizer in order, with nested sequences flattened. The function is not recursive,
    because a file may nest sequences very deep."""
    line = [part]
    while line:
        step = line.pop(0)
        if not isinstance(step, Mapping):
            continue
        inner = next((step[name] for name in _INNER if isinstance(step.get(name), list)), None)
        if inner is None:
            yield step
        else:
            line[:0] = inner


_INNER: Final = ("normalizers", "pretokenizers", "processors", "decoders")


def _pattern(step: Mapping[str, Any]) -> tuple[str, str]:
    """(kind, text) of the pattern of a normalizer or pre-tokenizer, where kind is String or Regex. Both are empty if
    there is no pattern."""
    pattern = step.get("pattern")
    for kind in ("String", "Regex"):
        if isinstance(pattern, Mapping) and isinstance(pattern.get(kind), str):
            return kind, pattern[kind]
    return "", ""


def _pattern_doubt(step: Mapping[str, Any]) -> str:
    kind, text = _pattern(step)
    return text if kind == "Regex" and not is_steady(text) else ""


def _factor(part: Any) -> float:
    """Maximum factor by which this part of the tokenizer can lengthen any text, in bytes."""
    factor = 1.0
    seen = set()
    for step in _flat(part):
        name = str(step.get("type"))
        if name == "Replace":
            kind, old = _pattern(step)
            new = len(str(step.get("content", "")).encode(errors="replace"))
            size = shortest(old) if kind == "Regex" else len(old.encode(errors="replace"))
            factor *= max(1.0, new / size) if size else 1.0 + new
        elif name == "Precompiled":
            factor *= max(1.0, _longest_entry(step) / _LONGEST_CHARSMAP) * (11 if name in seen else 1)
        elif name in seen:
            factor *= _UNICODE.get(name, 1)
        seen.add(name)
    return factor


def _constant(part: Any) -> int:
    return sum(len(str(step.get("prepend", "")).encode(errors="replace")) for step in _flat(part))


def _longest_entry(step: Mapping[str, Any]) -> int:
    """Number of bytes of the longest replacement in a character map; 0 if the map cannot be read."""
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or "")
        entries = data[4 + int.from_bytes(data[:4], "little") :]
    except (ValueError, TypeError):
        return 0
    return max(map(len, entries.split(b"\0")), default=0)


def _special_sizes(step: Mapping[str, Any]) -> dict[str, int]:
    tokens = step.get("special_tokens")
    return {
        str(name): len(token["ids"])
        for name, token in (tokens.items() if isinstance(tokens, Mapping) else ())
        if isinstance(token, Mapping) and isinstance(token.get("ids"), list)
    }


def _grows(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """A short text that the literal replacements make too long; None if there is none. Only the texts that they
    replace, and the characters of these texts, are tried."""
    plain = [step for step in steps if step.get("type") == "Prepend" or _pattern(step)[0] == "String"]
    seeds = {_pattern(step)[1] for step in plain} | {char for step in plain for char in _pattern(step)[1]}
    for seed in itertools.islice(sorted(seeds - {""}), 1000):
        text = seed
        for step in plain:
            if step.get("type") == "Prepend":
                continue
            old, new = _pattern(step)[1], str(step.get("content", ""))
            count = text.count(old) if old else 0
            if len(text) + count * (len(new) - len(old)) > MAX_GROWTH * max(4, len(seed)):
                return seed
            text = text.replace(old, new) if old else text
    return None


def read_parts(data: bytes) -> dict[str, Any]:
    """Contents of a ``tokenizer.json``. Empty for an invalid file, because the tokenizers library reports the error
    later."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
