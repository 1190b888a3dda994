"""The official tinker client, unchanged, with a server: with a fake trainer, and with the bundled model."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.free_port import free_port
from tests.server.harness import run
from tests.train.service.wire_client import MODEL, Bench

pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).with_name("tinker_session.py")
VERSION = "0.38.0"
SECONDS = 900


@pytest.fixture(scope="module")
def client_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has the client. It is installed beside this environment, because it needs other versions of some
    packages. ``TINKER_PYTHON`` names one that exists."""
    if importlib.util.find_spec("tinker") is not None:
        return sys.executable
    if (given := os.environ.get("TINKER_PYTHON")) is not None:
        return given
    place = tmp_path_factory.mktemp("tinker")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin" / "python"
    packages = next((place / "lib").iterdir()) / "site-packages"
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    done = subprocess.run([python, "-m", "pip", "install", "-q", f"tinker=={VERSION}"], check=False)
    if done.returncode:
        pytest.skip("the client cannot be installed here")
    return str(python)


def command(python: str, port: int, model: str) -> list[str]:
    return [python, str(SCRIPT), f"http://127.0.0.1:{port}", model]


def test_a_session_with_a_fake_trainer(client_python: str, tmp_path: Path) -> None:
    async def test() -> None:
        bench = Bench(tmp_path, memory=1 << 40)
        bench.runs.clock = time.monotonic
        async with bench.serving() as client:
            process = await asyncio.create_subprocess_exec(
                *command(client_python, client.http.port, MODEL), stdout=asyncio.subprocess.PIPE, cwd=tmp_path
            )
            output, _ = await process.communicate()
        assert output.decode().strip().endswith("done")

    run(test())


def test_a_session_with_the_bundled_model_before_and_after_a_kill(client_python: str, tmp_path: Path) -> None:
    name = "org/bundled"
    for _ in range(2):
        port = free_port()
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "chairlift", "serve", "--enable-training", "--port", str(port)),
                *("--training-dir", str(tmp_path / "runs"), "--served-model-name", name),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            assert "is ready" in server.stdout.readline()
            done = subprocess.run(
                command(client_python, port, name), capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path
            )
            assert done.stdout.strip().endswith("done"), done.stdout + done.stderr
        finally:
            server.send_signal(signal.SIGKILL)
            server.communicate()
