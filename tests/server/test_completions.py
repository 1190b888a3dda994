"""Text completions, as the official client reads them, and what no value of any field may do."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import decoders, models, normalizers

from chairlift.base.sampling_params import SamplingParams
from chairlift.server.http.app import make_app
from chairlift.server.openai.protocol import REFUSED, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from chairlift.text.tokenizer import Tokenizer
from tests.server.fake_engine import INFO, FakeEngine, byte_tokenizer, make_state

PATH = "/v1/completions"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    app = make_app(make_state(engine))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
    assert engine.num_requests == 0


def ask(http: TestClient, **fields: Any) -> Any:
    return http.post(PATH, json={"prompt": "Up", **fields})


def answer(http: TestClient, **fields: Any) -> Any:
    reply = ask(http, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(http: TestClient, **fields: Any) -> dict[str, Any]:
    reply = ask(http, **fields)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def test_the_official_client_reads_answers_and_streams(http: TestClient, engine: FakeEngine) -> None:
    made: Any = http
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="unused", http_client=made, max_retries=0)
    settings: dict[str, Any] = {"model": "fake", "prompt": ["Up", "Dé"], "n": 2, "max_tokens": 20, "seed": 4}
    reply = client.completions.create(**settings, logprobs=2)
    expected = [each for prompt, params, _ in engine.submitted for each in engine.expected(prompt, params)]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [each.text for each in expected]
    assert [choice.finish_reason for choice in reply.choices] == [each.finish_reason for each in expected]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == sum(len(each.token_ids) for each in expected)
    logprobs = reply.choices[3].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs and logprobs.text_offset
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(expected[3].token_ids)
    texts = [""] * 4
    for chunk in client.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [each.text for each in expected]
    with pytest.raises(openai.BadRequestError, match="suffix cannot be used: the model has no tokens"):
        client.completions.create(**settings, suffix="end")


def test_text_and_ids_are_the_same_prompt(http: TestClient, engine: FakeEngine) -> None:
    assert engine.prompts.tokenizer is not None
    ids = engine.prompts.tokenizer.encode("Dé")
    texts = [answer(http, prompt=prompt, seed=1)["choices"][0]["text"] for prompt in ("Dé", ["Dé"], ids, [ids])]
    assert len(set(texts)) == 1
    assert refused(http, prompt="")["param"] == "prompt"
    assert refused(http, prompt=["a", ""])["param"] == "prompt"
    assert refused(http, prompt=[[]])["code"] == "invalid_value"
    engine.prompts.tokenizer = byte_tokenizer(begins=True)
    assert answer(http, prompt="")["usage"]["prompt_tokens"] == 1
    assert refused(http, prompt="", add_special_tokens=False)["param"] == "prompt"


def test_defaults_are_openais(http: TestClient, engine: FakeEngine) -> None:
    answer(http)
    assert engine.submitted[0][1] == SamplingParams(max_tokens=16)


def test_room_is_asked_for_the_tokens_of_all_prompts_and_nothing_is_warned_of(
    http: TestClient, engine: FakeEngine
) -> None:
    reply = ask(http, prompt=[[1, 2], [3]])
    assert reply.status_code == 200 and "warning" not in reply.headers
    assert 3 in engine.tokens_asked


def test_truncation_keeps_the_tokens_that_the_tokenizer_adds(http: TestClient, engine: FakeEngine) -> None:
    engine.prompts.tokenizer = byte_tokenizer(begins=True)
    begin, *text = engine.prompts.tokenizer.encode("Up high")
    for fields, expected in (
        ({"truncate_prompt_tokens": 3}, [begin, *text[-2:]]),
        ({"truncate_prompt_tokens": 1}, [begin]),
        ({"truncate_prompt_tokens": 8}, [begin, *text]),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, text[-3:]),
        ({"truncate_prompt_tokens": 3, "prompt": [begin, *text]}, text[-3:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 2043}, [begin, *text[-4:]]),
    ):
        answer(http, **{"prompt": "Up high", "max_tokens": 1, **fields})
        assert engine.submitted[-1][0] == expected, fields
    error = refused(http, truncate_prompt_tokens=0)
    assert error["param"] == "truncate_prompt_tokens" and "adds 1" in error["message"]
    assert refused(http, truncate_prompt_tokens=0, prompt=[1])["param"] == "truncate_prompt_tokens"


def test_echo_puts_the_prompt_in_front(http: TestClient) -> None:
    plain = answer(http, prompt="Dé <|im_end|>x", seed=1, n=2)
    echoed = answer(http, prompt="Dé <|im_end|>x", seed=1, n=2, echo=True)
    for one, other in zip(plain["choices"], echoed["choices"], strict=True):
        assert other["text"] == "Dé <|im_end|>x" + one["text"]
    assert echoed["usage"] == plain["usage"]
    assert answer(http, prompt=[100, 101], echo=True, max_tokens=1)["choices"][0]["text"]


def test_echo_with_logprobs_scores_the_prompt_as_well(http: TestClient, engine: FakeEngine) -> None:
    (choice,) = answer(http, prompt="Dé!", echo=True, logprobs=2, max_tokens=6, seed=2)["choices"]
    logprobs = choice["logprobs"]
    prompt, params, _ = engine.submitted[0]
    (expected,) = engine.expected(prompt, params)
    assert expected.logprobs is not None
    assert len(logprobs["tokens"]) == len(prompt) + len(expected.token_ids)
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    scored = [max(e[t].logprob, -9999.0) for e, t in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert logprobs["token_logprobs"][len(prompt) :] == scored
    assert logprobs["text_offset"][: len(prompt)] == [0, 1, 1, 2]
    assert logprobs["tokens"][: len(prompt)] == ["D", r"bytes:\xc3", r"bytes:\xa9", "!"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    for chosen, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert chosen in top.values() and list(top.values()) == sorted(top.values(), reverse=True)
    answer(http, echo=True, logprobs=2, prompt_logprobs=4)
    assert engine.submitted[-1][1].prompt_logprobs == 4
    (choice,) = answer(http, prompt="Dé!", echo=True, logprobs=4, prompt_logprobs=1)["choices"]
    scored = choice["prompt_logprobs"][1:]
    assert [len(entry) for entry in scored] == [1 + (next(iter(entry.values()))["rank"] > 1) for entry in scored]
    (choice,) = answer(http, logprobs=0, max_tokens=4)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * len(choice["logprobs"]["tokens"])


def test_offsets_are_right_where_bytes_make_no_character(http: TestClient, engine: FakeEngine) -> None:
    assert engine.prompts.tokenizer is not None
    texts = [b"a", b"\xd5", b"w", b"\xa5", b"\xf0", b"\x9f", b"<", "😀".encode(), b"\xc3", b"z"]
    id_of = {engine.prompts.tokenizer.token_bytes(i): i for i in range(256)}
    prompt = [id_of[bytes([byte])] for text in texts for byte in text]
    (choice,) = answer(http, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"]
    found = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    plain = [(token, offset) for token, offset in found if not token.startswith("bytes:")]
    assert plain == [(token, choice["text"].index(token)) for token in "aw<z"]


def test_offsets_count_special_tokens_where_they_are_shown(http: TestClient, engine: FakeEngine) -> None:
    engine.prompts.tokenizer = byte_tokenizer(begins=True)
    for skip in (True, False):
        asked = {"prompt": "Up", "echo": True, "logprobs": 0, "max_tokens": 0, "skip_special_tokens": skip}
        (choice,) = answer(http, **asked)["choices"]
        shown = zip(choice["logprobs"]["tokens"][skip:], choice["logprobs"]["text_offset"][skip:], strict=True)
        assert all(choice["text"][offset:].startswith(token) for token, offset in shown)
        assert choice["logprobs"]["tokens"] == ["<|im_start|>", "U", "p"]


def llama_tokenizer() -> Tokenizer:
    """As Llama 2's: words begin with their space, that of a whole text is dropped. Composes characters."""
    vocabulary = {piece: i for i, piece in enumerate(["\x00", "▁U", "▁l", "▁t", *"▁Ué!abcdefghijklmnopqrstuvwxyz"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "U"), ("▁", "l"), ("▁", "t")], unk_token="\x00"))
    steps = [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend)


