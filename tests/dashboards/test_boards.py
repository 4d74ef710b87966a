"""The board files: what the check finds in them, the two forms, and the layout of panels."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.dashboards import boards, check, deploy_files

every_board = pytest.mark.parametrize("built", [*map(boards.board, boards.NAMES)], ids=boards.NAMES)


def panels_of(built: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for _, within in boards.rows(built) for panel in within]


def test_boards_and_rules_have_no_fault() -> None:
    assert [] == check.faults()


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("kvledger_promt_tokens_total", "kvledger_promt_tokens_total is no metric"),
        ('kvledger_prompt_tokens_total{sauce="local"}', "kvledger_prompt_tokens_total has no label sauce"),
        (
            'kvledger_prompt_tokens_total{source=~"local|remote"}',
            "source of kvledger_prompt_tokens_total is never 'remote'",
        ),
        ("sum by (cause) (kvledger_open_requests)", "no metric of it has cause"),
        ("engine:kvledger_nothing:rate5m > 1", "engine:kvledger_nothing:rate5m is not recorded"),
    ],
)
def test_a_name_that_is_not_served_is_a_fault(expr: str, fault: str) -> None:
    recorded = {rule["record"] for rule in deploy_files.rules() if "record" in rule}

    assert [fault] == list(check.faults_in(expr, recorded))


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("id", 3, "two panels have the id 3"),
        ("title", "", "panel 2 has no title"),
        ("description", "", "Violations has no description"),
        ("targets", [], "Violations has no query"),
        ("gridPos", {"x": 4, "y": 1, "w": 4, "h": 5}, "Unexplained drift lies on Violations"),
        ("gridPos", {"x": 22, "y": 0, "w": 4, "h": 1}, "Violations is wider than the board"),
        ("fieldConfig", {"defaults": {"unit": "s"}, "overrides": []}, "Violations has the unit s"),
    ],
)
def test_a_panel_that_is_built_wrongly_is_a_fault(key: str, value: object, fault: str) -> None:
    built = boards.board("trust")
    panel = next(panel for panel in panels_of(built) if panel["title"] == "Violations")
    panel[key] = value

    assert fault in "\n".join(check.misbuilt(built))


@pytest.mark.parametrize(
    ("expr", "units"),
    [
        ("sum(rate(kvledger_prompt_tokens_total[5m]))", {"si:tokens/s"}),
        (
            "sum(rate(kvledger_prompt_tokens_total[5m])) / sum(rate(kvledger_work_tokens_total[5m]))",
            {"percentunit"},
        ),
        ("histogram_quantile(0.5, sum by (le) (rate(kvledger_block_idle_seconds_bucket[5m])))", {"s"}),
        ("sum(rate(kvledger_first_token_seconds_total[5m])) / sum(kvledger_requests_total)", {"s"}),
        ("sum by (outcome) (rate(kvledger_requests_total[5m]))", {"cps", "reqps", "short"}),
        ("sum(kvledger_open_requests)", {"none", "short", "locale"}),
        ("avg(up)", set()),
    ],
)
def test_the_units_of_an_expression_follow_from_its_metrics(expr: str, units: set[str]) -> None:
    assert units == check.units_of(expr)


@every_board
def test_panels_fill_the_width_of_the_board(built: dict[str, Any]) -> None:
    for heading, within in boards.rows(built):
        sums = list(itertools.accumulate(panel["gridPos"]["w"] for panel in within))
        assert sums[-1] % check.GRID == 0, heading["title"]
        assert set(range(check.GRID, sums[-1] + 1, check.GRID)) <= set(sums), heading["title"]


@every_board
def test_panels_of_a_collapsed_row_are_in_its_heading(built: dict[str, Any]) -> None:
    for heading, within in boards.rows(built):
        assert heading["panels"] == (within if heading["collapsed"] else [])


@every_board
def test_legends_show_the_last_and_the_largest_value(built: dict[str, Any]) -> None:
    for panel in panels_of(built):
        if panel["type"] == "timeseries":
            assert ["lastNotNull", "max"] == panel["options"]["legend"]["calcs"]


@every_board
def test_a_stack_has_no_lines_because_that_of_a_zero_would_lie_on_top(built: dict[str, Any]) -> None:
    for panel in panels_of(built):
        if panel["type"] == "timeseries":
            custom = panel["fieldConfig"]["defaults"]["custom"]
            assert (custom["stacking"]["mode"] != "none") == (custom["lineWidth"] == 0), panel["title"]


@every_board
def test_boards_link_to_each_other_and_are_tagged_for_both_engines(built: dict[str, Any]) -> None:
    assert {"kvledger", "vllm", "sglang"} == set(built["tags"])
    own, *vllms = built["links"]
    assert ["kvledger"] == own["tags"] and own["includeVars"]
    assert {"?var-Deployment_id=${model_name:percentencode}"} == {link["url"][-46:] for link in vllms}
    assert all(link["keepTime"] for link in (own, *vllms))


@every_board
def test_variables(built: dict[str, Any]) -> None:
    names = [variable["name"] for variable in built["templating"]["list"]]

    assert ["datasource", "job", "instance", "model_name", "product", "engine", "docs"] == names


@every_board
def test_the_sharing_form_differs_only_in_its_data_source(built: dict[str, Any]) -> None:
    """Grafana replaces the input by the chosen data source at import."""
    shared = boards.shared(built)
    asked = shared.pop("__inputs")
    needed = shared.pop("__requires")
    shared.pop("__elements")
    imported = json.loads(json.dumps(shared).replace("${DS_PROMETHEUS}", "prometheus-1"))
    here = json.loads(json.dumps(built).replace("${datasource}", "prometheus-1"))
    here["templating"]["list"] = here["templating"]["list"][1:]

    assert ["DS_PROMETHEUS"] == [wanted["name"] for wanted in asked]
    assert here == imported
    assert not re.search(r"\$\{(DS_|datasource)", json.dumps(imported))
    types = {panel["type"] for panel in panels_of(shared)}
    assert types == {row["id"] for row in needed if row["type"] == "panel"}
    assert {"grafana", "datasource"} <= {row["type"] for row in needed}


def test_findings_link_to_the_explanation_of_their_invariant() -> None:
    findings = next(panel for panel in boards.board("trust")["panels"] if panel["title"] == "Last findings")
    links = [
        prop["value"][0]["url"]
        for row in findings["fieldConfig"]["overrides"]
        for prop in row["properties"]
        if prop["id"] == "links"
    ]

    assert ["${docs}/${__data.fields.Invariant}"] == links


def test_edited_and_missing_exported_files_are_listed(tmp_path: Path) -> None:
    boards.write(tmp_path, "sharing")
    edited = tmp_path / "kvledger-trust.json"
    edited.write_text(edited.read_text().replace("At a glance", "At one glance"))
    (tmp_path / "kvledger-tokens.json").unlink()

    report = check.check(tmp_path, "sharing", "")

    assert not report.passed
    assert ["kvledger-trust.json differs", "kvledger-tokens.json is missing"] == report.lines[1:]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="There is no folder"):
        check.check(tmp_path / "nowhere", "sharing", "")


def test_a_file_that_is_no_json_differs(tmp_path: Path) -> None:
    boards.write(tmp_path, "sharing")
    (tmp_path / "kvledger-trust.json").write_bytes(b"\xff{")

    assert ["kvledger-trust.json differs"] == check.differing(tmp_path, "sharing")


def test_the_figures_compared_have_the_unexplained_part_beside_the_difference() -> None:
    """A difference with a known cause is no fault, so the table says how much has none."""
    panel = next(one for one in panels_of(boards.board("compare")) if one["title"] == "Figure by figure")
    columns = panel["transformations"][2]["options"]["renameByName"]

    assert ("Difference", "Unexplained") == (columns["Value #C"], columns["Value #D"])
    assert 'cause="unexplained"' in panel["targets"][3]["expr"]
