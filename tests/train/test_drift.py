"""Changes are noticed, old items come back in their share, and everything resumes to the bit."""

from __future__ import annotations

import collections
import copy
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift_train.detectors import Adwin, Detector, PageHinkley
from chairlift_train.drift import DriftSampler, Reservoir
from chairlift_train.stream import PackStream
from tests.train.drift_streams import STREAMS, evaluate

DETECTORS: list[Callable[[], Detector]] = [Adwin, PageHinkley]
EXAMPLE = Path(__file__).parents[2] / "examples" / "continual.py"


# Detectors


@pytest.mark.parametrize(
    ("stream", "make", "latest"),
    [
        ("abrupt", Adwin, 55),
        ("gradual", Adwin, 215),
        ("bernoulli", Adwin, 87),
        ("abrupt", PageHinkley, 30),
        ("gradual", PageHinkley, 230),
        ("bernoulli", PageHinkley, 60),
    ],
)
def test_changes_are_seen_in_time_and_only_them(stream: str, make: Callable[[], Detector], latest: float) -> None:
    """The limits for ADWIN are the delays of river's, 0.26.1, on the same streams."""
    outcome = evaluate(lambda: make().update, STREAMS[stream], range(20))
    assert outcome.delay <= latest
    assert outcome.missed == outcome.false_alarms == 0


def test_adwin_takes_no_change_of_variance_for_one_of_the_mean() -> None:
    assert evaluate(lambda: Adwin().update, STREAMS["variance"], range(20)).false_alarms == 0


def test_adwin_keeps_the_moments_of_its_window() -> None:
    values = np.random.default_rng(3).normal(1.0, 0.2, 777)
    detector = Adwin()
    assert sum(detector.update(value) for value in values) == 0
    rows = detector.state_dict()["rows"]
    sizes = [2**k for k, row in enumerate(rows) for _ in row]
    means, squares = np.array([bucket for row in rows for bucket in row]).T
    assert sum(sizes) == 777 and len(sizes) <= 5 * len(rows)
    assert np.dot(sizes, means) / 777 == pytest.approx(values.mean(), rel=1e-12)
    total = squares.sum() + np.dot(sizes, (means - values.mean()) ** 2)
    assert total / 777 == pytest.approx(values.var(), rel=1e-9)


@pytest.mark.parametrize("make", DETECTORS)
def test_a_detector_tells_the_means_on_both_sides(make: Callable[[], Detector]) -> None:
    rng = np.random.default_rng(0)
    detector = make()
    values = [*rng.normal(2.0, 0.1, 300), *rng.normal(4.0, 0.1, 300)]
    # A run may begin with a value or two from before the change.
    at = next(at for at, value in enumerate(values) if detector.update(value))
    assert 300 <= at < 320
    assert detector.before == pytest.approx(2.0, abs=0.05) and detector.after == pytest.approx(4.0, abs=0.5)
    assert detector.recent == pytest.approx(at - 299, abs=2)


def test_a_change_right_after_the_warm_up_is_counted_from_its_first_value() -> None:
    detector = PageHinkley(warmup=30)
    assert not any(detector.update(value) for value in [0.0, 1.0] * 15)
    taken = next(taken for taken in range(1, 10) if detector.update(10.0))
    assert (detector.recent, detector.after, detector.before) == (taken, 10.0, 0.5)


def test_page_hinkley_does_not_depend_on_the_unit() -> None:
    values = STREAMS["abrupt"](1).values
    alarms = [
        [PageHinkley.update(one, scale * v) for v in values]
        for one, scale in ((PageHinkley(), 1), (PageHinkley(), 1024))
    ]
    assert alarms[0] == alarms[1] and any(alarms[0])


@pytest.mark.parametrize("make", DETECTORS)
def test_a_detector_resumes_to_the_bit(make: Callable[[], Detector]) -> None:
    values = STREAMS["abrupt"](0).values
    whole = make()
    seen = [(whole.update(value), whole.before, whole.after, whole.recent) for value in values]
    for killed in (1, 35, 500, 1010):
        first, second = make(), make()
        for value in values[:killed]:
            first.update(value)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [(second.update(v), second.before, second.after, second.recent) for v in values[killed:]] == seen[
            killed:
        ]


