"""Processes meet, send messages, and notice when one of them ends or hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chairlift.errors import EngineDeadError
from chairlift.kernels.cpu.communicator import MAX_RANKS, Communicator, shared_file
from tests.native import needs_kernels

pytestmark = needs_kernels

OTHER = """
import sys
import numpy as np
from chairlift.kernels.cpu.communicator import Communicator
file, rank, size, life = map(int, sys.argv[1:5])
comm = Communicator(file, rank, size, [life])
values = comm.array(np.int64, (size,))
for turn in range(int(sys.argv[5])):
    values[rank] = turn
    comm.meet()
    assert values.tolist() == [turn] * size, values
    comm.meet()
print("met", flush=True)
comm.wait_for_message()
comm.read()
comm.wait_for_message()
"""


@pytest.fixture
def file() -> Iterator[int]:
    number = shared_file()
    yield number
    os.close(number)


class Other:
    """Another process of the communicator."""

    def __init__(self, file: int, rank: int, size: int, turns: int) -> None:
        self.life, theirs = socket.socketpair()
        os.set_inheritable(file, True)
        command = [sys.executable, "-c", OTHER, *map(str, (file, rank, size, theirs.fileno(), turns))]
        self.process = subprocess.Popen(
            command, pass_fds=(file, theirs.fileno()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        theirs.close()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.life.close()


def test_processes_see_what_the_others_wrote_before_a_meeting(file: int) -> None:
    size, turns = 3, 300
    others = [Other(file, rank, size, turns) for rank in (1, 2)]
    comm = Communicator(file, 0, size, [each.life.fileno() for each in others])
    values = comm.array(np.int64, (size,))
    for turn in range(turns):
        values[0] = turn
        comm.meet()
        assert values.tolist() == [turn] * size
        comm.meet()
    assert comm.meetings == 2 * turns
    assert comm.waited > 0.0
    for other in others:
        other.close()


@pytest.mark.parametrize("waits", ["meet", "wait_for_readers"])
def test_the_end_of_a_process_ends_every_wait(waits: str, file: int) -> None:
    others = [Other(file, rank, 3, 0) for rank in (1, 2)]
    comm = Communicator(file, 0, 3, [each.life.fileno() for each in others])
    for other in others:
        assert other.process.stdout is not None
        assert other.process.stdout.readline() == "met\n"
    comm.array(np.int64, (3,))
    comm.send()
    comm.wait_for_readers()
    others[0].process.send_signal(signal.SIGKILL)
    if waits == "wait_for_readers":
        comm.send()
    with pytest.raises(EngineDeadError, match="another process of tensor_parallel_size 3 ended"):
        getattr(comm, waits)()
    with pytest.raises(EngineDeadError):
        comm.meet()
    errors = others[1].process.communicate(timeout=60)[1]  # it learns of it by the shared memory
    assert "EngineDeadError" in errors or waits == "wait_for_readers"
    for other in others:
        other.close()


def test_a_stopped_process_is_noticed_when_patience_ends(file: int) -> None:
    other = Other(file, 1, 2, 0)
    comm = Communicator(file, 0, 2, [other.life.fileno()], patience=0.5)
    assert other.process.stdout is not None
    assert other.process.stdout.readline() == "met\n"
    other.process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"did not answer for 0\.5 s"):
        comm.meet()
    other.close()


WAITER = """
import sys
from chairlift.kernels.cpu.communicator import Communicator
comm = Communicator(int(sys.argv[1]), 1, 2, patience=1.0)
print("waits", flush=True)
comm.meet()
print("met", flush=True)
"""


def test_time_in_which_the_waiting_process_is_stopped_does_not_count(file: int) -> None:
    """As in a paused container: the others were paused, too."""
    os.set_inheritable(file, True)
    command = [sys.executable, "-c", WAITER, str(file)]
    with subprocess.Popen(command, pass_fds=(file,), stdout=subprocess.PIPE, text=True) as waiter:
        comm = Communicator(file, 0, 2)
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "waits\n"
        waiter.send_signal(signal.SIGSTOP)
        assert not threading.Event().wait(1.5)  # longer than its patience
        waiter.send_signal(signal.SIGCONT)
        assert not threading.Event().wait(0.3)  # it looks at the time, and waits again
        comm.meet()
        assert waiter.stdout.readline() == "met\n"


def look_for(comm: Communicator, seconds: float) -> None:
    """Look all the time, as process 0 does between steps."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        comm.look()


def test_a_process_that_waits_for_messages_beats(file: int) -> None:
    other = Other(file, 1, 2, 0)
    comm = Communicator(file, 0, 2, [other.life.fileno()], patience=0.5)
    assert other.process.stdout is not None
    assert other.process.stdout.readline() == "met\n"
    look_for(comm, 1.5)
    other.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"did not answer for 0\.5 s"):
        look_for(comm, 30.0)
    assert 0.3 < time.monotonic() - begin < 5
    with pytest.raises(EngineDeadError):
        comm.check_end()
    other.close()


def test_the_end_of_a_process_is_seen_between_steps(file: int) -> None:
    other = Other(file, 1, 2, 0)
    comm = Communicator(file, 0, 2, [other.life.fileno()])
    comm.look()
    comm.check_end()
    other.process.kill()
    other.process.wait()
    with pytest.raises(EngineDeadError):
        comm.look()
    other.close()


def test_a_process_counts_as_hanging_only_while_process_0_looks(file: int) -> None:
    """Process 0 computes long steps between two looks, in which the others need not beat."""
    comm = Communicator(file, 0, 2, patience=0.1)  # the other never beats
    comm.look()
    assert not threading.Event().wait(2.1)  # longer than looks may be apart
    comm.look()
    with pytest.raises(EngineDeadError):
        look_for(comm, 30.0)


def test_another_thread_may_end_a_wait(file: int) -> None:
    comm = Communicator(file, 1, 2)
    thread = threading.Thread(target=comm.end)
    thread.start()
    with pytest.raises(EngineDeadError):
        comm.wait_for_message()
    thread.join()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0, MAX_RANKS + 1)])
def test_impossible_ranks_are_refused(rank: int, size: int, file: int) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        Communicator(file, rank, size)


def test_memory_is_the_same_for_all_and_zero_at_first(file: int) -> None:
    one, other = (Communicator(file, rank, 2) for rank in (0, 1))
    first, second = (each.array(np.uint8, (5000,)) for each in (one, other))
    assert not first.any()
    first[4999] = 7
    assert second[4999] == 7
    assert Path(f"/proc/self/fd/{file}").resolve().name.startswith("memfd:chairlift")
