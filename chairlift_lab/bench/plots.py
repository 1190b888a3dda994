"""Charts of measurements, as SVG for HTML pages and as SVG files.

Every chart is 380 units wide with text of size 10, so that it is readable on a phone. The text has the colour of the
surrounding text, and the series have the colours of the page's style sheet (the light colours if the page has no style
sheet). Series also differ by dashes or markers, not by colour alone. Values that are not finite are left out. Large
samples are thinned, but keep their smallest and largest values.
"""

from __future__ import annotations

import html
import itertools
import math
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chairlift.base.writing import replacing
from chairlift.errors import ConfigError
from chairlift_lab.bench.svg_chart import (
    SERIES_COLOURS,
    SOFT,
    WIDTH,
    Axes,
    Box,
    Dots,
    Label,
    Line,
    Look,
    Sample,
    Scale,
    Whisker,
    short,
    text_width,
)

__all__ = ["SERIES_COLOURS", "Figure", "bars", "cdf", "histogram", "lines", "scatter", "write_svg"]

Values = NDArray[np.float64]
Point = tuple[float, float, str]
"""A labelled point of a chart: (x, y, label). The label can be empty."""
Intervals = Mapping[str, Sequence[tuple[float, float]]]
"""Series -> (lower end, upper end) of the interval of each of its values, for error bars."""

_LARGEST: Final = sys.float_info.max
_HEIGHT: Final = 250
_MOST_POINTS: Final = 400
_MOST_LABELS: Final = 24
_FAR = 4.0
_FAR_BAR = 6.0
_MANY = 20
"""An axis ends before outliers: values that are ``_FAR`` times (in bar charts ``_FAR_BAR`` times) as large as the next
smaller value. ``_MANY`` is the minimum number of values for this rule, except in bar charts. See
:func:`_end_of_axis`."""


class Figure:
    """A chart with a title."""

    def __init__(self, title: str, axes: Axes) -> None:
        self.title = _printable(title)
        self.axes = axes

    def svg(self) -> str:
        """An ``<svg>`` element for an HTML page, as wide as its container. The title is not visible in the chart.

        Equal charts give equal text.
        """
        return self._element('xmlns="http://www.w3.org/2000/svg" width="100%"')

    def placed(self, x: float, y: float) -> tuple[str, float]:
        """(elements of the chart with its title above, at a place of a larger drawing; their height)."""
        heading = textwrap.wrap(self.title, 50)
        above = 18.0 * len(heading) + 8
        texts = (
            f'<text x="{x + 2:g}" y="{y + 16 + 18 * place:g}" font-size="12.5" font-weight="600" fill="currentColor">'
            f"{html.escape(line)}</text>"
            for place, line in enumerate(heading)
        )
        place = f'x="{x:g}" y="{y + above:g}" width="{WIDTH}" height="{self.axes.height:g}"'
        return "".join(texts) + self._element(place), above + self.axes.height

    def _element(self, place: str) -> str:
        box = f'viewBox="0 0 {WIDTH} {self.axes.height:g}" font-family="system-ui, sans-serif" stroke-linejoin="round"'
        return (
            f'<svg {place} role="img" {box}><title>{html.escape(self.title)}</title>{self.axes.svg(self.title)}</svg>'
        )


def write_svg(path: Path, figures: Sequence[Figure], columns: int = 1) -> None:
    """Write one SVG file with all charts in rows of ``columns``. It is readable on a light and on a dark screen.

    Raises ConfigError when ``path`` cannot be written.
    """
    parts = list[str]()
    gap = 20.0
    y = 20.0
    for first in range(0, len(figures), columns):
        row = figures[first : first + columns]
        drawn = [figure.placed(gap + place * (WIDTH + gap), y) for place, figure in enumerate(row)]
        parts += [text for text, _ in drawn]
        y += max(height for _, height in drawn) + gap
    width = gap + columns * (WIDTH + gap)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{y:g}" viewBox="0 0 {width:g} {y:g}"'
    ground = '<rect width="100%" height="100%" fill="var(--back)"/>'
    text = f'{opening} font-family="system-ui, sans-serif"><style>{_style()}</style>{ground}{"".join(parts)}</svg>\n'
    try:
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from None


