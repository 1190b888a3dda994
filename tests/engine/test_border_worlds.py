"""Worlds in which messages between server and engine arrive late and in pieces, readers stall and connections break:
every request gets its own answer or an error, and nothing of it is left."""

from __future__ import annotations

import asyncio
import logging
import random
import selectors
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chairlift.base.outputs import OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.async_engine import AsyncEngine, EngineState
from chairlift.engine.core_outputs import CoreOutputs
from chairlift.engine.intake import Intake
from chairlift.engine.output_processor import OutputProcessor
from chairlift.engine.process.messages import FrameReader
from chairlift.errors import EngineDeadError
from chairlift.loading.model import read_tokenizer
from tests.e2e.oracle import expected_hashlm
from tests.engine.border import Border

SEEDS = range(6)
MOST_TURNS = 200_000


class _NoWaiting(selectors.DefaultSelector):
    """Skips the time that an event loop would wait for a timer, while it ``hurries``."""

    hurries = False
    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.hurries and timeout is not None and timeout > 0:
            ready = super().select(0)
            self.skipped += 0.0 if ready else timeout
            return ready
        return super().select(timeout)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.waits = _NoWaiting()
        super().__init__(self.waits)

    def time(self) -> float:
        return super().time() + self.waits.skipped


def drawn(number: int, rng: random.Random) -> tuple[list[int], SamplingParams]:
    prompt = [rng.randrange(1, 250) for _ in range(rng.choice((3, 20, 90)))]
    return prompt, SamplingParams(
        n=rng.choice((1, 1, 1, 2)),
        seed=number,
        max_tokens=rng.choice((1, 7, 40)),
        temperature=rng.choice((0.0, 1.0)),
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice((None, None, ["a"], ["e", "th"])),
        logprobs=rng.choice((None, None, 1)),
    )


def check(prompt: list[int], params: SamplingParams, outputs: list[RequestOutput], kind: OutputKind) -> None:
    assert outputs[-1].finished
    assert not any(output.finished for output in outputs[:-1])
    for index in range(params.n):
        expected = expected_hashlm(prompt, params, index)
        mine = [one for output in outputs for one in output.outputs if one.index == index]
        parts = mine if kind is OutputKind.DELTA else mine[-1:]
        tokens = [token for one in parts for token in one.token_ids]
        assert tokens == expected.token_ids
        assert "".join(one.text for one in parts) == expected.text
        assert mine[-1].finish_reason is expected.finish_reason
        if params.logprobs is not None:
            records = [record for one in parts for record in one.logprobs or ()]
            assert [next(iter(record)) for record in records] == tokens


class BorderWorld:
    """One execution: requests that come at random turns over a wire that misbehaves."""

    def __init__(self, seed: int, num_requests: int = 60) -> None:
        self.rng = random.Random(seed)
        self.num_requests = num_requests
        self.harm: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.borders: list[Border] = []

    def run(self) -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(self._run())

    def _connect(self, engine: AsyncEngine) -> Border:
        self.borders.append(Border(engine.config, engine, random.Random(self.rng.random()), self.harm))
        return self.borders[-1]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _Loop)
        waits = loop.waits
        settings: dict[str, Any] = {
            "model": "hashlm",
            "max_num_seqs": 6,
            "num_kv_blocks": 60,
            "max_num_batched_tokens": 64,
        }
        settings["num_lookahead_steps"] = self.rng.choice((0, 1, 2))
        engine = AsyncEngine.start(
            EngineConfig.from_flat(settings),
            read_tokenizer=read_tokenizer,
            connect=self._connect,
            max_queued_requests=10_000,
            max_queued_tokens=10**7,
        )
        try:
            await asyncio.wait_for(engine.wait_ready(), 60)
            waits.hurries = True  # pauses before a restart; processes of the tokenizer do not wait any more
            await self._all(engine)
            await self._quiet(engine)
        finally:
            waits.hurries = False
            await engine.shutdown()

    async def _all(self, engine: AsyncEngine) -> None:
        """Every request must end; a request that waits for ever makes the count of turns run out."""
        tasks = [asyncio.create_task(self._one(engine, number)) for number in range(self.num_requests)]
        for _ in range(MOST_TURNS):
            await asyncio.sleep(0)
            if all(task.done() for task in tasks):
                break
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        assert all(task.done() for task in tasks), f"a request waits for ever after {self.harm}"

    async def _one(self, engine: AsyncEngine, number: int) -> None:
        rng = random.Random(f"{self.num_requests}-{number}-{self.rng.random()}")
        prompt, params = drawn(number, rng)
        leaves_after = rng.choice((None, None, None, None, 0, 1, 3))
        kind = rng.choice((OutputKind.DELTA, OutputKind.FINAL))
        for _ in range(rng.randrange(400)):
            await asyncio.sleep(0)
        outputs: list[RequestOutput] = []
        while engine.state is not EngineState.READY:
            await asyncio.sleep(0.01)
        try:
            stream = await engine.submit(prompt, params, kind=kind)
            if leaves_after == 0:
                stream.abort()
                self.ends["left"] += 1
                return
            async for output in stream:
                outputs.append(output)
                if len(outputs) == leaves_after:
                    stream.abort()
                    self.ends["left"] += 1
                    return
        except EngineDeadError:
            self.ends["told"] += 1
            return
        check(prompt, params, outputs, kind)
        self.ends["answered"] += 1

    async def _quiet(self, engine: AsyncEngine) -> None:
        """Check that neither side keeps anything of the requests."""
        assert not engine.num_requests
        assert not engine.num_queued
        alive = self.borders[-1]
        for _ in range(MOST_TURNS):
            if not alive.core.has_work and not len(alive.there) and not len(alive.back):
                break
            if engine._client is not alive:
                return
            await asyncio.sleep(0)
        assert not alive.core.kv.counts().used
        alive.core.scheduler.check_invariants()


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    logger = logging.getLogger("chairlift")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


