"""Reads texts for calibration from a file, and makes packs of token ids."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from chairlift.errors import ConfigError, RequestError
from chairlift.models.formats.quantize.gptq import CalibrationPack
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["MOST_TOKENS", "make_packs", "packs_of", "read_texts"]

MOST_TOKENS: Final = 131_072
"""Maximum number of tokens in all samples together. It is limited because their hidden states are in memory as
float32."""
_LONGEST: Final = 2048
"""Maximum number of tokens in a sample, and in a pack."""


def read_texts(path: Path) -> list[str]:
    """Samples in a file, without empty ones.

    In a file of JSON lines (``.jsonl``), each line is an object with the key ``text``. In any other file, samples are
    separated by blank lines; if there are none, each line is a sample. Raises ConfigError for a file that cannot be
    read or has no text.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read --calibrate {path}: {reason}; give a text file or a .jsonl file") from None
    if path.suffix == ".jsonl":
        # splitlines is not used, because JSON strings may contain U+2028.
        found = [_text_of(path, number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    else:
        paragraphs = re.split(r"\n[^\S\n]*\n", content.replace("\r\n", "\n").strip())
        found = paragraphs if len(paragraphs) > 1 else content.splitlines()
    texts = [text for text in found if text.strip()]
    if not texts:
        raise ConfigError(f"--calibrate {path} has no text; give a file with a sample on each line, or in paragraphs")
    return texts


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"--calibrate {path}: line {number} must be a JSON object with a text, such as"
            f' {{"text": "..."}}, got {line.strip()[:60]!r}'
        )
    return text


def make_packs(texts: list[str], tokenizer: Tokenizer, longest: int) -> tuple[list[CalibrationPack], int]:
    """Returns (packs of samples, each cut to ``longest`` tokens; number of samples in the packs).

    If the samples have more than :data:`MOST_TOKENS` tokens together, a fixed random subset is used. Text that spells a
    special token becomes that token. If a text already begins with BOS, no second BOS is added.
    """
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    longest = min(longest, _LONGEST)
    left = MOST_TOKENS
    begin = tokenizer.named_tokens.get("bos_token")
    samples: list[list[int]] = []
    for index in order:
        try:
            whole = tokenizer.encode(texts[index], add_special_tokens=not (begin and texts[index].startswith(begin)))
        except RequestError as error:
            raise ConfigError(f"sample {index + 1} of --calibrate cannot be encoded: {error}") from None
        if ids := whole[: min(longest, left)]:
            samples.append(ids)
            left -= len(ids)
        if not left:
            break
    return packs_of(samples), len(samples)


def packs_of(samples: Sequence[Sequence[int]]) -> list[CalibrationPack]:
    """Packs of the token ids of samples, in order. A pack has at most 2,048 tokens, or a single sample."""
    packs: list[CalibrationPack] = []
    waiting: list[Sequence[int]] = []
    for ids in [*samples, []]:
        if waiting and (not ids or sum(map(len, waiting)) + len(ids) > _LONGEST):
            packs.append(_pack(waiting))
            waiting = []
        waiting.append(ids)
    return packs


def _pack(samples: Sequence[Sequence[int]]) -> CalibrationPack:
    offsets = [0]
    for ids in samples:
        offsets.append(offsets[-1] + len(ids))
    return CalibrationPack(torch.tensor([token for ids in samples for token in ids]), offsets)
