from __future__ import annotations

import gzip
import importlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.arrivals import AllAtOnce, Constant
from chairlift_lab.workload.columns import parse_columns
from chairlift_lab.workload.formats import load_texts, load_trace, read_trace, write_trace

REQUESTS = [
    TracedRequest(arrival=0.0, prompt_tokens=6755, output_tokens=500, prefix_ids=tuple(range(14))),
    TracedRequest(arrival=0.25, prompt_tokens=10, output_tokens=1, tenant="a", priority=-3, service_tier="flex"),
    TracedRequest(arrival=3.0, prompt_tokens=1, output_tokens=7, ttft_ms=200.0, tpot_ms=50, deadline_ms=9e3),
    TracedRequest(arrival=3.0, prompt_tokens=40, output_tokens=7, prefix_ids=(2**62, 1), prefix_block=32, session="s"),
    TracedRequest(arrival=4.5, prompt_tokens=50, output_tokens=7, session="s", turn=3, cancel_ms=0.0, gap_ms=0.5),
]
GOOD: dict[str, Any] = {"timestamp": 1, "input_length": 2, "output_length": 3}
MAPPED = {"time": "when", "input": "in", "output": "out"}


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def shape(requests: list[TracedRequest]) -> list[tuple[float, int, int]]:
    return [(round(each.arrival, 6), each.prompt_tokens, each.output_tokens) for each in requests]


# --- ours, and Mooncake's --------------------------------------------------------------------------------------------


def test_a_trace_is_equal_after_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, REQUESTS)
    assert read_trace(path) == REQUESTS
    second = json.loads(path.read_text().splitlines()[1])
    assert set(second) == {"timestamp", "input_length", "output_length", "tenant", "priority", "service_tier"}


LIMITS = st.none() | st.floats(0, 1e12)


