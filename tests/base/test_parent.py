"""Ending children that the event loop waits for: what they ended with reaches the loop, whoever looked meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.base.parent import has_ended, kill_child
from chairlift.text.tokenizer.template_worker import TemplateWorker

FOREVER = "import time; print(flush=True); time.sleep(3600)"


WATCHED = """import sys, threading
from chairlift.base.parent import die_with_parent
sys.platform = sys.argv[2]
die_with_parent(int(sys.argv[1]))
print("started", flush=True)
threading.Event().wait()"""
PARENT = """import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])"""


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_child_ends_after_its_parent(system: str) -> None:
    """On Linux the kernel kills it; elsewhere a thread looks at the parent."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, WATCHED, system], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    assert parent.communicate(timeout=120) == (b"", None)  # the child held the pipe


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_child_whose_parent_is_gone_ends_at_once(system: str) -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED, "1", system], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, b"")


async def start(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code, stdout=asyncio.subprocess.PIPE)


async def started(child: asyncio.subprocess.Process) -> None:
    assert child.stdout is not None
    assert await child.stdout.readline()


def test_killing_again_and_again_takes_no_exit_code_from_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> list[int]:
        codes = []
        for _ in range(10):
            child = await start(FOREVER)
            await started(child)
            assert not has_ended(child.pid)
            while not has_ended(child.pid):
                kill_child(child.pid)
            kill_child(child.pid)
            codes.append(await child.wait())
        return codes

    assert asyncio.run(work()) == [-signal.SIGKILL] * 10
    assert not caplog.messages


def test_a_child_that_is_gone_has_ended_and_killing_it_is_nothing() -> None:
    async def work() -> int:
        child = await start("raise SystemExit(7)")
        code = await child.wait()
        assert has_ended(child.pid)
        kill_child(child.pid)
        kill_child(os.getpid())  # nobody's child: left alone
        return code

    assert asyncio.run(work()) == 7


def test_workers_that_end_while_they_are_killed_are_reported_as_they_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        for _ in range(10):
            worker = TemplateWorker("{{ 1 }}")
            await worker.start()
            (process,) = worker._processes
            process.kill()
            while Path(f"/proc/{process.pid}").exists() and not has_ended(process.pid):
                process.kill()
            await worker.close()

    asyncio.run(work())
    assert not caplog.messages
