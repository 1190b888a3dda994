from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.cli.conversation import Conversation as TerminalConversation
from chairlift.cli.conversation import LocalModel
from chairlift.text.tokenizer import Tokenizer
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal


def say(monkeypatch: pytest.MonkeyPatch, *lines: str | bytes) -> None:
    data = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


class Conversation:
    """The same conversation through ``LLM.chat``, to compare the command's answers with."""

    def __init__(self, llm: LLM, max_tokens: int, system: str | None = None) -> None:
        self.llm = llm
        self.params = SamplingParams(temperature=0, max_tokens=max_tokens)
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        answer = self.llm.chat(self.messages, self.params)[0].outputs[0].text
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def lines_of(*answers: str) -> list[str]:
    return "".join(answer + "\n" for answer in answers).splitlines()


def test_piped_lines_are_answered_with_their_history(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(model_dir))
    first, second = Conversation(llm, 6, "Be kind."), Conversation(llm, 6, "Be kind.")
    expected = [first.ask("Hi"), first.ask("and then?"), second.ask("Hi again")]
    say(monkeypatch, "Hi", "", "and then?", "/reset", "Hi again", "/exit", "never asked")
    code, out, err = chairlift("chat", model_dir, "--max-tokens", 6, "--system", "Be kind.")
    assert (code, err) == (0, [])
    assert out == lines_of(*expected)


def test_the_reasoning_of_a_model_is_no_part_of_its_answer(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "thinks")
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>{# ends with </think> #}"
    (copy / "chat_template.jinja").write_text(template)
    llm = LLM(str(copy))
    forced = {"structured_outputs": {"regex": "aa</think>\n?b{3}"}, "temperature": 0, "max_tokens": 40}
    model = LocalModel(llm, defaults=forced)
    pieces = list(model.stream([{"role": "user", "content": "Hi"}], {}))
    assert "".join(piece.text for piece in pieces if piece.is_reasoning) == "aa"
    talk = TerminalConversation(model, forced, None, 40, once=True)
    talk.answer("Hi")
    assert capsys.readouterr() == ("bbb\n", "")


def test_the_oldest_turns_leave_when_the_context_is_full(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, *["the chairlift never stops " * 3] * 8)
    code, out, err = chairlift("chat", model_dir, "--max-tokens", 20, "--ignore-eos")
    assert code == 0
    assert err
    assert all("left out the oldest" in line for line in err)
    assert out


def test_a_message_that_cannot_be_answered_is_dropped(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Conversation(LLM(str(model_dir)), 6).ask("Hi")
    say(monkeypatch, "long " * 300, b"\xff", "Hi")
    code, out, err = chairlift("chat", model_dir, "--max-tokens", 6)
    assert code == 1
    assert out == lines_of(expected)
    assert len(err) == 2
    assert "shorten the prompt" in err[0]
    assert "surrogate" in err[1]


def test_a_message_that_is_too_long_costs_no_history(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation(LLM(str(model_dir)), 6)
    expected = [talk.ask("Hi"), talk.ask("and then?")]
    say(monkeypatch, "Hi", "long " * 300, "and then?")
    code, out, _ = chairlift("chat", model_dir, "--max-tokens", 6)
    assert code == 1
    assert [line for line in out if line] == [line for line in lines_of(*expected) if line]


def test_a_model_without_a_chat_template_is_refused(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model_dir, plain)
    (plain / "tokenizer_config.json").unlink()
    code, out, err = chairlift("chat", plain)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert "no chat template" in err[0]


@pytest.fixture
def terminal(model_dir: Path, tmp_path: Path) -> Iterator[Terminal]:
    """A chat with a model that says the same token 8,000 times, which takes it seconds."""
    dull = tmp_path / "dull"
    shutil.copytree(model_dir, dull)
    weights = load_file(dull / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, dull / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dull / "config.json").read_text())
    (dull / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 9000}))
    opened = Terminal("chat", str(dull), "--max-tokens", "8000")
    yield opened
    opened.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(terminal: Terminal, model_dir: Path) -> None:
    word = Tokenizer.from_dir(model_dir).decode([0])
    terminal.wait_for("> ")
    terminal.type("tell me everything\n")
    terminal.wait_for("tell me everything\r\n")
    terminal.wait_for(word)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.wait_for("\r\n> ").count(word) < 7000
    terminal.interrupt_at_the_prompt()
    terminal.wait_for("(Ctrl-D or /exit leaves)")
    terminal.wait_for("> ")
    terminal.type("/helpless\n")
    terminal.wait_for("commands: /reset, /exit")
    terminal.wait_for("> ")
    terminal.type("and now?\n")
    terminal.wait_for("and now?\r\n")
    terminal.wait_for(word)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("\r\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(120) == 0
