"""The series of blocks that a connector moved."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvledger.audit.ledger.ledger_state import LedgerSums
from kvledger.exporters.metrics.values import content_transfers


def series(counts: Mapping[str, int], *, watches: bool = True) -> dict[str, float]:
    sums = LedgerSums(watches=int(watches), transfers=dict(counts))
    audit: Any = SimpleNamespace(auditor=SimpleNamespace(ledger=SimpleNamespace(sums=sums)))
    return {event: value for (event,), value in content_transfers(audit)}


def test_moved_blocks_are_counted_by_what_the_comparison_showed() -> None:
    counts = {
        "stored": 9,
        "store_differed": 1,
        "moved": 5,
        "transfer_differed": 2,
        "foreign": 3,
        "unknown": 4,
    }
    assert series(counts) == {
        "stored": 9.0,
        "stored_differed": 1.0,
        "loaded": 5.0,
        "loaded_differed": 2.0,
        "not_compared": 7.0,
    }


def test_below_level_content_there_are_no_series() -> None:
    assert series({"stored": 9}, watches=False) == {}
