"""The part of the Hugging Face Hub's interface that downloads use, on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["COMMIT", "Hub", "serve_hub", "use_hub"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INFO = re.compile(r"/api/models/(.+?)/(revision|tree)/.*")
_FILE = re.compile(rf"/(.+?)/resolve/{COMMIT}/(.+)")


def hashed(name: str, content: bytes) -> str:
    """The Hub's id of a file's content."""
    return hashlib.sha1(name.encode() + content, usedforsecurity=False).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Serves ``repositories``: id -> path of a file -> its content. ``sent`` are the files that were downloaded."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Repository)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


class _Repository(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        if (found := _INFO.fullmatch(path)) is not None and found[1] in self.server.repositories:
            files = self.server.repositories[found[1]]
            if found[2] == "revision":
                siblings = [{"rfilename": name} for name in files]
                self.send(json.dumps({"id": found[1], "sha": COMMIT, "siblings": siblings}).encode(), "info")
                return
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashed(name, content)}
                for name, content in files.items()
            ]
            self.send(json.dumps(tree).encode(), "tree")
            return
        wanted = _FILE.fullmatch(path)
        if wanted is None or wanted[2] not in self.server.repositories.get(wanted[1], {}):
            self.send_response(404)
            if wanted is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.command == "GET":
            self.server.sent.append(wanted[2])
        self.send(self.server.repositories[wanted[1]][wanted[2]], wanted[2])

    def send(self, content: bytes, name: str) -> None:
        self.send_response(200)
        headers = {"Content-Length": len(content), "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}
        headers["ETag"] = f'"{hashed(name, content)}"'
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Context manager: a Hub that runs during the block."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub, cache: Any) -> None:
    """Let this process download from ``hub`` into ``cache``."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
