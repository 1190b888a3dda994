"""Strict parser for the part of PromQL that the alerts and the dashboard use. Unknown syntax is an error.

``parse`` returns a tree. ``labels_of`` computes the labels of the result's series. It refuses expressions that
Prometheus accepts but whose result is empty or meaningless: a rate of a gauge, a level of a counter, operands with
different labels, quantiles without ``le``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

__all__ = ["Exposed", "Node", "PromqlError", "Selector", "labels_of", "parse", "selectors"]

_TOKEN = re.compile(
    r"\s*(?:(?P<range>\[(?:\d+(?:ms|[smhd]))+\])|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    r"|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<string>\"[^\"\\]*\"|'[^'\\]*')"
    r"|(?P<op>==|!=|>=|<=|=~|!~|[-+*/%^<>=(){},]))"
)
_LEVELS = (("or",), ("and", "unless"), ("==", "!=", ">", "<", ">=", "<="), ("+", "-"), ("*", "/", "%"), ("^",))
_SETS = ("or", "and", "unless")
_AGGREGATES = ("sum", "min", "max", "avg", "count")
_OVER_COUNTERS = ("rate", "increase")
_OVER_GAUGES = ("avg_over_time", "min_over_time", "max_over_time")
_TARGET = frozenset({"job", "instance"})


class PromqlError(ValueError):
    """Raised for an expression that is outside the supported part of PromQL, or has no meaning."""


@dataclasses.dataclass(frozen=True)
class Selector:
    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    is_range: bool


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    args: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Aggregate:
    by: frozenset[str]
    of: Node


@dataclasses.dataclass(frozen=True)
class Binary:
    operator: str
    ignoring: frozenset[str]
    left: Node
    right: Node


Node = Selector | Call | Aggregate | Binary | float


@dataclasses.dataclass(frozen=True)
class Exposed:
    """One series of ``/metrics``."""

    kind: str
    """Type of the series: counter, gauge or histogram."""
    labels: Mapping[str, frozenset[str]]
    """Label name -> its values, without the labels that Prometheus adds."""


def parse(text: str) -> Node:
    """Syntax tree of an expression. Raises PromqlError."""
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise PromqlError(f"cannot read {text[position:].strip()[:30]!r}")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        position = match.end()
    parser = _Parser(tokens)
    node = parser.binary(0)
    if parser.peek != ("end", ""):
        raise PromqlError(f"{parser.peek[1]!r} stands where nothing can")
    return node


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._next = 0

    @property
    def peek(self) -> tuple[str, str]:
        return self._tokens[self._next]

    def take(self, kind: str, *texts: str) -> str:
        found, text = self.peek
        if found != kind or (texts and text not in texts):
            raise PromqlError(f"expected {' or '.join(texts) or kind}, found {text or 'the end'!r}")
        self._next += 1
        return text

    def skip(self, kind: str, text: str) -> bool:
        if self.peek != (kind, text):
            return False
        self._next += 1
        return True

    def binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self.primary()
        left = self.binary(level + 1)
        while self.peek[0] in ("op", "name") and self.peek[1] in _LEVELS[level]:
            operator = self.take(self.peek[0])
            ignoring = self.names() if self.skip("name", "ignoring") else frozenset()
            left = Binary(operator, ignoring, left, self.binary(level + 1))
        return left

    def primary(self) -> Node:
        if self.peek[0] == "number":
            return float(self.take("number"))
        if self.skip("op", "("):
            node = self.binary(0)
            self.take("op", ")")
            return node
        name = self.take("name")
        if name in _AGGREGATES:
            by = self.names() if self.skip("name", "by") else frozenset()
            self.take("op", "(")
            node = self.binary(0)
            self.take("op", ")")
            return Aggregate(by, node)
        return self.call(name) if self.peek == ("op", "(") else self.selector(name)

    def names(self) -> frozenset[str]:
        self.take("op", "(")
        names = [self.take("name")]
        while self.skip("op", ","):
            names.append(self.take("name"))
        self.take("op", ")")
        return frozenset(names)

    def call(self, name: str) -> Node:
        self.take("op", "(")
        args = [] if self.peek == ("op", ")") else [self.binary(0)]
        while self.skip("op", ","):
            args.append(self.binary(0))
        self.take("op", ")")
        return Call(name, tuple(args))

    def selector(self, metric: str) -> Node:
        matchers = []
        if self.skip("op", "{"):
            while True:
                matchers.append((self.take("name"), self.take("op", "=", "!=", "=~", "!~"), self.take("string")[1:-1]))
                if self.take("op", ",", "}") == "}":
                    break
        is_range = self.peek[0] == "range"
        if is_range:
            self.take("range")
        return Selector(metric, tuple(matchers), is_range)


def selectors(node: Node) -> Iterator[Selector]:
    """Yield every selector in the syntax tree ``node``."""
    match node:
        case Selector():
            yield node
        case Call(_, args):
            for arg in args:
                yield from selectors(arg)
        case Aggregate(_, of):
            yield from selectors(of)
        case Binary(_, _, left, right):
            yield from selectors(left)
            yield from selectors(right)


def labels_of(node: Node, exposed: Mapping[str, Exposed], inside: str = "") -> frozenset[str] | None:
    """Names of the labels that the result of the expression ``node`` has; None if the result is a plain number.
    ``inside`` is the name of the function that encloses the node."""
    match node:
        case Selector():
            return _labels_of_selector(node, exposed, inside)
        case Call("time", ()):
            return None
        case Call("histogram_quantile", (float(), buckets)):
            labels = labels_of(buckets, exposed)
            if labels is None or "le" not in labels:
                raise PromqlError("quantiles need buckets with their le")
            return labels - {"le"}
        case Call(name, (argument,)) if name in (*_OVER_COUNTERS, *_OVER_GAUGES) and isinstance(argument, Selector):
            return labels_of(argument, exposed, name)
        case Call(name, args):
            raise PromqlError(f"{name} with {len(args)} arguments of this kind is not known")
        case Aggregate(by, of):
            labels = labels_of(of, exposed)
            if labels is None or not by <= labels:
                raise PromqlError(f"cannot aggregate by {sorted(by)}: there are {sorted(labels or ())}")
            return by
        case Binary():
            return _labels_of_binary(node, exposed)
    return None


def _labels_of_selector(node: Selector, exposed: Mapping[str, Exposed], inside: str) -> frozenset[str]:
    metric = exposed.get(node.metric)
    if metric is None:
        raise PromqlError(f"there is no series {node.metric}")
    if node.is_range is not bool(inside):
        raise PromqlError(f"{node.metric} must have a range inside a function over time, and only there")
    if (metric.kind == "gauge") is (inside in _OVER_COUNTERS):
        raise PromqlError(f"{node.metric} is a {metric.kind}, and that is not for {inside or 'reading as it is'}")
    for label, _, pattern in node.matchers:
        if label in _TARGET:
            continue
        values = metric.labels.get(label, frozenset())
        unknown = [each for each in pattern.split("|") if not any(re.fullmatch(each, value) for value in values)]
        if unknown:
            raise PromqlError(f"{node.metric} has no {label} {unknown}, but {sorted(values)}")
    return frozenset(metric.labels) | _TARGET


def _labels_of_binary(node: Binary, exposed: Mapping[str, Exposed]) -> frozenset[str] | None:
    left, right = labels_of(node.left, exposed), labels_of(node.right, exposed)
    if left is None or right is None:
        if node.operator in _SETS:
            raise PromqlError(f"{node.operator} is for series, not for numbers")
        return right if left is None else left
    if left - node.ignoring != right - node.ignoring or not node.ignoring <= left | right:
        raise PromqlError(f"{node.operator} between series by {sorted(left)} and by {sorted(right)} matches nothing")
    return left if node.operator in _SETS else left - node.ignoring