@st.composite
def requests(draw: st.DrawFn) -> list[TracedRequest]:
    gaps = draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
    arrival, made = -gaps[0], []
    for place, gap in enumerate(gaps):
        arrival += gap
        block, prompt = draw(st.integers(16, 600)), draw(st.integers(1, 2000))
        ids = draw(st.lists(st.integers(0, 2**62), max_size=-(-prompt // block)))
        session = draw(st.sampled_from(["", "a", "b ü\n"]))
        made.append(
            TracedRequest(
                arrival=round(arrival, 6),
                prompt_tokens=prompt,
                output_tokens=draw(st.integers(1, 1 << 24)),
                prefix_ids=tuple(ids),
                prefix_block=block,
                session=session,
                turn=place if session else 0,
                cancel_ms=draw(LIMITS),
                tool=draw(st.sampled_from(["", "search"])),
                predicted_tokens=draw(st.none() | st.integers(1, 1 << 24)),
                tenant=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
                priority=draw(st.integers(-(2**31), 2**31)),
                service_tier=draw(st.sampled_from(["", "flex"])),
                ttft_ms=draw(LIMITS),
                tpot_ms=draw(LIMITS),
                deadline_ms=draw(LIMITS),
            )
        )
    return made


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(requests())
def test_any_trace_is_equal_after_writing_and_reading(tmp_path: Path, made: list[TracedRequest]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, made)
    assert read_trace(path) == made


def test_an_existing_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, REQUESTS)
    before = path.read_bytes()

    def until_the_disk_is_full() -> Iterator[TracedRequest]:
        yield REQUESTS[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_trace(path, until_the_disk_is_full())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_a_mooncake_trace_is_read_and_begins_at_zero(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 27482, "input_length": 6758, "output_length": 500, "hash_ids": [], "other": 1}',
        "",
        '{"timestamp": 30482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}',
    ]
    first, second = read_trace(written(tmp_path / "t.jsonl", "\r\n".join(lines)))
    assert (first.arrival, first.prompt_tokens, first.output_tokens, first.prefix_ids) == (0, 6758, 500, ())
    assert (second.arrival, second.prefix_ids, second.prefix_block) == (pytest.approx(3.0), (46, 47), 512)


def test_ours_is_told_from_mooncakes(tmp_path: Path) -> None:
    theirs = written(tmp_path / "t.jsonl", json.dumps(GOOD | {"hash_ids": [0]}))
    assert load_trace(theirs).format == "mooncake"
    copied = tmp_path / "ours.jsonl"
    write_trace(copied, read_trace(theirs))
    assert load_trace(copied).format == "chairlift"
    for line in (GOOD, GOOD | {"hash_ids": [0], "tenant": "a"}, GOOD | {"hash_ids": [0], "block_size": 512}):
        assert load_trace(written(tmp_path / "t.jsonl", json.dumps(line))).format == "chairlift"


def test_a_request_may_have_no_hash_ids(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path / "t.jsonl", json.dumps(GOOD | {"hash_ids": None})))
    assert request.prefix_ids == ()


def test_sort_takes_lines_in_any_order_and_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(GOOD | {"timestamp": time}) + "\n" for time in (1000, 5500, 2000)))
    with pytest.raises(ConfigError, match=r"line 3 of .* is 3\.500 s earlier than the line above it; --sort"):
        read_trace(path)
    assert [each.arrival for each in read_trace(path, sort=True)] == [0.0, 1.0, 4.5]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 of .* is not valid JSON"),
        ("[" * 100_000, "line 2 of .* is not valid JSON"),
        ("[1]", "line 2 of .* must be a JSON object"),
        (json.dumps({"timestamp": 1, "input_length": 2}), "line 2 of .* has no 'output_length'"),
        (json.dumps(GOOD | {"timestamp": -1}), "line 2 of .*: timestamp must be a number from 0"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}', "line 2 of .*: timestamp must be"),
        (json.dumps(GOOD | {"timestamp": "now"}), "line 2 of .*: timestamp must be"),
        (json.dumps(GOOD | {"input_length": 0}), "line 2 of .*: input_length must be a whole number from 1"),
        (json.dumps(GOOD | {"input_length": -5}), "line 2 of .*: input_length must be a whole number from 1.*got -5"),
        (json.dumps(GOOD | {"output_length": 1.5}), "line 2 of .*: output_length must be a whole number"),
        (json.dumps(GOOD | {"hash_ids": 3}), "line 2 of .*: hash_ids must be a list"),
        (json.dumps(GOOD | {"hash_ids": [1, 2]}), "line 2 of .*: input_length is 2, which is 1 blocks of 512, but"),
        (json.dumps(GOOD | {"block_size": "big"}), "line 2 of .*: block_size must be"),
        (json.dumps(GOOD | {"tenant": 7}), "line 2 of .*: tenant must be text"),
        (json.dumps(GOOD | {"session": ["a"]}), "line 2 of .*: session must be text"),
        (json.dumps(GOOD | {"ttft_ms": -7}), "line 2 of .*: ttft_ms must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_trace(written(tmp_path / "t.jsonl", json.dumps(GOOD) + "\n" + line + "\n"))


def test_turns_of_a_session_are_in_order(tmp_path: Path) -> None:
    lines = [GOOD | {"session": "x", "turn": turn} for turn in (1, 4, 4)]
    path = written(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match=r"line 3 of .*: turn 4 of session 'x' comes after turn 4"):
        read_trace(path)


def test_bailian_has_seconds_and_chats_by_their_last_message(tmp_path: Path) -> None:
    base = {"type": "text", "turn": 1, "input_length": 40, "output_length": 3}
    lines = [
        base | {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.5, "hash_ids": [1, 2, 3]},
        base | {"chat_id": 8, "parent_chat_id": 2, "timestamp": 62.0, "hash_ids": [4, 5]},
        base | {"chat_id": 9, "parent_chat_id": 7, "timestamp": 63.0, "hash_ids": [1, 2, 6], "turn": 2},
        base | {"chat_id": 10, "parent_chat_id": 9, "timestamp": 63.0, "hash_ids": [1, 2, 6], "turn": 3},
    ]
    loaded = load_trace(written(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines))))
    assert loaded.format == "bailian"
    assert [each.arrival for each in loaded.requests] == [0.0, 0.5, 1.5, 1.5]
    assert [(each.session, each.turn) for each in loaded.requests] == [("7", 0), ("8", 0), ("7", 1), ("7", 2)]
    assert {each.prefix_block for each in loaded.requests} == {16}
    assert loaded.requests[2].prefix_ids == (1, 2, 6)
    with pytest.raises(ConfigError, match=r"line 1 of .*: chat_id and parent_chat_id must be"):
        read_trace(written(tmp_path / "t.jsonl", json.dumps(lines[0] | {"chat_id": None})))


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times",
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.4799600"),
        ("2024-05-10 23:59:59.500000+00:00", "2024-05-11 00:00:00+00:00"),
    ],
)
def test_an_azure_trace_is_read(tmp_path: Path, times: tuple[str, str]) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n{times[0]},4808,10\r\n{times[1]},3180,8"
    loaded = load_trace(written(tmp_path / "t.csv", text))
    assert (loaded.format, loaded.notes) == ("azure", [])
    assert shape(loaded.requests) == [(0.0, 4808, 10), (0.5, 3180, 8)]


