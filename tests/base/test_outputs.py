"""Log-probabilities in arrays read like the lists that they stand for."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.base.outputs import FlatLogprobs, Logprob

Records = list[tuple[list[tuple[int, float]], int] | None]
RECORDS = st.lists(
    st.one_of(
        st.none(),
        st.tuples(
            st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False)), min_size=1, max_size=5),
            st.integers(1, 9),
        ),
    ),
    max_size=8,
)


def made(
    records: list[tuple[list[tuple[int, float]], int] | None],
) -> tuple[FlatLogprobs, list[dict[int, Logprob] | None]]:
    flat, plain = FlatLogprobs(str), list[dict[int, Logprob] | None]()
    for record in records:
        if record is None:
            flat.append((), (), 0)
            plain.append(None)
            continue
        entries, rank = record
        flat.append([i for i, _ in entries], [value for _, value in entries], rank)
        wanted: dict[int, Logprob] = {}
        for each, (token_id, value) in zip([rank, *range(1, len(entries))], entries, strict=True):
            wanted.setdefault(token_id, Logprob(value, each, str(token_id)))
        plain.append(wanted)
    return flat, plain


@given(RECORDS, st.integers(-9, 9), st.integers(-9, 9))
def test_flat_log_probabilities_read_like_a_list(records: Records, begin: int, end: int) -> None:
    flat, plain = made(records)
    assert (flat, len(flat), repr(flat)) == (plain, len(plain), repr(plain))
    assert flat == made(records)[0] and flat != [*plain, None] and flat != "text"
    assert flat[begin:end] == plain[begin:end] and flat[begin:] == plain[begin:] and flat[:end] == plain[:end]
    assert list(flat.chosen()) == [entry and next(iter(entry.values())) for entry in plain]
    assert [flat[place] for place in range(-len(plain), len(plain))] == plain * 2
    assert pickle.loads(pickle.dumps(flat)) == copy.deepcopy(flat) == plain
    for index in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            flat[index]
    cut = flat[begin:]
    flat.truncate(abs(end))
    assert flat == plain[: abs(end)] and cut == plain[begin:]
    flat.append([5], [-1.0], 1)
    assert flat[-1] == {5: Logprob(-1.0, 1, "5")}


def test_an_entry_of_log_probabilities_takes_a_few_bytes() -> None:
    flat = FlatLogprobs(None)
    for _ in range(1000):
        flat.append(range(21), [-1.0] * 21, 1)
    arrays = [getattr(flat, name) for name in FlatLogprobs.__slots__ if name != "_text"]
    assert flat.num_entries == 21_000
    assert sum(map(sys.getsizeof, arrays)) < 16 * 21_000
    assert flat[0][20].decoded_token is None
    with pytest.raises(ValueError, match="steps of 1, got 2"):
        flat[::2]
