"""Pictures of a batch over time: which request each row computed, and which rows had ended but were computed on.

Two runs of the same requests are drawn on one time axis, as text for the terminal and as an SVG file.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from chairlift.engine.step_log import StepRecord

__all__ = ["Panel", "PictureRecorder", "RowSpan", "spans_of", "svg_lines", "text_lines"]

Kind = Literal["prompt", "decode", "held"]

_WIDTH: Final = 960
_LEFT: Final = 12
_ROW: Final = 8
_TITLE: Final = 26
_LEGEND: Final = (
    ("prompt", "prompt", "prompt"),
    ("decode", "decode0", "answer"),
    ("held", "held", "ended, but computed until its batch ends"),
)
"""(kind, look, words) of what a picture may show."""
_STYLE: Final = """\
text { font: 14px system-ui, sans-serif; fill: #24292f } .small { font-size: 12px; fill: #57606a }
.room { fill: #eef1f4 } .prompt { fill: #be8207 } .decode0 { fill: #1b7a68 } .decode1 { fill: #4aa892 }
.held { fill: #c3c8ce }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .room { fill: #1c2128 } .held { fill: #545d68 }
}"""


@dataclasses.dataclass(slots=True)
class RowSpan:
    """Time during which one row computed one kind of work of one request."""

    slot: int
    request_id: str
    kind: Kind
    """``held``: the request had ended, and its row was computed until its static batch ended."""
    begin: float
    end: float
    """``begin`` and ``end`` are in seconds from the start of the run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One run in a picture."""

    title: str
    spans: Sequence[RowSpan]
    num_rows: int
    seconds: float
    """Duration of the run."""


class PictureRecorder:
    """Subscriber of an engine's events that keeps the records of all steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def landed(self, record: StepRecord) -> None:
        self.steps.append(record)

    def since(self, begin: float) -> list[StepRecord]:
        """Records of the steps that were scheduled at ``begin`` or later, on the engine's clock."""
        return [record for record in self.steps if record.start >= begin]


def spans_of(steps: Iterable[StepRecord], wanted: Mapping[str, int], begin: float) -> list[RowSpan]:
    """Spans of all rows, in the order of their begin. ``wanted``: request id -> number of tokens of its answer.
    ``begin`` is the start of the run on the engine's clock."""
    tokens = dict.fromkeys(wanted, 0)
    newest: dict[int, RowSpan] = {}
    spans: list[RowSpan] = []
    for record in steps:
        work: list[tuple[int, str, Kind]] = []
        for name, chunk in record.chunks:
            work.append((chunk.slot, name, "prompt"))
            tokens[name] += chunk.samples
        for name, slot in record.decodes:
            work.append((slot, name, "held" if tokens[name] >= wanted[name] else "decode"))
            tokens[name] += 1
        for slot, name, kind in work:
            span = newest.get(slot)
            if span is None or (span.request_id, span.kind) != (name, kind):
                span = newest[slot] = RowSpan(slot, name, kind, record.start - begin, 0.0)
                spans.append(span)
            span.end = record.end - begin
    return spans


def text_lines(panels: Sequence[Panel], width: int, *, fine: bool = True, most_rows: int = 8) -> Iterator[str]:
    """Lines of text that show the panels on one time axis. ``width`` is the number of characters of a line. ``fine``:
    whether block characters can be printed; otherwise the lines are in ASCII."""
    marks = {"prompt": "█", "decode": "█", "held": "░"} if fine else {"prompt": "#", "decode": "#", "held": "-"}
    whole = max(panel.seconds for panel in panels)
    for panel in panels:
        shown = min(panel.num_rows, most_rows)
        grid = [[" "] * width for _ in range(shown)]
        for span in panel.spans:
            if span.slot < shown:
                first, last = (round(width * time / whole) for time in (span.begin, span.end))
                for column in range(first, min(last, width)):
                    grid[span.slot][column] = marks[span.kind]
        rows = "" if shown == panel.num_rows else f" (the first {shown} of {panel.num_rows} rows)"
        yield f"{panel.title}{rows}"
        yield from ("".join(line).rstrip() for line in grid)
        yield ""
    held = any(span.kind == "held" for panel in panels for span in panel.spans)
    ended = f", {marks['held']} has ended" if held else ""
    yield f"each line is a row of the batch over {whole:.2f} s; {marks['decode']} computes{ended}"


def svg_lines(panels: Sequence[Panel]) -> Iterator[str]:
    """Lines of an SVG document that shows the panels, the first at the top, on one time axis."""
    whole = max(panel.seconds for panel in panels)
    scale = (_WIDTH - 2 * _LEFT) / whole
    heights = [_TITLE + panel.num_rows * _ROW + 14 for panel in panels]
    height = sum(heights) + 48
    title = html.escape("; ".join(panel.title for panel in panels))
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    yield f"<title>{title}</title>"
    yield f"<style>{_STYLE}</style>"
    top = 0
    for panel, own in zip(panels, heights, strict=True):
        yield f'<text x="{_LEFT}" y="{top + 18}">{html.escape(panel.title)}</text>'
        yield from _rows(panel, top + _TITLE, scale)
        top += own
    yield f'<text class="small" x="{_LEFT}" y="{top + 6}">0 s</text>'
    yield f'<text class="small" x="{_WIDTH - _LEFT}" y="{top + 6}" text-anchor="end">{whole:.2f} s</text>'
    left = _LEFT
    shown = {span.kind for panel in panels for span in panel.spans}
    for name, label in (each for kind, *each in _LEGEND if kind in shown):
        yield f'<rect class="{name}" x="{left}" y="{top + 22}" width="12" height="12"/>'
        yield f'<text class="small" x="{left + 18}" y="{top + 32}">{label}</text>'
        left += 48 + 7 * len(label)
    yield "</svg>"


def _rows(panel: Panel, top: int, scale: float) -> Iterator[str]:
    """SVG elements of the rows of a panel: the room of the whole batch, then one path for each look."""
    whole = panel.seconds * scale
    yield f'<rect class="room" x="{_LEFT}" y="{top}" width="{whole:.1f}" height="{panel.num_rows * _ROW}"/>'
    paths: dict[str, list[str]] = {}
    answers = [0] * panel.num_rows
    for span in panel.spans:
        look: str = span.kind
        if span.kind == "decode":  # two requests that follow each other in a row differ in their shade
            look = f"decode{answers[span.slot] % 2}"
            answers[span.slot] += 1
        left = _LEFT + span.begin * scale
        width = max(0.5, (span.end - span.begin) * scale)
        box = f"M{left:.1f} {top + span.slot * _ROW + 1}h{width:.1f}v{_ROW - 2}h-{width:.1f}z"
        paths.setdefault(look, []).append(box)
    for look, boxes in paths.items():
        yield f'<path class="{look}" d="{"".join(boxes)}"/>'
