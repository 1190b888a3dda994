"""The oracle is fast, and still what the reference says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.models.hashlm import reference_tokens
from chairlift.models.hashlm_served import HASHLM_EOS, HASHLM_VOCAB_SIZE
from tests.e2e.oracle import expected_hashlm

TOKEN = st.integers(0, HASHLM_VOCAB_SIZE - 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(TOKEN, min_size=1, max_size=40),
    st.integers(0, 1 << 62),
    st.integers(1, 60),
    st.sampled_from((0.0, 0.7, 1.0)),
    st.booleans(),
    st.sampled_from(("", "salt")),
)
def test_answers_are_those_of_the_reference(
    prompt: list[int], seed: int, count: int, temperature: float, ignore_eos: bool, salt: str
) -> None:
    params = SamplingParams(seed=seed, max_tokens=count, temperature=temperature, ignore_eos=ignore_eos)
    row = SamplingRow(
        params=params,
        seed=sample_seed(seed, 1),
        num_prompt_tokens=len(prompt),
        tag=int.from_bytes(salt.encode(), "little"),
    )
    tokens = reference_tokens(prompt, row, [None], HASHLM_VOCAB_SIZE, count)
    if not ignore_eos and HASHLM_EOS in tokens:
        tokens = tokens[: tokens.index(HASHLM_EOS) + 1]
    assert expected_hashlm(prompt, params, 1, salt).token_ids == tokens
