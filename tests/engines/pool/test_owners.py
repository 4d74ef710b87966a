"""Owners of allocated blocks, found from what an output names or from tables, and how calls are encoded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvledger.audit import events as ev
from kvledger.audit.engines.pool.attribution import (
    NO_REQUEST,
    BlockRun,
    NamedBlocks,
    Owners,
    attribute,
    owners_from_tables,
)
from kvledger.audit.engines.pool.call_buffer import STACK_LINES, CallBuffer, Caller, Callers
from kvledger.audit.engines.pool.hash_tracker import hash_ids
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.ledger.blocks.pool import calls

# --- Owners of allocated blocks, found from what an output names or from tables: ids and numbers, no engine.


NOTHING = NamedBlocks([], [], [])


def runs(owners: Owners | None) -> list[tuple[int, int, list[int]]]:
    assert owners is not None
    return [tuple(run) for run in owners.runs]  # type: ignore[misc]


def test_running_requests_get_one_block_each_in_the_order_of_the_output() -> None:
    named = NamedBlocks([4, 7], [([11],), ([12],)], [])

    assert Owners([], [4, 7], tables_known=True) == attribute([11, 12], named, {})


def test_admitted_requests_get_their_tables_without_the_hits() -> None:
    named = NamedBlocks([4], [([11],)], [(8, ([1, 2, 12],)), (9, ([13],))])

    owners = attribute([11, 12, 13], named, {8: [1, 2]})

    assert Owners([BlockRun(8, 0, [12]), BlockRun(9, 0, [13])], [4], tables_known=True) == owners


def test_an_admitted_request_whose_whole_table_is_hits_gets_no_block() -> None:
    owners = attribute([11], NamedBlocks([4], [([11],)], [(8, ([1, 2],))]), {8: [1, 2]})

    assert owners is not None
    assert owners.tables_known
    assert [BlockRun(8, 0, [])] == owners.runs


@pytest.mark.parametrize(
    "named",
    [
        NamedBlocks([4, 7], [([12],), ([11],)], []),  # another order
        NamedBlocks([4, 7], [([11],), ([12],)], [(8, ([1, 2],))]),  # hits that were not touched
        NamedBlocks([4], [([11, 12],)], []),  # several blocks for one request
        NamedBlocks([4], [([11], [12])], []),  # two groups
        NamedBlocks([4], [([], [11, 12])], []),  # nothing of the first group
    ],
)
def test_in_any_other_order_blocks_belong_to_the_table_that_ends_with_them(named: NamedBlocks) -> None:
    owners = attribute([11, 12], named, {})

    assert owners is not None
    assert not owners.tables_known
    assert [11, 12] == [block for run in owners.runs for block in run.blocks]


def test_the_tables_of_two_requests_cut_the_allocated_blocks_where_each_ends() -> None:
    named = NamedBlocks([4, 7], [([11, 12],), ([13, 14],)], [])

    assert [(4, 0, [11, 12]), (7, 0, [13, 14])] == runs(attribute([11, 12, 13, 14], named, {}))


def test_the_blocks_of_one_table_may_be_allocated_in_two_parts() -> None:
    named = NamedBlocks([4, 7], [([11, 13],), ([12],)], [])

    assert [(4, 0, [11]), (7, 0, [12]), (4, 0, [13])] == runs(attribute([11, 12, 13], named, {}))


@pytest.mark.parametrize("named", [NOTHING, NamedBlocks([4], [([11],)], []), NamedBlocks([4], [([13],)], [])])
def test_an_output_that_does_not_name_every_block_proves_nothing(named: NamedBlocks) -> None:
    assert attribute([11, 12], named, {}) is None


def test_an_output_that_names_a_block_that_was_not_allocated_is_not_in_order() -> None:
    owners = attribute([11], NamedBlocks([4, 7], [([11],), ([12],)], []), {})

    assert owners is not None
    assert not owners.tables_known


def test_a_block_that_no_table_ends_with_belongs_to_no_request() -> None:
    tables = [BlockRun(4, 0, [1, 11]), BlockRun(7, 0, [2, 13])]

    owners = owners_from_tables([11, 12, 13], tables, {})

    assert [(4, 0, [11]), (NO_REQUEST, -1, [12]), (7, 0, [13])] == runs(owners)


def test_the_last_of_two_tables_with_the_same_end_has_precedence() -> None:
    tables = [BlockRun(4, 0, [11]), BlockRun(7, 0, [11])]

    assert [(7, 0, [11])] == runs(owners_from_tables([11], tables, {}))


def test_a_block_that_the_next_request_hits_belongs_to_the_request_it_was_allocated_for() -> None:
    """Request 9 hits block 12 of request 8, which was admitted just before; request 4 was resumed."""
    hits = {4: [1], 9: [12]}
    named = NamedBlocks([4], [([1, 11],)], [(8, ([12],)), (9, ([12, 13],))])
    tables = [BlockRun(4, 0, [1, 11]), BlockRun(8, 0, [12]), BlockRun(9, 0, [12, 13])]

    expected = [(4, 0, [11]), (8, 0, [12]), (9, 0, [13])]
    assert expected == runs(attribute([11, 12, 13], named, hits))
    assert expected == runs(owners_from_tables([11, 12, 13], tables, hits))


def test_attribution_changes_none_of_its_arguments() -> None:
    allocated, table = [11, 12], [1, 11, 12]
    named = NamedBlocks([], [], [(4, (table,))])
    attribute(allocated, named, {})
    owners_from_tables(allocated, [BlockRun(4, 0, table)], {4: [1]})

    assert ([11, 12], [1, 11, 12]) == (allocated, table)


# --- calls are encoded in their order, and allocations where they were made, when their owners are known --


def buffer() -> CallBuffer:
    return CallBuffer(StepLog(MemoryRecorder()), lambda: 3)


def blocks(*ids: int) -> list[Any]:
    return [SimpleNamespace(block_id=block_id, ref_cnt=1) for block_id in ids]


def emitted(of: CallBuffer) -> list[tuple[str, Any]]:
    """Each call by its kind and blocks, after decoding."""
    event = of.take(3, None)
    return [] if event is None else [(type(call).__name__, _blocks(call)) for call in calls(event)]


def _blocks(call: ev.Event) -> Any:
    return call.rows if isinstance(call, ev.BlocksAllocated) else getattr(call, "blocks", None)


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


# --- hash ids: numbers that stand for block hashes --------------------------------------------------------


SAY = "print(hash_ids()(b'a'))"


def test_equal_hashes_have_one_id_and_other_hashes_another() -> None:
    name = hash_ids()

    assert name(b"a") == name(b"a") != name(b"b")


def test_an_id_does_not_reveal_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert hash_ids()(b"a") != hash_ids()(b"a") != hash(b"a")


def test_the_id_of_bytes_is_their_python_hash_where_that_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    told = [sys.executable, "-c", "from kvledger.audit.engines.pool.hash_tracker import hash_ids\n" + SAY]

    assert hash is hash_ids()
    assert subprocess.check_output(told) != subprocess.check_output(told)


def test_no_hash_has_the_id_minus_one() -> None:
    assert -1 not in [hash_ids()(b"%d" % n) for n in range(1000)]


# --- the caller of a pool, read off the stack of stand-ins for the engine's classes -----------------------


Asked = Callable[[], Caller]


def asking(callers: Callers) -> Asked:
    """The wrapper of a pool's method, which returns its caller."""

    def get_new_blocks() -> Caller:
        return callers.caller()

    return get_new_blocks


