"""The proof of the mutants: its page has each, and a few of them are found."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from proofs.mutants import drives
from proofs.mutants.judge import MUTANTS

from kvledger.audit.planted.fault import planted
from kvledger.audit.planted.table import BY_NAME


def test_the_page_has_every_mutant() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "mutants.md").read_text()
    names = [mutant.name for mutant in MUTANTS]

    assert [] == [name for name in names if f"| {name} |" not in page and f"| [{name}](" not in page]


@pytest.mark.parametrize(
    ("name", "drive", "level", "finding"),
    [
        ("preempt-keeps-computed", "preempt_prefill_sync", "tokens", ("tokens/reset-on-preemption", "late")),
        ("rejected-kept", "speculative_sync", "tokens", ("tokens/balance", "a")),
        ("tail-leaks", "cold", "blocks", ("blocks/leak", "r")),
        ("preempt-lost", "preempt_prefill_sync", drives.CHECKS, ("requests/queued-once", None)),
    ],
)
def test_a_mutant_is_found_and_the_engine_is_restored(
    name: str, drive: str, level: str, finding: tuple[str, str | None]
) -> None:
    with planted(BY_NAME[name]):
        seen = drives.seen(drive, level)

    assert finding in seen.findings, seen.raised
    assert {} == drives.seen(drive, level).findings
