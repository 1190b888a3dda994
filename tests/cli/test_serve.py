"""``chairlift serve`` up to the moment at which it would bind a port."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.cli import flags, serve
from chairlift.cli.main import _parse, main
from chairlift.config import ServerConfig, flat_fields, server_fields
from chairlift.server.http.lifecycle import ExitCode


def settings(*arguments: str) -> ServerConfig:
    return flags.read_server_settings(_parse(["serve", *arguments]))[1]


def test_every_setting_of_the_server_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help-all"]) == 0
    text = capsys.readouterr().out
    for flag in (*server_fields(), *flat_fields()):
        assert flag.name == "model" or f"\n  --{flag.name.replace('_', '-')}" in text
    assert "--no-restart" in text
    assert "Steps are then not" in text  # the end of a long text


def test_help_fits_two_screens_and_names_the_everyday_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 100
    for flag in (*serve._EVERYDAY, "--help-all"):
        assert f"\n  {flag}" in text
    assert "--stall-timeout" not in text and "--tensor-parallel-size" not in text
    assert "Address to listen on. (default: 127.0.0.1)" in text


def test_a_flag_hidden_from_help_sets_its_value() -> None:
    assert settings("--stall-timeout", "5").stall_timeout == 5.0


def test_the_exit_codes_are_told_with_the_command() -> None:
    for code in ExitCode:
        assert f"\n  {code.value}  " in serve.DESCRIPTION


def test_flags_become_settings() -> None:
    config = settings(
        *("--host", "0.0.0.0", "--port", "9", "--no-restart", "--queue-timeout", "1.5", "--log-format", "json"),
        *("--api-key", "a", "--api-key", "b", "--served-model-name", "x", "--allowed-host", "h"),
    )
    assert config == ServerConfig(
        host="0.0.0.0",
        port=9,
        restart=False,
        queue_timeout=1.5,
        log_format="json",
        api_key=("a", "b"),
        served_model_name=("x",),
        allowed_host=("h",),
    )
    assert settings() == ServerConfig()


def test_a_file_has_settings_of_engine_and_server(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    file.write_text('{"max-num-seqs": 8, "port": 9000, "api_key": ["a"], "served-model-name": "x", "restart": false}')
    engine, server = flags.read_server_settings(_parse(["serve", "--config", str(file), "--port", "9001"]))
    assert engine == {"max_num_seqs": 8}
    assert server == ServerConfig(port=9001, api_key=("a",), served_model_name=("x",), restart=False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prot": 1}', "did you mean 'port'"),
        ('{"port": "one"}', "must be a whole number"),
        ('{"port": null}', "must be of type int"),
        ('{"api_key": [1]}', "must be a list of names"),
        ('{"temperature": 1}', "unknown setting"),
    ],
)
def test_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str) -> None:
    file = tmp_path / "serve.json"
    file.write_text(content)
    assert main(["serve", "--config", str(file), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_a_dry_run_prints_what_config_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "hashlm", "--max-num-seqs", "8", "--served-model-name", "x", "--api-key", "sk-secret"]
    assert main([*arguments, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "sk-secret" not in text
    assert [flag.name for flag in (*flat_fields(), *server_fields()) if f"{flag.name}: " not in text] == []
    pytest.importorskip("yaml")
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    engine, server = flags.read_server_settings(_parse(["serve", "--config", str(file)]))
    assert (engine["model"], engine["max_num_seqs"]) == ("hashlm", 8)
    assert server == ServerConfig(served_model_name=("x",))


@pytest.mark.parametrize("arguments", [("hashlm",), ("--model", "hashlm"), ("hashlm", "--model", "hashlm")])
def test_the_model_is_an_argument_or_a_flag(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments, "--dry-run"]) == 0
    assert 'model: "hashlm"' in capsys.readouterr().out.splitlines()


def test_an_empty_name_is_not_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a variable that nobody has set."""
    assert main(["serve", "", "--dry-run"]) == 0
    assert 'model: ""' in capsys.readouterr().out.splitlines()
    assert main(["serve", "", "--model", "two"]) == 2
    assert "two models are given" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--host", "0.0.0.0"),
        ("--port", "70000"),
        ("--api-key-file", "/no/such/file"),
        ("--chat-template", "/no/such/file", "--port", "0"),
        ("one", "--model", "two"),
    ],
)
def test_settings_that_cannot_be_used_exit_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("chairlift: error: ")
    assert err.count("\n") == 1


def test_help_and_dry_run_need_no_web_server() -> None:
    code = (
        "import sys; from chairlift.cli.main import main; main(['serve', '--dry-run']); main(['--help']);"
        "print([n for n in ('starlette', 'uvicorn', 'uvloop', 'msgspec', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
