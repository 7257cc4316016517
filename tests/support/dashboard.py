"""The dashboard's panels and variables, and the series that their PromQL expressions read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql

FILE = Path(__file__).parents[2] / "docker" / "grafana" / "dashboards" / "vllm-sparse.json"
_VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


class Query(NamedTuple):
    """One query of a panel."""

    panel: str
    expression: str
    """PromQL with Grafana's variables replaced."""
    legend: str


class Series(NamedTuple):
    """A metric that an expression reads."""

    name: str
    labels: frozenset[str]
    """Labels that the expression requires."""


@cache
def read_dashboard() -> dict[str, Any]:
    """The dashboard file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def queries() -> list[Query]:
    """The queries of all panels, in the order of the file."""
    return [
        Query(panel["title"], _replace_variables(target["expr"]), target["legendFormat"])
        for panel in read_dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def variable_series() -> list[Series]:
    """The series of the dashboard's variables."""
    found = []
    for variable in read_dashboard()["templating"]["list"]:
        name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["definition"]).groups()
        found.append(Series(name, frozenset([label])))
    return found


def _replace_variables(expression: str) -> str:
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def series_of(expression: str) -> list[Series]:
    """The metrics that a PromQL expression reads, with the labels by which it selects or groups them."""
    return list(_series(promql.parse(expression), frozenset()))


def _series(node: Any, labels: frozenset[str]) -> Iterator[Series]:
    match node:
        case promql.VectorSelector():
            assert node.name, "a selector without a name"
            yield Series(node.name, labels | {matcher.name for matcher in node.matchers.matchers})
        case promql.MatrixSelector():
            yield from _series(node.vector_selector, labels)
        case promql.AggregateExpr():
            by = node.modifier.labels if node.modifier else []
            yield from _series(node.expr, labels.union(by))
        case promql.Call():
            if node.func.name == "histogram_quantile":
                labels = labels | {"le"}
            for argument in node.args:
                yield from _series(argument, labels)
        case promql.BinaryExpr():
            assert not (node.modifier and node.modifier.matching), "no expression of the dashboard matches by labels"
            yield from _series(node.lhs, labels)
            yield from _series(node.rhs, labels)
        case promql.ParenExpr():
            yield from _series(node.expr, labels)
        case promql.NumberLiteral():
            pass
        case _:
            raise AssertionError(f"{type(node).__name__} is not read yet")