def _style() -> str:
    """Style sheet of an SVG file: the colours of the charts on a light and on a dark screen."""
    sheets = []
    for dark, (back, front, soft, faint) in enumerate(
        (("#ffffff", "#1d1f21", "#62676b", "#dedbd5"), ("#202225", "#e8e6e3", "#9aa0a4", "#36393d"))
    ):
        series = "".join(f"--series-{place}:{pair[dark]};" for place, pair in enumerate(SERIES_COLOURS))
        sheets.append(f":root{{color:{front};--back:{back};--soft:{soft};--line:{faint};{series}}}")
    return f"{sheets[0]}@media(prefers-color-scheme:dark){{{sheets[1]}}}"


# --- the charts ------------------------------------------------------------------------------------------------------


def cdf(samples: Mapping[str, Sequence[float]], *, title: str, x_label: str, log_x: bool = True) -> Figure:
    """Chart of cumulative distributions: the percentage of each sample at or below a value.

    ``samples`` maps names to values. Dots mark the median and the 99th percentile.
    """
    data = {name: np.sort(_finite(values)) for name, values in samples.items()}
    axes = _axes(x_label, "at or below, % (dots: median and p99)")
    axes.y = Scale(0.0, 103.0)
    axes.y_ticks = (0, 25, 50, 75, 100)
    axes.x = _scale(np.concatenate([np.empty(0), *data.values()]), log_x)
    for name, values, look in _series(data):
        ranks = _ranks(len(values))
        x, y = np.r_[values[:1], values[ranks]], np.r_[0, 100 * (ranks + 1) / len(values)]
        axes.marks.append(Line(_steps(np.stack([x, y], axis=1)), look))
        with np.errstate(over="ignore"):  # such a dot lies outside the axes
            dots = np.quantile(values, [0.5, 0.99])
        axes.marks.append(Dots(np.stack([dots, np.array([50.0, 99.0])], axis=1), look, round=True))
        axes.legend.append((_printable(name, 48), look, "line"))
    return Figure(title, axes)


