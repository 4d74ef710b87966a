"""Audits as annotations of GitHub Actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.command_line import exit_code

from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.reports import audit
from kvledger.exporters.reports.audit import report


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
    lines = audit.github(report(audit_paths([tmp_path]))).splitlines()

    (line,) = [line for line in lines if "title=tokens/negative" in line]
    assert line.endswith("(2 findings)")


def test_a_line_break_and_a_percent_sign_are_escaped() -> None:
    assert "::error title=a%2Cb::100%25%0Aof" == audit._command("error", "a,b", "100%\nof")
