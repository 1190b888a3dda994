"""One pair of axes with marks, drawn as SVG text without a plotting library.

The user of :class:`Axes` sets the scales and adds marks in data coordinates. :meth:`Axes.svg` computes the layout,
chooses round ticks that fit, and writes the elements. Colours are CSS variables of the page, with the light colours as
fallbacks, and text is text, so one drawing is readable in light and dark mode.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import itertools
import math
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FAINT",
    "FRONT",
    "SERIES_COLOURS",
    "SOFT",
    "WIDTH",
    "Axes",
    "Box",
    "Dots",
    "Label",
    "Line",
    "Look",
    "Sample",
    "Scale",
    "Whisker",
    "short",
    "text_width",
]

Values = NDArray[np.float64]
Sample = Literal["line", "dots", "hollow", "box"]
"""How the legend shows a series."""

SERIES_COLOURS: Final = (
    ("#1b7a68", "#5fcfb4"),
    ("#be8207", "#ff9228"),
    ("#1c3384", "#6680f2"),
    ("#9030c4", "#ffc0f6"),
    ("#6c1408", "#bcff7c"),
    ("#808bb2", "#9d7d81"),
)
"""(colour on a light background, colour on a dark background) of each series. The colours can be told apart with
colour blindness of any kind."""
FRONT = "currentColor"
SOFT = "var(--soft, #62676c)"
FAINT = "var(--line, #dedbd6)"
WIDTH: Final = 380
"""Width of every chart in units. The page scales a chart to the width of its column."""
_DASHES: Final = ("", "5 2", "1.2 1.4", "6 2 1.2 2", "9 3", "3 1.5")
_LARGEST = sys.float_info.max
_SMALLEST = 5e-324


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Colour, dash and marker of the series with this index. Series of equal colour differ in dash and marker."""

    index: int

    @property
    def colour(self) -> str:
        place = self.index % len(SERIES_COLOURS)
        return f"var(--series-{place}, {SERIES_COLOURS[place][0]})"

    @property
    def shape(self) -> int:
        """Index of the dash and of the marker."""
        return (self.index + self.index // len(SERIES_COLOURS)) % len(_DASHES)


# --- marks -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line through points ``[n, 2]``. It is cut off at the edges of the axes."""

    points: Values
    look: Look
    width: float = 1.8


@dataclasses.dataclass(frozen=True, slots=True)
class Dots:
    """A marker at each point of ``[n, 2]``. Points outside the axes have no marker. ``round`` makes each a circle."""

    points: Values
    look: Look
    hollow: bool = False
    round: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle between two corners."""

    corners: tuple[float, float, float, float]
    """(x, y, opposite x, opposite y)"""
    look: Look
    opacity: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Whisker:
    """An error bar between two points, with a short cap at each end."""

    ends: tuple[float, float, float, float]
    """(x, y, other x, other y)"""


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline begins ``shift`` units (right, up) of a point."""

    x: float
    y: float
    text: str
    shift: tuple[float, float] = (0.0, 0.0)
    colour: str = FRONT


Mark = Line | Dots | Box | Whisker | Label


# --- scales ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """An axis from ``low`` to ``high``, which are finite and different.

    ``log`` is logarithmic. ``zero_log`` begins at 0, is linear up to ``least``, and logarithmic from there.
    """

    low: float
    high: float
    kind: Literal["linear", "log", "zero_log"] = "linear"
    least: float = 1.0

    @classmethod
    def around(cls, low: float, high: float, margin: float = 0.0) -> Scale:
        """A linear scale that has a margin (a fraction of the range) on both sides. Equal values get a range."""
        size = margin * (high - low)
        if low == high:
            size = 0.5 * abs(high) or 1.0
        return cls(max(-_LARGEST, low - size), min(_LARGEST, high + size))

    @classmethod
    def logarithmic(cls, low: float, high: float) -> Scale:
        """A logarithmic scale with a small margin on both sides, or a linear scale for values that are nearly equal.

        ``low`` and ``high`` are positive.
        """
        if 1 < high / low < 1.001:
            return cls.around(low, high, 0.03)
        stretch = 10 ** (0.03 * (math.log10(high) - math.log10(low))) if high > low else 2.0
        return cls(max(_SMALLEST, low / stretch), min(_LARGEST, high * stretch), "log")

    def place(self, values: Values | float) -> Values:
        """Fractions of the axis at which values lie: 0 at ``low``, 1 at ``high``."""
        low, high = (self._forward(np.float64(end)) for end in (self.low, self.high))
        fractions = (self._forward(np.asarray(values, np.float64)) - low) / (high - low)
        return np.clip(fractions, -9.0, 10.0)

    def _forward(self, values: Values | np.float64) -> Values:
        with np.errstate(over="ignore", under="ignore"):
            if self.kind == "linear":
                return np.asarray(values / max(abs(self.low), abs(self.high)))
            above = np.log10(np.maximum(values, self.least if self.kind == "zero_log" else _SMALLEST))
            if self.kind == "log":
                return np.asarray(above)
            above = above - math.log10(self.least)
            return np.asarray(np.where(values < self.least, 0.4 * values / self.least, 0.4 + above))

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round values on this axis, ascending. At least one, if only the end of the axis."""
        low = self.least if self.kind == "zero_log" else self.low
        decades = math.log10(self.high) - math.log10(low) if self.kind != "linear" else 0.0
        if self.kind == "linear" or (self.kind == "log" and decades < 0.7):
            return _round_values(self.low, self.high, count)
        factors = (1, 2, 5) if decades < min(1.8, count / 3) else (1,)
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(self.high)) + 1)
        every = max(1, math.ceil(len(powers) / count))
        values = [float(f"{factor}e{power}") for power in powers[::-1][::every][::-1] for factor in factors]
        shown = [value for value in values if low <= value <= self.high] or [self.high]
        return [0.0, *shown] if self.kind == "zero_log" else shown


