"""A summary of exported tables equals the summary of their journals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.command_line import runner
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


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Golden histories, a request that is unknown, and one that is open."""
    folder = tmp_path_factory.mktemp("trace")
    journals.golden(folder)
    journals.write(folder / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])
    journals.write(folder / "open", events(10, "A0+0 s10 o+"), stopped=False)
    labelled(folder / "labelled")
    return folder


@pytest.fixture(scope="module")
def tables(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables of the journals."""
    folder = tmp_path_factory.mktemp("tables") / "out"
    export([trace], folder, ("requests",))
    return folder


@pytest.mark.parametrize("by", [",".join(KEYS), r"request-(\d)"])
def test_tables_and_journals_give_the_same_rows(trace: Path, tables: Path, by: str) -> None:
    assert summarize([trace], by) == summarize([tables], by)


def test_tables_and_journals_give_the_same_rows_in_a_window(trace: Path, tables: Path) -> None:
    window = Window(BEGAN + 80e-6, BEGAN + 120e-6)
    of_tables = summarize([tables], "outcome", window=window)
    assert summarize([trace], "outcome", window=window) == of_tables
    assert 0 < of_tables[-1].requests < summarize([trace])[-1].requests


def test_a_window_is_the_same_before_and_after_the_export(trace: Path, tmp_path: Path) -> None:
    window = Window(BEGAN + 100e-6, None)
    export([trace], tmp_path / "out", ("requests",), window)

    assert summarize([trace], window=window) == summarize([tmp_path / "out"])


def test_tables_and_journals_are_summed_together(trace: Path, tables: Path) -> None:
    (both,) = summarize([trace, tables])

    assert 2 * summarize([trace])[0].requests == both.requests


def test_an_unknown_table_is_refused(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="'wishes' is no table: there are requests, causes"):
        export([trace], tmp_path / "out", ("wishes",))


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "requests.parquet").write_text("no")

    with pytest.raises(LedgerError, match="can't be read"):
        summarize([tmp_path])


def test_a_changed_or_missing_exported_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the digests that were written beside it, which ``sha256sum -c`` reads, too."""
    run = runner(capsys)
    journals.golden(tmp_path / "journals")
    run("export", tmp_path / "journals", "-o", tmp_path / "tables")
    before = run("summary", tmp_path / "tables", "--format", "json")
    path = tmp_path / "tables/causes.parquet"
    whole = path.read_bytes()
    for changed in (whole[:-1], bytes([whole[0] ^ 1, *whole[1:]]), None):
        path.write_bytes(changed) if changed is not None else path.unlink()
        refused = run("summary", tmp_path / "tables")
        assert 2 == refused.code
        assert f"{path} is not as it was exported" in refused.sentence
    path.write_bytes(whole)

    assert before == run("summary", tmp_path / "tables", "--format", "json")
    (tmp_path / "tables/SHA256SUMS").unlink()
    assert before == run("summary", tmp_path / "tables", "--format", "json")
