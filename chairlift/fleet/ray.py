"""Runs replicas as actors on the machines of a Ray cluster. Only this module imports Ray.

Ray finds a machine with enough free processors, starts the actor there, and reports when the actor is lost. The actor
is a :class:`~chairlift.fleet.node.NodeReplica`, which starts an engine process. This engine process is connected
directly to the server's process, so requests and tokens do not pass through Ray. Ray Serve is not used: the server's
own process routes the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.config import CPU_CACHE_SHARE, EngineConfig
from chairlift.engine.process.process_client import EngineEvents, EnginePlace, ProcessClient
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.fleet.local import machine_processors
from chairlift.fleet.member import ConnectReplica
from chairlift.fleet.node import SECRET_BYTES, NodeFacts, NodeReplica, is_open, keep_alive
from chairlift.version import __version__

__all__ = ["LOCAL", "RayCluster", "ray_models", "ray_replicas"]

_log = logging.getLogger(__name__)

LOCAL: Final = "local"
"""Address that starts a new Ray cluster with only this machine. The cluster ends with this process."""
_OBJECT_STORE_BYTES: Final = 80 * 2**20
_WAIT_SECONDS: Final = 20.0
"""Time in seconds between two log messages which say that a replica still waits for free processors."""
_ROOM_SECONDS: Final = 1800.0
"""Maximum time in seconds for which a replica waits for free processors. Machines that are added on demand start in
minutes."""
_LOOPBACK: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable that Ray reads when it is imported. If it is 0, all processes of a new cluster listen on the
loopback address only, on every system; otherwise they listen on all addresses of the machine."""
_CONNECT_SECONDS: Final = 20.0
_ACTOR_SECONDS: Final = 60.0


def ray_replicas(config: EngineConfig, count: int, address: str) -> ConnectReplica:
    """Function that starts a replica, given its index, in the Ray cluster at ``address``. There are ``count`` replicas.

    ``address`` is :data:`LOCAL`, ``auto``, or the host and port of the cluster's head. Raises ConfigError if Ray is
    missing, if Ray does not authenticate by tokens, and for a model on a GPU.
    """
    if config.model.device != "cpu":
        raise ConfigError(
            f"replicas in a Ray cluster compute on processors, and device is {config.model.device!r}; start a server"
            " for each GPU, with CUDA_VISIBLE_DEVICES"
        )
    cluster = RayCluster(address, count, config.model.threads)
    cache = config.cache
    divide = cache.kv_cache_memory_bytes is None and cache.num_kv_blocks is None
    settings = config.to_flat()

    def connect(index: int, events: EngineEvents) -> ProcessClient:
        return ProcessClient(settings, events, _Actor(cluster, index, divide))

    return connect


def ray_models(address: str) -> Callable[[int, int], EnginePlace]:
    """Function that returns a place for the engine of a model, given the model's index and its memory in bytes.

    Ray finds a machine with enough free memory. The engine may use all processors of that machine, whatever else runs
    there. ``address`` is as for :func:`ray_replicas`. Raises ConfigError if Ray is missing, or does not authenticate by
    tokens.
    """
    cluster = RayCluster(address, 1, None)
    return lambda index, memory: _Actor(cluster, index, divide=False, memory=memory)


