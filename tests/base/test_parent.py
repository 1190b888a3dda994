"""Ending children that the event loop waits for: what they ended with reaches the loop, whoever looked meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from chairlift.base.parent import has_ended, kill_child
from chairlift.text.tokenizer.template_worker import TemplateWorker

FOREVER = "import time; print(flush=True); time.sleep(3600)"


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
