"""Charts of measurements, as SVG for HTML pages and as PNG files.

Every chart is 380 units wide with text of size 11, so that it is readable on a phone. In an SVG, the text has the
colour of the surrounding text, and the series have the colours of the page's style sheet (the light colours if the page
has no style sheet). Series also differ by dashes or markers, not by colour alone. Values that are not finite are left
out. Large samples are thinned, but keep their smallest and largest values.

matplotlib is imported when a chart is drawn. Its global state is neither used nor changed.
"""

from __future__ import annotations

import html
import importlib.util
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import ConfigError
from chairlift.writing import replacing

__all__ = ["SERIES_COLOURS", "Figure", "bars", "cdf", "has_matplotlib", "histogram", "lines", "scatter", "write_png"]

Values = NDArray[np.float64]
Point = tuple[float, float, str]
"""A labelled point of a chart: (x, y, label). The label can be empty."""
Axes = Any
"""``matplotlib.axes.Axes``. It is typed as Any, because its annotations differ between the supported versions."""

SERIES_COLOURS: Final = (
    ("#1b7a68", "#5fcfb4"),
    ("#c9591a", "#ff9d5c"),
    ("#2f6db5", "#7db8f5"),
    ("#9a4a8c", "#dc9ad0"),
    ("#8a6d00", "#e3c04a"),
    ("#6b7075", "#a5abb0"),
)
"""(colour on a light background, colour on a dark background) of each series. The colours can be told apart with
red-green colour blindness."""

_FRONT, _SOFT, _FAINT = "#1d1f21", "#62676c", "#dedbd6"
_WIDTH, _HEIGHT = 380, 250
_DASHES: Final = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1.2, 2)), (0, (9, 3)), (0, (3, 1.5)))
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_MOST_POINTS: Final = 400
_MOST_LABELS: Final = 24
_FAR, _FAR_BAR, _MANY = 4.0, 6.0, 20
"""An axis ends before outliers: values that are ``_FAR`` times (in bar charts ``_FAR_BAR`` times) as large as the next
smaller value. ``_MANY`` is the minimum number of values for this rule, except in bar charts. See
:func:`_end_of_axis`."""
_STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": _FRONT,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "lines.linewidth": 1.8,
    "grid.color": _FAINT,
    "axes.edgecolor": _SOFT,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    **{f"axes.{part}color": _SOFT for part in ("label", "title")},
    **{f"axes.{part}size": 10.5 for part in ("label", "title")},
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    **{f"{axis}tick.color": _SOFT for axis in "xy"},
    **{f"{axis}tick.labelsize": 10 for axis in "xy"},
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
}


class Figure:
    """A chart that is drawn when it is written."""

    def __init__(self, title: str, height: float, draw: Callable[[Axes], None]) -> None:
        """Create a chart. ``draw`` draws into the axes. ``height`` is in units; the width is 380 units."""
        self.title, self._height, self._draw = _printable(title), height, draw

    def svg(self) -> str:
        """An ``<svg>`` element for an HTML page, as wide as its container. The title is not visible in the chart.

        Equal charts give equal text.
        """
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        out = io.StringIO()
        with _style(hashsalt=self.title):
            backend: Any = FigureCanvasSVG(self._canvas())
            backend.print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        return _inline(out.getvalue(), self.title)

    def pixels(self) -> NDArray[np.uint8]:
        """Pixels ``[height, 760, 4]`` (red, green, blue, alpha) of the chart on white, with its title above."""
        heading = textwrap.fill(self.title, 50)
        with _style():
            above: Any = _canvas(12 + 15 * (heading.count("\n") + 1))
            above.text(0.02, 0.5, heading, va="center", fontsize=11.5, fontweight="bold")
            return np.concatenate([_pixels(above), _pixels(self._canvas())])

    def _canvas(self) -> Any:
        canvas = _canvas(self._height)
        self._draw(canvas.add_subplot(facecolor="none"))
        return canvas


