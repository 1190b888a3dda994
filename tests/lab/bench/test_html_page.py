"""A report is one file that shows what it was given as text, anywhere."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser

from chairlift_lab.bench.plots import SERIES_COLOURS, bars, cdf
from chairlift_lab.bench.report import Facts, Report, Section, Table, Text
from tests.colours import LEAST, least_difference, light_and_dark

VOID = {"meta", "link"}
EVIL = '<script>alert("1")</script> & {title} %s \x00\x1b'


class Outline(HTMLParser):
    """Elements that open and close, the text, and the attributes of each element."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return [name for name, _ in self.seen].count(tag)


@cache
def report(word: str = "word") -> str:
    chart = cdf({word: [1, 2, 3], "b": [2, 3]}, title=word, x_label=word)
    return Report(
        {},
        word,
        word,
        [
            Section(word, [Text(f"{word}\n\nsecond"), Facts({word: word}), chart, chart, Text("between"), chart]),
            Section("table", [Table([word, "n"], [[word, "1"], ["other", word]], caption=word), Table([], [])]),
            Section("empty", []),
        ],
    ).html()


def test_all_elements_are_closed_and_the_page_loads_nothing() -> None:
    document = report()
    outline = Outline(document)
    assert outline.open == []
    assert not outline.count("script") and not outline.count("img")
    for tag, attributes in outline.seen:
        for name in ("href", "src", "xlink:href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)", document)


def test_everything_given_is_shown_as_text() -> None:
    outline = Outline(report(EVIL))
    shown = '<script>alert("1")</script> & {title} %s'
    assert outline.count("script") == 0
    assert sum(shown in text for text in outline.texts) >= 12
    assert "\x00" not in report(EVIL) and "\x1b" not in report(EVIL)


def test_tables_have_a_header_and_named_rows() -> None:
    outline = Outline(report())
    scopes = [attributes.get("scope") for tag, attributes in outline.seen if tag == "th"]
    assert scopes == ["col", "col", "row", "row"] and outline.count("td") == 2
    assert outline.count("caption") == 1
    assert outline.seen[[tag for tag, _ in outline.seen].index("table") - 1][1]["class"] == "scroll"


def test_tables_scroll_beside_their_names() -> None:
    (names,) = re.findall(r"^th:first-child \{(.*?)\}", report(), re.S | re.M)
    assert "position: sticky" in names and "left: 0" in names and "background:" in names
    assert "<caption><span>word</span></caption>" in report()
    assert re.search(r"^caption span \{ position: sticky; left: 0;", report(), re.M)


def test_the_colours_of_charts_differ_for_everybody() -> None:
    for colours in light_and_dark(SERIES_COLOURS):
        difference, words = least_difference(colours)
        assert difference > LEAST, words


def test_charts_that_follow_each_other_share_a_row() -> None:
    outline = Outline(report())
    rows = [attributes for tag, attributes in outline.seen if tag == "div" and attributes.get("class") == "charts"]
    assert (len(rows), outline.count("figure"), outline.count("figcaption")) == (2, 3, 3)


def test_paragraphs_and_facts_become_html_elements() -> None:
    document = Report(
        {}, "t", "lead one\n\nlead two", [Section("s", [Text("a\n\n\n\nb"), Facts({"cpu": "two cores"})])]
    ).html()
    assert re.findall(r"<p(?: class=\"lead\")?>([^<]*)</p>", document) == ["lead one", "lead two", "a", "b"]
    assert "<dt>cpu</dt><dd>two cores</dd>" in document


def test_every_colour_that_charts_name_is_defined() -> None:
    chart = bars(["a"], {str(i): [1] for i in range(9)}, title="t", y_label="y")
    document = Report({}, "t", "", [Section("s", [chart])]).html()
    used = set(re.findall(r"var\((--[a-z0-9-]+)", document))
    assert used and used <= set(re.findall(r"(--[a-z0-9-]+):", document))


def test_the_page_has_styles_for_light_dark_phone_and_paper() -> None:
    document = report()
    for needed in (
        "width=device-width",
        "color-scheme: light dark",
        "@media print",
        "overflow-x: auto",
        "tabular-nums",
    ):
        assert needed in document
    assert document.startswith("<!doctype html>\n") and '<html lang="en">' in document and "utf-8" in document
