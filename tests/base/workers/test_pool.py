"""Workers that die at each moment: a death from outside is invisible, and a request that kills gets its error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from chairlift.base.workers import WorkerPool
from chairlift.base.workers.blocking import run_twice
from chairlift.base.workers.frames import encode_frame
from chairlift.base.workers.process import Ending, WorkerProcess, ending_of
from chairlift.errors import OverloadedError, WorkerLostError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the workers' limits and /proc need Linux")

MODULE = "tests.base.workers.helper"
PATIENCE = 60.0
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""The server runs on uvloop, Python's callers usually on asyncio."""


def run(work: Callable[[WorkerPool], Awaitable[None]], folder: Path, loop: str = "uvloop", **settings: Any) -> None:
    """Run ``work`` with a pool of workers that note their deaths in ``folder``."""
    own = {name: settings.pop(name) for name in ("num_workers", "spare") if name in settings}
    options: dict[str, Any] = {"num_workers": 2} | own

    async def main() -> None:
        setup = {"folder": str(folder), "memory_bytes": 100 << 20, **settings}
        pool = WorkerPool(MODULE, setup, "tests", 1 << 20, max_waiting=256, **options)
        try:
            await asyncio.wait_for(work(pool), 2 * PATIENCE)
        finally:
            await pool.close()
        assert not pool.pids

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


async def answered(pool: WorkerPool, name: str, **fields: Any) -> None:
    reply = await pool.ask({"id": name, **fields}, PATIENCE)
    assert (reply["text"], reply.get("data", b"")) == (name, fields.get("data", b""))


def num_tries(folder: Path, name: str) -> int:
    """Number of processes that began the request."""
    return len([path for path in folder.iterdir() if path.name.startswith(f"{name}-") and "death" not in path.name])


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have died already
        os.kill(pid, signal.SIGKILL)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "fields",
    [
        {"times": 1},
        {"times": 1, "part": 3},
        {"times": 1, "part": 20},
        {"times": 1, "end": signal.SIGSEGV},
        {"times": 1, "end": signal.SIGABRT, "part": 20},
        {"times": 1, "data": b"\x00\xff" * 100_000},
    ],
    ids=["before the reply", "in its header", "in its body", "by a fault", "by a fault in its body", "with data"],
)
def test_a_request_whose_worker_dies_is_answered_by_a_new_one(
    tmp_path: Path, loop: str, fields: dict[str, Any]
) -> None:
    async def work(pool: WorkerPool) -> None:
        await answered(pool, "a", **fields)
        assert num_tries(tmp_path, "a") == 2

    run(work, tmp_path, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_workers_that_die_idle_are_not_noticed(tmp_path: Path, loop: str) -> None:
    async def work(pool: WorkerPool) -> None:
        for number in range(3):
            await answered(pool, str(number))
            for pid in pool.pids:
                kill(pid)

    run(work, tmp_path, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_worker_that_dies_while_it_is_written_to_is_not_noticed(tmp_path: Path, loop: str) -> None:
    async def work(pool: WorkerPool) -> None:
        await pool.start()
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)  # it reads nothing, and a pipe holds less than the request
        asked = asyncio.create_task(answered(pool, "a", data=b"x" * 500_000))
        await until(lambda: bool(pool.busy_pids))
        kill(pid)
        await asked
        assert num_tries(tmp_path, "a") == 1

    run(work, tmp_path, loop)


def test_requests_that_wait_in_the_queue_do_not_notice_a_death(tmp_path: Path) -> None:
    async def work(pool: WorkerPool) -> None:
        await pool.start()
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.create_task(answered(pool, str(number))) for number in range(8)]
        await until(lambda: bool(pool.busy_pids))
        kill(pid)
        await asyncio.gather(*asked)

    run(work, tmp_path, num_workers=1)


def test_a_signal_to_all_workers_at_once_is_not_noticed(tmp_path: Path) -> None:
    """The second try goes to a worker that starts afterwards, not to the spare worker, which may be dying."""

    async def work(pool: WorkerPool) -> None:
        await answered(pool, "first")
        await until(lambda: len(pool.pids) == 2 and not pool._starting)
        pids = pool.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.create_task(answered(pool, name)) for name in ("a", "b")]
        await until(lambda: len(pool.busy_pids) == 2)
        for pid in pids:
            kill(pid)
        await asyncio.gather(*asked)

    run(work, tmp_path)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_pipe_that_closed_before_the_write_counts_as_a_death(tmp_path: Path, loop: str) -> None:
    """uvloop raises RuntimeError for it."""

    async def work() -> None:
        process = await WorkerProcess.start(MODULE)
        process.kill()
        await process.wait()
        with pytest.raises((EOFError, OSError)):
            await process.ask(encode_frame({}), 100)
        assert process.seconds_computed() is None, "the time of a process that is gone is no reason to refuse a request"

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(work())


