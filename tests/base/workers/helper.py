"""A worker program whose requests say how it dies, and when."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chairlift.base.workers.child import Answer, serve
from chairlift.base.workers.frames import encode_frame


def first_time(folder: str, what: str) -> bool:
    """Whether ``what`` has not happened before, in any process. The kernel lets workers write no bytes to files, but
    they may make directories."""
    try:
        (Path(folder) / what).mkdir()
    except FileExistsError:
        return False
    return True


def die(end: int) -> None:
    os.kill(os.getpid(), end)
    while True:  # some kernels let the process go on for a moment
        signal.pause()


def prepare(setup: dict[str, Any]) -> tuple[Answer, Callable[[], object]]:
    folder = setup["folder"]
    for number in range(setup.get("die_at_start", 0)):
        if first_time(folder, f"start{number}"):
            die(setup["end_at_start"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        first_time(folder, f"{request['id']}-{os.getpid()}")
        for number in range(request.get("times", 0)):
            if first_time(folder, f"{request['id']}-death{number}"):
                end = request.get("end", signal.SIGKILL)
                part = request.get("part", 0)
                if part:  # the beginning of the reply is written before the death
                    reply = encode_frame({"text": "half", "data": b"x" * 100})
                    os.write(child_replies(), reply[:part])
                die(end)
        return {"text": request["id"], "data": request.get("data", b"")}

    return answer, lambda: None


def child_replies() -> int:
    """File descriptor of this worker's replies: the highest pipe that is open."""
    return max(int(name) for name in os.listdir("/proc/self/fd") if "pipe" in link(name))


def link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


if __name__ == "__main__":
    serve(prepare, "too much memory")
