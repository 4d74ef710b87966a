"""PoolCalls is split into one event for each call."""

from __future__ import annotations

import pytest

from kvledger.audit import events as ev
from kvledger.audit import pool_calls
from kvledger.audit.ledger.blocks.pool import calls

AT, STEP, POOL = 9, 4, 1
POOL_CODE = 8 * POOL

CALLS = {
    "allocated": (
        [POOL_CODE + ev.ALLOCATED, 7, 0, 1, 2, 30, 31],
        pool_calls.BlocksAllocated(AT, STEP, POOL, "allocate", [7, 0, 2, 30, 31]),
    ),
    "one block allocated to each request": (
        [POOL_CODE + ev.ALLOCATED_EACH, -1, 0, 1, 4, 30, 31, 7, 8],
        pool_calls.BlocksAllocated(AT, STEP, POOL, "allocate", [7, 0, 1, 30, 8, 0, 1, 31]),
    ),
    "cached, owner known by its table": (
        [POOL_CODE + ev.CACHED, -1, 0, 2 * -3, 3, 30, 5, 16],
        ev.BlocksCached(AT, STEP, POOL, [-1, 0, -3, 1, 30, 5, 16]),
    ),
    "touched": (
        [POOL_CODE + ev.TOUCHED, 7, 0, 0, 4, 30, 31, 2, 1],
        pool_calls.BlocksTouched(AT, STEP, POOL, 7, 0, "hit", [30, 31], [2, 1]),
    ),
    "freed without a table": (
        [POOL_CODE + ev.FREED, -1, -1, 0, 2, 30, 0],
        pool_calls.BlocksFreed(AT, STEP, POOL, -1, -1, "hit", [30], [0]),
    ),
    "cached": (
        [POOL_CODE + ev.CACHED, 7, 0, 2 * 20, 6, 30, 1 << 62, 16, 31, 5, 32],
        ev.BlocksCached(AT, STEP, POOL, [7, 0, 20, 2, 30, 1 << 62, 16, 31, 5, 32]),
    ),
    "cached, earlier hashes replaced": (
        [POOL_CODE + ev.CACHED, 7, 0, 2 * 20 + 1, 3, 30, 5, 16],
        ev.BlocksCached(AT, STEP, POOL, [7, 0, 20, 1, 30, 5, 16], True),
    ),
    "table reported": (
        [ev.TABLES_REPORTED, -1, -1, 0, 5, 7, 0, 16, 1, 30],
        pool_calls.TablesReported(AT, STEP, [7, 0, 16, 1, 30]),
    ),
    "table removed": ([ev.TABLES_REMOVED, 7, -1, 0, 0], pool_calls.TablesRemoved(AT, [7])),
}


def read(*rows: list[int]) -> list[ev.Event]:
    return list(
        calls(ev.PoolCalls(AT, STEP, ["hit", "allocate"], [number for row in rows for number in row]))
    )


@pytest.mark.parametrize("call", list(CALLS))
def test_each_kind_of_call_is_decoded(call: str) -> None:
    row, event = CALLS[call]

    assert [event] == read(row)


def test_calls_are_decoded_in_order() -> None:
    rows, events = zip(*CALLS.values(), strict=True)

    assert [*events, *events] == read(*rows, *rows)


def test_calls_of_a_later_step_have_its_number() -> None:
    removed = [ev.TABLES_REMOVED, 7, -1, 0, 0]
    rows = [
        removed,
        [ev.IN_STEP, -1, -1, STEP + 2, 0],
        [ev.FREED, 7, 0, 0, 2, 30, 0],
        CALLS["table reported"][0],
    ]

    assert [STEP, STEP + 2, STEP + 2] == [getattr(event, "step", STEP) for event in read(*rows)]


def test_each_call_has_the_stack_of_the_event() -> None:
    (allocated,) = calls(ev.PoolCalls(AT, STEP, ["allocate"], [ev.ALLOCATED, 7, 0, 0, 1, 30], ["here"]))

    assert pool_calls.BlocksAllocated(AT, STEP, 0, "allocate", [7, 0, 1, 30], ["here"]) == allocated
