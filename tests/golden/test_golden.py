"""Commands print about recorded journals what they printed before.

A difference is a defect, unless the figure before was wrong. Then ``python -m tests.golden.outputs`` writes
the files anew, and the commit says why the new figures are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.outputs import PRINTED, corpora, outputs, unpacked

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.checks.registry import catalogue
from kvledger.audit.ledger.entries import Entry
from kvledger.audit.replay.journals import audit_paths


@pytest.mark.golden
@pytest.mark.parametrize("corpus", corpora())
def test_commands_print_what_they_printed_before(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("scheduler-0.32.0-tokens", corpus):
        unpacked(tmp_path, each)
    before = {path.name: path.read_text() for path in (PRINTED / corpus).iterdir()}

    assert before == dict(outputs(corpus))


@pytest.mark.golden
@pytest.mark.parametrize("corpus", corpora())
def test_checks_are_left_out_only_where_they_find_nothing(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked(tmp_path, corpus)
    left_out: list[str] = []
    check = Auditor.check

    def noted(auditor: Auditor, entries: list[Entry]) -> object:
        for entry in entries:
            for row in catalogue().values():
                on = type(entry.subject) in row.on and entry.account and entry.account.unknown is None
                usual = row.unless.get(type(entry.subject))
                if on and usual is not None and usual(entry):
                    left_out.append(row.id)
                    assert [] == list(row.check(entry)), row.id
        return check(auditor, entries)

    monkeypatch.setattr(Auditor, "check", noted)
    audit_paths([tmp_path / corpus])

    assert left_out