@pytest.mark.parametrize("echo", [True, False])
def test_tokens_keep_the_space_that_they_begin_with(http: TestClient, engine: FakeEngine, echo: bool) -> None:
    engine.prompts.tokenizer = llama_tokenizer()
    reply = answer(http, prompt="Up lift", echo=echo, logprobs=1, prompt_logprobs=1, max_tokens=8, seed=3)
    (choice,) = reply["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens).removeprefix(" " if echo else "") == choice["text"]
    start = 1 if echo else 0
    assert all(choice["text"][at:].startswith(token) for token, at in zip(tokens[start:], offsets[start:], strict=True))
    scored = [next(iter(entry.values()))["decoded_token"] for entry in choice["prompt_logprobs"][1:]]
    assert "".join(scored) == "p lift"
    strs = http.post("/tokenize", json={"prompt": "Up lift", "return_token_strs": True}).json()["token_strs"]
    assert strs == [" U", "p", " l", "i", "f", "t"]


def test_offsets_are_right_behind_a_prompt_that_the_tokenizer_rewrote(http: TestClient, engine: FakeEngine) -> None:
    engine.prompts.tokenizer = llama_tokenizer()
    prompt = "Up é e\u0301"
    (choice,) = answer(http, prompt=prompt, echo=True, logprobs=0, max_tokens=5, seed=3)["choices"]
    assert choice["text"].startswith(prompt)
    behind = choice["logprobs"]["text_offset"][-5:]
    assert behind[0] == len(prompt)
    for token, at in zip(choice["logprobs"]["tokens"][-5:], behind, strict=True):
        assert choice["text"][at:].startswith(token)


@pytest.mark.parametrize("echo", [True, False])
def test_a_character_that_the_prompt_begins_stands_once(http: TestClient, engine: FakeEngine, echo: bool) -> None:
    assert engine.prompts.tokenizer is not None
    id_of = {engine.prompts.tokenizer.token_bytes(i): i for i in range(256)}
    a, *rest = (id_of[bytes([byte])] for byte in "a😀".encode())
    engine.script = [*rest[2:], a]
    asked = {"prompt": [a, *rest[:2]], "echo": echo, "logprobs": 0, "max_tokens": 3}
    (choice,) = answer(http, **asked)["choices"]
    assert choice["text"] == "a😀a"[not echo :]
    assert choice["logprobs"]["text_offset"] == ([0, 1, 1, 1, 1, 2] if echo else [0, 0, 1])
    (choice,) = answer(http, **{**asked, "max_tokens": 0, "echo": True})["choices"]
    assert choice["text"] == "a\ufffd"


def test_no_tokens_with_echo_scores_the_prompt_alone(http: TestClient) -> None:
    reply = answer(http, prompt=["Dé", "Up"], echo=True, max_tokens=0, logprobs=1)
    for choice, text in zip(reply["choices"], ["Dé", "Up"], strict=True):
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "length", None)
        assert len(choice["logprobs"]["tokens"]) == len(text.encode())
    assert reply["usage"]["completion_tokens"] == 0
    (unscored,) = answer(http, prompt="Up", echo=True, max_tokens=0)["choices"]
    assert (unscored["text"], unscored["logprobs"]) == ("Up", None)
    assert refused(http, max_tokens=0)["param"] == "max_tokens"


