"""Reports of the benchmark commands: facts, tables, charts and texts.

A report can be printed as text, written as JSON, and written as one HTML page. The page has no scripts, loads no other
files, and is readable in light and dark mode, on phones and in print.
"""

from __future__ import annotations

import dataclasses
import html
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.plots import SERIES_COLOURS, Figure

__all__ = ["Block", "Facts", "Report", "Section", "Table", "Text", "aligned", "text"]


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Text of one or more paragraphs, separated by empty lines."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """A list of names and values. A value can have several lines."""

    facts: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table. The first column is text, aligned left. The other columns are numbers, aligned right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


Block = Text | Facts | Table | Figure


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A heading and its contents. Consecutive charts are placed side by side if the page is wide enough."""

    title: str
    blocks: Iterable[Block]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Result of a benchmark command: the data of the JSON file, and the contents of the HTML page."""

    record: Mapping[str, Any]
    """Data that can be written as JSON."""
    title: str = ""
    lead: str = ""
    """Summary of the result in one or two sentences."""
    sections: Iterable[Section] = ()
    """Sections of the page. An iterator is read only when the page is written, and only once."""

    def html(self) -> str:
        """The page as a complete HTML document. All texts are escaped."""
        names = (f"--series-{i}: light-dark({light}, {dark});" for i, (light, dark) in enumerate(SERIES_COLOURS))
        template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        return string.Template(template).substitute(
            title=_escape(self.title),
            lead=_paragraphs(self.lead, ' class="lead"'),
            body="\n".join(map(_section, self.sections)),
            series=f":root {{ {' '.join(names)} }}",  # the colours that charts refer to
        )


# --- text for the terminal -------------------------------------------------------------------------------------------


def text(*blocks: Text | Facts | Table) -> Iterator[str]:
    """Convert report blocks to lines of text, with an empty line between two blocks."""
    for number, block in enumerate(blocks):
        if number:
            yield ""
        match block:
            case Text():
                yield block.text
            case Facts():
                width = max([14, *map(len, block.facts)])
                for name, value in block.facts.items():
                    for index, line in enumerate(value.split("\n")):
                        yield f"{'' if index else name:<{width}} {line}"
            case Table():
                yield from [block.caption] * bool(block.caption)
                yield from aligned([block.header, *block.rows])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text that show a table: the first column is aligned to the left, the other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


# --- the page --------------------------------------------------------------------------------------------------------


def _section(section: Section) -> str:
    parts = [f"<h2>{_escape(section.title)}</h2>"]
    charts = list[str]()
    for block in [*section.blocks, None]:
        if isinstance(block, Figure):
            charts.append(f"<figure><figcaption>{_escape(block.title)}</figcaption>{block.svg()}</figure>")
            continue
        if charts:
            parts.append(f'<div class="charts">{"".join(charts)}</div>')
            charts = []
        if block is not None:
            parts.append(_block(block))
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _block(block: Text | Facts | Table) -> str:
    match block:
        case Text():
            return _paragraphs(block.text)
        case Facts():
            pairs = (f"<dt>{_escape(name)}</dt><dd>{_escape(value)}</dd>" for name, value in block.facts.items())
            return f"<dl>{''.join(pairs)}</dl>"
        case Table():
            caption = f"<caption><span>{_escape(block.caption)}</span></caption>" if block.caption else ""
            head = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in block.header)
            rows = "".join(f"<tr>{_cells(row)}</tr>\n" for row in block.rows)
            name = _escape(block.caption or "Table")
            return (
                f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>{caption}'
                f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>"
            )


def _cells(row: Sequence[str]) -> str:
    first = "".join(f'<th scope="row">{_escape(cell)}</th>' for cell in row[:1])
    return first + "".join(f"<td>{_escape(cell)}</td>" for cell in row[1:])


def _paragraphs(text: str, attributes: str = "") -> str:
    return "\n".join(f"<p{attributes}>{_escape(part)}</p>" for part in text.split("\n\n") if part.strip())


def _escape(text: str) -> str:
    """Text escaped for HTML. Control characters, which a document must not contain, become spaces."""
    return html.escape("".join(mark if mark.isprintable() or mark == "\n" else " " for mark in text))
