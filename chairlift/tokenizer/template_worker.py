"""Renders chat templates in processes that can be killed, so that no template can stop the server.

A sandbox limits what a template can access, not how much it computes: a few nested loops run for years, and a few
joins take all memory. So a worker process renders the template under the kernel's limits on memory and processor time.
The server kills and replaces the worker when a chat takes too long. Requests and replies are JSON with a length
prefix. The server checks replies like any other input. Memory limits need Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from chairlift.errors import OverloadedError, RequestError, TemplateError, TemplateFailedError, WorkerLostError
from chairlift.parent import child_environment, die_with_parent, has_ended, kill_child
from chairlift.tokenizer.chat_template import MAX_TEXT, ChatTemplate, check_variables
from chairlift.tokenizer.messages import normalize_messages, plain_tools
from chairlift.tokenizer.turns import Turns

__all__ = ["TemplateWorker", "WorkerPool", "limit_resources", "serve"]

_log = logging.getLogger(__name__)

_HEADER: Final = 4
"""Number of bytes at the beginning of a frame (a message to or from a worker) that give its length, big endian."""
_START_SECONDS: Final = 30.0
_MAX_ERROR: Final = 1000
_BYTES_PER_CHAR: Final = 6
"""Maximum number of bytes of one character as JSON in UTF-8."""
_PATIENCE: Final = 10
"""Maximum elapsed time of a chat divided by its limit on processor time. The factor is above 1, because a busy machine
gives a worker only a part of a processor."""
_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")
_CPU_SECONDS: Final = 3
"""Processor seconds per chat after which the kernel kills a worker, if the server has not killed it before."""
_RETIRE_SHARE: Final = 0.25
"""A worker is replaced when its memory has grown by more than this fraction of its memory limit, so that the next chat
has the whole limit."""
_EXIT_SECONDS: Final = 1.0
"""Seconds to wait for the exit status of a process after the end of its pipe."""
_OWN_SIGNALS: Final = frozenset({signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS})
"""Signals that end a worker when it reaches its own limits: processor time, or memory inside a library. Any other
signal comes from outside: from an operator, or from the kernel when the machine has no free memory."""


class WorkerPool:
    """Worker processes that handle one request at a time, and are killed when a request takes too long.

    ``module`` is the program of a worker. Each worker gets ``setup`` at its start, together with ``memory_bytes``, the
    memory that it may take after its setup. ``what`` names the requests in error messages. ``max_reply`` is the
    maximum length of a reply in bytes.

    ``num_workers`` requests run at a time. One further worker is kept ready, so that after a kill no request waits for
    the start of an interpreter. At most ``max_waiting`` requests wait in the queue. All methods run on one event
    loop.
    """

    def __init__(
        self, module: str, setup: dict[str, Any], what: str, max_reply: int, num_workers: int, max_waiting: int
    ) -> None:
        self._module = module
        self._setup = setup
        self._what = what
        self._max_reply = max_reply
        self._turns = Turns(num_workers, max_waiting, what)
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting = False
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of all workers, busy or idle."""
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Start a worker before the first request. Raises OverloadedError if no worker can be started."""
        if not self._idle:
            self._idle.append(await self._start_process())

    async def ask(self, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request to a worker and return the reply. The request may take ``seconds`` of processor time.

        Raises TimeoutError if it takes longer, EOFError if it kills the process, and ValueError for an invalid reply.
        Raises OverloadedError if no process can be started or the process gets no processor time, QueueFullError if
        too many requests wait, and WorkerLostError if two processes in a row were killed from outside.
        """
        # If the caller is cancelled, the worker still finishes the request, because killing the worker would cost more.
        return await self._turns.take(lambda: self._background(self._exchange(fields, seconds)))

    async def _exchange(self, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return its reply. If the worker was killed from outside, the request is sent to another
        worker once."""
        try:
            return await self._ask_one(fields, seconds)
        except WorkerLostError:
            _log.warning("a process for %s was ended from outside; its request is tried again", self._what)
            return await self._ask_one(fields, seconds)

    async def _ask_one(self, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        process = await self._take()
        try:
            reply = await self._in_time(process, _frame(fields), seconds)
        except (TimeoutError, OverloadedError, ValueError):
            self._discard(process)
            raise
        except (EOFError, OSError):
            from_outside = await process.ended_from_outside()
            self._discard(process)
            if self._closed:  # the request is not at fault
                raise OverloadedError("the server is stopping") from None
            if from_outside:
                raise WorkerLostError(
                    f"the process for {self._what} was ended from outside (out of memory, perhaps); send the request "
                    "again"
                ) from None
            raise EOFError from None
        if reply.get("retire") or self._closed:
            self._discard(process)
        else:
            self._idle.append(process)
        return reply

    async def close(self) -> None:
        """End all workers. Requests in progress fail."""
        self._closed = True
        self._idle.clear()
        while self._processes or self._tasks:
            for process in self._processes:
                process.kill()
            await asyncio.gather(*map(self._reap, self._processes), *self._tasks, return_exceptions=True)

    async def _in_time(self, process: _Process, frame: bytes, limit: float) -> dict[str, Any]:
        """The reply of a worker. Raises TimeoutError if the worker has computed for too long. Raises OverloadedError
        if it got too little processor time, so that the request is not at fault."""
        task = asyncio.ensure_future(process.ask(frame, self._max_reply))
        begin, used, waited = process.seconds_computed(), 0.0, 0.0
        try:
            while waited < _PATIENCE * limit:
                timeout = max(_TICK, limit - used)
                await asyncio.wait({task}, timeout=timeout)
                if task.done():
                    return task.result()
                # The waits are added up instead of reading the clock: while this process is suspended, it cannot
                # receive the reply.
                waited += timeout
                used = process.seconds_computed() - begin
                if used >= limit:
                    raise TimeoutError
            raise OverloadedError(f"the machine is too busy for {self._what}; try again later")
        finally:
            task.cancel()

    async def _take(self) -> _Process:
        """An idle worker. If it was the last idle one, another worker is started."""
        process = None
        while self._idle and process is None:
            process = self._idle.pop()
            if not process.alive:
                self._discard(process)
                process = None
        if process is None:
            process = await self._start_process()
        self._keep_spare()
        return process

    def _keep_spare(self) -> None:
        if not self._idle and not self._starting and not self._closed:
            self._starting = True
            self._background(self._start_spare())

    async def _start_spare(self) -> None:
        try:
            self._idle.append(await self._start_process())
        except OverloadedError as error:
            if not self._closed:
                _log.warning("no spare worker for %s: %s", self._what, error)
        finally:
            self._starting = False

    async def _start_process(self) -> _Process:
        if self._closed:
            raise OverloadedError("the server is stopping")
        process = None
        try:
            process = await _Process.start(self._module)
            self._processes.add(process)
            await asyncio.wait_for(process.ask(_frame(self._setup), _MAX_ERROR), _START_SECONDS)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            if process is not None:
                self._discard(process)
            raise OverloadedError(f"the process for {self._what} does not start ({error!r:.200}); try again") from None
        return process

    def _discard(self, process: _Process) -> None:
        process.kill()
        self._background(self._reap(process))
        self._keep_spare()

    async def _reap(self, process: _Process) -> None:
        await process.wait()
        self._processes.discard(process)

    def _background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have left, and an error that is never fetched would be logged


class TemplateWorker(WorkerPool):
    """Renders chats like :class:`~chairlift.tokenizer.chat_template.ChatTemplate`, but in worker processes.

    ``num_workers`` chats are rendered at a time. One further worker is kept ready, so that after a kill no chat waits
    for the start of an interpreter. ``time_limit`` is processor time per chat in seconds, ``memory_bytes`` the memory
    that a worker may take after its start, ``max_chars`` the maximum length of a rendered text, and ``max_waiting``
    the maximum number of waiting chats. All methods run on one event loop.
    """

    def __init__(
        self,
        template: str | None,
        named_tokens: Mapping[str, str] | None = None,
        *,
        max_chars: int = MAX_TEXT,
        time_limit: float = 1.0,
        memory_bytes: int = 100 << 20,
        num_workers: int = 2,
        max_waiting: int = 256,
    ) -> None:
        setup = {
            "template": template,
            "named_tokens": dict(named_tokens or {}),
            "max_chars": max_chars,
            "memory_bytes": memory_bytes,
        }
        max_reply = _BYTES_PER_CHAR * max(max_chars, _MAX_ERROR) + 1024
        super().__init__(__name__, setup, "chats", max_reply, num_workers, max_waiting)
        self._has_template = template is not None
        self._time_limit = time_limit

    async def start(self) -> None:
        """Start a worker before the first chat. Raises OverloadedError if no worker can be started."""
        if self._has_template:
            await super().start()

    async def check(self) -> None:
        """Raise the error that every chat would raise.

        It is TemplateError for a template that is invalid or fails for small chats, and RequestError for a template
        that takes too long. Without a template, nothing is raised.
        """
        if self._has_template:
            self._starting = True  # no spare worker for it
            try:
                await self._text_of(self._exchange({"check": True}, self._time_limit))
            finally:
                self._starting = False

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat; see :meth:`ChatTemplate.render <chairlift.tokenizer.ChatTemplate.render>`.

        Raises :class:`~chairlift.errors.RequestError` for invalid messages or variables, and if rendering takes too
        long. Raises :class:`~chairlift.errors.TemplateError` if there is no template, or the template fails or kills
        its process. Raises :class:`~chairlift.errors.OverloadedError` if no process can be started or it gets no
        processor time, QueueFullError if too many chats wait, and WorkerLostError if two processes in a row were
        killed from outside.
        """
        variables = dict(variables or {})
        check_variables(variables)
        plain = normalize_messages(messages, images=True)
        if not self._has_template:
            return ChatTemplate(None).render(plain)  # raises an error with the remedy
        fields = {
            "messages": plain,
            "add_generation_prompt": bool(add_generation_prompt),
            "continue_final_message": bool(continue_final_message),
            "variables": variables,
            "tools": plain_tools(tools),
        }
        return await self._text_of(self.ask(fields, self._time_limit))

    async def _text_of(self, replies: Awaitable[dict[str, Any]]) -> str:
        """The text in a worker's reply. Raises the errors of :meth:`render`."""
        try:
            reply = await replies
        except TimeoutError:
            raise RequestError(
                f"the chat template was not done with the messages after {self._time_limit:g} s of processor time; "
                "send fewer or shorter messages"
            ) from None
        except EOFError:
            raise TemplateError(
                "the chat template's process died on the messages; send fewer or shorter ones"
            ) from None
        except ValueError as error:
            raise TemplateError(f"the chat template's process sent nonsense: {error}") from None
        if "text" in reply:
            return str(reply["text"])
        message = str(reply.get("error", "the chat template failed"))[:_MAX_ERROR]
        kinds = {"request": RequestError, "failed": TemplateFailedError}
        raise kinds.get(str(reply.get("kind")), TemplateError)(message)


class _Process:
    """One worker process, as seen from the server."""

    def __init__(self, process: asyncio.subprocess.Process, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader):
        self._process = process
        self._stdin = stdin
        self._stdout = stdout
        self.pid = process.pid

    @classmethod
    async def start(cls, module: str) -> _Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            # Ctrl-C signals the terminal's whole process group, and a worker that is still starting would not ignore it
            start_new_session=True,
        )
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes")
        return cls(process, process.stdin, process.stdout)

    @property
    def alive(self) -> bool:
        # The event loop may not have noticed the end of the process yet.
        return not (self._process.returncode is not None or self._stdout.at_eof() or has_ended(self.pid))

    def seconds_computed(self) -> float:
        """Processor seconds that the process has used; elapsed seconds if the system does not report processor time."""
        try:
            # this runs for each chat, and it is twice as fast as read_text
            with open(f"/proc/{self.pid}/stat", "rb", 0) as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) * _TICK

    async def ask(self, frame: bytes, max_bytes: int) -> dict[str, Any]:
        """Send a frame and return the worker's reply, which has at most ``max_bytes`` bytes.

        Raises OSError or EOFError if the process dies, and ValueError for an invalid reply.
        """
        self._stdin.write(frame)
        await self._stdin.drain()
        length = int.from_bytes(await self._stdout.readexactly(_HEADER), "big")
        if length > max_bytes:
            raise ValueError(f"a frame of {length:,} bytes, of at most {max_bytes:,}")
        reply = json.loads(await self._stdout.readexactly(length))
        if not isinstance(reply, dict):
            raise ValueError(f"a frame that is a {type(reply).__name__}")
        return reply

    async def ended_from_outside(self) -> bool:
        """Whether a process whose pipe has ended was killed from outside, and not because it reached its own limits."""
        try:
            code = await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
        except TimeoutError:  # it closed its pipe and still runs
            return False
        return code < 0 and -code not in _OWN_SIGNALS

    def kill(self) -> None:
        kill_child(self.pid)

    async def wait(self) -> None:
        """Wait until a killed process has ended and its pipes are closed."""
        await self._process.wait()
        self._stdin.close()
        with contextlib.suppress(OSError):
            await self._stdin.wait_closed()


