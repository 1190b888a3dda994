"""The phases of a server: bind, load, serve, drain, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

from starlette.types import ASGIApp

from chairlift.base.presets import PRESETS
from chairlift.base.running_servers import RunningServer, announced
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.info import EngineInfo, PoolingInfo, describe_impl
from chairlift.engine.process.process_client import EnginePlace, ProcessClient, RemoteCore
from chairlift.errors import ConfigError, EngineDeadError, TemplateError, TemplateFailedError
from chairlift.fleet.fleet import Fleet
from chairlift.fleet.fleet_scaling import ScaleLimits
from chairlift.fleet.local import local_replicas
from chairlift.fleet.ray import ray_replicas
from chairlift.loading.model import read_images, read_tokenizer
from chairlift.models.vision.addresses import MediaSource
from chairlift.server.http.app import make_app
from chairlift.server.http.auth import check_exposure, load_keys
from chairlift.server.http.http_protocol import HttpLimits, HttpServer
from chairlift.server.http.state import ServerState
from chairlift.server.openai.batches.worker import BatchWorker, open_store, working
from chairlift.server.operations.adapters import load_modules
from chairlift.server.operations.idle_settings import check_adapter_settings, idle_server_settings
from chairlift.server.operations.status_line import PreemptionAlarm, StatusLine
from chairlift.server.operations.tracing import RequestTracer, otlp_exporter
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift.text.tool_calls import named_reasoning_format, named_tool_format
from chairlift.version import __version__

__all__ = ["ExitCode", "Stop", "banner", "bind", "drain", "serve", "served_names", "start_engine"]

_logger: Final = logging.getLogger("chairlift.server")
_LAST_WORDS_SECONDS: Final = 1.0
"""Seconds that remain at shutdown to send an error to requests that are cut off."""
_FLUSH_SECONDS: Final = 2.0
_WATCH_SECONDS: Final = 5.0
_CHAT_TOKENS: Final = 2048
_OTHER_FILES: Final = 256

Progress = Callable[[str, float], None]
Beside = Callable[[ServerState], contextlib.AbstractAsyncContextManager[None]]
"""Function that makes what runs beside a server while it serves."""
StartEngine = Callable[[EngineConfig, ServerConfig, Progress], AsyncEngine]


class ExitCode(enum.IntEnum):
    """Exit code of the server process."""

    ANSWERED = 0
    """The server was stopped by a signal, and all accepted requests got their response."""
    CUT_OFF = 1
    """Stopped by a signal; some requests were cut off by the timeout, a second signal or the end of the engine."""
    UNUSABLE = 2
    """The server could not start, because the settings, the model or the port cannot be used."""
    ENGINE_DIED = 3
    """The engine died, and the settings forbid a restart."""


class Stop:
    """Records stop signals, and the exit code. The first nonzero exit code is kept."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        """Set by the first signal. From then on the server accepts no new requests."""
        self.now = asyncio.Event()
        """Set by the second signal. From then on the server does not wait for running requests."""
        self._code = ExitCode.ANSWERED

    def signal(self) -> None:
        """Handle SIGTERM or SIGINT: the first signal starts the drain, the second stops the server at once."""
        (self.now if self.drain.is_set() else self.drain).set()

    def fail(self, code: ExitCode) -> None:
        if self._code is ExitCode.ANSWERED:
            self._code = code

    @property
    def code(self) -> ExitCode:
        return self._code


def start_engine(
    engine_config: EngineConfig, config: ServerConfig, on_progress: Progress, place: EnginePlace | None = None
) -> AsyncEngine:
    """Create the engine with the server's settings; it begins to load the model. ``place`` is where a single engine
    runs; None: in a plain process of this machine. Raises ConfigError."""
    named_tool_format(config.tool_call_parser)  # refuses a format that cannot be used
    named_reasoning_format(config.reasoning_parser)
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"cannot read the chat template {config.chat_template}: {reason}") from None
        if not template.strip():
            raise ConfigError(
                f"{config.chat_template}: the chat template is empty; write one into the file, or leave out "
                "--chat-template for the model's own"
            )
        try:
            ChatTemplate(template).compile()
        except TemplateError as error:
            raise ConfigError(
                f"{config.chat_template}: {error}; correct the file, or leave out --chat-template for the model's own"
            ) from None
    scheduler = engine_config.scheduler
    count = config.max_replicas or config.replicas
    limit = config.max_num_queued_reqs
    token_limit = config.max_num_queued_tokens
    connect: Callable[[AsyncEngine], RemoteCore] | None = None
    if place is not None:
        connect = functools.partial(ProcessClient, engine_config.to_flat(), place=place)
    if count > 1 or config.ray_address is not None or config.max_replicas is not None:
        limit = max(64, 4 * scheduler.max_num_seqs * count) if limit is None else limit
        token_limit = 32 * scheduler.max_num_batched_tokens * count if token_limit is None else token_limit
        connect = _replicated(engine_config, config)
    return AsyncEngine.start(
        engine_config,
        read_tokenizer=read_tokenizer,
        read_images=functools.partial(read_images, engine_config),
        on_progress=on_progress,
        restart=config.restart,
        chat_template=template,
        max_queued_requests=limit,
        max_queued_tokens=token_limit,
        queue_timeout=config.queue_timeout,
        request_timeout=config.request_timeout,
        health_timeout=config.health_timeout,
        connect=connect,
    )


def _replicated(engine_config: EngineConfig, config: ServerConfig) -> Callable[[AsyncEngine], Fleet]:
    """A function that makes the replicas of an engine. Raises ConfigError if replicas do not support one of the
    settings."""
    address = config.ray_address
    count = config.max_replicas or config.replicas
    scaling = _scaling(config)
    if engine_config.cache.kv_events_endpoint is not None:
        raise ConfigError(
            "kv_events_endpoint is for one engine, and replicas behind one queue need no router that knows their"
            " caches; leave one of the two out"
        )
    if engine_config.cache.kv_store is not None:  # each writes files of its own
        share = engine_config.cache.kv_store_bytes // count
        cache = dataclasses.replace(engine_config.cache, kv_store_bytes=share)
        engine_config = dataclasses.replace(engine_config, cache=cache)
    connect = local_replicas(engine_config, count) if address is None else ray_replicas(engine_config, count, address)

    def start(engine: AsyncEngine) -> Fleet:
        return Fleet(
            engine_config,
            engine,
            connect,
            replicas=_first_replicas(config),
            routing=config.routing,
            restart=config.restart,
            health_timeout=config.health_timeout,
            drain_timeout=config.shutdown_timeout,
            scaling=scaling,
        )

    return start


def _first_replicas(config: ServerConfig) -> int:
    """Number of replicas at the start."""
    return max(config.replicas, config.min_replicas or 1)


def _scaling(config: ServerConfig) -> ScaleLimits | None:
    """Limits of autoscaling; None if the number of replicas is fixed."""
    if config.max_replicas is None:
        return None
    return ScaleLimits(
        least=config.min_replicas or config.replicas,
        most=config.max_replicas,
        most_wait=config.autoscale_wait,
        goodput=config.autoscale_goodput,
        calm=config.autoscale_delay,
    )


async def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    *,
    stop: Stop | None = None,
    start_engine: StartEngine = start_engine,
    make_app: Callable[[ServerState], ASGIApp] = make_app,
    announce: Callable[[str], None] | None = None,
    comparison: str | None = None,
    beside: Beside | None = None,
) -> int:
    """Serve until stopped. Returns an :class:`ExitCode`.

    The port is bound before the model is loaded; until the model is ready, the server responds 503. ``announce`` gets
    the banner when the server is ready (default: print it). ``comparison`` is the worker program that simulates
    recordings for the live view page. ``beside`` makes a context manager that is entered when the engine is ready. If
    ``stop`` is given, the caller handles signals. Raises
    ConfigError or ModelLoadError when the settings, the port or the model cannot be used.
    """
    keys = load_keys(config)
    check_adapter_settings(config, engine_config, keys.values())
    exporter = None if config.otlp_traces_endpoint is None else otlp_exporter(config.otlp_traces_endpoint)
    sock = bind(config, keys)
    url = _url(sock)
    store = None
    try:
        store = open_store(config)
        _raise_file_limit(config.max_connections)
        progress = _Progress()
        engine = start_engine(engine_config, config, progress)
        progress("starting the engine", 0.0)
    except BaseException:
        sock.close()
        if store is not None:
            store.close()
        raise
    state = ServerState(config, engine, served_names(config, engine_config), api_keys=keys, started_at=int(time.time()))
    state.comparison = comparison
    if config.allowed_media_domains or config.allowed_local_media_path is not None:
        state.media = MediaSource(config.allowed_media_domains, config.allowed_local_media_path)
    if exporter is not None:
        state.tracer = RequestTracer(exporter, state.model_names[0])
        engine.events.subscribe("the tracer", state.tracer)
    if store is not None:
        state.batches = BatchWorker(state, store)
    limits = HttpLimits(max_connections=config.max_connections, stall_timeout=config.stall_timeout)
    app = make_app(state)
    server = HttpServer(app, limits, engine.stats.connection_refused)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(announced(_running(state, engine_config, url)))
        if stop is None:
            stop = Stop()
            stack.enter_context(_signals(stop))
        try:
            await server.start(sock)
            await stack.enter_async_context(working(state, app))
            return await _run(
                state, server, stop, lambda: (announce or _print)(_ready(state, engine_config, url, progress)), beside
            )
        finally:
            progress.end()
            await engine.shutdown()
            await _finished(server.requests(), _LAST_WORDS_SECONDS)
            await server.close(_FLUSH_SECONDS)
            if state.tracer is not None:
                await asyncio.to_thread(state.tracer.shutdown)


def _running(state: ServerState, engine_config: EngineConfig, url: str) -> RunningServer:
    """Facts about the server for ``chairlift ps``."""
    model = str(engine_config.model.model)
    path = Path(model).expanduser()
    return RunningServer(
        pid=os.getpid(),
        url=url,
        models=tuple(state.model_names),
        loaded=(str(path.resolve()) if path.exists() else model,),
        started_at=time.time(),
        version=__version__,
    )


async def _start(state: ServerState) -> None:
    """Wait until the model and the adapters that the settings name are loaded."""
    await state.engine.wait_ready()
    await load_modules(state)


async def _run(
    state: ServerState, server: HttpServer, stop: Stop, announce: Callable[[], None], beside: Beside | None
) -> int:
    """Run the server from the loading of the model to the end of the drain. Returns the exit code."""
    engine = state.engine
    state.completing = beside is not None
    try:
        if await _first(_start(state), stop.drain.wait()) == 0:
            async with contextlib.nullcontext() if beside is None else beside(state):
                state.completing = False
                announce()
                with _reporting(state):
                    await _first(stop.drain.wait(), engine.stopped.wait())
    except TemplateFailedError as error:
        raise ConfigError(f"{state.config.chat_template}: {error}") from None
    except EngineDeadError as error:
        _logger.error("the engine died while it was starting: %s", error)
        stop.fail(ExitCode.ENGINE_DIED)
    if not stop.drain.is_set():
        if stop.code is ExitCode.ANSWERED:
            _logger.error("the engine died, and restart is off: %s", engine.failure)
        stop.fail(ExitCode.ENGINE_DIED)
        state.draining = True
        return stop.code
    num_lost = engine.stats.num_lost
    num_left = await drain(state, server, stop) + engine.stats.num_lost - num_lost
    if engine.stopped.is_set():
        _logger.error("the engine died before everything was answered: %s", engine.failure)
        stop.fail(ExitCode.ENGINE_DIED)
    elif num_left:
        _logger.warning("stopped; %d requests were cut off", num_left)
        stop.fail(ExitCode.CUT_OFF)
    else:
        _logger.info("stopped; everything was answered")
    return stop.code


async def drain(state: ServerState, server: HttpServer, stop: Stop) -> int:
    """Accept no new requests, and wait for the running ones. Returns the number of unanswered requests.

    The wait ends when all requests are answered, after ``shutdown_timeout`` seconds, or when ``stop.now`` is set.
    Connections are still accepted, so that new clients get a 503 error instead of no connection.
    """
    state.draining = True
    pending = server.requests()
    timeout = state.config.shutdown_timeout
    if pending:
        _logger.info("finishing %d requests within %g s; a second signal stops at once", len(pending), timeout)
        await _first(_finished(pending, timeout), stop.now.wait())
    return sum(not task.done() for task in pending)


def bind(config: ServerConfig, keys: Collection[str]) -> socket.socket:
    """A socket bound to the host and port of the settings. Raises ConfigError if binding fails, or if other machines
    could use the server without a key."""
    host = config.host if config.host != "*" else "0.0.0.0"
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(f"host must be an address or name of this machine; {config.host!r} has no address") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    check_exposure(str(address[0]), keys, config.insecure)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # here, because only listening proves that the port is free
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on port {config.port} of {config.host}: {error.strerror}; "
            "stop the program that uses it, or choose another with --port (0 takes a free one)"
        ) from None
    sock.setblocking(False)
    return sock


def served_names(config: ServerConfig, engine_config: EngineConfig) -> tuple[str, ...]:
    """Model names for clients: the names in the settings, or by default the last part of the model's path."""
    if config.served_model_name:
        return tuple(dict.fromkeys(config.served_model_name))
    model = str(engine_config.model.model)
    path = Path(model)
    name = os.fsencode(path.resolve().name).decode(errors="replace")  # a link may lead to a name that is not valid text
    return (name or model,) if path.exists() else (model,)


