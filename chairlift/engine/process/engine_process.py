"""Main program of the engine's own process. Only the server starts it.

Its standard input is a socket to the server. The first message names the model; the process loads the model and serves
until the connection ends. The process also dies when its parent dies for any reason. It ignores signals that a terminal
or a service manager sends to the whole process group: the parent handles these signals, and lets running requests
finish first.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
import time

from chairlift.base.parent import die_with_parent
from chairlift.config import EngineConfig
from chairlift.engine.adapters import Adapters
from chairlift.engine.core import EngineCore
from chairlift.engine.floor_share import FloorShare
from chairlift.engine.grammars import Grammars
from chairlift.engine.mask_limits import MaskLedger, MaskLimits
from chairlift.engine.preparers import Preparers
from chairlift.engine.process.core_process import Connection, CoreProcess, FrameLogHandler, GateOf
from chairlift.engine.process.messages import Loading, NotLoaded, Start
from chairlift.engine.process.side_work import SideWorkOf
from chairlift.errors import ChairliftError, ConfigError
from chairlift.loading.kv_store import open_store
from chairlift.loading.model import load_executor, read_tokenizer
from chairlift.loading.pooled import is_pooling, load_pooling
from chairlift.text.grammar.compiler import GrammarCompiler
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["main"]

_PROGRESS_SECONDS = 0.1


def main(gate_of: GateOf | None = None, side_work_of: SideWorkOf | None = None) -> None:
    """Run the engine. ``gate_of`` makes a gate for its steps; None: they begin at once. ``side_work_of`` makes other
    work, which runs between two steps; None: there is none.

    Exit codes: 0 the connection ended, 1 there was no connection, 2 the model cannot be loaded.
    """
    die_with_parent(int(sys.argv[2]))  # during a step, the process would not notice that the connection ended
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # child processes must not inherit the socket
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    connection = Connection(sock)
    start = _start_message(connection)
    if start is None:
        sys.exit(1)
    _log_to(connection, start.log_level)
    try:
        config = EngineConfig.from_flat(start.settings)
        process = _load(connection, config)
        if gate_of is not None:
            process.share(gate_of)
        if side_work_of is not None:
            process.do_beside(side_work_of(config, process.info))
    except (ChairliftError, OSError, MemoryError) as error:
        kind = type(error).__name__ if isinstance(error, ChairliftError) else ConfigError.__name__
        connection.send(NotLoaded(kind, f"{error}" or type(error).__name__))
        while connection.backlog and not connection.closed:
            connection.receive(1.0)
        sys.exit(2)
    # The objects that exist now live as long as the process, so the garbage collector need not scan them.
    gc.collect()
    gc.freeze()
    process.run()


def _load(connection: Connection, config: EngineConfig) -> CoreProcess:
    progress = _Progress(connection)
    if is_pooling(config):
        texts = load_pooling(config, progress)
        core = EngineCore(texts.executor, texts.scheduler, max_model_len=texts.info.max_model_len)
        return CoreProcess(connection, core, texts.info, config.scheduler.promises, progress, one_step_each=True)
    loaded = load_executor(config, progress)
    info = loaded.info
    grammars = Grammars(
        GrammarCompiler(lambda: _tokenizer(config, info.model_dir), info.vocab_size, info.eos_token_ids),
        ledger=MaskLedger(MaskLimits.of(config.scheduler)),
        vocab_size=info.vocab_size,
    )
    store = open_store(config, loaded.executor, info)
    core = EngineCore(
        loaded.executor,
        config.scheduler,
        max_model_len=info.max_model_len,
        cache=config.cache,
        cache_secret=os.urandom(16) if store is None else store.secret,
        preparers=Preparers(grammars, Adapters(loaded.adapters, config.lora.active), store),
    )
    least_seconds = loaded.least_step_seconds()
    if least_seconds is not None:
        core.times.floor = FloorShare(least_seconds)
    info = dataclasses.replace(info, capacity_tokens=core.kv.capacity_tokens)
    return CoreProcess(connection, core, info, config.scheduler.promises, progress, loaded.approximations)


def _tokenizer(config: EngineConfig, model_dir: str) -> Tokenizer | None:
    """The model's tokenizer, used here only to compile grammars. The API process converts between text and tokens."""
    return None if config.model.skip_tokenizer_init else read_tokenizer(config, model_dir)


def _start_message(connection: Connection) -> Start | None:
    while not connection.closed:
        for message in connection.receive(None):
            return message if isinstance(message, Start) else None
    return None


def _log_to(connection: Connection, level: int) -> None:
    logger = logging.getLogger("chairlift")
    logger.handlers[:] = [FrameLogHandler(connection.send)]
    logger.propagate = False
    logger.setLevel(level)


class _Progress:
    """Reports the progress of loading a few times a second. The reports also show that the process is alive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last_report = 0.0

    def __call__(self, label: str, share: float) -> None:
        now = time.monotonic()
        if share >= 1 or now - self._last_report >= _PROGRESS_SECONDS:
            self._last_report = now
            self._connection.send(Loading(label, share))


if __name__ == "__main__":
    main()
