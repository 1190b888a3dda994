"""A download from the Hub takes the files that are read, and no others: against a Hub on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DOWNLOAD = """
import sys
from chairlift.errors import ModelLoadError
from chairlift.models.hub import download_model
try:
    print(download_model(sys.argv[1]))
except ModelLoadError as error:
    print("refused:", error)
"""
SMALL = {
    **dict.fromkeys(("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"), b"{}"),
    **{"README.md": b"# read by people", "vocab.json": b"{}", "modeling_evil.py": b"raise SystemExit"},
    **{"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx", "original/consolidated.00.pth": b"pickle"},
}
SHARDS = {f"model-0000{i}-of-00002.safetensors": b"weights" for i in (1, 2)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()}
READ = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
ONE = {"model.safetensors": b"weights"}


def hashed(name: str, content: bytes) -> str:
    """The Hub's id of a file's content."""
    return hashlib.sha1(name.encode() + content, usedforsecurity=False).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Serves ``files`` as the repository ``people/model`` and remembers which were asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Repository)
        self.files: dict[str, bytes] = {}
        self.sent: list[str] = []


class Repository(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's interface that a download uses."""

    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/people/model/revision/"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self.send(json.dumps({"id": "people/model", "sha": COMMIT, "siblings": siblings}).encode(), "info")
            return
        if path.startswith("/api/models/people/model/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashed(name, content)}
                for name, content in self.server.files.items()
            ]
            self.send(json.dumps(tree).encode(), "tree")
            return
        name = path.removeprefix(f"/people/model/resolve/{COMMIT}/")
        if name not in self.server.files:
            self.send_error(404)
            return
        if self.command == "GET":
            self.server.sent.append(name)
        self.send(self.server.files[name], name)

    def send(self, content: bytes, name: str) -> None:
        self.send_response(200)
        headers = {"Content-Length": len(content), "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}
        headers["ETag"] = f'"{hashed(name, content)}"'
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def download(hub: Hub, cache: Path, name: str = "people/model", offline: bool = False) -> str:
    """Output of a process that downloads a model."""
    host, port = hub.server_address[:2]
    where = {"HF_ENDPOINT": f"http://{host!s}:{port}", "HF_HOME": str(cache), "HF_HUB_OFFLINE": str(int(offline))}
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
    hub.files = {**SMALL, **files}
    folder = Path(download(hub, tmp_path))
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == set(hub.sent) == READ | wanted
    assert sorted(hub.sent) == sorted(found), "a file was downloaded twice"


def test_without_a_network_the_cache_is_used_and_other_names_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files = {**SMALL, **ONE}
    folder = download(hub, tmp_path)
    hub.files, hub.sent = {}, []
    assert download(hub, tmp_path, offline=True) == folder and not hub.sent
    message = download(hub, tmp_path, "people/other")
    assert message.startswith("refused: 'people/other' is not a directory here, and the Hugging Face Hub did not give")
