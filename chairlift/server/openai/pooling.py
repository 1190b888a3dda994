"""POST /v1/embeddings, /v1/classify, /v1/score and /v1/rerank: vectors, classes and scores of texts.

Each text of a call is a separate request of the scheduler, which computes it whole in one step.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.input_processor import PooledText
from chairlift.engine.pooled.pooling_inputs import (
    EMBED_DTYPES,
    PoolingInputs,
    cosine,
    floats,
    rounded,
    unit_length,
)
from chairlift.errors import EngineDeadError, PromptTooLongError, RequestError
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json, release_body
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import on_thread_if_long
from chairlift.server.openai.models import check_model, pooling_info
from chairlift.server.openai.promises import read_scheduling_fields
from chairlift.server.openai.protocol import Milliseconds, ModelName, TokenId, parse, warning_headers

__all__ = [
    "ClassifyReply",
    "ClassifyRequest",
    "EmbeddingReply",
    "EmbeddingRequest",
    "EndpointCall",
    "RerankReply",
    "RerankRequest",
    "ScoreReply",
    "ScoreRequest",
    "listed",
    "refusing",
    "routes",
]

_MAX_TEXTS: Final = 2048
_INT32: Final = 2**31 - 1
_Truncation = Annotated[int, Meta(ge=-1, le=_INT32)]
_Seconds = Annotated[float, Meta(gt=0, le=1_000_000)]
_Inputs = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=2**20)]


class PooledRequest(msgspec.Struct, kw_only=True):
    """Fields that these endpoints share. ``null`` has the same effect as a missing field."""

    model: ModelName | None = None
    truncate_prompt_tokens: _Truncation | None = None
    """Maximum number of tokens per text; the rest is cut off. In a pair, the second text is shortened. -1: the model's
    maximum."""
    queue_timeout: _Seconds | None = None
    """Maximum number of seconds to wait until the computation starts."""
    priority: Annotated[int, Meta(ge=-(2**31), le=_INT32)] | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    """Class of service."""
    ttft_ms: Milliseconds | None = None
    """Milliseconds from arrival until the result is due. ``deadline_ms`` has the same effect."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds from arrival until the result is due."""
    user: Annotated[str, Meta(max_length=256)] | None = None
    """Name of the caller. If there are no API keys, the scheduler treats it as the tenant that is charged for the
    request."""