def _frame(fields: Mapping[str, Any]) -> bytes:
    # Half of a surrogate pair is passed on. The tokenizer refuses it later with a clear message.
    body = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(_HEADER, "big") + body


def _read_frame(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next frame; None at the end of the pipe."""
    header = pipe.read(_HEADER)
    body = pipe.read(int.from_bytes(header, "big"))
    return json.loads(body) if body else None


Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that makes the reply to a request."""
Prepare = Callable[[dict[str, Any]], tuple[Answer, Callable[[], object]]]
"""Function that gets the setup. Returns (function that makes replies, function to call after the limits are set)."""


def _serve(requests: IO[bytes], replies: IO[bytes], prepare: Prepare, too_much: str) -> None:
    """Main loop of a worker. It reads one frame with the setup, then one frame per request, until the server closes
    the pipe."""
    setup = _read_frame(requests)
    if setup is None:
        return
    answer, begin = prepare(setup)
    at_start = _address_space()
    _limit_memory(at_start, setup["memory_bytes"])
    replies.write(_frame({}))
    replies.flush()
    _limit_processor_time(_CPU_SECONDS)
    begin()
    while (request := _read_frame(requests)) is not None:
        _limit_processor_time(request.get("cpu_seconds", _CPU_SECONDS))
        try:
            reply = answer(request)
            reply["retire"] = _address_space() - at_start > _RETIRE_SHARE * setup["memory_bytes"]
            frame = _frame(reply)
        except MemoryError:
            frame = _frame({"error": too_much, "kind": "request", "retire": True})
        replies.write(frame)
        replies.flush()
        request, reply, frame = {}, {}, b""


def _prepare(setup: dict[str, Any]) -> tuple[Answer, Callable[[], object]]:
    template = ChatTemplate(setup["template"], setup["named_tokens"], max_chars=setup["max_chars"])

    def begin() -> None:
        with contextlib.suppress(TemplateError):  # it is raised again for each chat
            template.compile()

    return lambda chat: _reply(template, chat), begin


def _reply(template: ChatTemplate, chat: dict[str, Any]) -> dict[str, Any]:
    try:
        if "check" in chat:
            template.check()
            return {"text": ""}
        text = template.render(
            chat["messages"],
            chat["add_generation_prompt"],
            chat["continue_final_message"],
            chat.get("tools"),
            **chat["variables"],
        )
    except RequestError as error:
        return {"error": str(error)[:_MAX_ERROR], "kind": "request"}
    except TemplateError as error:
        kind = "failed" if isinstance(error, TemplateFailedError) else "template"
        return {"error": str(error)[:_MAX_ERROR], "kind": kind}
    return {"text": text}


def limit_resources(memory_bytes: int, seconds: int) -> None:
    """Set the kernel's limits on memory and processor time of this process: ``memory_bytes`` and ``seconds`` more than
    it uses now."""
    _limit_memory(_address_space(), memory_bytes)
    _limit_processor_time(seconds)


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


def serve(prepare: Prepare, too_much: str) -> None:
    """Main function of a worker process. Its first command-line argument is the parent's process id.

    ``too_much`` is the error message for a request that takes too much memory.
    """
    die_with_parent(int(sys.argv[1]))
    # A signal that stops the server may be sent to its whole process group. Workers ignore it, because the server needs
    # them while it drains.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    with contextlib.suppress(BrokenPipeError):
        _serve(requests, replies, prepare, too_much)


if __name__ == "__main__":
    serve(_prepare, "the chat template takes more memory than it may; send fewer or shorter messages")
