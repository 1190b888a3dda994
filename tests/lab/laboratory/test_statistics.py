from __future__ import annotations

import math

import pytest

from chairlift_lab.laboratory.statistics import (
    PairedRatio,
    holm,
    jain,
    mser,
    student_quantile,
    student_share,
)


def test_a_paired_ratio_is_taken_within_a_seed() -> None:
    # The logarithms of the ratios are ln 2, ln 2, ln 4: mean (4/3) ln 2, standard deviation ln 2 / sqrt(3), so the
    # error of the mean is (ln 2) / 3. Student's t with 2 degrees of freedom is 4.3027 at 97.5 %.
    ratio = PairedRatio.of([2.0, 20.0, 4.0], [1.0, 10.0, 1.0])
    assert ratio is not None
    assert ratio.ratio == pytest.approx(2 ** (4 / 3))
    margin = 4.302653 * math.log(2) / 3
    assert ratio.low == pytest.approx(2 ** (4 / 3) / math.exp(margin), rel=1e-5)
    assert ratio.high == pytest.approx(2 ** (4 / 3) * math.exp(margin), rel=1e-5)
    # t = 4; with 2 degrees of freedom both tails have 1 - t / sqrt(t * t + 2).
    assert ratio.p_value == pytest.approx(1 - 4 / math.sqrt(18))
    assert ratio.seeds == 3


def test_equal_sides_have_no_difference_and_one_seed_proves_nothing() -> None:
    assert PairedRatio.of([3.0, 5.0], [3.0, 5.0]) == PairedRatio(1.0, 1.0, 1.0, 1.0, 2)
    one = PairedRatio.of([3.0], [2.0])
    assert one is not None
    assert (one.ratio, one.low, one.high, one.p_value) == (pytest.approx(1.5), 0.0, math.inf, 1.0)


@pytest.mark.parametrize("ours", [[1.0, 0.0], [1.0, None], []])
def test_a_ratio_needs_values_above_zero(ours: list[float | None]) -> None:
    assert PairedRatio.of(ours, [1.0] * len(ours)) is None


@pytest.mark.parametrize(
    ("freedom", "share", "value"),
    [(1, 0.975, 12.7062), (2, 0.975, 4.30265), (4, 0.975, 2.77645), (5, 0.95, 2.01505), (19, 0.975, 2.09302)],
)
def test_students_t_has_the_values_of_the_tables(freedom: int, share: float, value: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(value, rel=1e-5)
    assert student_share(value, freedom) == pytest.approx(share, rel=1e-5)
    assert student_share(-value, freedom) == pytest.approx(1 - share, rel=1e-4)


def test_holm_multiplies_the_smallest_by_the_count_and_never_falls() -> None:
    # Sorted: 0.01 * 4 = 0.04, 0.02 * 3 = 0.06, 0.03 * 2 = 0.06, 0.9 * 1 = 0.9.
    assert holm([0.03, 0.01, None, 0.9, 0.02]) == [pytest.approx(v) if v else None for v in (0.06, 0.04, 0, 0.9, 0.06)]
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_jain_is_one_for_equal_shares_and_one_nth_for_a_single_winner() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([4.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 3.0]) == pytest.approx(16 / 20)
    assert jain([1.0]) is jain([0.0, 0.0]) is None


def test_mser_cuts_the_rise_and_nothing_of_a_steady_run() -> None:
    # Batches of five with means 0, 5, 10, 10, 10, 10, 10, 10: the rest has no variance from the third batch on.
    assert mser([0.0] * 5 + [5.0] * 5 + [10.0] * 30) == 10
    assert mser([7.0] * 40) == 0
    assert mser([1.0, 2.0]) == 0
