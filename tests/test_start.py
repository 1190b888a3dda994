"""``tools/start.py``: the first run of a source tree, with nothing but Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import start

TREE = {
    "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\n\n[project]\nname = "chairlift"\nversion = "0"\n'
    '\n[tool.setuptools]\npackages = ["chairlift"]\n\n[project.optional-dependencies]\ntest = []\n',
    "setup.py": "from setuptools import setup\n\nsetup()\n",
    "csrc/kernels.cpp": "int answer() { return 42; }\n",
    "csrc/compile_kernels.py": "print('kernels: 1 of 1 compiled')\n",
    "chairlift/__init__.py": "",
    "chairlift/__main__.py": "import sys\n\nprint(sys.prefix, sys.argv[1:])\n",
    "chairlift/page.html": "<p>",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small source tree with the real ``tools/start.py``."""
    for name, text in TREE.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tree" / "tools").mkdir()
    shutil.copy(start.__file__, tmp_path / "tree" / "tools")
    return tmp_path / "tree"


def run(tree: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "tools" / "start.py"), *words]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CHAIRLIFT_VENV")}
    return subprocess.run(command, cwd=tree.parent, env=kept | environment, capture_output=True, text=True)


def test_without_a_command_it_says_what_it_is_for(tree: Path) -> None:
    told, asked = run(tree), run(tree, "--help")
    assert (told.returncode, asked.returncode) == (2, 0)
    assert told.stdout == asked.stdout and "python3 tools/start.py test" in told.stdout
    assert not (tree / ".venv").exists()


def test_only_changes_that_need_it_install_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ROOT", tree)
    monkeypatch.delenv("CHAIRLIFT_KERNELS", raising=False)
    before = start.fingerprint(kernels=True)
    assert start.fingerprint(kernels=True) == before
    (tree / "chairlift" / "module.pyc").touch()
    (tree / "chairlift" / "kernels.so").touch()
    (tree / "README.md").touch()
    assert start.fingerprint(kernels=True) == before  # outputs and documents are not installed
    monkeypatch.setenv("CHAIRLIFT_KERNELS", "all")
    seen = {before, start.fingerprint(kernels=True)}
    monkeypatch.delenv("CHAIRLIFT_KERNELS")
    seen.add(start.fingerprint(kernels=False))
    for name in ("pyproject.toml", "csrc/kernels.cpp", "chairlift/page.html", "chairlift/__main__.py"):
        (tree / name).write_text(TREE[name] + "\n")
        seen.add(start.fingerprint(kernels=True))
    assert len(seen) == 7


def test_half_an_environment_is_none(tmp_path: Path) -> None:
    assert start.works(Path(sys.executable))
    assert not start.works(tmp_path / "bin" / "python")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert not start.works(broken)


def test_where_pip_cannot_be_had_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt
    assert start.pip_of_debian(tmp_path) is None
    assert "apt install python3-venv" in start.NO_PIP


def test_requirements_are_those_of_the_project_file(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    needed, tests = start.requirements(testing=False), start.requirements(testing=True)
    assert any(each.startswith("torch>=") for each in needed) and set(needed) < set(tests)
    assert any(each.startswith("pytest>=") for each in set(tests) - set(needed))
    monkeypatch.setattr(start, "ROOT", tree)
    assert start.requirements(testing=True) == []


def test_work_is_shown_while_it_runs_and_silence_is_counted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(start, "QUIET_SECONDS", 0.01)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    talks = "print('Collecting torch'); print('Requirement already satisfied: torch')"
    waits = (
        f"print('kernels: 1 of 2 compiled', flush=True); open({str(gate)!r}).read(); print('kernels: 2 of 2 compiled')"
    )
    commands = {"pip": [sys.executable, "-c", talks], "kernels": [sys.executable, "-c", waits]}
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        if "1 of 2" in line and gate.exists():
            gate.open("w").close()  # the command ends after its silence was reported
            gate.unlink()

    monkeypatch.setattr(start, "say", say)
    start.run_together(commands, time.monotonic())
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "Collecting torch",
        "kernels: 1 of 2 compiled",
        "kernels: 2 of 2 compiled",
    ]
    assert any(re.fullmatch(r"\d+ s, still at: kernels: 1 of 2 compiled", line) for line in told)


def test_a_command_that_fails_is_reported_after_the_others_have_ended(capfd: pytest.CaptureFixture[str]) -> None:
    commands = {
        "pip": [sys.executable, "-c", "raise SystemExit(3)"],
        "kernels": [sys.executable, "-c", "print('done')"],
    }
    with pytest.raises(subprocess.CalledProcessError) as failed:
        start.run_together(commands, time.monotonic())
    assert failed.value.returncode == 3
    assert "done" in capfd.readouterr().err


@pytest.mark.nightly
def test_the_first_call_installs_and_the_second_does_not(tree: Path) -> None:
    first = run(tree, "generate", "Hi there")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{tree / '.venv'} ['generate', 'Hi there']\n"
    assert "making a virtual environment" in first.stderr and "kernels: 1 of 1 compiled" in first.stderr
    second = run(tree, "serve", CHAIRLIFT_VENV=str(tree / ".venv"))
    assert (second.stdout, second.stderr) == (f"{tree / '.venv'} ['serve']\n", "")
    (tree / "chairlift" / "__main__.py").write_text("print('changed')\n")
    assert run(tree).returncode == 2
    third = run(tree, "serve")
    assert (third.stdout, third.returncode) == ("changed\n", 0) and "installing" in third.stderr


@pytest.mark.nightly
def test_an_installation_that_fails_says_so_and_is_tried_again(tree: Path) -> None:
    (tree / "setup.py").write_text("raise SystemExit('no kernels today')\n")
    for _ in range(2):
        failed = run(tree, "generate")
        assert failed.returncode == 2
        assert "no kernels today" in failed.stderr and "installing failed" in failed.stderr.splitlines()[-1]