class EmbeddingRequest(PooledRequest, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: _Inputs
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    encoding_format: Annotated[str, Meta(max_length=16)] | None = None
    """``float`` (a list of numbers) or ``base64`` (float32 numbers, little endian)."""
    dimensions: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    """Return only this many leading numbers of each embedding. Only for models that were trained for shortened
    embeddings."""
    embed_dtype: Annotated[str, Meta(max_length=16)] | None = None
    """Type to which the numbers are rounded, and in which base64 writes them: ``float32`` (the default), ``float16`` or
    ``bfloat16``."""
    normalize: bool | None = None
    """true: every embedding has length 1. false: refused if the model itself makes embeddings of length 1."""
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    """Name of one of the model's predefined prompts. The prompt is put before each text."""


class ClassifyRequest(PooledRequest, kw_only=True):
    """The body of POST /v1/classify."""

    input: _Inputs


_Texts = Annotated[list[str], Meta(min_length=1, max_length=_MAX_TEXTS)]


class ScoreRequest(PooledRequest, kw_only=True):
    """The body of POST /v1/score. There is one first text for all second texts, or one first text per second text."""

    text_1: str | _Texts
    text_2: str | _Texts


class Document(msgspec.Struct, kw_only=True):
    """A document in a rerank request or in the response."""

    text: str


class RerankRequest(PooledRequest, kw_only=True):
    """The body of POST /v1/rerank and /rerank, in the form of Jina and Cohere."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=_MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    """Maximum number of results; 0 or null: all."""
    return_documents: bool | None = None
    """Whether results contain their documents (default: true)."""


class PooledUsage(msgspec.Struct, kw_only=True):
    """Number of input tokens."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(msgspec.Struct, kw_only=True):
    """Embeddings in the order of the input."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage


class Classification(msgspec.Struct, kw_only=True):
    """The most likely class of one text, and the score of every class."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct, kw_only=True):
    """Classes in the order of the input."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PooledUsage


class Score(msgspec.Struct, kw_only=True):
    """Score of one pair of texts."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreReply(msgspec.Struct, kw_only=True):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result for one document: its index in the request, and its relevance to the query."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankReply(msgspec.Struct, kw_only=True):
    """Results, best first. Documents with equal scores keep the order of the request."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


class EndpointCall:
    """One call of an endpoint for embeddings, classes or scores."""

    def __init__(self, request: Request, payload: PooledRequest, ignored: list[str], task: str) -> None:
        self.state: ServerState = request.app.state.server
        self._request = request
        self.payload = payload
        self._ignored = ignored
        self._caller = read_scheduling_fields(request, payload, ignored)
        self._params = SamplingParams(
            priority=payload.priority,
            service_tier=payload.service_tier,
            ttft_ms=payload.ttft_ms,
            deadline_ms=payload.deadline_ms,
        )
        self.model = check_model(self.state, payload.model)
        pooling_info(self.state)
        inputs = self.state.engine.pooling_inputs
        if inputs is None:
            raise EngineDeadError("the engine is not there")
        self.inputs: PoolingInputs = inputs
        self.num_tokens = 0
        try:
            inputs.check_task(task)
        except RequestError as error:
            raise ApiError(400, str(error), code="unsupported_model", param="model") from None

    async def encode(self, given: Sequence[Any], prefix: str, name: str) -> list[PooledText]:
        """Check and tokenize texts or lists of token ids. ``name`` is the request field, for error messages."""
        engine = self.state.engine
        truncate = self.payload.truncate_prompt_tokens
        texts = iter(await engine.prompts.encode_all([prefix + each for each in given if isinstance(each, str)]))
        added = engine.prompts.tokenizer.num_added if engine.prompts.tokenizer is not None else (0, 0)
        found = []
        for place, each in enumerate(given):
            with refusing(f"{name}[{place}]" if len(given) > 1 else name):
                ids, around = (next(texts), added) if isinstance(each, str) else (each, (0, 0))
                found.append(self.inputs.text(uuid.uuid4().hex, ids, truncate, around))
        return found

    async def vectors(self, texts: Sequence[PooledText]) -> list[bytes]:
        """Vector of each text, as float32 bytes."""
        release_body(self._request)
        self.num_tokens += sum(len(text.token_ids) for text in texts)
        caller = self._caller
        patience = self.payload.queue_timeout
        return await self.state.engine.pool(
            texts,
            self._params,
            tenant=caller.tenant,
            queue_timeout=patience,
            name=caller.request_id,
            arrival=caller.arrived,
        )

    async def scores(self, first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[float]:
        """Scores of pairs of texts. If ``first`` has one text, it forms a pair with each text of ``second``; otherwise
        texts with the same index form a pair."""
        inputs = self.inputs
        truncate = self.payload.truncate_prompt_tokens
        if len(first) not in (1, len(second)):
            message = (
                f"there are {len(first)} texts in {names[0]} and {len(second)} in {names[1]}; send one, or as many"
            )
            raise ApiError(400, message, code="invalid_value", param=names[0])
        if inputs.pooling.task == "embed":
            prefix = inputs.prefix(None)
            queries = await self.encode(first, prefix, names[0])
            both = await self.vectors([*queries, *await self.encode(second, prefix, names[1])])
            ones = both[: len(first)] * (len(second) if len(first) == 1 else 1)
            return [cosine(one, other) for one, other in zip(ones, both[len(first) :], strict=True)]

        def make() -> list[PooledText]:
            ones = list(first) * (len(second) if len(first) == 1 else 1)
            found = []
            for place, pair in enumerate(zip(ones, second, strict=True)):
                with refusing(f"{names[1]}[{place}]" if len(second) > 1 else names[1]):
                    found.append(inputs.pair(uuid.uuid4().hex, pair[0], pair[1], truncate))
            return found

        size = len(first[0]) * len(second) + sum(map(len, second))
        pairs = await on_thread_if_long(self.state, size, make)
        return [floats(vector)[-1] for vector in await self.vectors(pairs)]

    @property
    def head(self) -> dict[str, Any]:
        """Fields with which the response begins."""
        return {"id": f"pool-{secrets.token_hex(16)}", "created": int(time.time()), "model": self.model}

    @property
    def usage(self) -> PooledUsage:
        """Number of input tokens, summed over all texts of the call."""
        return PooledUsage(prompt_tokens=self.num_tokens, total_tokens=self.num_tokens)

    async def reply(self, size: int, make: Callable[[], msgspec.Struct]) -> Response:
        """The response made by ``make``, which has about ``size`` numbers. A long response is encoded on a thread."""
        body = await on_thread_if_long(self.state, size, lambda: msgspec.json.encode(make()))
        return Response(body, headers=warning_headers(self._ignored), media_type="application/json")


@contextlib.contextmanager
def refusing(field: str) -> Iterator[None]:
    """Context manager: add the name of the request field to errors inside the block."""
    try:
        yield
    except RequestError as error:
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
        raise ApiError(400, f"{field}: {error}", code=code, param=field) from None


def listed(given: Any, name: str) -> list[Any]:
    """The input as a list with one entry per text. Raises ApiError for mixed lists and for too many texts."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    texts = [given] if kinds == {int} else list(given)
    if len(kinds) > 1:
        message = f"{name} mixes texts, token ids and lists; send texts, token ids, or lists of token ids"
        raise ApiError(400, message, code="invalid_type", param=name)
    if len(texts) > _MAX_TEXTS:
        message = f"{name} has {len(texts):,} texts, but a call takes {_MAX_TEXTS:,}; split it"
        raise ApiError(400, message, code="invalid_value", param=name)
    return texts


async def create_embeddings(request: Request) -> Response:
    """Return the embeddings of texts."""
    pooling_info(request.app.state.server)
    payload, ignored = parse(EmbeddingRequest, await read_json(request))
    call = EndpointCall(request, payload, ignored, "embed")
    if payload.encoding_format not in (None, "float", "base64"):
        message = f"encoding_format must be float or base64, got {payload.encoding_format!r}"
        raise ApiError(400, message, code="invalid_value", param="encoding_format")
    if payload.embed_dtype not in (None, *EMBED_DTYPES):
        message = f"embed_dtype must be {', '.join(EMBED_DTYPES)}, got {payload.embed_dtype!r}"
        raise ApiError(400, message, code="invalid_value", param="embed_dtype")
    if payload.normalize is False and call.inputs.pooling.normalize:
        message = (
            "normalize is false, but the model's embeddings have length 1, as its files say; leave it out, or start the"
            " server with pooling_normalize false"
        )
        raise ApiError(400, message, code="unsupported_parameter", param="normalize")
    with refusing("dimensions"):
        call.inputs.check_dimensions(payload.dimensions)
    with refusing("prompt_name"):
        prefix = call.inputs.prefix(payload.prompt_name)
    vectors = await call.vectors(await call.encode(listed(payload.input, "input"), prefix, "input"))

    def make() -> EmbeddingReply:
        dtype = payload.embed_dtype or "float32"
        cut = [call.inputs.cut(vector, payload.dimensions) for vector in vectors]
        if payload.normalize and not call.inputs.pooling.normalize:
            cut = [unit_length(each) for each in cut]
        if payload.encoding_format == "base64":
            written = [rounded(each, dtype)[0] for each in cut]
            data = [
                Embedding(index=i, embedding=base64.b64encode(each).decode("ascii")) for i, each in enumerate(written)
            ]
        else:
            data = [Embedding(index=i, embedding=rounded(each, dtype)[1]) for i, each in enumerate(cut)]
        return EmbeddingReply(**call.head, data=data, usage=call.usage)

    return await call.reply(sum(map(len, vectors)) // 4, make)


async def classify(request: Request) -> Response:
    """Return the classes of texts."""
    pooling_info(request.app.state.server)
    payload, ignored = parse(ClassifyRequest, await read_json(request))
    call = EndpointCall(request, payload, ignored, "classify")
    labels = call.inputs.pooling.labels
    vectors = await call.vectors(await call.encode(listed(payload.input, "input"), "", "input"))

    def make() -> ClassifyReply:
        data = []
        for index, vector in enumerate(vectors):
            probs = floats(vector)
            label = labels[probs.index(max(probs))]
            data.append(Classification(index=index, label=label, probs=probs, num_classes=len(probs)))
        return ClassifyReply(**call.head, data=data, usage=call.usage)

    return await call.reply(sum(map(len, vectors)) // 4, make)


async def score(request: Request) -> Response:
    """Return the scores of pairs of texts."""
    pooling_info(request.app.state.server)
    payload, ignored = parse(ScoreRequest, await read_json(request))
    call = EndpointCall(request, payload, ignored, "score")
    first, second = ([each] if isinstance(each, str) else each for each in (payload.text_1, payload.text_2))
    found = await call.scores(first, second, ("text_1", "text_2"))
    data = [Score(index=index, score=each) for index, each in enumerate(found)]
    return await call.reply(len(data), lambda: ScoreReply(**call.head, data=data, usage=call.usage))


async def rerank(request: Request) -> Response:
    """Return documents, ordered by relevance to a query."""
    pooling_info(request.app.state.server)
    payload, ignored = parse(RerankRequest, await read_json(request))
    call = EndpointCall(request, payload, ignored, "score")
    texts = [each if isinstance(each, str) else each.text for each in payload.documents]
    found = await call.scores([payload.query], texts, ("query", "documents"))
    order = sorted(range(len(found)), key=lambda index: (-found[index], index))[: payload.top_n or None]
    shown = payload.return_documents is not False
    results = [
        RerankResult(index=index, relevance_score=found[index], document=Document(text=texts[index]) if shown else None)
        for index in order
    ]
    head: Mapping[str, Any] = {name: value for name, value in call.head.items() if name != "created"}
    size = sum(map(len, texts)) if shown else len(results)
    return await call.reply(size, lambda: RerankReply(**head, usage=call.usage, results=results))


_Endpoint = Callable[[Request], Awaitable[Response]]
_ENDPOINTS: Final[dict[str, _Endpoint]] = {
    "/v1/embeddings": create_embeddings,
    "/v1/classify": classify,
    "/v1/score": score,
    "/v1/rerank": rerank,
    "/rerank": rerank,
}
routes: Final = [Route(path, endpoint, methods=["POST"]) for path, endpoint in _ENDPOINTS.items()]
