"""POST /v1/completions: continues one or more texts."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.base.outputs import CompletionOutput, FinishReason, FlatLogprobs, Logprob, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.detokenizer import TokenText, token_decoder
from chairlift.engine.output_stream import OutputStream
from chairlift.server.caching.breakpoints import Breakpoints
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json, until_tokens
from chairlift.server.http.pieces import Pieces, json_items, respond
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import (
    ChunkWriter,
    Meter,
    PromptLogprobs,
    Timing,
    TokenTexts,
    Usage,
    collect,
    finite,
    on_thread_if_long,
    parts,
    prompt_logprobs,
    reply_head,
    start_stream,
    submit_all,
    timing,
    tokens_at_once,
    truncate,
)
from chairlift.server.openai.infilling import Infilling, infilling
from chairlift.server.openai.logprob_room import reserve_logprobs
from chairlift.server.openai.models import adapter_named, check_model, generating_info
from chairlift.server.openai.promises import class_of, read_scheduling_fields
from chairlift.server.openai.prompt_cache import whole_prompt
from chairlift.server.openai.protocol import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    no_prompt_logprobs_in_stream,
    parse,
    sampling_params,
    warning_headers,
)
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["TextCompletion", "routes"]

_MAX_LIST_ENTRIES: Final = 1 << 18
"""Maximum number of entries in lists such as ``logit_bias``, over all prompts of a request. The engine gets one copy of
each list per prompt. 64 copies of a list with an entry for each token of the vocabulary would take gigabytes."""
_encode: Final = msgspec.json.encode
_Entries = Sequence[Mapping[int, Logprob] | None]


class TextLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of one choice. Every list has one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Offset of each token in the choice's text, in characters."""