def test_a_prompt_as_long_as_the_model_is_scored_without_an_answer(http: TestClient, engine: FakeEngine) -> None:
    longest = [1] * INFO.max_model_len
    for fields in ({"logprobs": 0}, {}, {"truncate_prompt_tokens": -1}, {"logprobs": 0, "stream": True}):
        assert ask(http, prompt=longest, echo=True, max_tokens=0, **fields).status_code == 200
        prompt, params, _ = engine.submitted[-1]
        assert (len(prompt), params.max_tokens, params.prompt_logprobs) == (len(longest), 0, 0)
    assert refused(http, prompt=longest, echo=True, max_tokens=1)["code"] == "context_length_exceeded"
    error = refused(http, prompt=[*longest, 1], echo=True, max_tokens=0)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert ask(http, prompt=longest[1:], max_tokens=1).status_code == 200


def test_best_of_returns_the_likeliest(http: TestClient, engine: FakeEngine) -> None:
    reply = answer(http, n=2, best_of=7, seed=3, max_tokens=20)
    prompt, params, _ = engine.submitted[0]
    assert (params.n, params.logprobs) == (7, 0)
    candidates = engine.expected(prompt, params)
    ranked = sorted(candidates, key=lambda each: -max(each.cumulative_logprob or 0, -9999) / len(each.token_ids))
    assert [choice["text"] for choice in reply["choices"]] == [each.text for each in ranked[:2]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in ranked[:2])
    assert refused(http, n=3, best_of=2)["param"] == "best_of"
    assert refused(http, best_of=2, stream=True)["param"] == "best_of"
    assert ask(http, n=2, best_of=2, stream=True).status_code == 200


