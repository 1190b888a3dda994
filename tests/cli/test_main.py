from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import chairlift as package
from chairlift.cli import main as cli
from chairlift.cli.commands import command_module
from tests.cli.conftest import Run


def python(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload, no-any-return]


def test_help_lists_commands_and_exit_codes_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from chairlift.cli.main import main; code = main(['--help']); main(['generate', '--help']);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'tokenizers') if m in sys.modules]); sys.exit(code)"
    )
    done = python("-c", code)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "[]"
    for word in ("generate", "chat", "check", "exit codes:", "130", "--max-num-seqs", "--no-enable-prefix-caching"):
        assert word in done.stdout


def test_version_prints_the_version(chairlift: Run) -> None:
    assert chairlift("--version") == (0, [f"chairlift {package.__version__}"], [])


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], 'no command is given (for example: chairlift generate "Hi"); there are serve, generate'),
        (["serv"], "unknown command 'serv'; did you mean chairlift serve?"),
        (["xyz"], "unknown command 'xyz'; there are serve, generate"),
        (["bench", "ofline"], "unknown command 'ofline'; did you mean chairlift bench offline?"),
        (["trace"], "no command is given (for example: chairlift trace"),
        (["generate", "Hi", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "Hi", "--max-num-seq", "4"], "unknown flag '--max-num-seq'; did you mean --max-num-seqs?"),
        (["check", "--temperature", "1"], "unknown flag '--temperature'"),
        (["--verbose", "check"], "flag '--verbose' must come after 'chairlift check'; see chairlift check --help"),
        (["trace", "--seed=3", "draw", "-o", "x"], "flag '--seed=3' must come after 'chairlift trace draw'"),
        (["sim", "--max-num-seq", "8"], "unknown flag '--max-num-seq'; did you mean --max-num-seqs?"),
        (["bench", "--foo", "3", "offline"], "unknown flag '--foo'; see chairlift bench --help"),
        (["trace", "--foo=3", "shows"], "unknown flag '--foo=3'"),
        (["check", "a", "b"], "unexpected argument 'b'"),
        (
            ["generate", "Hi", "--max-tokens", "many"],
            "--max-tokens: must be a whole number, or one such as 32k (thousands) or 32K (of 1024); got 'many'",
        ),
        (["generate", "Hi", "--batching", "sometimes"], "--batching must be continuous"),
        (["generate", "Hi", "--temperature", "-1"], "error: --temperature must be"),
        (["generate", "Hi", "--block-size", "3"], "--block-size must be a power of two"),
        (["generate", "Hi", "--max-num-seqs", "0"], "--max-num-seqs must be"),
        (["generate", "Hi", "--config", "/nowhere.yaml"], "cannot read the config file /nowhere.yaml"),
        (["chat", "--n", "2"], "leave n out"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(chairlift: Run, argv: list[str], complaint: str) -> None:
    code, out, err = chairlift(*argv)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("chairlift: error: ")
    assert complaint in err[0]


def test_python_dash_m_ends_with_2_and_one_line_for_an_unreadable_model() -> None:
    done = python("-m", "chairlift", "check", "/no/such/model")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("chairlift: error: '/no/such/model' is not a directory")


class Stop:
    """A command that ends in a given way."""

    __name__ = "chairlift.cli.stop"
    SUMMARY = DESCRIPTION = "stop"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser: object) -> None:
        """No arguments."""

    def run(self, args: object) -> int:
        logging.getLogger("chairlift.engine").error("one\nline", exc_info=ValueError("hidden"))
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, None),
        (package.RequestError("no\ngood"), 2, "no good"),
        (OSError(28, "No space left on device", "out.jsonl"), 2, "out.jsonl: No space left on device"),
        (MemoryError(), 2, "the memory does not suffice for this; ask for less, or free some"),
    ],
)
def test_every_error_has_its_exit_code(
    chairlift: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str | None
) -> None:
    monkeypatch.setattr(cli, "command_module", lambda name: Stop(error) if name == "generate" else command_module(name))
    expected = ["chairlift: error: one line"] + ([] if message is None else [f"chairlift: error: {message}"])
    assert chairlift("generate") == (code, [], expected)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_wrong_usage_is_exit_code_2_where_nobody_can_be_told() -> None:
    command = [sys.executable, "-m", "chairlift", "serve", "--port", "abc"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full).returncode == 2


def test_ctrl_c_ends_with_130_and_one_line(model_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    lines = [{"prompt": "Hi", "ignore_eos": True, "max_tokens": 1 if i == 0 else 200} for i in range(500)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "chairlift", "generate", "--model", str(model_dir), "--prompts-file", str(prompts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["error"] is None
        process.send_signal(signal.SIGINT)
        # Read both ends: the answers that are still written may be more than a pipe holds.
        rest, told = process.communicate(timeout=300)
        assert re.fullmatch(r"chairlift: stopped with Ctrl-C; \d+ of 500 prompts have no answer\n", told)
        assert process.returncode == 130
        assert len(rest.splitlines()) == 499  # each prompt has its record


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_is_imported_ends_it_as_quietly(number: signal.Signals) -> None:
    """With an exit code of its own: to the first process of a container a signal without a handler is nothing."""
    code = (
        "import os, runpy, sys\n"
        "class Sent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'chairlift_lab.cli.bench': os.kill(os.getpid(), {number:d})\n"
        "sys.meta_path.insert(0, Sent()); sys.argv[1:] = ['--version']\n"
        "runpy.run_module('chairlift', run_name='__main__')"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
    ignoring = python("-c", code, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))  # as nohup has SIGINT
    assert (ignoring.returncode, ignoring.stderr) == (0, "")


@pytest.mark.full
def test_closed_streams_are_no_error(model_dir: Path) -> None:
    code = "import sys; sys.stdout.close(); sys.stdout = sys.stderr = None; from chairlift.cli.main import main;"
    code += f"sys.exit(main(['generate', 'Hi', '--max-tokens', '2', '--model', {str(model_dir)!r}]))"
    assert python("-c", code).returncode == 0


@pytest.mark.full
def test_a_reader_that_leaves_is_no_error(model_dir: Path) -> None:
    command = [sys.executable, "-m", "chairlift", "generate", "--model", str(model_dir), "--max-tokens", "2", "--jsonl"]
    prompts = [f"prompt {i}" for i in range(40)]
    with subprocess.Popen(command + prompts, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(300) == 141


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_closed_standard_input_is_no_traceback(command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m chairlift {command} --model /nowhere/model <&-', sys.executable],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("chairlift: error: ")
