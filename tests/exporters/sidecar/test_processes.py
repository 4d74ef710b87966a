"""The sidecar compacts the journals that it follows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tests import journals
from tests.time_limits import HANGS

from kvledger.audit.errors import LedgerError
from kvledger.exporters.facts import kept
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.sidecar import processes, serve
from kvledger.exporters.sidecar.processes import Compactor, seconds_of


def until(true: object) -> None:
    """Wait until a call returns something true."""
    end = time.monotonic() + HANGS
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_journals_are_compacted_while_the_sidecar_runs(tmp_path: Path) -> None:
    journal = journals.clean(tmp_path / "engine-0")
    replayed = summarize([tmp_path], with_costs=True)
    said: list[str] = []
    informed: list[str] = []
    writer = Compactor(tmp_path, 0.01, said.append, inform=informed.append)
    writer.start()
    try:
        until(lambda: kept.find(journal) and informed)
    finally:
        writer.close()

    assert not said
    assert informed[0].startswith("Compacted the journals in ")
    assert (True, 0) == (time.time() - writer.health.compacted_at < HANGS, writer.health.compact_failures)
    assert replayed == summarize([tmp_path], with_costs=True)


def test_a_failure_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    writer = Compactor(tmp_path, 0.01, said.append)
    answers = iter(["no room.", "no room.", "", "no room."])
    writer._compact = lambda: next(answers, "no room.")  # type: ignore[method-assign]
    writer.start()
    until(lambda: writer.health.compact_failures >= 4)
    writer.close()

    assert ["Not all journals were compacted: no room. The last success: never."] == said[:1]
    assert 2 == len(said)


def test_a_folder_without_journals_is_a_sentence(tmp_path: Path) -> None:
    assert "is empty: no journal was written there yet." in Compactor(tmp_path, 1, print)._compact()


def test_the_age_of_rows_is_passed_on(tmp_path: Path) -> None:
    journal = journals.clean(tmp_path / "engine-0")
    writer = Compactor(tmp_path, 1, print, keep="1s")
    writer._once()

    session = kept.find(journal)
    assert session is not None
    assert session.rows_from > 0


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.01)
    writer = Compactor(tmp_path, 1, print)
    writer._command = [sys.executable, "-c", "import time; time.sleep(60)"]

    assert "it took longer than 0 s and was ended." == writer._compact()


def test_an_error_that_fills_the_pipe_does_not_block(tmp_path: Path) -> None:
    writer = Compactor(tmp_path, 1, print)
    writer._command = [sys.executable, "-c", "import sys; sys.exit('x\\n' * 100_000 + 'no room.')"]

    assert "no room." == writer._compact()


def test_the_interval_and_the_folder_are_checked_before_the_start(tmp_path: Path) -> None:
    assert (0.0, 3600.0) == (seconds_of(""), seconds_of("1h"))
    with pytest.raises(LedgerError, match="'soon' is no time such as 15s"):
        serve.check_config(tmp_path, "127.0.0.1:0", folder=None, config=None, compact="soon")
    segment = next(journals.clean(tmp_path / "engine-0").glob("*.kvl"))
    with pytest.raises(LedgerError, match="is no folder of journals"):
        serve.check_config(segment, "127.0.0.1:0", folder=None, config=None, compact="1h")
    with pytest.raises(LedgerError, match="it needs --compact"):
        serve.check_config(tmp_path, "127.0.0.1:0", folder=None, config=None, keep="30d")
    with pytest.raises(LedgerError, match="'long' is no time such as 15s"):
        serve.check_config(tmp_path, "127.0.0.1:0", folder=None, config=None, compact="1h", keep="long")
