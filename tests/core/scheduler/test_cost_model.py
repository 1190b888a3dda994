from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.scheduler import cost_model
from chairlift.core.scheduler.cost_model import CostModel, Roofline, StepFeatures
from chairlift.core.scheduler.output import Chunk
from chairlift.errors import ConfigError

TRUTH = Roofline(
    weight_seconds=0.05,
    token_seconds=0.0016,
    prompt_share=0.72,
    context_seconds=9e-7,
    pair_seconds=3e-7,
    step_seconds=0.002,
)
PRIOR = Roofline(prompt_share=0.72)


def draw(rng: random.Random) -> StepFeatures:
    decodes, prompt = rng.choice([0, 1, 2, 4, 8, 16, 32, 64]), rng.choice([0, 0, 0, 50, 200, 1000])
    decodes = decodes or (0 if prompt else 1)
    return StepFeatures(decodes, decodes * rng.randrange(50, 1500), prompt, prompt * rng.uniform(prompt / 2, 3000))


def drawn(count: int, seed: int, noise: float = 0.0, outliers: float = 0.0) -> list[tuple[StepFeatures, float]]:
    """Steps, and what they would take on the machine that ``TRUTH`` describes; an outlier takes 3 to 20 times that."""
    rng, truth, steps = random.Random(seed), CostModel(TRUTH), []
    for _ in range(count):
        step = draw(rng)
        seconds = truth.step_seconds(step) * math.exp(rng.gauss(0, noise))
        steps.append((step, seconds * (rng.uniform(3, 20) if rng.random() < outliers else 1)))
    return steps


def trained(steps: list[tuple[StepFeatures, float]], model: CostModel | None = None) -> CostModel:
    model = model or CostModel(PRIOR)
    for step, seconds in steps:
        model.observe(step, seconds)
    return model


def test_step_features_count_tokens_context_and_adapter_bytes() -> None:
    chunks = [Chunk(0, 0, 4, False, "prefill"), Chunk(1, 10, 2, True, "prefill")]
    features = StepFeatures.of(3, 40, chunks)
    assert features == (3, 40, 6, (1 + 2 + 3 + 4) + (11 + 12), 0, 0)
    assert StepFeatures.of(3, 40, chunks, 7).adapter_bytes == 7
    assert StepFeatures.of(3, 40, chunks, 7, 30).shared_tokens == 30


def test_a_cost_model_without_observations_is_the_roofline() -> None:
    model = CostModel(TRUTH)
    assert model.step_seconds(StepFeatures(1, 100)) == pytest.approx(0.002 + 0.05 + 100 * 9e-7)
    many = StepFeatures(num_decodes=1000, prefill_tokens=2000)
    assert model.step_seconds(many) == pytest.approx(0.002 + 0.0016 * (1000 + 0.72 * 2000))
    assert model.prefill_seconds(2000, 500) == pytest.approx(0.002 + 0.0016 * 0.72 * 2000 + 3e-7 * 2000 * 1500.5)


@pytest.mark.parametrize(
    ("noise", "outliers", "median", "most"),
    [(0.0, 0.0, 0.01, 0.06), (0.05, 0.0, 0.02, 0.08), (0.05, 0.05, 0.02, 0.08), (0.2, 0.1, 0.08, 0.15)],
)
def test_the_fit_is_right_under_noise_and_outliers(noise: float, outliers: float, median: float, most: float) -> None:
    unseen = drawn(300, seed=99)
    assert CostModel(PRIOR).errors(unseen)[150] > 0.3, "the prior must be wrong, or nothing is tested"
    for model in (
        trained(drawn(600, 1, noise, outliers)),
        CostModel(PRIOR),
    ):
        if not model.num_observed:
            model.fit(drawn(600, 1, noise, outliers))
        errors = model.errors(unseen)
        assert errors[150] < median
        assert errors[270] < most


