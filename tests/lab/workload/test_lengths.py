from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workload import draw, totals
from chairlift.errors import ConfigError
from chairlift_lab.workload.lengths import (
    Empirical,
    Fixed,
    Lengths,
    LogNormal,
    Uniform,
    Workload,
    Zipf,
    parse_lengths,
)


def test_the_order_of_draws_is_the_definition() -> None:
    workload = Workload(count=50, seed=3, vocab_size=100)
    rng = np.random.default_rng(3)
    prompts = np.clip(rng.lognormal(4.6, 0.8, 50).astype(int), 8, 1024)
    outputs = np.clip(rng.lognormal(4.2, 0.9, 50).astype(int), 4, 512)
    ids = [rng.integers(10, 100, length).tolist() for length in prompts]
    assert workload.requests() == list(zip(ids, outputs.tolist(), strict=True))


def test_equal_values_give_equal_requests_and_other_seeds_others() -> None:
    assert Workload().requests() == Workload().requests()
    assert Workload().requests() != Workload(seed=1).requests()


def test_the_recorded_benchmarks_still_mean_the_same_requests() -> None:
    requests = Workload().requests()
    assert totals(requests) == (8700, 6415)
    assert requests == draw()
    assert (
        draw(7, 5, 50, prompt=(1.0, 0.1, 2, 3))
        == Workload(count=7, seed=5, vocab_size=50, prompt=LogNormal(1.0, 0.1, 2, 3)).requests()
    )


def test_lengths_are_clipped_and_ids_within_the_vocabulary() -> None:
    workload = Workload(count=300, vocab_size=12, prompt=LogNormal(2.0, 2.0, 3, 9), output=LogNormal(0.0, 1.0, 1, 2))
    requests = workload.requests()
    assert {len(prompt) for prompt, _ in requests} == set(range(3, 10))
    assert {count for _, count in requests} == {1, 2}
    assert {token for prompt, _ in requests for token in prompt} == {10, 11}


def test_a_vocabulary_without_ids_for_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 10"):
        Workload(vocab_size=10).requests()


DISTRIBUTIONS: list[Lengths] = [
    LogNormal(4.0, 0.5, 8, 200),
    Zipf(1.2, 3, 500),
    Zipf(0.0, 1, 5),
    Uniform(2, 9),
    Fixed(7),
    Empirical((1, 5, 5, 9)),
]


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=repr)
def test_one_seed_gives_one_draw(lengths: Lengths) -> None:
    def draw(seed: int) -> list[int]:
        return lengths.draw(np.random.default_rng(seed), 200)

    assert draw(1) == draw(1)
    assert all(type(length) is int for length in draw(1))
    if lengths != Fixed(7):
        assert draw(1) != draw(2)


def test_each_length_is_as_frequent_as_its_distribution_says() -> None:
    rng, count = np.random.default_rng(0), 100_000

    def shares(lengths: Lengths) -> dict[int, float]:
        values, counts = np.unique(lengths.draw(rng, count), return_counts=True)
        return dict(zip(values.tolist(), (counts / count).tolist(), strict=True))

    assert shares(Uniform(3, 6)) == pytest.approx(dict.fromkeys(range(3, 7), 0.25), abs=0.01)
    assert shares(Fixed(4)) == {4: 1.0}
    assert shares(Empirical((1, 5, 5, 9))) == pytest.approx({1: 0.25, 5: 0.5, 9: 0.25}, abs=0.01)
    weights = {length: length**-1.5 for length in range(2, 8)}
    expected = {length: weight / sum(weights.values()) for length, weight in weights.items()}
    assert shares(Zipf(1.5, 2, 7)) == pytest.approx(expected, abs=0.01)
    logarithms = np.log(LogNormal(8.0, 0.5, 1, 1 << 24).draw(rng, count))
    assert np.mean(logarithms) == pytest.approx(8.0, abs=0.01)
    assert np.std(logarithms) == pytest.approx(0.5, abs=0.01)


@given(st.integers(1, 60), st.integers(0, 1000), st.floats(0, 3), st.floats(-2, 20), st.integers(0, 2**32))
def test_lengths_stay_in_their_range(least: int, more: int, alpha: float, mu: float, seed: int) -> None:
    for lengths in (Zipf(alpha, least, least + more), Uniform(least, least + more), LogNormal(mu, alpha, least, least)):
        drawn = lengths.draw(np.random.default_rng(seed), 50)
        assert len(drawn) == 50
        assert least <= min(drawn) <= max(drawn) <= least + more


def test_lengths_are_parsed(tmp_path: Path) -> None:
    assert parse_lengths("lognormal:4.6:0.8:8:1024") == LogNormal(4.6, 0.8, 8, 1024)
    assert parse_lengths("zipf:1.1:1:99") == Zipf(1.1, 1, 99)
    assert parse_lengths("uniform:16:64") == Uniform(16, 64)
    assert parse_lengths("fixed:24") == Fixed(24)
    trace = tmp_path / "with:colon.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 6}\n'
        '{"timestamp": 1, "input_length": 7, "output_length": 8}\n'
    )
    assert parse_lengths(f"file:{trace}") == Empirical((5, 7))
    assert parse_lengths(f"file:{trace}", of="output") == Empirical((6, 8))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be one of lognormal:MU:SIGMA:MIN:MAX, zipf:ALPHA:MIN:MAX, uniform:MIN:MAX, fixed:N, file:"),
        ("gauss:1:2", "must be one of lognormal"),
        ("fixed", "must be one of lognormal"),
        ("fixed:2:3", "must be one of lognormal"),
        ("uniform:1.5:3", "with numbers; got 'uniform:1.5:3'"),
        ("uniform:9:3", "at least 1 to at most 16,777,216, got 9 to 3"),
        ("fixed:0", "at least 1 to at most 16,777,216, got 0"),
        ("zipf:-1:1:9", "ALPHA from 0 to 50, got -1.0"),
        ("lognormal:nan:1:1:9", "MU from -50 to 50"),
        ("lognormal:1:-1:1:9", "SIGMA from 0 to 50"),
        ("file:/nowhere.jsonl", "cannot read the trace /nowhere.jsonl"),
    ],
)
def test_lengths_that_cannot_be_parsed_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_lengths(text)
    assert complaint in str(error.value)


def test_there_must_be_lengths_to_draw_from() -> None:
    with pytest.raises(ConfigError, match="no lengths to draw from"):
        Empirical(())
    with pytest.raises(ConfigError, match=r"from at least 1 .* got 0 to 5"):
        Empirical((5, 0))
