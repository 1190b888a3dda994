"""``tools/run_documents.py`` runs what the documents say, and meets nothing that an earlier run has left."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "run_documents.py"


def run(page: Path, commands: str, kind: str = "sh", python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Runs the script on a page that has these commands in one block."""
    page.write_text(f"# A page\n\n```{kind}\n{commands}\n```\n", encoding="utf-8")
    return subprocess.run([python, str(SCRIPT), str(page)], capture_output=True, text=True)


def test_a_file_under_tmp_is_new_in_each_run_and_kept_within_it(tmp_path: Path) -> None:
    name = f"chairlift-{tmp_path.name}"
    commands = f"test ! -e /tmp/{name} && touch /tmp/{name}\ntest -e /tmp/{name}"
    for _ in range(2):
        done = run(tmp_path / "page.md", commands)
        assert done.returncode == 0, done.stdout
    assert not Path(f"/tmp/{name}").exists()


@pytest.mark.parametrize("first", ["false", "exit 3"])
def test_every_failing_command_is_listed_after_all_have_run(tmp_path: Path, first: str) -> None:
    done = run(tmp_path / "page.md", f"{first}\ntrue\ntest 1 = 2")
    assert done.returncode == 1
    summary = done.stdout[done.stdout.index("3 commands of 1 documents ran, 2 failed") :]
    assert first in summary
    assert "test 1 = 2" in summary


def test_an_interpreter_under_tmp_stays_where_it_is() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        python = Path(folder) / "python"
        python.symlink_to(sys.executable)
        done = run(Path(folder) / "page.md", "import sys", kind="python", python=str(python))
        assert done.returncode == 0, done.stdout + done.stderr
