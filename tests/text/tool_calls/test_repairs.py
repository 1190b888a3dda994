"""Malformed calls: which are read, which are text with a reason, and that docs/tools.md says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.text.tool_calls import TOOL_FORMATS, read_answer
from tests.text.tool_calls.recorded import RECORDED, as_calls, reader_for, split_read
from tests.text.tool_calls.repairs import REPAIRS


@pytest.mark.parametrize("row", REPAIRS)
def test_a_malformed_call_is_read_or_is_text_with_a_reason_however_it_is_cut(row: str) -> None:
    name, text, calls, reason = REPAIRS[row]
    whole = read_answer(text, reader_for(name))
    assert as_calls(whole) == calls
    assert len(whole.broken) == bool(reason) and all(reason in each for each in whole.broken), whole.broken
    assert calls or whole.content == text
    for at in range(len(text)):
        assert split_read(reader_for(name), [text[:at], text[at:]]) == whole, text[:at]
    assert split_read(reader_for(name), list(text)) == whole


def test_the_page_has_the_table_of_malformed_calls() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    rows = [
        f"| {row} | {'read' if calls else 'text' if reason else 'text, no entry'} |"
        for row, (_, _, calls, reason) in REPAIRS.items()
    ]
    begin = page.index("| Malformed call | Result |")
    table = page[begin:].split("\n\n")[0].splitlines()[2:]
    assert table == rows


@pytest.mark.parametrize("index", range(len(RECORDED)))
def test_a_call_without_one_of_its_marks_never_becomes_a_call_with_other_arguments(index: int) -> None:
    name, text, _, calls = RECORDED[index]
    values = str([arguments for _, arguments in calls])
    for mark in TOOL_FORMATS[name].markers:
        if not mark.strip() or mark in values:
            continue
        at = text.find(mark)
        while at >= 0:
            read = as_calls(read_answer(text[:at] + text[at + len(mark) :], reader_for(name)))
            assert all(call in calls for call in read), (mark, read)
            at = text.find(mark, at + 1)
