"""Libraries that are built on the official client, as they are installed, against a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import instructor
import langchain_openai
import openai
import pytest
from instructor.core import IncompleteOutputException, InstructorRetryException
from langchain_core.messages import HumanMessage
from pydantic import BaseModel

from chairlift import LLM, SamplingParams
from tests.e2e.scripted_model import write_scripted_model
from tests.e2e.served import HI, KEY, LONG, SEEDED, Served, answers, filled, run, stop_in, texts_of
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pydantic", "ignore::DeprecationWarning:litellm")

QUESTION = "What is a KV cache?"


@pytest.fixture(scope="module")
def litellm() -> Any:
    """litellm asks the network for prices when it is imported, unless it is told to take those it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

    return litellm


def test_all_clients_tell_a_full_server(litellm: Any, served: Served) -> None:
    chat = langchain_openai.ChatOpenAI(model="hashlm", base_url=served.base_url, api_key=KEY, max_retries=0)  # type: ignore[arg-type]
    with filled(served):
        with pytest.raises(litellm.RateLimitError) as caught:
            lite(litellm, served)
        assert float(caught.value.litellm_response_headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            chat.invoke("Hi")


# --- litellm ----------------------------------------------------------------------------------------------------------


def lite(litellm: Any, served: Served, **settings: Any) -> Any:
    where = {"api_base": served.base_url, "api_key": KEY, "max_retries": 0}
    return litellm.completion(**{"model": "openai/hashlm", "messages": HI, **where, **settings})


def test_litellm_gets_the_answers_of_the_library(litellm: Any, served: Served) -> None:
    stop = stop_in(answers("Hi", **SEEDED)[0].text)
    reply = lite(litellm, served, n=2, stop=[stop], logprobs=True, top_logprobs=1, **SEEDED)
    expected = answers("Hi", n=2, stop=stop, logprobs=1, **SEEDED)
    assert [choice.message.content for choice in reply.choices] == [answer.text for answer in expected]
    assert [choice.finish_reason for choice in reply.choices] == [answer.finish_reason for answer in expected]
    assert reply.usage.completion_tokens == sum(len(answer.token_ids) for answer in expected)
    assert [len(c.logprobs.content) for c in reply.choices] == [len(answer.token_ids) for answer in expected]

    chunks = list(lite(litellm, served, n=2, stream=True, stream_options={"include_usage": True}, **SEEDED))
    expected = answers("Hi", n=2, **SEEDED)
    assert texts_of(chunks, 2) == [answer.text for answer in expected]
    assert chunks[-1].usage.completion_tokens == sum(len(answer.token_ids) for answer in expected)

    async def test() -> None:
        reply = await litellm.acompletion(
            model="openai/hashlm", messages=HI, api_base=served.base_url, api_key=KEY, **SEEDED
        )
        assert reply.choices[0].message.content == expected[0].text

    run(test())


def test_litellm_raises_its_errors_and_its_leaving_ends_requests(litellm: Any, served: Served) -> None:
    for error, settings in (
        (litellm.BadRequestError, {"temperature": 1000}),
        (litellm.ContextWindowExceededError, {"max_tokens": 50_000}),
        (litellm.NotFoundError, {"model": "openai/gpt-9"}),
        (litellm.AuthenticationError, {"api_key": "sk-wrong"}),
    ):
        with pytest.raises(error):
            lite(litellm, served, **settings)
    stream = lite(litellm, served, stream=True, **LONG)
    next(stream)
    served.wait_for(1, 0)
    stream.completion_stream.close()
    served.wait_until_idle()


# --- langchain --------------------------------------------------------------------------------------------------------


def test_langchain_gets_the_answers_of_the_library(served: Served) -> None:
    make: Any = langchain_openai.ChatOpenAI
    chat = make(model="hashlm", base_url=served.base_url, api_key=KEY, max_retries=0, **SEEDED)
    (expected,) = answers("Hi", **SEEDED)
    reply = chat.invoke("Hi")
    assert reply.content == expected.text
    assert reply.response_metadata["finish_reason"] == expected.finish_reason
    assert reply.usage_metadata["output_tokens"] == len(expected.token_ids)

    pieces = list(chat.stream("Hi", stream_usage=True))
    whole = sum(pieces[1:], pieces[0])
    assert whole.content == expected.text
    assert whole.usage_metadata["output_tokens"] == len(expected.token_ids)
    assert whole.response_metadata["finish_reason"] == expected.finish_reason

    stop = stop_in(expected.text)
    bound = chat.bind(stop=[stop], logprobs=True, top_logprobs=1)
    reply = bound.invoke("Hi")
    (stopped,) = answers("Hi", stop=stop, logprobs=1, **SEEDED)
    assert (reply.content, reply.response_metadata["finish_reason"]) == (stopped.text, "stop")
    assert len(reply.response_metadata["logprobs"]["content"]) == len(stopped.token_ids)

    several = make(model="hashlm", base_url=served.base_url, api_key=KEY, n=3, **SEEDED).generate(
        [[HumanMessage("Hi")]]
    )
    assert [answer.text for answer in several.generations[0]] == [
        answer.text for answer in answers("Hi", n=3, **SEEDED)
    ]
    batch = chat.batch(["Hi", "Ho", "Hu"])
    assert [each.content for each in batch] == [answers(text, **SEEDED)[0].text for text in ("Hi", "Ho", "Hu")]
    text = langchain_openai.OpenAI(model="hashlm", base_url=served.base_url, api_key=KEY, **SEEDED)  # type: ignore[arg-type]
    told = answers(list(b"Hi"), temperature=0.7, **SEEDED)[0].text
    assert text.invoke("Hi", temperature=0.7) == told


def test_langchain_raises_its_errors_and_its_leaving_ends_requests(served: Served) -> None:
    make: Any = langchain_openai.ChatOpenAI
    where = {"base_url": served.base_url, "api_key": KEY, "max_retries": 0}
    for error, settings in (
        (openai.BadRequestError, {"model": "hashlm", "temperature": 1000}),
        (openai.NotFoundError, {"model": "gpt-9"}),
        (openai.AuthenticationError, {"model": "hashlm", "api_key": "sk-wrong"}),
    ):
        with pytest.raises(error):
            make(**{**where, **settings}).invoke("Hi")
    chat = make(model="hashlm", extra_body={"ignore_eos": True}, max_tokens=LONG["max_tokens"], **where)
    stream = chat.stream("Hi")
    next(stream)
    assert served.load()["running"] == 1
    stream.close()
    served.wait_until_idle()

    async def test() -> None:
        async with contextlib.aclosing(chat.astream("Hi")) as stream:
            await anext(stream)
        await asyncio.to_thread(served.wait_until_idle)

    run(test())


# --- instructor -------------------------------------------------------------------------------------------------------


class Weather(BaseModel):
    city: str
    degrees: int


def test_instructor_gets_an_object(tmp_path: Path) -> None:
    """The prompt asks for JSON; the first answer is none, and the client asks again."""
    wrong = ["```json\n", '{"city": "Oslo", ', '"degrees": ', '"cold"}\n```']
    right = ["Sure:\n```json\n", '{"city": ', '"Os', 'lo", "degrees": ', "-7}\n", "```"]
    folder = write_scripted_model(tmp_path / "scripted", wrong, right)
    with ServerProcess(str(folder), "--num-kv-blocks", "256", "--api-key", KEY) as server:
        ask: Any = {"model": "scripted", "response_model": Weather, "temperature": 0}
        with openai.OpenAI(base_url=Served(server).base_url, api_key=KEY, max_retries=0) as client:
            typed = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
            found = typed.chat.completions.create(messages=HI, max_retries=1, **ask)
            assert isinstance(found, Weather)
            assert found.model_dump() == {"city": "Oslo", "degrees": -7}
            with pytest.raises(InstructorRetryException) as caught:
                typed.chat.completions.create(messages=HI, max_retries=0, **ask)
            assert "valid integer" in str(caught.value)
            asked_again: Any = [*HI, {"role": "assistant", "content": "Hello"}, *HI]
            parts = list(typed.chat.completions.create_partial(messages=asked_again, **ask))
            assert {part.city for part in parts} >= {None, "Os", "Oslo"}
            assert (parts[-1].city, parts[-1].degrees) == ("Oslo", -7)
        Served(server).wait_until_idle()


def test_instructor_gives_up_on_nonsense(client: openai.OpenAI, served: Served) -> None:
    typed = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    ask: Any = {"model": "hashlm", "response_model": Weather, "messages": HI, "max_retries": 2, "seed": 7}
    before = served.metric("request_success_total")
    with pytest.raises(InstructorRetryException) as caught:
        typed.chat.completions.create(max_tokens=400, stop=list("aeiouAEIOU01234"), **ask)
    assert caught.value.n_attempts == 3 == served.metric("request_success_total") - before
    with pytest.raises(IncompleteOutputException):  # cut off by max_tokens: asking again would not help
        typed.chat.completions.create(max_tokens=3, extra_body={"ignore_eos": True}, **ask)


def test_instructor_gets_an_object_of_its_class(client: openai.OpenAI) -> None:
    """HashLM knows no JSON: only the schema makes it one."""
    typed = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    ask: Any = {"model": "hashlm", "messages": HI, "max_retries": 0, "seed": 5, "max_tokens": 4_000}
    assert isinstance(typed.chat.completions.create(response_model=Weather, **ask), Weather)


# --- all of them, and a model that has learnt something ---------------------------------------------------------------


@pytest.fixture(scope="module")
def known() -> str:
    """The bundled model's greedy answer, computed in this process."""
    (output,) = LLM("bundled", num_kv_blocks=128).chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=48)
    )
    return output.outputs[0].text


def _openai(where: dict[str, str], litellm: Any) -> str | None:
    with openai.OpenAI(**where) as client:  # type: ignore[arg-type]
        reply = client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=48
        )
    return reply.choices[0].message.content


def _litellm(where: dict[str, str], litellm: Any) -> Any:
    reply = litellm.completion(
        model="openai/bundled", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=48, **where
    )
    return reply.choices[0].message.content


def _langchain(where: dict[str, str], litellm: Any) -> Any:
    make: Any = langchain_openai.ChatOpenAI
    return "".join(
        piece.content for piece in make(model="bundled", temperature=0, max_tokens=48, **where).stream(QUESTION)
    )


@pytest.mark.parametrize("ask", [_openai, _litellm, _langchain])
def test_every_client_gets_the_known_answer_of_the_bundled_model(
    bundled_server: ServerProcess, litellm: Any, known: str, ask: Callable[[dict[str, str], Any], str]
) -> None:
    where = {"base_url": Served(bundled_server).base_url, "api_key": KEY}
    assert ask(where, litellm) == known != ""
