"""``chairlift serve`` up to the moment at which it would bind a port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.cli import flags, serve
from chairlift.cli.environment import variable_of
from chairlift.cli.main import _parse, main
from chairlift.config import ServerConfig, flat_fields, server_fields
from chairlift.server.http.lifecycle import ExitCode


def settings(*arguments: str) -> ServerConfig:
    return flags.read_server_settings(_parse(["serve", *arguments]))[1]


def test_every_setting_of_the_server_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help-all"]) == 0
    text = capsys.readouterr().out
    for flag in (*server_fields(), *flat_fields()):
        name = flag.name.replace("_", "-")
        assert name == "model" or re.search(rf"^  (-\w+( \w+)?, )?--{name}", text, re.MULTILINE), name
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
    engine, server, _ = flags.read_server_settings(_parse(["serve", "--config", str(file), "--port", "9001"]))
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
    engine, server, _ = flags.read_server_settings(_parse(["serve", "--config", str(file)]))
    assert (engine["model"], engine["max_num_seqs"]) == ("hashlm", 8)
    assert server == ServerConfig(served_model_name=("x",))


@pytest.mark.parametrize("arguments", [("hashlm",), ("--model", "hashlm"), ("hashlm", "--model", "hashlm")])
def test_the_model_is_an_argument_or_a_flag(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments, "--dry-run"]) == 0
    assert 'model: "hashlm"  # command line' in capsys.readouterr().out.splitlines()


def test_an_empty_name_is_not_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a variable that nobody has set."""
    assert main(["serve", "", "--dry-run"]) == 0
    assert 'model: ""  # command line' in capsys.readouterr().out.splitlines()
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


# --- settings in environment variables --------------------------------------------------------------------------


def test_every_setting_has_a_variable_that_help_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help-all"]) == 0
    text = "".join(capsys.readouterr().out.split())
    for flag in (*server_fields(), *flat_fields()):
        assert f"[{variable_of(flag.name)}]" in text, flag.name
    assert "[CHAIRLIFT_CONFIG]" in text
    assert main(["serve", "--help"]) == 0
    assert "[CHAIRLIFT_" not in capsys.readouterr().out


def test_a_variable_is_read_as_its_flag_is() -> None:
    variables = {
        **{"CHAIRLIFT_MAX_NUM_SEQS": "8", "CHAIRLIFT_KV_CACHE_MEMORY_BYTES": "4GB", "CHAIRLIFT_RESTART": "off"},
        **{"CHAIRLIFT_QUEUE_TIMEOUT": "1.5", "CHAIRLIFT_SERVED_MODEL_NAME": "one, two", "CHAIRLIFT_DTYPE": "float32"},
        **{"CHAIRLIFT_LORA_MODULES": '{"name": "a", "path": "b"}', "CHAIRLIFT_CORS_ORIGIN": '["*"]'},
        **{"CHAIRLIFT_RUN_KERNELS": "torch", "CHAIRLIFT_KERNELS": "all", "CHAIRLIFT_HOST": ""},
    }
    engine, server, sources = flags.read_server_settings(_parse(["serve"]), variables)
    assert engine == {"max_num_seqs": 8, "kv_cache_memory_bytes": 4 * 10**9, "dtype": "float32", "kernels": "torch"}
    assert server == ServerConfig(
        restart=False,
        queue_timeout=1.5,
        served_model_name=("one", "two"),
        lora_modules=('{"name": "a", "path": "b"}',),
        cors_origin=("*",),
    )
    assert sources["max_num_seqs"] == "CHAIRLIFT_MAX_NUM_SEQS" and "host" not in sources


def test_the_command_line_wins_over_a_variable_and_a_variable_over_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"port": 1, "max_num_seqs": 2, "block_size": 8}')
    for name, value in {"CONFIG": str(file), "PORT": "11", "MAX_NUM_SEQS": "12", "PRESET": "orca"}.items():
        monkeypatch.setenv(f"CHAIRLIFT_{name}", value)
    assert main(["serve", "hashlm", "--max-num-seqs", "22", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        *('model: "hashlm"  # command line', "max_num_seqs: 22  # command line", "port: 11  # CHAIRLIFT_PORT"),
        *(f"block_size: 8  # {file}", 'preset: "orca"  # CHAIRLIFT_PRESET', "max_num_batched_tokens: 2048"),
        "enable_prefix_caching: false  # preset orca",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MAX_NUM_SEQS", "many", "CHAIRLIFT_MAX_NUM_SEQS must be a whole number, .* got 'many'"),
        ("MAX_NUM_SEQS", "0", "CHAIRLIFT_MAX_NUM_SEQS must be a whole number from 1 to 65536, got 0"),
        ("PORT", "70000", "CHAIRLIFT_PORT must be a whole number from 0 to 65535, got 70000"),
        ("DTYPE", "int3", "CHAIRLIFT_DTYPE must be one of auto"),
        ("RESTART", "maybe", "CHAIRLIFT_RESTART must be true or false, got 'maybe'"),
        ("QUEUE_TIMEOUT", "soon", "CHAIRLIFT_QUEUE_TIMEOUT must be a number, got 'soon'"),
        ("API_KEY", "[1", "CHAIRLIFT_API_KEY is not a JSON list"),
        ("CONFIG", "/no/such/file", "cannot read the config file /no/such/file"),
    ],
)
def test_a_wrong_value_is_refused_with_the_variables_name(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"CHAIRLIFT_{name}", value)
    assert main(["serve", "--dry-run"]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_an_unknown_variable_is_named_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAIRLIFT_MAX_NUM_SEQ", "8")
    monkeypatch.setenv("CHAIRLIFT_VENV", "/somewhere")
    for name, value in {"PORT": "tcp://10.0.0.1:80", "PORT_80_TCP_ADDR": "10.0.0.1", "SERVICE_HOST": "x"}.items():
        monkeypatch.setenv(f"CHAIRLIFT_{name}", value)  # as Kubernetes does for a service named chairlift
    assert main(["serve", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == (
        "chairlift: warning: the environment variable CHAIRLIFT_MAX_NUM_SEQ is no setting and has no effect;"
        " did you mean CHAIRLIFT_MAX_NUM_SEQS?\n"
    )
    assert "port: 8000" in out.splitlines()