def has_matplotlib() -> bool:
    """Whether matplotlib is installed, so that charts can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def _canvas(height: float) -> Any:
    """An empty ``matplotlib.figure.Figure`` in which one unit is one typographic point."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(_WIDTH / 72, height / 72), dpi=144, facecolor="none", layout="constrained")


def _pixels(canvas: Any) -> NDArray[np.uint8]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas.set_facecolor("white")
    backend: Any = FigureCanvasAgg(canvas)
    backend.draw()
    return np.array(backend.buffer_rgba())


@contextmanager
def _style(hashsalt: str = "") -> Iterator[None]:
    """Context in which matplotlib has the settings of these charts."""
    import matplotlib

    settings: Any = _STYLE | {"svg.hashsalt": hashsalt}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of glyphs that are not in its font
        yield


def write_png(path: Path, figures: Sequence[Figure]) -> None:
    """Write one PNG file with all charts below each other, 760 pixels wide, on white.

    Raises ConfigError when ``path`` cannot be written, and ValueError when there is no chart.
    """
    from matplotlib.image import imsave

    picture = np.concatenate([figure.pixels() for figure in figures])
    try:
        with replacing(path) as file:
            imsave(file.buffer, picture, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from None


# --- the charts ------------------------------------------------------------------------------------------------------


def cdf(samples: Mapping[str, Sequence[float]], *, title: str, x_label: str, log_x: bool = True) -> Figure:
    """Chart of cumulative distributions: the percentage of each sample at or below a value.

    ``samples`` maps names to values. Dots mark the median and the 99th percentile.
    """
    data = {name: np.sort(_finite(values)) for name, values in samples.items()}

    def draw(axes: Axes) -> None:
        entries: dict[str, Any] = {}
        for name, values, colour, dash, _ in _series(data):
            ranks = _ranks(len(values))
            x, y = np.r_[values[:1], values[ranks]], np.r_[0, 100 * (ranks + 1) / len(values)]
            (entries[name],) = axes.plot(x, y, color=colour, linestyle=dash, drawstyle="steps-post")
            axes.plot(np.quantile(values, [0.5, 0.99]), [50, 99], "o", color=colour, markersize=4.5)
        axes.set_ylim(0, 103)
        axes.set_yticks([0, 25, 50, 75, 100])
        _scale(axes, np.concatenate([np.empty(0), *data.values()]), log_x)
        _finish(axes, entries, x_label, "at or below, % (dots: median and p99)")

    return Figure(title, _HEIGHT, draw)


def histogram(samples: Mapping[str, Sequence[float]], *, title: str, x_label: str, log_x: bool = False) -> Figure:
    """Histogram: the percentage of each sample in each range of values. All samples have the same ranges."""
    data = {name: _finite(values) for name, values in samples.items()}
    least = min((len(values) for values in data.values() if len(values)), default=1)
    bins = round(min(36, max(10, 2.5 * least ** (1 / 3))))  # with few values, many ranges would show noise

    def draw(axes: Axes) -> None:
        entries: dict[str, Any] = {}
        everything = np.concatenate([np.empty(0), *data.values()])
        edges = _edges(everything, log_x, bins)
        for name, values, colour, dash, _ in _series(data):
            share = 100 * np.histogram(values, edges)[0] / len(values)
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.3)
            entries[name] = axes.stairs(share, edges, color=colour, linewidth=1.4, linestyle=dash)
        axes.set_ylim(bottom=0)
        _scale(axes, edges if len(everything) else everything, log_x)
        _finish(axes, entries, x_label, "share, %")

    return Figure(title, _HEIGHT, draw)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    step: bool = False,
) -> Figure:
    """Line chart. ``series`` maps names to ``(x values, y values)``. ``step``: y is constant until the next x."""
    data = {name: _thin(_points(zip(x, y, strict=True)), len(series)) for name, (x, y) in series.items()}

    def draw(axes: Axes) -> None:
        entries: dict[str, Any] = {}
        for name, points, colour, dash, marker in _series(data):
            marked = len(points) == 1 or (len(points) <= 20 and not step)
            (entries[name],) = axes.plot(
                points[:, 0],
                points[:, 1],
                color=colour,
                linestyle=dash,
                drawstyle="steps-post" if step else "default",
                marker=marker if marked else "",
                markersize=4.5,
            )
        _from_zero(axes, data)
        _leave_out_far(axes, data, across=False)
        _finish(axes, entries, x_label, y_label)

    return Figure(title, _HEIGHT, draw)


