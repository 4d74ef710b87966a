"""docs/analysis.md: its notebook runs, and says what it prints."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from tests.simulated_trace import write_trace

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

PAGE = Path(__file__).parents[3] / "docs" / "analysis.md"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(Path("trace"), 2000, engines=2)

    failures, tried = doctest.testfile(str(PAGE), module_relative=False, report=True)

    assert 0 == failures
    assert 10 < tried


def test_the_notebook_names_existing_commands() -> None:
    from kvledger import cli

    known = {
        command.name or command.callback.__name__
        for command in cli.app.registered_commands
        if command.callback
    }
    said = [words.split()[1] for words in PAGE.read_text().split("`") if words.startswith("kvledger ")]

    assert said
    assert set(said) <= known
