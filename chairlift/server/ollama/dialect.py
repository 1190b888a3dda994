"""Ollama's API: the routes, and their entries in ``/openapi.json``."""

from __future__ import annotations

from typing import Any, Final

from chairlift.server.http.api_docs import get, post, ref
from chairlift.server.http.dialect import Dialect
from chairlift.server.ollama import embed, generate, models
from chairlift.server.ollama.bodies import (
    OllamaChat,
    OllamaChatReply,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaEmbeddingReply,
    OllamaEmbedReply,
    OllamaError,
    OllamaGenerate,
    OllamaGenerateReply,
    OllamaModels,
    OllamaProgress,
    OllamaShow,
    OllamaShowReply,
    OllamaVersion,
)
from chairlift.server.openai.dialect import ASK, TTFT_PARAMETER

__all__ = ["OLLAMA"]

_MODEL: Final = "MODEL"
_REFUSED: Final = "Refused: the server serves the model with which it was started"


def _paths() -> dict[str, Any]:
    timed = [TTFT_PARAMETER]
    text = {"model": _MODEL, "prompt": ASK[0]["content"]}
    chat = {"model": _MODEL, "messages": ASK}
    show = {"model": _MODEL}
    refused = post(_REFUSED, OllamaShow, OllamaProgress, ())
    paths: dict[str, Any] = {
        "/api/chat": post(
            "The next message of a conversation", OllamaChat, OllamaChatReply, (429,), parameters=timed, example=chat
        ),
        "/api/generate": post(
            "An answer to a prompt", OllamaGenerate, OllamaGenerateReply, (429,), parameters=timed, example=text
        ),
        "/api/embed": post("Vectors of texts", OllamaEmbed, OllamaEmbedReply, (429,)),
        "/api/embeddings": post("The vector of a text", OllamaEmbedding, OllamaEmbeddingReply, (429,)),
        "/api/show": post("Facts about a model", OllamaShow, OllamaShowReply, (), example=show),
        "/api/pull": post("Success for a model that is served", OllamaShow, OllamaProgress, (), example=show),
        "/api/tags": get("The models that are served", OllamaModels),
        "/api/ps": get("The models that are loaded: all that are served", OllamaModels),
        "/api/version": get("The version of Ollama whose API is served", OllamaVersion),
        **{f"/api/{name}": refused for name in ("create", "push", "copy")},
        "/api/delete": {"delete": refused["post"]},
    }
    for name in ("chat", "generate", "pull"):  # each line is a reply; OpenAPI 3.1 cannot say so
        paths[f"/api/{name}"]["post"]["responses"]["200"]["content"][generate.NDJSON] = {}
    for path in paths.values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                if status != "200":
                    response["content"] = ref(OllamaError)
    return paths


OLLAMA: Final = Dialect(
    routes=[*generate.routes, *embed.routes, *models.routes],
    types=(
        *(OllamaChat, OllamaChatReply, OllamaGenerate, OllamaGenerateReply, OllamaEmbed, OllamaEmbedReply),
        *(OllamaEmbedding, OllamaEmbeddingReply, OllamaShow, OllamaShowReply, OllamaModels, OllamaProgress),
        *(OllamaVersion, OllamaError),
    ),
    paths=_paths(),
    prefixes=("/api",),
    computing={route.path for route in (*generate.routes, *embed.routes)},
    of_server=("/api/version", "/api/create", "/api/push", "/api/copy", "/api/delete"),
    error_form=generate.error_form,
)
