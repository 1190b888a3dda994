"""Every input gets an answer or a 4xx: no 5xx, no dead engine, and right requests are answered exactly.

A finding names its seed and index, and the command that sends it again. More inputs:
``python -m tests.e2e.fuzz --seed 7 --count 1000000``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.server.openai.promises import TTFT_HEADER
from tests.e2e import fuzz as fuzzing
from tests.e2e.fuzz import (
    SERVER,
    Answer,
    Connection,
    Finding,
    check_answer,
    check_exact,
    check_still_whole,
    fuzz,
    get,
    may_give_up,
)
from tests.e2e.fuzz_http import Ending, RawInput
from tests.e2e.fuzz_json import ENDPOINTS, VALUES, Body, Raw, grid_size
from tests.e2e.server_process import PATIENCE, ServerProcess

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
]  # hundreds of requests of one test take long on a busy machine

GUARDED = str(Path(__file__).with_name("guarded"))
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    """A server whose processes cannot reach beyond this machine."""
    with ServerProcess("hashlm", *SERVER, environment={"PYTHONPATH": GUARDED}) as server:
        yield server


@pytest.fixture
def server(shared: ServerProcess) -> Iterator[ServerProcess]:
    """The same, looked over after each test."""
    exact(shared, 1)
    before, engine = fuzzing.samples(shared), shared.engine()
    yield shared
    exact(shared, 2)
    assert not check_still_whole(shared, before, engine)


def exact(server: ServerProcess, seed: int) -> None:
    async def check() -> None:
        connection = Connection(server.port)
        await asyncio.wait_for(check_exact(connection, seed), PATIENCE)
        connection.close()

    asyncio.run(check())


def post(server: ServerProcess, *requests: tuple[str, Any]) -> list[Answer]:
    """Answers to bodies sent one after the other; bytes are sent as they are."""

    async def send() -> list[Answer]:
        connection = Connection(server.port)
        found = []
        for path, body in requests:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            found.append(await asyncio.wait_for(connection.post(path, data), PATIENCE))
        connection.close()
        return found

    return asyncio.run(send())


# --- the inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [pytest.param(4_000, id="4k"), pytest.param(200_000, marks=pytest.mark.nightly)])
def test_mutated_requests_and_odd_connections_get_right_answers_or_errors(server: ServerProcess, count: int) -> None:
    report = fuzz(server, seed=1 if count < 100_000 else time.time_ns(), indices=range(count))
    print(report)
    assert not report.findings, "\n".join([str(report), *report.findings])
    assert report.num_inputs == count and report.num_exact >= count // 250
    # Else the inputs look at the first check only.
    assert report.statuses["body 200"] > count // 20 and report.statuses["connection 200"] > count // 100
    assert {"body 400", "connection 400", "connection 404", "connection 405", "connection 415"} <= set(report.statuses)


def test_the_fuzzer_tries_each_value_in_each_field() -> None:
    """The grid of one field with one value fits into a run in the usual size of those at night."""
    assert 5_000 < grid_size() < 200_000 * 4 // 5 * 2 // 5


@pytest.mark.parametrize("count", [pytest.param(20, id="20"), pytest.param(2000, marks=pytest.mark.nightly)])
def test_requests_generated_from_the_document_get_documented_answers(server: ServerProcess, count: int) -> None:
    """schemathesis makes requests after /openapi.json, right and wrong ones; the answers are as it says."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
    session = __import__("requests").Session()
    num_calls = 0

    def try_out(operation: Any, mode: Any) -> None:
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            response = case.call(session=session)
            gave_up = response.status_code == 503 and may_give_up(asked_of(case), response.content)
            case.validate_response(response, checks=checks[1:] if gave_up else checks)

        run()

    for each in schema.exclude(path="/v1/traffic").get_all_operations():  # which goes on until somebody leaves
        operation = each.ok()
        for mode in (
            (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.body else (GenerationMode.POSITIVE,)
        ):
            try_out(operation, mode)
    assert num_calls > 6 * count


def asked_of(case: Any) -> dict[str, Any]:
    """The fields of a generated request, with the one that a header may say in their place."""
    asked = dict(case.body) if isinstance(case.body, dict) else {}
    if asked.get("ttft_ms") is None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            asked["ttft_ms"] = float(case.headers[TTFT_HEADER])
    return asked


# --- floods and slow senders -----------------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ENDLESS = HEAD + b"Content-Length: 99999999999\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
FLOODS: dict[str, tuple[int, list[bytes]]] = {
    "one long header": (431, [GET + b"A: ", *[b"x" * MIB] * 64]),
    "many headers": (431, [GET, b"A: b\r\n" * 10_000, b"\r\n"]),
    "64 longer headers": (431, [GET, *[b"A%d: %b\r\n" % (i, b"x" * 1000) for i in range(64)]]),
    "a long path": (414, [b"GET /", *[b"x" * MIB] * 64]),
    "an endless body": (413, [ENDLESS, *[b" " * MIB] * 16]),
    "endless chunks": (413, [CHUNKED, *[b"100000\r\n" + b" " * MIB + b"\r\n"] * 16]),
    "one-byte chunks": (400, [CHUNKED, b"1\r\n \r\n" * 100_000, b"2\r\n{}\r\n0\r\n\r\n"]),
    "a long chunk extension": (431, [CHUNKED + b"1;", *[b"x" * MIB] * 16]),
}
BODIES = {
    "a text that does not end": b'{"prompt": "' + b"x" * (4 * MIB - 12),
    "a long text": b'{"prompt": "' + b"x" * (4 * MIB - 14) + b'"}',
    "a long text of escapes": b'{"prompt": "' + b"\\n" * (2 * MIB - 7) + b'"}',
    "quotes": b'{"prompt": "' + b'\\"' * (2 * MIB - 6),
    "many opened lists": b"[" * (4 * MIB),
    "many opened objects": b'{"a":' * (4 * MIB // 5),
    "many lists": b'{"x": [[]' + b",[]" * (4 * MIB // 3 - 4) + b"]}",
    "many deep lists": b'{"x": [' + b",".join([b"[" * 60 + b"]" * 60] * (4 * MIB // 121 - 1)) + b"]}",
    "many objects": b'{"messages": [{}' + b",{}" * (4 * MIB // 3 - 6) + b"]}",
    "many names": b"{" + b",".join(b'"%x":0' % number for number in range(400_000)) + b"}",
    "many ids": b'{"prompt": [1' + b",1" * (2 * MIB - 10) + b"]}",
    "many texts": b'{"prompt": ["x"' + b',"x"' * (MIB - 10) + b"]}",
    "many digits": b'{"n": ' + b"9" * (4 * MIB - 8) + b"}",
}
FLOODS |= {name: (400, [HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body]) for name, body in BODIES.items()}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_take_little_memory_and_time_and_get_an_answer(server: ServerProcess, name: str) -> None:
    """More than anybody reads: it is not kept, it takes little of the server's time, and there is an answer."""
    status, parts = FLOODS[name]
    memory, before = server.memory(), cpu_seconds(server.pid)
    flood = RawInput(name, parts, Ending.READ)
    statuses, _ = asyncio.run(asyncio.wait_for(fuzzing.send_raw(server.port, flood), PATIENCE))
    # A client that goes on sending may lose the answer with the connection, as ever in HTTP.
    assert statuses in ([status], [])
    assert server.memory() < memory + 128 * MIB
    assert cpu_seconds(server.pid) < before + 2  # what one client takes here, all others wait for


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.nightly
def test_many_slow_senders_hold_up_nobody(server: ServerProcess) -> None:
    """200 connections whose heads come byte by byte; meanwhile others are served, and the slow ones are cut."""

    async def slow(number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
        writer.write(head[: 1 + number % len(head)])
        answer = asyncio.ensure_future(reader.read())
        while not answer.done():
            try:
                writer.write(b"x")
                await asyncio.wait_for(asyncio.shield(answer), 0.5)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        writer.close()
        return b"" if answer.exception() else answer.result()

    async def test() -> None:
        connection = Connection(server.port)
        senders = [asyncio.ensure_future(slow(number)) for number in range(200)]
        num_served = 0
        while not all(sender.done() for sender in senders):
            await asyncio.wait_for(check_exact(connection, num_served), PATIENCE)
            num_served += 1
            await asyncio.sleep(0.05)
        connection.close()
        ends = [sender.result()[9:12] for sender in senders]
        assert set(ends) <= {b"408", b"400", b"431", b""} and ends.count(b"408") > 50
        assert num_served > 3

    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))


# --- every pair of features ------------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "prompt": ([104, 105], [258], [257], [32, 10], [1] * 17, [0]),
    "max_tokens": (1, 7, None),
    "n": (1, 3),
    "temperature": (0.0, 1.0),
    "top_k": (0, -1, 3),
    "top_p": (1.0, 0.5),
    "min_p": (0.0, 0.3),
    "presence_penalty": (0.0, 1.0),
    "frequency_penalty": (0.0, -1.0),
    "repetition_penalty": (1.0, 1.3),
    "logit_bias": (None, {"7": 5.0}),
    "seed": (0, -(2**63)),
    "min_tokens": (0, 1),
    "stop": (None, ["a", "e"], "\u00e9"),
    "stop_token_ids": (None, [10, 20]),
    "ignore_eos": (False, True),
    "bad_words": (None, ["bad"]),
    "allowed_token_ids": (None, [1, 2, 3]),
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (True, False),
    "logprobs": (None, 0, 5),
    "prompt_logprobs": (None, 2),
    "cache_salt": (None, "a"),
    "stream": (False, True),
    "echo": (False, True),
    "best_of": (None, 3),
}
FRONT_END = ("prompt", "cache_salt", "stream", "echo", "best_of")


def pairwise() -> list[dict[str, Any]]:
    """Few rows in which every level of every factor meets every level of every other (greedy; Cohen et al., 1997)."""
    import random

    rng = random.Random(0)
    names = list(FACTORS)

    def pairs(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, row[a], b, row[b]) for i, a in enumerate(names) for b in names[i + 1 :]}

    missing = {
        (a, x, b, y)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in range(len(FACTORS[a]))
        for y in range(len(FACTORS[b]))
    }
    rows = []
    while missing:
        a, x, b, y = next(iter(sorted(missing)))
        candidates = [{n: rng.randrange(len(FACTORS[n])) for n in names} | {a: x, b: y} for _ in range(40)]
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append({name: FACTORS[name][best[name]] for name in names})
    return rows


def test_every_pair_of_features_is_answered_as_the_library_answers(server: ServerProcess) -> None:
    from chairlift import LLM, SamplingParams
    from chairlift.errors import RequestError

    llm = LLM(model="hashlm", max_model_len=128, num_kv_blocks=512, scheduling_policy="priority")
    answered = 0
    for row in pairwise():
        asked = row | {"return_token_ids": True}
        reply = post(server, ("/v1/completions", asked))[0]
        fields = {name: value for name, value in row.items() if name not in FRONT_END and value is not None}
        if row["max_tokens"] is None:
            fields["max_tokens"] = 16  # the endpoint's default
        chosen = row["best_of"] not in (None, row["n"])  # the best of several, which a stream cannot know
        if row["stream"] and (row["prompt_logprobs"] is not None or chosen):
            assert reply.status == 400, (row, reply)
            continue
        try:
            outputs = llm.generate([row["prompt"]], SamplingParams(**fields), use_tqdm=False)
        except RequestError:
            assert reply.status == 400, (row, reply)
            continue
        assert reply.status == 200, (row, reply)
        check_answer(Body("/v1/completions", json.dumps(asked).encode(), ""), reply)
        if not chosen and not row["cache_salt"]:
            assert token_ids(reply, row["n"]) == [list(each.token_ids) for each in outputs[0].outputs], row
            answered += 1
    assert answered > 5


def token_ids(reply: Answer, n: int) -> list[list[int]]:
    """The ids of each answer, streamed or not."""
    found: list[list[int]] = [[] for _ in range(n)]
    chunks = [reply.body]
    if reply.headers["content-type"].startswith("text/event-stream"):
        chunks = [event[6:] for event in reply.body.split(b"\n\n")[:-2]]
    for chunk in chunks:
        for choice in json.loads(chunk)["choices"]:
            found[choice["index"]] += choice.get("token_ids") or []
    return found


SAMPLING = (
    *("n", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs", "priority"),
)


def test_all_front_ends_take_the_same_values(server: ServerProcess, tmp_path: Path) -> None:
    """One validator: what the library refuses, neither the server nor the command line takes, and the reverse."""
    from chairlift import LLM, SamplingParams
    from chairlift.cli.main import main
    from chairlift.errors import RequestError

    llm = LLM(model="hashlm", max_model_len=128, num_kv_blocks=512, scheduling_policy="priority")
    values = [value for value in VALUES if not isinstance(value, Raw) and value is not None]
    values += [-100, 100, 2.0001, 10.0, 10.0001, 20, 21, 257, 0.9999999, 1.0000001, {"0": 1}, {"258": 1}, ["a" * 256]]
    cells = [(field, value) for field in SAMPLING for value in values]
    base = {"prompt": [1], "max_tokens": 2}
    replies = post(server, *(("/v1/completions", base | {field: value}) for field, value in cells))
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("\n".join(json.dumps(base | {field: value}) for field, value in cells))
    model = ("--model", "hashlm", "--max-model-len", "128", "--num-kv-blocks", "512", "--scheduling-policy", "priority")
    main(["generate", *model, "--quiet", "--prompts-file", str(prompts), "--output", str(answers)])
    lines = [json.loads(line) for line in answers.read_bytes().splitlines()]  # of a str also at U+0085 and U+2028
    differences = []
    num_taken = 0
    for (field, value), reply, line in zip(cells, replies, lines, strict=True):
        assert reply.status in (200, 400)
        try:
            (output,) = llm.generate([[1]], SamplingParams(max_tokens=2, **{field: value}), use_tqdm=False)
            taken = output.error is None
        except RequestError:
            taken = False
        num_taken += taken
        if taken != (line["error"] is None):
            differences.append(f"{field}={value!r:.40}: library {taken}, command line {line['error']}")
        if taken != (reply.status == 200) and not may_differ(value):
            differences.append(f"{field}={value!r:.40}: library {taken}, server {reply.body[:200]!r}")
    assert not differences, "\n".join(differences)
    assert 150 < num_taken < len(cells) // 2


def may_differ(value: Any) -> bool:
    """JSON has one kind of number: 1.0 is a whole number there, and none in Python."""
    return isinstance(value, float) and abs(value) < 2**63 and value == int(value)


# --- routes that take what nobody should give ------------------------------------------------------------------------

INSIDES = ("prompt_embeds", "kv_transfer_params", "logits_processors", "lora_path", "chat_template", "documents")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", INSIDES)
def test_tensors_caches_code_and_files_are_refused(server: ServerProcess, path: str, field: str) -> None:
    values = ("gASVAAAA", "http://127.0.0.1:1/x", "/etc/passwd", {"do_remote_prefill": True}, [[0.5]], [1], 1, True)
    for value, reply in zip(
        values, post(server, *((path, ENDPOINTS[path][1] | {field: value}) for value in values)), strict=True
    ):
        assert reply.status == 400, (field, value)
        assert json.loads(reply.body)["error"]["param"] == field


def test_prompts_are_refused_only_without_a_token(server: ServerProcess) -> None:
    for prompt, status in (("", 400), ([], 400), ([[]], 400), (" ", 200), ("\n\t", 200), ([258], 200), ("\x00", 200)):
        data = {"prompt": prompt, "max_tokens": 1}
        assert post(server, ("/v1/completions", data))[0].status == status, prompt
        text = prompt if isinstance(prompt, str) else None
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        assert post(server, ("/v1/chat/completions", chat))[0].status == (400 if text is None else 200)
    reply = post(server, ("/tokenize", {"prompt": "x" * 3_000_000}))[0]
    assert reply.status in (200, 400)


# --- the checks themselves -------------------------------------------------------------------------------------------

GOOD = {"content-type": "application/json", "x-request-id": "r"}
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (500, GOOD, b"{}"),
        (503, GOOD, b"{}"),
        (429, GOOD, b"{}"),
        (302, GOOD, b"{}"),
        (400, GOOD, b'{"error": {"message": "m", "type": "t", "param": null}}'),
        (400, GOOD, b'{"error": {"message": "at 0x7f3a00112233", "type": "t", "param": null, "code": "c"}}'),
        (400, GOOD, b'{"error": {"message": "in chat.py\'", "type": "t", "param": null, "code": "c", "x": 1}}'),
        (400, {}, b'{"error": {"message": "m", "type": "t", "param": null, "code": "c"}}'),
        (200, GOOD, b'{"choices": [{"finish_reason": "error"}]}'),
        (200, STREAM, b'data: {"choices": []}\n\n'),
        (200, STREAM, b'data: {"error": {}}\n\ndata: [DONE]\n\n'),
    ],
)
def test_forbidden_answers_are_found(status: int, headers: dict[str, str], body: bytes) -> None:
    with pytest.raises((Finding, KeyError)):
        check_answer(Body("/v1/completions", b'{"prompt": "x"}', ""), Answer(status, headers, body))


def error_of(code: str) -> bytes:
    return b'{"error": {"message": "m", "type": "overloaded_error", "param": null, "code": "%s"}}' % code.encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "code", "may"),
    [
        ({"queue_timeout": 5e-324}, "queue_timeout", True),
        ({"queue_timeout": 4096}, "queue_timeout", False),
        ({"queue_timeout": None}, "queue_timeout", False),
        ({"queue_timeout": 1e-9}, "deadline_exceeded", False),
        ({"queue_timeout": 1e-9}, "engine_unavailable", False),
        ({"deadline_ms": 1}, "deadline_exceeded", True),
        ({"ttft_ms": 0.5}, "deadline_exceeded", True),
        ({"ttft_ms": 0.5}, "queue_timeout", False),
        ({"tpot_ms": 0.5}, "deadline_exceeded", False),
        ({}, "deadline_exceeded", False),
    ],
)
def test_timeouts_are_accepted_only_for_requests_that_ask_for_them(
    asked: dict[str, Any], code: str, may: bool, stream: bool
) -> None:
    body = Body("/v1/completions", json.dumps({"prompt": "x"} | asked).encode(), "")
    given = b'data: {"choices": []}\n\ndata: ' + error_of(code) + b"\n\n"
    answer = Answer(200, STREAM, given) if stream else Answer(503, GOOD, error_of(code))
    with contextlib.nullcontext() if may else pytest.raises(Finding):
        check_answer(body, answer)


