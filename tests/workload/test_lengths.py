from __future__ import annotations

import numpy as np
import pytest

from benchmarks.workload import draw, totals
from chairlift.errors import ConfigError
from chairlift.workload.lengths import LogNormal, Workload


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
