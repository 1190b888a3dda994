"""Children of the preloaded process behave as commands that a new interpreter runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import preloaded, run


@pytest.mark.parametrize("argv", [["--version"], ["serv"], ["check", "/no/such/model"], ["generate", "Hi", "--n", "x"]])
def test_a_command_says_and_returns_what_it_does_in_a_new_interpreter(argv: list[str]) -> None:
    new = subprocess.run([sys.executable, "-m", "chairlift", *argv], capture_output=True, text=True)
    forked = run(argv)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)


def test_a_child_takes_the_environment_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(["generate", "--prompts-file", "prompts.txt"], environment=os.environ | {"CHAIRLIFT_PRESET": "orka"})
    assert (done.returncode, "orka" in done.stderr) == (2, True)
    (tmp_path / "model").mkdir()
    assert "model" in run(["check", "model"]).stderr


def test_a_child_that_is_killed_says_by_which_signal() -> None:
    ours, theirs = os.openpty()
    child = preloaded().start(["chat"], stdin=theirs, stdout=theirs, stderr=theirs, new_session=True)
    os.close(theirs)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill()
    assert child.wait(60) == child.poll() == -signal.SIGKILL
    os.close(ours)
