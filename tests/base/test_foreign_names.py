"""A flag of another engine gets one line that says what to write here."""

from __future__ import annotations

import re

import pytest

from chairlift import LLM
from chairlift.base.foreign_names import FOREIGN, answer_to
from chairlift.base.vllm_names import NAMES, SERVER_NAMES
from chairlift.cli.main import main
from chairlift.config import flat_fields, server_fields
from chairlift.errors import ConfigError

OURS = {flag.name for flag in (*flat_fields(), *server_fields())}


@pytest.mark.parametrize("flag", FOREIGN)
def test_an_answer_names_settings_that_exist(flag: str) -> None:
    _, instead = FOREIGN[flag]
    assert set(re.findall(r"(?<!{){(\w+)}", instead)) <= OURS
    answer = answer_to(flag)
    assert answer is not None and answer.startswith(flag) and "{{" not in answer and "\n" not in answer
    assert len(answer) < 200


def test_no_name_is_one_of_ours_or_of_vllms() -> None:
    known = {f"--{name.replace('_', '-')}" for name in OURS | set(NAMES) | set(SERVER_NAMES)}
    assert known & set(FOREIGN) == {"--model"}, "most commands take it, as vllm serve does"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["serve", "--ctx-size", "4096"], "--ctx-size is a flag of llama.cpp: write --max-model-len N"),
        (["serve", "-m", "model.gguf"], "-m is a flag of llama.cpp: write the model without a flag"),
        (["serve", "-hf", "a/b"], "-hf is a flag of llama.cpp: write the model without a flag"),
        (["generate", "hi", "--n-gpu-layers=99"], "write --device cuda or --device cpu"),
        (["chat", "--model-path", "here"], "--model-path is a flag of SGLang: write the model without a flag"),
        (["serve", "--tp", "2"], "several copies of it are --replicas N"),
        (["serve", "--mem-fraction-static", "0.8"], "write --gpu-memory-utilization X"),
        (["serve", "--max-total-tokens", "9"], "--num-kv-blocks N for SGLang's meaning; TGI's is --max-model-len N"),
        (["serve", "--model-id", "a/b"], "--model-id is a flag of TGI"),
        (["serve", "--num-ctx", "9"], "--num-ctx is a flag of Ollama"),
        (["serve", "--max-seq-len", "9"], "--max-seq-len is a flag of TensorRT-LLM"),
        (["serve", "--max-req-total-len", "9"], "--max-req-total-len is a flag of LightLLM"),
        (
            ["tune", "--workload", "chat", "--output", "x", "--model", "here"],
            "--model is not known here: write the model without a flag",
        ),
        (["chat", "--server-url", "http://here"], "write --url URL"),
        (["bench", "serve", "--api-base", "http://here"], "write --url URL"),
        (["serve", "--ssl-certfile", "x"], "--ssl-certfile is a flag of vLLM: TLS ends at a reverse proxy"),
        (["serve", "--uds", "x"], "for a Unix socket put a reverse proxy in front of it"),
        (["top", "http://here:1"], "write --url http://here:1"),
        (["trace", "record", "http://here:1", "-o", "x"], "write --url http://here:1"),
    ],
)
def test_the_command_line_answers_with_our_flags(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and told in err


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"ctx_size": 4096}, "ctx_size is a flag of llama.cpp: write max_model_len=N"),
        ({"mem_fraction_static": 0.8}, "write gpu_memory_utilization=X, or on a CPU kv_cache_memory_bytes=SIZE"),
    ],
)
def test_python_answers_with_our_keywords(keywords: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**keywords)  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_messages_name_flags_on_the_command_line_and_keywords_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^max_num_seqs must be"):
        LLM(max_num_seqs=0)
    assert main(["serve", "--max-num-seqs", "0", "--dry-run"]) == 2
    assert "error: --max-num-seqs must be a whole number" in capsys.readouterr().err
    assert main(["generate", "hi", "--max-model-len", "100000"]) == 2
    assert "error: --max-model-len is 100000, but the model was made for" in capsys.readouterr().err
    assert main(["serve", "--pipeline-parallel-size", "2", "--dry-run"]) == 2
    assert "error: --pipeline-parallel-size is 2" in capsys.readouterr().err


def test_names_of_a_config_file_stay_as_they_are(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{tmp_path}/settings.yaml"
    with open(file, "w") as opened:
        opened.write("max_num_seqs: many\n")
    assert main(["serve", "--config", file, "--dry-run"]) == 2
    assert f"error: max_num_seqs in {file} must be a whole number" in capsys.readouterr().err
    with open(file, "w") as opened:
        opened.write("ctx-size: 9\n")
    assert main(["serve", "--config", file, "--dry-run"]) == 2
    assert "ctx_size is a flag of llama.cpp: write max_model_len=N" in capsys.readouterr().err
