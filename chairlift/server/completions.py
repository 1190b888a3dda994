"""POST /v1/completions: text goes on where the prompt ends."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.detokenizer import TokenText, token_decoder
from chairlift.engine.output_stream import OutputStream
from chairlift.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from chairlift.sampling_params import SamplingParams
from chairlift.server.errors import ApiError
from chairlift.server.limits import read_json, until_tokens
from chairlift.server.models import check_model, engine_info
from chairlift.server.promises import class_of, read_promises
from chairlift.server.protocol import (
    CompletionRequest,
    no_prompt_logprobs_in_stream,
    parse,
    sampling_params,
    warning_headers,
)
from chairlift.server.state import ServerState
from chairlift.server.streaming import (
    ChunkWriter,
    Meter,
    PromptLogprobs,
    Timing,
    TokenTexts,
    Usage,
    collect,
    finite,
    json_response,
    prompt_logprobs,
    reply_head,
    start_stream,
    submit_all,
    timing,
    truncate,
)
from chairlift.tokenizer.tokenizer import Tokenizer

__all__ = ["TextCompletion", "routes"]

_DEFAULT_MAX_TOKENS: Final = 16
_LONG_TEXT: Final = 16_384
"""Characters; the tokens of longer texts are placed on a thread."""
_encode: Final = msgspec.json.encode
_Entries = Sequence[Mapping[int, Logprob] | None]


class TextLogprobs(msgspec.Struct):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the choice's text."""


class TextChoice(msgspec.Struct, kw_only=True):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop token or stop string that ended it."""
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """The reply that is not a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    """The class of service that the request had."""
    choices: list[TextChoice]
    usage: Usage
    timing: Timing | UnsetType = UNSET
    """Of the prompt that took longest."""


async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    state: ServerState = request.app.state.server
    asked, ignored = parse(CompletionRequest, await read_json(request))
    model = check_model(state, asked.model)
    given = asked.prompts()
    caller = read_promises(request, asked, ignored)
    info = engine_info(state)
    params = _params(asked, info.sampling_defaults)
    state.engine.check_room(len(given), class_of(params))
    async with until_tokens(request, asked):
        prompts = [
            truncate(
                await _encode_prompt(state, asked, prompt),
                asked.truncate_prompt_tokens,
                info,
                params.max_tokens,
                _num_added(state, asked, prompt),
            )
            for prompt in given
        ]
        places = [await _places(state, asked, prompt) for prompt in given]
    writer = _Writer(asked, given, prompts, state.engine.tokenizer, places)
    streams = await submit_all(state, prompts, params, asked, stream=bool(asked.stream), caller=caller)
    head = reply_head("cmpl", model, info, streams)
    headers = warning_headers(ignored)
    if asked.stream:
        return await start_stream(state, streams, _TextChunks(head, asked, streams, writer), headers)
    meter = Meter(streams)
    choices: list[TextChoice] = []
    outputs = await collect(streams)
    for index, output in enumerate(outputs):
        delivered = _delivered(asked, output)
        meter.note(index, delivered)
        choices += [writer.whole(index, delivered, answer) for answer in delivered.outputs]
    told = timing(outputs, asked.return_timing)
    return json_response(TextCompletion(**head, choices=choices, usage=meter.usage(), timing=told), headers)


