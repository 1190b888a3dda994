"""Sampling sessions: samples of the base model, or of weights that a client has trained."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from chairlift.base.outputs import CompletionOutput, FinishReason, Logprob, OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.errors import ChairliftError, QueueFullError, RequestError
from chairlift_train.service.compute.calls import TrainingError
from chairlift_train.service.log.records import CallAnswer, SamplerRecord
from chairlift_train.service.log.store import ReusedSeqError
from chairlift_train.service.progress import TrainingProgress
from chairlift_train.service.runs import error_answer
from chairlift_train.service.wire.bodies import DrawSamples, SampleParameters
from chairlift_train.service.wire.proto import SampleResponseMessage

__all__ = ["SampleEngine", "Samplers"]

_MAX_LOADED: Final = 32
"""Number of adapters that the engine knows at a time. One that is needed again is loaded again."""
_MAX_KEPT: Final = 4096
"""Number of samples whose answers are kept. A client that asks for an older one draws it anew."""
_EMPTY_LOGPROB: Final = -99999.0


class SampleEngine(Protocol):
    """The engine as this module sees it; :class:`~chairlift.engine.async_engine.AsyncEngine` is one."""

    adapters: Any
    generation: Any

    async def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        kind: OutputKind,
        tenant: str,
        adapter: str,
        cache_salt: str,
        name: str,
    ) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """The answer of a request, and for each of its samples the versions of the weights: (index of the first token,
    seq id of the call that saved the weights)."""

    answer: CallAnswer
    versions: Sequence[Sequence[tuple[int, int]]] = ()
    num_tokens: int = 0


class Samplers:
    """Draws samples, and keeps their answers for retrieval. All methods run on one event loop.

    When newer weights of the kind ``inflight`` are published, running samples keep theirs. With ``follow`` they go on
    with the newer weights, whose KV of all earlier tokens is computed again. Samples with stop strings keep theirs.
    """

    def __init__(self, engine: SampleEngine, progress: TrainingProgress, *, follow: bool = False) -> None:
        self._engine = engine
        self._progress = progress
        self._follow = follow
        self._loaded: OrderedDict[str, str] = OrderedDict()
        """Name of a loaded adapter -> its directory. The one that was used last is at the end."""
        self._loading = asyncio.Lock()
        self._samples: OrderedDict[str, tuple[bytes, asyncio.Task[_Drawn]]] = OrderedDict()
        """Request id -> (digest of the request, task that draws)."""
        self._running: dict[str, str] = {}
        """Name of a request in the engine that may go on with newer weights -> name of its adapter."""
        self._moved: set[str] = set()
        """Names of those that were ended to go on with newer weights."""
        self._numbers = itertools.count()

    async def load(self, sampler: SamplerRecord) -> str:
        """Name of the adapter of a sampler, which is loaded if necessary; empty for the base model.

        Samplers of one training run of the kind ``inflight`` share a name, under which newer weights replace older
        ones; running samples keep theirs. Raises TrainingError for weights that are gone.
        """
        if not sampler.directory:
            return ""
        name = f"training:{sampler.follows or sampler.sampler_id}"
        async with self._loading:
            if self._loaded.get(name) == sampler.directory or (sampler.follows and name in self._loaded):
                self._loaded.move_to_end(name)
                return name
            await self._replace(name, sampler.directory)
        return name

    async def publish(self, sampler: SamplerRecord) -> None:
        """Load the weights of a new sampling session. Sessions that follow its training run use them from now on."""
        if not sampler.follows:
            await self.load(sampler)
            return
        name = f"training:{sampler.follows}"
        async with self._loading:
            await self._replace(name, sampler.directory)
        moved = [request for request, adapter in self._running.items() if adapter == name]
        if moved:
            self._moved.update(moved)
            self._engine.generation.abort(moved)

    async def _replace(self, name: str, directory: str) -> None:
        if not Path(directory).is_dir():
            raise TrainingError("the weights of this sampling session are gone; save new ones and sample from them")
        while len(self._loaded) >= _MAX_LOADED and name not in self._loaded:
            self._engine.adapters.unload(self._loaded.popitem(last=False)[0])
        await self._engine.adapters.load(name, directory, in_place=name in self._loaded, private=True)
        self._loaded[name] = directory
        self._loaded.move_to_end(name)

    def forget(self, session_id: str) -> None:
        """Unload the adapters of a session that has ended."""
        self._progress.forgot_session(session_id)
        for name in [name for name in self._loaded if name.startswith(f"training:{session_id}:")]:
            self._engine.adapters.unload(name)
            del self._loaded[name]

    def begin(self, sampler: SamplerRecord, request: DrawSamples, tenant: str, salt: str) -> str:
        """Begin to draw. Returns the request id. Raises ReusedSeqError for an id that another request has had."""
        name = f"{sampler.sampler_id}:{request.seq_id}"
        digest = hashlib.sha256(msgspec.json.encode(request)).digest()
        known = self._samples.get(name)
        if known is not None:
            if known[0] != digest:
                raise ReusedSeqError(f"sample {request.seq_id} of {sampler.sampler_id} was another request before")
            return name
        while len(self._samples) >= _MAX_KEPT:
            _, (_, oldest) = self._samples.popitem(last=False)
            oldest.cancel()
        self._samples[name] = digest, asyncio.ensure_future(self._counted(sampler, request, tenant, salt))
        return name

    async def _counted(self, sampler: SamplerRecord, request: DrawSamples, tenant: str, salt: str) -> _Drawn:
        self._progress.sampling(sampler, request.num_samples)
        drawn = _Drawn(CallAnswer("error", b""))
        try:
            drawn = await self._answer(sampler, request, tenant, salt)
        finally:
            self._progress.sampled(sampler.sampler_id, request.num_samples, drawn.num_tokens)
        return drawn

    async def answer(self, name: str, timeout: float) -> CallAnswer | None:
        """The answer of a request. None if it has none within ``timeout`` seconds. Raises KeyError if it is not
        known."""
        found = await self._done(name, timeout)
        return None if found is None else found.answer

    async def versions(self, name: str) -> Sequence[Sequence[tuple[int, int]]] | None:
        """For each sample of a request that has ended, (index of the first token, seq id of the call that saved the
        weights) of each version that drew its tokens; empty for weights with a name. None if the request has not ended.
        Raises KeyError if it is not known."""
        found = await self._done(name, 0.0)
        return None if found is None else found.versions

    async def _done(self, name: str, timeout: float) -> _Drawn | None:
        task = self._samples[name][1]
        await asyncio.wait({task}, timeout=timeout)
        return task.result() if task.done() and not task.cancelled() else None

    def cancel(self, name: str) -> None:
        """Stop to draw. Unknown ids are ignored."""
        known = self._samples.pop(name, None)
        if known is not None:
            known[1].cancel()

    def close(self) -> None:
        """End all requests."""
        for name in list(self._samples):
            self.cancel(name)

    async def _answer(self, sampler: SamplerRecord, request: DrawSamples, tenant: str, salt: str) -> _Drawn:
        try:
            prompt = _prompt(request)
            params = _parameters(request, len(prompt))
            output = await self._draw(sampler, prompt, params, tenant, salt)
        except (TrainingError, RequestError) as error:
            return _Drawn(error_answer(str(error)))
        except ChairliftError as error:
            return _Drawn(error_answer(str(error), "server"))
        if output.error is not None or any(
            each.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) for each in output.outputs
        ):
            return _Drawn(error_answer(output.error or "the sample was ended before it was complete", "server"))
        answers = sorted(output.outputs, key=lambda answer: answer.index)
        num_tokens = sum(len(each.token_ids) for each in answers)
        versions = [each.weight_versions for each in answers]
        return _Drawn(CallAnswer("proto", _response(output, request)), versions, num_tokens)

    async def _draw(
        self, sampler: SamplerRecord, prompt: list[int], params: SamplingParams, tenant: str, salt: str
    ) -> RequestOutput:
        """All samples of a request. Each may go on several times with newer weights."""
        output, moved = await self._once(sampler, prompt, params, tenant, salt)
        if not moved:
            return output

        async def go_on(answer: CompletionOutput) -> None:
            seed = None if params.seed is None else params.seed + answer.index
            while answer.finish_reason is FinishReason.ABORT:
                left = None if params.max_tokens is None else params.max_tokens - len(answer.token_ids)
                rest = dataclasses.replace(params, n=1, seed=seed, max_tokens=left, prompt_logprobs=None)
                more, moved = await self._once(sampler, [*prompt, *answer.token_ids], rest, tenant, salt)
                _append(answer, more.outputs[0])
                if not moved:
                    return

        await asyncio.gather(*(go_on(each) for each in output.outputs))
        return dataclasses.replace(output, error=None)

    async def _once(
        self, sampler: SamplerRecord, prompt: list[int], params: SamplingParams, tenant: str, salt: str
    ) -> tuple[RequestOutput, bool]:
        """(what a sampler's current weights draw, whether newer weights have ended it)."""
        pause = 0.5
        name = f"training sample {next(self._numbers)}"
        while True:
            adapter = await self.load(sampler)
            try:
                stream = await self._engine.submit(
                    *(prompt, params),
                    kind=OutputKind.FINAL,
                    tenant=tenant,
                    adapter=adapter,
                    cache_salt=salt,
                    name=name,
                )
            except QueueFullError:  # the client waits for its answer anyway
                await asyncio.sleep(pause)
                pause = min(8.0, 2 * pause)
                continue
            version = _version(self._loaded.get(adapter, ""))  # no other task has run since the adapter was chosen
            if self._follow and sampler.follows and not params.stop:
                self._running[name] = adapter
            try:
                async for output in stream:
                    found: RequestOutput = output
            finally:
                stream.abort()
                self._running.pop(name, None)
                moved = name in self._moved
                self._moved.discard(name)
            for each in found.outputs:
                each.weight_versions = [] if version is None else [(0, version)]
            return found, moved


def _version(directory: str) -> int | None:
    """Seq id of the call that saved these weights; None for weights with a name, and for the base model."""
    name = Path(directory).name
    return int(name) if Path(directory).parent.parent.name == "snapshots" and name.isdecimal() else None


def _append(answer: CompletionOutput, more: CompletionOutput) -> None:
    """Add the tokens of another answer to an answer that was ended."""
    start = len(answer.token_ids)
    answer.token_ids = [*answer.token_ids, *more.token_ids]
    answer.logprobs = [*(answer.logprobs or ()), *(more.logprobs or ())]
    known = [run for run in answer.weight_versions if run[0] < start]
    answer.weight_versions = [*known, *((start + first, version) for first, version in more.weight_versions)]
    answer.finish_reason = more.finish_reason


def _prompt(request: DrawSamples) -> list[int]:
    tokens: list[int] = []
    for chunk in request.prompt.chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise TrainingError(f"the prompt has a chunk of type {chunk.type!r:.80}; this server samples text only")
        tokens += chunk.tokens
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(request, name):
            raise TrainingError(f"{name} is not supported; leave it out")
    return tokens


def _parameters(request: DrawSamples, num_prompt_tokens: int) -> SamplingParams:
    given: SampleParameters = request.sampling_params
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    texts = [each for each in stop or () if isinstance(each, str)]
    tokens = [each for each in stop or () if isinstance(each, int)]
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < num_prompt_tokens):
        raise TrainingError(
            f"prompt_logprobs_last_n needs prompt_logprobs, and must be from 1 to {num_prompt_tokens - 1}; got {last}"
        )
    scores = request.prompt_logprobs or request.topk_prompt_logprobs > 0
    return SamplingParams(
        n=request.num_samples,
        max_tokens=given.max_tokens,
        seed=given.seed,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        stop=texts or None,
        stop_token_ids=tokens or None,
        ignore_eos=stop == [],
        logprobs=request.topk_sample_logprobs,
        prompt_logprobs=request.topk_prompt_logprobs if scores else None,
    )


