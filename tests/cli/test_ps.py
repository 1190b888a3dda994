"""``chairlift ps``: the servers of this user, also after kill -9."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chairlift.base.running_servers import RunningServer, announced, running_servers
from tests.cli.conftest import Run
from tests.e2e.server_process import ServerProcess


def server(**facts: object) -> RunningServer:
    usual = {"pid": os.getpid(), "url": "http://127.0.0.1:1", "models": ("a", "b"), "loaded": ("x",), "version": "1"}
    return RunningServer(**{**usual, "started_at": 0.0, **facts})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "chairlift"


def test_a_server_is_listed_while_it_runs(chairlift: Run, folder: Path) -> None:
    with announced(server()), announced(server(pid=1, url="http://127.0.0.1:2", started_at=5.0)):
        assert [each.url for each in running_servers()] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        assert (folder.stat().st_mode & 0o777) == 0o700
        code, out, err = chairlift("ps")
        assert (code, err) == (0, []) and out[0].split() == ["PID", "URL", "STATE", "UP", "MODELS"]
        assert "does not answer" in out[1] and out[1].endswith("a, b")
    assert running_servers() == [] and list(folder.iterdir()) == []
    assert chairlift("ps")[1] == ["you run no server on this machine; start one with: chairlift serve"]


def test_files_of_killed_servers_and_of_others_are_not_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with announced(server()):
        (folder / "9.json").write_text("{}")  # without a lock: its server was killed
        assert len(running_servers()) == 1 and not (folder / "9.json").exists()
        folder.chmod(0o777)  # others could have written it
        assert running_servers() == []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(folder / "none"))
    with announced(server()):  # no directory can be made: the server runs all the same
        assert running_servers() == []


@pytest.mark.full
def test_a_server_that_is_killed_disappears(chairlift: Run, folder: Path) -> None:
    with ServerProcess() as process:
        (line,) = chairlift("ps")[1][1:]
        assert line.split()[0] == str(process.pid) and " ready " in line and line.endswith("hashlm")
        os.kill(process.pid, signal.SIGKILL)
        process.process.wait()
        assert running_servers() == []