def _round_values(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten from ``low`` to ``high``: about ``count``."""
    rough = (high / 2 - low / 2) / count * 2  # halves, because the difference could overflow
    if rough <= 0:
        return [low, high]
    power = math.floor(math.log10(rough))
    steps = [float(f"{factor}e{power}") for factor in (1, 2, 2.5, 5, 10)]
    step = next((step for step in steps if step >= rough * (1 - 1e-9)), 0.0)
    if not 0 < step <= _LARGEST:
        return [low, high]
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, min(last, first + 2 * count) + 1)] or [high]


def short(value: float, digits: int = 3) -> str:
    """A number as short text, such as 0, 0.004, 12.5, 1,200, 15k or 3.2M."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-6:
        return f"{value:.{digits}g}".replace("-", "−")
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1000 if suffix == 'k' else unit):,.{digits + 1}g}{suffix}".replace("-", "−")
    text = f"{value:,.{max(0, digits - 3)}f}" if size >= 1000 else f"{value:.{digits}g}"
    return text.replace("-", "−")


def _numbers(values: Sequence[float]) -> list[str]:
    """Texts of different numbers, with as many digits as make the texts different."""
    for digits in range(3, 18):
        texts = [short(value, digits) for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def text_width(text: str, size: float) -> float:
    """Approximate width of text in units. The browser chooses the font, so this is on the safe side."""
    return size * sum(1.0 if unicodedata.east_asian_width(mark) in "WF" else 0.62 for mark in text)


# --- axes ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Axes:
    """Axes with marks. The label of the vertical axis is written horizontally above the chart."""

    height: float
    x_label: str
    y_label: str
    x: Scale = Scale(0.0, 1.0)
    y: Scale = Scale(0.0, 1.0)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    legend: list[tuple[str, Look, Sample]] = dataclasses.field(default_factory=list)
    """(name, look, kind of sample) of each series that has values. A chart of one series shows no legend."""
    rows: Sequence[str] | None = None
    """Names of rows, which are at y = 0, 1, 2 and so on, downwards. None: the vertical axis has numbers."""
    columns: Sequence[str] | None = None
    """Names at x = 0, 1, 2 and so on. None: the horizontal axis has numbers."""
    y_ticks: Sequence[float] | None = None
    note: str = ""
    """Text above the right end of the axes."""

    def frame(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of the area of the marks, in units from the top left corner."""
        top = 15.0 * self._legend_rows() + 13 * len(self._heading()) + (13 if self.note else 0) + 9
        bottom = self.height - (34 if self.x_label else 19)
        lines = [line for text in self._row_names() for line in text]
        left = 8 + max((text_width(line, 10) for line in lines), default=0.0)
        return left, top, WIDTH - 10.0, bottom

    def position(self, points: Values) -> Values:
        """Positions ``[n, 2]`` of points in units from the top left corner."""
        left, top, right, bottom = self.frame()
        x = left + self.x.place(points[:, 0]) * (right - left)
        y = bottom - self.y.place(points[:, 1]) * (bottom - top)
        return np.stack([x, y], axis=1)

    def svg(self, title: str) -> str:
        """The elements of the chart, without an ``<svg>`` element around them.

        Equal axes with an equal title give equal text. Charts on one page have different titles or different marks, so
        that they have different ids.
        """
        if not self.legend:
            return f"{''.join(self._titles())}{_text(WIDTH / 2, self.height / 2, 'no data', 'middle', SOFT)}"
        left, top, right, bottom = self.frame()
        inside = "".join(filter(None, map(self._clipped, self.marks)))
        name = "clip-" + hashlib.sha256(f"{title}{inside}".encode()).hexdigest()[:12]
        area = f'<clipPath id="{name}"><rect x="{_n(left)}" y="{_n(top - 1)}" width="{_n(right - left)}"'
        area += f' height="{_n(bottom - top + 2)}"/></clipPath><g clip-path="url(#{name})">{inside}</g>'
        free = "".join(part for mark in self.marks for part in self._free(mark))
        return "".join([*self._titles(), *self._grid(), area, free])

    # -- around the marks

    def _legend_rows(self) -> int:
        return math.ceil(len(self.legend) / self._legend_columns()) if len(self.legend) > 1 else 0

    def _legend_columns(self) -> int:
        widest = max(text_width(name, 10.5) for name, _, _ in self.legend)
        return max(1, min(len(self.legend), int(WIDTH / (widest + 38))))

    def _heading(self) -> list[str]:
        return textwrap.wrap(self.y_label, 62)

    def _row_names(self) -> list[list[str]]:
        if self.rows is not None:
            return [textwrap.wrap(name, 18) or [""] for name in self.rows]
        return [[text] for text in _numbers(self._heights())]

    def _heights(self) -> Sequence[float]:
        return self.y.ticks(5) if self.y_ticks is None else self.y_ticks

    def _titles(self) -> Iterator[str]:
        rows = self._legend_rows()
        if rows:
            columns = self._legend_columns()
            for place, (name, look, kind) in enumerate(self.legend):
                x, y = place % columns * (WIDTH / columns) + 2, 15.0 * (place // columns) + 8
                yield _sample(x, y, look, kind)
                yield _text(x + 28, y + 3.6, name, size=10.5)
        for place, line in enumerate(self._heading()):
            yield _text(2, 15.0 * rows + 12 + 13 * place, line, colour=SOFT, size=10.5)
        if self.note:
            at = 15.0 * rows + 12 + 13 * len(self._heading())
            yield _text(WIDTH - 10, at, self.note, "end", SOFT, 9.5)
        if self.x_label:
            left, _, right, _ = self.frame()
            yield _text((left + right) / 2, self.height - 4, self.x_label, "middle", SOFT, 10.5)

    def _grid(self) -> Iterator[str]:
        """Lines of the grid, the horizontal axis, and the texts of the ticks."""
        left, top, right, bottom = self.frame()
        ticks, texts = self._x_ticks(left, right)
        places = (left + self.x.place(np.array(ticks)) * (right - left)).tolist()
        for x, text in zip(places, texts, strict=True):
            half = text_width(text, 10) / 2
            yield _rule(x, top if self.rows is not None else bottom, x, bottom if self.rows is not None else bottom + 3)
            yield _text(min(max(x, half), WIDTH - half), bottom + 14, text, "middle", SOFT)
        heights = list(range(len(self.rows))) if self.rows is not None else self._heights()
        levels = (bottom - self.y.place(np.array(heights, float)) * (bottom - top)).tolist()
        for y, lines in zip(levels, self._row_names(), strict=True):
            if self.rows is None:
                yield _rule(left, y, right, y)
            for place, line in enumerate(lines):
                yield _text(left - 6, y + 3.5 + 11.5 * (place - (len(lines) - 1) / 2), line, "end", SOFT)
        yield _rule(left, bottom, right, bottom, SOFT)

    def _x_ticks(self, left: float, right: float) -> tuple[list[float], list[str]]:
        """(values, texts) of the most ticks whose texts do not overlap."""
        if self.columns is not None:
            return [float(place) for place in range(len(self.columns))], list(self.columns)
        for count in (6, 5, 4, 3, 2, 1):
            ticks = self.x.ticks(count)
            texts = _numbers(ticks)
            places = left + self.x.place(np.array(ticks)) * (right - left)
            room = np.diff(places) - [
                text_width(one, 5) + text_width(other, 5) + 6 for one, other in itertools.pairwise(texts)
            ]
            if (room >= 0).all():
                break
        else:
            ticks = ticks[-1:]
            texts = texts[-1:]
        return ticks, texts

    # -- marks

    def _clipped(self, mark: Mark) -> str:
        """The element of a mark that is cut off at the edges of the axes, or an empty text."""
        match mark:
            case Line(points, look, width):
                path = " ".join(f"{_n(x)},{_n(y)}" for x, y in self.position(points).tolist())
                dash = f' stroke-dasharray="{_DASHES[look.shape]}"' if _DASHES[look.shape] else ""
                return f'<polyline points="{path}" fill="none" stroke="{look.colour}" stroke-width="{width}"{dash}/>'
            case Box((x, y, far_x, far_y), look, opacity):
                one, other = self.position(np.array([(x, y), (far_x, far_y)])).tolist()
                (x, far_x), (y, far_y) = (sorted(pair) for pair in zip(one, other, strict=True))
                solid = f' fill-opacity="{opacity}"' if opacity < 1 else ""
                size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(far_x - x)}" height="{_n(far_y - y)}"'
                return f'<rect {size} fill="{look.colour}"{solid}/>'
        return ""

    def _free(self, mark: Mark) -> Iterator[str]:
        """The elements of a mark that can reach beyond the axes."""
        match mark:
            case Dots(points, look, hollow, round_):
                left, top, right, bottom = self.frame()
                for x, y in self.position(points).tolist():
                    if left - 1 <= x <= right + 1 and top - 1 <= y <= bottom + 1:
                        yield _marker(x, y, 0 if round_ else look.shape, look.colour, hollow)
            case Whisker((x, y, far_x, far_y)):
                (x, y), (far_x, far_y) = self.position(np.array([(x, y), (far_x, far_y)])).tolist()
                across, down = (3.0, 0.0) if abs(far_x - x) < abs(far_y - y) else (0.0, 3.0)
                caps = "".join(
                    f"M{_n(at - across)} {_n(level - down)}L{_n(at + across)} {_n(level + down)}"
                    for at, level in ((x, y), (far_x, far_y))
                )
                yield f'<path d="M{_n(x)} {_n(y)}L{_n(far_x)} {_n(far_y)}{caps}" stroke="{FRONT}" fill="none"/>'
            case Label(x, y, text, (right_by, up_by), colour):
                (x, y) = self.position(np.array([(x, y)])).tolist()[0]
                yield _text(x + right_by, y - up_by, text, colour=colour, size=9.5)


# --- elements --------------------------------------------------------------------------------------------------------


def _n(value: float) -> str:
    """A coordinate with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".").replace("-0", "-0" if abs(value) >= 0.005 else "0", 1)


def _text(x: float, y: float, text: str, anchor: str = "", colour: str = FRONT, size: float = 10) -> str:
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size:g}" fill="{colour}"{place}>{html.escape(text)}</text>'