class Manager:
    """Of one group."""

    kv_cache_group_id = 2

    def __init__(self, pool: Asked) -> None:
        self.pool = pool

    def allocate_new_blocks(self, request_id: str) -> Caller:
        return self.pool()

    def allocate_by_a_helper(self, request_id: str) -> Caller:
        return _help(self.pool)


class Coordinator:
    """Of all groups: it has a request, and no group."""

    def __init__(self, pool: Asked) -> None:
        self.pool = pool

    def free(self, request_id: str) -> Caller:
        return self.pool()


def _help(pool: Asked) -> Caller:
    return pool()


def test_the_manager_of_a_group_calls_for_a_request() -> None:
    manager = Manager(asking(Callers()))

    assert Caller("r", 2, "allocate_new_blocks") == manager.allocate_new_blocks("r")
    assert Caller("s", 2, "allocate_new_blocks") == manager.allocate_new_blocks("s")


def test_frames_further_up_are_not_read() -> None:
    """A request's id there may be another request's: what the helper allocates is a pin."""
    assert Caller(None, -1, "_help") == Manager(asking(Callers())).allocate_by_a_helper("r")


def test_a_manager_without_a_group_calls_for_no_request() -> None:
    assert Caller(None, -1, "free") == Coordinator(asking(Callers())).free("r")


def test_a_pool_that_passes_a_call_on_is_skipped() -> None:
    pool = asking(Callers())

    def free_blocks() -> Caller:
        return pool()

    assert Caller("r", 2, "allocate_new_blocks") == Manager(free_blocks).allocate_new_blocks("r")


def test_our_own_frames_are_skipped() -> None:
    nobody = Callers(__name__)

    assert Manager(asking(nobody)).allocate_new_blocks("r").by not in ("allocate_new_blocks", "_help")


def test_a_stack_has_a_line_a_frame_innermost_last() -> None:
    stack = Callers().stack()

    assert STACK_LINES == len(stack)
    assert stack[-1].startswith(f"{__file__}:")
    assert stack[-1].endswith(" test_a_stack_has_a_line_a_frame_innermost_last")
