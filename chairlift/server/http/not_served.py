"""Paths of other servers' APIs that this server does not have, and what to send instead."""

from __future__ import annotations

from typing import Final

__all__ = ["not_served"]

_BELOW_V1: Final = "it is served below /v1: send {}"
_NOT_SERVED: Final = {
    "/v1/messages/batches": "message batches are not served; POST /v1/batches takes a file of chats, or send the"
    " messages one by one",
    "/v1/responses/compact": "conversations are not compacted; send what the model is to read in input",
    "/v1/conversations": "conversations are not kept; send their items in input, or previous_response_id",
    "/v1/complete": "Anthropic's older completions are not served; send POST /v1/messages",
    "/v1/assistants": "assistants are not served; send POST /v1/responses",
    "/v1/threads": "threads are not served; send POST /v1/responses",
    "/v1/moderations": "nothing is moderated here; a model of classes answers POST /v1/classify",
    "/v1/images": "no images are made here; chats read them as image_url parts where the model can",
    "/v1/audio": "audio is neither read nor made here",
    "/v1/fine_tuning": "the server trains nothing; chairlift train does",
    "/v1/vector_stores": "nothing is searched here; POST /v1/embeddings makes vectors",
    "/v1/realtime": "there are no sessions of audio here; send stream true to /v1/responses",
    "/v1/uploads": "uploads in parts are not served; POST /v1/files takes a whole file",
    # llama.cpp
    "/completion": "llama.cpp's completions are not served; send POST /v1/completions",
    "/completions": _BELOW_V1.format("/v1/completions"),
    "/chat/completions": _BELOW_V1.format("/v1/chat/completions"),
    "/responses": _BELOW_V1.format("/v1/responses"),
    "/messages": _BELOW_V1.format("/v1/messages"),
    "/embedding": "llama.cpp's embeddings are not served; send POST /v1/embeddings",
    "/embeddings": _BELOW_V1.format("/v1/embeddings"),
    "/models": _BELOW_V1.format("/v1/models"),
    "/reranking": "it is served as POST /v1/rerank",
    "/v1/reranking": "it is served as POST /v1/rerank",
    "/infill": "send POST /v1/completions with a suffix, if the model can fill in the middle",
    "/apply-template": "prompts are not returned as text; POST /tokenize gives the token ids of messages",
    "/props": "GET /v1/models says what is served, and the chat template comes from the model",
    "/slots": "there are no slots; GET /v1/requests lists the requests, and GET /metrics counts them",
    "/lora-adapters": "adapters are loaded by POST /v1/load_lora_adapter, and named by model in a request",
    "/v1/health": "it is served as GET /health",
    # TGI, and the paths that it shares with SageMaker
    "/": "TGI's POST / is not served; send POST /v1/completions or /v1/chat/completions",
    "/generate": "TGI's inputs and parameters are not served; send POST /v1/completions",
    "/generate_stream": "TGI's inputs and parameters are not served; send POST /v1/completions with stream true",
    "/chat_tokenize": "send the messages to POST /tokenize",
    "/invocations": "send POST /v1/chat/completions or /v1/completions",
    "/info": "GET /v1/models says what is served, and GET /version which version serves it",
    # parts of Ollama's API
    "/api/blobs": "no files of models are taken; start the server with the model: chairlift serve MODEL",
}
"""Path of another server's API that this server does not have -> text that says what to send instead."""


def not_served(path: str) -> str:
    """Error text for a known path of another server's API that this server does not have; empty for other paths."""
    return next((text for known, text in _NOT_SERVED.items() if path == known or path.startswith(known + "/")), "")
