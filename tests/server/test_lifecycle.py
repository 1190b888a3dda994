"""From a free port to an exit code: loading, ready, drained, cut off, died."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig, ModelConfig, ServerConfig
from chairlift.engine.async_engine import EngineState
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError, TemplateFailedError
from chairlift.server.http import lifecycle
from chairlift.server.http.app import make_app
from chairlift.server.http.lifecycle import ExitCode, Stop, banner, bind, serve, served_names, start_engine
from chairlift.server.operations import health
from tests.server.harness import INFO, PATIENCE, Connection, Endpoints, StateOnlyEngine, make_state, run, until


class Server:
    """A server in this process, run as the command does."""

    def __init__(self, engine: StateOnlyEngine | None = None, stop: Stop | None = None, **settings: Any) -> None:
        self.engine = engine or StateOnlyEngine(EngineState.LOADING)
        self.endpoints = Endpoints()
        self.stop = stop
        self.banner = ""
        self.port = 0
        self.state: Any = None
        self._config = ServerConfig(port=0, **settings)

    def start(self) -> asyncio.Task[int]:
        return asyncio.create_task(
            serve(
                self._config,
                EngineConfig(model=ModelConfig(model="tiny")),
                stop=self.stop,
                start_engine=lambda *_: self.engine,  # type: ignore[arg-type,return-value]
                make_app=self._app,
                announce=self._announce,
            )
        )

    def _app(self, state: Any) -> Any:
        self.state = state
        return make_app(state, [*health.routes, *self.endpoints.routes])

    def _announce(self, text: str) -> None:
        self.banner = text
        self.port = int(re.search(r"http://127\.0\.0\.1:(\d+)", text)[1])  # type: ignore[index]

    async def waiting(self, path: str = "/v1/wait") -> Connection:
        """A client whose request is being worked on."""
        connection = await Connection.open(self.port)
        connection.get(path)
        await asyncio.wait_for(self.endpoints.arrived.wait(), PATIENCE)
        return connection


@contextlib.asynccontextmanager
async def ready(**settings: Any) -> AsyncIterator[tuple[Server, asyncio.Task[int]]]:
    server = Server(stop=Stop(), **settings)
    task = server.start()
    await until(lambda: bool(server.banner) or task.done())
    yield server, task
    assert await asyncio.wait_for(task, PATIENCE) in set(ExitCode)
    assert server.engine.num_shutdowns == 1
    with pytest.raises(ConnectionError):
        await Connection.open(server.port)


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_the_first_signal_drains_and_the_second_stops() -> None:
    async def test() -> None:
        stop = Stop()
        stop.signal()
        assert (stop.drain.is_set(), stop.now.is_set()) == (True, False)
        stop.signal()
        assert stop.now.is_set()

    run(test())


def test_the_first_failure_decides_the_exit_code() -> None:
    async def test() -> None:
        stop = Stop()
        assert stop.code == ExitCode.ANSWERED == 0
        for code in (ExitCode.ENGINE_DIED, ExitCode.CUT_OFF, ExitCode.ANSWERED):
            stop.fail(code)
            assert stop.code == 3

    run(test())


def test_without_work_it_ends_at_once() -> None:
    async def test() -> None:
        async with ready() as (server, task):
            server.stop.signal()  # type: ignore[union-attr]
            assert await task == 0

    run(test())


@pytest.mark.parametrize("path", ["/v1/wait", "/v1/stream"])
def test_a_drain_answers_what_there_is_and_refuses_the_rest(path: str) -> None:
    async def test() -> None:
        async with ready() as (server, task):
            old = await server.waiting(path)
            idle = await Connection.open(server.port)
            server.stop.signal()  # type: ignore[union-attr]
            await until(lambda: server.state.draining)
            idle.post("/v1/echo", b"{}")
            assert (await idle.reply()).error["code"] == "server_draining"
            new = await Connection.open(server.port)
            new.get("/ready")
            assert (await new.reply()).status == 503
            assert not task.done()
            server.endpoints.go_on.set()
            assert (await old.reply()).body.endswith((b"done", b"last"))
            assert await task == 0
            assert server.endpoints.num_cancelled == 0

    run(test())


def test_the_timeout_cuts_off() -> None:
    async def test() -> None:
        async with ready(shutdown_timeout=0.05) as (server, task):
            client = await server.waiting("/v1/stream")
            server.stop.signal()  # type: ignore[union-attr]
            assert await task == 1
            assert server.endpoints.num_cancelled == 1
            await client.head()
            assert await client.chunk() == b"first "
            assert await client.is_closed()

    # The last words are waited for before anything is cancelled; here nobody says any.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "_LAST_WORDS_SECONDS", 0.05)
        run(test())


def test_a_second_signal_cuts_off() -> None:
    async def test() -> None:
        async with ready() as (server, task):
            client = await server.waiting()
            server.stop.signal()  # type: ignore[union-attr]
            await until(lambda: server.state.draining)
            server.stop.signal()  # type: ignore[union-attr]
            assert await task == 1
            assert await client.is_closed()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "_LAST_WORDS_SECONDS", 0.05)
        run(test())


def test_two_signals_without_work_are_a_clean_end() -> None:
    async def test() -> None:
        async with ready() as (server, task):
            server.stop.signal()  # type: ignore[union-attr]
            server.stop.signal()  # type: ignore[union-attr]
            assert await task == 0

    run(test())


def test_an_engine_that_is_not_started_again_ends_the_server() -> None:
    async def test() -> None:
        async with ready() as (server, task):
            server.engine.die("killed by signal 9")
            assert await task == 3

    run(test())


def test_an_engine_that_dies_in_the_drain_is_not_a_clean_end() -> None:
    async def test() -> None:
        async with ready() as (server, task):
            client = await server.waiting()
            server.stop.signal()  # type: ignore[union-attr]
            await until(lambda: server.state.draining)
            server.engine.die("killed by signal 9")
            server.endpoints.go_on.set()
            assert (await client.reply()).body == b"done"
            assert await task == 3

    run(test())


# --- how it begins ---------------------------------------------------------------------------------------------------


def test_while_it_loads_it_says_so() -> None:
    async def test() -> None:
        server = Server(stop=Stop())
        server.engine.loaded = asyncio.get_running_loop().create_future()
        bound: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                lifecycle, "bind", lambda *args: (sock := bind(*args), bound.append(sock.getsockname()[1]))[0]
            )
            task = server.start()
            await until(lambda: bool(bound))
        for path in ("/health", "/ready"):
            connection = await Connection.open(bound[0])
            connection.get(path)
            reply = await connection.reply()
            assert (reply.status, reply.json()["status"]) == (503, "unavailable")
            assert "loading" in reply.json()["reason"]
        assert not server.banner
        server.engine.loaded.set_result(None)
        await until(lambda: bool(server.banner))
        connection = await Connection.open(server.port)
        connection.get("/ready")
        assert (await connection.reply()).status == 200
        server.stop.signal()  # type: ignore[union-attr]
        assert await task == 0

    run(test())


def test_a_signal_while_it_loads_is_a_clean_end() -> None:
    async def test() -> None:
        server = Server(stop=Stop())
        server.engine.loaded = asyncio.get_running_loop().create_future()
        task = server.start()
        await until(lambda: server.state is not None)
        server.stop.signal()  # type: ignore[union-attr]
        assert await asyncio.wait_for(task, PATIENCE) == 0
        assert server.engine.num_shutdowns == 1

    run(test())


@pytest.mark.parametrize("error", [ConfigError("bad"), ModelLoadError("no weights")])
def test_a_model_that_cannot_be_loaded_is_raised(error: Exception) -> None:
    async def test() -> None:
        server = Server(stop=Stop())
        server.engine.loaded = asyncio.get_running_loop().create_future()
        server.engine.loaded.set_exception(error)
        with pytest.raises(type(error)):
            await server.start()
        assert server.engine.num_shutdowns == 1

    run(test())


def test_an_engine_that_dies_while_it_loads_ends_the_server() -> None:
    async def test() -> None:
        server = Server(stop=Stop())
        server.engine.loaded = asyncio.get_running_loop().create_future()
        server.engine.loaded.set_exception(EngineDeadError("killed by signal 9"))
        assert await server.start() == 3

    run(test())


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}.*--port"):
            asyncio.run(serve(ServerConfig(port=port), EngineConfig(), stop=None, start_engine=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ messages }}\n{% for %}", r"chat\.jinja: the chat template is invalid at line 2: .*--chat-template"),
        ("\n\n{{ messages | shout }}", r"chat\.jinja: the chat template is invalid at line 3: .*shout"),
        (None, r"cannot read the chat template .*chat\.jinja: No such file"),
        (b"\xff", r"chat\.jinja: it is not UTF-8 text"),
        ("", r"chat\.jinja: the chat template is empty; .*--chat-template"),
        (" \n\t", r"chat\.jinja: the chat template is empty; .*--chat-template"),
    ],
)
def test_a_broken_chat_template_is_told_before_anything_is_loaded(
    tmp_path: Path, template: str | bytes | None, complaint: str
) -> None:
    file = tmp_path / "chat.jinja"
    if template is not None:
        file.write_bytes(template if isinstance(template, bytes) else template.encode())
    with pytest.raises(ConfigError, match=complaint):
        start_engine(EngineConfig(), ServerConfig(chat_template=str(file)), lambda *_: None)


def test_a_chat_template_that_cannot_work_ends_the_start(tmp_path: Path) -> None:
    """Only with the model's tokens it is known that it fails for every chat."""

    async def test() -> None:
        server = Server(stop=Stop(), chat_template="chat.jinja")
        server.engine.loaded = asyncio.get_running_loop().create_future()
        server.engine.loaded.set_exception(TemplateFailedError("the chat template failed with UndefinedError: x"))
        with pytest.raises(ConfigError, match=r"chat\.jinja: the chat template failed with UndefinedError"):
            await server.start()

    run(test())