def test_token_ids_and_prompt_logprobs_are_returned_on_request(http: TestClient, engine: FakeEngine) -> None:
    (choice,) = answer(http, return_token_ids=True, prompt_logprobs=1, max_tokens=3, seed=1)["choices"]
    prompt, params, _ = engine.submitted[0]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == engine.expected(prompt, params)[0].token_ids
    assert choice["prompt_logprobs"][0] is None
    entry = choice["prompt_logprobs"][1][str(prompt[1])]
    assert set(entry) == {"logprob", "rank", "decoded_token"}


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    engine = FakeEngine(with_tokenizer=False)
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        (choice,) = answer(http, prompt=[1, 2], return_token_ids=True, logprobs=1, seed=1)["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert refused(http)["code"] == "invalid_value"
        assert refused(http, prompt=[1], echo=True)["param"] == "echo"


VALUES: list[Any] = [
    *(2**63, -(2**63), 2**63 - 1, -(2**63) - 1, 1e308, -1e308, 0, 1, -1, 0.5, 10**30, None, True, False),
    *("", "1", "x", "\u0000", "é😀", "x" * 300, [], {}, [None], [1], ["x"], [[1]], [[[]]], {"x": 1}, {"1": 1e308}),
    *(INFO.vocab_size - 1, INFO.vocab_size, INFO.vocab_size + 1, [INFO.vocab_size - 1], [INFO.vocab_size]),
    *([INFO.vocab_size + 1], {str(INFO.vocab_size): 1}, {"-1": 1}, [2**31 - 1], [2**31], ["x"] * 2000),
]
ENDPOINTS = [
    pytest.param(
        "/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    ),
    pytest.param(PATH, CompletionRequest, {"prompt": "Hi", "max_tokens": 3}, marks=pytest.mark.nightly),
    pytest.param("/tokenize", TokenizeRequest, {"prompt": "Hi"}),
    pytest.param("/detokenize", DetokenizeRequest, {"tokens": [1, 2]}),
]


@pytest.mark.full
@pytest.mark.parametrize(("path", "kind", "body"), ENDPOINTS)
def test_no_value_of_any_field_is_a_server_error(
    http: TestClient, engine: FakeEngine, path: str, kind: type[Any], body: dict[str, Any]
) -> None:
    """The grid: every field, with every number at an edge and everything of another type."""
    fields = [*kind.__struct_fields__, *REFUSED, "unknown"]
    statuses = set()
    for field, value in itertools.product(fields, VALUES):
        reply = http.post(path, json={**body, field: value})
        assert reply.status_code in (200, 400, 404), (field, value, reply.text)
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert error["message"] and error["code"], (field, value)
        statuses.add(reply.status_code)
    assert statuses == {200, 400, 404}


def test_no_message_is_a_server_error(http: TestClient) -> None:
    for value, key in itertools.product(VALUES, ("role", "content", "name", "tool_calls", "other", "parts")):
        message: Any = {"role": "user", "content": "Hi", key: value}
        if key == "parts":
            message = {"role": "user", "content": [{"type": "text", "text": "x"}, value]}
        reply = http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
        assert reply.status_code in (200, 400), (key, value, reply.text)
        assert http.post("/v1/chat/completions", json={"messages": [value]}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unset_fields_have_the_defaults_of_the_model(http: TestClient, engine: FakeEngine, path: str) -> None:
    engine.info = dataclasses.replace(INFO, sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    body = {"prompt": "ride"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "ride"}]}
    asked: dict[str, Any]
    for asked in ({}, {"temperature": 0, "top_p": 1.0}, {"top_k": -1, "temperature": None}):
        assert http.post(path, json={**body, **asked, "max_tokens": 3}).status_code == 200
    seen = [(params.temperature, params.top_k, params.top_p) for _, params, _ in engine.submitted]
    assert seen == [(0.6, 20, 0.9), (0.0, 20, 1.0), (0.6, -1, 0.9)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [INFO.vocab_size]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [1, INFO.vocab_size]]}, "prompt[1]"),
        ({"prompt": [1] * (INFO.max_model_len + 1)}, "prompt"),
    ],
)
def test_a_refused_prompt_is_the_parameter_that_is_named(http: TestClient, fields: dict[str, Any], param: str) -> None:
    assert refused(http, **fields)["param"] == param


def test_too_many_prompts_are_counted_in_words_that_fit(http: TestClient) -> None:
    assert "65 prompts were asked for" in refused(http, prompt=["x"] * 65)["message"]
    assert "33 prompts with 2 answers each were asked for" in refused(http, prompt=["x"] * 33, n=2)["message"]


def test_bad_words_are_tokenized_once_for_all_prompts(http: TestClient, engine: FakeEngine) -> None:
    answer(http, prompt=["a", "b", "c"], bad_words=["snow", "ice"])
    assert engine.prompts.words_asked == [("snow", "ice")]
    error = refused(http, bad_words=["x" * 256] * 33)
    assert (error["param"], "8,448 characters, and 8,192 are allowed" in error["message"]) == ("bad_words", True)


def test_lists_count_once_for_each_prompt(http: TestClient) -> None:
    ids = [1] * 4096
    assert ask(http, prompt=["a"] * 64, stop_token_ids=ids, max_tokens=1).status_code == 200
    for more in ({"bad_words": ["x"]}, {"allowed_token_ids": [1] * 8000}):
        error = refused(http, prompt=["a"] * 64, stop_token_ids=ids, **more)
        assert "the 64 prompts" in error["message"] and "262,144 are allowed" in error["message"]
    assert ask(http, allowed_token_ids=[1] * 250_000, max_tokens=1).status_code == 200


def test_many_tokens_are_echoed_from_a_thread(http: TestClient, engine: FakeEngine) -> None:
    for size, num in ((512, 0), (513, 1)):
        engine.prompts.num_beside = 0
        answer(http, prompt=[65] * size, echo=True, max_tokens=1)
        assert engine.prompts.num_beside == num
