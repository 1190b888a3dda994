from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer
from tests.text.tokenizer import tiny

BYTE_FAMILIES = ["byte_level", "byte_fallback", "byte_fallback_no_strip", "unigram_byte_fallback"]
EVERY_FAMILY = sorted(tiny.FAMILIES)
TEXT = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            ["the ", "chairlift", " ", "  ", "\n", "你好", "😀", "👨‍👩‍👧", "👍🏽", "é", "🇩🇪", "ﷺ", "don't .", "▁"]
        ),
    ),
    max_size=8,
).map("".join)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **fields)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte, so that every character is cut at every place."""
    assert tokenizer.byte_decoding is not None
    if tokenizer.byte_decoding.byte_level:
        table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
        return [table[bytes([byte])] for byte in data]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [i for i in ids if i is not None]


def chunks(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [list(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream(detokenizer: IncrementalDetokenizer, parts: Iterable[Sequence[int]]) -> tuple[list[str], str | None]:
    """Feed parts until a stop string is found; the deltas and the stop string."""
    deltas = []
    stop = None
    for part in parts:
        stop = detokenizer.update(part)
        deltas.append(detokenizer.take_delta(finished=stop is not None))
        assert "".join(deltas) == detokenizer.text
        if stop is not None:
            return deltas, stop
    stop = detokenizer.finish()
    deltas.append(detokenizer.take_delta(finished=True))
    assert "".join(deltas) == detokenizer.text
    assert detokenizer.take_delta(finished=True) == ""
    return deltas, stop


@st.composite
def answers(draw: st.DrawFn, families: Sequence[str] = tuple(EVERY_FAMILY)) -> tuple[str, list[int], list[list[int]]]:
    """A family, a prompt that ends in whole characters, and an answer's tokens in parts."""
    family = draw(st.sampled_from(families))
    tokenizer = tiny.make(family)
    prompt = tokenizer.encode(draw(TEXT))
    if draw(st.booleans()):
        ids = tokenizer.encode(draw(TEXT), add_special_tokens=False)
    else:
        ids = draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    return family, prompt, chunks(draw, ids)


@settings(max_examples=600, deadline=None)
@given(answers(), st.booleans())
def test_deltas_make_the_text_that_the_whole_sequence_has(
    answer: tuple[str, list[int], list[list[int]]], skip: bool
) -> None:
    family, prompt, parts = answer
    tokenizer = tiny.make(family)
    ids = [i for part in parts for i in part]
    deltas, _ = stream(IncrementalDetokenizer(tokenizer, prompt, params(skip_special_tokens=skip)), parts)
    assert tokenizer.decode(prompt, skip) + "".join(deltas) == tokenizer.decode(prompt + ids, skip)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(BYTE_FAMILIES), st.one_of(TEXT, st.text(max_size=12)))
def test_a_character_appears_with_its_last_byte(family: str, text: str) -> None:
    tokenizer = tiny.make(family)
    prompt = tokenizer.encode("The lift", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params())
    seen = b""
    for byte, token_id in zip(text.encode(), byte_ids(tokenizer, text.encode()), strict=True):
        detokenizer.update([token_id])
        seen += bytes([byte])
        assert detokenizer.text == seen.decode(errors="ignore")
        detokenizer.take_delta(finished=False)
    assert detokenizer.take_delta(finished=True) == ""
    assert detokenizer.text == text


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(BYTE_FAMILIES), st.binary(max_size=16), st.data())
def test_any_bytes_in_any_parts_are_decoded_as_a_whole(family: str, data: bytes, choice: st.DataObject) -> None:
    tokenizer = tiny.make(family)
    prompt = tokenizer.encode("Hi", add_special_tokens=False)
    ids = byte_ids(tokenizer, data)
    deltas, _ = stream(IncrementalDetokenizer(tokenizer, prompt, params()), choice.draw(st.composite(chunks)(ids)))
    assert tokenizer.decode(prompt) + "".join(deltas) == tokenizer.decode(prompt + ids)
    if family == "byte_level":
        assert "".join(deltas) == data.decode(errors="replace")


@pytest.mark.parametrize("family", BYTE_FAMILIES)
def test_a_character_cut_by_the_end_becomes_a_replacement_character(family: str) -> None:
    tokenizer = tiny.make(family)
    ids = byte_ids(tokenizer, "ok 😀".encode()[:-1])
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("Hi"), params())
    assert detokenizer.update(ids) is None
    assert detokenizer.take_delta(finished=False) == "ok "
    assert set(detokenizer.take_delta(finished=True)) == {"\ufffd"}
    assert detokenizer.text.startswith("ok ")