def _pooling_banner(state: ServerState, info: EngineInfo, pooling: PoolingInfo, url: str) -> str:
    """Banner of a server whose model computes embeddings, scores or classes."""
    config = state.config
    intake = state.engine.intake
    gives = f"embeddings of {pooling.width:,} numbers" if pooling.task == "embed" else f"{len(pooling.labels)} classes"
    paths = ["/v1/embeddings" if pooling.task == "embed" else "/v1/classify"]
    paths += ["/v1/score", "/v1/rerank"] if pooling.scores else []
    key = "-H 'Authorization: Bearer YOUR_KEY' " if state.api_keys else ""
    return "\n".join(
        (
            f"Chairlift is ready at {url}",
            f"  model     {', '.join(state.model_names)}, {gives}, up to {info.max_model_len:,} tokens per text",
            f"  computes  {info.device}, {info.kernels} kernels, {info.threads} threads, {_numbers(info)}",
            *((f"  rounds    {'; '.join(info.approximations)}",) if info.approximations else ()),
            f"  pass      up to {info.max_num_seqs:,} texts and {info.max_num_batched_tokens:,} tokens",
            f"  queue     up to {intake.max_requests:,} texts and {intake.max_tokens:,} tokens",
            f"  limits    {config.max_connections:,} connections, {state.max_body_bytes / 2**20:g} MiB per body, "
            f"{config.request_timeout:g} s per request",
            f"  access    {'with' if state.api_keys else 'without'} an API key",
            f"  endpoints {', '.join(paths)}; all of them: {url}/docs   to stop: Ctrl-C (twice: at once)",
            "try:",
            f"  curl {url}{paths[0]} {key}-H 'Content-Type: application/json' -d '{{\"input\": \"Hello\"}}'",
        )
    )