def scatter(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    connect: bool | Collection[str] = False,
    hollow: Collection[str] = (),
) -> Figure:
    """Scatter chart. ``series`` maps names to points ``(x, y, label)``.

    ``connect`` names the series whose points are joined by a line (True: all series). ``hollow`` names the series whose
    points are drawn as outlines. Labels that would overlap, and labels of series with many points, are left out.
    """
    data = {name: _points((x, y) for x, y, _ in points) for name, points in series.items()}
    labelled = [
        [point for point in points if point[2] and all(map(math.isfinite, point[:2]))] for points in series.values()
    ]
    labels = [point for points in sorted(labelled, key=len) if len(points) <= _MOST_LABELS for point in points]
    joined = list(series) if connect is True else list(connect or ())

    def draw(axes: Axes) -> None:
        entries: dict[str, Any] = {}
        for name, points, colour, dash, marker in _series(data):
            shown = _thin(points, len(data)) if name in joined else _spread(points, len(data))
            (entries[name],) = axes.plot(
                shown[:, 0],
                shown[:, 1],
                color=colour,
                linestyle=dash if name in joined else "none",
                linewidth=1.2,
                marker=marker,
                markersize=5.5,
                markerfacecolor="none" if name in hollow else colour,
            )
        axes.margins(0.08, 0.12)
        _from_zero(axes, data)
        _leave_out_far(axes, data, across=True)
        _finish(axes, entries, x_label, y_label)
        _label(axes, labels, data, joined)

    return Figure(title, _HEIGHT, draw)


def bars(groups: Sequence[str], values: Mapping[str, Sequence[float]], *, title: str, y_label: str) -> Figure:
    """Chart of horizontal bars, with the number at the end of each bar. ``values[name][i]`` belongs to ``groups[i]``.

    A value that is not finite has no bar. Raises ValueError unless each series has one value per group.
    """
    for name, row in values.items():
        if len(row) != len(groups):
            raise ValueError(f"{name!r} has {len(row)} values for {len(groups)} groups")
    data = {name: np.array(row, dtype=float) for name, row in values.items()}
    known = _finite([value for row in values.values() for value in row])
    low, high = known.min(initial=0.0), known.max(initial=0.0)
    end = high if low < 0 else _end_of_axis(known, far=_FAR_BAR, fewest=3)
    room = (end - low) or 1.0

    def draw(axes: Axes) -> None:
        entries: dict[str, Any] = {}
        thickness = 0.78 / max(1, len(data))
        for index, (name, row, colour, _, _) in enumerate(_series(data)):
            at = np.arange(len(groups)) + (index - (len(data) - 1) / 2) * thickness
            shown = np.minimum(np.where(np.isfinite(row), row, 0), 1.02 * end)
            entries[name] = axes.barh(at, shown, 0.86 * thickness, color=colour)[0]
            for y, value in zip(at.tolist(), row.tolist(), strict=True):
                if math.isfinite(value):
                    text = _short(value) if value <= end else f"▸ {_short(value)}"  # the bar is cut off
                    axes.text(max(0.0, min(value, 1.02 * end)) + 0.015 * room, y, text, va="center", fontsize=10)
        axes.set_yticks(range(len(groups)), [textwrap.fill(_printable(group, 48), 18) for group in groups])
        axes.set_ylim(max(1, len(groups)) - 0.45, -0.55)
        axes.set_xlim(low - (0.04 * room if low < 0 else 0), end + (0.17 if end == high else 0.24) * room)
        axes.tick_params(axis="x", length=0)
        _finish(axes, entries if len(known) else {}, "", y_label, lying=True)

    return Figure(title, 84 + max(1, len(groups)) * max(24.0, 16.0 * len(data) + 8), draw)


