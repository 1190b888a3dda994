"""Computes the answer that each simulated request must get: HashLM runs the request alone, with a plain
implementation of the stopping rules."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.models.hashlm import reference_tokens
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift_lab.sim.grammars import GrammarScript, scripted_tokens
from chairlift_lab.sim.images import input_words
from chairlift_lab.sim.world import BROKEN_IMAGE, EOS, LETTERS, VOCAB_SIZE, allowed_at

__all__ = ["Expected", "byte_tokenizer", "expected_answer"]


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """Expected answer of a request: what the engine must return if it serves only this request."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None


@cache
def byte_tokenizer() -> Tokenizer:
    """Tokenizer with one token for each letter, and one for each byte of a two-byte and a four-byte character."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(_vocabulary(), []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"})


def _vocabulary() -> dict[str, int]:
    letters = [chr(97 + i) for i in range(LETTERS)]
    # Names, in the byte-level alphabet, of the bytes C3 A9 (é), of F0 9F 98 80 (a face), and of a space.
    names = [*letters, "Ã", "©", "ð", "Ł", "ĺ", "Ģ", "Ġ"]
    return {name: index for index, name in enumerate(names)}


def expected_answer(
    args: dict[str, Any], params: SamplingParams, index: int, windows: Sequence[int | None], with_text: bool
) -> Expected:
    """Compute the expected answer number ``index`` of the request that arrives with ``args``."""
    row = SamplingRow(
        params=params,
        seed=sample_seed(args["seed"], index),
        num_prompt_tokens=len(args["prompt"]),
        tag=int.from_bytes(args["salt"].encode()[:8], "little") ^ args.get("adapter_tag", 0),
    )
    if any(content == BROKEN_IMAGE for _, _, content in args.get("images", ())):
        return Expected([], "", FinishReason.ERROR, None)
    stops = set(args["stop_token_ids"]) | (set() if args["ignore_eos"] else {EOS})
    end = "length"
    if args.get("grammar"):
        tokens, end = scripted_tokens(GrammarScript(**args["grammar"]), args, row, windows, stops)
    else:
        tokens = reference_tokens(
            input_words(args), row, windows, VOCAB_SIZE, args["max_tokens"], lambda position: allowed_at(args, position)
        )
    strings = args.get("stop", []) if with_text else []
    include = bool(args.get("include_stop_str_in_output"))
    for count in range(1, len(tokens) + 1):
        given = tokens[:count]
        if given[-1] in stops:
            text = _text(args["prompt"], given if include else given[:-1], with_text)
            cut, stop = _cut(text, strings, include)
            if stop is not None:
                return Expected(given, cut, FinishReason.STOP, stop)
            unnamed = given[-1] == EOS and not args["ignore_eos"]
            return Expected(given, text, FinishReason.STOP, None if unnamed else given[-1])
        cut, stop = _cut(_text(args["prompt"], given, with_text, final=False), strings, include)
        if stop is not None:
            return Expected(given, cut, FinishReason.STOP, stop)
    text, stop = _cut(_text(args["prompt"], tokens, with_text), strings, include)  # the end may complete a stop string
    reason = {"complete": FinishReason.STOP, "error": FinishReason.ERROR}.get(end, FinishReason.LENGTH)
    return Expected(tokens, text, reason if stop is None else FinishReason.STOP, stop)


def _text(prompt: list[int], tokens: list[int], with_text: bool, *, final: bool = True) -> str:
    """Text of the answer ``tokens``. A character whose bytes begin in the prompt and end in the answer belongs to the
    answer."""
    given = b"".join(map(_token_bytes, tokens))
    if not with_text or not given:
        return ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(_token_bytes, prompt)))
    return decoder.decode(given, final=final)


def _token_bytes(token: int) -> bytes:
    letters = [bytes([97 + i]) for i in range(LETTERS)]
    pieces = [*letters, b"\xc3", b"\xa9", b"\xf0", b"\x9f", b"\x98", b"\x80", b" "]
    return pieces[token] if token < len(pieces) else b""


def _cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, stop = min(found)
    return text[: end if include else end - len(stop)], stop
