"""Calls are encoded in their order, and allocations where they were made, when their owners are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvledger.audit import events as ev
from kvledger.audit import pool_calls
from kvledger.audit.engines.pool.attribution import NO_REQUEST, BlockRun, Owners
from kvledger.audit.engines.pool.call_buffer import CallBuffer
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.journal.memory_recorder import MemoryRecorder
from kvledger.audit.ledger.blocks.pool import calls


def buffer() -> CallBuffer:
    return CallBuffer(StepLog(MemoryRecorder()), lambda: 3)


def blocks(*ids: int) -> list[Any]:
    return [SimpleNamespace(block_id=block_id, ref_cnt=1) for block_id in ids]


def emitted(of: CallBuffer) -> list[tuple[str, Any]]:
    """Each call by its kind and blocks, after decoding."""
    event = of.take(3, None)
    return [] if event is None else [(type(call).__name__, _blocks(call)) for call in calls(event)]


def _blocks(call: ev.Event) -> Any:
    return call.rows if isinstance(call, pool_calls.BlocksAllocated) else getattr(call, "blocks", None)


def test_an_empty_buffer_has_no_event() -> None:
    assert buffer().take(3, None) is None


def test_a_taken_event_leaves_the_buffer_empty() -> None:
    calls = buffer()
    calls.blocks_freed(0, 1, 0, "free", [5], [0])

    assert calls.take(3, None) is not None
    assert calls.take(3, None) is None


def test_allocations_are_written_where_they_were_made() -> None:
    made = buffer()
    made.allocated += blocks(11)
    made.blocks_touched(0, 8, 0, "allocate", [1], [2])
    made.allocated += blocks(12, 13)
    made.blocks_freed(0, 9, 0, "free", [2], [0])
    made.set_owners(Owners([BlockRun(8, 0, [12, 13])], [4]), made.allocated_ids())

    assert [
        ("BlocksAllocated", [4, 0, 1, 11]),
        ("BlocksTouched", [1]),
        ("BlocksAllocated", [8, 0, 2, 12, 13]),
        ("BlocksFreed", [2]),
    ] == emitted(made)


def test_a_run_that_another_call_interrupted_is_written_in_two_parts() -> None:
    made = buffer()
    made.allocated += blocks(11)
    made.blocks_freed(0, 9, 0, "free", [2], [0])
    made.allocated += blocks(12)
    made.set_owners(Owners([BlockRun(8, 0, [11, 12])]), made.allocated_ids())

    assert [
        ("BlocksAllocated", [8, 0, 1, 11]),
        ("BlocksFreed", [2]),
        ("BlocksAllocated", [8, 0, 1, 12]),
    ] == emitted(made)


def test_single_blocks_are_written_on_both_sides_of_a_call_too() -> None:
    made = buffer()
    made.allocated += blocks(11)
    made.blocks_freed(0, 9, 0, "free", [2], [0])
    made.blocks_freed(0, 9, 0, "free", [3], [0])
    made.allocated += blocks(12)
    made.set_owners(Owners([], [4, 7]), made.allocated_ids())

    assert [
        ("BlocksAllocated", [4, 0, 1, 11]),
        ("BlocksFreed", [2]),
        ("BlocksFreed", [3]),
        ("BlocksAllocated", [7, 0, 1, 12]),
    ] == emitted(made)


def test_freed_tables_are_in_table_order() -> None:
    made = buffer()
    made.blocks_freed(0, 9, 1, "free", [7, 6, 5], [0, 0, 0])
    made.blocks_freed(0, NO_REQUEST, -1, "unpin_blocks", [3], [0])

    assert [BlockRun(9, 1, [5, 6, 7])] == made.freed_tables()


def test_touched_blocks_are_the_hits_of_their_request() -> None:
    made = buffer()
    made.blocks_touched(0, 8, 0, "allocate", [1, 2], [2, 2])
    made.blocks_touched(0, NO_REQUEST, -1, "pin", [3], [2])

    assert {8: [1, 2]} == made.hits


def test_a_request_keeps_its_number_until_its_tables_are_removed() -> None:
    made = buffer()
    number = made.request_nos["r"]
    made.log.ids.clear()
    assert number == made.request_nos["r"]

    made.tables_removed("r")
    made.tables_removed("r")

    assert [("TablesRemoved", None)] == emitted(made)
    assert number != made.request_nos["r"]