# --- helpers of all charts -------------------------------------------------------------------------------------------


def _series(data: Mapping[str, Values]) -> Iterator[tuple[str, Values, str, Any, str]]:
    """(name, values, colour, dash, marker) of each series that has values."""
    for index, (name, values) in enumerate(data.items()):
        if len(values):
            look = (index + index // len(SERIES_COLOURS)) % len(_DASHES)  # equal colours get different dashes
            yield name, values, SERIES_COLOURS[index % len(SERIES_COLOURS)][0], _DASHES[look], _MARKERS[look]


def _finish(axes: Axes, entries: Mapping[str, Any], x_label: str, y_label: str, *, lying: bool = False) -> None:
    """Add labels, tick numbers, a grid and, for several series, a legend.

    The label of the vertical axis is written horizontally above the chart.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(_printable(y_label), pad=8)
    axes.set_xlabel(_printable(x_label))
    axes.grid(axis="x" if lying else "y")
    numbers = FuncFormatter(lambda value, _: _short(value))
    axes.xaxis.set_major_formatter(numbers)
    if not lying:
        axes.yaxis.set_major_formatter(numbers)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(6))
    if not entries:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=_SOFT)
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
    canvas = axes.get_figure()
    if len(entries) > 1 and canvas is not None:
        names = [_printable(name, 48) for name in entries]
        columns = max(1, min(len(names), 52 // (max(map(len, names)) + 7)))
        canvas.legend(entries.values(), names, loc="outside upper left", ncols=columns, columnspacing=1.4)


def _scale(axes: Axes, values: Values, log: bool) -> None:
    """Set the scale and the limits of the horizontal axis.

    The scale is logarithmic if ``log`` is set and no value is negative. Zeros are drawn to the left of that scale.
    """
    if not len(values):
        return
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = float(values.min()), float(values.max())
    if not log or low < 0 or high == 0:
        margin = 0.03 * (high - low) or 0.5 * abs(high) or 1.0
        axes.set_xlim(low - margin, high + margin)
    elif low > 0:
        stretch = (high / low) ** 0.03 if high > low else 2.0
        axes.set_xscale("log")
        axes.set_xlim(low / stretch, high * stretch)
        if high / low < 60:
            axes.xaxis.set_major_locator(MaxNLocator(5) if 1 < high / low < 5 else LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        least = float(values[values > 0].min())
        axes.set_xscale("symlog", linthresh=least, linscale=0.4)
        axes.set_xlim(0, high * 1.15)
        axes.set_xticks([0, *10.0 ** np.arange(math.ceil(math.log10(least)), math.floor(math.log10(high)) + 1)])


def _from_zero(axes: Axes, data: Mapping[str, Values]) -> None:
    """Let the vertical axis begin at 0 if no value is negative, so that differences do not look too large."""
    if all(values[:, 1].min(initial=0) >= 0 for values in data.values()):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # matplotlib sets no margin for equal values


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
        last, first_beyond = float(ordered[-count - 1]), float(ordered[-count])
        if last > 0 and first_beyond > far * last:
            return last
    return float(ordered[-1])


def _leave_out_far(axes: Axes, data: Mapping[str, Values], *, across: bool) -> None:
    """End the axes before a few outliers that would squeeze all other values together, and write how many there are."""
    everything = np.concatenate([np.empty((0, 2)), *data.values()])
    beyond = np.zeros(len(everything), bool)
    for axis in (0, 1) if across else (1,):
        values = everything[:, axis]
        end = _end_of_axis(values, far=_FAR, fewest=_MANY)
        if len(values) and end < values.max():
            beyond |= values > end
            if axis == 0:
                axes.set_xlim(right=1.08 * end)
            else:
                axes.set_ylim(top=1.12 * end)
    if beyond.any():
        x, y = everything[beyond].max(axis=0)
        where = f"up to {_short(y)}" if not across else f"up to {_short(x)} across, {_short(y)} up"
        text = f"{int(beyond.sum())} more beyond, {where}"
        axes.text(1, 1.005, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9.5, color=_SOFT)


def _label(axes: Axes, labels: Iterable[Point], data: Mapping[str, Values], joined: Collection[str]) -> None:
    """Write each label next to its point. A label that would overlap a point, a line or another label is left out."""
    axes.get_figure().draw_without_rendering()  # this computes the positions of all points
    occupied: list[tuple[float, ...]] = []
    for name, values in data.items():
        points = axes.transData.transform(values) / 2
        occupied += [(x - 4, y - 4, x + 4, y + 4) for x, y in points.tolist()]
        if name in joined:
            along = [np.linspace(one, other, 30) for one, other in itertools.pairwise(points)]
            occupied += [(x - 1, y - 1, x + 1, y + 1) for piece in along for x, y in piece.tolist()]
    left, bottom, right, top = (axes.bbox.extents / 2).tolist()
    for x, y, text in labels:
        shown = _printable(text, 30)
        px, py = (axes.transData.transform((x, y)) / 2).tolist()
        width = 5.6 * len(shown)
        for across, dy in itertools.product((5, -width / 2, -width - 5), (-4, 5, -14)):
            dx = across + (math.copysign(2, across) if dy == -4 else 0)
            box = (px + dx, py + dy, px + dx + width, py + dy + 9)
            inside = left <= box[0] and box[2] <= right and bottom <= box[1] and box[3] <= top
            if inside and not any(_overlap(box, other) for other in occupied):
                occupied.append(box)
                axes.annotate(shown, (x, y), (dx, dy), textcoords="offset points", fontsize=9.5, color=_SOFT)
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
        return (
            np.array([low - 0.5, low + 0.5])
            if whole or low == 0
            else np.array([low * 0.9, low * 1.1])[:: 1 if low > 0 else -1]
        )
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
    return np.linspace(low, high, bins + 1)


def _short(value: float) -> str:
    """A number as short text, such as 0, 0.004, 12.5, 1,200, 15k or 3.2M."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1000 if suffix == 'k' else unit):,.4g}{suffix}".replace("-", "−")
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"
    return text.replace("-", "−")


def _printable(text: str, limit: int = 200) -> str:
    """Text on one line of at most ``limit`` characters, without control characters."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _inline(document: str, title: str) -> str:
    """Convert matplotlib's SVG document to an ``<svg>`` element for an HTML page, with a title, the colours of the page
    and rounded numbers, but without a fixed size. Ids that another chart on the page could also have are removed.
    """
    drawing = document[document.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', drawing)
    start = drawing.index(">") + 1
    drawing = drawing[start:]
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->\n?", "", drawing, flags=re.S)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    drawing = re.sub(r' (?:d|x|y|points|transform)="[^"]*"', lambda found: _DIGITS.sub(r"\1", found[0]), drawing)
    for old, new in ((_FRONT, "currentColor"), ("'DejaVu Sans'", "system-ui"), ("xlink:href", "href")):
        drawing = drawing.replace(old, new)
    for name, colour in (("soft", _SOFT), ("line", _FAINT)):
        drawing = drawing.replace(colour, f"var(--{name}, {colour})")
    for index, (light, _) in enumerate(SERIES_COLOURS):
        drawing = drawing.replace(light, f"var(--series-{index}, {light})")
    shape = box[0] if box else ""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="100%" {shape} stroke-linejoin="round">'
    return f"{opening}<title>{html.escape(title)}</title>{drawing}"


_DIGITS: Final = re.compile(r"(\.\d\d)\d+")
