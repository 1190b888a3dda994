"""An engine process of another machine, reached through a port: here the other machine is a child process."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.outputs import OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.process.process_client import EnginePlace, ProcessClient
from chairlift.errors import EngineDeadError
from chairlift.fleet.fleet import Fleet
from chairlift.fleet.node import SECRET_BYTES, NodeReplica, keep_alive, listening_addresses
from chairlift.loading.model import read_tokenizer
from tests.e2e.oracle import expected_hashlm
from tests.fleet.test_local import bounded, until

SECRET = bytes(range(SECRET_BYTES))


def obey(orders: Connection) -> None:
    """Run a replica in this process, as an actor does."""
    replica = NodeReplica()
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = orders.recv()
            orders.send(getattr(replica, name)(*arguments))


class ChildActor(EnginePlace):
    """A place in a child process."""

    pid: int | None = None

    def __init__(self, wrong_secrets: int = 0) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=obey, args=(theirs,))
        self._pool = ThreadPoolExecutor(1)
        self._wrong = wrong_secrets
        self._end: asyncio.Future[str] | None = None

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._orders.send((name, arguments))
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._orders.recv)

    async def launch(self) -> tuple[socket.socket, dict[str, Any]]:
        self.process.start()
        facts = await self._call("listen", "127.0.0.1", SECRET)
        strangers = [socket.create_connection(facts.address) for _ in range(self._wrong)]
        for stranger in strangers:
            stranger.sendall(b"x" * SECRET_BYTES)
        sock = socket.create_connection(facts.address)
        sock.sendall(SECRET)
        keep_alive(sock)
        self.pid = await self._call("start", [])
        for stranger in strangers:
            with stranger, contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "the engine talks to a stranger"
        sock.setblocking(False)
        self._end = asyncio.ensure_future(self._call("wait"))
        return sock, {"threads": 1}

    async def wait(self) -> str:
        assert self._end is not None
        with contextlib.suppress(EOFError):
            return await asyncio.shield(self._end)
        return "the actor was lost"

    def kill(self) -> None:
        if self.process.pid is not None:
            self.process.kill()


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the other machine runs Linux")
def test_engines_behind_ports_serve_and_move_their_streams() -> None:
    """An actor is killed in the middle of all streams. Its engine dies with it, and every stream is right."""

    async def test() -> None:
        config = EngineConfig.from_flat({"model": "hashlm:2ms", "max_num_seqs": 4, "num_kv_blocks": 500})
        places: list[ChildActor] = []

        def make(engine: AsyncEngine) -> Fleet:
            def connect(index: int, events: Any) -> ProcessClient:
                places.append(ChildActor(wrong_secrets=index))
                return ProcessClient(config.to_flat(), events, places[-1])

            return Fleet(config, engine, connect, replicas=2)

        engine = AsyncEngine.start(config, read_tokenizer=read_tokenizer, connect=make)
        try:
            await engine.wait_ready()
            assert engine.info is not None and engine.info.threads == 2
            params = SamplingParams(max_tokens=120, ignore_eos=True, seed=3)
            prompts = [[7, number] for number in range(1, 9)]
            streams = [await engine.submit(prompt, params, kind=OutputKind.FINAL) for prompt in prompts]
            await until(lambda: engine.stats.generation_tokens > 100)
            victim = engine.replicas.shown()[1].pid
            places[1].process.kill()
            for prompt, stream in zip(prompts, streams, strict=True):
                (output,) = [each async for each in stream]
                assert output.outputs[0].token_ids == expected_hashlm(prompt, params).token_ids
            await until(lambda: not Path(f"/proc/{victim}").exists())
            await until(lambda: all(each.state == "ready" for each in engine.replicas.shown()))
            assert [each.restarts for each in engine.replicas.shown()] == [0, 1] and engine.stats.num_lost == 0
        finally:
            await engine.shutdown()
            for place in places:
                place.kill()
                place.process.join()

    bounded(test)


def test_a_connection_without_the_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that say nothing, too little or something else are closed, and the port closes at last."""
    monkeypatch.setattr("chairlift.fleet.node._OPEN_SECONDS", 0.3)
    monkeypatch.setattr("chairlift.fleet.node._HELLO_SECONDS", 0.1)
    replica = NodeReplica()
    with pytest.raises(ValueError, match="must have 32 bytes, got 3"):
        replica.listen("127.0.0.1", b"abc")
    facts = replica.listen("127.0.0.1", SECRET)
    assert facts.memory > 0 and facts.processors and len(set(facts.processors)) == len(facts.processors)
    strangers = [socket.create_connection(facts.address) for _ in range(3)]
    strangers[1].sendall(SECRET[:-1])
    strangers[2].sendall(SECRET[::-1])
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="did not connect within"):
        replica.start([])
    assert time.monotonic() - began < 5
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(facts.address)
    with pytest.raises(EngineDeadError, match="does not listen"):
        replica.start([])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not tell who listens")
def test_addresses_of_ray_are_found_and_no_others() -> None:
    """A process counts by its command; one that is called raylet listens on IPv4 and IPv6."""
    program = (
        "import socket, sys; a = socket.create_server(('127.0.0.1', 0)); b = socket.create_server(('::1', 0),"
        " family=socket.AF_INET6); print(a.getsockname()[1], b.getsockname()[1], flush=True); sys.stdin.read()"
    )

    async def ports(*more: str) -> tuple[asyncio.subprocess.Process, list[str]]:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec("python", "-c", program, *more, stdin=pipe, stdout=pipe)
        assert child.stdout is not None
        first, second = (await child.stdout.readline()).split()
        return child, [f"127.0.0.1:{first.decode()}", f"[::1]:{second.decode()}"]

    async def test() -> None:
        raylet, listens = await ports("/opt/ray/raylet")
        other, hidden = await ports("/opt/tray/array")
        try:
            found = listening_addresses()
            assert set(listens) <= found.keys() and not found.keys() & set(hidden)
        finally:
            for child in (raylet, other):
                child.kill()
                await child.communicate()

    bounded(test)
