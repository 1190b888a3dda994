"""Charts show what they were given, whatever that is, and fit into a page."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.workbench.bench.plots import (
    SERIES_COLOURS,
    Figure,
    _end_of_axis,
    _series,
    bars,
    cdf,
    histogram,
    lines,
    scatter,
    write_png,
)

MOST_BYTES = 200_000


def parsed(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(figure.svg())


def texts(figure: Figure) -> list[str]:
    return ["".join(each.itertext()).strip() for each in parsed(figure).iter("{http://www.w3.org/2000/svg}text")]


def axes(figure: Figure) -> Any:
    return figure._canvas().axes[0]


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
    ],
    ids=str,
)
def test_any_values_make_a_drawing(values: list[float]) -> None:
    for figure in each_kind(values):
        assert ("no data" in texts(figure)) == (not any(map(np.isfinite, values)))


def test_no_series_make_a_drawing_too() -> None:
    empty = [
        cdf({}, title="t", x_label="x"),
        histogram({}, title="t", x_label="x", log_x=True),
        lines({}, title="t", x_label="x", y_label="y"),
        scatter({}, title="t", x_label="x", y_label="y"),
        bars([], {}, title="t", y_label="y"),
    ]
    assert all("no data" in texts(figure) for figure in empty)


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


def test_what_a_drawing_is_for_a_page() -> None:
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
    assert cdf({name: [1]}, title=name, x_label=name).pixels().shape[1] == 760


def test_curve_is_the_share_at_or_below() -> None:
    sample = np.random.default_rng(1).lognormal(3, 1, 50_000)
    curve, dots = axes(cdf({"a": sample.tolist()}, title="t", x_label="x")).lines
    x, y = curve.get_data()
    at = np.searchsorted(np.sort(sample), x, side="right") / len(sample) * 100
    assert np.abs(at[1:] - y[1:]).max() < 1e-9
    assert x[-1] == sample.max() and y[-1] == 100
    assert dots.get_xdata() == pytest.approx(np.percentile(sample, [50, 99]))


def test_zeros_keep_their_share_on_a_logarithmic_axis() -> None:
    figure = axes(cdf({"a": [0, 0, 0, 10]}, title="t", x_label="x"))
    x, y = figure.lines[0].get_data()
    assert y[x == 0].max() == 75
    low, high = figure.get_xlim()
    assert low <= 0 and high >= 10


def test_histogram_counts_everything_once() -> None:
    generator = np.random.default_rng(2)
    samples = {"a": generator.integers(0, 3000, 5000).tolist(), "b": generator.lognormal(4, 1, 300).round().tolist()}
    for log_x in (False, True):
        steps = [
            patch for patch in axes(histogram(samples, title="t", x_label="x", log_x=log_x)).patches if not patch.fill
        ]
        assert [patch.get_data().values.sum() for patch in steps] == pytest.approx([100, 100])
        edges = steps[0].get_data().edges
        assert (np.diff(edges) > 0).all() and not np.isin(edges[1:], np.arange(5000)).any(), (
            "borders lie between lengths"
        )


def test_spikes_and_outliers_survive_thinning() -> None:
    values = np.zeros(100_000)
    values[54_321] = 9
    curve = axes(lines({"a": (range(100_000), values.tolist())}, title="t", x_label="x", y_label="y")).lines[0]
    assert (54_321, 9) in set(zip(*curve.get_data(), strict=True)) and len(curve.get_xdata()) < 1000
    cloud = [(x, 0.0, "") for x in np.random.default_rng(3).normal(size=10_000)] + [(40.0, 40.0, "far")]
    points = axes(scatter({"a": cloud}, title="t", x_label="x", y_label="y")).lines[0]
    assert (40, 40) in set(zip(*points.get_data(), strict=True)) and len(points.get_xdata()) < 2000


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
    simulated, real, front = axes(figure).lines
    assert [line.get_linestyle() != "None" for line in (simulated, real, front)] == [False, False, True]
    assert simulated.get_markerfacecolor() == "none" != real.get_markerfacecolor()
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
        figure = axes(lines({"a": ([1, 2], values)}, title="t", x_label="x", y_label="y"))
        assert figure.get_ylim()[0] == 0 if least == 0 else figure.get_ylim()[0] <= least


def test_points_that_are_nearly_alike_are_drawn_whole() -> None:
    """Half of a marker's height is 1 % of the picture's."""
    figure = axes(scatter({"a": [(30, 378, "one"), (32, 349, "two")]}, title="t", x_label="x", y_label="y"))
    assert figure.get_ylim()[0] == 0
    assert figure.get_ylim()[1] > 1.02 * 378


def test_png_stacks_the_charts(tmp_path: Path) -> None:
    from matplotlib.image import imread

    figures = [cdf({"a": [1, 2]}, title="one", x_label="x"), bars(["a"], {"b": [1]}, title="two", y_label="y")]
    write_png(tmp_path / "two.png", figures)
    picture = imread(tmp_path / "two.png")
    assert picture.shape[:2] == (sum(len(figure.pixels()) for figure in figures), 760)
    assert (picture[0, 0] == 1).all(), "white"
    assert picture[:, :, :3].min() < 0.4, "something is drawn"


def test_series_that_share_a_colour_differ_in_dash_and_marker() -> None:
    looks = [look for _, _, *look in _series({str(place): np.ones(1) for place in range(36)})]
    assert [look for look in looks if looks.count(look) > 1] == []


def test_a_png_replaces_what_was_there_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(ConfigError, match="File too large"):
            write_png(path, [cdf({"a": [1, 2]}, title="t", x_label="x")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"


def test_png_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*no/chart\.png: No such file"):
        write_png(tmp_path / "no" / "chart.png", [cdf({}, title="t", x_label="x")])


def test_settings_of_others_are_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    cdf({"a": [1, 2]}, title="t", x_label="x").svg()
    assert dict(matplotlib.rcParams) == before


def test_matplotlib_comes_with_the_first_chart_and_without_pyplot() -> None:
    code = (
        "import sys, chairlift.workbench.bench.plots as plots, chairlift.workbench.bench.report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.cdf({'a': [1]}, title='t', x_label='x').svg()\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