NIGHTLY = [pytest.param(each, marks=pytest.mark.nightly) for each in range(100, 500, 100)]


@pytest.mark.parametrize("first", [0, *NIGHTLY])
def test_every_request_is_answered_right_or_told(first: int) -> None:
    ends: Counter[str] = Counter()
    harm: Counter[str] = Counter()
    for seed in range(first, first + (len(SEEDS) if not first else 100)):
        world = BorderWorld(seed)
        world.run()
        ends += world.ends
        harm += world.harm
    assert min(ends[name] for name in ("answered", "told", "left")) >= 3, ends
    assert min(harm[name] for name in ("stalled", "silent", "broken")) >= 1, harm


# --- planted bugs -----------------------------------------------------------------------------------------------------

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def mutant(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    MUTANTS[plant.__name__] = plant
    return plant


def after_merge(patch: pytest.MonkeyPatch, change: Callable[[CoreOutputs, CoreOutputs], None]) -> None:
    """Change merged results; ``change`` gets the merged results and the later ones."""
    merge = CoreOutputs.merge

    def merged(self: CoreOutputs, later: CoreOutputs) -> None:
        merge(self, later)
        change(self, later)

    patch.setattr(CoreOutputs, "merge", merged)


@mutant
def merged_results_lose_the_ends(patch: pytest.MonkeyPatch) -> None:
    def lose(whole: CoreOutputs, later: CoreOutputs) -> None:
        whole.finished = whole.finished[: len(whole.finished) - len(later.finished)]

    after_merge(patch, lose)


@mutant
def merged_results_lose_tokens(patch: pytest.MonkeyPatch) -> None:
    def lose(whole: CoreOutputs, later: CoreOutputs) -> None:
        count = len(whole.token_ids) - len(later.token_ids)
        whole.sequence_ids, whole.token_ids = whole.sequence_ids[:count], whole.token_ids[:count]
        whole.logprobs = None if whole.logprobs is None else whole.logprobs[:count]

    after_merge(patch, lose)


@mutant
def merged_log_probabilities_move_to_other_tokens(patch: pytest.MonkeyPatch) -> None:
    def move(whole: CoreOutputs, later: CoreOutputs) -> None:
        if whole.logprobs is not None:
            whole.logprobs.reverse()

    after_merge(patch, move)


@mutant
def half_a_frame_is_thrown_away(patch: pytest.MonkeyPatch) -> None:
    feed = FrameReader.feed

    def fed(self: FrameReader, data: bytes) -> Iterator[Any]:
        yield from feed(self, data)
        self._buffer.clear()

    patch.setattr(FrameReader, "feed", fed)


@mutant
def tokens_after_a_stop_string_are_delivered(patch: pytest.MonkeyPatch) -> None:
    take = OutputProcessor.take

    def taken(self: OutputProcessor, step: CoreOutputs, now: float) -> list[str]:
        take(self, step, now)
        return []  # the front end goes on until the core ends the answer

    patch.setattr(OutputProcessor, "take", taken)


@mutant
def requests_of_a_dead_engine_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AsyncEngine, "_fail_all", lambda self: None)


@mutant
def a_request_that_left_keeps_its_place_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    leave = Intake.leave

    def left(self: Intake, request_id: str, now: float, *, started: bool) -> None:
        if started:
            leave(self, request_id, now, started=started)

    patch.setattr(Intake, "leave", left)


@mutant
def the_engine_does_not_hear_who_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Border, "abort", lambda self, sequence_ids: None)


@pytest.mark.full
@pytest.mark.planted("test_every_request_is_answered_right_or_told")
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.test_border_worlds.MOST_TURNS", 3_000)
    MUTANTS[name](monkeypatch)
    for seed in range(20):
        try:
            BorderWorld(seed, num_requests=30).run()
        except Exception:  # whatever notices it
            return
    raise AssertionError(f"20 worlds did not notice: {name}")