def _params(asked: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    n, best_of = asked.n or 1, asked.best_of or asked.n or 1
    problem = ("", "")
    if best_of < n:
        problem = ("best_of", f"best_of is {best_of} but n is {n}; raise best_of, or leave it out")
    elif best_of > n and asked.stream:
        problem = ("best_of", "best_of cannot be streamed: the best is known at the end; leave out stream or best_of")
    elif asked.max_tokens == 0 and not asked.echo:
        problem = ("max_tokens", "max_tokens is 0, which only makes sense with echo; give at least 1")
    if problem[0]:
        raise ApiError(400, problem[1], code="invalid_value", param=problem[0])
    no_prompt_logprobs_in_stream(asked)
    logprobs, of_prompt = asked.logprobs, asked.prompt_logprobs
    if asked.echo and logprobs is not None:
        of_prompt = max(logprobs, of_prompt or 0)
    if best_of > n and logprobs is None:
        logprobs = 0  # to rank the answers
    most = _DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    if most == 0 and of_prompt is None:
        of_prompt = 0  # a prompt that is scored may be as long as the model takes
    fields = {"n": best_of, "max_tokens": most, "logprobs": logprobs, "prompt_logprobs": of_prompt}
    return sampling_params(asked, defaults, **fields)


async def _encode_prompt(state: ServerState, asked: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    ids = await state.engine.encode(prompt, asked.add_special_tokens is not False)
    if not ids:
        raise ApiError(400, "the prompt is empty; send at least one character", code="invalid_value", param="prompt")
    return ids


def _num_added(state: ServerState, asked: CompletionRequest, prompt: str | list[int]) -> tuple[int, int]:
    """How many special tokens the tokenizer put around a prompt."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None or isinstance(prompt, list) or asked.add_special_tokens is False:
        return 0, 0
    return tokenizer.num_added


async def _places(state: ServerState, asked: CompletionRequest, given: str | list[int]) -> list[int] | None:
    """Where the tokens of an echoed prompt begin in it; None where nobody asks, or the echo is made of the tokens."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None or asked.logprobs is None or not _echoes_given(asked, given):
        return None
    text, special = str(given), asked.add_special_tokens is not False
    if len(text) <= _LONG_TEXT:
        return tokenizer.offsets(text, special)
    return await state.engine.beside(lambda: tokenizer.offsets(text, special))


def _echoes_given(asked: CompletionRequest, given: str | list[int]) -> bool:
    """Whether a prompt is echoed as the client wrote it."""
    whole = asked.skip_special_tokens is not False and asked.truncate_prompt_tokens is None
    return bool(asked.echo) and isinstance(given, str) and whole


def _delivered(asked: CompletionRequest, output: RequestOutput) -> RequestOutput:
    """The answers that the client gets: the best ``n`` of ``best_of``."""
    answers, n = output.outputs, asked.n or 1
    if len(answers) > n:
        ranked = sorted(answers, key=lambda answer: (-_mean_logprob(answer), answer.index))[:n]
        answers = [dataclasses.replace(answer, index=index) for index, answer in enumerate(ranked)]
    return dataclasses.replace(output, outputs=answers)


def _mean_logprob(answer: CompletionOutput) -> float:
    return finite(answer.cumulative_logprob or 0.0) / max(1, len(answer.token_ids))


class _Writer:
    """Makes choices for the answers to several prompts. Choices are numbered prompt by prompt."""

    def __init__(
        self,
        asked: CompletionRequest,
        given: Sequence[str | list[int]],
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer | None,
        places: Sequence[list[int] | None],
    ) -> None:
        self._asked = asked
        self._n = asked.n or 1
        self._prompts = prompts
        self._texts = TokenTexts(tokenizer, bool(asked.return_tokens_as_token_ids))
        self._tokenizer = tokenizer
        self._skip = asked.skip_special_tokens is not False
        self._echoes: list[str] = []
        self._places = places
        self._offsets: dict[int, _Offsets] = {}
        if asked.echo:
            self._echoes = [self._echo(text, ids) for text, ids in zip(given, prompts, strict=True)]

    def _echo(self, given: str | list[int], prompt: list[int]) -> str:
        if self._tokenizer is None:
            raise ApiError(400, "echo needs the tokenizer, which was not loaded; leave it out", param="echo")
        if isinstance(given, str) and _echoes_given(self._asked, given):
            return given
        return self._tokenizer.decode(prompt, self._skip, final=self._asked.max_tokens == 0)

    def index(self, prompt: int, answer: CompletionOutput) -> int:
        return prompt * self._n + answer.index

    def whole(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> TextChoice:
        """A finished answer, after its prompt where that was asked for."""
        opening = self.opening(prompt, output, answer)
        choice = self.news(prompt, answer)
        choice.finish_reason, choice.stop_reason = answer.finish_reason, answer.stop_reason
        if opening is not None:
            choice.text = opening.text + choice.text
            choice.prompt_token_ids = opening.prompt_token_ids
            if opening.logprobs is not None and choice.logprobs is not None:
                choice.logprobs = _joined(opening.logprobs, choice.logprobs)
        if self._asked.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._texts, self._asked.prompt_logprobs)
        return choice

    def opening(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> TextChoice | None:
        """What was asked for of the prompt, as the beginning of a choice."""
        if not self._echoes and not self._asked.return_token_ids:
            return None
        ids, logprobs = self._prompts[prompt], None
        if self._echoes:
            logprobs = self._logprobs(self.index(prompt, answer), ids, output.prompt_logprobs or [None] * len(ids))
        choice = self._choice(prompt, answer, self._echoes[prompt] if self._echoes else "", logprobs)
        if self._asked.return_token_ids:
            choice.prompt_token_ids = ids
        return choice

    def news(self, prompt: int, answer: CompletionOutput) -> TextChoice:
        """What an output says about an answer, but for its end."""
        logprobs = self._logprobs(self.index(prompt, answer), answer.token_ids, answer.logprobs or ())
        choice = self._choice(prompt, answer, answer.text, logprobs)
        if self._asked.return_token_ids:
            choice.token_ids = answer.token_ids
        return choice

    def _choice(self, prompt: int, answer: CompletionOutput, text: str, logprobs: TextLogprobs | None) -> TextChoice:
        index = self.index(prompt, answer)
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=None, stop_reason=None)

    def _logprobs(self, index: int, token_ids: Sequence[int], entries: _Entries) -> TextLogprobs | None:
        top = self._asked.logprobs
        if top is None:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            prompt = index // self._n
            echo = self._echoes[prompt] if self._echoes else None
            offsets = self._offsets[index] = _Offsets(
                self._tokenizer, self._skip, self._prompts[prompt], echo, self._places[prompt]
            )
        out = TextLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._text(token_id, entry[token_id] if entry else self._unscored(token_id))
            out.tokens.append(text)
            out.text_offset.append(offsets.next(token_id))
            out.token_logprobs.append(finite(entry[token_id].logprob) if entry else None)
            out.top_logprobs.append(self._top(entry, token_id, top) if entry else None)
        return out

    def _text(self, token_id: int, entry: Logprob) -> str:
        """As OpenAI writes it: ``bytes:\\xc3`` for a token that is a part of a character, which no text can say."""
        text = self._texts.text(token_id, entry)
        if "\ufffd" not in text:
            return text
        raw = self._texts.bytes(token_id, entry)
        return text if raw == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _unscored(self, token_id: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return Logprob(0.0, None, text)

    def _top(self, entry: Mapping[int, Logprob], chosen: int, most: int) -> dict[str, float]:
        """By text, the most likely first; of tokens with the same text the more likely one counts."""
        found: dict[str, float] = {}
        for token_id, each in sorted(entry.items(), key=lambda item: -item[1].logprob):
            if token_id == chosen or (each.rank is not None and each.rank <= most):
                found.setdefault(self._text(token_id, each), finite(each.logprob))
        return found


class _Offsets:
    """Where tokens begin in the text of a choice, in characters; a character begins with its first byte.

    ``echo`` is what the text begins with: then the tokens of ``prompt`` come first. They begin at ``places``, or where
    the echo is made of them, where their text does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        skip_special_tokens: bool,
        prompt: Sequence[int],
        echo: str | None,
        places: Sequence[int] | None,
    ) -> None:
        decoding = None if tokenizer is None else tokenizer.byte_decoding
        before = () if echo is not None else prompt
        self._tokenizer = tokenizer
        self._window: TokenText | None = None
        if tokenizer is not None and decoding is None:
            self._window = token_decoder(tokenizer, before, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(decoding.errors if decoding else "replace")
        self._skip = skip_special_tokens
        self._at = 0
        self._echoed, self._echo = (0, "") if echo is None else (len(prompt), echo)
        self._places = places
        tail = b"" if tokenizer is None or decoding is None else tokenizer.tail_bytes(before, self._skip)
        self._utf8.decode(tail)
        self._at_start = decoding is not None and decoding.strip_start and not tail

    def next(self, token_id: int) -> int:
        start = self._next(token_id)
        if not self._echoed:
            return start
        if self._places is not None:
            start = self._places[len(self._places) - self._echoed]
        self._echoed -= 1
        if not self._echoed:
            self._at = len(self._echo)
        return min(start, len(self._echo))

    def _next(self, token_id: int) -> int:
        if self._tokenizer is None:
            return 0
        if self._window is not None:
            piece, own = self._window.feed(token_id), self._tokenizer.token_text(token_id)
            start, self._at = self._at, self._at + len(piece)
            shown = own if piece.endswith(own) else own[:-1]  # of the last word's end a decoder drops the space
            return self._at - len(shown) if shown and piece.endswith(shown) else start
        raw = self._tokenizer.token_bytes(token_id, self._skip)
        if raw and not 0x80 <= raw[0] < 0xC0:  # a character that was open stays broken, and stands before this token
            self._at += len(self._utf8.decode(b"", final=True))
        start = self._at
        self._at += len(self._utf8.decode(raw)) - (self._at_start and raw.startswith(b" "))
        self._at_start = self._at_start and not raw
        return start


def _joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


class _TextChunks(ChunkWriter):
    """The events of a streamed completion."""

    def __init__(
        self, head: Mapping[str, Any], asked: CompletionRequest, streams: Sequence[OutputStream], writer: _Writer
    ) -> None:
        super().__init__({**head, "object": "text_completion"}, asked, streams)
        self._asked = asked
        self._writer = writer
        self._ids = bool(asked.return_token_ids)
        self._begun: set[int] = set()

    def chunk(self, prompt: int, output: RequestOutput) -> bytes:
        good = (None, FinishReason.STOP, FinishReason.LENGTH)
        failed = any(answer.finish_reason not in good for answer in output.outputs)
        return super().chunk(prompt, output if failed else _delivered(self._asked, output))

    def choices(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> list[bytes]:
        found = []
        index = self._writer.index(prompt, answer)
        if index not in self._begun:
            self._begun.add(index)
            opening = self._writer.opening(prompt, output, answer)
            if opening is not None:
                found.append(_encode(opening))
        if self._asked.logprobs is not None or self._ids:
            if answer.text or answer.token_ids:
                found.append(_encode(self._writer.news(prompt, answer)))
        elif answer.text or (answer.token_ids and self._continuous):
            text = _encode(answer.text)
            found.append(b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, text))
        if answer.finish_reason is not None:
            end = (index, _encode(answer.finish_reason), _encode(answer.stop_reason))
            found.append(b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}' % end)
        return found


routes: Final = [Route("/v1/completions", create_completion, methods=["POST"])]
