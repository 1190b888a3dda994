"""Charts show what they were given, whatever that is, and fit into a page."""

from __future__ import annotations

import math
import re
import resource
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import plot_scheduling
from chairlift.errors import ConfigError
from chairlift_lab.bench.plots import (
    SERIES_COLOURS,
    Figure,
    _end_of_axis,
    bars,
    cdf,
    histogram,
    lines,
    scatter,
    write_svg,
)
from chairlift_lab.bench.svg_chart import Box, Dots, Line, Look, Scale, Whisker

MOST_BYTES = 200_000
SVG = "{http://www.w3.org/2000/svg}"


def parsed(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(figure.svg())


def texts(figure: Figure) -> list[str]:
    return ["".join(each.itertext()).strip() for each in parsed(figure).iter("{http://www.w3.org/2000/svg}text")]


def marks(figure: Figure, kind: type[Any]) -> list[Any]:
    """The marks of one kind, in the order in which they are drawn."""
    return [mark for mark in figure.axes.marks if isinstance(mark, kind)]


def each_kind(values: list[float]) -> list[Figure]:
    """Every chart there is, of the same values."""
    names = {"title": "t", "x_label": "x"}
    pairs = list(zip(range(len(values)), values, strict=True))
    return [
        cdf({"a": values}, **names),
        histogram({"a": values}, **names),
        histogram({"a": values}, log_x=True, **names),
        lines({"a": (range(len(values)), values)}, y_label="y", step=True, **names),
        scatter({"a": [(y, x, "p") for x, y in pairs]}, y_label="y", connect=True, **names),
        bars([str(x) for x, _ in pairs], {"a": values}, title="t", y_label="y"),
    ]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.0],
        [5.0, 5.0, 5.0],
        [0.0, 0.0, 3.0, 900.0],
        [-2.0, 0.0, 4.0],
        [1e-9, 1e12],
        [float("nan"), float("inf"), 2.0],
        [1.7e308],
        [-1.7e308, 1.7e308],
        [5e-324],
        [0.0, 5e-324, 1.7e308],
        [1e16, 1e16 + 2],
        [1_000_000.1, 1_000_000.2],
    ],
    ids=str,
)
def test_any_values_make_a_drawing(values: list[float]) -> None:
    for figure in each_kind(values):
        assert ("no data" in texts(figure)) == (not any(map(np.isfinite, values)))
        numbers = re.findall(r'(?:x|y|width|height|points|d)="([^"]*)"', figure.svg())
        assert not [text for text in numbers if "nan" in text or "inf" in text]


def test_no_series_make_a_drawing_too() -> None:
    empty = [
        cdf({}, title="t", x_label="x"),
        histogram({}, title="t", x_label="x", log_x=True),
        lines({}, title="t", x_label="x", y_label="y"),
        scatter({}, title="t", x_label="x", y_label="y"),
        bars([], {}, title="t", y_label="y"),
    ]
    assert all("no data" in texts(figure) for figure in empty)


@pytest.mark.full
def test_many_points_make_a_small_file() -> None:
    generator = np.random.default_rng(0)
    values = [(generator.lognormal(size=100_000) + place).tolist() for place in range(3)]
    names = {"title": "t", "x_label": "x"}
    for figure in (
        cdf({str(place): each for place, each in enumerate(values)}, **names),
        histogram({str(place): each for place, each in enumerate(values)}, **names),
        lines({str(place): (range(100_000), each) for place, each in enumerate(values)}, y_label="y", **names),
        scatter(
            {str(i): [(x, y, "label") for x, y in zip(values[i], values[i - 1], strict=True)] for i in range(3)},
            y_label="y",
            **names,
        ),
    ):
        assert len(figure.svg()) < MOST_BYTES


def test_a_drawing_for_a_page_scales_and_has_a_title() -> None:
    figure = cdf({"one": [1, 2, 3], "other": [2, 3, 4]}, title="Latency", x_label="ms")
    drawing, svg = parsed(figure), figure.svg()
    assert svg.startswith("<svg ") and svg == figure.svg()
    assert drawing.get("width") == "100%" and drawing.get("height") is None
    assert drawing.get("role") == "img" and drawing.find("{http://www.w3.org/2000/svg}title").text == "Latency"  # type: ignore[union-attr]
    assert not re.search(r"(?:href|src)=\"(?!#)|url\((?!#)|<script|<style|<image", svg)
    assert "Latency" not in texts(figure), "the heading is the page's"
    assert {"one", "other", "ms"} <= set(texts(figure)), "text stays text"
    assert svg.count("currentColor") and "var(--series-0, " in svg and "var(--series-1, " in svg