def test_the_fit_recovers_the_price_of_each_feature() -> None:
    model = CostModel(PRIOR)
    model.fit(drawn(1000, 5))

    def price(one: StepFeatures, more: StepFeatures) -> float:
        return model.step_seconds(more) - model.step_seconds(one)

    assert price(StepFeatures(16, 4000), StepFeatures(16, 14_000)) == pytest.approx(10_000 * 9e-7, rel=0.1)
    long, longer = StepFeatures(0, 0, 1000, 1e6), StepFeatures(0, 0, 1000, 2e6)
    assert price(long, longer) == pytest.approx(1e6 * 3e-7, rel=0.1)
    assert price(StepFeatures(64, 32_000, 200, 1e5), StepFeatures(64, 32_000, 1000, 1e5)) == pytest.approx(
        0.72 * 0.0016 * 800, rel=0.1
    )


def test_a_first_step_that_is_far_off_is_soon_forgotten() -> None:
    steps = drawn(200, 2)
    slow = trained([(steps[0][0], 50.0), *steps])
    assert slow.errors(drawn(100, 3))[50] < 0.03


def test_the_fit_follows_a_machine_that_changes() -> None:
    model = trained(drawn(600, 1))
    slower = [(step, 2 * seconds) for step, seconds in drawn(6000, 4)]
    assert trained(slower, model).errors(slower)[3000] < 0.05


def test_pure_decoding_does_not_erase_what_is_known_of_prompts() -> None:
    model = trained(drawn(600, 1))
    prompts = [(step, seconds) for step, seconds in drawn(600, 7) if step.prefill_tokens >= 200]
    before = model.errors(prompts)[len(prompts) // 2]
    truth = CostModel(TRUTH)
    for position in range(5000):
        step = StepFeatures(8, 8 * (100 + position % 900))
        model.observe(step, truth.step_seconds(step))
    assert before < 0.03
    assert model.errors(prompts)[len(prompts) // 2] < 0.05


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 128), st.integers(0, 10**6), st.integers(0, 4096), st.floats(0, 1e7), st.floats(1e-5, 10)
        ),
        max_size=40,
    ),
    st.tuples(st.integers(0, 200), st.integers(0, 10**6), st.integers(0, 8192), st.floats(0, 1e7)),
)
def test_predictions_are_positive_and_rise_in_every_feature(
    seen: list[tuple[int, int, int, float, float]], at: tuple[int, int, int, float]
) -> None:
    """Whatever was observed, sense or nonsense."""
    model = trained([(StepFeatures(*row[:4]), row[4]) for row in seen])
    seconds = model.step_seconds(StepFeatures(*at))
    assert 0 < seconds < math.inf
    for place, more in itertools.product(range(4), (1, 100, 10_000)):
        larger: list[Any] = list(at)
        larger[place] += more
        assert model.step_seconds(StepFeatures(*larger)) >= seconds * (1 - 1e-12)


def test_impossible_observations_are_not_learnt() -> None:
    model = CostModel(TRUTH)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        model.observe(StepFeatures(1, 1), seconds)
    assert model.num_observed == 0
    assert model.to_dict() == CostModel(TRUTH).to_dict()


def test_the_time_of_copies_is_learnt_from_their_bytes() -> None:
    model = CostModel()
    assert model.copy_seconds(5 * 10**9) == pytest.approx(1.0)
    for index in range(200):
        model.observe_copy(10**9, 0.1 if index % 20 else 3.0)
    assert model.copy_seconds(10**10) == pytest.approx(1.0, rel=0.1)
    model.observe_copy(0, 1.0)
    model.observe_copy(1, 0.0)
    assert model.copy_seconds(10**10) == pytest.approx(1.0, rel=0.1)


