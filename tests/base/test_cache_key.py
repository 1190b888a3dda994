"""Keys of cached things: different callers, caches and contents never have the same key."""

from __future__ import annotations

import itertools

from chairlift.base.cache_key import cache_key, key_material


def test_no_two_different_arguments_make_the_same_key() -> None:
    words = ["", "a", "ab", "b", "\0", "a\0b"]
    cases = [(kind, salt) for kind, salt in itertools.product(words, words)]
    cases += [(kind, salt, content) for kind, salt in cases for content in map(str.encode, words)]  # type: ignore[misc]
    cases += [("a", "b", *pair) for pair in itertools.product(map(str.encode, words), repeat=2)]  # type: ignore[misc]
    assert len({key_material(*case) for case in cases}) == len(set(cases))


def test_a_key_has_32_bytes_and_is_the_same_in_every_process() -> None:
    assert cache_key("image", "salt", b"content").hex()[:16] == "6db9bda4ac505e50"