def test_a_burstgpt_trace_is_read_without_failed_requests(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45.5,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
    )
    loaded = load_trace(written(tmp_path / "t.csv", text))
    assert loaded.format == "burstgpt"
    assert shape(loaded.requests) == [(0, 472, 18), (113, 417, 276)]
    assert loaded.notes == ["requests without a prompt or an answer, left out: 1"]
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,c7,1.5,ChatGPT,472,18,490,Conversation log\n6,,2,ChatGPT,10,5,15,API log\n9,c7,1,GPT-4,5,6,11,API log\n"
    )
    requests = read_trace(written(tmp_path / "t.csv", text))
    assert [(each.session, each.turn) for each in requests] == [("c7", 0), ("", 0), ("c7", 1)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "who,when,in,out\nx,1700000000,5,6\ny,1700000001.5,7,8.0\n"),
        ("t.csv", '"who","when","in","out"\n"x,y",1700000000000,"5",6\ny,1700000001500,7,8\n'),
        ("t.tsv", "who\twhen\tin\tout\nx\t2024-01-01T00:00:00Z\t5\t6\ny\t2024-01-01T01:00:01.5+01:00\t7\t8\n"),
        ("t.csv", "when;in;out\n0;5;6\n1.5;7;8\n"),
        ("t.log", '{"when": 3, "in": 5, "out": 6}\n\n{"when": 4.5, "in": "7", "out": 8.0}\n'),
        ("t.log", "\ufeffwhen,in,out\n10/Oct/2023:13:55:36 +0000,5,6\n[10/Oct/2023:15:55:37 +0200],7,8\n"),
    ],
)
def test_columns_are_found_by_name(tmp_path: Path, name: str, text: str) -> None:
    loaded = load_trace(written(tmp_path / name, text), columns=MAPPED)
    assert loaded.format == "columns"
    assert shape(loaded.requests) in ([(0, 5, 6), (1.5, 7, 8)], [(0, 5, 6), (1, 7, 8)])
    assert loaded.requests[1].arrival == (1.0 if "Oct" in text else 1.5)


@pytest.mark.parametrize("head", ["", "time,in,out\n"])
def test_columns_are_found_by_place_with_and_without_names(tmp_path: Path, head: str) -> None:
    path = written(tmp_path / "t.csv", head + "0,5,6\n2,7,8\n")
    assert shape(read_trace(path, columns=parse_columns("time=1,input=2,output=3"))) == [(0, 5, 6), (2, 7, 8)]


def test_optional_columns_are_read(tmp_path: Path) -> None:
    columns = parse_columns(
        "time=t,input=usage.in,output=usage.out,tenant=user,priority=p,session=s,cancel_ms=c,ttft_ms=f"
    )
    lines = [
        {"t": 0, "usage": {"in": 5, "out": 6}, "user": "a", "p": -1, "s": 7, "c": 12.5, "f": None},
        {"t": 1, "usage": {"in": 5, "out": 6}, "user": "", "s": 7, "usage.in": 9},
    ]
    first, second = read_trace(written(tmp_path / "t.log", "\n".join(map(json.dumps, lines))), columns=columns)
    assert (first.tenant, first.priority, first.session, first.turn, first.cancel_ms, first.ttft_ms) == (
        "a",
        -1,
        "7",
        0,
        12.5,
        None,
    )
    assert (second.tenant, second.turn, second.prompt_tokens) == ("", 1, 9)


