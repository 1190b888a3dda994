"""Clients that are fetched when the test runs: the newest official ones. They need a package registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.served import KEY, SEEDED, Served, answers, stop_in

pytestmark = pytest.mark.nightly


def fetch(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} failed: {done.stderr[-300:]}")


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_newest_node_client_gets_right_answers(served: Served, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}')
    fetch("npm", "install", "--no-audit", "--no-fund", "openai", cwd=tmp_path)
    script = Path(shutil.copy(Path(__file__).with_name("node_client.mjs"), tmp_path))
    two, (one,) = answers("Hi", n=2, **SEEDED), answers("Hi", **SEEDED)
    stop = stop_in(one.text)
    command = ["node", str(script), served.base_url, KEY, stop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["texts"] == [answer.text for answer in two]
    assert seen["reasons"] == [answer.finish_reason for answer in two]
    assert seen["logprobs"] == [len(answer.token_ids) for answer in two]
    assert seen["usage"]["completion_tokens"] == sum(seen["logprobs"])
    assert seen["stopped"] == answers("Hi", stop=stop, **SEEDED)[0].text
    assert seen["streamed"] == one.text
    assert seen["streamedUsage"]["completion_tokens"] == len(one.token_ids)
    assert seen["errors"] == [
        ["BadRequestError", 400, "invalid_value"],
        ["NotFoundError", 404, "model_not_found"],
        ["BadRequestError", 400, "context_length_exceeded"],
        ["AuthenticationError", 401, "invalid_api_key"],
    ]
    assert seen["pieces"] < 3000
    served.wait_until_idle()


def test_the_newest_python_client_passes_the_same_tests(tmp_path: Path) -> None:
    """The other clients of the test environment hold this one back: the same tests again with the newest."""
    fetch(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--upgrade",
        "--target",
        str(tmp_path),
        "openai",
        cwd=tmp_path,
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    tests = str(Path(__file__).with_name("test_openai_client.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    shown = subprocess.run(
        [sys.executable, "-c", "import openai; print(openai.__file__)"], env=environment, capture_output=True, text=True
    )
    assert shown.stdout.startswith(str(tmp_path))
