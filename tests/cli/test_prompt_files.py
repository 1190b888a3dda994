"""Forms of files of prompts, and what becomes of their keys."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.cli.prompt_files import Job, read_prompts_file
from chairlift.errors import ConfigError

HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f(x):\n",
    "entry_point": "f",
    "canonical_solution": "    return x\n",
    "test": "def check(candidate):\n    assert candidate(1) == 1\n",
}
GSM8K = {"question": "How many?", "answer": "#### 3"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "reference": ["a", "b"]}


def read(path: Path, content: Any, field: str | None = None) -> list[Job]:
    path.write_bytes(content if isinstance(content, bytes) else (json.dumps(content) + "\n").encode())
    return read_prompts_file(str(path), field)


def test_human_eval_keeps_its_keys_also_compressed(tmp_path: Path) -> None:
    (job,) = read(tmp_path / "h.jsonl", HUMAN_EVAL)
    assert (job.prompt, job.fields, job.error) == (HUMAN_EVAL["prompt"], {}, None)
    assert job.copied == {key: value for key, value in HUMAN_EVAL.items() if key != "prompt"}
    assert read(tmp_path / "h.jsonl.gz", gzip.compress(json.dumps(HUMAN_EVAL).encode())) == [job]
    with pytest.raises(ConfigError, match=r"cannot be decompressed .*; copy it again"):
        read(tmp_path / "cut.gz", gzip.compress(b"{}" * 999)[:-9])


def test_the_prompt_may_have_another_key(tmp_path: Path) -> None:
    (job,) = read(tmp_path / "g.jsonl", GSM8K | {"max_tokens": 3, "seeds": 1}, "question")
    assert (job.prompt, job.copied, job.fields) == ("How many?", {"answer": "#### 3", "seeds": 1}, {"max_tokens": 3})
    (job,) = read(tmp_path / "g.jsonl", GSM8K)
    assert job.error is not None
    assert job.error.endswith("or name the key with the prompt: --prompt-field NAME, of question, answer")
    (job,) = read(tmp_path / "g.jsonl", GSM8K, "text")
    assert job.error == "must be an object with 'text', which --prompt-field names"
    (job,) = read(tmp_path / "g.jsonl", {"chat": [{"role": "user", "content": "Hi"}]}, "chat")
    assert job.is_chat


def test_turns_of_mt_bench_follow_each_other(tmp_path: Path) -> None:
    (job,) = read(tmp_path / "m.jsonl", MT_BENCH)
    assert (job.prompt, job.turns, job.is_chat) == ([{"role": "user", "content": "One."}], ["Two."], True)
    assert job.copied == MT_BENCH
    for turns in ([], ["a", 1], "a", ["a", ""]):
        assert "turns must be a list of texts" in str(read(tmp_path / "m.jsonl", {"turns": turns})[0].error)


def test_lines_of_openai_batches_become_jobs(tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5}
    body |= {"max_completion_tokens": 7, "logprobs": True, "top_logprobs": 2}
    line = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (job,) = read(tmp_path / "b.jsonl", line)
    assert (job.id, job.prompt, job.is_chat, job.error) == ("r-1", body["messages"], True, None)
    assert job.fields == {"temperature": 0.5, "max_tokens": 7, "logprobs": 2}
    assert job.copied == {"method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o"}}
    (job,) = read(tmp_path / "b.jsonl", {"url": "/v1/completions", "body": {"prompt": "Hi", "logprobs": 1}})
    assert (job.prompt, job.fields, job.is_chat) == ("Hi", {"logprobs": 1}, False)
    texts = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "o"}]
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Ho"}]
    for given in ("Ho", [said[1]], [{"type": "message", "role": "user", "content": texts}]):
        body_here = {"input": given, "instructions": "Be kind.", "max_output_tokens": 7, "store": True}
        (job,) = read(tmp_path / "b.jsonl", {"url": "/v1/responses", "body": body_here})
        assert (job.prompt, job.fields, job.is_chat, job.error) == (said, {"max_tokens": 7}, True, None)
    for items in ([], [{"type": "function_call_output", "output": "3"}], [{"role": "user", "content": [{"x": 1}]}]):
        (job,) = read(tmp_path / "b.jsonl", {"url": "/v1/responses", "body": {"input": items}})
        assert job.error == "body.input has other items than texts; send the file to a server's /v1/batches"
    (job,) = read(tmp_path / "b.jsonl", line | {"url": "/v1/embeddings"})
    assert "or /v1/completions or /v1/responses, got '/v1/embeddings'" in str(job.error)
    (job,) = read(tmp_path / "b.jsonl", line | {"body": body | {"tools": []}})
    assert job.error == "body.tools is not read here; send the file to a server's /v1/batches"


def test_plain_text_has_a_prompt_per_line(tmp_path: Path) -> None:
    jobs = read(tmp_path / "p.txt", b"\xef\xbb\xbfOne\r\n\nTwo \xff\nThree\n")
    assert [(job.place, job.prompt) for job in jobs] == [
        ("line 1", "One"),
        ("line 3", "Two \ufffd"),
        ("line 4", "Three"),
    ]
    assert [job.error is None for job in jobs] == [True, False, True]
    (job,) = read(tmp_path / "p.jsonl", b"One\n")
    assert "not valid JSON" in str(job.error)


def test_arrays_and_parquet_rows_become_jobs(tmp_path: Path) -> None:
    jobs = read(tmp_path / "a.json", json.dumps([HUMAN_EVAL, 3, {"prompt": "x"}], indent=1).encode())
    assert [job.place for job in jobs] == ["record 1", "record 2", "record 3"]
    assert [job.error is None for job in jobs] == [True, False, True]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([GSM8K, GSM8K])
    parquet.write_table(table, tmp_path / "g.parquet")
    jobs = read_prompts_file(str(tmp_path / "g.parquet"), "question")
    assert [(job.prompt, job.copied) for job in jobs] == [("How many?", {"answer": "#### 3"})] * 2


@pytest.mark.parametrize("key", ["temprature", "max_token", "use_beam_search"])
def test_misspelt_parameters_are_not_kept_but_told(tmp_path: Path, key: str) -> None:
    (job,) = read(tmp_path / "p.jsonl", {"prompt": "Hi", key: 1, "note": "mine"})
    assert (job.fields, job.copied) == ({key: 1}, {"note": "mine"})
