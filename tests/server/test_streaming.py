"""A stream says what the whole answer says, by the contract, and every end of it leaves the engine empty."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import processors

from chairlift.base.sampling_params import SHAPED_REASONS
from chairlift.errors import EngineDeadError, OverloadedError, QueueTimeoutError
from chairlift.server.http.app import make_app
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import collect, merge, truncate
from chairlift.text.tokenizer import Tokenizer
from tests.server.fake_engine import INFO, FakeEngine, FakeStream, make_state
from tests.server.harness import PATIENCE
from tests.text.tokenizer import tiny

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Where does it go?"}]
BOTH = [(CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "Where does it go?"})]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client
    assert engine.num_requests == 0


def events(text: str) -> list[Any]:
    """The data of each event; ``[DONE]`` as text."""
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def stream(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return events(response.text)


def assembled(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The chunks put together as a client does: text, tokens, log-probabilities and end of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "ids": [], "logprobs": [], "end": None})
            assert choice["end"] is None, "nothing comes after the finish_reason"
            choice["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
            choice["ids"] += part.get("token_ids", [])
            choice["logprobs"] += logprobs(part)
            if part["finish_reason"] is not None:
                choice["end"] = (part["finish_reason"], part["stop_reason"])
                assert not part.get("text") and not part.get("delta")
    return choices


def logprobs(part: dict[str, Any]) -> list[Any]:
    found = part["logprobs"]
    if found is None:
        return []
    if "content" in found:
        return list(found["content"])
    columns = [found[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    return list(zip(*columns, strict=True))


def whole(reply: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "ids": choice.get("token_ids", []),
            "logprobs": logprobs(choice),
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in reply["choices"]
    }


def random_case(rng: random.Random) -> tuple[str, dict[str, Any]]:
    def often(value: Any, share: float = 0.4) -> Any:
        return value if rng.random() < share else None

    settings: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "n": often(rng.randrange(1, 5)),
        "max_tokens": rng.randrange(1, 80),
        "stop": often(rng.sample([" the", "ft", "é", "😀", '"', "\u2028"], rng.randrange(1, 3))),
        "stop_token_ids": often([rng.randrange(64, 100)]),
        "include_stop_str_in_output": often(True),
        "ignore_eos": often(True),
        "skip_special_tokens": often(False),
        "return_token_ids": often(True),
        "return_tokens_as_token_ids": often(True, 0.2),
    }
    prompts: list[Any] = ["Up", "Hé ", [72, 73, 74], ["one", "two é", "three"], [[80, 81], [82]]]
    if rng.random() < 0.5:
        content = rng.choice(["Hi", "été 😀", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
        settings |= {"messages": [{"role": "user", "content": content}], "logprobs": often(True)}
        settings["top_logprobs"] = rng.randrange(4) if settings["logprobs"] else None
        return CHAT, settings
    settings |= {"prompt": rng.choice(prompts), "echo": often(True), "logprobs": often(rng.randrange(4))}
    return TEXT, settings


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_a_stream_in_a_row_is_the_whole_answer(client: TestClient, engine: FakeEngine, count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        path, body = random_case(rng)
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        options = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.3}
        *chunks, usage, done = stream(client, path, {**body, "stream_options": options})
        assert done == "[DONE]"
        assert assembled(chunks) == whole(reply.json()), body
        assert usage["choices"] == []
        assert usage["usage"] == reply.json()["usage"]
        stops = tuple(body["stop"] or ())
        if not body["include_stop_str_in_output"] and not body.get("echo"):
            assert not any(stop in choice["text"] for stop in stops for choice in assembled(chunks).values())
        assert engine.num_requests == 0


def test_chunks_come_in_the_documented_order(client: TestClient) -> None:
    chunks = stream(client, CHAT, {"messages": MESSAGES, "n": 3, "max_tokens": 20, "seed": 1})
    assert chunks.pop() == "[DONE]"
    for index, chunk in enumerate(chunks[:3]):
        (choice,) = chunk["choices"]
        assert choice["index"] == index
        assert choice["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert not any("role" in choice["delta"] for chunk in chunks[3:] for choice in chunk["choices"])
    assert len([1 for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]) == 3
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_usage_is_null_until_the_last_chunk_or_counts_up(client: TestClient, path: str, body: dict[str, Any]) -> None:
    body = {**body, "max_tokens": 12, "seed": 2, "ignore_eos": True}
    *chunks, last, _ = stream(client, path, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["total_tokens"] == 12 + last["usage"]["prompt_tokens"]
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == last["usage"]["prompt_tokens"] // 16 * 16
    *chunks, _ = stream(client, path, {**body, "stream_options": {"continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12


FAILURES: list[tuple[Exception, int, str]] = [
    (EngineDeadError("the engine died"), 503, "engine_unavailable"),
    (QueueTimeoutError("not started in time", 2.0), 503, "queue_timeout"),
    (OverloadedError("not finished in time", 2.0), 503, "timeout"),
    (ZeroDivisionError("at 0x7f00dead in /usr/lib"), 500, "internal_error"),
]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES, ids=[code for _, _, code in FAILURES])
@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_failure_has_its_status_before_the_first_token_and_an_event_after(
    client: TestClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    failure: Exception,
    status: int,
    code: str,
) -> None:
    body = {**body, "max_tokens": 40, "ignore_eos": True}
    engine.failure_of_streams = failure
    for streamed in (True, False):
        reply = client.post(path, json={**body, "stream": streamed})
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert "0x7f" not in reply.text
        if isinstance(failure, OverloadedError | EngineDeadError):
            assert 1 <= int(reply.headers["retry-after"]) <= 60
    engine.fail_after = 2
    *chunks, last = stream(client, path, body)
    assert chunks and all("choices" in chunk for chunk in chunks)
    assert last["error"]["code"] == code
    assert "0x7f" not in json.dumps(last)
    assert engine.num_requests == 0


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_failed_row_is_an_error_and_never_an_answer(
    client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.failed_row = "the model's logits contain NaN"
    body = {**body, "max_tokens": 40, "ignore_eos": True}
    reply = client.post(path, json=body)
    assert reply.status_code == 500
    assert (reply.json()["error"]["code"], "NaN" in reply.text) == ("generation_failed", True)
    assert stream(client, path, body)[-1]["error"]["code"] == "generation_failed"
    for reason in SHAPED_REASONS:  # what a client asks for is no fault of ours
        engine.failed_row = reason
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_value")
        assert reason in stream(client, path, body)[-1]["error"]["message"]


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_no_room_is_said_before_anything_is_tokenized(
    client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.full = True
    reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 429
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("settings", "more", "code"),
    [
        ({"request_timeout": 0.02}, {}, "timeout"),
        ({"queue_timeout": 0.02}, {}, "queue_timeout"),
        ({"queue_timeout": 60}, {"queue_timeout": 0.02}, "queue_timeout"),
        ({"request_timeout": 0.02}, {"queue_timeout": 60}, "timeout"),
    ],
)
def test_the_time_runs_while_a_chat_waits_for_its_template(
    engine: FakeEngine, settings: dict[str, Any], more: dict[str, Any], code: str
) -> None:
    engine.prompts.template_gate = asyncio.Event()
    with TestClient(make_app(make_state(engine, **settings)), base_url="http://localhost") as client:
        reply = client.post(CHAT, json={"messages": MESSAGES, **more})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, code)
    assert reply.headers["retry-after"] == "3"
    assert engine.stats.rejected["queue_timeout"] == (code == "queue_timeout")
    assert not engine.submitted


def test_a_body_counts_until_its_prompt_is_tokens() -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.prompts.template_gate = asyncio.Event()
        state = make_state(engine)
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 50, "ignore_eos": True}
        seen: list[int] = []

        async def send(message: Any) -> None:
            seen.append(state.num_body_bytes)

        chats = [asyncio.create_task(call(engine, CHAT, body, send, state)) for _ in range(2)]
        await asyncio.wait_for(engine.waiting.wait(), PATIENCE)
        await asyncio.sleep(0)
        assert state.num_body_bytes == 2 * len(json.dumps(body))
        chats[0].cancel()  # who leaves takes it away
        await asyncio.wait(chats[:1])
        assert state.num_body_bytes == len(json.dumps(body))
        engine.prompts.template_gate.set()
        await chats[1]
        assert set(seen) == {0}

    asyncio.run(main())


def test_no_prompt_of_a_call_is_left_when_one_is_refused(client: TestClient, engine: FakeEngine) -> None:
    reply = client.post(TEXT, json={"prompt": [[1], [2], [999]]})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("prompt 2: the prompt has token id 999")
    assert (engine.num_requests, engine.num_aborted) == (0, 2)


# --- by hand, where the connection matters ----------------------------------------------------------------------------


def scope_of(path: str) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
    }


def call(
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    send: Callable[..., Any],
    state: ServerState | None = None,
    **settings: Any,
) -> Any:
    """The application's coroutine for one request."""
    content = json.dumps(body).encode()
    never = asyncio.Event()
    given = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> Any:
        for message in given:
            return message
        await never.wait()

    return make_app(state or make_state(engine, **settings))(scope_of(path), receive, send)


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after", [0, 2])
def test_a_client_that_leaves_ends_its_request(path: str, body: dict[str, Any], streamed: bool, after: int) -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.gate, engine.gate_after = asyncio.Event(), after if streamed else 0
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        request = {**body, "stream": streamed, "max_tokens": 50, "ignore_eos": True, "n": 2}
        task = asyncio.create_task(call(engine, path, request, send))
        await asyncio.wait_for(engine.waiting.wait(), PATIENCE)
        assert engine.num_requests == 1
        assert bool(sent) == (streamed and after > 0), "nothing is sent before there is something to say"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE)
        assert (engine.num_requests, engine.num_aborted) == (0, 1)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_several_streams_leave_no_task_when_the_client_leaves() -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.gate, engine.gate_after = asyncio.Event(), 1

        async def send(message: Any) -> None:
            pass

        request = {"prompt": ["a", "b", "c"], "stream": True, "max_tokens": 50, "ignore_eos": True}
        task = asyncio.create_task(call(engine, TEXT, request, send))
        await asyncio.wait_for(engine.waiting.wait(), PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE)
        assert (engine.num_requests, engine.num_aborted) == (0, 3)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_reader_that_stands_still_until_its_connection_ends_leaves_nothing() -> None:
    async def main() -> None:
        engine = FakeEngine()
        sent: list[Any] = []
        stuck = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                stuck.set()
                await asyncio.Event().wait()

        request = {"messages": MESSAGES, "stream": True, "max_tokens": 50, "ignore_eos": True}
        task = asyncio.create_task(call(engine, CHAT, request, send))
        await asyncio.wait_for(stuck.wait(), PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE)
        assert len(sent) == 3
        assert (engine.num_requests, engine.num_aborted) == (0, 1)

    asyncio.run(main())