@pytest.mark.parametrize(
    ("asked", "message", "may"),
    [
        ({"ttft_ms": 1.05}, "the request could not be answered by its deadline", True),
        ({"queue_timeout": 0.001}, "the request was not started within its queue_timeout", True),
        ({}, "the request could not be answered by its deadline", False),
        ({"ttft_ms": 1.05}, "the engine is gone", False),
    ],
)
def test_errors_without_a_code_say_it_in_words(asked: dict[str, Any], message: str, may: bool) -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": message}}
    assert may_give_up(asked, json.dumps(error).encode()) is may


def test_an_answer_to_what_the_document_forbids_is_found() -> None:
    answer = Answer(200, GOOD, b'{"choices": []}')
    check_answer(Body("/v1/completions", b'{"prompt": "x", "n": 16}', ""), answer)
    with pytest.raises(Finding, match="document"):
        check_answer(Body("/v1/completions", b'{"prompt": "x", "n": 17}', ""), answer)


def test_inputs_depend_on_the_seed_only() -> None:
    for index in range(200):
        first, again = (fuzzing.make_input(3, index) for _ in range(2))
        assert vars(first) == vars(again)


def test_the_servers_processes_stay_on_this_machine(server: ServerProcess) -> None:
    for pid in (server.pid, *server.children()):
        assert GUARDED.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=0.1)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": GUARDED}, capture_output=True)
    assert b"OutboundConnection" in done.stderr
    assert get(server, "/health")[0] == 200
