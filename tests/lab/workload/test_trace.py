from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift_lab.workload.trace import PREFIX_BLOCK, TracedRequest, prompt_token_ids

REQUEST = TracedRequest(arrival=0.25, prompt_tokens=10, output_tokens=1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"arrival": -1.0}, "timestamp must be a number from 0"),
        ({"arrival": float("nan")}, "timestamp must be a number"),
        ({"prompt_tokens": 0}, "input_length must be a whole number from 1"),
        ({"output_tokens": 1.5}, "output_length must be a whole number"),
        ({"output_tokens": True}, "output_length must be a whole number"),
        ({"prefix_ids": (-3,)}, "a hash id must be a whole number from 0"),
        ({"prefix_ids": (2**62 + 1,)}, "a hash id must be a whole number"),
        ({"prefix_ids": ("a",)}, "a hash id must be a whole number"),
        ({"prefix_ids": (1, 2)}, "input_length is 10, which is 1 blocks of 512, but there are 2 hash_ids"),
        ({"prefix_block": 8}, "block_size must be a whole number from 16"),
        ({"tenant": 7}, "tenant must be text"),
        ({"session": None}, "session must be text"),
        ({"turn": 2}, "turn is 2, but there is no session"),
        ({"gap_ms": 2.0}, "gap_ms is 2.0, but there is no session"),
        ({"session": "a", "gap_ms": -1.0}, "gap_ms must be a number from 0"),
        ({"session": "a", "turn": -1}, "turn must be a whole number from 0"),
        ({"cancel_ms": -1}, "cancel_ms must be a number from 0"),
        ({"ttft_ms": float("inf")}, "ttft_ms must be a number"),
        ({"priority": "high"}, "priority must be a whole number"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        dataclasses.replace(REQUEST, **change)


@pytest.mark.parametrize("vocab_size", [50, 151_936, 2**31 - 1])
def test_equal_prefix_ids_are_equal_tokens_and_others_are_not(vocab_size: int) -> None:
    def prompt(index: int, length: int, *ids: int) -> list[int]:
        request = TracedRequest(arrival=0, prompt_tokens=length, output_tokens=1, prefix_ids=ids)
        tokens = prompt_token_ids(request, index, vocab_size)
        assert len(tokens) == length
        assert 10 <= min(tokens) <= max(tokens) < vocab_size
        return tokens

    one, other = prompt(0, 1500, 7, 8), prompt(1, 1300, 7, 9)
    assert one[:PREFIX_BLOCK] == other[:PREFIX_BLOCK]
    assert one[PREFIX_BLOCK : 2 * PREFIX_BLOCK] != other[PREFIX_BLOCK : 2 * PREFIX_BLOCK]
    assert one[2 * PREFIX_BLOCK :][:16] != other[2 * PREFIX_BLOCK :][:16]
    assert prompt(0, 700, 7)[:512] == prompt(1, 600, 7)[:512]
    assert prompt(3, 100, 5) == prompt(9, 512, 5)[:100]
    own = [tuple(prompt(index, 16)) for index in range(500)] + [tuple(prompt(0, 16, index)) for index in range(500)]
    assert len(set(own)) == len(own)


def test_prompts_need_ids() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 11"):
        prompt_token_ids(REQUEST, 0, 11)


@pytest.mark.parametrize("vocab_size", [50, 4096, 151_936, 2**31 - 1])
def test_prefix_ids_may_be_hashes_and_stand_for_small_blocks(vocab_size: int) -> None:
    def prompt(index: int, length: int, *ids: int) -> list[int]:
        request = TracedRequest(arrival=0, prompt_tokens=length, output_tokens=1, prefix_ids=ids, prefix_block=16)
        tokens = prompt_token_ids(request, index, vocab_size)
        assert len(tokens) == length
        assert 10 <= min(tokens) <= max(tokens) < vocab_size
        return tokens

    top = 2**62
    assert prompt(0, 70, top, 5, 6, 7, 8)[:48] == prompt(1, 50, top, 5, 6, 9)[:48]
    assert prompt(0, 20, top, 5) == prompt(1, 99, top, 5)[:20]
    # Hashes that differ in the highest bit or digit only, or in the lowest.
    base = vocab_size - 10
    powers = {base**power for power in range(1, 62) if base**power <= top}
    ids = sorted({0, 1, 2**61, 2**61 + 1, top - 1, top, *(3**power for power in range(1, 39))} | powers)
    assert len({tuple(prompt(0, 16, number)) for number in ids}) == len(ids)
    own = {tuple(prompt(index, 16)) for index in range(100)}
    assert len(own) == 100
    assert not own & {tuple(prompt(0, 16, number)) for number in ids}