def test_a_cost_model_learns_the_same_after_a_json_round_trip() -> None:
    model = trained(drawn(100, 1))
    copy = CostModel.from_dict(json.loads(json.dumps(model.to_dict())))
    more = drawn(200, 2)
    assert trained(more, copy).to_dict() == trained(more, model).to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"prior": {}},
        {"prior": {"weight_seconds": -1}},
        {"prior": {"unknown": 1}},
        {"copy_bandwidth": "fast"},
        {"coefficients": [1.0]},
        {"coefficients": [-1.0] * 16},
        {"error": math.nan},
        {"gram": [[0.0]]},
    ],
)
def test_a_file_that_is_no_cost_model_is_refused(change: dict[str, Any]) -> None:
    fields = CostModel().to_dict() | change
    if change == {"prior": {}}:
        assert CostModel.from_dict(fields).prior == Roofline()
        return
    with pytest.raises(ConfigError):
        CostModel.from_dict(fields)
    with pytest.raises(ConfigError, match="not a cost model"):
        CostModel.from_dict({})


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1"])
def test_prices_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="token_seconds"):
        Roofline(token_seconds=value)
    if isinstance(value, float):
        with pytest.raises(ConfigError, match="copy_bandwidth"):
            CostModel(copy_bandwidth=value)


def test_a_step_costs_little_to_learn_from() -> None:
    """Memory does not grow, whatever the number of steps."""
    model = trained(drawn(50, 1))
    size = len(json.dumps(model.to_dict()))
    assert len(json.dumps(trained(drawn(2000, 2), model).to_dict())) < 1.5 * size


ADAPTERS = dataclasses.replace(TRUTH, adapter_byte_seconds=2.5e-10)
_SIZES = (0, 0, 17.6e6, 70e6, 282e6)


def adapted(count: int, seed: int) -> list[tuple[StepFeatures, float]]:
    """Steps with adapters of unequal sizes and without, and their times on the machine ``ADAPTERS``."""
    rng, truth = random.Random(seed), CostModel(ADAPTERS)
    steps = [draw(rng)._replace(adapter_bytes=rng.choice(_SIZES)) for _ in range(count)]
    return [(step, truth.step_seconds(step) * math.exp(rng.gauss(0, 0.02))) for step in steps]


def check_the_price_of_adapters() -> None:
    model = trained(adapted(1500, 1))
    fresh = adapted(300, 2)
    errors = model.errors(fresh)
    blind = trained([(step._replace(adapter_bytes=0.0), seconds) for step, seconds in adapted(1500, 1)])
    without = blind.errors([(step._replace(adapter_bytes=0.0), seconds) for step, seconds in fresh])
    assert errors[150] < 0.04 and errors[270] < 0.12
    assert without[270] > 2 * errors[270], "the price of adapters improves nothing"
    alone, with_adapter = StepFeatures(8, 4000), StepFeatures(8, 4000, adapter_bytes=100e6)
    price = model.step_seconds(with_adapter) - model.step_seconds(alone)
    assert price == pytest.approx(0.025, rel=0.25)


def test_the_price_of_adapters_is_learnt() -> None:
    check_the_price_of_adapters()


_NEW_PRICES = ("adapter_byte_seconds", "shared_share")


def _old_format(fields: dict[str, Any], missing: int) -> dict[str, Any]:
    """Calibration file of a version without the last ``missing`` prices: shared prefixes, then adapters."""
    pairs = [(one, other) for one in range(8) for other in range(one, 8)]
    left = 8 - missing
    gram = [[value for value, (_, other) in zip(row, pairs, strict=True) if other < left] for row in fields["gram"]]
    prior = {name: value for name, value in fields["prior"].items() if name not in _NEW_PRICES[-missing:]}
    target = [row[:-missing] for row in fields["target"]]
    coefficients = fields["coefficients"][:-missing]
    return fields | {"gram": gram, "target": target, "coefficients": coefficients, "prior": prior}


