"""What drafters keep for their drafts is kept while it pays. Stopping and starting again never changes an answer, and a
drafter that starts again drafts as well as before.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.core.spec_decode.upkeep import Upkeep
from chairlift.executor.drafters.draft_model import DraftModel
from chairlift.executor.drafters.eagle3 import Eagle3Drafter
from chairlift.executor.drafters.kept_blocks import KeptBlocks
from chairlift.kernels.cpu.library import supported_isas
from chairlift.models.model_files import read_config
from tests.core.spec_decode import test_draft_model, test_eagle3
from tests.core.spec_decode.test_equivalence import Models
from tests.kernels.cpu.models import VOCAB
from tests.native import needs_kernels
from tests.sweep import sweep

STEP = 0.001
"""Seconds of a step without drafts."""
QUESTIONS = ("a KV cache", "continuous batching", "a static batch", "the prefix cache")


# -- when it is on -----------------------------------------------------------------------------------------------------


def steps_with_upkeep(upkeep: Upkeep, count: int, kept: float, saved: float, new_every: int = 10) -> int:
    """Number of steps with upkeep among ``count`` steps, each of which has ``kept`` seconds of upkeep and drafts that
    save ``saved`` seconds. A request joins every ``new_every`` steps."""
    found = 0
    for number in range(count):
        if upkeep.is_due:
            upkeep.compare(STEP)
        if upkeep.passes(number % new_every == 0):
            found += 1
            upkeep.kept(kept)
            upkeep.drafted(0.2 * saved)
            upkeep.saved(1.2 * saved)
    return found


def test_upkeep_that_pays_stays() -> None:
    assert steps_with_upkeep(Upkeep(), 10_000, kept=0.1 * STEP, saved=0.2 * STEP) == 10_000


@pytest.mark.parametrize("kept", [0.01, 0.1, 1.0, 5.0])
def test_upkeep_that_does_not_pay_takes_a_small_share_of_the_time(kept: float) -> None:
    upkeep = Upkeep()
    first = steps_with_upkeep(upkeep, 300, kept=kept * STEP, saved=0.0)
    assert first == 256 and not upkeep.is_on
    count = 100 * int(256 * kept / 0.005 + 256)
    later = steps_with_upkeep(upkeep, count, kept=kept * STEP, saved=0.0)
    assert 0.003 < later * kept / count < 0.0051 or kept == 0.01


def test_upkeep_starts_again_when_drafts_pay() -> None:
    upkeep = Upkeep()
    steps_with_upkeep(upkeep, 300, kept=0.1 * STEP, saved=0.0)
    assert not upkeep.is_on
    assert steps_with_upkeep(upkeep, 20_000, kept=0.1 * STEP, saved=0.2 * STEP) > 14_000


def test_upkeep_starts_again_only_with_a_new_request() -> None:
    upkeep = Upkeep()
    steps_with_upkeep(upkeep, 300, kept=0.1 * STEP, saved=0.0)
    assert not any(upkeep.passes(False) for _ in range(50_000)) and upkeep.passes(True)


class Keeping:
    """A proposer whose upkeep the test controls, and that makes one right draft for every row."""

    def __init__(self) -> None:
        self.upkeep, self.num_calls = Upkeep(), 0

    def propose(self, rows: Any) -> list[list[int]]:
        self.num_calls += 1
        return [[7][:most] for _, most in rows]

    def seconds(self, num_rows: int) -> float:
        return 1e-6

    def forget(self, request: Any) -> None: ...


class Row:
    """What the speculator reads of a request."""

    def __init__(self, name: str) -> None:
        self.request_id, self.prediction, self.is_guided = name, (), False


@pytest.mark.parametrize("is_right", [True, False])
def test_the_speculator_ends_upkeep_that_does_not_pay(is_right: bool) -> None:
    drafter, row, step = Keeping(), Row("a"), StepFeatures(1, 100)
    speculator = AdaptiveSpeculator(lambda step: STEP * (1 + 0.01 * step.num_decodes), 4, drafter)
    for _ in range(2000):
        if drafter.upkeep.passes(True):
            drafter.upkeep.kept(0.1 * STEP)
        calls = drafter.num_calls
        if not speculator.rests(1):
            for request, drafts in speculator.choose([(row, 4)], step, 8):  # type: ignore[list-item]
                speculator.verified(request, drafts, len(drafts) if is_right else 0)
        assert drafter.upkeep.is_on or drafter.num_calls == calls
    assert drafter.upkeep.is_on == is_right


class Looking:
    """A proposer that searches tokens for drafts, and a clock. A search takes ``seconds``, and one search in ``every``
    finds a draft."""

    def __init__(self, seconds: float, every: int) -> None:
        self.taken, self.every, self.num_looks, self.now = seconds, every, 0, 0.0

    def clock(self) -> float:
        return self.now

    def propose(self, rows: Any) -> list[list[int]]:
        self.now += self.taken
        self.num_looks += 1
        return [[7][:most] if self.num_looks % self.every == 0 else [] for _, most in rows]

    def seconds(self, num_rows: int) -> float:
        return 0.0

    def forget(self, request: Any) -> None: ...


def looks_of(looking: Looking, count: int, measured: bool = True) -> int:
    """Number of searches in ``count`` steps of one row, in which every draft is right."""
    row, step = Row("a"), StepFeatures(1, 100)
    clock = looking.clock if measured else None
    seconds = lambda step: STEP * (1 + 0.01 * step.num_decodes)  # noqa: E731 - one line is clearer
    speculator = AdaptiveSpeculator(seconds, 4, looking, look_clock=clock)  # type: ignore[arg-type]
    for _ in range(count):
        if not speculator.rests(1):
            for request, drafts in speculator.choose([(row, 4)], step, 8):  # type: ignore[list-item]
                speculator.verified(request, drafts, len(drafts))
    return looking.num_looks


def test_searches_that_cost_more_than_drafts_save_take_a_small_share_of_the_time() -> None:
    """One draft in a hundred searches, each of which takes 0.3 steps, saves a thirtieth of the time of the searches."""
    count = 100_000
    assert looks_of(Looking(0.3 * STEP, 100), count) * 0.3 < 0.02 * count
    assert looks_of(Looking(0.3 * STEP, 100), 1000, measured=False) > 900


def test_searches_that_pay_go_on() -> None:
    assert looks_of(Looking(0.3 * STEP, 2), 5000) > 4500


def test_a_draft_is_tried_soon_after_the_upkeep_has_started_again() -> None:
    drafter, row, step = Keeping(), Row("a"), StepFeatures(1, 100)
    speculator = AdaptiveSpeculator(lambda step: STEP * step.num_decodes, 4, drafter)
    for _ in range(100):
        for request, drafts in speculator.choose([(row, 4)], step, 8):  # type: ignore[list-item]
            speculator.verified(request, drafts, 0)
    drafter.upkeep.is_on = False
    assert speculator.rests(1) and not speculator.choose([(row, 4)], step, 8)  # type: ignore[list-item]
    drafter.upkeep.is_on = True
    calls = drafter.num_calls
    assert not speculator.rests(1)
    speculator.choose([(row, 4)], step, 8)  # type: ignore[list-item]
    assert drafter.num_calls == calls + 1


# -- answers and drafts ------------------------------------------------------------------------------------------------


class Flipping(Upkeep):
    """Upkeep that stops and starts at random steps."""

    def __init__(self, seed: int, chance: float = 0.15) -> None:
        super().__init__()
        self._rng, self._chance = random.Random(seed), chance

    def passes(self, has_new: bool, num_steps: int = 1) -> bool:
        self.is_on ^= self._rng.random() < self._chance
        return self.is_on

    is_due = False  # type: ignore[assignment]


def watch(llm: LLM, upkeep: Upkeep) -> None:
    """Give the drafter of ``llm`` this upkeep."""
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None
    drafts.speculator._upkeep = drafts.speculator._proposer.upkeep = upkeep  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def guard(drafter: Eagle3Drafter, seen: collections.Counter[str]) -> None:
    """Fill the layer's KV in a block with 0xFF when a position in it is computed without the layer. Check that no row
    that may have drafts begins with such blocks. ``seen`` counts the rows with shared blocks, with and without
    drafts."""
    runner: Any = drafter._runner
    group, _ = runner.draft_blocks
    cache, size, follow = runner._kv._caches[group][-1], drafter._block_size, drafter.follow

    def guarded(out: Any, batch: Any) -> None:
        follow(out, batch)
        for each in out.joined:
            shared, whole = each.block_ids[group][: -(-each.num_computed_tokens // size)], drafter._whole[each.slot]
            lacking = [block for block in shared if (cache[block] == 255).mean() > 0.5]
            assert not whole or not lacking, (each.num_computed_tokens, shared, lacking)
            seen["drafting"] += bool(shared and whole)
            seen["refused"] += bool(lacking)
            seen["refused in vain"] += bool(shared and not whole and not lacking and runner.captures)
        kept = np.repeat(drafter._whole[batch.slots], np.diff(batch.cu_seqlens))
        blocks = batch.slot_mapping[group] // size
        cache[blocks[kept & (batch.positions % size == 0)]] = 0
        cache[blocks[~kept]] = 255

    drafter.follow = guarded  # type: ignore[method-assign]


@needs_kernels
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.nightly)])
def test_upkeep_that_flips_changes_no_bit(
    method: str, count: int, models: Models, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a small model that is the model itself, ``check`` also finds that every draft is right. For a layer,
    :func:`guard` checks that no row reads blocks that lack its KV."""
    seen: collections.Counter[str] = collections.Counter()
    module: Any = test_eagle3 if method == "eagle3" else test_draft_model
    free = module.drafts_are_free

    def check(seed: int) -> None:
        def flipping(llm: LLM) -> Any:
            watch(llm, Flipping(seed))
            if method == "eagle3":
                guard(llm.engine.core.executor.drafter, seen)  # type: ignore[attr-defined]
            return free(llm)

        monkeypatch.setattr(module, "drafts_are_free", flipping)
        seen.update(module.check(models, seed, **({"twin": True} if method == "draft_model" else {})))

    sweep(request, count, check)
    if request.config.getoption("--seeds") is None:
        assert seen["drafted" if method == "eagle3" else "accepted"] > 3 * count, seen


