"""A server with a fake trainer and a fake engine, and a client that sends the protocol's requests itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.errors import RequestError
from chairlift.server.http.app import make_app
from chairlift.server.http.state import ServerState
from chairlift_train.service.log.log_thread import LogThread
from chairlift_train.service.log.store import TrainingLog
from chairlift_train.service.places import Places
from chairlift_train.service.runs import RunSettings, TrainingRuns
from chairlift_train.service.schedule.scheduler import TrainingScheduler
from chairlift_train.service.service import TrainingService
from chairlift_train.service.wire.live import live_routes
from chairlift_train.service.wire.proto import ForwardBackwardOutputMessage, ForwardBackwardRequestMessage
from chairlift_train.service.wire.routes import training_routes
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.harness import Client, Reply, serving
from tests.train.service.fake_trainer import FakeCompute

MODEL = "org/tiny"


class FakeAdapters:
    """The adapters of a fake engine: their names and directories."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}

    async def load(self, name: str, path: str, *, in_place: bool = False, private: bool = False) -> None:
        if name in self.loaded and not in_place:
            raise RequestError(f"{name} is loaded already")
        self.loaded[name] = str(path)

    def unload(self, name: str) -> bool:
        return self.loaded.pop(name, None) is not None


class SamplingEngine:
    """A fake engine that knows adapters."""

    def __init__(self) -> None:
        self.inner = FakeEngine()
        self.adapters = FakeAdapters()
        self.asked: list[tuple[list[int], str]] = []

    async def submit(
        self, prompt: Any, params: Any, *, adapter: str = "", cache_salt: str = "", name: str = "", **more: Any
    ) -> Any:
        if adapter and adapter not in self.adapters.loaded:
            raise RequestError(f"the adapter {adapter} is not loaded")
        self.asked.append((list(prompt), adapter))
        return await self.inner.submit(prompt, params, **more)


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Bench:
    """One service and its parts."""

    def __init__(
        self,
        directory: Path,
        *,
        memory: int = 100_000,
        max_models: int = 64,
        max_bytes: int = 1 << 40,
        max_owner_bytes: int = 1 << 40,
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.compute = FakeCompute()
        self.engine = SamplingEngine()
        places = Places(directory)
        log = TrainingLog(directory, max_bytes, max_owner_bytes=max_owner_bytes, beside=places.num_bytes)
        self.runs = TrainingRuns(
            LogThread(log),
            self.compute,
            TrainingScheduler(token_budget=64, memory=memory, max_models=max_models),
            places,
            self.compute.trainer.price,
            RunSettings(**settings),
            clock=self.clock,
            wall_clock=self.clock,
        )
        self.service = TrainingService(
            self.runs, self.engine, model_names=[MODEL], max_context=64, tokenizer_id=MODEL, arch="tiny"
        )

    @contextlib.asynccontextmanager
    async def serving(self, **settings: Any) -> AsyncIterator[WireClient]:
        """Serve over HTTP while the block runs."""
        state: ServerState = make_state(self.engine.inner, **settings)
        routes = [*training_routes(lambda: self.service), *live_routes(lambda: self.service)]
        async with self.service.running(), serving(make_app(state, routes)) as client:
            yield WireClient(client)


def pass_body(
    model_id: str,
    seq_id: int,
    data: Sequence[Sequence[int]],
    *,
    loss: str = "cross_entropy",
    forward_only: bool = False,
    weights: Sequence[float] | None = None,
    edit: Callable[[Any], None] | None = None,
) -> bytes:
    """The body of a pass over sequences of tokens; the target of each position is its token plus one."""
    message = ForwardBackwardRequestMessage(model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only)
    for tokens in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype = 2
        targets.shape.append(len(tokens))
        targets.dense = (np.asarray(tokens, "<i8") + 1).tobytes()
        given = datum.loss_fn_inputs["weights"]
        given.dtype = 1
        given.shape.append(len(tokens))
        given.dense = np.asarray([1.0] * len(tokens) if weights is None else weights, "<f4").tobytes()
    if edit is not None:
        edit(message)
    return bytes(message.SerializeToString())


class WireClient:
    """Sends requests of the protocol, one connection each."""

    def __init__(self, client: Client, *headers: str) -> None:
        self.http = client
        self.headers = headers

    async def post(self, call: str, /, **fields: Any) -> Reply:
        return await self.http.post(f"/api/v1/{call}", json.dumps(fields).encode(), *self.headers)

    async def get(self, path: str) -> Reply:
        return await self.http.get(f"/api/v1/{path}", *self.headers)

    async def send(self, method: str, path: str, **fields: Any) -> Reply:
        connection = await self.http.connect()
        body = json.dumps(fields).encode()
        lines = [f"{method} /api/v1/{path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", *self.headers]
        connection.send("\r\n".join([*lines, "", ""]).encode() + body)
        return await connection.reply()

    async def session(self) -> str:
        reply = await self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
        assert reply.status == 200, reply.body
        return str(reply.json()["session_id"])

    async def model(self, session: str, number: int = 0, **lora: Any) -> str:
        shape = {"rank": 8, "seed": 5, **lora}
        fields = {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": shape}
        result = await self.result(await self.post("create_model", **fields))
        return str(result["model_id"])

    async def forward_backward(self, model_id: str, seq_id: int, data: Sequence[Sequence[int]], **more: Any) -> Reply:
        body = pass_body(model_id, seq_id, data, **more)
        return await self.http.post("/api/v1/forward_backward", body, *self.headers, kind="application/x-protobuf")

    async def optim_step(self, model_id: str, seq_id: int, rate: float = 0.01) -> Reply:
        return await self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params={"learning_rate": rate})

    async def retrieve(self, name: str) -> Reply:
        return await self.post("retrieve_future", request_id=name)

    async def result(self, accepted: Reply) -> dict[str, Any]:
        """The result of an accepted call, as JSON; of a pass: its log-probabilities and metrics."""
        assert accepted.status == 200, accepted.body
        reply = await self.retrieve(accepted.json()["request_id"])
        while reply.headers["content-type"] == "application/json" and reply.json().get("type") == "try_again":
            reply = await self.retrieve(accepted.json()["request_id"])
        return self.read(reply)

    @staticmethod
    def read(reply: Reply) -> dict[str, Any]:
        assert reply.status == 200, reply.body
        if reply.headers["content-type"] != "application/x-protobuf":
            found: dict[str, Any] = reply.json()
            return found
        message = ForwardBackwardOutputMessage()
        message.ParseFromString(reply.body)
        logprobs = [
            array
            for record in message.loss_fn_outputs
            for array in _cut(record.fields["logprobs"].data, record.fields["logprobs"].offsets)
        ]
        return {"logprobs": logprobs, "metrics": dict(message.metrics)}


def _cut(data: bytes, offsets: bytes) -> list[list[float]]:
    ends = np.frombuffer(offsets, "<i8")
    return [np.frombuffer(data[begin:end], "<f4").tolist() for begin, end in itertools.pairwise(ends)]


async def gathered(*calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls))
