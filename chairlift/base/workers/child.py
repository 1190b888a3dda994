"""Main program of a worker process: reads requests, answers them within the kernel's limits, and ends with its parent.

It imports little, so that a worker starts fast. Memory limits need Linux.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from chairlift.base.parent import die_with_parent
from chairlift.base.workers.frames import encode_frame, read_frame

__all__ = ["Answer", "Prepare", "limit_resources", "serve"]

_CPU_SECONDS: Final = 3
"""Processor seconds per request after which the kernel kills a worker, if the server has not killed it before. The
field ``cpu_seconds`` of a request replaces it."""
_RETIRE_SHARE: Final = 0.25
"""A worker is replaced when its memory has grown by more than this fraction of its memory limit, so that the next
request has the whole limit."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that makes the reply to a request. With ``retire`` in the reply, the worker is replaced."""
Prepare = Callable[[dict[str, Any]], tuple[Answer, Callable[[], object]]]
"""Function that gets the setup. Returns (function that makes replies, function to call after the limits are set)."""


def serve(prepare: Prepare, too_much: str) -> None:
    """Main function of a worker process. Its first command-line argument is the parent's process id.

    ``too_much`` is the error message for a request that takes too much memory.
    """
    die_with_parent(int(sys.argv[1]))
    # A signal that stops the server may be sent to its whole process group. Workers ignore it, because the server needs
    # them while it drains.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    with contextlib.suppress(BrokenPipeError):
        _serve(requests, replies, prepare, too_much)


def limit_resources(memory_bytes: int, seconds: int) -> None:
    """Set the kernel's limits on memory and processor time of this process: ``memory_bytes`` and ``seconds`` more than
    it uses now."""
    _limit_memory(_address_space(), memory_bytes)
    _limit_processor_time(seconds)


def _serve(requests: IO[bytes], replies: IO[bytes], prepare: Prepare, too_much: str) -> None:
    """Main loop of a worker. It reads one frame with the setup, then one frame per request, until the server closes
    the pipe."""
    setup = read_frame(requests)
    if setup is None:
        return
    answer, begin = prepare(setup)
    at_start = _address_space()
    _limit_memory(at_start, setup["memory_bytes"])
    replies.write(encode_frame({}))
    replies.flush()
    _limit_processor_time(_CPU_SECONDS)
    begin()
    while (request := read_frame(requests)) is not None:
        _limit_processor_time(request.get("cpu_seconds", _CPU_SECONDS))
        try:
            reply = answer(request)
            grown = _address_space() - at_start > _RETIRE_SHARE * setup["memory_bytes"]
            frame = encode_frame(reply | {"retire": grown or bool(reply.get("retire"))})
        except MemoryError:
            frame = encode_frame({"error": too_much, "kind": "request", "retire": True})
        replies.write(frame)
        replies.flush()
        request = {}
        reply = {}
        frame = b""


def _address_space() -> int:
    """Size in bytes of this process's address space; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(at_start: int, more: int) -> None:
    if at_start:
        _limit(resource.RLIMIT_AS, at_start + more)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _limit_processor_time(more: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + more
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))
