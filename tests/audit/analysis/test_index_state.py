"""What an index is worth: exact since when, and what it lacks."""

from __future__ import annotations

import pytest

from kvledger.audit.analysis.routing import IndexState
from kvledger.audit.events import CLEARED, KEYED, LOOKAHEAD, STORED, KVEventsReceived

OTHER_TIER = 0


def batch(at: float, *rows: list[int], details: tuple[int, ...] = ()) -> KVEventsReceived:
    flat = [number for row in rows for number in row]
    return KVEventsReceived(0, 0, int(at), at, 0, ["CPU REMOTE"], flat, details=list(details))


def stored(*ids: int, parent: int = 0, size: int = 16, group: int = 0, tier: int = -1) -> list[int]:
    return [STORED, group, tier, size, parent, len(ids), *ids]


CLEAR = [CLEARED, -1, -1, 0, 0, 0]


@pytest.mark.parametrize(
    ("lost", "cleared", "since"),
    [(0.0, 0.0, 5.0), (0.0, 7.0, 5.0), (8.0, 0.0, None), (8.0, 7.0, None), (8.0, 9.0, 9.0)],
    ids=["whole", "whole and reset", "a gap", "a reset before the gap", "a reset after the gap"],
)
def test_an_index_is_exact_from_its_first_batch_or_from_the_first_reset_after_a_gap(
    lost: float, cleared: float, since: float | None
) -> None:
    state = IndexState()
    state.take(batch(5.0, stored(1)), (), 0, 16)
    if cleared:
        state.take(batch(cleared, CLEAR), (), 0, 16)
    state.lost = lost

    assert since == state.exact_since


def test_no_kv_events_are_no_exact_index() -> None:
    assert IndexState().exact_since is None


@pytest.mark.parametrize(
    ("row", "lacks"),
    [
        (stored(1, 2), {}),
        (stored(1, 2, size=32), {"other-size": 2}),
        (stored(3, parent=2), {}),
        (stored(3, parent=99), {"unknown-parent": 1}),
        (stored(3, size=4, group=1), {"other-groups": 1}),
        (stored(3, size=0, tier=OTHER_TIER), {"other-tiers": 1}),
    ],
)
def test_what_an_index_can_not_name_is_counted(row: list[int], lacks: dict[str, int]) -> None:
    state = IndexState()
    state.take(batch(5.0, row), {2}, 0, 16)

    assert lacks == state.lacks


def test_a_parent_in_the_same_batch_is_known() -> None:
    state = IndexState()
    state.take(batch(5.0, stored(1), stored(2, parent=1)), (), 0, 16)

    assert {} == state.lacks


def test_salts_and_lookahead_hashes_are_counted_in_blocks() -> None:
    state = IndexState()
    details = (-1, KEYED, 0, -1, LOOKAHEAD, 0, -1, 0, 0)
    state.take(batch(5.0, stored(1, 2), stored(3), stored(4), details=details), (), 0, 16)

    assert {"keyed": 2, "next-token": 1} == state.lacks