def test_drawings_of_one_page_do_not_share_names() -> None:
    """A name twice in a page would make a drawing refer to another's parts."""
    first, second = (cdf({"a": [1, 2, 3]}, title=title, x_label="x") for title in ("first", "second"))
    names = [set(re.findall(r' id="([^"]*)"', figure.svg())) for figure in (first, second)]
    assert names[0] and not names[0] & names[1]


HOSTILE = [
    "<script>alert(1)</script>",
    "a & b",
    "$x^2$",
    "_hidden",
    "nul \x00 escape \x1b line \n",
    'quo"te',
    "長い" * 200,
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_are_only_text(name: str) -> None:
    for figure in (
        bars([name, "other"], {name: [1, 2], "other": [2, 3]}, title=name, y_label=name),
        scatter({name: [(1, 2, name)], "other": [(2, 3, "")]}, title=name, x_label=name, y_label=name),
    ):
        shown = "".join(character if character.isprintable() else " " for character in name)[:20]
        assert "".join(shown.split()) in "".join("".join(texts(figure)).split())


def test_curve_is_the_share_at_or_below() -> None:
    sample = np.random.default_rng(1).lognormal(3, 1, 50_000)
    figure = cdf({"a": sample.tolist()}, title="t", x_label="x")
    (curve,), (dots,) = marks(figure, Line), marks(figure, Dots)
    x, y = curve.points[::2].T  # between two of these points is the corner of a step
    at = np.searchsorted(np.sort(sample), x, side="right") / len(sample) * 100
    assert np.abs(at[1:] - y[1:]).max() < 1e-9
    assert x[-1] == sample.max() and y[-1] == 100
    assert dots.points[:, 0] == pytest.approx(np.percentile(sample, [50, 99]))


def test_zeros_keep_their_share_on_a_logarithmic_axis() -> None:
    figure = cdf({"a": [0, 0, 0, 10]}, title="t", x_label="x")
    x, y = marks(figure, Line)[0].points.T
    assert y[x == 0].max() == 75
    assert figure.axes.x.low <= 0 and figure.axes.x.high >= 10


def test_histogram_counts_everything_once() -> None:
    generator = np.random.default_rng(2)
    samples = {"a": generator.integers(0, 3000, 5000).tolist(), "b": generator.lognormal(4, 1, 300).round().tolist()}
    for log_x in (False, True):
        boxes = [mark.corners for mark in marks(histogram(samples, title="t", x_label="x", log_x=log_x), Box)]
        half = len(boxes) // 2
        assert [sum(top for *_, top in part) for part in (boxes[:half], boxes[half:])] == pytest.approx([100, 100])
        edges = np.array([boxes[0][0], *(end for _, _, end, _ in boxes[:half])])
        assert (np.diff(edges) > 0).all() and not np.isin(edges[1:], np.arange(5000)).any(), (
            "borders lie between lengths"
        )


def test_spikes_and_outliers_survive_thinning() -> None:
    values = np.zeros(100_000)
    values[54_321] = 9
    (curve,) = marks(lines({"a": (range(100_000), values.tolist())}, title="t", x_label="x", y_label="y"), Line)
    assert (54_321, 9) in set(map(tuple, curve.points.tolist())) and len(curve.points) < 1000
    cloud = [(x, 0.0, "") for x in np.random.default_rng(3).normal(size=10_000)] + [(40.0, 40.0, "far")]
    (dots,) = marks(scatter({"a": cloud}, title="t", x_label="x", y_label="y"), Dots)
    assert (40, 40) in set(map(tuple, dots.points.tolist())) and len(dots.points) < 2000


def test_points_are_joined_hollow_and_labelled_as_asked() -> None:
    cloud = [(float(i % 9), float(i // 9), f"no {i}") for i in range(60)]
    figure = scatter(
        {"simulated": cloud, "real": [(4.5, 2.5, "chosen")], "front": [(1, 1, ""), (2, 2, "")]},
        title="t",
        x_label="x",
        y_label="y",
        connect=["front"],
        hollow=["simulated"],
    )
    simulated, real, front = marks(figure, Dots)
    assert [line.look for line in marks(figure, Line)] == [front.look]
    assert simulated.hollow and not real.hollow
    assert "chosen" in texts(figure) and "no 3" not in texts(figure)


def test_labels_do_not_cover_each_other() -> None:
    close = [(i * 1e-4, 1.0, f"label {i}") for i in range(12)]
    figure = scatter({"a": [*close, (1, 2, "alone")]}, title="t", x_label="x", y_label="y")
    shown = [text for text in texts(figure) if text.startswith("label") or text == "alone"]
    assert "alone" in shown and 1 < len(shown) < 9


def test_bars_carry_their_numbers() -> None:
    figure = bars(["a", "b"], {"one": [12_345, float("nan")], "two": [0.004, -1500]}, title="t", y_label="y")
    assert {"12.35k", "0.004", "−1,500"} <= set(texts(figure))
    with pytest.raises(ValueError, match="'one' has 1 values for 2 groups"):
        bars(["a", "b"], {"one": [1]}, title="t", y_label="y")


def test_vertical_axes_start_at_zero_unless_something_is_below() -> None:
    for values, least in (([100.0, 101.0], 0), ([-5.0, 5.0], -5)):
        scale = lines({"a": ([1, 2], values)}, title="t", x_label="x", y_label="y").axes.y
        assert scale.low == 0 if least == 0 else scale.low <= least


def test_points_that_are_nearly_alike_are_drawn_whole() -> None:
    """Half of a marker's height is 1 % of the picture's."""
    scale = scatter({"a": [(30, 378, "one"), (32, 349, "two")]}, title="t", x_label="x", y_label="y").axes.y
    assert scale.low == 0
    assert scale.high > 1.02 * 378


def test_a_file_has_the_charts_in_rows(tmp_path: Path) -> None:
    figures = [cdf({"a": [1, 2]}, title=title, x_label="x") for title in ("one", "two", "three")]
    write_svg(tmp_path / "three.svg", figures, columns=2)
    drawing = ElementTree.parse(tmp_path / "three.svg").getroot()
    places = [(part.get("x"), part.get("y")) for part in drawing.findall(SVG + "svg")]
    assert len(set(places)) == 3 and places[0][0] == places[2][0] != places[1][0]
    assert [text.text for text in drawing.findall(SVG + "text")] == ["one", "two", "three"]


def test_a_file_has_all_colours_for_light_and_dark(tmp_path: Path) -> None:
    write_svg(tmp_path / "one.svg", [cdf({str(place): [1, 2] for place in range(9)}, title="t", x_label="x")])
    light, dark = (ElementTree.parse(tmp_path / "one.svg").findtext(SVG + "style") or "").split("@media")
    named = set(re.findall(r"var\((--[a-z0-9-]+)", (tmp_path / "one.svg").read_text()))
    assert "prefers-color-scheme:dark" in dark
    assert len(named) == 9
    assert named == set(re.findall(r"(--[a-z0-9-]+):", light)) == set(re.findall(r"(--[a-z0-9-]+):", dark))


def test_series_that_share_a_colour_differ_in_dash_and_marker() -> None:
    assert len({(Look(place).colour, Look(place).shape) for place in range(36)}) == 36


def test_a_file_replaces_what_was_there_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        with pytest.raises(ConfigError, match="File too large"):
            write_svg(path, [cdf({"a": [1, 2]}, title="t", x_label="x")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*no/chart\.svg: No such file"):
        write_svg(tmp_path / "no" / "chart.svg", [cdf({}, title="t", x_label="x")])


@pytest.mark.parametrize("values", [[4.0], [4.0, 4.0, 4.0], [1e-300, 2e-300], [1e300, 3e300], [1.0, math.nan, 3.0]])
def test_each_finite_value_has_one_mark(values: list[float]) -> None:
    finite = sum(map(math.isfinite, values))
    places = [float(place) for place in range(len(values))]
    names = {"title": "t", "x_label": "x", "y_label": "y"}
    beams = bars([str(place) for place in places], {"a": values}, title="t", y_label="y")
    inside = parsed(beams).find(f"{SVG}g")
    assert inside is not None and len(inside.findall(SVG + "rect")) == finite
    for figure in (
        lines({"a": (places, values)}, **names),
        scatter({"a": [(x, y, "") for x, y in zip(places, values, strict=True)]}, **names),
    ):
        assert len([path for path in parsed(figure).iter(SVG + "path") if "a2.5" in path.get("d", "")]) == finite


def test_error_bars_reach_from_end_to_end_inside_the_axes() -> None:
    beams = bars(["a", "b"], {"s": [1.0, 2.0]}, title="t", y_label="y", intervals={"s": [(0.5, 9.0), (2.0, math.nan)]})
    curve = lines({"s": ([1, 2], [1, 2])}, title="t", x_label="x", y_label="y", intervals={"s": [(0, 8), (2, 2)]})
    assert [mark.ends for mark in marks(beams, Whisker)] == [(0.5, 0.0, 9.0, 0.0)]
    assert [mark.ends for mark in marks(curve, Whisker)] == [(1, 0, 1, 8), (2, 2, 2, 2)]
    assert beams.axes.x.high > 9 and curve.axes.y.high > 8


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 12, [0, 2.5, 5, 7.5, 10]),
        (-3, 7, [-2, 0, 2, 4, 6]),
        (990, 1010, [990, 995, 1000, 1005, 1010]),
        (0, 5e-310, [0, 1e-310, 2e-310, 3e-310, 4e-310, 5e-310]),
    ],
)
def test_ticks_are_round_values_on_the_axis(low: float, high: float, expected: list[float]) -> None:
    assert Scale(low, high).ticks(5) == pytest.approx(expected, rel=1e-9, abs=0)


def test_ticks_of_logarithmic_axes_are_round() -> None:
    assert Scale(0.5, 20, "log").ticks(6) == [0.5, 1, 2, 5, 10, 20]
    assert Scale(1, 1e6, "log").ticks(7) == [10**power for power in range(7)]
    assert Scale(1e-300, 1e300, "log").ticks(5)[-1] == 1e300
    assert Scale(0, 500, "zero_log", 3.0).ticks(5) == [0, 10, 100]


def test_numbers_of_close_ticks_differ() -> None:
    shown = texts(lines({"a": ([0, 1], [-1e6 - 3, -1e6 + 3])}, title="t", x_label="x", y_label="y"))
    numbers = [text for text in shown if text.startswith("−1") or text.startswith("−9")]
    assert len(numbers) == len(set(numbers)) > 2


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("ground", ["#ffffff", "#202225"])
def test_series_stand_out_from_the_ground(ground: str) -> None:
    """3:1 is what the Web Content Accessibility Guidelines ask of graphics."""
    for pair in SERIES_COLOURS:
        one, other = sorted((luminance(pair[ground != "#ffffff"]), luminance(ground)))
        assert (other + 0.05) / (one + 0.05) >= 3, pair


def test_one_outlier_does_not_flatten_a_bar_chart() -> None:
    shown = texts(bars(["a", "b", "c"], {"x": [10.0, 12.0, 4000.0]}, title="t", y_label="y"))
    assert "▸ 4,000" in shown, "its bar is cut, and its number says so"
    assert not [text for text in shown if text in ("2,000", "3,000")], "the axis is that of the others"
    alike = texts(bars(["a", "b", "c"], {"x": [10.0, 12.0, 40.0]}, title="t", y_label="y"))
    assert "40" in alike
    assert not [text for text in alike if "▸" in text]


@pytest.mark.parametrize("kind", [lines, scatter])
def test_one_outlier_does_not_flatten_a_chart_of_points(kind: Any) -> None:
    x, y = [float(place) for place in range(30)], [5.0 + place % 3 for place in range(30)]

    def chart(last: float) -> Figure:
        series = (
            (x, [*y[:-1], last]) if kind is lines else [(a, b, "") for a, b in zip(x, [*y[:-1], last], strict=True)]
        )
        return kind({"a": series}, title="t", x_label="x", y_label="y")

    shown = texts(chart(9000.0))
    assert any(text.startswith("1 more beyond, up to") and "9,000" in text for text in shown)
    assert "6" in shown
    assert not any("beyond" in text for text in texts(chart(12.0)))


def test_many_far_values_are_no_outliers() -> None:
    ends = [
        _end_of_axis(np.array(values, float), far=4.0, fewest=3)
        for values in ([1, 2, 3, 50], [1, 2, 50, 60], [1, 90], [])
    ]
    assert ends == [3, 60, 90, 0]


def test_the_picture_of_the_scheduling_measurements_is_that_of_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[3]
    records = [str(root / "benchmarks/results" / name) for name in ("scheduling.json", "scheduling-15m.json")]
    monkeypatch.setattr("sys.argv", ["plot_scheduling.py", *records, "--svg", str(tmp_path / "new.svg")])
    plot_scheduling.main()
    assert (tmp_path / "new.svg").read_text() == (root / "docs/scheduling.svg").read_text()