class RayCluster:
    """Connection to a Ray cluster, and record of the processors that each replica uses.

    The cluster is joined when the first replica starts.
    """

    def __init__(self, address: str, count: int, threads: int | None) -> None:
        _check_authentication(address)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address == LOCAL:
            # Ray's memory monitor could kill replicas when another program uses much memory.
            os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
            os.environ[_LOOPBACK] = "0"
        try:
            import ray
        except ImportError:
            raise ConfigError("Ray is not installed; pip install 'chairlift[ray]'") from None
        self.ray: Any = ray
        self.node = ""
        """Ray's id of the machine on which this process runs."""
        self.cores = 0
        """Number of processors of each replica. 0 before the cluster is joined."""
        self._address = address
        self._count = count
        self._threads = threads
        self._joining = asyncio.Lock()
        self._claims: dict[int, tuple[str, list[int]]] = {}
        self._reported: set[str] = set()

    async def join(self) -> None:
        """Join the cluster on the first call. Raises ConfigError if this fails."""
        async with self._joining:
            if not self.cores:
                self.cores = await asyncio.to_thread(self._join)
                handler = signal.getsignal(signal.SIGTERM)
                if handler is not None and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, handler)  # Ray's handler would write a stack trace first
                    signal.siginterrupt(signal.SIGTERM, False)

    def _join(self) -> int:
        ray = self.ray
        if not ray.is_initialized():
            more: dict[str, Any] = {}
            if self._address == LOCAL:
                processors = len(machine_processors()) or os.cpu_count() or 1
                more = {"num_cpus": processors, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR, **more)
            except Exception as error:  # Ray raises many types of exceptions
                raise ConfigError(f"cannot join the Ray cluster at {self._address}: {error}") from None
            self._check_loopback()
        self.node = ray.get_runtime_context().get_node_id()
        if self._threads is not None:
            return self._threads
        sizes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        return _cores_each(sizes, self._count)

    def _check_loopback(self) -> None:
        """Raise ConfigError if other machines could reach the cluster that was started for this machine alone."""
        address = str(self.ray.util.get_node_ip_address())
        if self._address == LOCAL and is_open(f"{address}:0"):
            self.ray.shutdown()
            raise ConfigError(
                f"the Ray cluster of this machine would listen on {address}, because Ray was imported before; set"
                f" {_LOOPBACK}=0 in the environment, or import ray after Chairlift has started the cluster"
            )

    def actor(self, memory: int | None) -> Any:
        """Create an actor. Ray starts it as soon as a machine has ``memory`` bytes free, or without them enough free
        processors."""
        wanted = {"num_cpus": self.cores} if memory is None else {"num_cpus": 0, "memory": memory}
        options = {
            **wanted,
            "max_restarts": 0,  # the fleet starts replicas again
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        return self.ray.remote(**options)(_Replica).remote()

    def check(self, node: str, facts: NodeFacts) -> None:
        """Check that a machine can be used, and log, once per machine, the addresses of its Ray processes that other
        machines can reach.

        Raises ConfigError if the machine cannot be used.
        """
        host = facts.address[0]
        if not facts.authenticated:
            raise ConfigError(
                f"Ray on {host} takes commands without a token; start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on"
                " every machine"
            )
        if facts.version != __version__:
            raise ConfigError(
                f"Chairlift on {host} is {facts.version}, and here {__version__}; install the same version"
            )
        if node not in self._reported:
            self._reported.add(node)
            opened = {address: name for address, name in facts.listening.items() if is_open(address)}
            shown = ", ".join(f"{address} ({name})" for address, name in opened.items())
            if shown or not facts.listening:
                _log.warning(
                    "Ray on %s listens for other machines, without encryption; commands need the token, metrics do"
                    " not: %s",
                    host,
                    shown or "the addresses are not known",
                )

    def claim(self, index: int, node: str, processors: list[int]) -> list[int]:
        """Reserve processors of a machine for a replica. Returns their numbers; empty if there are too few."""
        used = {
            number
            for other, (machine, numbers) in self._claims.items()
            if machine == node and other != index
            for number in numbers
        }
        free = [each for each in processors if each not in used]
        self._claims[index] = node, (free[: self.cores] if len(free) >= self.cores else [])
        return self._claims[index][1]

    def room(self, memory: int | None) -> str:
        """Text about what is free in the cluster and what :meth:`actor` needs, for log messages."""
        if memory is not None:
            free = self.ray.available_resources().get("memory", 0)
            return f"{free:,.0f} bytes of memory are free on all machines, {memory:,} on one machine are needed"
        free = self.ray.available_resources().get("CPU", 0)
        total = self.ray.cluster_resources().get("CPU", 0)
        return f"{free:g} of {total:g} processors are free, {self.cores} on one machine are needed"


class _Replica(NodeReplica):
    """The Ray actor of a replica."""

    def open(self, secret: bytes, door: str) -> tuple[str, NodeFacts]:
        """Listen for the connection from the server (the door). Returns (Ray's id of this machine, facts about this
        machine).

        The actor listens on this machine's address in the cluster. If the server is on the same machine (``door`` is
        Ray's id of the server's machine), it listens on the loopback address only.
        """
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, self.listen("127.0.0.1" if node == door else ray.util.get_node_ip_address(), secret)


class _Actor(EnginePlace):
    """Starts and stops the engine process of one replica by a Ray actor. With ``memory``, it is the engine of a model
    that needs so many bytes; otherwise it has processors of its own."""

    def __init__(self, cluster: RayCluster, index: int, divide: bool, memory: int | None = None) -> None:
        self._cluster = cluster
        self._index = index
        self._divide = divide
        self._memory = memory
        self._actor: Any = None
        self._pid: int | None = None
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiter: asyncio.Task[None] | None = None
        self._host = ""

    @property
    def pid(self) -> int | None:
        return self._pid

    async def launch(self) -> tuple[socket.socket, dict[str, Any]]:
        cluster = self._cluster
        secret = secrets.token_bytes(SECRET_BYTES)
        await cluster.join()
        self._actor = cluster.actor(self._memory)
        try:
            node, facts = await self._place(self._actor.open.remote(secret, cluster.node))
            self._host = facts.address[0]
            cluster.check(node, facts)
            processors = []
            if self._memory is None:
                processors = cluster.claim(self._index, node, facts.processors)
            sock = await _connect(facts.address, secret)
            try:
                pid = await asyncio.wait_for(_future(self._actor.start.remote(processors)), _ACTOR_SECONDS)
            except BaseException:
                sock.close()
                raise
        except cluster.ray.exceptions.RayError as error:
            raise EngineDeadError(
                f"the replica's actor was lost: {_first_line(error)} Ray must run with RAY_AUTH_MODE=token, and with"
                " the same Python and Chairlift, on every machine"
            ) from None
        except (OSError, TimeoutError) as error:
            raise EngineDeadError(
                f"the replica on {self._host} cannot be reached: {error or type(error).__name__}; the server must be"
                " able to connect to the ports above 1023 of every machine"
            ) from None
        if node == cluster.node:
            self._pid = pid
        self._waiter = asyncio.create_task(self._wait(self._actor.wait.remote()))
        return sock, self._settings(facts, processors)

    async def _place(self, opened: Any) -> tuple[str, NodeFacts]:
        """Wait for the result of :meth:`_Replica.open`. Ray starts the actor when it has found free processors."""
        what = "replica" if self._memory is None else "model"
        future = _future(opened)
        end = time.monotonic() + _ROOM_SECONDS
        while not (await asyncio.wait({future}, timeout=_WAIT_SECONDS))[0]:
            room = self._cluster.room(self._memory)
            if time.monotonic() >= end:
                raise EngineDeadError(f"the Ray cluster had no room for the {what} for {_ROOM_SECONDS:g} s: {room}")
            _log.warning("%s %d waits for room in the Ray cluster: %s", what, self._index, room)
        found: tuple[str, NodeFacts] = future.result()
        return found

    def _settings(self, facts: NodeFacts, processors: list[int]) -> dict[str, Any]:
        if self._memory is not None:
            return {}
        settings: dict[str, Any] = {"threads": self._cluster.cores}
        if self._divide:
            share = len(processors) / len(facts.processors) if processors else 1.0
            settings["kv_cache_memory_bytes"] = int(facts.memory * CPU_CACHE_SHARE * share)
        return settings

    async def _wait(self, ended: Any) -> None:
        try:
            why = await _future(ended)
        except Exception as error:  # the actor or its machine was lost
            why = f"the replica's actor was lost: {_first_line(error)}"
        if not self._end.done():
            self._end.set_result(f"{why}, on {self._host}")
        self.kill()

    async def wait(self) -> str:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        self._pid = None
        actor = self._actor
        self._actor = None
        if actor is not None:
            with contextlib.suppress(Exception):  # the cluster itself may have ended
                self._cluster.ray.kill(actor)
        if not self._end.done():
            self._end.set_result("the replica's actor was killed")


def _future(reference: Any) -> asyncio.Future[Any]:
    """Future for a result of an actor. If the result is never awaited, no warning about its exception is logged."""
    future = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def _connect(address: tuple[str, int], secret: bytes) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    loop = asyncio.get_running_loop()
    try:
        sock.setblocking(False)
        async with asyncio.timeout(_CONNECT_SECONDS):
            await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, secret)
        keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _cores_each(sizes: list[int], count: int) -> int:
    """Largest number of processors per replica with which ``count`` replicas fit on machines of these sizes.

    Raises ConfigError if there are too few processors.
    """
    for cores in range(max(sizes, default=0), 0, -1):
        if sum(size // cores for size in sizes) >= count:
            return cores
    raise ConfigError(
        f"the Ray cluster has {sum(sizes)} processors, fewer than {count} replicas; start fewer, or say with --threads"
        " how many each needs if machines are added on demand"
    )


def _check_authentication(address: str, environ: Mapping[str, str] | None = None) -> None:
    """Make Ray require a token. Raises ConfigError if this is not possible, or if other users can read the token.

    For a cluster of only this machine, a new token is created, which is not written to a file.
    """
    known = os.environ if environ is None else environ
    mode = known.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise ConfigError(
            f"RAY_AUTH_MODE is {mode!r}, so anyone who can reach Ray's ports could run programs; leave it out or set"
            " it to token"
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    if known.get("RAY_AUTH_TOKEN"):
        return
    path = Path(known.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if address == LOCAL:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(SECRET_BYTES)
        return
    try:
        status = path.stat()
    except OSError:
        raise ConfigError(
            f"the Ray cluster's token is missing: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or copy it to {path}"
        ) from None
    if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"other users can read the Ray cluster's token; run: chmod 600 {path}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
