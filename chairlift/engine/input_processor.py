"""Validation of generation requests; every front end uses it."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from chairlift.base.cache_hints import LONGEST_LEASE, MOST_LEASES, NO_HINTS, CacheHints
from chairlift.base.image_spans import ImageSpan, ImageTile
from chairlift.base.pooled_row import PooledRow
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.base.service_class import DEFAULT_CLASS, ServiceClass
from chairlift.core.request import NO_PROMISE, Request, Service
from chairlift.errors import PromptTooLongError, RequestError
from chairlift.models.vision.processor import ImageProcessor, PlacedImages, place_images
from chairlift.text.tokenizer.bad_words import spellings, word_ids
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["InputProcessor", "ModelLimits", "PooledText", "PreparedRequest", "Prompt", "images_of", "unnamed"]

Prompt = str | list[int] | tuple[int, ...] | Mapping[str, Any]
"""Text, token ids, or a mapping with vLLM's keys ``prompt`` and ``prompt_token_ids``. If a mapping has both, the ids
are used, and the text only appears in the output. ``multi_modal_data`` may hold images: ``{"image": [...]}``."""

_SALT = re.compile(r"[A-Za-z0-9_-]{0,64}")
_MAX_ID_LENGTH = 256


class _CacheRoom(Protocol):
    @property
    def capacity_tokens(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model that requests must respect."""

    vocab_size: int
    """Number of logits. Every token id must be below this number."""
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    service_classes: Mapping[str, ServiceClass] | None = None
    """Class of service -> its guarantees; None if the scheduling policy ignores classes."""
    shortest_prompt: int = 1
    """Minimum number of tokens of a prompt, for a model whose rotation fits long texts only."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledText:
    """A text whose vector is wanted, checked by :class:`~chairlift.engine.pooled.pooling_inputs.PoolingInputs`."""

    request_id: str
    token_ids: list[int]
    row: PooledRow = dataclasses.field(default_factory=PooledRow)


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request as plain data, which can be sent to another process."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """The caller's seed, or a random seed."""
    max_tokens: int
    """Maximum number of tokens to generate; without the caller's limit, as many as fit. If only the prompt is scored it
    is 1, and the generated token is dropped."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, ascending: the caller's stop tokens, and the end-of-sequence tokens unless
    ``ignore_eos``."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""
    arrival_time: float = 0.0
    priority: int = 0
    service: Service = NO_PROMISE
    adapter_id: int = 0
    """Number of the request's adapter; 0 for no adapter."""
    answer_token_ids: list[int] = dataclasses.field(default_factory=list)
    """Generated tokens that another engine already delivered (only for a request with one answer). The answer continues
    after these tokens: the next token gets the same position, seed and penalties as if one engine had computed it
    all."""
    image_spans: tuple[ImageSpan, ...] = ()
    """Spans of the prompt whose input vectors come from an encoded image instead of token embeddings."""
    image_tiles: tuple[ImageTile, ...] = ()
    """Image tiles to which ``image_spans`` refer, each tile once."""
    pooled: PooledRow | None = None
    """Set for a request that ends after its prompt and returns a vector. Its generated token is dropped."""

    @property
    def sequence_ids(self) -> list[str]:
        """Ids of the sequences; there is one sequence per answer."""
        count = self.params.n
        return [self.request_id] if count == 1 else [f"{self.request_id}#{index}" for index in range(count)]

    def make_sequences(self) -> list[Request]:
        """One :class:`~chairlift.core.request.Request` per answer. All requests but the first share the prompt's KV
        with the first."""
        sequences: list[Request] = []
        ends_early = bool(self.stop_token_ids or self.params.stop)
        prediction = self.params.prediction or ()
        expected = () if isinstance(prediction, str) else tuple(prediction)  # prepare() converted text to token ids
        others = self.params  # only the first answer reports the prompt's log-probabilities
        if self.params.prompt_logprobs is not None:
            max_tokens = 1 if self.params.max_tokens == 0 else self.params.max_tokens
            others = dataclasses.replace(self.params, prompt_logprobs=None, max_tokens=max_tokens)
        for index, sequence_id in enumerate(self.sequence_ids):
            row = self.pooled or SamplingRow(
                params=self.params if index == 0 else others,
                seed=sample_seed(self.seed, index),
                num_prompt_tokens=len(self.prompt_token_ids),
                stop_token_ids=self.stop_token_ids,
                bad_word_ids=self.bad_word_ids,
                tag=int.from_bytes(self.cache_salt.encode()[:8], "little"),
            )
            sequences.append(
                Request(
                    sequence_id,
                    self.prompt_token_ids,
                    max_tokens=self.max_tokens,
                    min_tokens=self.params.min_tokens if ends_early else self.max_tokens,
                    stop_token_ids=frozenset(self.stop_token_ids),
                    arrival_time=self.arrival_time,
                    priority=self.priority,
                    service=self.service,
                    cache_salt=self.cache_salt,
                    adapter_id=self.adapter_id,
                    params=self.params,
                    sampling=row,
                    source=sequences[0] if sequences else None,
                    # Positions read from the prefix cache have no logits, which prompt log-probabilities need.
                    may_share=not (self.params.prompt_logprobs is not None and index == 0),
                    prediction=expected,
                    images=self.image_spans,
                )
            )
        sequences[0].token_ids += self.answer_token_ids
        return sequences