ACCESS = (
    '10.0.0.1 - - [10/Oct/2023:13:55:36 +0000] "POST /v1/completions HTTP/1.1" 200 in=12 out=34\n'
    "something else\n"
    '10.0.0.2 - bob [10/Oct/2023:13:55:38 +0000] "POST /v1/chat/completions HTTP/1.1" 200 in=5 out=6\n'
    '10.0.0.2 - bob [10/Oct/2023:13:55:39 +0000] "POST /v1/chat/completions HTTP/1.1" 500 in=5 out=0\n'
)
PATTERN = r"\[(?P<time>[^]]+)\].* in=(?P<input>-?\d+) out=(?P<output>-?\d+)"


def test_a_pattern_reads_text_logs(tmp_path: Path) -> None:
    text = "2026-01-01 10:00:00 in=5 out=6\r\n2026-01-01 10:00:01 in=7 out=8\r\n"
    pattern = r"^(?P<time>\S+ \S+) in=(?P<input>\d+) out=(?P<output>\d+)$"
    assert shape(read_trace(written(tmp_path / "crlf.log", text), pattern=pattern)) == [(0, 5, 6), (1, 7, 8)]
    loaded = load_trace(written(tmp_path / "access.log", ACCESS), pattern=PATTERN)
    assert loaded.format == "pattern"
    assert shape(loaded.requests) == [(0, 12, 34), (2, 5, 6)]
    assert loaded.notes == [
        "lines that do not match the pattern, left out: 1",
        "requests without a prompt or an answer, left out: 1",
    ]
    text = "INFO 02-29 23:59:59 [logger.py:43] prompt 12 answer 34\nINFO 03-01 00:00:01,250 [x] prompt 5 answer 6\n"
    pattern = r"INFO (?P<time>\S+ \S+) .*prompt (?P<input>\d+) answer (?P<output>\d+)"
    assert shape(read_trace(written(tmp_path / "vllm.log", text), pattern=pattern)) == [(0, 12, 34), (2.25, 5, 6)]


