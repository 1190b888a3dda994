from __future__ import annotations

import pytest

from tests.deploy.promql import Aggregate, Binary, Call, Exposed, PromqlError, Selector, labels_of, parse, selectors

SERIES = {
    "level": Exposed("gauge", {"engine": frozenset("0")}),
    "size": Exposed("gauge", {}),
    "work_total": Exposed("counter", {"engine": frozenset("0"), "how": frozenset({"well", "badly"})}),
    "took_seconds_bucket": Exposed("histogram", {"engine": frozenset("0"), "le": frozenset({"1.0", "+Inf"})}),
    "took_seconds_count": Exposed("histogram", {"engine": frozenset("0")}),
}


def test_operators_bind_as_they_should() -> None:
    tree = parse("1 - a / b ^ 2 > 3 and c or d")
    assert isinstance(tree, Binary) and tree.operator == "or"
    assert isinstance(tree.left, Binary) and tree.left.operator == "and"
    comparison = tree.left.left
    assert isinstance(comparison, Binary) and comparison.operator == ">" and comparison.right == 3.0
    assert isinstance(comparison.left, Binary) and comparison.left.operator == "-"
    assert [each.metric for each in selectors(tree)] == ["a", "b", "c", "d"]


def test_parsing_gives_the_tree_of_an_expression() -> None:
    tree = parse('sum by (how, engine) (rate(work_total{how=~"well|badly", engine!="1"}[1h30m]))')
    selector = Selector("work_total", (("how", "=~", "well|badly"), ("engine", "!=", "1")), True)
    assert tree == Aggregate(frozenset({"how", "engine"}), Call("rate", (selector,)))


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("level", {"engine", "job", "instance"}),
        ("time() - size", {"job", "instance"}),
        ("sum(level)", set()),
        ("sum by (instance) (level) / sum by (instance) (rate(work_total[5m]))", {"instance"}),
        ("histogram_quantile(0.9, sum by (le, job) (rate(took_seconds_bucket[5m])))", {"job"}),
        (
            'rate(took_seconds_bucket{le="1.0"}[5m]) / ignoring (le) rate(took_seconds_count[5m])',
            {"engine", "job", "instance"},
        ),
        ("max_over_time(level[5m]) > 0 and increase(took_seconds_count[5m]) == 0", {"engine", "job", "instance"}),
    ],
)
def test_the_labels_of_a_right_expression_are_known(text: str, labels: set[str]) -> None:
    assert labels_of(parse(text), SERIES) == frozenset(labels)


@pytest.mark.parametrize(
    "text",
    [
        *("", "1 +", "(level", "level)", "level 1", "level{", "level{engine}", 'level{engine="0}', "level[5]"),
        *(
            "level[5m",
            "sum by engine (level)",
            "level / on (job) size",
            "rate(level,)",
            "level[5m] offset 5m",
            "level $x",
        ),
    ],
)
def test_malformed_expressions_are_refused(text: str) -> None:
    with pytest.raises(PromqlError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("levels", "no series"),
        ('level{engine="1"}', "has no engine"),
        ('level{how="well"}', "has no how"),
        ('rate(work_total{how=~"well|bad"}[5m])', "has no how"),
        ("rate(level[5m])", "is a gauge"),
        ("work_total", "is a counter"),
        ("max_over_time(work_total[5m])", "is a counter"),
        ("rate(work_total)", "must have a range"),
        ("level[5m]", "must have a range"),
        ("deriv(level[5m])", "not known"),
        ("histogram_quantile(0.9, sum by (job) (rate(took_seconds_bucket[5m])))", "need buckets"),
        ("sum by (how) (level)", "cannot aggregate"),
        ("level / size", "matches nothing"),
        ("rate(took_seconds_bucket[5m]) / rate(took_seconds_count[5m])", "matches nothing"),
        ("level and 1", "for series"),
    ],
)
def test_meaningless_expressions_are_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(PromqlError, match=why):
        labels_of(parse(text), SERIES)