def test_a_host_without_an_address_is_told() -> None:
    """A name so long that nobody needs to be asked for it."""
    with pytest.raises(ConfigError, match="has no address"):
        bind(ServerConfig(host="x" * 300, port=0), ())


@pytest.mark.parametrize("host", ["0.0.0.0", "", "*", "::"])
def test_other_machines_are_answered_only_with_keys(host: str) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with pytest.raises(ConfigError, match="API key"):
        bind(ServerConfig(host=host, port=0), ())
    bind(ServerConfig(host=host, port=0), ("key",)).close()
    bind(ServerConfig(host=host, port=0, insecure=True), ()).close()


def test_the_model_is_served_under_its_given_or_last_name(tmp_path: Any) -> None:
    def names(model: str, *given: str) -> tuple[str, ...]:
        return served_names(ServerConfig(served_model_name=given), EngineConfig(model=ModelConfig(model=model)))

    assert names("bundled") == ("bundled",)
    assert names("Qwen/Qwen2.5-0.5B") == ("Qwen/Qwen2.5-0.5B",)
    assert names(str(tmp_path)) == (tmp_path.name,)  # where it lies is nobody's business
    assert names("bundled", "a", "b", "a") == ("a", "b")
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")  # not UTF-8
    (tmp_path / "link").symlink_to(os.fsdecode(b"caf\xe9"))
    assert names(str(tmp_path / "link")) == ("caf\ufffd",)


