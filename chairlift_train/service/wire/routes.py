"""HTTP endpoints of the training service, below ``/api/v1``, as the ``tinker`` client calls them.

A training call that names its model and its place is always answered with a future, and fails through it: a refused
request would consume the call's id, and every later call would wait for it.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from chairlift.server.http.auth import Caller, salt_for
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_bytes, read_json
from chairlift.server.http.streaming import json_response
from chairlift_train.service.compute.calls import AdapterConfig, TrainingError
from chairlift_train.service.log.records import CallAnswer, CheckpointRecord, ModelRecord, SamplerRecord, SessionRecord
from chairlift_train.service.log.store import ReusedSeqError
from chairlift_train.service.places import split_path
from chairlift_train.service.runs import TooManyCallsError, TrainingRuns
from chairlift_train.service.service import TrainingService
from chairlift_train.service.steps import check_ttl
from chairlift_train.service.wire import bodies
from chairlift_train.service.wire.passes import BadBodyError, read_pass

__all__ = ["training_routes"]

_PREFIX: Final = "/api/v1"
_MAX_PASS_BYTES: Final = 32 << 20
"""The client divides calls at about 5 MB."""
_POLL_SECONDS: Final = 25.0
"""Seconds for which a request for a result is held. The client waits 45."""
_RETRY_SECONDS: Final = 5
_PROTO: Final = "application/x-protobuf"
_REFUSED: Final = {
    "auth/token": "tokens are not exchanged; the client's config says so",
    "copy_weights": "copies between projects are not supported; load the checkpoint's path",
    "create_custom_loss": "losses run at the client; forward_backward_custom does so",
    "join_sampling_session": "sampling sessions have one client; make a sampling client in each process",
    "retrieve_futures": "results are retrieved one by one",
    "save_weights_external": "checkpoints are PEFT directories below the server's --training-dir already",
    "sessions/search": "there is no search",
}
"""Calls that are refused by name."""


def _body(kind: type[Any]) -> Callable[[dict[str, Any]], Any]:
    def convert(payload: dict[str, Any]) -> Any:
        try:
            return msgspec.convert(payload, kind)
        except msgspec.ValidationError as error:
            raise ApiError(422, f"the request is not valid: {error}", code="invalid_value") from None

    return convert


class _Endpoints:
    """The endpoints of one service, which ``get`` returns once it has started."""

    def __init__(self, get: Callable[[], TrainingService]) -> None:
        self._get = get

    @property
    def _service(self) -> TrainingService:
        return self._get()

    @property
    def _runs(self) -> TrainingRuns:
        return self._get().runs

    # -- the caller ------------------------------------------------------------------------------------------------

    @staticmethod
    def _caller(request: Request) -> Caller:
        caller: Caller = getattr(request.state, "caller", Caller())
        return caller

    def _owner(self, request: Request) -> str:
        return self._caller(request).tenant

    def _session(self, request: Request, session_id: str) -> SessionRecord:
        session = self._service.sessions.of(session_id, self._owner(request))
        if session is None:
            raise ApiError(
                410, f"there is no session {session_id:.80}, or it has ended; make a new client", code="gone"
            )
        return session

    async def _model(self, request: Request, model_id: str) -> ModelRecord:
        model = await self._runs.log(lambda log: log.model(model_id))
        if model is None or model.owner != self._owner(request):
            raise ApiError(404, f"there is no training run {model_id:.160}", code="not_found")
        self._service.sessions.of(model.session_id, model.owner)
        return model

    async def _checkpoint(self, request: Request, model_id: str, kind: str, name: str) -> CheckpointRecord:
        found = await self._runs.log(lambda log: log.checkpoint(model_id, kind, name))
        if found is None or found.owner != self._owner(request):
            raise ApiError(404, f"there is no checkpoint tinker://{model_id}/{kind}/{name}"[:400], code="not_found")
        return found

    # -- the client's start ----------------------------------------------------------------------------------------

    async def config(self, request: Request) -> Response:
        """Settings of the client: its defaults, which is what this server supports."""
        await read_json(request)
        return json_response({})

    async def capabilities(self, request: Request) -> Response:
        """The models that can be trained and sampled."""
        models = [
            {
                "model_name": name,
                "max_context_length": self._service.max_context,
                "trainable": True,
                "sampleable": True,
            }
            for name in self._service.model_names
        ]
        return json_response({"supported_models": models})

    async def health(self, request: Request) -> Response:
        """Whether the service answers."""
        return json_response({"status": "ok"})

    async def telemetry(self, request: Request) -> Response:
        """Accept and drop the client's reports about itself."""
        await read_json(request)
        return json_response({"status": "accepted"})

    async def create_session(self, request: Request) -> Response:
        """Begin a session."""
        payload: bodies.CreateSession = _body(bodies.CreateSession)(await read_json(request))
        session = await self._service.sessions.create(self._owner(request), payload)
        return json_response({"type": "create_session", "session_id": session.session_id})

    async def heartbeat(self, request: Request) -> Response:
        """Keep a session alive."""
        self._session(request, str((await read_json(request)).get("session_id")))
        return json_response({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """End a session."""
        await read_json(request)
        session = self._session(request, request.path_params["session_id"])
        await self._service.sessions.end(session.session_id)
        return json_response({})

    async def sessions(self, request: Request) -> Response:
        """Ids of the caller's sessions."""
        known = await self._runs.log(lambda log: log.sessions(ended=False))
        owner = self._owner(request)
        return json_response({"sessions": [each.session_id for each in known if each.owner == owner]})

    async def session(self, request: Request) -> Response:
        """The training runs and samplers of a session."""
        session_id = request.path_params["session_id"]
        session = await self._runs.log(lambda log: log.session(session_id))
        if session is None or session.owner != self._owner(request):
            raise ApiError(404, "there is no such session", code="not_found")
        models = await self._runs.log(lambda log: log.models(owner=session.owner))
        samplers = await self._runs.log(lambda log: log.samplers(session_id))
        return json_response(
            {
                "training_run_ids": [each.model_id for each in models if each.session_id == session_id],
                "sampler_ids": [each.sampler_id for each in samplers],
                "user_metadata": json.loads(session.metadata),
                "display_name": session.display_name or None,
            }
        )

    # -- training calls --------------------------------------------------------------------------------------------

    async def _accept(self, model: ModelRecord, seq_id: int, kind: str, body: bytes) -> Response:
        """Accept a training call. The response has the id of its future."""
        try:
            name = await self._runs.accept(model, seq_id, kind, body)
        except ReusedSeqError as error:
            raise ApiError(422, str(error), code="seq_id_reused") from None
        except TooManyCallsError as error:
            retry = {"retry-after": str(_RETRY_SECONDS)}
            raise ApiError(429, str(error), code="rate_limit_exceeded", headers=retry) from None
        return json_response({"request_id": name, "model_id": model.model_id})

    async def forward_backward(self, request: Request) -> Response:
        """A forward pass, with a backward pass unless ``forward_only``."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ApiError(415, f"the body's encoding is {encoding:.40}; send it as it is", code="unsupported_encoding")
        try:
            body = read_pass(await read_bytes(request, _PROTO, limit=_MAX_PASS_BYTES))
        except BadBodyError as error:
            raise ApiError(422, str(error), code="invalid_body") from None
        model = await self._model(request, body.model_id)
        self._check_seq(body.seq_id)
        return await self._accept(model, body.seq_id, "forward" if body.forward_only else "pass", body.canonical)

    @staticmethod
    def _check_seq(seq_id: int) -> None:
        if not 1 <= seq_id < 2**31:
            raise ApiError(422, f"seq_id counts the calls of a model from 1, got {seq_id}", code="invalid_value")

    def _call(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint for a call of a model that is logged as it is."""

        async def endpoint(request: Request) -> Response:
            payload = await read_json(request)
            address: bodies.Addressed = _body(bodies.Addressed)(payload)
            model = await self._model(request, address.model_id)
            self._check_seq(address.seq_id)
            return await self._accept(model, address.seq_id, kind, _canonical(payload))

        return endpoint

    async def create_model(self, request: Request) -> Response:
        """Make a training run."""
        payload = await read_json(request)
        body: bodies.CreateModel = _body(bodies.CreateModel)(payload)
        session = self._session(request, body.session_id)
        try:
            config = bodies.adapter_of(body.lora_config, secrets.randbits(48))
        except TrainingError:  # the call fails in its turn
            config = AdapterConfig(1)
        model = self._new_model(session, body.model_seq_id, body.base_model, config, body.user_metadata)
        return await self._accept(model, 0, "create", _canonical(payload))

    async def load_weights(self, request: Request) -> Response:
        """Load a checkpoint into a model, or make a training run from it."""
        payload = await read_json(request)
        body: bodies.LoadWeights = _body(bodies.LoadWeights)(payload)
        if body.session_id is None:
            return await self._call("load")(_again(request, payload))
        session = self._session(request, body.session_id)
        config = AdapterConfig(1)
        try:
            source = split_path(body.path)[0]
            known = await self._runs.log(lambda log: log.model(source))
            config = config if known is None else known.config
        except TrainingError:
            pass
        base = self._service.model_names[0]
        model = self._new_model(session, body.model_seq_id or 0, base, config, body.user_metadata)
        return await self._accept(model, 0, "load", _canonical(payload))

    def _new_model(
        self, session: SessionRecord, number: int, base: str, config: AdapterConfig, metadata: Any
    ) -> ModelRecord:
        name = f"{session.session_id}:train:{number}"
        words = msgspec.json.encode(metadata).decode()
        now = self._runs.wall_clock()
        return ModelRecord(name, session.session_id, session.owner, base, config, words, now)

    async def get_info(self, request: Request) -> Response:
        """Facts about a training run."""
        model = await self._model(request, str((await read_json(request)).get("model_id")))
        return json_response(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_data": {
                    "arch": self._service.arch,
                    "model_name": model.base_model,
                    "tokenizer_id": self._service.tokenizer_id,
                },
                "is_lora": True,
                "lora_rank": model.config.rank,
                "model_name": model.base_model,
            }
        )

    # -- futures ---------------------------------------------------------------------------------------------------

    async def retrieve_future(self, request: Request) -> Response:
        """The result of a call. Waits for it some seconds, and otherwise answers ``try_again``."""
        body: bodies.RetrieveFuture = _body(bodies.RetrieveFuture)(await read_json(request))
        name, _, number = body.request_id.rpartition(":")
        if not number.isdecimal() or len(number) > 10:
            raise ApiError(404, f"there is no request {body.request_id:.160}", code="not_found")
        state, reason = "active", ""
        if ":sample:" in name:
            await self._sampler(request, name)
            try:
                answer = await self._service.samplers.answer(body.request_id, _POLL_SECONDS)
            except KeyError:
                raise ApiError(410, "this sample is no longer known; draw it again", code="gone") from None
        else:
            model = await self._model(request, name)
            try:
                answer = await self._runs.answer(model.model_id, int(number), _POLL_SECONDS)
            except KeyError:
                raise ApiError(404, f"there is no request {body.request_id:.160}", code="not_found") from None
            state, reason = self._runs.queue_state(name, int(number))
        if answer is None:
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": state}
            return json_response({**waiting, "queue_state_reason": reason or None})
        return _answered(answer)

    async def cancel_future(self, request: Request) -> Response:
        """Stop to draw a sample. Other calls cannot be cancelled."""
        body: bodies.RetrieveFuture = _body(bodies.RetrieveFuture)(await read_json(request))
        name = body.request_id.rpartition(":")[0]
        if ":sample:" in name:
            await self._sampler(request, name)
            self._service.samplers.cancel(body.request_id)
        return json_response({})

    # -- samples ---------------------------------------------------------------------------------------------------

    async def _sampler(self, request: Request, sampler_id: str) -> SamplerRecord:
        sampler = await self._runs.log(lambda log: log.sampler(sampler_id))
        if sampler is None or sampler.owner != self._owner(request):
            raise ApiError(404, f"there is no sampling session {sampler_id:.160}", code="not_found")
        self._service.sessions.of(sampler.session_id, sampler.owner)
        return sampler

    async def create_sampling_session(self, request: Request) -> Response:
        """Choose what to sample from: the base model, or a checkpoint."""
        body: bodies.CreateSamplingSession = _body(bodies.CreateSamplingSession)(await read_json(request))
        session = self._session(request, body.session_id)
        directory = ""
        if body.model_path is not None:
            try:
                model_id, kind, name = split_path(body.model_path)
            except TrainingError as error:
                raise ApiError(422, str(error), code="invalid_value") from None
            await self._checkpoint(request, model_id, kind, name)
            directory = str(self._runs.places.checkpoint(model_id, kind, name))
        elif body.base_model not in self._service.model_names:
            known = ", ".join(self._service.model_names)
            raise ApiError(
                422, f"this server does not serve {body.base_model!r:.160}, but {known}", code="invalid_value"
            )
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        sampler = SamplerRecord(sampler_id, session.session_id, session.owner, body.model_path or "", directory, "")
        try:
            await self._service.samplers.load(sampler)
        except TrainingError as error:
            raise ApiError(422, str(error), code="invalid_value") from None
        await self._runs.log(lambda log: log.add_sampler(sampler))
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def sampler(self, request: Request) -> Response:
        """What a sampling session samples from."""
        found = await self._sampler(request, request.path_params["sampler_id"])
        return json_response(
            {
                "sampler_id": found.sampler_id,
                "base_model": self._service.model_names[0],
                "model_path": found.model_path or None,
            }
        )

    async def sample(self, request: Request) -> Response:
        """Draw samples."""
        payload = await read_json(request)
        body: bodies.DrawSamples = _body(bodies.DrawSamples)(payload)
        sampler = await self._sampler(request, body.sampling_session_id)
        caller = self._caller(request)
        if not 1 <= body.num_samples <= 1024:
            raise ApiError(422, f"num_samples must be from 1 to 1,024, got {body.num_samples}", code="invalid_value")
        try:
            name = self._service.samplers.begin(sampler, body, caller.tenant, salt_for(caller.holder, ""))
        except ReusedSeqError as error:
            raise ApiError(422, str(error), code="seq_id_reused") from None
        ids = [f"{name}:{index}" for index in range(body.num_samples)]
        return json_response({"request_id": name, "sample_sequence_ids": ids})

    async def sample_versions(self, request: Request) -> Response:
        """Which version of the weights drew which tokens of a request that has ended."""
        name = request.path_params["request_id"]
        await self._sampler(request, name.rpartition(":")[0])
        try:
            found = await self._service.samplers.versions(name)
        except KeyError:
            raise ApiError(410, "this sample is no longer known; draw it again", code="gone") from None
        if found is None:
            raise ApiError(409, "this sample has not ended; retrieve it first", code="not_ended")
        samples = [[{"first_token": first, "seq_id": version} for first, version in runs] for runs in found]
        return json_response({"request_id": name, "versions": samples})

    # -- training runs and checkpoints -----------------------------------------------------------------------------

    async def weights_info(self, request: Request) -> Response:
        """The shape of the adapter in a checkpoint."""
        try:
            model_id, kind, name = split_path(str((await read_json(request)).get("tinker_path")))
        except TrainingError as error:
            raise ApiError(422, str(error), code="invalid_value") from None
        await self._checkpoint(request, model_id, kind, name)
        model = await self._model(request, model_id)
        config = model.config
        return json_response(
            {
                "base_model": model.base_model,
                "is_lora": True,
                "lora_rank": config.rank,
                "train_unembed": config.train_unembed,
                "train_mlp": config.train_mlp,
                "train_attn": config.train_attn,
            }
        )

    async def training_runs(self, request: Request) -> Response:
        """The caller's training runs, the newest first."""
        offset, limit = _page(request)
        models = (await self._runs.log(lambda log: log.models(owner=self._owner(request))))[::-1]
        shown = [await self._run(model) for model in models[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(models)}
        return json_response({"training_runs": shown, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        """One training run."""
        return json_response(await self._run(await self._model(request, request.path_params["model_id"])))

    async def _run(self, model: ModelRecord) -> dict[str, Any]:
        saved = await self._runs.log(lambda log: log.checkpoints("model_id = ?", model.model_id))
        newest = {each.kind: _shown(each) for each in saved}
        return {
            "training_run_id": model.model_id,
            "base_model": model.base_model,
            "model_owner": model.owner or "local",
            "is_lora": True,
            "lora_rank": model.config.rank,
            "last_request_time": _time(model.created_at),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": json.loads(model.metadata),
        }

    async def checkpoints(self, request: Request) -> Response:
        """The caller's checkpoints: of one training run, or all."""
        model_id = request.path_params.get("model_id")
        if model_id is not None:
            await self._model(request, model_id)
            found = await self._runs.log(lambda log: log.checkpoints("model_id = ?", model_id))
            return json_response({"checkpoints": [_shown(each) for each in found]})
        offset, limit = _page(request)
        owner = self._owner(request)
        found = (await self._runs.log(lambda log: log.checkpoints("owner = ?", owner)))[::-1]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return json_response(
            {"checkpoints": [_shown(each) for each in found[offset : offset + limit]], "cursor": cursor}
        )

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        await self._service.delete_checkpoint(await self._named(request))
        return json_response({})

    async def _named(self, request: Request) -> CheckpointRecord:
        params = request.path_params
        return await self._checkpoint(request, params["model_id"], params["kind"], params["name"])

    async def set_ttl(self, request: Request) -> Response:
        """Change when a checkpoint expires."""
        seconds = (await read_json(request)).get("ttl_seconds")
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int)):
            raise ApiError(
                422, f"ttl_seconds must be a whole number or null, got {seconds!r:.80}", code="invalid_value"
            )
        try:
            check_ttl(seconds)
        except TrainingError as error:
            raise ApiError(422, str(error), code="invalid_value") from None
        found = await self._named(request)
        expires = None if seconds is None else self._runs.wall_clock() + seconds
        await self._runs.log(lambda log: log.set_expiry(found, expires))
        return json_response({})

    async def publish(self, request: Request) -> Response:
        """Refuse to make a checkpoint public."""
        await self._named(request)
        raise ApiError(422, "publishing is not supported; give the checkpoint's files to others", code="not_supported")


def _refusal(why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise ApiError(422, f"{request.url.path} is not supported: {why}", code="not_supported")

    return refuse


def _again(request: Request, payload: dict[str, Any]) -> Request:
    """A request whose body was read, for another endpoint."""
    request.scope["state"]["body"] = payload
    return request


def _canonical(payload: dict[str, Any]) -> bytes:
    """A JSON body in the one encoding that equal bodies have."""
    return msgspec.json.encode(payload, order="sorted")


def _answered(answer: CallAnswer) -> Response:
    """A result. Failures have the status 200, too."""
    return Response(answer.payload, media_type=_PROTO if answer.form == "proto" else "application/json")


def _page(request: Request) -> tuple[int, int]:
    """(offset, limit) of a list. Raises ApiError 422."""
    values = []
    for name, default, most in (("offset", 0, 1 << 31), ("limit", 20, 1000)):
        given = request.query_params.get(name, str(default))
        if not given.isdecimal() or len(given) > 10 or int(given) > most:
            raise ApiError(422, f"{name} must be from 0 to {most:,}, got {given!r:.80}", code="invalid_value")
        values.append(int(given))
    return values[0], values[1]


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _shown(checkpoint: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": "training" if checkpoint.kind == "weights" else "sampler",
        "time": _time(checkpoint.created_at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.num_bytes,
        "public": False,
        "user_metadata": json.loads(checkpoint.metadata),
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


def training_routes(get: Callable[[], TrainingService]) -> list[BaseRoute]:
    """The routes of the training service. ``get`` returns it, and raises EngineDeadError before it has started."""
    on = _Endpoints(get)
    saved = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
    table: list[tuple[str, Callable[[Request], Awaitable[Response]], str]] = [
        ("/client/config", on.config, "POST"),
        ("/client/dynamic_config", on.config, "POST"),
        ("/get_server_capabilities", on.capabilities, "GET"),
        ("/healthz", on.health, "GET"),
        ("/telemetry", on.telemetry, "POST"),
        ("/create_session", on.create_session, "POST"),
        ("/session_heartbeat", on.heartbeat, "POST"),
        ("/sessions", on.sessions, "GET"),
        ("/sessions/{session_id}", on.session, "GET"),
        ("/sessions/{session_id}/finish", on.finish, "POST"),
        ("/create_model", on.create_model, "POST"),
        ("/get_info", on.get_info, "POST"),
        ("/forward_backward", on.forward_backward, "POST"),
        ("/optim_step", on._call("optim_step"), "POST"),
        ("/save_weights", on._call("save"), "POST"),
        ("/save_weights_for_sampler", on._call("save_sampler"), "POST"),
        ("/load_weights", on.load_weights, "POST"),
        ("/retrieve_future", on.retrieve_future, "POST"),
        ("/cancel_future", on.cancel_future, "POST"),
        ("/create_sampling_session", on.create_sampling_session, "POST"),
        ("/samplers/{sampler_id}", on.sampler, "GET"),
        ("/asample", on.sample, "POST"),
        ("/samples/{request_id}/versions", on.sample_versions, "GET"),
        ("/weights_info", on.weights_info, "POST"),
        ("/training_runs", on.training_runs, "GET"),
        ("/training_runs/{model_id}", on.training_run, "GET"),
        ("/training_runs/{model_id}/checkpoints", on.checkpoints, "GET"),
        ("/checkpoints", on.checkpoints, "GET"),
        (saved, on.delete_checkpoint, "DELETE"),
        (f"{saved}/ttl", on.set_ttl, "PUT"),
        (f"{saved}/publish", on.publish, "POST"),
        (f"{saved}/publish", on.publish, "DELETE"),
        *((f"/{name}", _refusal(why), "POST") for name, why in _REFUSED.items()),
    ]
    return [Route(f"{_PREFIX}{path}", endpoint, methods=[method]) for path, endpoint, method in table]