@pytest.mark.parametrize("make", DETECTORS)
def test_a_detector_refuses_what_is_no_number(make: Callable[[], Detector]) -> None:
    with pytest.raises(ConfigError, match="finite"):
        make().update(float("nan"))


def test_settings_of_detectors_are_checked() -> None:
    with pytest.raises(ConfigError, match="delta=2"):
        Adwin(delta=2)
    with pytest.raises(ConfigError, match="warmup=1"):
        PageHinkley(warmup=1)


# Reservoir


def test_a_reservoir_is_a_uniform_sample_also_after_it_was_made_smaller() -> None:
    counts: collections.Counter[int] = collections.Counter()
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        reservoir = Reservoir(10)
        for number in range(30):
            if number == 20:
                reservoir.shrink(5, rng)
            reservoir.offer(number, {}, rng)
        assert len(reservoir.items) == 5
        counts.update(number for number, _ in reservoir.items)
    expected = 3000 * 5 / 30
    statistic = sum((counts[number] - expected) ** 2 / expected for number in range(30))
    assert statistic < 60  # chi-square with 29 degrees of freedom: 1 in 1,000 is above 58


# Sampler


class Topic:
    """Items that say where they come from: [topic, number], of ``length`` tokens."""

    def __init__(self, topic: int, count: int, length: int = 2) -> None:
        self.items = [[topic, number, *[0] * (length - 2)] for number in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> list[int]:
        return self.items[index]


class Shifting(Topic):
    """``topic`` for the first ``change`` items, ``topic + 10`` from then on."""

    def __init__(self, topic: int, count: int, change: int) -> None:
        super().__init__(topic, count)
        self.items[change:] = [[topic + 10, number] for number in range(change, count)]


def train(sampler: DriftSampler, steps: int, batch: int = 8, by_item: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Steps of items, and a loss told for each: 3 for a topic of 10 or more, 1 for others, with noise."""
    noise = np.random.default_rng(7)
    for _ in range(steps):
        first = sampler.stats()["drawn"]
        items = list(itertools.islice(sampler, batch))
        if not items:
            return
        losses = [(3.0 if item["input_ids"][0] >= 10 else 1.0) + noise.normal(0, 0.3) for item in items]
        keys = range(first, first + len(items)) if by_item else [item["source"] for item in items]
        sampler.observe(list(keys), losses)
        yield items


def test_the_mix_is_the_declared_one_and_every_source_in_its_order() -> None:
    sampler = DriftSampler({"a": Topic(0, 3000), "b": Topic(1, 9000)}, {"a": 1, "b": 3})
    items = list(itertools.islice(sampler, 4000))
    count = sum(item["source"] == "a" for item in items)
    assert abs(count - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5
    for topic, name in enumerate("ab"):
        rows = [item["input_ids"].tolist() for item in items if item["source"] == name]
        assert rows == [[topic, number] for number in range(len(rows))]
    again = DriftSampler({"a": Topic(0, 3000), "b": Topic(1, 9000)}, {"a": 1, "b": 3})
    assert [item["source"] for item in itertools.islice(again, 4000)] == [item["source"] for item in items]
    other = DriftSampler({"a": Topic(0, 3000), "b": Topic(1, 9000)}, {"a": 1, "b": 3}, seed=1)
    assert [item["source"] for item in itertools.islice(other, 4000)] != [item["source"] for item in items]


def test_losses_of_one_source_are_averaged_over_tokens_where_their_numbers_are_told() -> None:
    sampler = DriftSampler({"a": Topic(0, 100)})
    list(itertools.islice(sampler, 3))
    sampler.observe([0, 1, 2], [4.0, 1.0, 1.0], [1, 10, 9])
    assert sampler.stats()["sources"]["a"]["loss"] == pytest.approx((4 + 10 + 9) / 20)
    for wrong in ([1, 2], [1, 2, 0]):
        with pytest.raises(ConfigError, match="number of targets"):
            sampler.observe([0, 1, 2], [1.0, 1.0, 1.0], wrong)


def test_a_source_that_ends_leaves_the_mix() -> None:
    items = list(DriftSampler({"a": Topic(0, 10), "b": Topic(1, 200)}))
    assert collections.Counter(item["source"] for item in items) == {"a": 10, "b": 200}
    assert {item["source"] for item in items[-100:]} == {"b"}


@pytest.mark.parametrize("by_item", [False, True])
def test_drift_turns_on_the_replay_of_old_items_in_their_share(by_item: bool) -> None:
    sampler = DriftSampler({"a": Shifting(0, 20_000, 1200), "b": Topic(1, 20_000)}, replay=0.2, reservoir=300)
    steps = list(train(sampler, 1500, by_item=by_item))
    (event,) = sampler.events
    assert (event.source, event.old) == ("a", "a@0")
    assert 2400 < event.drawn < 2400 + 400
    assert event.before == pytest.approx(1.0, abs=0.1) and event.after == pytest.approx(3.0, abs=0.4)
    items = [item for step in steps for item in step]
    assert all(item["source"] != "a@0" for item in items[: event.drawn])
    later = items[event.drawn :]
    replays = [item for item in later if item["source"] == "a@0"]
    assert abs(len(replays) - 0.2 * len(later)) < 4 * (len(later) * 0.16) ** 0.5
    assert {item["input_ids"][0] for item in replays} == {0}  # none of what came after the change
    assert 50 < len({item["input_ids"][1] for item in replays}) <= 150
    stats = sampler.stats()
    assert stats["replayed"] == len(replays)
    assert stats["old"]["a@0"]["loss"] == pytest.approx(1.0, abs=0.2)
    assert stats["sources"]["a"] == {**stats["sources"]["a"], "changes": 1, "loss": pytest.approx(3.0, abs=0.3)}


@pytest.mark.parametrize("by_item", [False, True])
def test_items_drawn_ahead_of_their_loss_do_not_enter_the_old_ones(by_item: bool) -> None:
    """A packer's pool holds items whose loss is not known yet; told by item, the sampler knows how many those are."""
    sampler = DriftSampler({"a": Shifting(0, 20_000, 2000)}, reservoir=2000)
    noise = np.random.default_rng(1)
    waiting = collections.deque(enumerate(itertools.islice(sampler, 400)))
    for serial in itertools.count(400):
        at, item = waiting.popleft()
        waiting.append((serial, next(sampler)))
        loss = (3.0 if item["input_ids"][0] >= 10 else 1.0) + noise.normal(0, 0.3)
        sampler.observe(at if by_item else "a", loss)
        if sampler.events:
            break
    held = [item["input_ids"][0] for _, item in sampler.state_dict()["old"]["a@0"]["items"]]
    assert held.count(0) > 300
    assert (held.count(10) == 0) == by_item


def test_a_loss_that_falls_is_no_drift() -> None:
    sampler = DriftSampler({"a": Topic(0, 10_000)})
    noise = np.random.default_rng(0)
    for at in range(600):
        next(sampler)
        sampler.observe("a", 2.0 + 4.0 * 0.98**at + noise.normal(0, 0.1))
    assert sampler.events == []


@pytest.mark.parametrize("detector", ["adwin", "page_hinkley"])
def test_lengths_can_be_the_signal(detector: Any) -> None:
    rng = np.random.default_rng(0)
    rows = [[0] * int(length) for length in [*rng.lognormal(3, 0.5, 1000), *rng.lognormal(4, 0.5, 1000)]]
    rows = [row or [0] for row in rows]
    sampler = DriftSampler({"a": rows}, detector=detector, signal="length")
    list(sampler)
    assert [event.old for event in sampler.events] == ["a@0"]
    assert 1000 < sampler.events[0].drawn < 1060


def test_a_change_can_be_declared() -> None:
    sampler = DriftSampler({"a": Topic(0, 1000), "b": Topic(1, 1000)}, replay=0.5)
    before = list(itertools.islice(sampler, 50))
    sampler.shift("a")
    after = list(itertools.islice(sampler, 900))
    given = {tuple(item["input_ids"]) for item in before if item["source"] == "a"}
    assert {tuple(item["input_ids"]) for item in after if item["source"] == "a@0"} == given
    assert sampler.events[0].drawn == 50


@pytest.mark.full
def test_the_reservoir_holds_no_more_than_its_items_over_many_changes() -> None:
    sampler = DriftSampler({"a": Topic(0, 10_000), "b": Topic(1, 10_000)}, reservoir=100)
    for _ in range(20):
        list(itertools.islice(sampler, 200))
        sampler.shift("a")
    state = sampler.state_dict()
    held = [*state["old"].values(), *(source["current"] for source in state["sources"].values())]
    assert 80 <= sum(len(reservoir["items"]) for reservoir in held) <= 100
    assert len(state["old"]) == 20


@pytest.mark.parametrize("mixing", ["declared", "bandit"])
def test_importance_weights_keep_the_declared_mix(mixing: Any) -> None:
    declared = {"a": 0.5, "b": 0.3, "c": 0.2}
    topics = {name: Topic(index, 100_000) for index, name in enumerate(declared)}
    sampler = DriftSampler(topics, declared, replay=0.3, importance=True, mixing=mixing, smoothing=0.2)
    list(itertools.islice(sampler, 100))
    sampler.shift("a")
    sums: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for item in itertools.islice(sampler, 10_000):
        name = item["source"]
        sums[name.partition("@")[0]] += item["weight"]
        counts[name] += 1
        sampler.observe(name, {"c": 6.0}.get(name, 1.0))
    for name, share in declared.items():
        assert sums[name] / 10_000 == pytest.approx(share, rel=0.07)
    assert counts["a@0"] == pytest.approx(3000, rel=0.05)
    assert mixing == "declared" or counts["c"] > 1.1 * 0.2 * 7_000


def test_the_bandit_favours_the_source_with_the_highest_loss() -> None:
    sampler = DriftSampler({"a": Topic(0, 10_000), "b": Topic(1, 10_000)}, mixing="bandit", smoothing=0.2)
    for item in itertools.islice(sampler, 200):
        sampler.observe(item["source"], 5.0 if item["source"] == "b" else 1.0)
    shares = {name: source["share"] for name, source in sampler.stats()["sources"].items()}
    assert shares["b"] > 0.55 and shares["a"] > 0.1
    assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("settings", [{}, {"mixing": "bandit", "importance": True}, {"signal": "length"}])
def test_resuming_gives_the_same_rest(settings: dict[str, Any]) -> None:
    def make() -> DriftSampler:
        return DriftSampler({"a": Shifting(0, 700, 300), "b": Topic(1, 700)}, reservoir=50, replay=0.3, **settings)

    def step(sampler: DriftSampler) -> list[tuple[Any, ...]]:
        items = list(itertools.islice(sampler, 8))
        for item in items:
            loss = 3.0 if item["input_ids"][0] >= 10 else 1.0
            sampler.observe(item["source"], loss + float(item["input_ids"][1] % 7) / 10)
        return [(item["source"], item["weight"], *item["input_ids"].tolist()) for item in items]

    whole = make()
    steps = list(iter(lambda: step(whole), []))
    if not settings:
        assert len(whole.events) == 1 and whole.stats()["replayed"] > 50
    for killed in (0, 3, 60, 90, 120, len(steps)):
        first, second = make(), make()
        for _ in range(killed):
            step(first)
        state = copy.deepcopy(first.state_dict())
        list(first)
        second.load_state_dict(state)
        assert list(iter(lambda second=second: step(second), [])) == steps[killed:]
        assert second.events == whole.events and second.stats() == whole.stats()


def test_a_pack_stream_resumes_with_its_sampler() -> None:
    def make() -> tuple[DriftSampler, PackStream]:
        sampler = DriftSampler({"a": Shifting(0, 700, 300), "b": Topic(1, 700)}, reservoir=50, replay=0.3)
        return sampler, PackStream(sampler, capacity=16, pool=8)

    def step(sampler: DriftSampler, stream: PackStream) -> list[Any]:
        pack = next(packs[stream])
        sampler.observe(
            pack.ids,
            [
                3.0 if row["source"] == "a" and index > 700 else 1.0
                for index, row in zip(pack.ids, pack.meta, strict=True)
            ],
        )
        return [pack.tokens.tolist(), pack.ids, pack.weights.tolist(), [row["source"] for row in pack.meta]]

    packs: dict[PackStream, Iterator[Any]] = {}

    def rest(sampler: DriftSampler, stream: PackStream, most: int | None = None) -> list[Any]:
        packs[stream] = iter(stream)
        found: list[Any] = []
        while most is None or len(found) < most:
            try:
                found.append(step(sampler, stream))
            except StopIteration:
                break
        return found

    whole = rest(*make())
    assert any("a@0" in sources for *_, sources in whole)
    for killed in (1, 70, 130):
        sampler, stream = make()
        assert rest(sampler, stream, killed) == whole[:killed]
        state = copy.deepcopy(stream.state_dict())
        again = make()
        again[1].load_state_dict(state)
        assert rest(*again) == whole[killed:]


def test_a_state_does_not_move_with_the_sampler_it_was_taken_from() -> None:
    sampler = DriftSampler({"a": Topic(0, 1000)}, reservoir=10)
    list(itertools.islice(sampler, 100))
    sampler.observe("a", 1.0)
    state = sampler.state_dict()
    kept = copy.deepcopy(state)
    list(itertools.islice(sampler, 100))
    sampler.observe("a", 2.0)
    sampler.shift("a")
    np.testing.assert_equal(state, kept)


def test_items_given_before_a_resume_can_be_observed_after_it() -> None:
    def make() -> DriftSampler:
        return DriftSampler({"a": Topic(0, 50), "b": Topic(1, 50)})

    first, second = make(), make()
    items = list(itertools.islice(first, 20))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.observe(range(20), [float(item["source"] == "b") for item in items])
    assert {name: source["loss"] for name, source in second.stats()["sources"].items()} == {"a": 0.0, "b": 1.0}


def test_a_state_with_other_settings_is_refused() -> None:
    state = DriftSampler({"a": Topic(0, 10)}, replay=0.2).state_dict()
    with pytest.raises(ConfigError, match=r"'replay': 0\.2"):
        DriftSampler({"a": Topic(0, 10)}).load_state_dict(state)


def test_fields_of_items_are_kept() -> None:
    row = {"input_ids": [4, 5, 6], "labels": [-100, -100, 6], "weight": 0.5, "url": "x"}
    (item,) = DriftSampler({"a": [row]})
    assert item["input_ids"].tolist() == [4, 5, 6]
    assert item["loss_weight"].tolist() == [0.0, 0.0, 0.5]
    assert (item["url"], item["source"], item["weight"]) == ("x", "a", 1.0)


def test_arguments_are_checked() -> None:
    topics = {"a": Topic(0, 10), "b": Topic(1, 10)}
    for wrong, message in [
        ({"weights": {"a": 1.0}}, "weights must give every source"),
        ({"weights": {"a": 1.0, "b": 0.0}}, "above 0"),
        ({"replay": 1.0}, "replay"),
        ({"detector": "kswin"}, "kswin"),
        ({"signal": "entropy"}, "entropy"),
        ({"mixing": "equal"}, "equal"),
    ]:
        with pytest.raises(ConfigError, match=message):
            DriftSampler(topics, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'@'"):
        DriftSampler({"a@1": Topic(0, 10)})
    sampler = DriftSampler(topics)
    next(sampler)
    with pytest.raises(ConfigError, match="no source 'c'"):
        sampler.observe("c", 1.0)
    with pytest.raises(ConfigError, match="item 1 is not among"):
        sampler.observe(1, 1.0)
    with pytest.raises(ConfigError, match="finite"):
        sampler.observe("a", float("inf"))
    with pytest.raises(ConfigError, match="no source 'c'"):
        sampler.shift("c")


# What it is for


@pytest.mark.nightly
def test_the_old_language_is_kept_by_replay() -> None:
    spec = importlib.util.spec_from_file_location("continual", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "continual", example)
        spec.loader.exec_module(example)
        outcome = example.run(100, replay=0.1)
    assert [event.old for event in outcome.events] == ["feed@0"]
    assert outcome.forgotten < 0.1  # without replay the loss more than doubles
    assert outcome.new_after < 2.0


@pytest.mark.nightly
def test_the_example_keeps_the_old_loss_within_five_percent() -> None:
    root = EXAMPLE.parents[1]
    where = os.environ | {"PYTHONPATH": str(root)}  # whether or not the package is installed
    table = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=True, env=where, timeout=600
    )
    without, with_replay = (line.split() for line in table.stdout.splitlines()[1:])
    assert float(without[-2].rstrip("%")) > 50
    assert float(with_replay[-2].rstrip("%")) <= 5
