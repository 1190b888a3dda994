"""The guide is well formed and large enough; what it holds back differs really from all that is trained on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.augment import outside, vary
from tools.guide import (
    GUIDE_DIR,
    MAX_JACCARD,
    Entry,
    GuideError,
    HeldBack,
    fingerprint,
    jaccard,
    normalise,
    read_guide,
    violations,
    words,
)


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return read_guide()


def test_the_guide_has_enough_entries_wordings_and_held_back_wordings(entries: list[Entry]) -> None:
    assert len(entries) >= 300
    assert sum(len(entry.held_back) for entry in entries) >= 150
    assert all(len(entry.questions) >= 5 for entry in entries)


def test_answers_are_distinct_plain_and_of_many_lengths(entries: list[Entry]) -> None:
    answers = [entry.answer for entry in entries]
    assert len({normalise(answer) for answer in answers}) == len(answers)
    lengths = sorted(len(answer.split()) for answer in answers)
    assert lengths[0] <= 2
    assert 60 <= lengths[-1] <= 120
    assert not any(mark in answer for answer in answers for mark in ("`", "**", "|", "  "))


def test_no_written_wording_is_close_to_a_held_back_one(entries: list[Entry]) -> None:
    assert violations(entries) == []


def test_variations_used_in_training_keep_their_distance(entries: list[Entry]) -> None:
    # Everything trained on passes HeldBack.too_close; here it is compared with the definition, without its bit masks.
    rng = random.Random(0)
    held_texts = [text for entry in entries for text in entry.held_back]
    held, sets = HeldBack(held_texts), [words(text) for text in held_texts]
    for _ in range(300):
        text = vary(rng.choice(entries).questions, rng)
        nearest = max(jaccard(words(text), other) for other in sets)
        assert held.nearest(text) == pytest.approx(nearest)
        assert held.too_close(text) == (nearest >= MAX_JACCARD)


def test_a_held_back_wording_itself_is_too_close(entries: list[Entry]) -> None:
    held_back = [text for entry in entries for text in entry.held_back]
    held = HeldBack(held_back)
    assert all(held.too_close(text.upper() + " ??") for text in held_back)


def test_variations_are_repeatable_and_varied() -> None:
    first = [vary(("What is continuous batching?",), random.Random(seed)) for seed in range(200)]
    assert first == [vary(("What is continuous batching?",), random.Random(seed)) for seed in range(200)]
    assert len(set(first)) > 100
    assert all(text.strip() for text in first)


def test_questions_from_outside_are_varied_and_name_no_page_of_the_guide() -> None:
    rng = random.Random(0)
    made = {outside(rng) for _ in range(300)}
    assert len(made) > 280
    assert not any(term in text for text in made for term in ("batch", "cache", "token", "chairlift", "schedul"))


def test_normalise_ignores_case_space_and_punctuation() -> None:
    assert normalise(" The  KV-cache,\nis `full`! ") == normalise("the kv cache is FULL")
    assert normalise("16 tokens.") != normalise("15 tokens.")


PAGE = """# Title

### What is one?

The answer
with `code`.
"""
WORDINGS = """### What is one?

- Also asked: Explain one | Define one
- Held back: Tell me what one might be
"""


def read(directory: Path, page: str, wordings: str) -> list[Entry]:
    for name, text in (("guide", page), ("wordings", wordings)):
        (directory / name).mkdir()
        (directory / name / "page.md").write_text(text)
    (directory / "guide" / "README.md").write_text("### Not an entry\n\nText.\n")
    return read_guide(directory / "guide", directory / "wordings")


def test_a_page_is_read_as_the_readme_says(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, PAGE, WORDINGS)
    assert entry.questions == ("What is one?", "Explain one", "Define one")
    assert entry.held_back == ("Tell me what one might be",)
    assert entry.answer == "The answer with code."


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("The answer\nwith `code`.", "", "no answer"),
        ("Explain one | Define one", "Explain one | | Define one", "empty wording"),
        ("Define one", "explain ONE?", "asked twice"),
        ("Tell me what one might be", "Explain one", "asked twice"),
        ("- Held back:", "- Held:", "without - Also asked"),
    ],
)
def test_broken_pages_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(GuideError, match=message):
        read(tmp_path, PAGE.replace(old, new), WORDINGS.replace(old, new))


def test_guide_and_wordings_must_have_the_same_headings_and_pages(tmp_path: Path) -> None:
    with pytest.raises(GuideError, match="same headings"):
        read(tmp_path, PAGE, WORDINGS.replace("What is one?", "What was one?"))
    (tmp_path / "wordings" / "more.md").write_text(WORDINGS)
    with pytest.raises(GuideError, match=r"same pages; one of them lacks \['more.md'\]"):
        read_guide(tmp_path / "guide", tmp_path / "wordings")


def test_the_bundled_model_was_trained_on_exactly_this_text(entries: list[Entry]) -> None:
    """A change of the guide needs a new training, which changes the model card too."""
    card = (GUIDE_DIR.parents[1] / "chairlift" / "assets" / "README.md").read_text()
    assert f"| sha256 of the training text | `{fingerprint(entries)}` |" in card
    assert (GUIDE_DIR / "README.md").read_text().splitlines()[2].startswith(f"{len(entries)} questions about ")
