"""OpenAI's API, with vLLM's extensions: the routes, and their entries in ``/openapi.json``."""

from __future__ import annotations

from typing import Any, Final

from chairlift.server.http.api_docs import (
    LIMIT_OF_A_PAGE,
    ORDER,
    WITH_BODY,
    get,
    operation,
    path_parameter,
    post,
    query,
    ref,
)
from chairlift.server.http.dialect import Dialect
from chairlift.server.openai import chat, completions, models, pooling, responses, tokens
from chairlift.server.openai.batches import endpoints as batches
from chairlift.server.openai.batches import files
from chairlift.server.openai.batches.endpoints import BatchList, BatchObject, BatchRequest
from chairlift.server.openai.batches.files import FileDeleted, FileList, FileObject
from chairlift.server.openai.chat import ChatCompletion
from chairlift.server.openai.completions import TextCompletion
from chairlift.server.openai.models import ModelCard, ModelList
from chairlift.server.openai.pooling import (
    ClassifyReply,
    ClassifyRequest,
    EmbeddingReply,
    EmbeddingRequest,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
)
from chairlift.server.openai.promises import TTFT_HEADER
from chairlift.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from chairlift.server.openai.responses_types import DeletedResponse, InputItemList, InputTokenCount, ResponsesRequest
from chairlift.server.openai.responses_types import Response as ModelResponse
from chairlift.server.openai.tokens import DetokenizeReply, TokenizeReply

__all__ = ["ASK", "OPENAI", "TTFT_PARAMETER"]

TTFT_PARAMETER: Final = {
    "name": TTFT_HEADER,
    "in": "header",
    "description": "Milliseconds until the first token is due; the field ttft_ms takes precedence",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 999_999_999},
}
ASK: Final = [{"role": "user", "content": "What is a KV cache?"}]
_RESPONSE: Final = {"input": "What is a KV cache?", "max_output_tokens": 64}
_UPLOAD_SCHEMA: Final = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}


def _responses_paths() -> dict[str, Any]:
    stored_id = path_parameter("response_id")
    created = post(
        "Generate the next items of a conversation",
        ResponsesRequest,
        ModelResponse,
        (429,),
        streams=True,
        parameters=[TTFT_PARAMETER],
        example=_RESPONSE,
    )
    deleted = get("Delete a stored response", DeletedResponse, (404,), [stored_id])["get"]
    stored = get("A stored response", ModelResponse, (404,), [stored_id])
    pages = (query("after", "List only entries after this id", {"type": "string"}), LIMIT_OF_A_PAGE, ORDER)
    listed = get("The input items of a stored response", InputItemList, (404,), [stored_id, *pages])
    cancel = operation("Refused: only background responses can be cancelled", ref(ModelResponse), (404,))
    return {
        "/v1/responses": created,
        "/v1/responses/input_tokens": post(
            "Number of tokens in the prompt of a conversation",
            ResponsesRequest,
            InputTokenCount,
            (404, 429),
            example={"input": ASK[0]["content"]},
        ),
        "/v1/responses/{response_id}": {**stored, "delete": deleted},
        "/v1/responses/{response_id}/input_items": listed,
        "/v1/responses/{response_id}/cancel": {"post": {**cancel, "parameters": [stored_id]}},
    }


def _files_and_batches() -> dict[str, dict[str, Any]]:
    """OpenAPI paths of files and batches. Without ``--batch-dir`` these paths return 404."""
    file_id = path_parameter("file_id")
    batch_id = path_parameter("batch_id")
    pages = (query("after", "List only entries after this id", {"type": "string"}), LIMIT_OF_A_PAGE)
    sorts = (
        ORDER,
        query("purpose", "List only files with this purpose", {"type": "string"}),
    )
    upload = operation("Upload a file of requests for a batch", ref(FileObject), WITH_BODY)
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD_SCHEMA}}}
    content = operation("Content of a file", {"application/octet-stream": {"schema": {"type": "string"}}}, (404,))
    shown = get("One file", FileObject, (404,), [file_id])
    removed = get("Delete a file", FileDeleted, (404,), [file_id])
    listed = get("Your files", FileList, (404,), [*pages, *sorts])
    cancel = get("Cancel a batch; finished results are kept", BatchObject, (404,), [batch_id])
    return {
        "/v1/files": listed | {"post": upload},
        "/v1/files/{file_id}": shown | {"delete": removed["get"]},
        "/v1/files/{file_id}/content": {"get": content | {"parameters": [file_id]}},
        "/v1/batches": get("Your batches", BatchList, (404,), pages)
        | post("Create a batch from a file of requests", BatchRequest, BatchObject, ()),
        "/v1/batches/{batch_id}": get("One batch", BatchObject, (404,), [batch_id]),
        "/v1/batches/{batch_id}/cancel": {"post": cancel["get"]},
    }


_STREAMED: Final[dict[str, Any]] = {"streams": True, "parameters": [TTFT_PARAMETER]}

_COMPUTING: Final = {
    *(route.path for route in (*chat.routes, *completions.routes, *pooling.routes, *tokens.routes)),
    *("/v1/responses", "/v1/responses/input_tokens"),
}

OPENAI: Final = Dialect(
    prefixes=("/v1",),
    computing=_COMPUTING,
    of_server={route.path for route in (*responses.routes, *files.routes, *batches.routes)} - _COMPUTING,
    routes=[
        *(*chat.routes, *completions.routes, *responses.routes, *pooling.routes, *tokens.routes, *models.routes),
        *(*files.routes, *batches.routes),
    ],
    types=(
        *(ChatRequest, ChatCompletion, CompletionRequest, TextCompletion, TokenizeRequest, TokenizeReply),
        *(DetokenizeRequest, DetokenizeReply, ModelList, ModelCard),
        *(EmbeddingRequest, EmbeddingReply, ClassifyRequest, ClassifyReply, ScoreRequest, ScoreReply),
        *(RerankRequest, RerankReply),
        *(FileObject, FileList, FileDeleted, BatchRequest, BatchObject, BatchList),
        *(ResponsesRequest, ModelResponse, DeletedResponse, InputItemList, InputTokenCount),
    ),
    paths={
        "/v1/chat/completions": post(
            "Generate the next message of a conversation", ChatRequest, ChatCompletion, (429,), **_STREAMED
        ),
        "/v1/completions": post("Continue one or more prompts", CompletionRequest, TextCompletion, (429,), **_STREAMED),
        **_responses_paths(),
        "/v1/embeddings": post("Embeddings of one or more texts", EmbeddingRequest, EmbeddingReply, (429,)),
        "/v1/classify": post("Classes of one or more texts", ClassifyRequest, ClassifyReply, (429,)),
        "/v1/score": post("Scores of pairs of texts", ScoreRequest, ScoreReply, (429,)),
        "/v1/rerank": post("Documents ordered by relevance to a query", RerankRequest, RerankReply, (429,)),
        "/rerank": post("The same as /v1/rerank", RerankRequest, RerankReply, (429,)),
        "/tokenize": post("Token ids of a prompt or of messages", TokenizeRequest, TokenizeReply, (429,)),
        "/detokenize": post("The text of token ids", DetokenizeRequest, DetokenizeReply, (429,)),
        "/v1/models": get("The names of the model", ModelList),
        "/v1/models/{name}": get("One name of the model", ModelCard, (404,), [path_parameter("name")]),
        **_files_and_batches(),
    },
)