def _numbers(info: EngineInfo) -> str:
    """Text for the banner: number formats of the arithmetic and of the weights."""
    return info.dtype if info.quantization is None else f"{info.dtype} with {info.quantization} weights"


def _drafts(info: EngineInfo) -> str:
    """Text for the banner: method of speculative decoding and number of draft tokens."""
    return f"{info.speculative_method}, up to {info.num_speculative_tokens} tokens of a request in a step"


def banner(state: ServerState, info: EngineInfo, url: str) -> str:
    """Text that is printed when the server is ready: model, device, memory, limits and an example request."""
    if info.pooling is not None:
        return _pooling_banner(state, info, info.pooling, url)
    config = state.config
    engine = state.engine
    count = _first_replicas(config)
    several = bool(engine.replicas.shown())
    range_ = (
        f", {config.min_replicas or config.replicas} to {config.max_replicas} by autoscaling"
        if config.max_replicas
        else ""
    )
    place = "" if config.ray_address is None else f", placed by Ray ({config.ray_address}),"
    rows = info.max_num_seqs // count
    length = min(_CHAT_TOKENS, info.max_model_len)
    chats = min(info.pool_tokens // length, info.max_num_seqs)
    room = (
        f"about {chats:,} chats of {length:,} tokens at once" if chats else f"less than one chat of {length:,} tokens"
    )
    key = "-H 'Authorization: Bearer YOUR_KEY' " if state.api_keys else ""
    body = (
        f'{{"model": "{state.model_names[0]}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    )
    graphs = f", CUDA graphs: {info.graphs}" if info.graphs else ""
    numbers = _numbers(info) + (f", KV cache in {info.kv_cache_dtype}" if info.kv_cache_dtype else "")
    defaults = ", ".join(f"{name} {value}" for name, value in info.sampling_defaults.items())
    lines = (
        ("model", f"{', '.join(state.model_names)}, up to {info.max_model_len:,} tokens per request"),
        ("computes", f"{info.device}, {info.kernels} kernels, {info.threads} threads, {numbers}{graphs}"),
        *((("rounds", "; ".join(info.approximations)),) if info.approximations else ()),
        ("layers", describe_impl(info.model_impl)),
        ("capacity", f"{room} ({info.pool_tokens:,} tokens of KV cache in blocks of {info.block_size})"),
        *(
            (("replicas", f"{count} engines{place} behind one queue{range_}, shown by {url}/v1/replicas"),)
            if several
            else ()
        ),
        ("step", f"up to {rows:,} requests and {info.max_num_batched_tokens:,} tokens" + " each" * several),
        *((("preset", f"{info.preset}: {PRESETS[info.preset].system}"),) if info.preset else ()),
        ("queue", f"up to {engine.intake.max_requests:,} requests and {engine.intake.max_tokens:,} prompt tokens"),
        (
            "limits",
            f"{config.max_connections:,} connections, {state.max_body_bytes / 2**20:g} MiB per body, "
            f"{config.request_timeout:g} s per request",
        ),
        *((("drafts", _drafts(info)),) if info.speculative_method else ()),
        *((("samples", f"with {defaults}, where a request does not say"),) if defaults else ()),
        ("access", "with an API key" if state.api_keys else "without an API key"),
    )
    width = max(len(name) for name, _ in lines)
    return "\n".join(
        (
            f"Chairlift is ready at {url}",
            *(f"  {name:<{width}}  {text}" for name, text in lines),
            f"  chat in the browser: {url}/   endpoints: {url}/docs   to stop: Ctrl-C (twice: at once)",
            "try:",
            f"  curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'",
        )
    )


def _ready(state: ServerState, engine_config: EngineConfig, url: str, progress: _Progress) -> str:
    progress.end()
    info = state.engine.info
    for each in idle_server_settings(state.config, engine_config, info) if info is not None else ():
        _logger.warning("%s", each)
    _logger.info("ready at %s", url)
    return banner(state, info, url) if info is not None else f"Chairlift is ready at {url}"


def _print(text: str) -> None:
    """Print to standard output. Errors, such as a full disk or a closed pipe, are ignored."""
    try:
        print(text, flush=True)
    except OSError as error:
        _logger.warning("cannot write to standard output: %s", error.strerror)
        with contextlib.suppress(OSError):  # buffered text must not raise again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _url(sock: socket.socket) -> str:
    """URL by which this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Progress:
    """Shows the progress of loading. On a terminal one line is overwritten; a log gets one line per phase."""

    def __init__(self) -> None:
        self._label = ""
        self._terminal = sys.stderr.isatty()
        self._open = False

    def __call__(self, label: str, share: float) -> None:
        if self._terminal:
            print(f"\r\x1b[K{label} {share:4.0%}", end="", file=sys.stderr, flush=True)
            self._open = True
        elif label != self._label:
            _logger.info("%s", label)
        self._label = label

    def end(self) -> None:
        if self._open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._open = False


# --- waiting ---------------------------------------------------------------------------------------------------------


async def _first(*awaitables: Awaitable[Any]) -> int:
    """Index of the awaitable that ends first. Raises the error of that awaitable. The other awaitables are
    cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    index = min(index for index, task in enumerate(tasks) if task in done)
    tasks[index].result()
    return index


async def _finished(tasks: set[asyncio.Task[None]], timeout: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout)


@contextlib.contextmanager
def _reporting(state: ServerState) -> Iterator[None]:
    """Context manager: write status lines and warnings to the log while the block runs."""
    tasks = [asyncio.create_task(_watch_preemption(state))]
    if state.config.status_interval:
        tasks.append(asyncio.create_task(_report(state)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _report(state: ServerState) -> None:
    engine = state.engine
    status = StatusLine(engine.stats, time.monotonic())
    while True:
        await asyncio.sleep(state.config.status_interval)
        line = status.next(engine.stats, num_waiting=engine.num_queued, now=time.monotonic())
        if line is not None:
            _logger.info("%s", line)


async def _watch_preemption(state: ServerState) -> None:
    engine = state.engine
    alarm = PreemptionAlarm()
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        if engine.info is not None and (warning := alarm.next(engine.stats, engine.info, now=time.monotonic())):
            _logger.warning("%s", warning)


@contextlib.contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    """Context manager: send SIGTERM and SIGINT to ``stop`` while the block runs. SIGHUP, which says that the terminal
    was closed, is handled too, except if it is ignored (``nohup``). The main thread's event loop must be running."""
    loop = asyncio.get_running_loop()
    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT), stop.signal)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        handlers[signal.SIGHUP] = stop.drain.set  # kernel and shell send one each
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _raise_file_limit(max_connections: int) -> None:
    """Raise the process's limit of open files as far as allowed, because each connection needs a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if limit < needed:
            _logger.warning(
                "this process may open %d files, and %d connections need %d; raise the limit (ulimit -n %d, LimitNOFILE"
                " of systemd, nofile of a container), or give a lower --max-connections",
                *(limit, max_connections, needed, needed),
            )