def test_each_output_is_one_send() -> None:
    async def main() -> None:
        engine = FakeEngine()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        body = {"messages": MESSAGES, "stream": True, "max_tokens": 30, "ignore_eos": True, "n": 4, "seed": 3}
        await call(engine, CHAT, body, send)
        head, *bodies, last = sent
        assert head["type"] == "http.response.start"
        assert last == {"type": "http.response.body", "body": b"", "more_body": False}
        (prompt, params, _), _ = engine.submitted[0], engine.streams
        outputs = engine._interleaved(prompt, params, [engine._answer(prompt, params, i) for i in range(4)])
        assert len(bodies) <= len(outputs) + 1  # outputs without text are not sent; [DONE] is

    asyncio.run(main())


def test_merging_gives_each_stream_its_turn() -> None:
    class Counting(FakeStream):
        """Always has an output ready."""

        def __init__(self, count: int) -> None:
            super().__init__(FakeEngine(), [1], [])
            self.left = count

        async def __anext__(self) -> Any:
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return _Output(finished=not self.left)

    async def main() -> None:
        streams: Any = [Counting(50), Counting(50), Counting(5)]
        order = [index async for index, _ in merge(streams)]
        assert len(order) == 105
        for at in range(5):
            assert sorted(order[3 * at : 3 * at + 3]) == [0, 1, 2]
        assert abs(order[15:55].count(0) - order[15:55].count(1)) <= 1

    asyncio.run(main())