def test_the_banner_says_what_there_is_room_for() -> None:
    async def test() -> None:
        text = banner(make_state(), INFO, "http://127.0.0.1:8000")
        assert text.startswith("Chairlift is ready at http://127.0.0.1:8000\n")
        assert "about 21 chats of 2,048 tokens at once" in text
        assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in text
        assert "Bearer" not in text and f", {INFO.dtype}\n" in text
        fp8 = banner(make_state(), dataclasses.replace(INFO, quantization="fp8"), "http://127.0.0.1:8000")
        assert f", {INFO.dtype} with fp8 weights\n" in fp8
        int8 = banner(make_state(), dataclasses.replace(INFO, kv_cache_dtype="int8"), "http://127.0.0.1:8000")
        assert f", {INFO.dtype}, KV cache in int8\n" in int8
        rounding = dataclasses.replace(INFO, approximations=("8-bit activations", "8-bit K and V"))
        line = "rounds    8-bit activations; 8-bit K and V\n"
        assert line in banner(make_state(), rounding, "http://127.0.0.1:8000") and "rounds" not in text
        orca = banner(make_state(), dataclasses.replace(INFO, preset="orca"), "http://127.0.0.1:8000")
        assert "preset    orca: Orca (OSDI 2022)\n" in orca and "preset" not in text
        drafts = dataclasses.replace(INFO, speculative_method="ngram", num_speculative_tokens=8)
        line = "drafts    ngram, up to 8 tokens of a request in a step\n"
        assert line in banner(make_state(), drafts, "http://127.0.0.1:8000") and "drafts" not in text
        assert "samples" not in text
        info = dataclasses.replace(INFO, sampling_defaults={"temperature": 0.7, "top_k": 20})
        samples = "samples   with temperature 0.7, top_k 20, where a request does not say\n"
        assert samples in banner(make_state(), info, "http://127.0.0.1:8000")
        with_key = banner(make_state(api_key=("sk-secret",)), INFO, "http://127.0.0.1:8000")
        assert "Bearer YOUR_KEY" in with_key
        assert "sk-secret" not in with_key

    run(test())


