from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return LLM(str(model_dir))


def greedy(llm: LLM, prompt: Any, max_tokens: int = 8) -> str:
    return llm.generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def chat_ids(llm: LLM, text: str) -> list[int]:
    return llm.encode_chat([{"role": "user", "content": text}])


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_a_prompt_is_answered_through_the_chat_template(chairlift: Run, model_dir: Path, llm: LLM) -> None:
    code, out, err = chairlift("generate", "Hi there", "--model", model_dir, "--max-tokens", 8)
    assert (code, err) == (0, [])
    assert "\n".join(out) == greedy(llm, chat_ids(llm, "Hi there")).replace("\r", "\n")


def test_several_answers_to_raw_prompts_are_printed_under_headers(chairlift: Run, model_dir: Path, llm: LLM) -> None:
    argv = ("generate", "Hi", "the lift", "--raw", "--n", "2", "--model", model_dir, "--max-tokens", 6)
    code, out, err = chairlift(*argv)
    assert (code, err) == (0, [])
    heads = ["> Hi (1 of 2)", "> Hi (2 of 2)", "> the lift (1 of 2)", "> the lift (2 of 2)"]
    assert [line for line in out if line.startswith("> ")] == heads
    code, one, _ = chairlift(*argv[:2], *argv[3:])
    assert ([line for line in one if line.startswith("> ")], one[-1]) == (heads[:2], "")
    code, out, _ = chairlift(*argv, "--jsonl", "--temperature", "1", "--seed", "3")
    records = [json.loads(line) for line in out]
    again = [json.loads(line) for line in chairlift(*argv, "--jsonl", "--temperature", "1", "--seed", "3")[1]]
    assert records == again
    assert records[0]["outputs"][0]["token_ids"] != records[0]["outputs"][1]["token_ids"]
    assert greedy(llm, "Hi", 6) == json.loads(chairlift(*argv, "--jsonl")[1][0])["outputs"][0]["text"]


def test_json_lines_are_answered_in_input_order(chairlift: Run, model_dir: Path, llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompts = write_lines(
        tmp_path / "in.jsonl",
        {"prompt": "a long answer", "max_tokens": 60, "id": "x", "ignore_eos": True},
        "",
        {"prompt": [5, 6, 7], "id": 2, "logprobs": 1, "prompt_logprobs": 0},
        {"messages": messages, "max_tokens": 3},
    )
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")
    argv = ("generate", "--prompts-file", prompts, "--output", output, "--model", model_dir, "--max-tokens", 5)
    refused = f"chairlift: error: --output {output} exists; give another --output, or --force to overwrite it"
    assert chairlift(*argv) == (2, [], [refused])
    assert output.read_text() == "old\n"
    assert chairlift(*argv, "--force") == (0, [], [])
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["id"] for record in records] == ["x", 2, None]
    assert [record["prompt"] for record in records] == ["a long answer", [5, 6, 7], messages]
    assert [len(record["outputs"][0]["token_ids"]) for record in records] == [60, 5, 3]
    assert [record["outputs"][0]["finish_reason"] for record in records] == ["length"] * 3
    assert (
        records[0]["outputs"][0]["text"]
        == llm.generate(
            [chat_ids(llm, "a long answer")], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        )[0]
        .outputs[0]
        .text
    )
    assert records[1]["outputs"][0]["text"] == greedy(llm, [5, 6, 7], 5)
    assert records[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "cached_tokens": 0}
    assert [entry[0]["token_id"] for entry in records[1]["outputs"][0]["logprobs"]] == records[1]["outputs"][0][
        "token_ids"
    ]
    assert records[1]["prompt_logprobs"][0] is None
    assert records[2]["outputs"][0]["text"] == greedy(llm, llm.encode_chat(messages), 3)
    assert all(record["error"] is None for record in records)