@pytest.mark.parametrize(
    ("text", "how", "complaint"),
    [
        ("Timestamp,Request tokens\n1,2\n", {}, "line 1 of .* has no column 'Response tokens'; it has Timestamp, Req"),
        (
            "Timestamp,Request tokens,Response tokens\n1,2,3\n1,x,3\n",
            {},
            "line 3 of .*: Request tokens must be a number, got 'x'",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", {}, "line 2 of .*: ContextTokens must be 0 or more"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,,3\n", {}, "line 2 of .*: ContextTokens must be a number, got ''"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", {}, "line 2 of .* has no 'GeneratedTokens': it ends before"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n",
            {},
            r"line 2 of .*: TIMESTAMP must be a time \(seconds, epoch seconds or ms, ISO 8601.*got 'yesterday'",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2,2,3\n1,2,3\n",
            {},
            "line 3 of .* is 1.000 s earlier than the line",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,2.5\n", {}, "line 2 of .*: GeneratedTokens must be a whole num"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,0\n", {}, "has no requests; requests without a prompt or"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", {}, "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n-1,2,3\n", {}, "line 2 of .*: TIMESTAMP must be a time"),
        ("when,in\n1,2\n", {"columns": MAPPED}, "line 1 of .* has no column 'out'; it has when, in"),
        ("when,in\n1,2\n", {"columns": MAPPED | {"output": "0"}}, "line 1 of .* has no column '0'"),
        ('{"when": 1, "in": 2}', {"columns": MAPPED}, "line 1 of .* has no 'out'; it has when, in"),
        ('{"when": 1, "in": [2], "out": 3}', {"columns": MAPPED}, "line 1 of .*: in must be a whole number"),
        ('{"when": 1, "in": true, "out": 3}', {"columns": MAPPED}, "line 1 of .*: in must be a whole number"),
        ("a,b\n", {"columns": {"time": "a", "input": "b"}}, "columns must name time, input, output.*'output' is miss"),
        (ACCESS, {"pattern": "("}, "the pattern is not a regular expression: missing \\)"),
        (ACCESS, {"pattern": "(?P<time>x)"}, "the pattern's groups .* must name time, input, output.*'input' is miss"),
        (ACCESS, {"pattern": PATTERN.replace("in=", "IN=")}, "no line of .* matches the pattern"),
        (ACCESS.replace("in=5", "in=-5"), {"pattern": PATTERN}, "line 3 of .*: input must be 0 or more, got '-5'"),
        (ACCESS.replace("Oct/2023:13:55:38", "Okt/2023:13:55:38"), {"pattern": PATTERN}, "line 3 of .*: time must be"),
        (ACCESS, {}, "cannot tell from its first line what .* is: 10.0.0.1.*--columns"),
        (
            ACCESS,
            {"format": "nginx"},
            "sharegpt, chats, custom, openai-batch; got 'nginx'",
        ),
        (ACCESS, {"format": "azure", "pattern": PATTERN}, "format, columns and pattern are three ways"),
        (
            json.dumps(GOOD),
            {"arrivals": Constant(1.0)},
            "has times and lengths; arrivals and a tokenizer are only for files",
        ),
        ("", {}, "is empty"),
        ("\n \n", {}, "is empty"),
        ("", {"columns": MAPPED}, "has no requests"),
        ("", {"pattern": PATTERN}, "has no requests"),
        (b"\xff\xfe", {}, "line 1 of .* is not text in UTF-8"),
        (json.dumps(GOOD).encode() + b"\n\n{\xc3\x28}\n", {}, "line 3 of .* is not text in UTF-8"),
        ('{"timestamp": 1' + " " * (1 << 24), {}, "line 1 of .* has more than 16,777,216 characters"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "9" * 200_000,
            {},
            "line 2 of .* is not a row of columns: field",
        ),
        (None, {}, "cannot read the trace .*No such file"),
    ],
)
def test_bad_files_are_refused_with_the_reason(
    tmp_path: Path, text: str | bytes | None, how: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "t.txt"
    if text is not None:
        written(path, text)
    with pytest.raises(ConfigError, match=complaint):
        read_trace(path, **how)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "time",
        "time=",
        "time=1,time=2",
        "time=1",
        "time=1,input=2,output=3,time=4",
        "time=1,input=2,output=3,size=4",
    ],
)
def test_columns_are_fields_and_columns(text: str) -> None:
    with pytest.raises(ConfigError, match="columns must"):
        parse_columns(text)


def test_a_pipe_can_be_read_and_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_trace, args=(pipe, REQUESTS))
    writer.start()
    assert read_trace(pipe) == REQUESTS
    writer.join()


@given(st.binary(max_size=200))
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
def test_any_bytes_are_a_trace_or_one_clear_error(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path / "t", data)
    for how in ({}, {"columns": MAPPED}, {"pattern": PATTERN}, {"format": "sharegpt"}):
        with pytest.raises(ConfigError):
            read_trace(path, **how)  # type: ignore[arg-type]


# --- ShareGPT --------------------------------------------------------------------------------------------------------


def said(*texts: str, first: str = "human") -> list[dict[str, str]]:
    names = ["human", "gpt"] if first == "human" else ["gpt", "human"]
    return [{"from": names[place % 2], "value": text} for place, text in enumerate(texts)]