def test_the_file_limit_is_raised_for_all_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        lifecycle._raise_file_limit(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(456, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_limit_that_is_too_low_is_named_with_the_remedy() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] == resource.RLIM_INFINITY:
        pytest.skip("the limit of this system has no end")
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logger = logging.getLogger("chairlift.server")
    logger.addHandler(handler)
    try:
        lifecycle._raise_file_limit(before[1])
    finally:
        logger.removeHandler(handler)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert f"and {before[1]} connections need {before[1] + 256}; raise the limit (ulimit -n" in logged.getvalue()


# --- signals, and peace ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hangups(action: signal.Handlers) -> Iterator[None]:
    """The handling of SIGHUP in this process, however it was started."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP] * 2], ids=str)
def test_signals_reach_the_server(numbers: list[signal.Signals]) -> None:
    async def test() -> None:
        server = Server()  # without a stop of its own: it takes the signals
        task = server.start()
        await until(lambda: bool(server.banner))
        client = await server.waiting()
        for number in numbers:
            os.kill(os.getpid(), number)
            await until(lambda: server.state.draining)
        server.endpoints.go_on.set()
        assert (await client.reply()).body == b"done"
        assert await asyncio.wait_for(task, PATIENCE) == 0

    with hangups(signal.SIG_DFL):
        handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        run(test())
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers


def test_a_server_outlives_its_terminal_where_it_is_told_to() -> None:
    async def test() -> None:
        server = Server()
        task = server.start()
        await until(lambda: bool(server.banner))
        os.kill(os.getpid(), signal.SIGHUP)
        client = await server.waiting()
        assert not server.state.draining
        os.kill(os.getpid(), signal.SIGTERM)
        server.endpoints.go_on.set()
        assert (await client.reply()).body == b"done"
        assert await asyncio.wait_for(task, PATIENCE) == 0

    with hangups(signal.SIG_IGN):
        run(test())


class RecordingSelector(selectors.DefaultSelector):
    """Remembers for how long the loop meant to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def select(self, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        return super().select(timeout)


def test_an_idle_server_sleeps() -> None:
    selector = RecordingSelector()

    async def test() -> None:
        async with ready(status_interval=10**6) as (server, _):  # its next line is not due here, however slow it begins
            connection = await Connection.open(server.port)
            connection.get("/health")
            assert (await connection.reply()).status == 200
            await connection.close()
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            timer = threading.Timer(0.3, loop.call_soon_threadsafe, (over.set,))
            timer.start()
            selector.timeouts.clear()
            await over.wait()
            asleep = [timeout for timeout in selector.timeouts if timeout != 0]
            assert 1 <= len(asleep) <= 4
            assert all(timeout is None or timeout > 1 for timeout in asleep)
            server.stop.signal()  # type: ignore[union-attr]

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(test())


# --- the command -----------------------------------------------------------------------------------------------------


def started(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """A server with HashLM, and its port, as the banner says."""
    line = [sys.executable, "-m", "chairlift", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for text in process.stdout:
        if found := re.search(r"ready at http://127\.0\.0\.1:(\d+)", text):
            return process, int(found[1])
    raise AssertionError(f"the server did not start: {process.communicate(timeout=PATIENCE)[1]}")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, log = process.communicate(timeout=2 * PATIENCE)
    finally:
        process.kill()
    return process.returncode, log


BODY = (
    b'{"model": "%s", "stream": true, "stream_options": {"include_usage": true},'
    b' "max_tokens": %d, "ignore_eos": true, "prompt": "a"}'
)


def test_a_stream_is_finished_before_the_exit() -> None:
    process, port = started("hashlm:5ms", "--log-format", "json")

    async def test() -> None:
        connection = await Connection.open(port)
        connection.post("/v1/completions", BODY % (b"hashlm:5ms", 100))
        assert (await connection.head())[0] == 200
        text = await connection.chunk()
        process.send_signal(signal.SIGTERM)
        while chunk := await connection.chunk():
            text += chunk
        assert b'"finish_reason":"length"' in text
        assert b'"completion_tokens":100' in text
        assert text.endswith(b"data: [DONE]\n\n")

    run(test())
    code, log = ended(process)
    assert code == 0
    assert all(json.loads(line)["message"] for line in log.splitlines()) and log


@pytest.mark.full
@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_a_stream_that_is_cut_off_is_told_so(how: str) -> None:
    process, port = started("hashlm:50ms", "--shutdown-timeout", "0.2" if how == "timeout" else "30")

    async def test() -> None:
        connection = await Connection.open(port)
        connection.post("/v1/completions", BODY % (b"hashlm:50ms", 2000))
        assert (await connection.head())[0] == 200
        text = await connection.chunk()
        process.send_signal(signal.SIGTERM)
        if how == "second signal":
            while True:
                other = await Connection.open(port)
                other.get("/ready")
                if (await other.reply()).status == 503:
                    break
            process.send_signal(signal.SIGINT)
        text += await asyncio.wait_for(connection.reader.read(), PATIENCE)
        assert b'data: {"error":' in text
        assert b"[DONE]" not in text

    run(test())
    assert ended(process)[0] == 1


def family(root: int) -> set[int]:
    """Ids of a process and of all its descendants."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has ended


@pytest.mark.full
@pytest.mark.parametrize("how", ["drain", "timeout", "second signal"])
def test_replicas_drain_as_one_engine_does(how: str) -> None:
    timeout = "0.2" if how == "timeout" else "30"
    process, port = started("hashlm:10ms", "--replicas", "2", "--shutdown-timeout", timeout)
    members, length = family(process.pid), 100 if how == "drain" else 4000

    async def test() -> None:
        streams = [await Connection.open(port) for _ in range(6)]
        texts = []
        for stream in streams:
            stream.post("/v1/completions", BODY % (b"hashlm:10ms", length))
            assert (await stream.head())[0] == 200
            texts.append(await stream.chunk())
        idle = await Connection.open(port)
        process.send_signal(signal.SIGTERM)
        if how != "timeout":
            while True:
                other = await Connection.open(port)
                other.get("/ready")
                if (await other.reply()).status == 503:
                    break
            idle.post("/v1/completions", BODY % (b"hashlm:10ms", 1))
            refused = await idle.reply()
            assert refused.status == 503 and refused.error["code"] == "server_draining"
            assert int(refused.headers["retry-after"]) > 0
        if how == "second signal":
            process.send_signal(signal.SIGINT)
        for stream, begin in zip(streams, texts, strict=True):
            text = begin + await asyncio.wait_for(stream.reader.read(), PATIENCE)
            assert (b"[DONE]" in text) == (how == "drain")
            assert (b'data: {"error":' in text) == (how != "drain")
            assert how != "drain" or b'"completion_tokens":100' in text

    run(test())
    assert ended(process)[0] == (0 if how == "drain" else 1)
    assert len(members) >= 3
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


@pytest.mark.full
def test_requests_that_die_in_the_drain_count_as_unanswered() -> None:
    process, port = started("hashlm:50ms")
    engine = engine_of(process)

    async def test() -> None:
        connection, other = await Connection.open(port), await Connection.open(port)
        connection.post("/v1/completions", BODY % (b"hashlm:50ms", 2000))
        assert (await connection.head())[0] == 200
        process.send_signal(signal.SIGTERM)
        while True:
            other.get("/ready")
            if (await other.reply()).status == 503:
                break
        os.kill(engine, signal.SIGKILL)
        text = await asyncio.wait_for(connection.reader.read(), PATIENCE)
        assert b'data: {"error":' in text

    run(test())
    code, log = ended(process)
    assert "1 requests were cut off" in log
    assert code == 1


@pytest.mark.full
def test_without_restart_the_server_ends_with_its_engine() -> None:
    process, port = started("hashlm:50ms", "--no-restart")
    engine = engine_of(process)

    async def test() -> None:
        connection = await Connection.open(port)
        connection.post("/v1/completions", BODY % (b"hashlm:50ms", 2000))
        assert (await connection.head())[0] == 200
        os.kill(engine, signal.SIGKILL)
        text = await asyncio.wait_for(connection.reader.read(), PATIENCE)
        assert b'data: {"error":' in text
        assert b"[DONE]" not in text

    run(test())
    assert ended(process)[0] == 3


def engine_of(process: subprocess.Popen[str]) -> int:
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    [engine] = [pid for pid in map(int, children.stdout.split()) if "engine_process" in _command_line(pid)]
    return engine


def _command_line(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode()


def test_the_http_process_knows_no_torch() -> None:
    code = (
        "import sys, chairlift.server.http.lifecycle; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
