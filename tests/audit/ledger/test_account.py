"""Ranges of positions, where a whole history would be long-winded."""

from __future__ import annotations

from kvledger.audit.ledger.account import COMPUTED, EXTERNAL, PositionRanges


def test_external_tokens_of_one_life_are_withdrawn_by_position():
    """Tokens of another life and computed tokens stay; only tokens whose first origin it was are counted."""
    positions = PositionRanges()
    positions.fill(0, 32, EXTERNAL, 1)
    positions.fill(0, 96, EXTERNAL, 2)
    positions.fill(96, 120, COMPUTED, 2)

    assert 48 == positions.withdraw(16, 80, 2)
    assert {"local": 0, "external": 48, "computed": 24, "unattained": 48} == positions.tally(0, 120)
