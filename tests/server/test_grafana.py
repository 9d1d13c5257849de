"""The Grafana dashboard asks for nothing that a server does not serve."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixkv.server.metrics import Metrics

PATH = Path(__file__).parents[2] / "examples" / "deploy" / "grafana.json"
DASHBOARD = json.loads(PATH.read_text())
# A name, whatever follows it; one that a parenthesis follows is a function, and one in braces or after `by` is a label.
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{(?P<labels>[^}]*)\}")
WORDS = {"sum", "rate", "increase", "histogram_quantile", "topk", "count", "vector", "by", "or", "label_values"}
OF_PROMETHEUS = {"job", "instance", "le"}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """Every sample's name, and its labels."""
    metrics = Metrics("a model")
    metrics.began("tenant", 10, 4, {"new": 6}, 0.1)
    metrics.failed("internal", 1)
    metrics.answered("POST", "/v1/completions", 200, 0.6)
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render({}).decode()):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def unknown(expression: str, served: dict[str, set[str]]) -> set[str]:
    """What an expression names that the server does not serve: metrics, and labels of theirs."""
    bad = set()
    labels_here: set[str] = set(OF_PROMETHEUS)
    for selector in SELECTOR.finditer(expression):
        name = selector["name"]
        if name not in served:
            bad.add(name)
        labels_here |= served.get(name, set())
        bad |= {label for label in re.findall(r"(\w+)\s*[=!]~?", selector["labels"]) if label not in served.get(name, ()) and
                label not in OF_PROMETHEUS}  # fmt: skip
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        bad |= {label.strip() for label in labels.split(",")} - labels_here
    rest = re.sub(r"by \([^)]*\)|\[[^\]]*\]|\"[^\"]*\"", "", SELECTOR.sub("", expression))
    named = set(NAME.findall(rest)) - WORDS
    return bad | {name for name in named if name not in served and name not in labels_here}


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_an_expression_names_only_what_the_server_serves(title: str, expression: str, served: dict[str, set[str]]) -> None:
    assert unknown(expression, served) == set(), title
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("sum(rate(vllm:no_such_total{job=~\"$job\"}[5m]))", "vllm:no_such_total"),
        ("vllm:no_such", "vllm:no_such"),
        ("sum by (tenant) (rate(radixkv_prefix_cache_hits_total{}[5m]))", "tenant"),
        ("vllm:generation_tokens_total{namespace=\"x\"}", "namespace"),
        ("sum(rate(vllm:generation_tokens{}[5m]))", "vllm:generation_tokens"),  # a counter's samples end in _total
    ],
)  # fmt: skip
def test_a_name_that_is_not_served_would_be_found(expression: str, name: str, served: dict[str, set[str]]) -> None:
    assert unknown(expression, served) == {name}


def test_the_panels_that_matter_are_there_and_do_not_overlap() -> None:
    panels: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    titles = {panel["title"] for panel in panels}
    assert {"Hit rate", "Misses by reason", "First token, p50, by what was cached", "Tokens / s", "Requests", "KV cache use",
            "Worker restarts"} <= titles  # fmt: skip
    assert all(panel["description"] for panel in panels)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        mine = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not mine & cells
        assert grid["x"] + grid["w"] <= 24
        cells |= mine
