"""A download from the Hub takes the files that are read, and no others: against a Hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.models.hub import parse_hub_id
from tests.models.fake_hub import Hub, serve_hub

DOWNLOAD = """
import sys
from chairlift.errors import ModelLoadError
from chairlift.models.loader import resolve_model_dir
try:
    print(resolve_model_dir(sys.argv[1]))
except ModelLoadError as error:
    print("refused:", error)
"""
SMALL = {
    **dict.fromkeys(("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"), b"{}"),
    **{"README.md": b"# names the licence", "vocab.json": b"{}", "modeling_evil.py": b"raise SystemExit"},
    **{"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx", "original/consolidated.00.pth": b"pickle"},
}
SHARDS = {f"model-0000{i}-of-00002.safetensors": b"weights" for i in (1, 2)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()}
READ = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
ONE = {"model.safetensors": b"weights"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as server:
        yield server


def download(hub: Hub, cache: Path, name: str = "people/model", offline: bool = False) -> str:
    """Output of a process that downloads a model."""
    where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": str(int(offline))}
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()} | where
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run([sys.executable, "-c", DOWNLOAD, name], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        pytest.param({**INDEX, **SHARDS, "consolidated.safetensors": b"again"}, {*INDEX, *SHARDS}, id="pieces"),
        pytest.param(
            {**ONE, "model.fp16.safetensors": b"again", "tf.safetensors": b"again"}, {*ONE}, id="one of several"
        ),
        pytest.param({**INDEX, **ONE}, {*INDEX, *ONE}, id="an index that was left behind", marks=pytest.mark.nightly),
        pytest.param(
            {"modules.json": b'[{"path": "1_Pooling"}, {"path": "../x"}]', "1_Pooling/config.json": b"{}", **ONE},
            {"modules.json", "1_Pooling/config.json", *ONE},
            id="pooling",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"model.safetensors.index.json": b'{"weight_map": {"a": "*.bin", "b": 3}}'},
            {*INDEX},
            id="a bad index",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_only_files_that_are_read_are_downloaded(
    hub: Hub, tmp_path: Path, files: dict[str, bytes], wanted: set[str]
) -> None:
    hub.repositories["people/model"] = {**SMALL, **files}
    folder = Path(download(hub, tmp_path))
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == set(hub.sent) == READ | wanted
    assert sorted(hub.sent) == sorted(found), "a file was downloaded twice"


def test_without_a_network_the_cache_is_used_and_other_names_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["people/model"] = {**SMALL, **ONE}
    folder = download(hub, tmp_path)
    hub.repositories["people/model"], hub.sent = {}, []
    assert download(hub, tmp_path, offline=True) == folder and not hub.sent
    message = download(hub, tmp_path, "people/other")
    assert message.startswith("refused: 'people/other' is not a directory here, and the Hugging Face Hub did not give")


GGUF = {f"m-{kind}.gguf": kind.encode() for kind in ("Q2_K", "Q4_K_M", "Q8_0")}
GGUF |= {f"BF16/m-BF16-0000{i}-of-00002.gguf": b"part" for i in (1, 2)}
GGUF |= {"mmproj-BF16.gguf": b"eyes", "mmproj-F16.gguf": b"eyes", "imatrix.dat": b"x"}


@pytest.mark.parametrize(
    ("name", "path", "wanted"),
    [
        ("people/model", "m-Q4_K_M.gguf", {"m-Q4_K_M.gguf", "mmproj-F16.gguf"}),
        pytest.param("people/model:q8_0", "m-Q8_0.gguf", {"m-Q8_0.gguf", "mmproj-F16.gguf"}, marks=pytest.mark.nightly),
        pytest.param(
            "hf.co/people/model:BF16",
            "BF16/m-BF16-00001-of-00002.gguf",
            {*(name for name in GGUF if name.startswith("BF16")), "mmproj-F16.gguf"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_one_gguf_model_of_a_repository_is_downloaded(
    hub: Hub, tmp_path: Path, name: str, path: str, wanted: set[str]
) -> None:
    hub.repositories["people/model"] = {**GGUF, "README.md": b"# x", "config.json": b"{}"}
    found = download(hub, tmp_path, name)
    assert found.endswith(f"/{path}")
    assert set(hub.sent) == {"README.md", "config.json", *wanted}
    assert download(hub, tmp_path, name, offline=True) == found


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("a/b", ("a/b", None)),
        ("gpt2", ("gpt2", None)),
        ("a/b-GGUF:Q4_K_M", ("a/b-GGUF", "Q4_K_M")),
        ("huggingface.co/a/b:latest", ("a/b", "latest")),
        ("llama3.2:1b", None),
        ("a/b.gguf", None),
        ("a/b/c", None),
        ("../a", None),
    ],
)
def test_a_hub_id_may_name_a_quantisation(name: str, parsed: tuple[str, str | None] | None) -> None:
    assert parse_hub_id(name) == parsed