def test_bad_lines_are_named_and_the_others_answered(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    lines = [
        b'{"prompt": "fine", "max_tokens": 2}',
        b"not json",
        b'{"prompt": "\xff"}',
        b'["prompt"]',
        b'{"prompt": "x", "messages": []}',
        b'{"prompt": ""}',
        b'{"prompt": []}',
        b'{"prompt": [0, 99999], "id": "wide"}',
        b'{"prompt": [true]}',
        b'{"prompt": "x", "max_token": 3}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "max_tokens": 300}',
        b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user"}]}',
        b'{"prompt": "' + b"long " * 300 + b'"}',
        b"[" * 100000,
        b'{"prompt": "fine too", "max_tokens": 2}',
    ]
    prompts.write_bytes(b"\n".join(lines))
    code, out, err = chairlift("generate", "--prompts-file", prompts, "--model", model_dir)
    assert code == 1
    records = [json.loads(line) for line in out]
    assert [record["index"] for record in records] == list(range(len(lines)))
    good = [0, len(lines) - 1]
    assert [i for i, record in enumerate(records) if record["error"] is None] == good
    assert all(len(records[i]["outputs"][0]["token_ids"]) == 2 for i in good)
    assert [line.split(": ")[2] for line in err] == [f"line {i}" for i in range(2, len(lines))]
    assert records[7]["id"] == "wide"
    for index, words in {
        1: "not valid JSON",
        4: 'either "prompt"',
        5: "not empty",
        7: "token id 99999",
        9: "did you mean 'max_tokens'",
        10: "temperature must be at least 0.0 and at most 100.0, got nan",
        11: "lower max_tokens",
        12: "surrogate",
        13: "messages[0].content",
        14: "shorten the prompt",
    }.items():
        assert words in records[index]["error"]
        assert words in err[index - 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": ""}, "not empty"),
        ({"prompt": [99999]}, "knows ids from 0 to"),
        ({"prompt": list(range(100)) * 3}, "shorten the prompt"),
        ({"prompt": "x", "temprature": 1}, "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
    ],
)
def test_when_nothing_can_be_answered_the_exit_code_is_2(
    chairlift: Run, model_dir: Path, tmp_path: Path, line: dict[str, Any], words: str
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", line)
    code, out, err = chairlift("generate", "--prompts-file", prompts, "--model", model_dir)
    assert code == 2
    assert len(err) == 1
    assert err[0].startswith("chairlift: error: line 1: ")
    assert words in err[0]
    assert words in json.loads(out[0])["error"]


@pytest.mark.parametrize("prompt", ["", "long " * 300, "\udcff"])
def test_a_bad_argument_is_one_line_and_exit_code_2(chairlift: Run, model_dir: Path, prompt: str) -> None:
    code, out, err = chairlift("generate", prompt, "--model", model_dir)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("chairlift: error: prompt 1: ")


def test_each_line_of_standard_input_is_a_prompt(
    chairlift: Run, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("generate", "--model", model_dir, "--max-tokens", 4, "--jsonl")
    expected = [greedy(llm, chat_ids(llm, text), 4) for text in ("Hi", "früh")]
    for extra in ([], ["-"]):
        stdin(monkeypatch, "Hi\r\n\n früh\n".replace(" ", "").encode())
        code, out, err = chairlift(*argv, *extra)
        assert (code, err) == (0, [])
        assert [json.loads(line)["outputs"][0]["text"] for line in out] == expected
    stdin(monkeypatch, b'{"prompt": "Hi"}\n')
    code, out, _ = chairlift(*argv, "--prompts-file", "-")
    assert json.loads(out[0])["outputs"][0]["text"] == expected[0]
    stdin(monkeypatch, b"\xef\xbb\xbfHi")  # a byte order mark is no part of the prompt
    assert json.loads(chairlift(*argv)[1][0])["outputs"][0]["text"] == expected[0]
    stdin(monkeypatch, b"broken \xff byte\nfine\n")
    code, out, err = chairlift(*argv)
    assert code == 1
    assert "line 1: not UTF-8 text (byte 0xFF at position 7)" in err[0]
    assert json.loads(out[1])["error"] is None


def test_the_prompts_file_is_not_overwritten(chairlift: Run, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Hi"})
    (tmp_path / "link.jsonl").symlink_to(prompts)
    before = prompts.read_bytes()
    for output in (prompts, tmp_path / "link.jsonl"):
        code, out, err = chairlift("generate", "--prompts-file", prompts, "--output", output)
        assert (code, out) == (2, [])
        assert "is the prompts file" in err[0]
    assert prompts.read_bytes() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_names_the_output_file(chairlift: Run, model_dir: Path) -> None:
    code, _, err = chairlift("generate", "Hi", "--model", model_dir, "--max-tokens", 1, "--output", "/dev/full")
    assert code == 2
    assert len(err) == 1
    assert "cannot write the output file /dev/full: No space left on device" in err[0]


def test_unusable_input_is_refused_with_the_reason(
    chairlift: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    stdin(monkeypatch, b"")
    for argv, words in (
        (["Hi", "you", "--temperature", "-1", "--model", "/nowhere"], "temperature must be"),
        (["--prompts-file", tmp_path / "none.jsonl"], "cannot read the prompts file"),
        (["--prompts-file", tmp_path], "cannot read the prompts file"),
        (["--prompts-file", tmp_path / "empty.jsonl"], "holds no prompts"),
        (["--prompts-file", tmp_path / "empty.jsonl", "Hi"], "not both"),
        ([], "standard input holds no prompts"),
    ):
        code, out, err = chairlift("generate", *argv)
        assert (code, out) == (2, [])
        assert len(err) == 1
        assert words in err[0]


def test_a_model_given_as_a_prompt_is_told(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    told = "is given as a prompt, but is a model directory; give it as --model"
    assert chairlift("generate", model_dir, "Hi") == (2, [], [f"chairlift: error: {model_dir} {told} {model_dir}"])
    weights = tmp_path / "w.gguf"
    weights.write_bytes(b"GGUF")
    assert "is a GGUF file; give it as --model" in chairlift("generate", "Hi", weights)[2][0]
    weights.unlink()  # a name of nothing is a prompt, also one that is too long for a file, and here for the model
    code, out, err = chairlift("generate", "w.gguf", "x" * 300, "--model", model_dir, "--max-tokens", "1")
    assert (code, out[0], len(err)) == (1, "> w.gguf", 1)
    assert err[0].startswith("chairlift: error: prompt 2: ") and "shorten the prompt" in err[0]


def test_an_unwritable_output_is_refused_before_the_model_loads(chairlift: Run, tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "no" / "such" / "folder.jsonl"):
        code, out, err = chairlift("generate", "Hi", "--output", output, "--model", "/no/such/model")
        assert (code, out) == (2, [])
        assert len(err) == 1
        assert f"cannot write {output}" in err[0]


def test_a_model_that_does_not_load_leaves_the_output_as_it_was(chairlift: Run, tmp_path: Path) -> None:
    old, new, link = tmp_path / "old.jsonl", tmp_path / "new.jsonl", tmp_path / "link.jsonl"
    old.write_text("precious\n")
    link.symlink_to(new)
    for output in (old, new, link):
        code, _, err = chairlift("generate", "Hi", "--output", output, "--force", "--model", tmp_path / "nothing")
        assert code == 2
        assert "is not a directory" in err[0]
    assert old.read_text() == "precious\n"
    assert not new.exists()
    assert link.is_symlink()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(chairlift: Run, model_dir: Path) -> None:
    code, _, err = chairlift("generate", "Hi", "--output", "/dev/full", "--model", model_dir, "--max-tokens", 2)
    assert code == 2
    assert len(err) == 1
    assert "No space left" in err[0]


@pytest.mark.parametrize("damage", ["pickle only", "cut weights", "no config", "bad config", "bad tokenizer"])
def test_a_damaged_model_is_one_line_and_exit_code_2(
    chairlift: Run, model_dir: Path, tmp_path: Path, damage: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    weights = broken / "model.safetensors"
    if damage == "pickle only":
        weights.unlink()
        torch.save({}, broken / "pytorch_model.bin")
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no config":
        (broken / "config.json").unlink()
    elif damage == "bad config":
        (broken / "config.json").write_text("{")
    else:
        (broken / "tokenizer.json").write_text("{}")
    for argv in (("generate", "Hi", "--model", broken), ("check", broken), ("chat", broken)):
        code, out, err = chairlift(*argv)
        assert (code, out) == (2, [])
        assert len(err) == 1
        assert err[0].startswith("chairlift: error: ")


def test_the_default_length_shrinks_to_what_fits(chairlift: Run, model_dir: Path) -> None:
    code, out, _ = chairlift(
        "generate", "the chairlift " * 20, "--raw", "--ignore-eos", "--jsonl", "--model", model_dir
    )
    record = json.loads(out[0])
    assert code == 0
    assert record["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("quiet", [False, True])
def test_the_bar_is_for_terminals_and_can_be_silenced(model_dir: Path, tmp_path: Path, quiet: bool) -> None:
    output = tmp_path / "out.jsonl"
    argv = ["generate", "Hi", "you", "--max-tokens", "200", "--model", str(model_dir), "--output", str(output)]
    terminal = Terminal(*argv, *(["--quiet"] if quiet else []))
    shown = terminal.read_to_the_end()
    terminal.close()
    assert len(output.read_text().splitlines()) == 2
    assert ("prompt/s" in shown) is ("loading weights" in shown) is not quiet
    assert not quiet or shown == ""


def test_the_text_of_one_prompt_is_printed_as_it_is_made(
    chairlift: Run, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pieces(io.StringIO):
        writes: list[str]

        def write(self, text: str) -> int:
            self.writes.append(text)
            return len(text)

    out = Pieces()
    out.writes = []
    monkeypatch.setattr(sys, "stdout", out)
    assert chairlift("generate", "the lift", "--raw", "--model", model_dir, "--max-tokens", 20, "--ignore-eos")[0] == 0
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = llm.generate(["the lift"], asked)[0].outputs[0].text
    pieces = [text for text in out.writes if text]
    assert "".join(pieces) == expected + "\n"
    assert len(pieces) > 5


def test_conversations_are_answered_turn_by_turn(chairlift: Run, model_dir: Path, llm: LLM, tmp_path: Path) -> None:
    line = {"question_id": 81, "category": "writing", "turns": ["Hi", "And then?"], "usage": "mine"}
    prompts = write_lines(tmp_path / "mt.jsonl", line, {"prompt": "Hi", "max_tokens": 3}, line | {"n": 2})
    code, out, err = chairlift("generate", "--prompts-file", prompts, "--model", model_dir, "--max-tokens", 6)
    assert code == 1 and "n is 2, but a conversation goes on after one answer" in err[0]
    record, plain, refused = map(json.loads, out)
    first = greedy(llm, chat_ids(llm, "Hi"), 6)
    asked = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And then?"},
    ]
    second = greedy(llm, llm.encode_chat(asked), 6)
    assert record["answers"] == [first, second]
    assert record["outputs"][0]["text"] == second
    assert record["prompt"] == asked
    assert {key: record[key] for key in ("question_id", "category", "turns")} == {
        key: line[key] for key in ("question_id", "category", "turns")
    }
    assert record["input"] == {"usage": "mine"} and record["usage"]["completion_tokens"] > 0
    assert "answers" not in plain and refused["outputs"] == []


def test_ctrl_c_keeps_the_answers_that_are_there(model_dir: Path, tmp_path: Path) -> None:
    output, long = tmp_path / "out.jsonl", {"prompt": "on and on", "max_tokens": 200, "ignore_eos": True}
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Hi", "max_tokens": 1}, *[long] * 3000)
    argv = ("generate", "--prompts-file", str(prompts), "--output", str(output), "--model", str(model_dir))
    terminal = Terminal(*argv, "--max-num-seqs", "2")
    terminal.wait_for("1/3001")
    os.kill(terminal.process.pid, signal.SIGINT)
    shown = terminal.read_to_the_end()
    assert terminal.process.wait() == 130
    terminal.close()
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["index"] for record in records] == list(range(3001))
    assert records[0]["error"] is None and len(records[0]["outputs"][0]["token_ids"]) == 1
    assert records[-1]["error"] == "stopped with Ctrl-C before its answer was complete"
    assert records[-1]["outputs"] == []
    assert "Traceback" not in shown
