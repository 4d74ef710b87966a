"""The rules of Grafana's dashboard linter, one test per rule, under the linter's own names.

https://github.com/grafana/dashboard-linter/blob/main/docs/index.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvledger.dashboards import boards, check

BUILT = {name: boards.board(name) for name in boards.NAMES}
UNITS = {"short", "none", "percentunit", "s", "cps", "si:tokens/s", "reqps", "locale", "dateTimeAsIso"}
"""Of Grafana's list, those that are used; another one is to be looked up there first."""

every_board = pytest.mark.parametrize("built", BUILT.values(), ids=BUILT)


def panels(built: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for _, within in boards.rows(built) for panel in within]


def expressions(built: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in panels(built):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def variable_named(built: dict[str, Any], name: str) -> dict[str, Any]:
    return next(variable for variable in built["templating"]["list"] if variable["name"] == name)


@every_board
def test_template_datasource_rule(built: dict[str, Any]) -> None:
    sources = [each for each in built["templating"]["list"] if each["type"] == "datasource"]

    assert [("datasource", "Data source", "prometheus")] == [
        (source["name"], source["label"], source["query"]) for source in sources
    ]


@every_board
@pytest.mark.parametrize("name", ["job", "instance"])
def test_template_job_and_instance_rules(built: dict[str, Any], name: str) -> None:
    variable = variable_named(built, name)

    assert name.title() == variable["label"]
    assert "query" == variable["type"]
    assert "${datasource}" == variable["datasource"]["uid"]
    assert variable["multi"]
    assert ".+" == variable["allValue"]


@every_board
def test_template_label_promql_rule(built: dict[str, Any]) -> None:
    for variable in built["templating"]["list"]:
        if variable["type"] == "query":
            assert re.fullmatch(r"label_values\(kvledger_\w+(\{[^}]*\})?, \w+\)", variable["query"]["query"])


@every_board
def test_template_on_time_change_reload_rule(built: dict[str, Any]) -> None:
    assert {2} == {
        variable["refresh"] for variable in built["templating"]["list"] if variable["type"] == "query"
    }


@every_board
def test_uneditable_dashboard(built: dict[str, Any]) -> None:
    assert built["editable"] is False


@every_board
def test_panel_datasource_rule(built: dict[str, Any]) -> None:
    for panel in panels(built):
        assert "${datasource}" == panel["datasource"]["uid"]
        assert {"${datasource}"} == {target["datasource"]["uid"] for target in panel["targets"]}


@every_board
def test_panel_title_description_rule(built: dict[str, Any]) -> None:
    for panel in panels(built):
        assert panel["title"] and len(panel["description"]) > 24, panel["title"]


@every_board
def test_panel_units_rule(built: dict[str, Any]) -> None:
    for panel in panels(built):
        units = {panel["fieldConfig"]["defaults"]["unit"]}
        for row in panel["fieldConfig"]["overrides"]:
            units |= {prop["value"] for prop in row["properties"] if prop["id"] == "unit"}
        assert units <= UNITS, panel["title"]


@every_board
def test_panel_no_targets_rule(built: dict[str, Any]) -> None:
    assert all(panel["targets"] for panel in panels(built))


@every_board
def test_target_job_and_instance_rules(built: dict[str, Any]) -> None:
    """Every selector matches job and instance, and the engine if the metric has that label."""
    for title, expr in expressions(built):
        selectors = re.findall(r"\b(kvledger_\w+|up)\b(\{[^}]*\})?", expr)
        assert selectors, title
        for name, matchers in selectors:
            assert 'job=~"$job"' in matchers and 'instance=~"$instance"' in matchers, (title, name)
            whole = name in ("kvledger_build_info", "up") or name.startswith("kvledger_sidecar_")
            assert whole or 'engine=~"$engine"' in matchers, (title, name)


@every_board
def test_target_rate_interval_rule(built: dict[str, Any]) -> None:
    for title, expr in expressions(built):
        for function, span in re.findall(r"\b(\w+)\(\w+\{[^}]*\}\[([^\]]+)\]", expr):
            allowed = {"$__rate_interval"} | ({"$__range"} if function == "increase" else set())
            assert span in allowed, title


@every_board
def test_target_counter_agg_rule(built: dict[str, Any]) -> None:
    for title, expr in expressions(built):
        counters = re.findall(r"\bkvledger_\w+_total\b", expr)
        counted = re.findall(r"\b(?:rate|increase)\(kvledger_\w+_total(?:\{[^}]*\})?\[", expr)
        assert len(counters) == len(counted), title


def test_every_grafana_variable_is_substituted() -> None:
    for query in check.queries():
        assert "$" not in check.substituted(query.expr), query.where