@pytest.mark.parametrize("family", BYTE_FAMILIES)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_begun_by_the_prompt_belongs_to_the_answer(family: str, cut: int) -> None:
    tokenizer = tiny.make(family)
    ids = byte_ids(tokenizer, "abc😀d".encode())
    detokenizer = IncrementalDetokenizer(tokenizer, ids[: 3 + cut], params())
    assert detokenizer.text == ""
    detokenizer.update(ids[3 + cut :])
    assert detokenizer.text == "😀d"
    silent = IncrementalDetokenizer(tokenizer, ids[: 3 + cut], params())
    assert silent.take_delta(finished=True) == ""


@pytest.mark.parametrize("family", ["byte_fallback", "unigram_byte_fallback", "metaspace"])
def test_only_the_start_of_the_sequence_loses_its_space(family: str) -> None:
    tokenizer = tiny.make(family)
    word = tokenizer.encode("the", add_special_tokens=False)
    special = sorted(tokenizer.special_ids)[0]
    for prompt, expected in (([], "the the"), ([special], "the the"), (word, " the the")):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt, params())
        detokenizer.update([*word, special, *word])
        assert detokenizer.text == expected


def test_a_decoder_that_is_not_understood_still_gives_whole_characters() -> None:
    backend = tiny.byte_fallback_backend()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.byte_decoding is None
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the lift"), params())
    seen = []
    for token_id in tokenizer.encode("a 😀你a", add_special_tokens=False):
        detokenizer.update([token_id])
        seen.append(detokenizer.take_delta(finished=False))
    assert [delta for delta in seen if delta] == [" ", "a", " ", "😀", "你", "a"]


# --- stop strings ---------------------------------------------------------------------------------------------------


