"""The main loop of the engine process for embeddings, scores and classes: texts arrive, and vectors go back after each
forward pass."""

from __future__ import annotations

from chairlift.engine.info import EngineInfo
from chairlift.engine.pooled.pooling_core import PooledText, PoolingCore
from chairlift.engine.process.core_process import Connection
from chairlift.engine.process.messages import (
    Leave,
    Message,
    NotLoaded,
    PassBegun,
    Pool,
    Pooled,
    Ready,
    UpdateWeights,
    Watch,
)

__all__ = ["PoolingProcess"]


class PoolingProcess:
    """Runs a pooling core whose texts and results pass through a connection. Texts that arrive during a forward pass
    are computed in a later pass."""

    def __init__(self, connection: Connection, core: PoolingCore, info: EngineInfo) -> None:
        self._connection, self._core, self._info = connection, core, info

    def run(self) -> None:
        """Serve until the other side closes the connection."""
        connection, core = self._connection, self._core
        connection.send(Ready(self._info))
        while not connection.closed:
            for message in connection.receive(0.0 if len(core) else None):
                self._obey(message)
            if len(core):
                texts = core.next_pass()
                connection.send(PassBegun([text.request_id for text in texts]))
                vectors = core.run(texts)
                connection.send(Pooled(vectors, core.stats()))

    def _obey(self, message: Message) -> None:
        if isinstance(message, Pool):
            self._core.add(PooledText(message.request_id, message.token_ids, message.token_types))
        elif isinstance(message, Leave):
            for request_id in message.sequence_ids:
                self._core.abort(request_id)
        elif isinstance(message, UpdateWeights):
            why = "weights of models for embeddings and classes cannot be replaced; start the server with the new ones"
            self._connection.send(NotLoaded("ConfigError", why))
        elif not isinstance(message, Watch):  # steps of pooling are not recorded
            self._connection.frames.num_bad += 1