def histogram(samples: Mapping[str, Sequence[float]], *, title: str, x_label: str, log_x: bool = False) -> Figure:
    """Histogram: the percentage of each sample in each range of values. All samples have the same ranges."""
    data = {name: _finite(values) for name, values in samples.items()}
    least = min((len(values) for values in data.values() if len(values)), default=1)
    bins = round(min(36, max(10, 2.5 * least ** (1 / 3))))  # with few values, many ranges would show noise
    everything = np.concatenate([np.empty(0), *data.values()])
    edges = _edges(everything, log_x, bins)
    axes = _axes(x_label, "share, %")
    axes.x = _scale(edges if len(everything) else everything, log_x)
    most = 0.0
    for name, values, look in _series(data):
        share = 100 * np.histogram(values, edges)[0] / len(values)
        most = max(most, float(share.max()))
        for low, high, part in zip(edges.tolist(), edges.tolist()[1:], share.tolist(), strict=False):
            axes.marks.append(Box((low, 0.0, high, part), look, opacity=0.3))
        outline = np.stack([np.r_[edges[:1], edges], np.r_[0.0, share, 0.0]], axis=1)
        axes.marks.append(Line(_steps(outline), look, width=1.4))
        axes.legend.append((_printable(name, 48), look, "line"))
    axes.y = Scale(0.0, 1.05 * most or 1.0)
    return Figure(title, axes)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    step: bool = False,
    intervals: Intervals | None = None,
) -> Figure:
    """Line chart. ``series`` maps names to ``(x values, y values)``. ``step``: y is constant until the next x.

    ``intervals`` has the ends of the error bars.
    """
    data = {name: _thin(_points(zip(x, y, strict=True)), len(series)) for name, (x, y) in series.items()}
    axes = _axes(x_label, y_label)
    for name, points, look in _series(data):
        axes.marks.append(Line(_steps(points) if step else points, look))
        if len(points) == 1 or (len(points) <= 20 and not step):
            axes.marks.append(Dots(points, look))
        axes.legend.append((_printable(name, 48), look, "line"))
    ends = [
        (float(x), low, high)
        for name, pairs in (intervals or {}).items()
        for x, (low, high) in zip(series[name][0], pairs, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    axes.marks += [Whisker((x, low, x, high)) for x, low, high in ends]
    _fit(axes, [*data.values(), _points((x, y) for x, *pair in ends for y in pair)], margins=(0.03, 0.05), across=False)
    return Figure(title, axes)


def scatter(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    connect: bool | Collection[str] = False,
    hollow: Collection[str] = (),
    columns: Sequence[str] | None = None,
) -> Figure:
    """Scatter chart. ``series`` maps names to points ``(x, y, label)``.

    ``connect`` names the series whose points are joined by a line (True: all series). ``hollow`` names the series whose
    points are drawn as outlines. Labels that would overlap, and labels of series with many points, are left out.
    ``columns`` names the places x = 0, 1, 2 and so on.
    """
    data = {name: _points((x, y) for x, y, _ in points) for name, points in series.items()}
    labelled = [
        [point for point in points if point[2] and all(map(math.isfinite, point[:2]))] for points in series.values()
    ]
    labels = [point for points in sorted(labelled, key=len) if len(points) <= _MOST_LABELS for point in points]
    joined = list(series) if connect is True else list(connect or ())
    axes = _axes(x_label, y_label)
    axes.columns = columns
    for name, points, look in _series(data):
        shown = _thin(points, len(data)) if name in joined else _spread(points, len(data))
        if name in joined:
            axes.marks.append(Line(shown, look, width=1.2))
        axes.marks.append(Dots(shown, look, hollow=name in hollow))
        sample: Sample = "hollow" if name in hollow else "dots"
        axes.legend.append((_printable(name, 48), look, "line" if name in joined else sample))
    _fit(axes, list(data.values()), margins=(0.08, 0.12), across=columns is None)
    _label(axes, labels, data, joined)
    return Figure(title, axes)


def bars(
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    *,
    title: str,
    y_label: str,
    intervals: Intervals | None = None,
) -> Figure:
    """Chart of horizontal bars, with the number at the end of each bar. ``values[name][i]`` belongs to ``groups[i]``.

    A value that is not finite has no bar. ``intervals`` has the ends of the error bars. Raises ValueError unless each
    series has one value per group.
    """
    for name, row in values.items():
        if len(row) != len(groups):
            raise ValueError(f"{name!r} has {len(row)} values for {len(groups)} groups")
    data = {name: np.array(row, dtype=float) for name, row in values.items()}
    known = _finite([value for row in values.values() for value in row])
    spread = _finite([end for pairs in (intervals or {}).values() for pair in pairs for end in pair])
    everything = np.concatenate([known, spread])
    low, high = float(everything.min(initial=0.0)), float(everything.max(initial=0.0))
    end = high if low < 0 or len(spread) else _end_of_axis(known, far=_FAR_BAR, fewest=3)
    room = min(end - low, 1e308) or 1.0
    axes = _axes("", y_label, height=84 + max(1, len(groups)) * max(24.0, 16.0 * len(data) + 8))
    axes.rows = [_printable(group, 48) for group in groups]
    axes.y = Scale(max(1, len(groups)) - 0.45, -0.55)
    axes.x = Scale(
        max(-_LARGEST, low - (0.04 * room if low < 0 else 0)),
        min(_LARGEST, end + (0.17 if end == high else 0.24) * room),
    )
    thickness = 0.78 / max(1, len(data))
    for index, (name, numbers, look) in enumerate(_series(data)):
        for place, value in enumerate(numbers.tolist()):
            y = place + (index - (len(data) - 1) / 2) * thickness
            pair = (intervals or {}).get(name, [])[place : place + 1]
            axes.marks += _bar(value, y, thickness, look, end, pair)
        if np.isfinite(numbers).any():
            axes.legend.append((_printable(name, 48), look, "box"))
    return Figure(title, axes)


def _bar(
    value: float, y: float, thickness: float, look: Look, end: float, interval: Sequence[tuple[float, float]]
) -> Iterator[Box | Whisker | Label]:
    """Marks of one bar: the bar up to the ``end`` of the axis, its error bar, and its number."""
    if not math.isfinite(value):
        return
    shown, text = (value, short(value)) if value <= end else (end, f"▸ {short(value)}")  # the bar is cut off
    yield Box((0.0, y - 0.43 * thickness, shown, y + 0.43 * thickness), look)
    right = max(0.0, shown)
    for low, high in interval:
        if math.isfinite(low) and math.isfinite(high):
            yield Whisker((low, y, high, y))
            right = max(right, high)
    yield Label(right, y, text, shift=(5.0, -3.5))


# --- helpers of all charts -------------------------------------------------------------------------------------------


def _axes(x_label: str, y_label: str, height: float = _HEIGHT) -> Axes:
    return Axes(height, _printable(x_label), _printable(y_label))


def _series(data: Mapping[str, Values]) -> Iterator[tuple[str, Values, Look]]:
    """(name, values, look) of each series that has values."""
    for index, (name, values) in enumerate(data.items()):
        if len(values):
            yield name, values, Look(index)


def _steps(points: Values) -> Values:
    """Points of a line that keeps its y until the next x."""
    return np.stack([np.repeat(points[:, 0], 2)[1:], np.repeat(points[:, 1], 2)[:-1]], axis=1)


def _scale(values: Values, log: bool) -> Scale:
    """Scale of the horizontal axis.

    The scale is logarithmic if ``log`` is set and no value is negative. Zeros are drawn to the left of that scale.
    """
    if not len(values):
        return Scale(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if not log or low < 0 or high == 0:
        return Scale.around(low, high, 0.03)
    if low > 0:
        return Scale.logarithmic(low, high)
    return Scale(0.0, min(_LARGEST, high * 1.15), "zero_log", float(values[values > 0].min()))


def _fit(axes: Axes, data: Sequence[Values], margins: tuple[float, float], *, across: bool) -> None:
    """Set linear scales that show the points.

    The vertical axis begins at 0 if no value is negative, so that differences do not look too large. The axes end
    before a few outliers that would squeeze all other values together. A note says how many outliers there are.
    ``across``: the horizontal axis may end before outliers, too.
    """
    everything = np.concatenate([np.empty((0, 2)), *data])
    if not len(everything):
        return
    beyond = np.zeros(len(everything), bool)
    scales = list[Scale]()
    for axis in (0, 1):
        values = everything[:, axis]
        scale = Scale.around(float(values.min()), float(values.max()), margins[axis])
        end = _end_of_axis(values, far=_FAR, fewest=_MANY) if across or axis == 1 else float(values.max())
        if end < values.max():
            beyond |= values > end
            scale = Scale(min(scale.low, 0.0), 1.12 * end)
        if axis == 1 and values.min() >= 0:
            scale = Scale(0.0, min(_LARGEST, (1 + margins[axis]) * min(end, float(values.max()))) or 1.0)
        scales.append(scale)
    axes.x, axes.y = scales
    if axes.columns is not None:
        axes.x = Scale(-0.5, len(axes.columns) - 0.5)
    if beyond.any():
        x, y = everything[beyond].max(axis=0)
        where = f"up to {short(x)} across, {short(y)} up" if across else f"up to {short(y)}"
        axes.note = f"{int(beyond.sum())} more beyond, {where}"


def _end_of_axis(values: Values, far: float, fewest: int) -> float:
    """End of an axis: the largest value, or a smaller value if a few outliers are ``far`` times as large as the rest.

    At most one value in twenty is left outside; of fewer than twenty values, at most one. With fewer than ``fewest``
    values, no value is left outside.
    """
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return 0.0
    few = max(1, len(ordered) // 20) if len(ordered) >= fewest else 0
    for count in range(few, 0, -1):
        last = float(ordered[-count - 1])
        first_beyond = float(ordered[-count])
        if last > 0 and first_beyond > far * last:
            return last
    return float(ordered[-1])


def _label(axes: Axes, labels: Iterable[Point], data: Mapping[str, Values], joined: Collection[str]) -> None:
    """Write each label next to its point. A label that would overlap a point, a line or another label is left out."""
    occupied: list[tuple[float, ...]] = []
    for name, values in data.items():
        points = axes.position(values)
        occupied += [(x - 4, y - 4, x + 4, y + 4) for x, y in points.tolist()]
        if name in joined:
            along = [np.linspace(one, other, 30) for one, other in itertools.pairwise(points)]
            occupied += [(x - 1, y - 1, x + 1, y + 1) for piece in along for x, y in piece.tolist()]
    left, top, right, bottom = axes.frame()
    for x, y, text in labels:
        shown = _printable(text, 30)
        ((px, py),) = axes.position(np.array([(x, y)])).tolist()
        width = text_width(shown, 9.5)
        for across, up in itertools.product((5, -width / 2, -width - 5), (-4, 5, -14)):
            right_by = across + (math.copysign(2, across) if up == -4 else 0)
            box = (px + right_by, py - up - 9, px + right_by + width, py - up)
            inside = left <= box[0] and box[2] <= right and top <= box[1] and box[3] <= bottom
            if inside and not any(_overlap(box, other) for other in occupied):
                occupied.append(box)
                axes.marks.append(Label(x, y, shown, (right_by, up), SOFT))
                break


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _finite(values: Sequence[float]) -> Values:
    array: Values = np.asarray(values, dtype=np.float64).reshape(-1)
    return array[np.isfinite(array)]


def _points(pairs: Iterable[tuple[float, float]]) -> Values:
    """Array ``[n, 2]`` of the pairs whose two values are finite."""
    array = np.array(list(pairs), dtype=np.float64).reshape(-1, 2)
    return array[np.isfinite(array).all(axis=1)]


def _ranks(count: int) -> NDArray[np.int64]:
    """Ranks of a sorted sample to draw as a curve: evenly spaced, and more closely near the largest values."""
    if count <= _MOST_POINTS:
        return np.arange(count)
    evenly = np.linspace(0, count - 1, _MOST_POINTS)
    tail = count - np.geomspace(1, count, _MOST_POINTS // 4)
    return np.unique(np.r_[evenly, tail].astype(np.int64))


def _thin(points: Values, series: int) -> Values:
    """Points of a line to draw: the first, the last, and the lowest and the highest point of every stretch.

    So a line of many points is drawn with few points, and no spike is lost.
    """
    limit = max(50, _MOST_POINTS * 6 // max(6, series))
    if len(points) <= limit:
        return points
    stretches = np.array_split(np.arange(len(points)), limit // 2)
    extremes = [stretch[[points[stretch, 1].argmin(), points[stretch, 1].argmax()]] for stretch in stretches]
    ranks: NDArray[np.int64] = np.unique(np.concatenate([np.array([0, len(points) - 1]), *extremes]))
    return points[ranks]


def _spread(points: Values, series: int) -> Values:
    """Points of a scatter chart to draw: one from every small cell that has points, so that no outlier is lost."""
    if len(points) <= _MOST_POINTS // max(1, series):
        return points
    cells = math.isqrt(_MOST_POINTS * 3 // max(1, series))
    low, high = points.min(axis=0), points.max(axis=0)
    cell = ((points - low) / np.where(high > low, high - low, 1) * cells).astype(np.int64)
    return points[np.sort(np.unique(cell, axis=0, return_index=True)[1])]


def _edges(values: Values, log: bool, bins: int) -> Values:
    """Borders between the bins of a histogram. If all values are whole numbers, the borders lie between whole
    numbers."""
    if not len(values):
        return np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    whole = bool((values == np.floor(values)).all()) and high < 2**52
    if low == high:
        if whole or low == 0:
            return np.array([low - 0.5, low + 0.5])
        return np.array(sorted((low * 0.9, low * 1.1)))
    positive = values[values > 0]
    if log and low >= 0 and len(positive):
        least = float(positive.min())
        edges = np.geomspace(least, high, bins + 1) if high > least else np.array([least, least * 1.1])
        if whole:
            edges = np.unique(np.r_[np.round(edges[:-1]), high + 1]) - 0.5
        return edges if low > 0 else np.r_[0.0, edges]
    if whole:
        width = math.ceil((high - low + 1) / bins)
        return np.arange(low, high + width + 1, width) - 0.5
    return 2 * np.linspace(low / 2, high / 2, bins + 1)  # the difference of the ends could overflow


def _printable(text: str, limit: int = 200) -> str:
    """Text on one line of at most ``limit`` characters, without control characters."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
