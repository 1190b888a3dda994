"""Charts of measurements, as SVG for pages and PNG for files.

Every chart is drawn for a narrow space, 380 units wide with text of 11, so that it can still be read on a phone. In the
SVG text has the colour of the text around it, and series the colours of the page's style sheet, light or dark; the
light ones where there is none. Series differ by dash or marker too, not by colour alone. Values that are not finite are
left out. Large samples are thinned to what a picture can show, and keep their extremes.

matplotlib is imported when a chart is drawn, and none of its global state is used or changed.
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
"""Two values and a label, which may be empty."""
Axes = Any
"""``matplotlib.axes.Axes``. Its type annotations differ between the supported versions."""

SERIES_COLOURS: Final = (
    ("#1b7a68", "#5fcfb4"),
    ("#c9591a", "#ff9d5c"),
    ("#2f6db5", "#7db8f5"),
    ("#9a4a8c", "#dc9ad0"),
    ("#8a6d00", "#e3c04a"),
    ("#6b7075", "#a5abb0"),
)
"""Colours of the series, for a light and a dark background. They are distinct with red-green colour blindness."""

_FRONT, _SOFT, _FAINT = "#1d1f21", "#62676c", "#dedbd6"
_WIDTH, _HEIGHT = 380, 250
_DASHES: Final = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1.2, 2)), (0, (9, 3)), (0, (3, 1.5)))
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_MOST_POINTS: Final = 400
_MOST_LABELS: Final = 24
_FAR, _FAR_BAR, _MANY = 4.0, 6.0, 20
"""A value this many times as large as the largest of the others does not determine the end of an axis."""
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
    """One chart, drawn on demand."""

    def __init__(self, title: str, height: float, draw: Callable[[Axes], None]) -> None:
        """Create a chart. ``draw`` fills the axes; ``height`` is in units, of which the width has 380."""
        self.title, self._height, self._draw = _printable(title), height, draw

    def svg(self) -> str:
        """An ``<svg>`` element for a page, as wide as its container, without a visible heading.

        The same data give the same text.
        """
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        out = io.StringIO()
        with _style(hashsalt=self.title):
            backend: Any = FigureCanvasSVG(self._canvas())
            backend.print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        return _inline(out.getvalue(), self.title)

    def pixels(self) -> NDArray[np.uint8]:
        """Red, green, blue and alpha, ``[height, 760, 4]``, on white, with the title above."""
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
    """Whether charts can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def _canvas(height: float) -> Any:
    """An empty ``matplotlib.figure.Figure`` in which a unit is one point."""
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
    """Set matplotlib's settings for a chart inside the block."""
    import matplotlib

    settings: Any = _STYLE | {"svg.hashsalt": hashsalt}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about glyphs that its font lacks; browsers use other fonts
        yield