def _rule(x: float, y: float, far_x: float, far_y: float, colour: str = FAINT) -> str:
    return f'<path d="M{_n(x)} {_n(y)}L{_n(far_x)} {_n(far_y)}" stroke="{colour}" stroke-width="0.8"/>'


_MARKERS: Final = (
    "m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0z",
    "m-2.5-2.5h5v5h-5z",
    "m0-3l3 5.5h-6z",
    "m0-3.3l3.3 3.3l-3.3 3.3l-3.3-3.3z",
    "m0 3l3-5.5h-6z",
    "m-2.5-2.5l5 5m0-5l-5 5",
)
"""Relative paths of a circle, a square, a triangle, a diamond, a triangle that points down, and a cross."""


def _marker(x: float, y: float, shape: int, colour: str, hollow: bool) -> str:
    return f'<path d="M{_n(x)} {_n(y)}{_MARKERS[shape]}" fill="{"none" if hollow else colour}" stroke="{colour}"/>'


def _sample(x: float, y: float, look: Look, kind: Sample) -> str:
    """A sample of a series for the legend, 22 units wide."""
    match kind:
        case "box":
            return f'<rect x="{_n(x)}" y="{_n(y - 4)}" width="22" height="8" fill="{look.colour}"/>'
        case "dots" | "hollow":
            return _marker(x + 11, y, look.shape, look.colour, hollow=kind == "hollow")
        case "line":
            dash = f' stroke-dasharray="{_DASHES[look.shape]}"' if _DASHES[look.shape] else ""
            return f'<path d="M{_n(x)} {_n(y)}h22" stroke="{look.colour}" stroke-width="1.8"{dash}/>'
