"""Servers of embeddings, classes and scores, through OpenAI's client and plain HTTP."""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from chairlift import LLM
from tests.e2e.server_process import PATIENCE, ServerProcess
from tests.models.pooled import pooled_model, sentence_files, write_tokenizer
from tests.models.test_rerankers import write_words
from tests.models.tiny import tiny_hf_model

pytestmark = pytest.mark.full

KEY = "sk-of-the-tests"
TEXTS = ["A chair", "lift", "carries people up a mountain, and sometimes down again", "x"]


def models(folder: Path, labels: int) -> Path:
    where, _ = pooled_model(folder, "bert", labels=labels)
    write_tokenizer(where)
    if not labels:
        sentence_files(where, "mean_tokens", prompts={"query": "q: "})
    return where


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[ServerProcess]:
    flags = ("--api-key", KEY, "--is-matryoshka", "--max-num-batched-tokens", "64", "--threads", "1")
    with ServerProcess(str(models(folder, 0)), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(models(folder, 1)), "--threads", "1") as server:
        yield server


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    found = json.loads(reply.read())
    connection.close()
    return reply.status, found, reply.headers


def test_openai_client_gets_what_llm_computes(embedder: ServerProcess, folder: Path) -> None:
    llm = LLM(folder / "bert-0", threads=1, is_matryoshka=True)
    expected = [each.outputs.embedding for each in llm.embed(TEXTS)]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{embedder.port}/v1", api_key=KEY, max_retries=0) as client:
        for form in ("float", "base64"):
            reply = client.embeddings.create(model="bert-0", input=TEXTS, encoding_format=form)
            found = [each.embedding for each in reply.data]
            if form == "base64":
                raw = [base64.b64decode(str(each)) for each in found]
                found = [list(struct.unpack(f"<{len(each) // 4}f", each)) for each in raw]
            assert found == expected
        assert client.embeddings.create(model="bert-0", input=TEXTS).data[2].embedding == expected[2]
        cut = client.embeddings.create(model="bert-0", input=TEXTS[0], dimensions=16, encoding_format="float")
        assert cut.data[0].embedding == llm.embed(TEXTS[0], dimensions=16)[0].outputs.embedding
        ids = [each.prompt_token_ids for each in llm.embed(TEXTS)]
        as_ids: Any = client.embeddings.create(model="bert-0", input=ids, encoding_format="float")
        assert [each.embedding for each in as_ids.data] == expected
        assert as_ids.usage.prompt_tokens == as_ids.usage.total_tokens == sum(map(len, ids))
        one: Any = client.embeddings.create(model="bert-0", input=ids[2], encoding_format="float")
        assert one.data[0].embedding == expected[2]
        with pytest.raises(openai.BadRequestError, match="use POST /v1/embeddings"):
            client.chat.completions.create(model="bert-0", messages=[{"role": "user", "content": "Hi"}])
        with pytest.raises(openai.BadRequestError, match="use POST /v1/embeddings"):
            client.completions.create(model="bert-0", prompt="Hi")


def test_embeddings_come_in_the_wanted_type_and_length(embedder: ServerProcess) -> None:
    def numbers(**fields: Any) -> list[float]:
        status, reply, _ = post(embedder, "/v1/embeddings", {"input": TEXTS[0], **fields})
        assert status == 200, reply
        found = reply["data"][0]["embedding"]
        assert isinstance(found, list)
        return found

    exact = torch.tensor(numbers())
    for dtype, code in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        rounded = numbers(embed_dtype=dtype)
        assert rounded == exact.to(code).float().tolist() != exact.tolist()
        body = {"input": TEXTS[0], "embed_dtype": dtype, "encoding_format": "base64"}
        raw = bytearray(base64.b64decode(post(embedder, "/v1/embeddings", body)[1]["data"][0]["embedding"]))
        assert torch.frombuffer(raw, dtype=code).float().tolist() == rounded
    assert numbers(embed_dtype="float32") == exact.tolist()
    assert numbers(normalize=True) == exact.tolist()
    status, reply, _ = post(embedder, "/v1/embeddings", {"input": TEXTS[0], "normalize": False})
    assert (status, reply["error"]["param"]) == (400, "normalize")


