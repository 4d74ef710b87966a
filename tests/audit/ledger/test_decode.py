"""Calls of pools that were told as one event are each for itself again when it is read."""

from __future__ import annotations

import pytest

from kvledger.audit import events as ev
from kvledger.audit import old_events
from kvledger.audit.ledger.blocks.decode import calls

AT, STEP, POOL = 9, 4, 1
WHAT = 8 * POOL

TOLD = {
    "taken": (
        [WHAT + ev.ALLOCATED, 7, 0, 1, 2, 30, 31],
        old_events.BlocksAllocated(AT, STEP, POOL, "allocate", [7, 0, 2, 30, 31]),
    ),
    "taken, one each": (
        [WHAT + ev.ALLOCATED_EACH, -1, 0, 1, 4, 30, 31, 7, 8],
        old_events.BlocksAllocated(AT, STEP, POOL, "allocate", [7, 0, 1, 30, 8, 0, 1, 31]),
    ),
    "hashed, whose table it stands in": (
        [WHAT + ev.CACHED, -1, 0, 2 * -3, 3, 30, 5, 16],
        ev.BlocksCached(AT, STEP, POOL, [-1, 0, -3, 1, 30, 5, 16]),
    ),
    "touched": (
        [WHAT + ev.TOUCHED, 7, 0, 0, 4, 30, 31, 2, 1],
        old_events.BlocksTouched(AT, STEP, POOL, 7, 0, "hit", [30, 31], [2, 1]),
    ),
    "freed by nobody": (
        [WHAT + ev.FREED, -1, -1, 0, 2, 30, 0],
        old_events.BlocksFreed(AT, STEP, POOL, -1, -1, "hit", [30], [0]),
    ),
    "hashed": (
        [WHAT + ev.CACHED, 7, 0, 2 * 20, 6, 30, 1 << 62, 16, 31, 5, 32],
        ev.BlocksCached(AT, STEP, POOL, [7, 0, 20, 2, 30, 1 << 62, 16, 31, 5, 32]),
    ),
    "hashed for something else": (
        [WHAT + ev.CACHED, 7, 0, 2 * 20 + 1, 3, 30, 5, 16],
        ev.BlocksCached(AT, STEP, POOL, [7, 0, 20, 1, 30, 5, 16], True),
    ),
    "stated": (
        [ev.TABLES_REPORTED, -1, -1, 0, 5, 7, 0, 16, 1, 30],
        old_events.TablesReported(AT, STEP, [7, 0, 16, 1, 30]),
    ),
    "gone": ([ev.TABLES_REMOVED, 7, -1, 0, 0], old_events.TablesRemoved(AT, [7])),
}


def read(*rows: list[int]) -> list[ev.Event]:
    return list(
        calls(ev.PoolCalls(AT, STEP, ["hit", "allocate"], [number for row in rows for number in row]))
    )


@pytest.mark.parametrize("what", list(TOLD))
def test_a_call_is_read_as_what_it_was(what: str) -> None:
    row, event = TOLD[what]

    assert [event] == read(row)


def test_calls_are_read_in_their_order() -> None:
    rows, events = zip(*TOLD.values(), strict=True)

    assert [*events, *events] == read(*rows, *rows)


def test_what_was_called_for_in_later_steps_is_told_of_those() -> None:
    gone = [ev.TABLES_REMOVED, 7, -1, 0, 0]
    rows = [gone, [ev.IN_STEP, -1, -1, STEP + 2, 0], [ev.FREED, 7, 0, 0, 2, 30, 0], TOLD["stated"][0]]

    assert [STEP, STEP + 2, STEP + 2] == [getattr(event, "step", STEP) for event in read(*rows)]


def test_each_call_has_the_stack_of_the_event() -> None:
    (taken,) = calls(ev.PoolCalls(AT, STEP, ["allocate"], [ev.ALLOCATED, 7, 0, 0, 1, 30], ["here"]))

    assert old_events.BlocksAllocated(AT, STEP, 0, "allocate", [7, 0, 1, 30], ["here"]) == taken