class InputProcessor:
    """Converts a prompt and its parameters to a :class:`PreparedRequest`, or raises RequestError with the reason.

    ``cache`` has the maximum number of positions that a request may take in the KV cache. ``seed`` makes the random
    seeds reproducible. ``images`` reads images; None for a model that reads only texts.
    """

    def __init__(
        self,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        cache: _CacheRoom,
        seed: int | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._cache = cache
        self._images = images
        # The random seeds need not be secret; it is enough that they are unrelated.
        self._random = random.Random(seed)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float,
        cache_salt: str = "",
        tenant: str = "",
        text: str | None = None,
        bad_word_ids: tuple[tuple[int, ...], ...] | None = None,
        adapter_id: int = 0,
        images: PlacedImages | None = None,
        hints: CacheHints = NO_HINTS,
    ) -> PreparedRequest:
        """Check the request, and tokenize its texts. Raises RequestError.

        ``tenant`` is charged for the tokens. If the caller has tokenized before, ``text`` is the text of ``prompt``,
        and ``bad_word_ids`` are the token ids of ``bad_words``. ``adapter_id`` is the number of an adapter that the
        core knows. ``images`` are the images of a prompt in which they already have their positions; images in a
        mapping get their positions here. ``hints`` are what the caller asks of the prefix cache.
        """
        _check_caller(request_id, params, cache_salt, tenant)
        if params.logit_bias is not None:
            params = dataclasses.replace(params)  # a private copy of the mapping, which no caller can change
        if params.prediction is not None:
            params = dataclasses.replace(params, prediction=self._prediction(params.prediction))
        given_images, prompt = images_of(prompt)
        prompt, own_text = unnamed(prompt)
        if given_images:
            prompt, images = place_images(self._images, self._ids_of(prompt), given_images)
        images = None if images is None else images.keyed(cache_salt)
        token_ids = self._token_ids(prompt, int(params.max_tokens != 0))
        self._check_params(params)
        max_tokens = self._max_tokens(len(token_ids), params)
        if params.min_tokens > max_tokens:
            raise PromptTooLongError(
                f"min_tokens is {params.min_tokens}, but after the prompt there is room for {max_tokens}; lower it"
            )
        stops = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= frozenset(self.limits.eos_token_ids)
        if params.thinking is not None and params.thinking.end in stops:
            raise RequestError(
                f"thinking.end is {params.thinking.end}, which also ends the answer; leave it out of stop_token_ids"
            )
        priority, service = self._service(params, arrival_time, tenant)
        if hints is not NO_HINTS:
            _check_hints(hints, len(token_ids))
            session, leases, payer = hints.session, hints.leases, hints.payer
            service = dataclasses.replace(service, session=session, leases=leases, payer=payer)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        return PreparedRequest(
            request_id,
            own_text if text is None else text,
            token_ids,
            params,
            seed,
            max_tokens,
            tuple(sorted(stops)),
            self._bad_word_ids(params) if bad_word_ids is None else bad_word_ids,
            cache_salt,
            arrival_time,
            priority,
            service,
            adapter_id,
            image_spans=() if images is None else images.spans,
            image_tiles=() if images is None else images.tiles,
        )

    def prepare_text(
        self, text: PooledText, params: SamplingParams, arrival_time: float, tenant: str = ""
    ) -> PreparedRequest:
        """The request for the vector of a text. Of ``params``, only the class of service, the priority and the
        deadlines count. Raises RequestError."""
        _check_caller(text.request_id, params, "", tenant)
        priority, service = self._service(params, arrival_time, tenant)
        return PreparedRequest(
            text.request_id,
            None,
            text.token_ids,
            params,
            seed=0,
            max_tokens=1,
            arrival_time=arrival_time,
            priority=priority,
            service=dataclasses.replace(service, seconds_per_token=math.inf),
            pooled=text.row,
        )

    def _ids_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("the prompt is text, but the tokenizer was not loaded; send token ids")
            token_ids = self._tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)):
            token_ids = list(prompt)
        else:
            raise RequestError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}")
        return token_ids

    def _token_ids(self, prompt: Prompt, least_answer: int) -> list[int]:
        token_ids = self._ids_of(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty; send at least one character or one token id")
        self._check_ids("the prompt", token_ids)
        if len(token_ids) + least_answer > self.limits.max_model_len:
            answer = " together with the answer, which has at least one" if least_answer else ""
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, but the model takes {self.limits.max_model_len}{answer};"
                " shorten the prompt"
            )
        if len(token_ids) < self.limits.shortest_prompt:
            original = self.limits.shortest_prompt - 1
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but the model takes prompts of more than {original} here: its"
                " rotation fits long texts, and short ones would get other answers than the model's own; send a longer"
                f" prompt, or start the engine with max_model_len {original}"
            )
        return token_ids

    def _prediction(self, prediction: str | Sequence[int]) -> list[int]:
        if not isinstance(prediction, str):
            token_ids = list(prediction)
        elif self._tokenizer is None:
            raise RequestError("prediction is text, but the tokenizer was not loaded; send token ids")
        else:
            token_ids = self._tokenizer.encode(prediction, False)
        self._check_ids("prediction", token_ids)
        if len(token_ids) > self.limits.max_model_len:
            raise PromptTooLongError(
                f"prediction has {len(token_ids)} tokens, but the model takes {self.limits.max_model_len}; shorten it"
            )
        return token_ids

    def _check_ids(self, where: str, token_ids: Sequence[int]) -> None:
        if not token_ids or (
            set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self.limits.vocab_size
        ):
            return  # the usual case, kept fast
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(f"{where} must hold whole numbers as token ids, got {token_id!r:.40}")
            if not 0 <= token_id < self.limits.vocab_size:
                raise RequestError(
                    f"{where} has token id {token_id}, but the model knows ids from 0 to {self.limits.vocab_size - 1}"
                )

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("thinking", () if params.thinking is None else params.thinking.marks)
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        if self._tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(
                "stop strings and bad_words need the tokenizer, which was not loaded; use stop_token_ids"
            )
        if self._tokenizer is None and params.structured_outputs is not None:
            raise RequestError("structured_outputs needs the tokenizer, which was not loaded; leave it out")

    def _service(self, params: SamplingParams, arrival: float, tenant: str) -> tuple[int, Service]:
        """(priority, class with deadlines) of a request. Values in the request take precedence over the values of its
        class."""
        tier = DEFAULT_CLASS if params.service_tier in (None, "auto") else str(params.service_tier)
        classes = self.limits.service_classes
        if classes is None:
            for name in ("priority", "ttft_ms", "tpot_ms", "deadline_ms"):
                if getattr(params, name):
                    raise RequestError(
                        f"{name} is {getattr(params, name)}, but the scheduling policy does not look at it; leave it"
                        " out, or start the engine with scheduling_policy='priority'"
                    )
            return 0, Service(tenant=tenant)
        if tier not in classes:
            raise RequestError(f"service_tier must be one of auto, {', '.join(classes)}; got {tier!r:.80}")
        own = classes[tier]
        ttft, tpot, deadline = (
            getattr(own if getattr(params, name) is None else params, name)
            for name in ("ttft_ms", "tpot_ms", "deadline_ms")
        )
        return own.priority if params.priority is None else params.priority, Service(
            tier,
            tenant,
            math.inf if ttft is None else arrival + ttft / 1000,
            math.inf if deadline is None else arrival + deadline / 1000,
            math.inf if tpot is None else tpot / 1000,
            own.retention,
        )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        # The last sampled token is never an input, so the cache holds one position less than the sequence. A request
        # with max_tokens 0 generates one token, which is dropped; this token may be one position after the model's
        # last.
        scored = params.max_tokens == 0
        length = self.limits.max_model_len + scored
        room = min(length, self._cache.capacity_tokens + 1) - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, but the whole KV cache holds"
                f" {self._cache.capacity_tokens}; shorten the prompt or raise kv_cache_memory_bytes"
            )
        if params.max_tokens is None:
            return room
        if scored:
            return 1
        if params.max_tokens > room:
            capacity = self._cache.capacity_tokens
            limit = self.limits.max_model_len
            # With sliding windows the cache holds any number of positions.
            cache = f", the KV cache {capacity}" if capacity < limit else ""
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}, together"
                f" {num_prompt_tokens + params.max_tokens}, but there is room for {num_prompt_tokens + room} (the model"
                f" takes {limit}{cache}); lower max_tokens to {room}"
            )
        return params.max_tokens

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of ``bad_words``, for every way to spell them that :mod:`~chairlift.text.tokenizer.bad_words`
        finds."""
        tokenizer = self._tokenizer
        if tokenizer is None or not params.bad_words:
            return ()
        return word_ids(params.bad_words, [tokenizer.encode(text, False) for text in spellings(params.bad_words)])


def _check_caller(request_id: str, params: SamplingParams, cache_salt: str, tenant: str) -> None:
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= _MAX_ID_LENGTH:
        raise RequestError(f"request_id must be a string of 1 to {_MAX_ID_LENGTH} characters")
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling parameters must be a SamplingParams, got {type(params).__name__}")
    if not isinstance(cache_salt, str) or not _SALT.fullmatch(cache_salt):
        raise RequestError("cache_salt must be at most 64 characters from A-Z, a-z, 0-9, '_' and '-'")
    if not isinstance(tenant, str) or len(tenant) > _MAX_ID_LENGTH or not tenant.isprintable():
        raise RequestError(f"tenant must be a text of at most {_MAX_ID_LENGTH} printable characters")


def _check_hints(hints: CacheHints, num_tokens: int) -> None:
    for name, value in (("session", hints.session), ("payer", hints.payer)):
        if not isinstance(value, str) or len(value) > _MAX_ID_LENGTH or not value.isprintable():
            raise RequestError(f"{name} must be a text of at most {_MAX_ID_LENGTH} printable characters")
    if len(hints.leases) > MOST_LEASES:
        raise RequestError(f"a request may ask for {MOST_LEASES} leases, got {len(hints.leases)}; leave some out")
    for end, seconds in hints.leases:
        if not 0 < end <= num_tokens:
            raise RequestError(f"a lease must cover from 1 to {num_tokens} tokens, the length of the prompt; got {end}")
        if not 0 < seconds <= LONGEST_LEASE:
            raise RequestError(f"a lease must be above 0 s and at most {LONGEST_LEASE:.0f} s long, got {seconds}")


def images_of(prompt: Any) -> tuple[list[Any], Any]:
    """(images in the ``multi_modal_data`` of a prompt in vLLM's form, the prompt without that key)."""
    if not isinstance(prompt, Mapping) or "multi_modal_data" not in prompt:
        return [], prompt
    data = prompt["multi_modal_data"]
    if data is None or (isinstance(data, Mapping) and not data):
        data = {"image": []}
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        got = ", ".join(map(repr, data)) if isinstance(data, Mapping) else type(data).__name__
        raise RequestError(f"multi_modal_data must be {{'image': an image or a list of them}}, got {got[:200]}")
    images = data["image"]
    rest = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    return list(images) if isinstance(images, (list, tuple)) else [images], rest


def unnamed(prompt: Any) -> tuple[Any, str | None]:
    """(text or token ids of the prompt, its text or None). A prompt in vLLM's form is a mapping."""
    if isinstance(prompt, Mapping):
        names = set(prompt)
        text = prompt.get("prompt")
        if "prompt_token_ids" in names <= {"prompt_token_ids", "prompt"} and isinstance(text, str | None):
            # No tokenizer checks this text. It may hold half of a surrogate pair, which cannot be sent to another
            # process, so that half is replaced.
            return prompt["prompt_token_ids"], text and text.encode(errors="replace").decode()
        if names != {"prompt"}:
            raise RequestError(
                "a prompt given as a mapping must have 'prompt', 'prompt_token_ids' or both, and no other key; "
                f"got {', '.join(map(repr, prompt)) or 'nothing'}"
            )
        prompt = text
    return prompt, prompt if isinstance(prompt, str) else None