@needs_kernels
def test_a_row_does_not_catch_up_from_behind_its_window(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this world a sliding window has passed blocks that a preempted row needs to catch up. ``check`` finds the
    wrong drafts."""
    free = test_draft_model.drafts_are_free

    def flipping(llm: LLM) -> Any:
        watch(llm, Flipping(8))
        return free(llm)

    monkeypatch.setattr(test_draft_model, "drafts_are_free", flipping)
    isas = [supported_isas()[0]] * 3  # the rest of the world must not depend on the processor
    assert test_draft_model.check(models, 8, twin=True, isas=isas)["accepted"]


def random_prompts(first: int = 0) -> list[list[int]]:
    """Four prompts of random tokens."""
    return [[random.Random(first + i).randrange(2, VOCAB) for _ in range(15 + 9 * i)] for i in range(4)]


def questions(llm: LLM) -> list[list[int]]:
    """Prompts whose answers the bundled model's own layer drafts well."""
    return [llm.encode_chat([{"role": "user", "content": f"What is {what}?"}]) for what in QUESTIONS]


def accepted(llm: LLM, prompts: list[list[int]]) -> tuple[int, int, int]:
    """(drafts, accepted drafts, a number for the answers) of requests with these prompts."""
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None
    before = drafts.num_drafts, drafts.num_accepted
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    return drafts.num_drafts - before[0], drafts.num_accepted - before[1], hash(tuple(answers))


class Switched(Upkeep):
    """Upkeep that the test switches."""

    def passes(self, has_new: bool, num_steps: int = 1) -> bool:
        return self.is_on

    is_due = False  # type: ignore[assignment]


def restarted(models: Models, method: str) -> list[tuple[int, int, int]]:
    """(drafts, accepted drafts, answers) of the same requests with upkeep: without a break, after a break between
    requests, and after a break in the middle of other requests. ``eagle3`` is the bundled model with its own layer."""
    settings: dict[str, Any] = {"num_kv_blocks": 200, "threads": 1, "max_num_seqs": 4}
    module: Any = test_eagle3 if method == "eagle3" else test_draft_model
    if method == "eagle3":
        llm = LLM(speculative_config={"method": "eagle3", "num_speculative_tokens": 4}, **settings)
        prompts = questions(llm)
    else:
        asked = test_draft_model.drafting(models.model_dir("llama"), 4)
        llm = models.llm("llama", "auto", "float32", speculative_config=asked, **settings)
        prompts = random_prompts()
    module.drafts_are_free(llm)
    upkeep = Switched()
    watch(llm, upkeep)
    found = [accepted(llm, prompts)]
    upkeep.is_on = False
    assert accepted(llm, random_prompts(50))[:2] == (0, 0)
    upkeep.is_on = True
    llm.generate([[3, 4]], SamplingParams(max_tokens=1))  # it starts with the step after the one in which it is on
    found.append(accepted(llm, prompts))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for number in range(3):
        llm.engine.add_request([5 + number] * 20, params, request_id=f"broken {number}")
    for step in range(30):
        upkeep.is_on = not 5 < step < 12
        llm.engine.step()
    found.append(accepted(llm, prompts))
    return found


@needs_kernels
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_as_many_drafts_are_right_after_a_restart(method: str, models: Models) -> None:
    whole, between, inside = restarted(models, method)
    assert whole[1] > 40 and whole == between
    assert inside[2] == whole[2] and inside[1] >= 0.9 * whole[1]


def long_questions(llm: LLM, name: str) -> list[list[int]]:
    """Prompts that begin with the same text, which is longer than a few blocks."""
    first = f"My name is {name}. " + "Please answer in one sentence. " * 4
    return [llm.encode_chat([{"role": "user", "content": f"{first}What is {what}?"}]) for what in QUESTIONS]


def after_a_break(stops: bool) -> dict[str, tuple[int, int, int]]:
    """(drafts, accepted drafts, answers) of requests of the bundled model with its own layer: with prompts that were
    first computed before a break, in it, and after it."""
    settings: dict[str, Any] = {"num_kv_blocks": 400, "threads": 1, "max_num_seqs": 4}
    llm = LLM(speculative_config={"method": "eagle3", "num_speculative_tokens": 4}, **settings)
    test_eagle3.drafts_are_free(llm)
    upkeep = Switched()
    watch(llm, upkeep)
    accepted(llm, long_questions(llm, "before"))
    upkeep.is_on = not stops
    accepted(llm, long_questions(llm, "within"))
    upkeep.is_on = True
    llm.generate([[3, 4]], SamplingParams(max_tokens=1))  # it starts with the step after the one in which it is on
    return {name: accepted(llm, long_questions(llm, name)) for name in ("before", "within", "after")}


@needs_kernels
def test_only_rows_on_blocks_without_the_layers_kv_have_no_drafts() -> None:
    expected, found = after_a_break(stops=False), after_a_break(stops=True)
    assert found["before"] == expected["before"] and found["after"] == expected["after"]
    assert found["within"] == (0, 0, expected["within"][2])
    assert min(drafted[1] for drafted in expected.values()) > 20


@needs_kernels
def test_a_stopped_layer_is_not_run_and_nothing_is_stored(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = models.model_dir("llama")
    asked = test_eagle3.asked_of(test_eagle3.write_layer(tmp_path / "layer", read_config(where)), 4)
    llm = models.llm("llama", "auto", "float32", num_kv_blocks=200, threads=1, speculative_config=asked)
    drafter, upkeep = test_eagle3.drafts_are_free(llm), Switched()
    watch(llm, upkeep)
    upkeep.is_on = False
    accepted(llm, random_prompts())
    drafter._stored[:], drafter._tapped[:] = 7, 7
    for name in ("_compute", "_keep", "propose"):
        monkeypatch.setattr(drafter, name, None)
    accepted(llm, random_prompts(9))
    assert (drafter._stored == 7).all() and (drafter._tapped == 7).all()


def ngram_engine(models: Models) -> tuple[LLM, Any, Drafts]:
    """(engine with n-gram drafts, its core, its drafts)."""
    llm = models.llm("llama", "auto", "float32", num_kv_blocks=200, threads=1, speculative_config={"method": "ngram"})
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None
    return llm, llm.engine.core, drafts


def test_the_cost_of_a_step_leaves_out_the_time_for_making_drafts(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the clock takes a second here, and making drafts a quarter. Some steps are not observed."""
    llm, core, drafts = ngram_engine(models)
    speculator, seconds, wants, observed = drafts.speculator, itertools.count(1), itertools.cycle([1, 0]), list[float]()
    choose: Any = speculator.choose
    monkeypatch.setattr(core.clock, "now", lambda: float(next(seconds)))
    monkeypatch.setattr(core.costs, "wants", lambda out: bool(next(wants)))
    monkeypatch.setattr(core.costs, "observe", lambda features, taken, *rest: observed.append(taken))

    def slow(*given: Any) -> Any:
        speculator.drafting_seconds += 0.25
        return choose(*given)

    monkeypatch.setattr(speculator, "choose", slow)
    llm.generate([[7, 8, 9] * 6], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    found = collections.Counter(taken % 1 for taken in observed)
    assert found[0.75] > 3 and set(found) <= {0.75, 0.0}


def test_the_engine_measures_the_step_without_drafts_that_was_made_for_it(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, core, drafts = ngram_engine(models)
    speculator, steps, observed = drafts.speculator, list[int](), list[int]()
    choose: Any = speculator.choose

    def made(rows: Any, step: StepFeatures, budget: int) -> Any:
        steps.append(step.num_decodes)
        speculator.measures = len(steps) % 3 == 0
        return [] if speculator.measures else choose(rows, step, budget)

    monkeypatch.setattr(speculator, "rests", lambda num_rows: False)
    monkeypatch.setattr(speculator, "choose", made)
    monkeypatch.setattr(core.costs, "wants", lambda out: False)
    monkeypatch.setattr(core.costs, "observe", lambda features, taken, copied: observed.append(features.num_decodes))
    llm.generate([[7, 8, 9] * 6], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert len(observed) == len(steps) // 3 > 3 and set(observed) == {1}


# -- the tests can fail ------------------------------------------------------------------------------------------------


def a_gap_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Requests whose hidden states have a gap are drafted for, from states that are missing or stale."""
    follow = Eagle3Drafter.follow

    def wrong(self: Eagle3Drafter, out: Any, batch: Any) -> None:
        owners = list(self._owners)
        follow(self, out, batch)
        for row in out.joined:
            owners[row.slot] = row.request_id
        self._owners, self._whole[:] = owners, True

    patch.setattr(Eagle3Drafter, "follow", wrong)


def all_blocks_have_the_layers_kv(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeptBlocks, "has_all", lambda self, row: True)


def blocks_of_new_rows_are_not_marked(patch: pytest.MonkeyPatch) -> None:
    grew = KeptBlocks.grew
    patch.setattr(KeptBlocks, "grew", lambda self, out, keeps: grew(self, dataclasses.replace(out, joined=[]), keeps))


def blocks_in_use_at_a_stop_are_not_marked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeptBlocks, "stop", lambda self, slots, counts: None)


MARKS_LOST = [
    all_blocks_have_the_layers_kv,
    blocks_of_new_rows_are_not_marked,
    blocks_in_use_at_a_stop_are_not_marked,
]


def shared_blocks_are_trusted(patch: pytest.MonkeyPatch) -> None:
    init = DraftModel.__init__

    class Trusting(DraftModel):
        _has_gaps = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]

    def wrong(self: DraftModel, *given: Any, **named: Any) -> None:
        self.__class__ = Trusting
        init(self, *given, **named)

    patch.setattr(DraftModel, "__init__", wrong)


def skipped_chunks_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    follow = DraftModel.follow

    def wrong(self: DraftModel, out: Any, batch: Any) -> None:
        follow(self, out, batch)
        for chunk in out.chunks:
            self._counts[chunk.slot] = chunk.end

    patch.setattr(DraftModel, "follow", wrong)


@needs_kernels
def test_drafts_from_missing_states_change_no_answer_but_are_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = restarted(models, "eagle3")
    a_gap_is_not_noticed(monkeypatch)
    found = restarted(models, "eagle3")
    assert [each[2] for each in found] == [each[2] for each in whole]
    assert found != whole


@pytest.mark.planted
@needs_kernels
@pytest.mark.parametrize("plant", [shared_blocks_are_trusted, skipped_chunks_count_as_computed])
def test_a_small_model_with_missing_kv_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None],
    models: Models,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="drafts were right"):
        test_upkeep_that_flips_changes_no_bit("draft_model", 20, models, request, monkeypatch)


@pytest.mark.full
@pytest.mark.planted
@needs_kernels
@pytest.mark.parametrize("plant", MARKS_LOST)
def test_blocks_without_the_layers_kv_are_noticed(
    plant: Callable[[pytest.MonkeyPatch], None],
    models: Models,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):  # a step fails, so its answers end early
        test_upkeep_that_flips_changes_no_bit("eagle3", 60, models, request, monkeypatch)