def _response(output: RequestOutput, request: DrawSamples) -> bytes:
    message = SampleResponseMessage(prompt_cache_hit_tokens=output.num_cached_tokens)
    for each in sorted(output.outputs, key=lambda answer: answer.index):
        scores = [next(iter(entries.values())).logprob for entries in each.logprobs or ()]
        sequence = message.sequences.add(
            stop_reason=int(each.finish_reason is FinishReason.LENGTH),
            tokens=np.asarray(each.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(scores, "<f4").tobytes(),
        )
        if request.topk_sample_logprobs:
            _add_top(sequence.topk_sampled_logprobs, each.logprobs or (), request.topk_sample_logprobs)
    if output.prompt_logprobs is not None:
        entries = _scored(output.prompt_logprobs, request.prompt_logprobs_last_n)
        if request.prompt_logprobs:
            values = [math.nan if each is None else next(iter(each.values())).logprob for each in entries]
            message.prompt_logprobs = np.asarray(values, "<f4").tobytes()
        if request.topk_prompt_logprobs:
            _add_top(message.topk_prompt_logprobs, entries, request.topk_prompt_logprobs)
    return bytes(message.SerializeToString(deterministic=True))


def _scored(entries: Sequence[dict[int, Logprob] | None], last: int | None) -> Sequence[dict[int, Logprob] | None]:
    """The entries of a prompt of which only the ``last`` tokens are to be scored; None: all."""
    if last is None:
        return list(entries)
    return [None] * (len(entries) - last) + list(entries[len(entries) - last :])


def _add_top(message: Any, entries: Sequence[dict[int, Logprob] | None], count: int) -> None:
    """The most likely tokens of each position, as a matrix that is padded with empty cells."""
    ids = np.zeros((len(entries), count), "<i4")
    scores = np.full((len(entries), count), _EMPTY_LOGPROB, "<f4")
    for row, each in enumerate(entries):
        best = sorted((each or {}).items(), key=lambda item: item[1].rank or 0)
        for column, (token, entry) in enumerate([item for item in best if (item[1].rank or 0) <= count][:count]):
            ids[row, column] = token
            scores[row, column] = entry.logprob
    message.token_ids = ids.tobytes()
    message.logprobs = scores.tobytes()
    message.k = count
    message.length = len(entries)