def write_png(path: Path, figures: Sequence[Figure]) -> None:
    """One picture with all charts below each other, 760 pixels wide, on white.

    Raises ConfigError when ``path`` cannot be written, ValueError without a chart.
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
    """Chart of the share of each sample at or below a value, in %, with dots at the median and the 99th percentile."""
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
    """Chart of the share of each sample in ranges of values, in %; all samples have the same ranges."""
    data = {name: _finite(values) for name, values in samples.items()}
    least = min((len(values) for values in data.values() if len(values)), default=1)
    bins = round(min(36, max(10, 2.5 * least ** (1 / 3))))  # few values in many ranges would draw chance

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
    """Each series, ``(x, y)`` in the order given, as a line; with ``step`` a value holds until the next."""
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
    """Points ``(x, y, label)``.

    Points of the series in ``connect`` (True: of all series) are joined in order; points of the series in ``hollow``
    are outlines. Labels are omitted where they would overlap, and for series with many points.
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
    """A lying bar for each value, with the number at its end: ``values[name][i]`` belongs to ``groups[i]``.

    A value that is not finite has no bar. Raises ValueError when a series has not one value per group.
    """
    for name, row in values.items():
        if len(row) != len(groups):
            raise ValueError(f"{name!r} has {len(row)} values for {len(groups)} groups")
    data = {name: np.array(row, dtype=float) for name, row in values.items()}
    known = _finite([value for row in values.values() for value in row])
    least, most = known.min(initial=0.0), known.max(initial=0.0)
    end = most if least < 0 else _end_of_axis(known, far=_FAR_BAR, fewest=3)
    room = (end - least) or 1.0

    def draw(axes: Axes) -> None:
        entries: dict[str, Any] = {}
        thickness = 0.78 / max(1, len(data))
        for place, (name, row, colour, _, _) in enumerate(_series(data)):
            at = np.arange(len(groups)) + (place - (len(data) - 1) / 2) * thickness
            shown = np.minimum(np.where(np.isfinite(row), row, 0), 1.02 * end)
            entries[name] = axes.barh(at, shown, 0.86 * thickness, color=colour)[0]
            for y, value in zip(at.tolist(), row.tolist(), strict=True):
                if math.isfinite(value):
                    text = _short(value) if value <= end else f"▸ {_short(value)}"  # the bar continues beyond the chart
                    axes.text(max(0.0, min(value, 1.02 * end)) + 0.015 * room, y, text, va="center", fontsize=10)
        axes.set_yticks(range(len(groups)), [textwrap.fill(_printable(group, 48), 18) for group in groups])
        axes.set_ylim(max(1, len(groups)) - 0.45, -0.55)
        axes.set_xlim(least - (0.04 * room if least < 0 else 0), end + (0.17 if end == most else 0.24) * room)
        axes.tick_params(axis="x", length=0)
        _finish(axes, entries if len(known) else {}, "", y_label, lying=True)

    return Figure(title, 84 + max(1, len(groups)) * max(24.0, 16.0 * len(data) + 8), draw)


# --- what they share -------------------------------------------------------------------------------------------------


