"""The official client, as it is installed, against a real server. HashLM's answers are checked to the letter."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.served import HI, KEY, LONG, ROOM, SEEDED, Served, answers, ends_of, filled, run, stop_in, texts_of
from tests.e2e.server_process import PATIENCE, ServerProcess


def test_a_chat_completion_equals_the_answer_of_the_library(client: openai.OpenAI) -> None:
    whole = answers("Hi", **SEEDED)[0]
    stop = stop_in(whole.text)
    reply = client.chat.completions.create(
        model="hashlm", messages=HI, n=3, stop=[stop], logprobs=True, top_logprobs=2, **SEEDED
    )
    expected = answers("Hi", n=3, stop=stop, logprobs=2, **SEEDED)
    assert expected[0].text == whole.text[: whole.text.find(stop)]
    assert [choice.message.content for choice in reply.choices] == [answer.text for answer in expected]
    assert [choice.finish_reason for choice in reply.choices] == [answer.finish_reason for answer in expected]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == sum(len(answer.token_ids) for answer in expected)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    for choice, answer in zip(reply.choices, expected, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        for entry, token in zip(choice.logprobs.content, answer.token_ids, strict=True):
            if token < 256:
                assert entry.bytes == [token]
            assert entry.logprob == pytest.approx(-math.log(2))
            assert [each.logprob / -math.log(2) for each in entry.top_logprobs] == pytest.approx([1, 2])


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_chat_equals_the_answer_of_the_library(client: openai.OpenAI, n: int) -> None:
    with client.chat.completions.create(
        model="hashlm",
        messages=HI,
        n=n,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        **SEEDED,
    ) as stream:
        chunks = list(stream)
    expected = answers("Hi", n=n, logprobs=0, **SEEDED)
    assert texts_of(chunks, n) == [answer.text for answer in expected]
    assert ends_of(chunks) == [(i, answer.finish_reason) for i, answer in enumerate(expected)]
    assert [chunk.choices[0].delta.role for chunk in chunks[: n + 1]] == ["assistant"] * n + [None]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    told = [entry for c in chunks for o in c.choices if o.logprobs for entry in o.logprobs.content or ()]
    assert len(told) == sum(len(answer.token_ids) for answer in expected)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(told)


def test_the_stream_helper_puts_the_answer_together(client: openai.OpenAI) -> None:
    """The client's own way of putting a stream together again."""
    stop = stop_in(answers("Hi", **SEEDED)[0].text)
    with client.chat.completions.stream(model="hashlm", messages=HI, logprobs=True, stop=stop, **SEEDED) as stream:
        events = [event.type for event in stream]
        completion = stream.get_final_completion()
    (expected,) = answers("Hi", logprobs=0, stop=stop, **SEEDED)
    assert completion.choices[0].message.content == expected.text
    assert completion.choices[0].finish_reason == expected.finish_reason
    assert events.count("content.done") == 1


def test_completions_equal_the_answers_of_the_library(client: openai.OpenAI) -> None:
    prompts = ["one", [5, 6, 7, 8]]
    first = client.completions.create(model="hashlm", prompt="one", echo=True, logprobs=1, n=2, **SEEDED)
    expected = answers(list(b"one"), n=2, logprobs=1, **SEEDED)
    assert [choice.text for choice in first.choices] == ["one" + answer.text for answer in expected]
    assert first.choices[1].logprobs is not None and first.choices[1].logprobs.token_logprobs is not None
    assert len(first.choices[1].logprobs.token_logprobs) == 3 + len(expected[1].token_ids)
    assert first.usage is not None and first.usage.prompt_tokens == 3
    for prompt in (prompts[1], [[5, 6, 7, 8], [9, 10]]):
        reply = client.completions.create(model="hashlm", prompt=prompt, **SEEDED)  # type: ignore[arg-type]
        lists: Any = prompt if isinstance(prompt[0], list) else [prompt]
        assert [choice.text for choice in reply.choices] == [answers(ids, **SEEDED)[0].text for ids in lists]
    pieces = client.completions.create(model="hashlm", prompt="one", stream=True, **SEEDED)
    assert "".join(piece.choices[0].text for piece in pieces) == answers(list(b"one"), **SEEDED)[0].text