def test_embeddings_get_the_length_1_that_a_caller_wants(embedder: ServerProcess, folder: Path) -> None:
    def length(reply: Any) -> float:
        return math.hypot(*reply["data"][0]["embedding"])

    with ServerProcess(str(folder / "bert-0"), "--no-pooling-normalize", "--threads", "1") as server:
        body = {"input": TEXTS[0]}
        raw = post(server, "/v1/embeddings", body)[1]
        assert length(raw) > 1.1
        assert post(server, "/v1/embeddings", {**body, "normalize": False})[1]["data"] == raw["data"]
        assert math.isclose(length(post(server, "/v1/embeddings", {**body, "normalize": True})[1]), 1, rel_tol=1e-6)


def test_many_calls_at_once_get_the_same_bits(embedder: ServerProcess) -> None:
    """They share passes: the budget holds 64 tokens."""
    texts = [TEXTS[place % 4] * (1 + place % 2) for place in range(48)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        bodies = [{"input": text} for text in texts]
        together = list(pool.map(lambda body: post(embedder, "/v1/embeddings", body)[1], bodies))
    for text, reply in zip(texts[:12], together[:12], strict=True):
        assert post(embedder, "/v1/embeddings", {"input": text})[1]["data"] == reply["data"]
    assert (
        post(embedder, "/v1/embeddings", {"input": texts})[1]["data"][5]["embedding"]
        == (together[5]["data"][0]["embedding"])
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/embeddings", {}, 400, "missing_required_parameter", "input"),
        ("/v1/embeddings", {"input": []}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"input": ["a", 5]}, 400, "invalid_type", "input"),
        ("/v1/embeddings", {"input": [[]]}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"input": ["a", "b" * 200]}, 400, "context_length_exceeded", "input[1]"),
        ("/v1/embeddings", {"input": [[5, 999]]}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "invalid_value", "encoding_format"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "fp8_e4m3"}, 400, "invalid_value", "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, 400, "invalid_value", "dimensions"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "no"}, 400, "invalid_value", "prompt_name"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "model_not_found", "model"),
        ("/v1/classify", {"input": "a"}, 400, "unsupported_model", "model"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "invalid_value", "text_1"),
    ],
)
def test_a_wrong_request_is_refused_by_parameter(
    path: str, body: dict[str, Any], status: int, code: str, param: str, embedder: ServerProcess
) -> None:
    found, reply, _ = post(embedder, path, body)
    assert (found, reply["error"]["code"], reply["error"]["param"]) == (status, code, param), reply


def test_long_texts_are_cut_when_asked_and_prompts_are_put_before(embedder: ServerProcess, folder: Path) -> None:
    llm = LLM(folder / "bert-0", threads=1)
    long = "b" * 200
    cut = post(embedder, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})[1]
    expected = llm.embed(long, truncate_prompt_tokens=-1)[0]
    assert cut["data"][0]["embedding"] == expected.outputs.embedding and cut["usage"]["prompt_tokens"] == 160
    named = post(embedder, "/v1/embeddings", {"input": "lift", "prompt_name": "query"})[1]
    assert named["data"][0]["embedding"] == llm.embed("q: lift")[0].outputs.embedding
    _, _, headers = post(embedder, "/v1/embeddings", {"input": "lift", "user": "me"})
    assert headers["warning"] == '299 chairlift "ignored: user"'


def test_embeddings_score_and_rerank_by_their_angle(embedder: ServerProcess, folder: Path) -> None:
    llm = LLM(folder / "bert-0", threads=1)
    expected = [each.outputs.score for each in llm.score("lift", TEXTS)]
    scored = post(embedder, "/v1/score", {"text_1": "lift", "text_2": TEXTS})[1]
    assert [each["score"] for each in scored["data"]] == expected
    ranked = post(embedder, "/v1/rerank", {"query": "lift", "documents": TEXTS, "top_n": 2})[1]["results"]
    assert ranked[0]["index"] == 1 and ranked[0]["document"] == {"text": "lift"} and len(ranked) == 2


