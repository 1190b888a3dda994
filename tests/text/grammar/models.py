"""A grammar compiler with a small tokenizer, and random outputs that follow its masks."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np

import chairlift
from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.text.grammar.compiler import Compiled, GrammarCompiler, Matcher
from chairlift.text.tokenizer.byte_level import byte_tokenizer
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["allowed", "bundled", "compiled", "compiler", "follow", "of_bytes", "sampled", "verdict"]


@functools.cache
def bundled() -> Tokenizer:
    """The bundled model's tokenizer: 3,072 byte-level tokens, four of them special."""
    return Tokenizer.from_dir(Path(chairlift.__file__).parent / "assets")


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(bundled, bundled().vocab_size)


def compiled(**asked: Any) -> Compiled:
    return compiler().compile(StructuredOutputsParams(**asked).value)


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    assert mask is not None, matcher.error
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def follow(made: Compiled, ids: list[int], eos: int) -> tuple[str, Matcher]:
    """Follow the grammar with the tokens of an output. Returns (``complete``, ``prefix`` or ``refused``; the
    matcher)."""
    matcher = made.matcher()
    for token_id in ids:
        if token_id not in allowed(matcher):
            return "refused", matcher
        assert matcher.consume(token_id), matcher.error
    return "complete" if eos in allowed(matcher) else "prefix", matcher


@functools.cache
def of_bytes() -> tuple[Tokenizer, GrammarCompiler]:
    """Tokenizer and compiler with one token per byte, for tests in which tokens do not matter."""
    tokenizer = byte_tokenizer(("<|stop|>",), eos="<|stop|>")
    return tokenizer, GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)


def verdict(text: str, **asked: Any) -> str:
    """Whether the grammar of ``StructuredOutputsParams(**asked)`` accepts ``text``: ``complete``, ``prefix`` or
    ``refused``."""
    tokenizer, own = of_bytes()
    return follow(own.compile(StructuredOutputsParams(**asked).value), list(text.encode()), tokenizer.eos_token_ids[0])[
        0
    ]


def sampled(made: Compiled, seed: int, tokenizer: Tokenizer | None = None, most: int = 400) -> str | None:
    """Random output that follows the grammar; None if it does not end in time. It ends with a higher probability than a
    model's output would."""
    tokenizer, rng = tokenizer or bundled(), random.Random(seed)
    eos, matcher, text = tokenizer.eos_token_ids[0], made.matcher(), b""
    for _ in range(most):
        if matcher.stopped:
            return text.decode()
        ids = allowed(matcher)
        assert ids, "nothing may follow, and it is not the end"
        if eos in ids and (len(ids) == 1 or rng.random() < 0.3):
            return text.decode()
        token_id = min(rng.choice([i for i in ids if i != eos]) for _ in range(2))
        assert token_id not in tokenizer.special_ids
        assert matcher.consume(token_id), matcher.error
        text += tokenizer.token_bytes(token_id)
    return None
