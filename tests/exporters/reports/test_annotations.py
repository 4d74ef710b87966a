"""Audits as annotations of GitHub Actions and as SARIF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.command_line import exit_code

from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.reports import annotations
from kvledger.exporters.reports.audit_data import report


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(path: Path, format: str) -> tuple[object, str]:
        return exit_code("audit", path, "--format", format), capsys.readouterr().out

    return call


def test_a_violation_is_an_error_annotation(run: Any, tmp_path: Path) -> None:
    code, out = run(journals.violated(tmp_path / "one"), "github")
    first, *rest = out.splitlines()

    assert 1 == code
    assert first.startswith("::error title=kvledger%3A violated::violated at level tokens: counts")
    assert any(line.startswith("::error title=tokens/negative::step ") for line in rest)


def test_a_clean_run_is_one_notice(run: Any, tmp_path: Path) -> None:
    code, out = run(journals.clean(tmp_path / "one"), "github")

    assert 0 == code
    assert out.startswith("::notice title=kvledger%3A clean::clean at level tokens: counts, progress; ")
    assert 1 == len(out.splitlines())


def test_findings_of_one_invariant_are_one_annotation(tmp_path: Path) -> None:
    """GitHub shows ten annotations of a kind per step."""
    for name in ("one", "two"):
        journals.violated(tmp_path / name)
    lines = annotations.github(report(audit_paths([tmp_path]))).splitlines()

    (line,) = [line for line in lines if "title=tokens/negative" in line]
    assert line.endswith("(2 findings)")


def test_a_line_break_and_a_percent_sign_are_escaped() -> None:
    assert "::error title=a%2Cb::100%25%0Aof" == annotations._command("error", "a,b", "100%\nof")


def test_sarif_has_one_rule_per_invariant_and_one_result_per_finding(run: Any, tmp_path: Path) -> None:
    journal = journals.violated(tmp_path / "one")
    code, out = run(journal, "sarif")
    log = json.loads(out)
    (ran,) = log["runs"]
    rules, results = ran["tool"]["driver"]["rules"], ran["results"]
    (negative,) = [row for row in results if row["ruleId"] == "tokens/negative"]

    assert (1, "2.1.0") == (code, log["version"])
    assert {row["ruleId"] for row in results} == {rule["id"] for rule in rules}
    assert all(rules[row["ruleIndex"]]["id"] == row["ruleId"] for row in results)
    assert "error" == negative["level"]
    (location,) = negative["locations"]
    assert journal.as_uri() == location["physicalLocation"]["artifactLocation"]["uri"]
    assert location["logicalLocations"][0]["fullyQualifiedName"].endswith("/request-0")


def test_a_journal_below_the_working_folder_has_a_relative_uri(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Code scanning shows results of files in the repository only."""
    monkeypatch.chdir(tmp_path)

    assert "journals/engine-1" == annotations._uri("journals/engine-1")


def test_a_clean_run_has_no_results(run: Any, tmp_path: Path) -> None:
    code, out = run(journals.clean(tmp_path / "one"), "sarif")

    assert 0 == code
    assert [] == json.loads(out)["runs"][0]["results"]