def test_a_cross_encoder_scores_and_reranks(reranker: ServerProcess, folder: Path) -> None:
    llm = LLM(folder / "bert-1", threads=1)
    expected = [each.outputs.score for each in llm.score("lift", TEXTS)]
    scored = post(reranker, "/v1/score", {"text_1": "lift", "text_2": TEXTS})[1]
    assert [each["score"] for each in scored["data"]] == expected
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    for path in ("/v1/rerank", "/rerank"):
        body = {"query": "lift", "documents": documents, "return_documents": False}
        ranked = post(reranker, path, body)[1]["results"]
        assert [each["index"] for each in ranked] == sorted(range(4), key=lambda place: -expected[place])
        assert [each["relevance_score"] for each in ranked] == sorted(expected, reverse=True)
        assert "document" not in ranked[0]
    assert post(reranker, "/v1/embeddings", {"input": "a"})[0] == 400
    classes = post(reranker, "/v1/classify", {"input": "lift"})[1]["data"]
    assert classes[0]["label"] == "LABEL_0" and len(classes[0]["probs"]) == classes[0]["num_classes"] == 1


def metric(server: ServerProcess, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def test_a_flood_of_one_tenant_delays_no_other_and_deadlines_act(folder: Path) -> None:
    """The flood takes hundreds of steps. What comes after it is computed in one of the next steps, or is dropped."""
    flags = ("--scheduling-policy", "priority", "--late-requests", "drop", "--max-num-batched-tokens", "64")
    flags += ("--max-num-queued-reqs", "4096", "--max-num-queued-tokens", "1000000")
    flood = {"input": [TEXTS[2]] * 2048, "user": "flood"}
    with (
        ServerProcess(str(models(folder, 0)), "--threads", "1", *flags) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(post, server, "/v1/embeddings", flood)
        while metric(server, "chairlift:num_requests_waiting") < 100:
            assert not whole.done()
        status, other, _ = post(server, "/v1/embeddings", {"input": "lift", "user": "other"})
        assert status == 200 and not whole.done()
        late = {"input": TEXTS[2], "user": "flood", "priority": 9, "deadline_ms": 0.01}
        status, reply, _ = post(server, "/v1/embeddings", late)
        assert (status, reply["error"]["code"]) == (503, "deadline_exceeded") and not whole.done()
        status, _, _ = post(server, "/v1/embeddings", {"input": TEXTS[0], "user": "flood", "priority": -1})
        assert status == 200 and not whole.done()
        status, reply, _ = whole.result()
        assert status == 200 and len({str(each["embedding"]) for each in reply["data"]}) == 1
        assert post(server, "/v1/embeddings", {"input": ["lift", TEXTS[0]]})[1]["data"][0] == other["data"][0]
        assert metric(server, "chairlift:num_requests_running") == metric(server, "chairlift:num_requests_waiting") == 0


def test_priorities_are_refused_where_the_policy_ignores_them(embedder: ServerProcess) -> None:
    status, reply, _ = post(embedder, "/v1/embeddings", {"input": "a", "priority": 5})
    assert status == 400 and "the scheduling policy does not look at it" in reply["error"]["message"]
    assert post(embedder, "/v1/embeddings", {"input": "a", "service_tier": "flex"})[0] == 200


def test_a_server_that_generates_gives_no_embeddings() -> None:
    with ServerProcess("hashlm") as server:
        status, reply, _ = post(server, "/v1/embeddings", {"input": "a"})
        assert status == 400 and "generates text and gives no embeddings" in reply["error"]["message"]
        assert post(server, "/rerank", {"query": "a", "documents": ["b"]})[0] == 400


def test_the_scores_of_a_served_qwen3_reranker_equal_those_of_llm(folder: Path) -> None:
    where = tiny_hf_model(folder, "qwen3", max_position_embeddings=1024, std=0.1)
    write_words(where, "yes", "no")
    expected = [each.outputs.score for each in LLM(where, reranker="qwen3", threads=1).score("peak", TEXTS)]
    with ServerProcess(str(where), "--reranker", "qwen3", "--threads", "1") as server:
        status, reply, _ = post(server, "/v1/rerank", {"query": "peak", "documents": TEXTS})
        assert status == 200
        assert {each["index"]: each["relevance_score"] for each in reply["results"]} == dict(enumerate(expected))
        assert [each["relevance_score"] for each in reply["results"]] == sorted(expected, reverse=True)
        status, reply, _ = post(server, "/v1/score", {"text_1": "peak", "text_2": TEXTS})
        assert (status, [each["score"] for each in reply["data"]]) == (200, expected)