CONVERSATIONS = [
    {"id": "a", "conversations": said("x" * 40, "y" * 80, "z" * 20, "w" * 8)},
    {"id": "b", "conversations": said("lost", "x" * 12, "y" * 4, first="gpt")},
    {"id": "c", "conversations": said("no answer")},
    {"id": "d", "conversations": [{"from": "system", "value": "s" * 400}, *said("q" * 4, "a" * 4, "q" * 4, "a" * 4)]},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_turns_are_sessions(tmp_path: Path, indent: int | None) -> None:
    loaded = load_trace(written(tmp_path / "s.json", json.dumps(CONVERSATIONS, indent=indent)), arrivals=Constant(2.0))
    assert loaded.format == "sharegpt"
    assert [(each.session, each.turn, each.arrival) for each in loaded.requests] == [
        ("0", 0, 0.0),
        ("0", 1, 0.0),
        ("", 0, 1.0),
        ("2", 0, 1.5),
        ("2", 1, 1.5),
    ]
    assert [(each.prompt_tokens, each.output_tokens) for each in loaded.requests] == [
        (10, 20),
        (35, 2),
        (3, 1),
        (101, 1),
        (103, 1),
    ]
    one, other = loaded.requests[:2]
    assert other.prefix_ids[: len(one.prefix_ids)] == one.prefix_ids
    assert not set(one.prefix_ids) & set(loaded.requests[3].prefix_ids)
    assert loaded.notes == [
        "conversations without a question and its answer, left out: 1",
        "lengths are estimated, at 4 characters per token; a tokenizer would count them",
    ]
    counted = load_trace(tmp_path / "s.json", tokenizer=len)
    assert (counted.requests[1].prompt_tokens, counted.requests[1].output_tokens) == (140, 8)
    assert len(counted.notes) == 1
    assert {each.arrival for each in counted.requests} == {0.0}


def test_sharegpt_is_read_piece_by_piece(tmp_path: Path) -> None:
    """Conversations that are cut where one piece of the file ends and the next begins."""
    many = [{"conversations": said("x" * 4 * (number % 97 + 1), "y" * 400_000)} for number in range(9)]
    for text in (json.dumps(many), json.dumps(many, indent=1)):
        requests = read_trace(written(tmp_path / "s.json", text))
        assert [(each.prompt_tokens, each.output_tokens) for each in requests] == [(n + 1, 100_000) for n in range(9)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[\n{}]", "the conversation on line 2 of .* has no list of 'conversations' or 'messages'"),
        ('[\n\n{"conversations": [3]}]', "a message of the conversation on line 3 of .* lacks 'from' or 'value'"),
        ('[\n{"conversations": []},\n{"conversations": [}', "the conversation on line 3 of .* is not valid JSON"),
        ('[\n{"conversations": []},\n', "the conversation on line 3 of .* is not valid JSON"),
        ("[\n]", "has no requests"),
        ('[{"conversations": []}]', "has no requests; conversations without a quest"),
    ],
)
def test_bad_conversations_are_refused_with_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_trace(written(tmp_path / "s.json", text), format="sharegpt")
    with pytest.raises(ConfigError, match=r"line 1 of .* is not the beginning of a JSON list"):
        read_trace(written(tmp_path / "s.json", "x" + text), format="sharegpt")


@pytest.mark.nightly
def test_a_million_lines_are_read_in_seconds(tmp_path: Path) -> None:
    import time

    path = tmp_path / "t.csv"
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for number in range(1_000_000):
            file.write(f"2024-05-10 {number // 3600 % 24:02}:00:00.{number % 3600:06},120,30\n")
    begin = time.process_time()
    assert len(read_trace(path, sort=True)) == 1_000_000
    assert time.process_time() - begin < 30


# --- other data sets of texts, and what they are kept in -------------------------------------------------------------


def json_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


ASKED = [{"role": "system", "content": "s" * 40}, {"role": "user", "content": "q" * 8}]
BATCH = [
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED, "max_tokens": 7}},
    {"custom_id": "2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p" * 12}},
    {"custom_id": "3", "method": "POST", "url": "/v1/embeddings", "body": {"input": "e"}},
]


@pytest.mark.parametrize(
    ("rows", "format", "lengths"),
    [
        (CONVERSATIONS, "chats", [(10, 20), (35, 2), (3, 1), (101, 1), (103, 1)]),
        ([{"prompt": "p" * 40, "output_tokens": 9}, {"prompt": "p" * 8}], "custom", [(10, 9), (2, 256)]),
        ([{"messages": [*ASKED, {"role": "assistant", "content": "a" * 20}]}], "chats", [(12, 5)]),
        ([{"messages": ASKED}], "chats", [(12, 256)]),
        (BATCH, "openai-batch", [(12, 7), (3, 256)]),
    ],
)
@pytest.mark.parametrize("kept", ["plain", "gzip", "parquet"])
def test_texts_of_every_form_are_counted_and_kept(
    tmp_path: Path, rows: list[Any], format: str, lengths: list[tuple[int, int]], kept: str
) -> None:
    path = tmp_path / "texts"
    if kept == "parquet":
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        data = json_lines(rows).encode()
        path.write_bytes(gzip.compress(data) if kept == "gzip" else data)
    loaded = load_trace(path)
    assert (loaded.format, [(each.prompt_tokens, each.output_tokens) for each in loaded.requests]) == (format, lengths)
    texts = load_texts(path, AllAtOnce())
    assert texts.requests == loaded.requests
    assert len(texts.said) == len(lengths)
    assert all(each.text or each.messages for each in texts.said)