def _series(data: Mapping[str, Values]) -> Iterator[tuple[str, Values, str, Any, str]]:
    """Name, values, colour, dash and marker of the series that have values."""
    for place, (name, values) in enumerate(data.items()):
        if len(values):
            look = (place + place // len(SERIES_COLOURS)) % len(_DASHES)  # another where colours come again
            yield name, values, SERIES_COLOURS[place % len(SERIES_COLOURS)][0], _DASHES[look], _MARKERS[look]


def _finish(axes: Axes, entries: Mapping[str, Any], x_label: str, y_label: str, *, lying: bool = False) -> None:
    """Labels, numbers, grid and, for more than one series, a legend. The vertical axis is named above it, lying."""
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
    """Limits of the horizontal axis: logarithmic if requested and no value is negative; zeros come before it."""
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
    """The vertical axis from zero, where nothing is below it: differences must not look larger than they are."""
    if all(values[:, 1].min(initial=0) >= 0 for values in data.values()):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # points that are nearly alike have no margin of their own


def _end_of_axis(values: Values, far: float, fewest: int) -> float:
    """End of an axis: the largest value, or less if a few values are ``far`` times the largest of the others.

    At most one value in twenty may be outside, or one of ``fewest`` and more values.
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
    """End the axes before a few values that are so far that all others would collapse to a line; label their number."""
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
        most = everything[beyond].max(axis=0)
        where = f"up to {_short(most[1])}" if not across else f"up to {_short(most[0])} across, {_short(most[1])} up"
        text = f"{int(beyond.sum())} more beyond, {where}"
        axes.text(1, 1.005, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9.5, color=_SOFT)


def _label(axes: Axes, labels: Iterable[Point], data: Mapping[str, Values], joined: Collection[str]) -> None:
    """Write each text beside its point where it overlaps no point, line or other text; otherwise omit it."""
    axes.get_figure().draw_without_rendering()  # only now it is known where things are
    taken: list[tuple[float, ...]] = []
    for name, values in data.items():
        points = axes.transData.transform(values) / 2
        taken += [(x - 4, y - 4, x + 4, y + 4) for x, y in points.tolist()]
        if name in joined:
            along = [np.linspace(one, other, 30) for one, other in itertools.pairwise(points)]
            taken += [(x - 1, y - 1, x + 1, y + 1) for piece in along for x, y in piece.tolist()]
    left, bottom, right, top = (axes.bbox.extents / 2).tolist()
    for x, y, text in labels:
        shown = _printable(text, 30)
        px, py = (axes.transData.transform((x, y)) / 2).tolist()
        width = 5.6 * len(shown)
        for across, dy in itertools.product((5, -width / 2, -width - 5), (-4, 5, -14)):
            dx = across + (math.copysign(2, across) if dy == -4 else 0)
            box = (px + dx, py + dy, px + dx + width, py + dy + 9)
            inside = left <= box[0] and box[2] <= right and bottom <= box[1] and box[3] <= top
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                axes.annotate(shown, (x, y), (dx, dy), textcoords="offset points", fontsize=9.5, color=_SOFT)
                break


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _finite(values: Sequence[float]) -> Values:
    array: Values = np.asarray(values, dtype=np.float64).reshape(-1)
    return array[np.isfinite(array)]


def _points(pairs: Iterable[tuple[float, float]]) -> Values:
    """``[n, 2]``, without those that are not finite."""
    array = np.array(list(pairs), dtype=np.float64).reshape(-1, 2)
    return array[np.isfinite(array).all(axis=1)]


def _ranks(count: int) -> NDArray[np.int64]:
    """Ranks of a sorted sample that draw its curve: evenly, and closer together near the upper end."""
    if count <= _MOST_POINTS:
        return np.arange(count)
    evenly = np.linspace(0, count - 1, _MOST_POINTS)
    tail = count - np.geomspace(1, count, _MOST_POINTS // 4)
    return np.unique(np.r_[evenly, tail].astype(np.int64))


def _thin(points: Values, series: int) -> Values:
    """Points of a line to draw: the first, the last, and the lowest and highest of every stretch. No spike is lost."""
    most = max(50, _MOST_POINTS * 6 // max(6, series))
    if len(points) <= most:
        return points
    stretches = np.array_split(np.arange(len(points)), most // 2)
    kept = [stretch[[points[stretch, 1].argmin(), points[stretch, 1].argmax()]] for stretch in stretches]
    ranks: NDArray[np.int64] = np.unique(np.concatenate([np.array([0, len(points) - 1]), *kept]))
    return points[ranks]


def _spread(points: Values, series: int) -> Values:
    """One point of every small cell of the picture that has any, so that no outlier is lost."""
    if len(points) <= _MOST_POINTS // max(1, series):
        return points
    cells = math.isqrt(_MOST_POINTS * 3 // max(1, series))
    low, high = points.min(axis=0), points.max(axis=0)
    cell = ((points - low) / np.where(high > low, high - low, 1) * cells).astype(np.int64)
    return points[np.sort(np.unique(cell, axis=0, return_index=True)[1])]


def _edges(values: Values, log: bool, bins: int) -> Values:
    """Borders of the ranges of a histogram; between whole numbers where all values are whole."""
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
    """A number in a few characters: 0, 0.004, 12.5, 1,200, 15k, 3.2M."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1000 if suffix == 'k' else unit):,.4g}{suffix}".replace("-", "−")
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"
    return text.replace("-", "−")


def _printable(text: str, most: int = 200) -> str:
    """On one line, not too long, and without characters that a page must not contain."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _inline(document: str, title: str) -> str:
    """The ``<svg>`` element of a document: no fixed size, named, in the colours of the page, few digits, no names that
    another chart has too."""
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
    for place, (light, _) in enumerate(SERIES_COLOURS):
        drawing = drawing.replace(light, f"var(--series-{place}, {light})")
    shape = box[0] if box else ""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="100%" {shape} stroke-linejoin="round">'
    return f"{opening}<title>{html.escape(title)}</title>{drawing}"


_DIGITS: Final = re.compile(r"(\.\d\d)\d+")
