"""Chat completions, as the official client reads them."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from chairlift.base.outputs import Logprob
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.async_engine import EngineState
from chairlift.server.http.app import make_app
from chairlift.server.openai.chat import _logprobs
from chairlift.text.tokenizer import ChatTemplate
from tests.server.fake_engine import FakeEngine, make_state

PATH = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    app = make_app(make_state(engine))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
    assert engine.num_requests == 0


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    made: Any = http  # a client of the same library, with the application behind it
    return openai.OpenAI(base_url="http://localhost/v1", api_key="unused", http_client=made, max_retries=0)


def ask(http: TestClient, **fields: Any) -> Any:
    return http.post(PATH, json={"messages": MESSAGES, **fields})


def refused(http: TestClient, **fields: Any) -> dict[str, Any]:
    reply = ask(http, **fields)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_the_official_client_reads_an_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=MESSAGES, n=2, max_tokens=30, seed=5, logprobs=True, top_logprobs=2
    )
    prompt, params, _ = engine.submitted[0]
    expected = engine.expected(prompt, params)
    assert [choice.message.content for choice in reply.choices] == [answer.text for answer in expected]
    assert [choice.finish_reason for choice in reply.choices] == [answer.finish_reason for answer in expected]
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.refusal is None
    assert reply.choices[0].message.tool_calls is None
    assert (reply.object, reply.model, reply.system_fingerprint) == ("chat.completion", "fake", "fp_0123456789")
    assert reply.id.startswith("chatcmpl-")
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == sum(len(answer.token_ids) for answer in expected)
    assert reply.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16
    for choice, answer in zip(reply.choices, expected, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert answer.logprobs is not None
        for written, entry, token in zip(choice.logprobs.content, answer.logprobs, answer.token_ids, strict=True):
            assert written.logprob == max(entry[token].logprob, -9999.0)
            assert len(written.top_logprobs) == 2
            values = [each.rank for each in entry.values() if each.rank is not None and each.rank <= 2]
            assert sorted(values) == [1, 2]


def test_top_logprobs_are_as_many_as_asked_for_where_the_chosen_one_ties() -> None:
    tied = {7: Logprob(-0.7, rank=1), 3: Logprob(-0.7, rank=1), 5: Logprob(-2.0, rank=3)}
    texts: Any = SimpleNamespace(text=lambda token, _: str(token), bytes=lambda token, _: str(token).encode())
    for top, expected in ((1, ["7"]), (2, ["7", "3"]), (0, [])):
        (written,) = _logprobs([tied], top, texts).content
        assert (written.token, [each.token for each in written.top_logprobs]) == ("7", expected)


def test_the_bytes_of_tokens_join_to_the_text(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=200, seed=1, logprobs=True, extra_body={"ignore_eos": True}
    )
    content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert content
    given = b"".join(bytes(entry.bytes or ()) for entry in content).replace(b"<|im_end|>", b"")
    text = reply.choices[0].message.content or ""
    assert given.decode("utf-8", "replace") == text
    assert "😀" in text


def test_the_official_client_reads_a_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=40, seed=9)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=40, seed=9, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_the_official_client_raises_its_errors(client: openai.OpenAI, engine: FakeEngine) -> None:
    def create(**fields: Any) -> Any:
        return client.chat.completions.create(**{"model": "fake", "messages": MESSAGES, **fields})

    with pytest.raises(openai.NotFoundError, match="ask for fake, other-name"):
        create(model="gpt-9")
    with pytest.raises(openai.BadRequestError) as caught:
        create(temperature=1000)
    assert caught.value.param == "temperature"
    engine.full = True
    with pytest.raises(openai.RateLimitError):
        create()
    engine.full = False
    engine.state, engine.info = EngineState.LOADING, None
    with pytest.raises(openai.InternalServerError, match="loading"):
        create()
    engine.state, engine.info = EngineState.READY, FakeEngine().info
    engine.failure_of_streams, engine.fail_after = RuntimeError("secret"), 1
    with pytest.raises(openai.APIError, match="made a mistake"):
        list(create(stream=True, max_tokens=50, extra_body={"ignore_eos": True}))


@pytest.mark.parametrize("value", [{}, {"json": {}}, "", []])
def test_no_format_is_promised_and_not_kept(client: openai.OpenAI, value: Any) -> None:
    """A client whose ``extra_body`` came as a field of that name."""
    for name in ("extra_body", "json_schema", "grammar"):
        with pytest.raises(openai.BadRequestError, match="not supported"):
            client.chat.completions.create(model="fake", messages=MESSAGES, extra_body={name: {"guided_json": value}})


def test_a_stream_closed_early_ends_the_request(client: openai.OpenAI, engine: FakeEngine) -> None:
    with client.chat.completions.create(model="fake", messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
    assert engine.num_requests == 0


def test_all_settings_reach_the_engine(http: TestClient, engine: FakeEngine) -> None:
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "seed": -3,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "bad_words": ["x"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "n": 2,
    }
    more = {"stop": "s", "logit_bias": {"5": -1}, "max_tokens": 9, "max_completion_tokens": 4, "allowed_token_ids": [1]}
    reply = ask(http, **settings, **more, cache_salt="a-b", queue_timeout=2.5, logprobs=True, top_logprobs=3)
    assert reply.status_code == 200, reply.text
    _, params, rest = engine.submitted[0]
    expected = SamplingParams(**settings, stop="s", logit_bias={5: -1}, max_tokens=4, allowed_token_ids=[1], logprobs=3)
    assert params == expected
    assert rest == {"cache_salt": "a-b", "queue_timeout": 2.5}
    assert len(reply.json()["prompt_logprobs"]) == reply.json()["usage"]["prompt_tokens"]


def test_defaults_are_openais(http: TestClient, engine: FakeEngine) -> None:
    ask(http)
    _, params, rest = engine.submitted[0]
    assert params == SamplingParams(max_tokens=None)
    assert rest == {"cache_salt": "", "queue_timeout": None}


def test_roles_and_parts_reach_the_template(http: TestClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for messages in (
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a\nb"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
    ):
        assert http.post(PATH, json={"messages": messages, "max_tokens": 1}).status_code == 200
    assert engine.submitted[0][0] == engine.submitted[1][0]


GUARD = "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
SHOWS_ALL = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
TOOL_CHAT = [
    {"role": "user", "content": "Look!", "name": "Ann", "mood": {"good": True}},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm.", "refusal": None},
    {"role": "tool", "content": "Blue.", "tool_call_id": "call12345", "name": "look"},
    {"role": "assistant", "content": "It is blue.", "reasoning": "Easy."},
    {"role": "user", "content": PARTS},
]


def test_a_guard_model_sees_what_the_user_says(
    http: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.prompts.tokenizer is not None
    monkeypatch.setattr(engine.prompts.tokenizer, "chat_template", GUARD)
    for content, shown in (("Is this safe?", "Is this safe?"), (PARTS, "ab")):
        assert ask(http, messages=[{"role": "user", "content": content}], max_tokens=1).status_code == 200
        assert engine.prompts.tokenizer.decode(engine.submitted[-1][0], False) == f"user: {shown}"


@pytest.mark.parametrize("template", [None, GUARD.replace("part.text", "part.text or part"), SHOWS_ALL])
def test_every_key_of_a_message_reaches_the_template_as_in_python(
    http: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    assert engine.prompts.tokenizer is not None
    monkeypatch.setattr(engine.prompts.tokenizer, "chat_template", template or engine.prompts.tokenizer.chat_template)
    reply = ask(http, messages=TOOL_CHAT, max_tokens=1)
    assert reply.status_code == 200 and "warning" not in reply.headers
    given = copy.deepcopy(TOOL_CHAT)
    text = ChatTemplate(engine.prompts.tokenizer.chat_template, engine.prompts.tokenizer.named_tokens).render(given)
    assert engine.prompts.tokenizer.decode(engine.submitted[-1][0], False) == text
    assert http.post("/tokenize", json={"messages": TOOL_CHAT}).json()["tokens"] == engine.submitted[-1][0]
    if template == SHOWS_ALL:
        for each in ('"reasoning_content": "Hm."', '"arguments": {"at": "sky"}', '"tool_call_id"', '"mood"', "Easy."):
            assert each in text


BAD_MESSAGES = [
    ({"role": "pilot", "content": "x"}, "messages[0].role", "must be one of system, developer, user, assistant"),
    ({"role": "assistant", "content": None, "tool_calls": 3}, "messages[0].tool_calls", "must be a list of objects"),
    ({"role": "user"}, "messages[0].content", "it is missing"),
    ({"role": "user", "content": None}, "messages[0].content", "got null"),
    ({"role": "user", "content": []}, "messages[0].content", "at least one"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]", "image_url"),
    ({"role": "user", "content": [{"type": "refusal", "text": "No"}]}, "messages[0].content[0]", "refusal"),
    ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0]", "got no text"),
    ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0]", "must be a text part"),
    ({"content": "x"}, "messages[0].role", "is missing"),
    ("x", "messages[0]", "must be an object"),
]


@pytest.mark.parametrize(("message", "param", "text"), BAD_MESSAGES, ids=[text[:20] for _, _, text in BAD_MESSAGES])
def test_other_messages_are_refused(http: TestClient, message: Any, param: str, text: str) -> None:
    error = refused(http, messages=[message])
    assert error["param"] == param
    assert text in error["message"]


def test_a_message_can_be_continued(http: TestClient, engine: FakeEngine) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, I"}]
    assert ask(http, messages=messages, continue_final_message=True, max_tokens=1).status_code == 200
    assert engine.prompts.tokenizer is not None
    assert engine.prompts.tokenizer.decode(engine.submitted[0][0], False).endswith("<|im_start|>assistant\nWell, I")
    error = refused(http, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"
    call = {"role": "assistant", "content": "Well", "tool_calls": [CALL]}
    error = refused(http, messages=[*MESSAGES, call], continue_final_message=True)
    assert error["param"] == "continue_final_message" and "tool_calls" in error["message"]
    assert ask(http, add_generation_prompt=False, max_tokens=1).status_code == 200
    assert engine.prompts.tokenizer.decode(engine.submitted[1][0], False).endswith("<|im_end|>\n")


def test_the_prompts_end_is_kept(http: TestClient, engine: FakeEngine) -> None:
    ask(http, max_tokens=1)
    ask(http, max_tokens=1, truncate_prompt_tokens=5)
    long = [{"role": "user", "content": "x" * 5000}]
    assert ask(http, messages=long, max_tokens=48, truncate_prompt_tokens=-1).status_code == 200
    error = refused(http, messages=long)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    whole, short, rest = (prompt for prompt, _, _ in engine.submitted)
    assert short == whole[-5:]
    assert len(rest) == 2000
    assert refused(http, truncate_prompt_tokens=0)["code"] == "invalid_value"


def test_token_ids_come_when_asked_for(http: TestClient, engine: FakeEngine) -> None:
    reply = ask(
        http, max_tokens=9, seed=1, return_token_ids=True, return_tokens_as_token_ids=True, logprobs=True
    ).json()
    prompt, params, _ = engine.submitted[0]
    (answer,) = engine.expected(prompt, params)
    assert reply["prompt_token_ids"] == prompt
    assert reply["choices"][0]["token_ids"] == answer.token_ids
    written = [entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]]
    assert written == [f"token_id:{token}" for token in answer.token_ids]
    plain = ask(http, max_tokens=9).json()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def test_combinations_that_make_no_sense_are_refused(http: TestClient) -> None:
    assert refused(http, top_logprobs=2)["param"] == "top_logprobs"
    assert refused(http, prompt_logprobs=2, stream=True)["param"] == "prompt_logprobs"
    assert refused(http, max_tokens=0)["param"] == "max_tokens"
    assert refused(http, min_tokens=5, max_tokens=3)["param"] == "min_tokens"
    assert refused(http, chat_template_kwargs={"messages": "x"})["param"] == "chat_template_kwargs"


def test_ignored_fields_are_in_a_header_streamed_or_not(http: TestClient) -> None:
    for stream in (True, False):
        reply = ask(http, user="someone", new_thing=1, stream=stream, max_tokens=2)
        assert reply.headers["warning"] == '299 chairlift "ignored: new_thing, user"'
    assert "warning" not in ask(http, tools=[], store=False, service_tier="auto", max_tokens=2).headers


def test_a_prediction_reaches_the_engine_and_its_use_is_counted(http: TestClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    for content in ("abc", parts):
        for takes in (True, False):
            assert engine.info is not None
            engine.info = dataclasses.replace(engine.info, takes_predictions=takes)
            for stream in (False, True):
                more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                reply = ask(http, prediction={"type": "content", "content": content}, max_tokens=2, **more)
                assert reply.headers.get("warning") == (None if takes else '299 chairlift "ignored: prediction"')
                usage = json.loads(reply.text.split("data: ")[-2])["usage"] if stream else reply.json()["usage"]
                counts = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
                assert usage["completion_tokens_details"] == counts
                assert engine.submitted[-1][1].prediction == (64, 65, 66)
    assert "completion_tokens_details" not in ask(http, max_tokens=2).json()["usage"]


def test_without_a_tokenizer_chat_says_so() -> None:
    with TestClient(make_app(make_state(FakeEngine(with_tokenizer=False))), base_url="http://localhost") as http:
        assert "which was not loaded" in refused(http)["message"]
