"""The board files: the committed copies, the two forms, and the layout of panels."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.dashboards import boards, check, compare_board, rules
from kvledger.dashboards.panels import GRID, PanelRow

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "dashboards" / "generated"

every_board = pytest.mark.parametrize("board", boards.BOARDS, ids=lambda board: board.UID)
every_form = pytest.mark.parametrize("form", boards.FORMS)


def flat(built: dict[str, Any]) -> list[dict[str, Any]]:
    """The headings and all panels, those of collapsed rows too."""
    return [each for panel in built["panels"] for each in (panel, *panel.get("panels", ()))]


def panels_of(built: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in flat(built) if panel["type"] != "row"]


def test_boards_and_rules_name_only_served_metrics() -> None:
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
    assert [fault] == list(check.faults_in(expr, {row.record for row in rules.RECORDINGS}))


@every_board
def test_panel_ids_are_unique_and_panels_do_not_overlap(board: ModuleType) -> None:
    built = boards.build(board)
    taken: dict[tuple[int, int], str] = {}
    for panel in built["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]

    ids = [panel["id"] for panel in flat(built)]
    assert len(set(ids)) == len(ids)


@every_board
def test_no_row_is_left_out(board: ModuleType) -> None:
    made = {value.title for value in vars(board).values() if isinstance(value, PanelRow)}

    assert made == {row.title for row in board.ROWS}


@every_board
def test_panels_fill_the_width_of_the_board(board: ModuleType) -> None:
    for row in board.ROWS:
        widths = [panel.width for panel in row.panels]
        sums = list(itertools.accumulate(widths))
        assert sums[-1] % GRID == 0, row.title
        assert set(range(GRID, sums[-1] + 1, GRID)) <= set(sums), row.title


@every_board
def test_panels_of_a_collapsed_row_are_in_its_heading(board: ModuleType) -> None:
    headings = [panel for panel in boards.build(board)["panels"] if panel["type"] == "row"]

    assert [row.collapsed for row in board.ROWS] == [heading["collapsed"] for heading in headings]
    for row, heading in zip(board.ROWS, headings, strict=True):
        expected = [panel.title for panel in row.panels] if row.collapsed else []
        assert expected == [panel["title"] for panel in heading["panels"]]


@every_board
def test_legends_show_the_last_and_the_largest_value(board: ModuleType) -> None:
    for panel in panels_of(boards.build(board)):
        if panel["type"] == "timeseries":
            assert ["lastNotNull", "max"] == panel["options"]["legend"]["calcs"]


@every_board
def test_a_stack_has_no_lines_because_that_of_a_zero_would_lie_on_top(board: ModuleType) -> None:
    for panel in panels_of(boards.build(board)):
        if panel["type"] == "timeseries":
            custom = panel["fieldConfig"]["defaults"]["custom"]
            assert (custom["stacking"]["mode"] != "none") == (custom["lineWidth"] == 0), panel["title"]


@every_board
def test_boards_link_to_each_other_and_are_tagged_for_vllm(board: ModuleType) -> None:
    built = boards.build(board)

    assert {"kvledger", "vllm"} == set(built["tags"])
    own, *vllms = built["links"]
    assert ["kvledger"] == own["tags"] and own["includeVars"]
    assert {"?var-Deployment_id=${model_name:percentencode}"} == {link["url"][-46:] for link in vllms}
    assert all(link["keepTime"] for link in (own, *vllms))


@every_board
def test_variables(board: ModuleType) -> None:
    names = [variable["name"] for variable in boards.build(board)["templating"]["list"]]

    assert ["datasource", "job", "instance", "model_name", "engine", "docs"] == names


@every_board
def test_the_sharing_form_differs_only_in_its_data_source(board: ModuleType) -> None:
    """Grafana replaces the input by the chosen data source at import."""
    shared = boards.build(board, "sharing")
    asked = shared.pop("__inputs")
    needed = shared.pop("__requires")
    shared.pop("__elements")
    imported = json.loads(json.dumps(shared).replace("${DS_PROMETHEUS}", "prometheus-1"))
    here = json.loads(json.dumps(boards.build(board)).replace("${datasource}", "prometheus-1"))
    here["templating"]["list"] = here["templating"]["list"][1:]

    assert ["DS_PROMETHEUS"] == [wanted["name"] for wanted in asked]
    assert here == imported
    assert not re.search(r"\$\{(DS_|datasource)", json.dumps(imported))
    types = {panel["type"] for panel in panels_of(shared)}
    assert types == {row["id"] for row in needed if row["type"] == "panel"}
    assert {"grafana", "datasource"} <= {row["type"] for row in needed}


def test_findings_link_to_the_explanation_of_their_invariant() -> None:
    trust = boards.build(boards.BOARDS[0])
    findings = next(panel for panel in trust["panels"] if panel["title"] == "Last findings")
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
    panel = next(one for one in compare_board.NOW.panels if one.title == "Figure by figure")
    columns = dict(panel.columns)

    assert ("Difference", "Unexplained") == (columns["Value #C"], columns["Value #D"])
    assert 'cause="unexplained"' in panel.queries[3].expr