class TextChoice(msgspec.Struct, kw_only=True):
    """One output for one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    """Stop token or stop string that ended the output; null if it ended otherwise."""
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """The response without streaming."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    """Class of service with which the request was served."""
    choices: list[TextChoice]
    usage: Usage
    timing: Timing | UnsetType = UNSET
    """How the time was spent for the prompt whose outputs took longest."""


async def create_completion(request: Request) -> Response:
    """Generate continuations of one or more prompts."""
    state: ServerState = request.app.state.server
    payload, ignored = parse(CompletionRequest, await read_json(request))
    model = check_model(state, payload.model)
    given = payload.prompts()
    caller = read_scheduling_fields(request, payload, ignored)
    info = generating_info(state)
    if payload.prediction is not None and not info.takes_predictions:
        ignored.append("prediction")
    between = infilling(state, payload, given)
    params = _params(payload, info.sampling_defaults, () if between is None else between.ends)
    _check_lists(params, len(given))
    state.engine.check_room(len(given), class_of(params))
    async with until_tokens(request, payload):
        prompts = [
            truncate(ids, payload.truncate_prompt_tokens, info, params.max_tokens, _num_added(state, payload, prompt))
            for prompt, ids in zip(given, await _encode_prompts(state, payload, given, between), strict=True)
        ]
        echoes = await _echoes(state, payload, given, prompts) if payload.echo else None
        prompt_offsets = [await _prompt_offsets(state, payload, prompt) for prompt in given]
    writer = _Writer(payload, prompts, state.engine.prompts.tokenizer, echoes, prompt_offsets)
    reserve_logprobs(request, payload, prompts)
    whose: dict[str, Any] = {"caller": caller, "adapter": adapter_named(state, model)}
    points = Breakpoints(whole=whole_prompt(state, payload))
    whose["leases"] = [points.leases((), len(prompt), info.block_size) for prompt in prompts]
    streams = await submit_all(state, prompts, params, payload, stream=bool(payload.stream), **whose)
    head = reply_head("cmpl", model, info, streams)
    headers = warning_headers(ignored)
    if payload.stream:
        return await start_stream(state, streams, _TextChunks(head, payload, streams, writer), headers)
    meter = Meter(streams, predicted=payload.prediction is not None)
    pieces = Pieces()
    choices: list[TextChoice] = []
    outputs = await collect(streams)
    for index, output in enumerate(outputs):
        delivered = _delivered(payload, output)
        meter.note(index, delivered)
        choices += [writer.whole(index, delivered, answer, pieces) for answer in delivered.outputs]
    times = timing(outputs, payload.return_timing)
    reply = TextCompletion(**head, choices=choices, usage=meter.usage(), timing=times)
    return respond(state, reply, pieces, headers)


def _params(payload: CompletionRequest, defaults: Mapping[str, Any], ends: Sequence[int]) -> SamplingParams:
    n = payload.n or 1
    best_of = payload.best_of or payload.n or 1
    problem = ("", "")
    if best_of < n:
        problem = ("best_of", f"best_of is {best_of} but n is {n}; raise best_of, or leave it out")
    elif best_of > n and payload.stream:
        problem = ("best_of", "best_of cannot be streamed: the best is known at the end; leave out stream or best_of")
    elif payload.max_tokens == 0 and not payload.echo:
        problem = ("max_tokens", "max_tokens is 0, which only makes sense with echo; give at least 1")
    if problem[0]:
        raise ApiError(400, problem[1], code="invalid_value", param=problem[0])
    no_prompt_logprobs_in_stream(payload)
    logprobs = payload.logprobs
    of_prompt = payload.prompt_logprobs
    if payload.echo and logprobs is not None:
        of_prompt = max(logprobs, of_prompt or 0)
    if best_of > n and logprobs is None:
        logprobs = 0  # to rank the answers
    max_tokens = DEFAULT_MAX_TOKENS if payload.max_tokens is None else payload.max_tokens
    if max_tokens == 0 and of_prompt is None:
        of_prompt = 0  # a prompt that is only scored may have the model's full length
    fields: dict[str, Any] = {
        "n": best_of,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": of_prompt,
    }
    if ends and not payload.ignore_eos:
        fields["stop_token_ids"] = [*(payload.stop_token_ids or ()), *ends]
    return sampling_params(payload, defaults, **fields)


def _check_lists(params: SamplingParams, num_prompts: int) -> None:
    """Raise ApiError if the request's lists have too many entries, summed over all prompts. (The engine gets one copy
    of each list per prompt.)"""
    sizes = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "stop_token_ids": len(params.stop_token_ids or ()),
        "bad_words": sum(map(len, params.bad_words or ())),
        "prediction": len(params.prediction or ()),
    }
    if num_prompts > 1 and num_prompts * sum(sizes.values()) > _MAX_LIST_ENTRIES:
        largest = max(sizes, key=sizes.__getitem__)
        message = (
            f"{', '.join(name for name in sizes if sizes[name])} have {sum(sizes.values()):,} ids and characters, and"
            f" each of the {num_prompts} prompts takes them along: together {num_prompts * sum(sizes.values()):,}, but"
            f" {_MAX_LIST_ENTRIES:,} are allowed; send fewer prompts at a time, or shorter lists"
        )
        raise ApiError(400, message, code="invalid_value", param=largest)


async def _encode_prompts(
    state: ServerState, payload: CompletionRequest, given: Sequence[str | list[int]], between: Infilling | None
) -> list[list[int]]:
    if between is not None:
        return await between.encode(state, payload, [str(each) for each in given])
    texts = [each for each in given if isinstance(each, str)]
    ids = [each for each in given if isinstance(each, list)]
    found = await state.engine.prompts.encode_all(texts, payload.add_special_tokens is not False) if texts else ids
    if texts and not all(found):
        raise ApiError(400, "the prompt is empty; send at least one character", code="invalid_value", param="prompt")
    return found


async def _echoes(
    state: ServerState, payload: CompletionRequest, given: Sequence[str | list[int]], prompts: Sequence[list[int]]
) -> list[str]:
    """For each prompt, the text to put before its outputs (``echo``): the text that the client sent, or the decoded
    prompt tokens."""
    tokenizer = state.engine.prompts.tokenizer
    skip = payload.skip_special_tokens is not False
    if tokenizer is None:
        raise ApiError(400, "echo needs the tokenizer, which was not loaded; leave it out", param="echo")
    texts = [each for each in given if isinstance(each, str)]
    if texts and skip and payload.truncate_prompt_tokens is None:
        return texts
    final = payload.max_tokens == 0
    return await on_thread_if_long(
        state, sum(map(len, prompts)), lambda: [tokenizer.decode(ids, skip, final=final) for ids in prompts]
    )


def _num_added(state: ServerState, payload: CompletionRequest, prompt: str | list[int]) -> tuple[int, int]:
    """(number of special tokens that the tokenizer added before the prompt, number that it added after the prompt)."""
    tokenizer = state.engine.prompts.tokenizer
    if tokenizer is None or isinstance(prompt, list) or payload.add_special_tokens is False:
        return 0, 0
    return tokenizer.num_added


async def _prompt_offsets(state: ServerState, payload: CompletionRequest, given: str | list[int]) -> list[int] | None:
    """Offsets of the prompt's tokens in the echoed prompt. None if no offsets are needed, or if the echo is the
    decoded tokens."""
    tokenizer = state.engine.prompts.tokenizer
    if tokenizer is None or tokenizer.doubt or payload.logprobs is None or not _echoes_given(payload, given):
        return None
    text = str(given)
    special = payload.add_special_tokens is not False
    return await on_thread_if_long(state, len(text), lambda: tokenizer.offsets(text, special))


def _echoes_given(payload: CompletionRequest, given: str | list[int]) -> bool:
    """Whether the echo of a prompt is exactly the text that the client sent."""
    whole = payload.skip_special_tokens is not False and payload.truncate_prompt_tokens is None
    return bool(payload.echo) and isinstance(given, str) and whole


def _delivered(payload: CompletionRequest, output: RequestOutput) -> RequestOutput:
    """The output with only the best ``n`` of its ``best_of`` candidates."""
    answers = output.outputs
    n = payload.n or 1
    if len(answers) > n:
        ranked = sorted(answers, key=lambda answer: (-_mean_logprob(answer), answer.index))[:n]
        answers = [dataclasses.replace(answer, index=index) for index, answer in enumerate(ranked)]
    return dataclasses.replace(output, outputs=answers)


def _mean_logprob(answer: CompletionOutput) -> float:
    return finite(answer.cumulative_logprob or 0.0) / max(1, len(answer.token_ids))


class _Scored:
    """Consecutive tokens with their log-probabilities."""

    def __init__(self, token_ids: Sequence[int], logprobs: _Entries) -> None:
        self.token_ids = token_ids
        self._logprobs = logprobs

    def entries(self) -> Iterator[tuple[int, Mapping[int, Logprob] | None]]:
        return zip(self.token_ids, self._logprobs, strict=True)

    def chosen(self) -> Iterator[tuple[int, Logprob | None]]:
        """(token, log-probability) of each token, without the alternatives at its position."""
        if isinstance(self._logprobs, FlatLogprobs):
            return zip(self.token_ids, self._logprobs.chosen(), strict=True)
        return ((token_id, entry[token_id] if entry else None) for token_id, entry in self.entries())


class _Writer:
    """Makes the choices of a response. Choices are numbered prompt by prompt."""

    def __init__(
        self,
        payload: CompletionRequest,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer | None,
        echoes: list[str] | None,
        prompt_offsets: Sequence[list[int] | None],
    ) -> None:
        self._payload = payload
        self._n = payload.n or 1
        self._prompts = prompts
        self._texts = TokenTexts(tokenizer, bool(payload.return_tokens_as_token_ids))
        self._tokenizer = tokenizer
        self._skip = payload.skip_special_tokens is not False
        self._echoes = echoes or []
        self._prompt_offsets = prompt_offsets
        self._offsets: dict[int, _Offsets] = {}

    def index(self, prompt: int, answer: CompletionOutput) -> int:
        return prompt * self._n + answer.index

    def whole(self, prompt: int, output: RequestOutput, answer: CompletionOutput, pieces: Pieces) -> TextChoice:
        """The choice for a finished output, with the prompt before it if ``echo`` is set."""
        ids = self._prompts[prompt]
        echo = self._echoes[prompt] if self._echoes else ""
        choice = self._choice(prompt, answer, echo + answer.text, None)
        choice.finish_reason = answer.finish_reason
        choice.stop_reason = answer.stop_reason
        if self._payload.return_token_ids:
            choice.prompt_token_ids = ids
            choice.token_ids = answer.token_ids
        top = self._payload.logprobs
        of_prompt = self._payload.prompt_logprobs
        if top is not None:
            scored = [_Scored(answer.token_ids, answer.logprobs or ())]
            if self._echoes:
                scored.insert(0, _Scored(ids, output.prompt_logprobs or [None] * len(ids)))
            num_entries = (top + 1) * sum(len(each.token_ids) for each in scored)
            choice.logprobs = pieces.later(self._written(prompt, scored, top), num_entries)
        if of_prompt is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._texts, of_prompt, pieces)
        return choice

    def _written(self, prompt: int, scored: Sequence[_Scored], top: int) -> Iterator[bytes]:
        """JSON of a TextLogprobs. Its lists are written one after another, so that no whole list is in memory."""

        def chosen() -> Iterator[tuple[int, Logprob | None]]:
            return itertools.chain.from_iterable(one.chosen() for one in scored)

        def texts() -> Iterator[tuple[int, str]]:
            for token_id, entry in chosen():
                yield token_id, self._text(token_id, entry or self._unscored(token_id))

        yield b'{"tokens":'
        yield from json_items(text for _, text in texts())
        yield b',"token_logprobs":'
        yield from json_items(None if entry is None else finite(entry.logprob) for _, entry in chosen())
        yield b',"top_logprobs":'
        yield from json_items(
            self._top(entry, token_id, top) if entry else None for one in scored for token_id, entry in one.entries()
        )
        yield b',"text_offset":'
        offsets = self._new_offsets(prompt)
        yield from json_items(offsets.next(token_id) for token_id, _ in chosen())
        yield b"}"

    def openings(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> Iterator[TextChoice]:
        """First chunks of a streamed choice: the echoed prompt or its token ids. A long prompt is divided into several
        chunks."""
        if not self._echoes and not self._payload.return_token_ids:
            return
        ids = self._prompts[prompt]
        top = self._payload.logprobs
        size = tokens_at_once(top) if self._echoes and top is not None else len(ids)
        for start in range(0, len(ids), size):
            logprobs = None
            cut = slice(start, start + size)
            if self._echoes:
                entries = output.prompt_logprobs or [None] * len(ids)
                logprobs = self._logprobs(self.index(prompt, answer), ids[cut], entries[cut])
            choice = self._choice(prompt, answer, self._echoes[prompt] if self._echoes and not start else "", logprobs)
            if self._payload.return_token_ids and not start:
                choice.prompt_token_ids = ids
            yield choice

    def new_parts(self, prompt: int, answer: CompletionOutput) -> Iterator[TextChoice]:
        """Chunks for the new part of an output, without its finish reason. A long part is divided into several
        chunks."""
        for part in parts(answer, self._payload.logprobs or 0):
            logprobs = self._logprobs(self.index(prompt, part), part.token_ids, part.logprobs or ())
            choice = self._choice(prompt, part, part.text, logprobs)
            if self._payload.return_token_ids:
                choice.token_ids = part.token_ids
            yield choice

    def _choice(self, prompt: int, answer: CompletionOutput, text: str, logprobs: TextLogprobs | None) -> TextChoice:
        index = self.index(prompt, answer)
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=None, stop_reason=None)

    def _logprobs(self, index: int, token_ids: Sequence[int], entries: _Entries) -> TextLogprobs | None:
        top = self._payload.logprobs
        if top is None:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = self._new_offsets(index // self._n)
        out = TextLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._text(token_id, entry[token_id] if entry else self._unscored(token_id))
            out.tokens.append(text)
            out.text_offset.append(offsets.next(token_id))
            out.token_logprobs.append(finite(entry[token_id].logprob) if entry else None)
            out.top_logprobs.append(self._top(entry, token_id, top) if entry else None)
        return out

    def _new_offsets(self, prompt: int) -> _Offsets:
        echo = self._echoes[prompt] if self._echoes else None
        return _Offsets(self._tokenizer, self._skip, self._prompts[prompt], echo, self._prompt_offsets[prompt])

    def _text(self, token_id: int, entry: Logprob) -> str:
        """Text of a token in OpenAI's form: ``bytes:\\xc3`` for a part of a character, which is no valid text."""
        text = self._texts.text(token_id, entry)
        if "\ufffd" not in text:
            return text
        raw = self._texts.bytes(token_id, entry)
        return text if raw == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _unscored(self, token_id: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return Logprob(0.0, None, text)

    def _top(self, entry: Mapping[int, Logprob], chosen: int, top: int) -> dict[str, float]:
        """Text of a likely token -> log-probability, most likely first. If two tokens have the same text, only the
        more likely token is returned."""
        found: dict[str, float] = {}
        for token_id, each in sorted(entry.items(), key=lambda item: -item[1].logprob):
            if token_id == chosen or (each.rank is not None and each.rank <= top):
                found.setdefault(self._text(token_id, each), finite(each.logprob))
        return found


class _Offsets:
    """Computes the offset of each token in a choice's text, in characters. A character belongs to the token that has
    its first byte.

    ``echo`` is the echoed prompt at the beginning of the text, with the tokens ``prompt``. ``prompt_offsets`` are the
    offsets of these tokens; None: the offsets are found by decoding them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        skip_special_tokens: bool,
        prompt: Sequence[int],
        echo: str | None,
        prompt_offsets: Sequence[int] | None,
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
        self._prompt_offsets = prompt_offsets
        tail = b"" if tokenizer is None or decoding is None else tokenizer.tail_bytes(before, self._skip)
        self._utf8.decode(tail)
        self._at_start = decoding is not None and decoding.strip_start and not tail

    def next(self, token_id: int) -> int:
        start = self._next(token_id)
        if not self._echoed:
            return start
        if self._prompt_offsets is not None:
            start = self._prompt_offsets[len(self._prompt_offsets) - self._echoed]
        self._echoed -= 1
        if not self._echoed:
            self._at = len(self._echo)
        return min(start, len(self._echo))

    def _next(self, token_id: int) -> int:
        if self._tokenizer is None:
            return 0
        if self._window is not None:
            piece = self._window.feed(token_id)
            own = self._tokenizer.token_text(token_id)
            start = self._at
            self._at = self._at + len(piece)
            shown = own if piece.endswith(own) else own[:-1]  # a decoder may drop the space at the end of the last word
            return self._at - len(shown) if shown and piece.endswith(shown) else start
        raw = self._tokenizer.token_bytes(token_id, self._skip)
        if raw and not 0x80 <= raw[0] < 0xC0:  # an incomplete character stays broken, and comes before this token
            self._at += len(self._utf8.decode(b"", final=True))
        start = self._at
        self._at += len(self._utf8.decode(raw)) - (self._at_start and raw.startswith(b" "))
        self._at_start = self._at_start and not raw
        return start


class _TextChunks(ChunkWriter):
    """Writes the events of a streamed completion."""

    def __init__(
        self, head: Mapping[str, Any], payload: CompletionRequest, streams: Sequence[OutputStream], writer: _Writer
    ) -> None:
        super().__init__({**head, "object": "text_completion"}, payload, streams)
        self._payload = payload
        self._writer = writer
        self._ids = bool(payload.return_token_ids)
        self._begun: set[int] = set()

    def chunk(self, prompt: int, output: RequestOutput) -> Iterator[bytes]:
        good = (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
        failed = any(answer.finish_reason not in good for answer in output.outputs)
        return super().chunk(prompt, output if failed else _delivered(self._payload, output))

    def choices(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> Iterator[bytes]:
        index = self._writer.index(prompt, answer)
        if index not in self._begun:
            self._begun.add(index)
            for opening in self._writer.openings(prompt, output, answer):
                yield _encode(opening)
        if self._payload.logprobs is not None or self._ids:
            if answer.text or answer.token_ids:
                for part in self._writer.new_parts(prompt, answer):
                    yield _encode(part)
        elif answer.text or (answer.token_ids and self._continuous):
            text = _encode(answer.text)
            yield b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, text)
        if answer.finish_reason is not None:
            end = (index, _encode(answer.finish_reason), _encode(answer.stop_reason))
            yield b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}' % end


routes: Final = [Route("/v1/completions", create_completion, methods=["POST"])]