def check_that_old_files_go_on(missing: int) -> None:
    first, second = drawn(200, 3, noise=0.05), drawn(200, 4, noise=0.05)
    model = trained(first)
    old = CostModel.from_dict(json.loads(json.dumps(_old_format(model.to_dict(), missing))))
    trained(second, model), trained(second, old)
    steps = [step for step, _ in second]
    # the new prices had another scale, which no step without adapters and shared prefixes depends on
    assert [old.step_seconds(step) for step in steps] == [model.step_seconds(step) for step in steps]
    assert old.step_seconds(steps[0]._replace(adapter_bytes=1e8)) > old.step_seconds(steps[0])
    alone = StepFeatures(8, 40_000)
    assert 0 < old.step_seconds(alone._replace(shared_tokens=30_000)) < old.step_seconds(alone)


@pytest.mark.parametrize("missing", [1, 2])
def test_cost_models_of_older_versions_go_on_bit_for_bit(missing: int) -> None:
    check_that_old_files_go_on(missing)


@pytest.mark.planted("test_the_price_of_adapters_is_learnt")
@pytest.mark.parametrize("mutation", ["not charged", "not learnt", "equations shuffled"])
def test_each_mistake_with_adapters_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation == "equations shuffled":
        monkeypatch.setattr(cost_model, "_widened", lambda gram, missing: [*gram, *[0.0] * 15][:36])
        with pytest.raises(AssertionError):
            check_that_old_files_go_on(2)
        return
    name = "step_seconds" if mutation == "not charged" else "_accumulate"
    right = getattr(CostModel, name)
    monkeypatch.setattr(CostModel, name, lambda self, step, *rest: right(self, step._replace(adapter_bytes=0.0), *rest))
    with pytest.raises(AssertionError):
        check_the_price_of_adapters()


SHARED = dataclasses.replace(TRUTH, shared_share=0.3)


def shared(count: int, seed: int) -> list[tuple[StepFeatures, float]]:
    """Steps with long contexts, of which half have a shared prefix, and their times on the machine ``SHARED``."""
    rng, truth = random.Random(seed), CostModel(SHARED)
    steps = []
    for step, _ in drawn(count, seed):
        context = 8 * step.context_tokens
        part = rng.choice([0.0, 0.0, 0.4, 0.9])
        steps.append(step._replace(context_tokens=context, shared_tokens=int(part * context)))
    return [(step, truth.step_seconds(step) * math.exp(rng.gauss(0, 0.02))) for step in steps]


def check_the_price_of_shared_prefixes() -> None:
    model = trained(shared(1500, 1))
    fresh = shared(300, 2)
    errors = model.errors(fresh)
    blind = trained([(step._replace(shared_tokens=0), seconds) for step, seconds in shared(1500, 1)])
    without = blind.errors([(step._replace(shared_tokens=0), seconds) for step, seconds in fresh])
    assert errors[150] < 0.04 and errors[270] < 0.12
    assert without[270] > 2 * errors[270], "the price of shared prefixes improves nothing"
    alone = StepFeatures(32, 64_000)
    saved = model.step_seconds(alone) - model.step_seconds(alone._replace(shared_tokens=60_000))
    assert saved == pytest.approx(60_000 * 0.7 * 9e-7, rel=0.2)


def test_the_price_of_shared_prefixes_is_learnt() -> None:
    check_the_price_of_shared_prefixes()


@pytest.mark.planted("test_the_price_of_shared_prefixes_is_learnt")
@pytest.mark.parametrize("mutation", ["not charged", "not learnt"])
def test_each_mistake_with_shared_prefixes_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "step_seconds" if mutation == "not charged" else "_accumulate"
    right = getattr(CostModel, name)
    monkeypatch.setattr(CostModel, name, lambda self, step, *rest: right(self, step._replace(shared_tokens=0), *rest))
    with pytest.raises(AssertionError):
        check_the_price_of_shared_prefixes()


def test_a_position_that_is_shared_costs_at_most_as_much_as_one_that_is_read() -> None:
    with pytest.raises(ConfigError, match="shared_share"):
        Roofline(shared_share=1.5)
