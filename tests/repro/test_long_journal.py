"""Journals of very many requests: their copied stretches audit like one engine's long run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.repro.faults import FAULTS
from tests.repro.long_journal import stretches, write

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.journal.reader import Reader


def audited(folder: Path) -> Auditor:
    auditor = Auditor()
    with Reader(folder) as reader:
        for batch in reader.poll():
            for number, event in enumerate(batch.events, batch.first_event):
                auditor.feed(event, number)
    return auditor


@pytest.mark.parametrize("level", ["tokens", "blocks"])
def test_a_long_journal_has_one_request_with_a_finding(tmp_path: Path, level: str):
    ordinary, faulty = stretches(FAULTS["placeholder-leak"], level, 30)

    written = write(tmp_path / "journal", ordinary, faulty, 300)
    auditor = audited(tmp_path / "journal")

    findings = [each for each in auditor.violations if each.severity == "violation"]
    assert written == auditor.ledger.totals().requests >= 270
    assert 1 == len({each.request for each in findings if each.id == "tokens/in-flight"})
    assert {"tokens/in-flight", "tokens/without-token"} == {each.id for each in findings}
    assert not auditor.doubts
