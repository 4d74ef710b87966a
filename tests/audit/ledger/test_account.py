"""Intervals of positions, where a history would say it at length."""

from __future__ import annotations

from kvledger.audit.ledger.positions import COMPUTED, EXTERNAL, PositionRanges


def test_what_one_life_had_from_outside_is_withdrawn_by_position():
    """Tokens of another life, and what was computed, stay: the count is of what had been first."""
    spans = PositionRanges()
    spans.fill(0, 32, EXTERNAL, 1)
    spans.fill(0, 96, EXTERNAL, 2)
    spans.fill(96, 120, COMPUTED, 2)

    assert 48 == spans.withdraw(16, 80, 2)
    assert {"local": 0, "external": 48, "computed": 24, "unattained": 48} == spans.tally(0, 120)
