"""Expected outputs of a served HashLM. Each request is computed alone, with simple code for the stopping rules."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence

from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.models import hashlm
from chairlift.models.hashlm_served import HASHLM_EOS, HASHLM_TEMPLATE, HASHLM_VOCAB_SIZE
from chairlift.text.tokenizer.chat_template import ChatTemplate

__all__ = ["Expected", "chat_ids", "expected_hashlm"]


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """One expected output of a request."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason


def expected_hashlm(prompt: Sequence[int], params: SamplingParams, index: int = 0, salt: str = "") -> Expected:
    """Expected output number ``index`` for a prompt of token ids. ``params`` must have a seed and ``max_tokens``."""
    if params.seed is None or params.max_tokens is None:
        raise ValueError("an answer can be foretold only with a seed and max_tokens")
    row = SamplingRow(
        params=params,
        seed=sample_seed(params.seed, index),
        num_prompt_tokens=len(prompt),
        tag=int.from_bytes(salt.encode()[:8], "little"),
    )
    ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {HASHLM_EOS})
    tokens: list[int] = []
    for token in _tokens(prompt, row, params.max_tokens):
        tokens.append(token)
        ended = token in ends
        if not ended and not params.stop:
            continue
        text = _text(prompt, tokens[:-1] if ended else tokens, final=ended or len(tokens) == params.max_tokens)
        cuts = [(text.find(s) + len(s), -len(s), text.find(s)) for s in params.stop or () if s in text]
        if cuts:
            return Expected(tokens, text[: min(cuts)[2]], FinishReason.STOP)
        if ended:
            return Expected(tokens, text, FinishReason.STOP)
    return Expected(tokens, _text(prompt, tokens, final=True), FinishReason.LENGTH)


def _tokens(prompt: Sequence[int], row: SamplingRow, count: int) -> Iterator[int]:
    """The tokens of ``hashlm.reference_tokens`` for one full cache group, computed faster with running sums."""
    known, power, seen_first, seen_second = list(prompt), 1, 0, 0
    place = 0
    for _ in range(count):
        while place < len(known):
            power = power * hashlm._BASE & hashlm._MASK
            word = (known[place] + 1) * hashlm._TOKEN & hashlm._MASK ^ (place + 1) * hashlm._PLACE & hashlm._MASK
            first = hashlm._mix_one(word ^ row.tag * hashlm._TAG & hashlm._MASK)
            seen_first = (seen_first + first * power) & hashlm._MASK
            seen_second = (seen_second + hashlm._mix_one(first ^ seen_first) * power) & hashlm._MASK
            place += 1
        known.append(hashlm._next_token(seen_second, known, row, HASHLM_VOCAB_SIZE))
        yield known[-1]


def chat_ids(*messages: tuple[str, str]) -> list[int]:
    """Token ids of the prompt for a conversation. ``messages`` are (role, content) without special tokens."""
    text = ChatTemplate(HASHLM_TEMPLATE).render([{"role": role, "content": content} for role, content in messages])
    ids: list[int] = []
    for piece in text.replace("<|im_start|>", "\0S").replace("<|im_end|>", "\0E").split("\0"):
        named = {"S": [256], "E": [HASHLM_EOS]}.get(piece[:1], []) if ids or piece[:1] in ("S", "E") else []
        ids += named + list((piece[1:] if named else piece).encode())
    return ids


def _text(prompt: Sequence[int], tokens: Sequence[int], *, final: bool) -> str:
    """Text of the output tokens. If the prompt ends inside a character, the text includes the prompt's part of that
    character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(token for token in prompt if token < 256))
    given = bytes(token for token in tokens if token < 256)
    return decoder.decode(given, final=final) if given else ""