@pytest.mark.full
@pytest.mark.parametrize(("end", "most"), [(signal.SIGKILL, 6), (signal.SIGSEGV, 2)], ids=["killed", "fault"])
def test_a_worker_that_dies_at_its_start_is_replaced_a_few_times(
    tmp_path: Path, end: signal.Signals, most: int
) -> None:
    """No request is at fault, and a kill from outside does not mean that the next worker dies, too."""

    async def starts(pool: WorkerPool) -> None:
        await answered(pool, "a")

    async def does_not_start(pool: WorkerPool) -> None:
        with pytest.raises(OverloadedError, match=f"does not start: {most} in a row have ended early"):
            await pool.start()
        await answered(pool, "b")

    for times, work in ((most - 1, starts), (most, does_not_start)):
        folder = tmp_path / str(times)
        folder.mkdir()
        run(work, folder, die_at_start=times, end_at_start=end, spare=False)


@pytest.mark.parametrize(
    ("end", "error"),
    [(signal.SIGKILL, WorkerLostError), (signal.SIGSEGV, EOFError), (signal.SIGXCPU, EOFError)],
    ids=["killed", "fault", "processor time"],
)
def test_a_request_that_kills_each_worker_gets_its_error_after_two(
    tmp_path: Path, end: signal.Signals, error: type[Exception]
) -> None:
    async def work(pool: WorkerPool) -> None:
        with pytest.raises(error):
            await pool.ask({"id": "a", "times": 9, "end": end}, PATIENCE)
        # A worker at the kernel's limit of processor time has taken all the time that the request may take.
        assert num_tries(tmp_path, "a") == (1 if end is signal.SIGXCPU else 2)
        await answered(pool, "b")

    run(work, tmp_path)


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.nightly)])
def test_kills_at_any_moment_are_not_noticed(tmp_path: Path, count: int) -> None:
    """Between two kills of all workers, every request that has begun is answered."""
    rng = random.Random(count)

    async def work(pool: WorkerPool) -> None:
        for turn in range(count):
            asked = [
                asyncio.create_task(answered(pool, f"{turn}-{number}", data=b"x" * rng.choice([0, 100, 400_000])))
                for number in range(7)
            ]
            for _ in range(rng.randrange(300)):
                await asyncio.sleep(0)
            for pid in pool.pids:
                kill(pid)
            await asyncio.gather(*asked)
            assert len(pool.pids) <= 8

    run(work, tmp_path)


def test_no_more_workers_are_kept_than_before_the_deaths(tmp_path: Path) -> None:
    async def work(pool: WorkerPool) -> None:
        for number in range(3):
            await asyncio.gather(*(answered(pool, f"{number}-{each}", times=1) for each in range(2)))
        await until(lambda: not pool._starting)
        await until(lambda: len(pool.pids) <= 3)

    run(work, tmp_path)


def test_a_program_outside_an_event_loop_runs_a_second_time_only_if_it_was_killed(tmp_path: Path) -> None:
    code = "import os, sys; os.mkdir(f'{sys.argv[1]}/{len(os.listdir(sys.argv[1]))}'); "
    ends = {"os.kill(os.getpid(), 9)": (2, -9), "sys.exit(3)": (1, 3), "os.kill(os.getpid(), 11)": (1, -11)}
    for number, (end, (runs, status)) in enumerate(ends.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert run_twice([sys.executable, "-S", "-c", code + end, str(folder)], PATIENCE)[0] == status
        assert len(list(folder.iterdir())) == runs


def test_an_exit_status_says_whose_fault_it_was() -> None:
    assert ending_of(-signal.SIGXCPU) is Ending.TIME
    assert {ending_of(code) for code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, 0, 1)} == {Ending.OWN}
    assert {ending_of(code) for code in (-signal.SIGKILL, -signal.SIGTERM)} == {Ending.OUTSIDE}
