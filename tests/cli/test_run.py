"""``chairlift run``: a chat in a terminal, one answer in a pipe."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tests.models.fake_hub import serve_hub, use_hub
from tests.server.openai_fake import FakeServer, serve_fake

GREEDY = ("--temperature", "0", "--max-tokens", "6")


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def answer(model_dir: Path, *messages: dict[str, str]) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=6)
    text = LLM(str(model_dir)).chat([list(messages)], params)[0].outputs[0].text
    return f"{text}\n".splitlines()


@pytest.mark.full
def test_one_answer_is_printed_for_a_prompt_and_for_a_pipe(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = {"role": "system", "content": "Be kind."}
    pipe(monkeypatch, "")
    assert chairlift("run", model_dir, "Hi", "there", "--system", "Be kind.", *GREEDY) == (
        0,
        answer(model_dir, system, {"role": "user", "content": "Hi there"}),
        [],
    )
    pipe(monkeypatch, "two\nlines\n")
    wanted = answer(model_dir, {"role": "user", "content": "two\nlines"})
    assert chairlift("run", model_dir, *GREEDY) == (0, wanted, [])
    pipe(monkeypatch, "two\nlines\n")
    wanted = answer(model_dir, {"role": "user", "content": "two\nlines\n\nShorten:"})
    assert chairlift("run", model_dir, "Shorten:", *GREEDY) == (0, wanted, [])


@pytest.mark.full
def test_sampling_follows_the_models_own_defaults(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 2}))
    pipe(monkeypatch, "")
    wanted = answer(model_dir, {"role": "user", "content": "Hi"})
    assert chairlift("run", folder, "Hi", "--max-tokens", 6)[1] == wanted


@pytest.mark.full
def test_a_model_of_the_hub_is_downloaded(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serve_hub() as hub:
        hub.repositories["people/model"] = {file.name: file.read_bytes() for file in model_dir.iterdir()}
        use_hub(monkeypatch, hub, tmp_path)
        pipe(monkeypatch, "Hi")
        wanted = answer(model_dir, {"role": "user", "content": "Hi"})
        assert chairlift("run", "people/model", *GREEDY) == (0, wanted, [])


def test_a_model_without_a_chat_template_goes_on_with_the_text(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>"}))
    pipe(monkeypatch, "Once upon")
    params = SamplingParams(temperature=0, max_tokens=6)
    wanted = f"{LLM(str(folder)).generate(['Once upon'], params)[0].outputs[0].text}\n".splitlines()
    code, out, err = chairlift("run", folder, *GREEDY)
    assert (code, out) == (0, wanted) and "no chat template; the text is continued as it is" in err[0]


def test_a_running_server_answers(chairlift: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_fake(FakeServer()) as fake:
        pipe(monkeypatch, "")
        assert chairlift("run", "little", "Hi", "--url", fake.url, "--top-k", 3) == (0, ["1: Hi"], [])
        body = fake.bodies[0]
        assert (
            (body["model"], body["top_k"]) == ("little", 3)
            and 4000 < body["max_tokens"] <= 4096
            and "temperature" not in body
        )
        code, out, err = chairlift("run", "other", "Hi", "--url", fake.url)
        assert (code, out) == (2, []) and "has no model 'other'; it has " in err[0]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((), "no prompt; give one (chairlift run MODEL"),
        (("bundled", "Hi", "--api-key-file", "x"), "--api-key-file is for a server, and needs --url"),
        (("bundled", "Hi", "--url", "127.0.0.1:1", "--threads", "1"), "(threads) belong to chairlift serve"),
        (("bundled", "Hi", "--n", "2"), "n is 2, but there is one answer to each message"),
        (("bundled", "Hi", "--num-ctx", "9"), "--num-ctx is a flag of Ollama: write --max-model-len N"),
    ],
)
def test_what_cannot_be_run_is_refused(
    chairlift: Run, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], told: str
) -> None:
    pipe(monkeypatch, " \n")
    code, out, err = chairlift("run", *argv)
    assert (code, out) == (2, []) and told in err[0]


def test_ctrl_c_ends_the_one_answer_to_a_prompt() -> None:
    with serve_fake(FakeServer()) as fake:
        terminal = Terminal("run", "little", "endless", "--url", fake.url)
        terminal.wait_for("on on ")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 130
        assert fake.left.wait(60)
        terminal.close()


def test_a_chat_in_a_terminal_has_ollamas_commands() -> None:
    with serve_fake(FakeServer()) as fake:
        terminal = Terminal("run", "little", "--url", fake.url)
        terminal.wait_for("/help lists the commands, /bye or Ctrl-D leaves")
        for line, seen in (
            ("Hi", "1: Hi"),
            ("and?", "3: and?"),
            ("/set system Be kind.", "> "),
            ("/set parameter num_predict 7", "> "),
            ("/set parameter temperature hot", "temperature cannot be 'hot'; it is a float"),
            ("/set parameter heat 1", "there is no parameter 'heat'; known are "),
            ("/show", "system      Be kind."),
            ('"""one', "... "),
            ('two"""', "two"),
            ("/clear", "> "),
            ("again", "2: again"),
            ("/help", "begins and ends with three double quotes"),
            ("/nonsense", "commands: /reset, /exit, /set, /show; /help explains them"),
        ):
            terminal.type(f"{line}\n")
            terminal.wait_for(seen)
        terminal.type("/bye\n")
        assert terminal.process.wait(60) == 0
        terminal.close()
    _, second, lines, again = fake.bodies
    assert [message["content"] for message in second["messages"]] == ["Hi", "1: Hi", "and?"]
    assert [message["content"] for message in lines["messages"]] == ["Be kind.", "one\ntwo"]
    assert lines["max_tokens"] == 7 and [message["content"] for message in again["messages"]] == ["Be kind.", "again"]
