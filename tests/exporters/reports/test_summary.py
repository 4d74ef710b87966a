"""Summaries: sums of the ledger, by group, streamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.histories import events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Gap
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import KeptAccounts
from kvledger.exporters.reports.summary import ALL, summarize
from kvledger.exporters.trace.groups import NO_MATCH


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No test changes it."""
    return journals.golden(tmp_path_factory.mktemp("golden"))


def test_a_pattern_names_its_groups(tmp_path: Path) -> None:
    journals.write(tmp_path / "one", events(10, "A0+0 s10 o+ F"))
    name = next(iter(audit_paths([tmp_path], (KeptAccounts,)).engines[0].of(KeptAccounts).sums)).request_id

    assert [name[:3], ALL] == [row.group for row in summarize([tmp_path], f"^({name[:3]}).*")]
    assert [name, ALL] == [row.group for row in summarize([tmp_path], "^.*$")]
    assert [NO_MATCH, ALL] == [row.group for row in summarize([tmp_path], "^nobody$")]


def test_unknown_requests_are_counted_and_in_no_other_figure(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])

    (row,) = summarize([path])

    assert (1, 1, 0, None, 0.0) == (
        row.requests,
        row.unknown,
        row.prompt_tokens,
        row.local_share,
        row.wait_seconds,
    )


def test_an_open_request_waits_until_the_last_event(tmp_path: Path) -> None:
    (row,) = summarize([journals.write(tmp_path / "open", events(10, "A0+0 s10 o+"))])

    assert (1, 0) == (row.requests, row.unknown)
    assert row.wait_seconds >= 0


def test_a_group_that_is_no_key_and_no_pattern_is_refused(golden: Path) -> None:
    with pytest.raises(LedgerError, match="none of engine, model, outcome"):
        summarize([golden], "(")
