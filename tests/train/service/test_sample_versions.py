"""Random worlds of samples whose weights change while they run: each token is from the version that the answer names.

The engine of a world computes no tensors. A token is a hash of the weights of its request and of all tokens before it.
So a token of another version, and one lost or drawn twice, all change the answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chairlift.base.outputs import CompletionOutput, FinishReason, Logprob, OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.errors import QueueFullError
from chairlift_train.service import samplers
from chairlift_train.service.log.records import SamplerRecord
from chairlift_train.service.progress import TrainingProgress
from chairlift_train.service.samplers import Samplers
from chairlift_train.service.wire.bodies import DrawSamples, PromptChunk, SampleParameters, SamplePrompt
from chairlift_train.service.wire.proto import SampleResponseMessage
from tests.server.harness import run

Patch = Callable[[Any, str, Any], None]
SEEDS = 60
TURNS = 12
"""Turns of the event loop between two actions: enough for each task to come to its next wait."""


def token_of(directory: str, seed: int, tokens: Sequence[int]) -> int:
    return zlib.crc32(repr((directory, seed, tokens)).encode()) % 50_000


@dataclasses.dataclass(eq=False)
class Running:
    """A request in the engine, and its stream."""

    name: str
    prompt: list[int]
    params: SamplingParams
    directory: str
    """The weights with which it began, which it keeps."""
    answers: list[CompletionOutput]
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def step(self) -> None:
        for each in self.answers:
            if each.finish_reason is None:
                seed = (self.params.seed or 0) + each.index
                each.token_ids.append(token_of(self.directory, seed, [*self.prompt, *each.token_ids]))
                each.logprobs = [{token: Logprob(-1.0, None)} for token in each.token_ids]
                if len(each.token_ids) == self.params.max_tokens:
                    each.finish_reason = FinishReason.LENGTH

    def end(self) -> None:
        for each in self.answers:
            each.finish_reason = each.finish_reason or FinishReason.ABORT

    def abort(self) -> None:
        self.end()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        await self.done.wait()
        yield RequestOutput(self.name, None, self.prompt, self.answers, True)


class Engine:
    """Steps when the world says so. Requests are refused while ``full``."""

    def __init__(self) -> None:
        self.adapters = self.generation = self
        self.full = False
        self.running: dict[str, Running] = {}
        self.directories: dict[str, str] = {}

    async def load(self, name: str, directory: str, *, in_place: bool, private: bool) -> None:
        assert private and in_place == (name in self.directories)
        await asyncio.sleep(0)  # the file is read
        self.directories[name] = directory

    def unload(self, name: str) -> None:
        del self.directories[name]

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.running:
                self.running[name].end()
        self._take_out()

    async def submit(self, prompt: Any, params: SamplingParams, *, adapter: str, name: str, **given: Any) -> Any:
        assert given["kind"] is OutputKind.FINAL
        if self.full:
            raise QueueFullError("full")
        answers = [CompletionOutput(index, "", []) for index in range(params.n)]
        self.running[name] = Running(name, prompt, params, self.directories[adapter], answers)
        return self.running[name]

    def step(self) -> None:
        for each in self.running.values():
            each.step()
        self._take_out()

    def _take_out(self) -> None:
        for name, each in list(self.running.items()):
            if all(answer.finish_reason is not None for answer in each.answers):
                each.done.set()
                del self.running[name]


class World:
    """Two training runs with newer and newer weights, and samples of them."""

    def __init__(self, seed: int, root: Path, follow: bool) -> None:
        self.rng = random.Random(seed)
        self.root = root
        self.follow = follow
        self.engine = Engine()
        self.samplers = Samplers(self.engine, TrainingProgress(lambda: 0.0), follow=follow)
        self.newest: dict[str, int] = {}
        """Training run -> seq id of the call that saved its newest weights."""
        self.asked: dict[str, tuple[str, DrawSamples, int]] = {}
        """Request id -> (training run, request, newest version when it was sent)."""
        self.saved = 0

    def directory(self, run_name: str, version: int) -> str:
        return str(self.root / "snapshots" / run_name / str(version))

    def record(self, run_name: str) -> SamplerRecord:
        directory = self.directory(run_name, self.newest[run_name])
        return SamplerRecord(f"s:sample:{run_name}", "s", "", "", directory, f"s:train:{run_name}")

    async def publish(self) -> None:
        run_name = self.rng.choice("ab")
        self.saved += 1
        self.newest[run_name] = self.saved
        Path(self.directory(run_name, self.saved)).mkdir(parents=True)
        await self.samplers.publish(self.record(run_name))
        if self.follow:
            old = {self.directory(run_name, version) for version in range(self.saved)}
            assert not [each for each in self.engine.running.values() if each.directory in old and not each.params.stop]

    def ask(self) -> None:
        run_name = self.rng.choice(sorted(self.newest))
        prompt = [self.rng.randrange(100) for _ in range(self.rng.randint(1, 5))]
        stop: list[str | int] = ["never"] if self.rng.random() < 0.2 else []
        params = SampleParameters(max_tokens=self.rng.randint(1, 20), seed=self.rng.randrange(99), stop=stop)
        request = DrawSamples(
            *(f"s:sample:{run_name}", len(self.asked), SamplePrompt([PromptChunk(tokens=prompt)]), params),
            num_samples=self.rng.randint(1, 3),
        )
        name = self.samplers.begin(self.record(run_name), request, "", "")
        self.asked[name] = (run_name, request, self.newest[run_name])

    async def run(self) -> None:
        await self.publish()
        for _ in range(60):
            action = self.rng.choices(("step", "ask", "publish", "full"), (8, 2, 2, 1))[0]
            if action == "step":
                self.engine.step()
            elif action == "ask":
                self.ask()
            elif action == "publish":
                await self.publish()
            else:
                self.engine.full = not self.engine.full
            for _ in range(self.rng.randint(0, TURNS)):
                await asyncio.sleep(0)
        self.engine.full = False
        for name, asked in self.asked.items():
            while (answer := await self.samplers.answer(name, 0.0)) is None:
                self.engine.step()
            assert answer.form == "proto", answer
            self.check(answer.payload, await self.samplers.versions(name), *asked)

    def check(self, payload: bytes, versions: Any, run_name: str, request: DrawSamples, sent: int) -> None:
        message = SampleResponseMessage()
        message.ParseFromString(payload)
        assert len(message.sequences) == len(versions) == request.num_samples
        params = request.sampling_params
        prompt = [token for chunk in request.prompt.chunks for token in chunk.tokens or ()]
        for index, (sample, named) in enumerate(zip(message.sequences, versions, strict=True)):
            tokens = np.frombuffer(sample.tokens, "<i4").tolist()
            assert len(tokens) == params.max_tokens == len(np.frombuffer(sample.logprobs, "<f4"))
            starts = [start for start, _ in named]
            assert starts[0] == 0 and starts == sorted(set(starts)) and named[0][1] >= sent
            assert (self.follow and not params.stop) or len(named) == 1, "an answer that keeps its weights has two"
            for place, token in enumerate(tokens):
                version = [number for start, number in named if start <= place][-1]
                before = [*prompt, *tokens[:place]]
                assert token == token_of(self.directory(run_name, version), (params.seed or 0) + index, before)


def check_world(seed: int, root: Path, follow: bool) -> None:
    run(World(seed, root / f"{seed}-{follow}", follow).run())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request is sent again at the next turn of the event loop."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))


@pytest.mark.parametrize("follow", [False, True], ids=["keep", "follow"])
def test_each_token_is_from_the_version_that_the_answer_names(follow: bool, tmp_path: Path) -> None:
    for seed in range(SEEDS):
        check_world(seed, tmp_path, follow)


# --- planted bugs ----------------------------------------------------------------------------------------------------


def running_samples_are_not_ended(patch: Patch) -> None:
    async def wrong(self: Samplers, sampler: SamplerRecord) -> None:
        await self._replace(f"training:{sampler.follows}", sampler.directory)

    patch(Samplers, "publish", wrong)


def newest_version_named_for_all_tokens(patch: Patch) -> None:
    append = samplers._append

    def wrong(answer: CompletionOutput, more: CompletionOutput) -> None:
        append(answer, more)
        answer.weight_versions = [(0, more.weight_versions[0][1])]

    patch(samplers, "_append", wrong)


def version_read_at_the_end(patch: Patch) -> None:
    once = Samplers._once

    async def wrong(self: Samplers, sampler: SamplerRecord, *given: Any) -> Any:
        output, moved = await once(self, sampler, *given)
        version = samplers._version(self._loaded[f"training:{sampler.follows}"])
        for each in output.outputs:
            each.weight_versions = [] if version is None else [(0, version)]
        return output, moved

    patch(Samplers, "_once", wrong)


def all_tokens_drawn_again(patch: Patch) -> None:
    """An answer that goes on has as many further tokens as it may have in all."""

    def wrong(params: Any, **fields: Any) -> Any:
        return dataclasses.replace(params, **{name: value for name, value in fields.items() if name != "max_tokens"})

    patch(samplers, "dataclasses", SimpleNamespace(replace=wrong))


FOLLOWING = (running_samples_are_not_ended, newest_version_named_for_all_tokens, all_tokens_drawn_again)


@pytest.mark.planted("test_each_token_is_from_the_version_that_the_answer_names")
@pytest.mark.parametrize(("plant", "follow"), [*((each, True) for each in FOLLOWING), (version_read_at_the_end, False)])
def test_mixed_versions_would_be_seen(
    plant: Callable[[Patch], None], follow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        test_each_token_is_from_the_version_that_the_answer_names(follow, tmp_path)
