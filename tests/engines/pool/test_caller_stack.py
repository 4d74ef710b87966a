"""The caller of a pool, read off the stack of stand-ins for the engine's classes."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.audit.engines.pool.caller_stack import STACK_LINES, Caller, Callers

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
