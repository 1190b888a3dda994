"""Reports as one self-contained HTML page: no scripts, nothing loaded, light and dark, for paper and phones."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Final

from chairlift.workbench.bench.plots import SERIES_COLOURS, Figure

__all__ = ["Block", "Facts", "Section", "Table", "Text", "page"]


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; an empty line starts another."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Names and what they are, side by side."""

    facts: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, on the left; the others are figures, on the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


Block = Text | Facts | Table | Figure


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it. Charts that follow each other stand side by side where there is room."""

    title: str
    blocks: Sequence[Block]


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole document. ``lead`` says the result in a sentence or two. Everything given is text, and is escaped."""
    body = "\n".join(map(_section, sections))
    return _PAGE.format(
        title=_escape(title), lead=_paragraphs(lead, ' class="lead"'), body=body, style=_STYLE + _series_style()
    )


def _section(section: Section) -> str:
    parts, charts = [f"<h2>{_escape(section.title)}</h2>"], list[str]()
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
            caption = f"<caption>{_escape(block.caption)}</caption>" if block.caption else ""
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
    """Text as markup; characters that a document must not contain become spaces."""
    return html.escape("".join(mark if mark.isprintable() or mark == "\n" else " " for mark in text))


def _series_style() -> str:
    """The colours that charts refer to; on paper the light ones."""
    names = (f"--series-{i}: light-dark({light}, {dark});" for i, (light, dark) in enumerate(SERIES_COLOURS))
    return f":root {{ {' '.join(names)} }}"


_STYLE: Final = """\
:root {
  color-scheme: light dark;
  --back: light-dark(#fbfaf8, #17181a); --front: light-dark(#1d1f21, #e8e6e3); --soft: light-dark(#62676b, #9aa0a4);
  --panel: light-dark(#ffffff, #202225); --line: light-dark(#dedbd5, #36393d); --accent: light-dark(#1f6455, #7fcdb9);
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--back); color: var(--front); font: 16px/1.55 system-ui, sans-serif;
  overflow-wrap: break-word;
}
main { max-width: 70rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
.mark { margin: 0; color: var(--accent); font-size: .85rem; font-weight: 600; letter-spacing: .02em; }
h1 { margin: .1rem 0 .6rem; font-size: 1.6rem; line-height: 1.25; }
h2 { margin: 2.6rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); font-size: 1.15rem; }
p { max-width: 46rem; margin: .6rem 0; white-space: pre-line; }
.lead { font-size: 1.1rem; }
dl {
  display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1.2rem; margin: .8rem 0;
  font-size: .93rem;
}
dt { color: var(--soft); }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { padding: 0 0 .4rem; color: var(--soft); text-align: left; }
th, td {
  padding: .32rem 0 .32rem 1.1rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
}
th { font-weight: 400; }
thead th { color: var(--soft); vertical-align: bottom; }
th:first-child { padding-left: 0; text-align: left; }
tbody tr:hover { background: var(--panel); }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.2rem; margin: 1.2rem 0;
}
figure {
  max-width: 38rem; margin: 0; padding: .9rem 1rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: .8rem;
}
figcaption { margin-bottom: .5rem; font-weight: 600; line-height: 1.35; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
@media (max-width: 34rem) {
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; }
  figure { padding: .7rem .6rem; }
}
@media print {
  :root { color-scheme: light; }
  body { background: none; font-size: 11pt; }
  main { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .scroll { overflow: visible; }
}
"""

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<p class="mark">Chairlift</p>
<h1>{title}</h1>
{lead}
{body}
</main>
</body>
</html>
"""
