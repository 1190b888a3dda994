"""Groups of a call's data: their division depends on the call alone, and no group has too many tokens."""

from __future__ import annotations

import random

from chairlift_train.service.groups import GROUP_TOKENS, groups_of, lengths_of_groups


def test_groups_are_filled_in_order_and_a_longer_datum_is_alone() -> None:
    lengths = [GROUP_TOKENS - 1, 1, 1, 5 * GROUP_TOKENS, 2, 3]
    assert groups_of(lengths) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert lengths_of_groups(lengths) == (GROUP_TOKENS, 1, 5 * GROUP_TOKENS, 5)
    assert groups_of([]) == [] and lengths_of_groups([]) == ()


def test_each_datum_is_in_one_group_and_neighbours_do_not_fit_together() -> None:
    rng = random.Random(3)
    for _ in range(200):
        lengths = [rng.choice((1, 7, 60, 200, 300)) for _ in range(rng.randint(1, 40))]
        groups, tokens = groups_of(lengths), lengths_of_groups(lengths)
        assert [index for group in groups for index in group] == list(range(len(lengths)))
        for group, count, after in zip(groups, tokens, groups[1:], strict=False):
            assert count <= GROUP_TOKENS or len(group) == 1
            assert count + lengths[after.start] > GROUP_TOKENS