def test_a_chat_says_all_that_was_said_before(tmp_path: Path) -> None:
    texts = load_texts(written(tmp_path / "s.jsonl", json_lines(CONVERSATIONS[:1])), AllAtOnce())
    assert [message["role"] for message in texts.said[1].messages] == ["user", "assistant", "user"]
    assert texts.said[1].messages[-1]["content"] == "z" * 20
    assert [each.turn for each in texts.requests] == [0, 1]


def test_images_are_counted_and_said(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is it" * 4}, picture, picture]
    rows = [{"messages": [{"role": "user", "content": content}]}]
    loaded = load_trace(written(tmp_path / "a.jsonl", json_lines(rows)))
    assert loaded.requests[0].prompt_tokens == 10
    assert "images in prompts: 2; their tokens are not counted in the lengths" in loaded.notes
    shared = [{"image": "a.png", "conversations": said("<image>\n" + "x" * 12, "y" * 8)}]
    assert any(
        "images in prompts: 1;" in note for note in load_trace(written(tmp_path / "b", json_lines(shared))).notes
    )


def test_tables_in_parquet_are_read(tmp_path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    rows = [{"TIMESTAMP": f"2024-05-10 00:00:0{second}", "ContextTokens": 5, "GeneratedTokens": 3} for second in (0, 2)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    loaded = load_trace(tmp_path / "a.parquet")
    assert (loaded.format, shape(loaded.requests)) == ("azure", [(0.0, 5, 3), (2.0, 5, 3)])
    parquet.write_table(arrow.Table.from_pylist([GOOD, GOOD]), tmp_path / "b.parquet")
    assert len(read_trace(tmp_path / "b.parquet")) == 2


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (gzip.compress(b"x" * 9000, mtime=0)[:30], "is damaged: it cannot be decompressed"),
        (gzip.compress(b"{}\n", mtime=0) + b"rest", "is damaged|has no 'timestamp'"),
        (b"PAR1 and no more", "is damaged"),
        (
            json_lines([{"prompt": "x", "output_tokens": 0}]).encode(),
            "line 1 of .*: output_tokens must be a whole number",
        ),
        (json_lines([{"prompt": "x"}, {"prompt": 3}]).encode(), "line 2 of .* has no text in 'prompt'"),
        (json_lines([{"messages": [{"role": "user"}]}]).encode(), "lacks 'role' or 'content'"),
        (gzip.compress(b"\n\xff\n", mtime=0), "line 2 of .* is not text in UTF-8|first line"),
    ],
    # The names of tests must be the same in every process; compressed bytes name the time they were made at.
    ids=["cut", "rest", "parquet", "no tokens", "no text", "no role", "not UTF-8"],
)
def test_damaged_data_sets_are_refused_with_the_reason(tmp_path: Path, data: bytes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_trace(written(tmp_path / "d", data))


def test_turns_that_branch_are_sessions_of_their_own(tmp_path: Path) -> None:
    chats = [(1, -1), (2, 1), (3, 1), (4, 3), (5, 2)]  # 2 and 3 both answer 1
    rows = [
        {"chat_id": name, "parent_chat_id": parent, "timestamp": place, "input_length": 16 * (place + 1)}
        | {"output_length": 4, "type": "text", "turn": 1, "hash_ids": list(range(place + 1))}
        for place, (name, parent) in enumerate(chats)
    ]
    loaded = load_trace(written(tmp_path / "b.jsonl", json_lines(rows)))
    assert loaded.format == "bailian"
    assert [(each.session, each.turn) for each in loaded.requests] == [("1", 0), ("1", 1), ("3", 1), ("3", 2), ("1", 2)]


def test_a_trace_of_lengths_has_no_texts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no texts to send: .* with --trace"):
        load_texts(written(tmp_path / "t.jsonl", json.dumps(GOOD)), AllAtOnce())
