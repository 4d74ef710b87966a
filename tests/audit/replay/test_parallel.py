"""Several processes audit journals with the same result as one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests import journals
from tests.histories import GOLDEN

from kvledger.audit.errors import LedgerError
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.parallel import Processes, here, is_remote, size_bytes
from kvledger.exporters.reports.audit import report


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return journals.golden(tmp_path / "golden")


def test_two_processes_give_the_same_report_as_one(golden: Path) -> None:
    assert report(audit_paths([golden], run=here)) == report(audit_paths([golden], run=Processes(2)))


def process_of(journal: Path) -> tuple[str, int]:
    return journal.name, os.getpid()


def test_results_come_in_the_order_of_the_journals(golden: Path) -> None:
    results = list(Processes(2)(process_of, journals_at([golden])))

    assert sorted(journal.name for journal in golden.iterdir()) == [name for name, _ in results]
    assert os.getpid() not in {process for _, process in results}


def test_small_journals_are_read_in_this_process(golden: Path) -> None:
    assert {os.getpid()} == {process for _, process in Processes()(process_of, journals_at([golden]))}


def refuse(journal: Path) -> None:
    raise LedgerError(f"{journal.name} can't be read.")


def die(journal: Path) -> None:
    os._exit(1)


def test_a_ledger_error_of_a_process_is_raised_here(golden: Path) -> None:
    with pytest.raises(LedgerError, match="engine-00 can't be read"):
        list(Processes(2)(refuse, journals_at([golden])))


def test_a_killed_process_is_a_ledger_error(golden: Path) -> None:
    with pytest.raises(LedgerError, match="was killed; try fewer --jobs"):
        list(Processes(2)(die, journals_at([golden])))


def test_a_negative_number_of_processes_is_refused() -> None:
    with pytest.raises(LedgerError, match="-1 processes can't be"):
        Processes(-1)


def test_a_pattern_that_the_shell_did_not_expand_is_expanded(golden: Path) -> None:
    assert [golden / "engine-00", golden / "engine-01"] == journals_at([golden / "engine-0[01]"])
    with pytest.raises(LedgerError, match="No path matches"):
        journals_at([golden / "nobody-*"])


def test_a_folder_with_the_name_of_a_pattern_is_read(golden: Path) -> None:
    named = golden.rename(golden.with_name("[golden]"))

    assert len(GOLDEN) == len(journals_at([named]))


def test_an_address_with_a_scheme_is_remote(tmp_path: Path) -> None:
    assert is_remote(Path("s3://bucket/folder"))
    assert not is_remote(tmp_path)
    assert not is_remote(Path("nowhere"))


def test_the_size_of_a_journal_is_the_size_of_its_segments(golden: Path) -> None:
    folder = golden / "engine-00"
    assert size_bytes(folder) == sum(file.stat().st_size for file in folder.glob("*.kvl")) > 0
    assert 0 == size_bytes(golden / "none")