def test_the_first_failing_prompt_of_a_call_ends_the_reply() -> None:
    class Failing(FakeStream):
        async def __anext__(self) -> Any:
            raise QueueTimeoutError("it waited too long")

    async def main() -> None:
        engine = FakeEngine()
        engine.gate = asyncio.Event()  # the first prompt's answer never comes
        engine.gate_after = 0
        streams: Any = [FakeStream(engine, [1], []), Failing(engine, [1], [])]
        with pytest.raises(QueueTimeoutError):
            await collect(streams)
        assert streams[0].aborted

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


class _Output:
    def __init__(self, finished: bool) -> None:
        self.finished = finished


def test_a_stream_that_stops_early_is_an_error() -> None:
    async def main() -> None:
        for count in (1, 2):
            streams: Any = [FakeStream(FakeEngine(), [1], []) for _ in range(count)]
            with pytest.raises(EngineDeadError, match="cut off"):
                _ = [output async for output in merge(streams)]

    asyncio.run(main())


@pytest.mark.parametrize("layout", ["$A", "</s> $A", "</s> $A </s>", "$A </s>", "</s> </s> $A"])
@pytest.mark.parametrize("family", ["byte_level", "metaspace", "unigram_byte_fallback"])
def test_truncation_is_that_of_the_tokenizers_library(family: str, layout: str) -> None:
    backend = tokenizers.Tokenizer.from_str(tiny.library(family).to_str())
    end = ("</s>", backend.token_to_id("</s>"))
    backend.post_processor = processors.TemplateProcessing(layout, special_tokens=[end])
    library = tokenizers.Tokenizer.from_str(backend.to_str())
    tokenizer = Tokenizer(backend)
    text = "the chairlift </s> never stops"
    whole = tokenizer.encode(text)
    assert sum(tokenizer.num_added) == layout.count("</s>")
    for keep in range(len(whole) + 2):
        if keep < max(1, layout.count("</s>")):
            with pytest.raises(ApiError, match=f"keeps {keep} tokens"):
                truncate(whole, keep, INFO, None, tokenizer.num_added)
        else:
            library.enable_truncation(keep, direction="left")
            assert truncate(whole, keep, INFO, None, tokenizer.num_added) == library.encode(text).ids
