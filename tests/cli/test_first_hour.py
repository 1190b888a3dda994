"""The first hour of three people: each comes from another program, and types what they are used to."""

from __future__ import annotations

import io
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from tests.cli.conftest import Run
from tests.e2e.server_process import ServerProcess
from tests.models.fake_hub import Hub, serve_hub, use_hub
from tests.models.gguf.make import to_gguf

pytestmark = pytest.mark.full

BRIEF = ("--temperature", "0", "--max-tokens", "4")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Iterator[Hub]:
    with serve_hub() as hub:
        hub.repositories["people/model"] = {file.name: file.read_bytes() for file in model_dir.iterdir()}
        use_hub(monkeypatch, hub, tmp_path / "cache")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        yield hub


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as response:
        return json.load(response)


def snapshot(tmp_path: Path) -> str:
    return str(next((tmp_path / "cache" / "models--people--model" / "snapshots").iterdir()))


def test_from_ollama(chairlift: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pull, list, show, run, serve, the ollama package, ps, rm."""
    pipe(monkeypatch, "")
    code, _, err = chairlift("run", "llama3.2", "Hi")
    assert code == 2 and "'llama3.2' is a name of Ollama's, note that its store is not read" in err[0]
    assert chairlift("pull", "people/model")[0] == 0
    assert [line.split()[0] for line in chairlift("list")[1]] == ["NAME", "bundled", "people/model"]
    assert chairlift("show", "people/model")[0] == 0
    pipe(monkeypatch, "some text")
    code, out, _ = chairlift("run", "people/model", "Summarise:", *BRIEF)
    assert code == 0 and out
    with ServerProcess(snapshot(tmp_path), "--served-model-name", "people/model", "--threads", "1") as server:
        url = f"http://127.0.0.1:{server.port}"
        monkeypatch.setenv("OLLAMA_HOST", url)
        with ollama.Client() as client:
            (listed,) = client.list().models
            assert listed.model == "people/model:latest"
            reply = client.chat("people/model", [{"role": "user", "content": "Hi"}], options={"num_predict": 4})
            assert reply.done and reply.eval_count
        (line,) = chairlift("ps")[1][1:]
        assert url in line and " ready " in line and line.endswith("people/model")
        pipe(monkeypatch, "")
        assert chairlift("run", "people/model", "Hi", "--url", url, *BRIEF)[0] == 0
    assert chairlift("ps")[1] == ["you run no server on this machine; start one with: chairlift serve"]
    assert chairlift("rm", "people/model")[0] == 0
    assert chairlift("list", "--names")[1] == ["bundled"]


def test_from_llama_cpp(
    chairlift: Run, hub: Hub, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file, its flags, llama-cli in a pipe, llama-server and its paths."""
    for name in ("q8_0", "f16"):
        to_gguf(model_dir, tmp_path / f"tiny-{name}.gguf", "Q8_0")
    file = tmp_path / "tiny-q8_0.gguf"
    for flags, told in (
        (("-m", file), "-m is a flag of llama.cpp: write the model without a flag"),
        ((file, "-c", "256"), "-c is a flag of llama.cpp: write --max-model-len N"),
        ((file, "-ngl", "99"), "-ngl is a flag of llama.cpp: all layers run on one device"),
    ):
        code, _, err = chairlift("serve", *flags)
        assert code == 2 and told in err[0]
    pipe(monkeypatch, "")
    code, _, err = chairlift("run", tmp_path, "Hi")
    assert code == 2 and "has 2 GGUF models (tiny-f16.gguf, tiny-q8_0.gguf)" in err[0]
    assert chairlift("show", f"{tmp_path}:Q8_0")[0] == 0
    pipe(monkeypatch, "a question in a file")
    code, out, _ = chairlift("run", f"{tmp_path}:Q8_0", "--tokenizer", model_dir, *BRIEF)
    assert code == 0 and out
    with ServerProcess(str(file), "--tokenizer", str(model_dir), "--max-model-len", "128", "--threads", "1") as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, "/completion")
        assert refused.value.code == 404 and b"/v1/completions" in refused.value.read()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
            reply = client.completions.create(model=file.name, prompt="Hi", max_tokens=4)
            assert reply.usage is not None and reply.usage.completion_tokens > 0


def test_from_vllm(chairlift: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm serve's flags, environment variables, a dry run, OpenAI's client, top."""
    chairlift("pull", "people/model")
    model = snapshot(tmp_path)
    monkeypatch.setenv("CHAIRLIFT_MAX_NUM_SEQS", "8")
    flags = ("--served-model-name", "m", "--tensor-parallel-size", "1", "--trust-remote-code", "--threads", "1")
    code, out, err = chairlift("serve", "people/model", *flags, "--dry-run")
    assert (
        code == 0 and "max_num_seqs: 8  # CHAIRLIFT_MAX_NUM_SEQS" in out and 'served_model_name: ["m"]' in "".join(out)
    )
    assert any("trust_remote_code" in line for line in err)
    code, _, err = chairlift("serve", "people/model", "--pipeline-parallel-size", "2", "--dry-run")
    assert code == 2 and "--pipeline-parallel-size is 2" in err[-1]
    code, _, err = chairlift("serve", "people/model", "--ssl-certfile", "x")
    assert code == 2 and "TLS ends at a reverse proxy" in err[-1]
    with ServerProcess(model, *flags) as server:
        assert [each["id"] for each in get(server, "/v1/models")["data"]] == ["m"]
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
            reply = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, extra_body={"top_k": 1}
            )
            assert reply.choices[0].finish_reason in ("length", "stop")
        code, out, _ = chairlift("top", "--url", f"127.0.0.1:{server.port}", "--once", "--interval", "0.1")
        assert code == 0 and out