def test_models_are_listed_and_request_ids_given_back(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["hashlm"]
    assert client.models.retrieve("hashlm").owned_by == "chairlift"
    reply = client.chat.completions.create(
        model="hashlm", messages=HI, max_tokens=1, extra_headers={"X-Request-Id": "mine-17"}
    )
    assert reply._request_id == "mine-17"


def test_errors_have_their_class_code_and_parameter(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="ask for hashlm") as missing:
        create(model="gpt-9", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="hashlm", messages=HI, temperature=1000)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        create(model="hashlm", messages=HI, max_tokens=50_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as tools:
        create(model="hashlm", messages=HI, tools=[{"type": "function", "function": {"name": "f g"}}])
    assert tools.value.param == "tools[0].function.name"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").chat.completions.create(model="hashlm", messages=HI)
    with pytest.raises(openai.NotFoundError):  # an endpoint that is not there
        client.moderations.create(model="hashlm", input="Hi")
    with pytest.raises(openai.BadRequestError):  # this server's model generates
        client.embeddings.create(model="hashlm", input="Hi")


def test_a_request_ends_when_the_client_leaves_in_mid_stream(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.create(model="hashlm", messages=HI, n=2, stream=True, extra_body=LONG) as stream:
        for _ in range(6):
            next(stream)
        assert served.load()["running"] == 2
    served.wait_until_idle()
    with pytest.raises(openai.APITimeoutError):  # and while it waits for a whole answer
        client.with_options(timeout=0.3).chat.completions.create(model="hashlm", messages=HI, extra_body=LONG)
    served.wait_until_idle()


def test_the_async_client_gets_the_same_answers(served: Served) -> None:
    async def test() -> None:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
            create: Any = client.chat.completions.create
            (expected,) = answers("Hi", **SEEDED)
            stream = await create(model="hashlm", messages=HI, stream=True, **SEEDED)
            streamed, *whole = await asyncio.gather(
                chunks_of(stream), *(create(model="hashlm", messages=HI, **SEEDED) for _ in range(3))
            )
            assert texts_of(streamed) == [expected.text]
            assert [reply.choices[0].message.content for reply in whole] == [expected.text] * 3
            with pytest.raises(openai.BadRequestError):
                await create(model="hashlm", messages=[])

            stream = await create(model="hashlm", messages=HI, stream=True, extra_body=LONG)
            await anext(stream)
            await stream.close()
            await asyncio.to_thread(served.wait_until_idle)

            task = asyncio.create_task(create(model="hashlm", messages=HI, extra_body=LONG))
            await asyncio.to_thread(served.wait_for, 1, 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(served.wait_until_idle)

    async def chunks_of(stream: Any) -> list[Any]:
        return [chunk async for chunk in stream]

    run(test())


def test_the_client_raises_an_error_when_the_engine_dies() -> None:
    """In mid-stream, where the status is long sent; and it is a client's retries that get over it."""
    with ServerProcess("hashlm:5ms", *ROOM) as server:
        with openai.OpenAI(base_url=Served(server).base_url, api_key=KEY) as client:
            stream = client.chat.completions.create(model="hashlm", messages=HI, stream=True, extra_body=LONG)
            next(stream)
            os.kill(server.engine(), signal.SIGKILL)
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            assert caught.value.code == "engine_unavailable"
            reply = client.with_options(max_retries=10).chat.completions.create(model="hashlm", messages=HI, **SEEDED)
            assert reply.choices[0].message.content == answers("Hi", **SEEDED)[0].text
        Served(server).wait_until_idle()


def test_the_client_waits_for_the_time_of_retry_after(client: openai.OpenAI, served: Served) -> None:
    with filled(served) as holders, ThreadPoolExecutor(1) as thread:
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="hashlm", messages=HI)
        assert full.value.code == "rate_limit_exceeded"
        assert 1 <= float(full.value.response.headers["retry-after"]) <= 60
        rejected = served.metric("admission_rejections_total")
        replies: list[tuple[float, Any]] = []
        hooks: Any = {"response": [lambda reply: replies.append((time.monotonic(), reply))]}
        watched = client.with_options(max_retries=10, http_client=openai.DefaultHttpxClient(event_hooks=hooks))
        patient = watched.chat.completions.with_raw_response
        start = time.monotonic()
        asked = thread.submit(patient.create, model="hashlm", messages=HI, **SEEDED)
        while served.metric("admission_rejections_total") == rejected:
            assert time.monotonic() - start < PATIENCE
        holders.close()
        reply = asked.result(2 * PATIENCE)
        # Where the machine is busy, the places may not be free yet when it comes again.
        assert reply.retries_taken == len(replies) - 1 >= 1
        for (seen, refusal), (later, _) in itertools.pairwise(replies):
            assert (refusal.status_code, later - seen >= float(refusal.headers["retry-after"])) == (429, True)
        assert reply.parse().choices[0].message.content == answers("Hi", **SEEDED)[0].text
