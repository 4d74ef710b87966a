"""The sidecar compacts the journals that it follows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests import journals

from kvledger.audit.errors import LedgerError
from kvledger.exporters.facts import kept
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.sidecar import serve
from kvledger.exporters.sidecar.compactor import Compactor, seconds_of

PATIENCE = 60.0


def until(true: object) -> None:
    """Wait until a call returns something true."""
    end = time.monotonic() + PATIENCE
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_journals_are_compacted_while_the_sidecar_runs(tmp_path: Path) -> None:
    journal = journals.clean(tmp_path / "engine-0")
    replayed = summarize([tmp_path], with_costs=True)
    said: list[str] = []
    writer = Compactor(tmp_path, 0.01, said.append)
    writer.start()
    try:
        until(lambda: kept.find(journal))
    finally:
        writer.close()

    assert not said
    assert replayed == summarize([tmp_path], with_costs=True)


def test_a_failure_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    writer = Compactor(tmp_path, 0.01, said.append)
    answers = iter(["no room.", "no room.", "", "no room."])
    writer._compact = lambda: next(answers, "no room.")  # type: ignore[method-assign]
    writer.start()
    until(lambda: next(answers, None) is None)
    writer.close()

    assert ["The journals were not compacted: no room."] == said[:1]
    assert len(said) <= 2


def test_a_folder_without_journals_is_a_sentence(tmp_path: Path) -> None:
    assert "is empty: no journal was written there yet." in Compactor(tmp_path, 1, print)._compact()


def test_the_interval_and_the_folder_are_checked_before_the_start(tmp_path: Path) -> None:
    assert (0.0, 3600.0) == (seconds_of(""), seconds_of("1h"))
    with pytest.raises(LedgerError, match="'soon' is no time such as 15s"):
        serve.check_config(tmp_path, "127.0.0.1:0", folder=None, config=None, compact="soon")
    segment = next(journals.clean(tmp_path / "engine-0").glob("*.kvl"))
    with pytest.raises(LedgerError, match="is no folder of journals"):
        serve.check_config(segment, "127.0.0.1:0", folder=None, config=None, compact="1h")