def reference_stop(text: str, stops: Sequence[str], after: int, include: bool) -> tuple[str, str | None]:
    """Read the text letter by letter: the first stop string to be complete past ``after`` letters cuts it."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@settings(max_examples=600, deadline=None)
@given(st.data(), st.booleans())
def test_stop_strings_cut_where_a_letter_by_letter_reading_cuts(data: st.DataObject, include: bool) -> None:
    family, prompt, parts = data.draw(answers())
    tokenizer = tiny.make(family)
    ids = [i for part in parts for i in part]
    whole, _ = stream(IncrementalDetokenizer(tokenizer, prompt, params()), [ids])
    text = "".join(whole)
    piece = st.integers(0, max(0, len(text) - 1)).flatmap(lambda i: st.integers(1, 5).map(lambda n: text[i : i + n]))
    stops = data.draw(st.lists(st.one_of(piece, st.text("ab thel", min_size=1, max_size=4)), max_size=4))
    stops = [stop for stop in stops if stop]
    asked = params(stop=stops, include_stop_str_in_output=include)
    deltas, stop = stream(IncrementalDetokenizer(tokenizer, prompt, asked), parts)
    assert ("".join(deltas), stop) == reference_stop(text, stops, 0, include)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", min_size=1, max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_exactly_the_text_that_could_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    tokenizer = tiny.make("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer, [], params(stop=stops))
    for count, token_id in enumerate(byte_ids(tokenizer, text.encode()), 1):
        if detokenizer.update([token_id]) is not None:
            break
        so_far = text[:count]
        held = max((n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])), default=0)
        assert detokenizer.text == so_far[: count - held]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 12), st.booleans())
def test_stop_strings_wait_for_min_tokens(data: st.DataObject, min_tokens: int, include: bool) -> None:
    tokenizer = tiny.make("byte_level")
    ids = tokenizer.encode(data.draw(st.text("abthe lif", min_size=1, max_size=30)), add_special_tokens=False)
    text = tokenizer.decode(ids)
    stops = data.draw(st.lists(st.text("abthe", min_size=1, max_size=3), min_size=1, max_size=3))
    asked = params(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    deltas, stop = stream(IncrementalDetokenizer(tokenizer, [], asked), data.draw(st.composite(chunks)(ids)))
    after = len(tokenizer.decode(ids[:min_tokens]))
    assert ("".join(deltas), stop) == reference_stop(text, stops, after, include)


def test_a_stop_string_before_min_tokens_is_not_held_back() -> None:
    tokenizer = tiny.make("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer, [], params(stop=["END", "ENDING"], min_tokens=3))
    detokenizer.update(byte_ids(tokenizer, b"END"))
    assert detokenizer.text == ""  # could still become ENDING
    detokenizer.update(byte_ids(tokenizer, b"!"))
    assert detokenizer.text == "END!"
    alone = IncrementalDetokenizer(tokenizer, [], params(stop=["END", "another one"], min_tokens=3))
    assert alone.update(byte_ids(tokenizer, b"END")) is None
    assert alone.text == "END"


@pytest.mark.parametrize("include", [False, True])
def test_the_stop_string_is_found_over_tokens_and_the_rest_is_dropped(include: bool) -> None:
    tokenizer = tiny.make("byte_level")
    asked = params(stop=["\n\nUser:", "END"], include_stop_str_in_output=include)
    detokenizer = IncrementalDetokenizer(tokenizer, [], asked)
    assert detokenizer.update(byte_ids(tokenizer, b"Fine.\n\nUse")) is None
    assert detokenizer.text == ("Fine.\n\nUse" if include else "Fine.")
    assert detokenizer.update(byte_ids(tokenizer, b"r: and more END")) == "\n\nUser:"
    assert detokenizer.text == ("Fine.\n\nUser:" if include else "Fine.")
    assert detokenizer.update(byte_ids(tokenizer, b"ignored END")) is None
    assert detokenizer.take_delta(finished=True) == detokenizer.text


def test_held_back_text_is_released_at_the_end() -> None:
    tokenizer = tiny.make("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer, [], params(stop=["</answer>"]))
    assert detokenizer.update(byte_ids(tokenizer, b"yes </ans")) is None
    assert detokenizer.take_delta(finished=False) == "yes "
    assert detokenizer.take_delta(finished=True) == "</ans"
    assert detokenizer.text == "yes </ans"


def test_the_stop_token_is_left_out_unless_asked_for() -> None:
    tokenizer = tiny.make("byte_level")
    end = tokenizer.token_to_id("</s>")
    assert end is not None
    ids = [*tokenizer.encode("Hi", add_special_tokens=False), end]
    for include, skip, expected in ((False, False, "Hi"), (True, False, "Hi</s>"), (True, True, "Hi")):
        asked = params(include_stop_str_in_output=include, skip_special_tokens=skip)
        detokenizer = IncrementalDetokenizer(tokenizer, [], asked)
        assert detokenizer.update(ids, stop_terminated=True) is None
        assert detokenizer.take_delta(finished=True) == expected


# --- stop strings that spell special tokens ---------------------------------------------------------------------------


def reference_spelled_stop(
    pieces: Sequence[tuple[str, str]], stops: Sequence[str], specials: Iterable[str], include: bool
) -> tuple[str, str | None]:
    """Letter by letter over (text, spelling of a special token without text) of each token: a stop string ends the
    answer where the text ends with it, or, if it spells a special token, where the text with spellings does."""
    spelled = {stop for stop in stops if any(special in stop for special in specials)}
    text, whole, shown = "", "", [0]
    for piece, hidden in pieces:
        for char, in_text in [*((c, True) for c in piece), *((c, False) for c in hidden)]:
            text += char if in_text else ""
            whole += char
            shown.append(len(text))
            found = [stop for stop in stops if in_text and text.endswith(stop)]
            found += [stop for stop in spelled if whole.endswith(stop)]
            if found:
                stop = max(found, key=len)
                if in_text and text.endswith(stop):
                    return text if include else text[: -len(stop)], stop
                cut = text[: shown[len(whole) - len(stop)]]
                return cut + stop if include else cut, stop
    return text, None


SPECIAL_FAMILIES = ["byte_level", "byte_fallback", "metaspace", "word_piece"]


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(SPECIAL_FAMILIES), st.booleans(), st.booleans())
def test_a_stop_string_finds_the_special_tokens_it_spells(
    data: st.DataObject, family: str, skip: bool, include: bool
) -> None:
    tokenizer = tiny.make(family)
    specials = sorted(tokenizer.special_texts)
    words = tokenizer.encode("the chairlift", add_special_tokens=False)
    token = st.one_of(st.sampled_from(specials), st.sampled_from(words))
    ids = data.draw(st.lists(token, min_size=1, max_size=12))
    plain = IncrementalDetokenizer(tokenizer, words, params(skip_special_tokens=skip))
    pieces = []
    for token_id in ids:
        plain.update([token_id])
        hidden = tokenizer.special_texts.get(token_id, "") if skip else ""
        pieces.append((plain.take_delta(finished=False), hidden))
    whole = "".join(piece + hidden for piece, hidden in pieces)
    part = st.integers(0, max(0, len(whole) - 1)).flatmap(lambda i: st.integers(1, 9).map(lambda n: whole[i : i + n]))
    spelling = st.sampled_from(specials).map(tokenizer.special_texts.__getitem__)
    around = st.tuples(st.sampled_from(["", "t", "e", " "]), spelling, st.sampled_from(["", "t", " ", "a"]))
    stops = [stop for stop in data.draw(st.lists(st.one_of(part, around.map("".join)), max_size=3)) if stop]
    asked = params(stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip)
    deltas, stop = stream(IncrementalDetokenizer(tokenizer, words, asked), data.draw(st.composite(chunks)(ids)))
    expected = reference_spelled_stop(pieces, stops, tokenizer.special_texts.values(), include)
    assert ("".join(deltas), stop) == expected


@pytest.mark.parametrize(
    ("stop", "include", "text", "found"),
    [
        ("<|im_end|>", False, "Hi", True),
        ("<|im_end|>", True, "Hi<|im_end|>", True),
        ("i<|im_end|>", False, "H", True),
        ("i<|im_end|>y", True, "Hi<|im_end|>y", True),
        ("<|im_end|>yo", False, "Hi", True),
        ("<|im_end|>x", True, "Hiyou", False),
        ("im_end", False, "Hiyou", False),  # spells no special token
        ("Hiy", False, "", True),  # the text, without the special token
    ],
)
@pytest.mark.parametrize("skip", [True, False])
def test_stop_strings_match_special_tokens_as_they_are_shown(
    stop: str, include: bool, text: str, found: bool, skip: bool
) -> None:
    tokenizer = tiny.make("byte_level")
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in ("Hi", "<|im_end|>", "you")]
    asked = params(stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip)
    deltas, stopped = stream(IncrementalDetokenizer(tokenizer, [], asked), [[i] for part in ids for i in part])
    if not skip and "<|im_end|>" not in stop:
        text, found = ("Hi", True) if stop == "im_end" else ("Hi<|im_end|>you", False)
        text += "<|" if stop == "im_end" else ""
    elif not skip and not found:
        text = "Hi<|im_end|>you"
    assert ("".join(deltas), stopped) == (text, stop if found else None)


def test_a_special_token_that_is_shown_matches_as_it_is_shown() -> None:
    tokenizer = tiny.make("word_piece")
    ids = [i for word in ("the", "[SEP]") if (i := tokenizer.token_to_id(word)) is not None]
    for stop, found in (("e[SEP]", False), ("e [SEP]", True), ("[SEP]", True)):
        detokenizer = IncrementalDetokenizer(tokenizer, ids, params(stop=stop, skip_special_tokens=False))
        assert (detokenizer.update(ids) is not None) == found


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "H"), (True, "Hi<|im_end|>")])
def test_a_stop_string_may_end_with_the_token_that_ends_the_answer(skip: bool, include: bool, text: str) -> None:
    tokenizer = tiny.make("byte_level")
    asked = params(stop="i<|im_end|>", include_stop_str_in_output=include, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(tokenizer, [], asked)
    ids = tokenizer.encode("Hi<|im_end|>", add_special_tokens=False)
    assert detokenizer.update(ids[:-1]) is None
    assert detokenizer.update(ids[-1:], stop_terminated=True) == "i<|im_end|>"
    assert detokenizer.take_delta(finished=True) == text


def test_special_tokens_in_stop_strings_wait_for_min_tokens() -> None:
    tokenizer = tiny.make("byte_level")
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, [], params(stop="<|im_end|>", min_tokens=2))
    assert [detokenizer.update(end) for _ in range(3)] == [None, None, "<|im_end|>"]


class CountingTokenizer(Tokenizer):
    """Counts the tokens that are handed to ``decode``."""

    decoded = 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("text", ["the chairlift " * 400, " " * 4000, "a" * 4000])
def test_the_cost_of_a_token_does_not_grow(family: str, text: str) -> None:
    tokenizer = CountingTokenizer(tiny.library(family))
    ids = tokenizer.encode(text, add_special_tokens=False) or tokenizer.encode("a") * 4000
    if len(ids) < 100:
        ids = ids * 1000
    detokenizer = IncrementalDetokenizer(tokenizer, ids, params(stop=["never"]))
    for token_id in ids:
        detokenizer.update([token_id])
        detokenizer.take_delta(finished=False)
    assert tokenizer.decoded <= 20 * len(ids)


def test_the_cost_of_a_token_does_not_grow_with_stop_strings_that_begin_like_the_text() -> None:
    tokenizer = tiny.make("byte_level")
    ids = tokenizer.encode("a" * 3000, add_special_tokens=False)

    def seconds(stops: list[str]) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer, ids, params(stop=stops))
        start = time.process_time()
        for token_id in ids:
            assert detokenizer.update([token_id]) is None
        return time.process_time() - start

    short = min(seconds([chr(0x100 + i) * 2 for i in range(16)]) for _ in range(3))
    for stops in ([f"ab{i}".ljust(256, "x") for i in range(16)], ["a" * i + "b" * (256 - i) for i in range(1, 17)]):
        assert min(seconds(stops) for _ in range(3)) < 20 * short
