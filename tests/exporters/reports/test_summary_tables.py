"""A summary of exported tables equals the summary of their journals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.exporters.labels import labelled
from tests.histories import events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Gap
from kvledger.audit.replay.windows import Window
from kvledger.exporters.reports.summary import summarize

pytest.importorskip("pyarrow")

from kvledger.exporters.trace.groups import KEYS
from kvledger.exporters.trace.parquet import export

BEGAN = journals.STARTED.began_seconds


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Golden histories, a request that is unknown, and one that is open."""
    journals.golden(tmp_path / "trace")
    journals.write(tmp_path / "trace" / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])
    journals.write(tmp_path / "trace" / "open", events(10, "A0+0 s10 o+"), stopped=False)
    labelled(tmp_path / "trace" / "labelled")
    return tmp_path / "trace"


@pytest.mark.parametrize("by", ["", *KEYS, r"request-(\d)", "(nobody)"])
def test_tables_and_journals_give_the_same_rows(trace: Path, tmp_path: Path, by: str) -> None:
    export([trace], tmp_path / "out", ("requests",))

    assert summarize([trace], by) == summarize([tmp_path / "out"], by)


@pytest.mark.parametrize(
    "window",
    [Window(BEGAN + 100e-6, None), Window(None, BEGAN + 100e-6), Window(BEGAN + 80e-6, BEGAN + 120e-6)],
)
def test_tables_and_journals_give_the_same_rows_in_a_window(
    trace: Path, tmp_path: Path, window: Window
) -> None:
    export([trace], tmp_path / "out", ("requests",))

    of_tables = summarize([tmp_path / "out"], "outcome", window=window)
    assert summarize([trace], "outcome", window=window) == of_tables
    assert 0 < of_tables[-1].requests < summarize([trace])[-1].requests


def test_a_window_is_the_same_before_and_after_the_export(trace: Path, tmp_path: Path) -> None:
    window = Window(BEGAN + 100e-6, None)
    export([trace], tmp_path / "out", ("requests",), window)

    assert summarize([trace], window=window) == summarize([tmp_path / "out"])


def test_tables_and_journals_are_summed_together(trace: Path, tmp_path: Path) -> None:
    export([trace], tmp_path / "out", ("requests",))

    (both,) = summarize([trace, tmp_path / "out"])

    assert 2 * summarize([trace])[0].requests == both.requests


def test_an_unknown_table_is_refused(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="'wishes' is no table: there are requests, causes"):
        export([trace], tmp_path / "out", ("wishes",))


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "requests.parquet").write_text("no")

    with pytest.raises(LedgerError, match="can't be read"):
        summarize([tmp_path])
