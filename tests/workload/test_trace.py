from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift.workload.arrivals import Gamma
from chairlift.workload.lengths import Workload
from chairlift.workload.trace import (
    PREFIX_BLOCK,
    WORKLOADS,
    TracedRequest,
    draw_trace,
    prompt_token_ids,
    read_trace,
    write_trace,
)

REQUESTS = [
    TracedRequest(arrival=0.0, prompt_tokens=6755, output_tokens=500, prefix_ids=tuple(range(14))),
    TracedRequest(arrival=0.25, prompt_tokens=10, output_tokens=1, tenant="a", priority=-3, service_tier="flex"),
    TracedRequest(arrival=3.0, prompt_tokens=1, output_tokens=7, ttft_ms=200.0, tpot_ms=50, deadline_ms=9e3),
]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, REQUESTS)
    assert read_trace(path) == REQUESTS
    assert set(json.loads(path.read_text().splitlines()[1])) == {
        "timestamp",
        "input_length",
        "output_length",
        "tenant",
        "priority",
        "service_tier",
    }


def test_reads_mooncake_in_order_of_arrival(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47], "other": 1}',
        "",
        '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": []}',
    ]
    first, second = read_trace(written(tmp_path / "t.jsonl", "\n".join(lines)))
    assert (first.arrival, first.prompt_tokens, first.output_tokens, first.prefix_ids) == (0, 6758, 500, ())
    assert (second.arrival, second.prefix_ids) == (pytest.approx(27.482), (46, 47))


def test_reads_burstgpt_without_what_failed(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45.5,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
    )
    requests = read_trace(written(tmp_path / "t.csv", text))
    assert [(each.arrival, each.prompt_tokens, each.output_tokens) for each in requests] == [
        (5, 472, 18),
        (118, 417, 276),
    ]


GOOD: dict[str, Any] = {"timestamp": 1, "input_length": 2, "output_length": 3}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 of .* is not valid JSON"),
        ("[1]", "line 2 of .* must be a JSON object"),
        (json.dumps({"timestamp": 1, "input_length": 2}), "line 2 of .* has no 'output_length'"),
        (json.dumps(GOOD | {"timestamp": -1}), "line 2 of .*: timestamp must be a number from 0"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}', "line 2 of .*: timestamp must be"),
        (json.dumps(GOOD | {"timestamp": "now"}), "line 2 of .*: timestamp must be"),
        (json.dumps(GOOD | {"input_length": 0}), "line 2 of .*: input_length must be a whole number from 1"),
        (json.dumps(GOOD | {"output_length": 1.5}), "line 2 of .*: output_length must be a whole number"),
        (json.dumps(GOOD | {"output_length": True}), "line 2 of .*: output_length must be a whole number"),
        (json.dumps(GOOD | {"hash_ids": 3}), "line 2 of .*: hash_ids must be a list"),
        (json.dumps(GOOD | {"hash_ids": [-3]}), "line 2 of .*: a hash id must be"),
        (json.dumps(GOOD | {"hash_ids": [1, 2]}), "line 2 of .*: input_length is 2, which is 1 blocks of 512, but"),
        (json.dumps(GOOD | {"tenant": 7}), "line 2 of .*: tenant must be text"),
        (json.dumps(GOOD | {"ttft_ms": -7}), "line 2 of .*: ttft_ms must be"),
        (json.dumps(GOOD | {"priority": "high"}), "line 2 of .*: priority must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_trace(written(tmp_path / "t.jsonl", json.dumps(GOOD) + "\n" + line + "\n"))


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.csv", "Timestamp,Request tokens\n1,2\n", "line 2 of .* has no 'Response tokens'"),
        (
            "t.csv",
            "Timestamp,Request tokens,Response tokens\n1,2,3\n1,x,3\n",
            "line 3 of .*: Request tokens must be a number",
        ),
        ("t.jsonl", "\n", "has no requests"),
        ("t.txt", "", "jsonl file in Mooncake's format"),
        ("t.jsonl", None, "cannot read the trace"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_trace(tmp_path / name)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize("vocab_size", [50, 151_936, 2**31 - 1])
def test_equal_prefix_ids_are_equal_tokens_and_others_are_not(vocab_size: int) -> None:
    def prompt(index: int, length: int, *ids: int) -> list[int]:
        request = TracedRequest(arrival=0, prompt_tokens=length, output_tokens=1, prefix_ids=ids)
        tokens = prompt_token_ids(request, index, vocab_size)
        assert len(tokens) == length
        assert 10 <= min(tokens) <= max(tokens) < vocab_size
        return tokens

    one, other = prompt(0, 1500, 7, 8), prompt(1, 1300, 7, 9)
    assert one[:PREFIX_BLOCK] == other[:PREFIX_BLOCK]
    assert one[PREFIX_BLOCK : 2 * PREFIX_BLOCK] != other[PREFIX_BLOCK : 2 * PREFIX_BLOCK]
    assert one[2 * PREFIX_BLOCK :][:16] != other[2 * PREFIX_BLOCK :][:16]
    assert prompt(0, 700, 7)[:512] == prompt(1, 600, 7)[:512]
    assert prompt(3, 100, 5) == prompt(9, 512, 5)[:100]
    own = [tuple(prompt(index, 16)) for index in range(500)] + [tuple(prompt(0, 16, index)) for index in range(500)]
    assert len(set(own)) == len(own)


def test_prompts_need_ids() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 11"):
        prompt_token_ids(REQUESTS[1], 0, 11)


def test_drawn_traces() -> None:
    chat = draw_trace("chat", Gamma(2.0), 50, seed=3)
    lengths = [(len(prompt), output) for prompt, output in Workload(count=50, seed=3).requests()]
    assert [(each.prompt_tokens, each.output_tokens) for each in chat] == lengths
    assert [each.arrival for each in chat] == Gamma(2.0).times(50, 3)
    assert {each.prefix_ids for each in draw_trace("assistant", count=5)} == {(0, 1)}
    assert min(each.prompt_tokens for each in draw_trace("assistant", count=50)) > 1024
    for name in WORKLOADS:
        assert draw_trace(name, count=20) == draw_trace(name, count=20)
    with pytest.raises(ConfigError, match="chat, assistant"):
        draw_trace("chats")
