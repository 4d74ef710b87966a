"""What other groups need at a boundary, and pools that can't be read."""

from __future__ import annotations

import pytest

from kvledger.audit import events as ev
from kvledger.audit.analysis.group_boundaries import CHUNKED, SLIDING, STATE, WHOLE, Group
from kvledger.audit.analysis.trace_reader import TraceReader


@pytest.mark.parametrize(
    ("group", "boundary", "ends"),
    [
        (Group(1, 16, STATE), 96, [96]),
        (Group(1, 16, SLIDING, 33), 96, [80, 96]),
        (Group(1, 16, SLIDING, 34), 96, [64, 80, 96]),
        (Group(1, 16, SLIDING, 64), 32, [16, 32]),
        (Group(1, 16, SLIDING, 1), 96, []),
        (Group(1, 16, CHUNKED, 64), 96, [80, 96]),
        (Group(1, 16, CHUNKED, 32), 96, []),
        (Group(1, 16, WHOLE), 96, [96]),
        (Group(1, 32, SLIDING, 64), 96, [64, 96]),
    ],
)
def test_a_group_needs_the_blocks_that_the_next_token_reads(
    group: Group, boundary: int, ends: list[int]
) -> None:
    assert ends == list(group.ends(boundary, 80))


def pool(groups: list[int], windows: list[int], number: int = 0) -> ev.PoolSeen:
    return ev.PoolSeen(0, 0, number, 100, 0, 99, 0, groups, windows)


@pytest.mark.parametrize(
    ("event", "others"),
    [
        (pool([0, 16, 2], []), []),
        (pool([0, 16, 2, 1, 16, 1], [1, 64, 0]), [Group(1, 16, SLIDING, 64)]),
        (pool([0, 16, 0, 1, 32, 2], [0, 1, 2]), [Group(0, 16, STATE, 1)]),
        (pool([0, 16, 2, 1, 16, 2], []), [Group(1, 16, WHOLE)]),
        (pool([0, 16, 2, 1, 16, 0], []), []),
        (pool([0, 16, 1], [0, 64, 0]), []),
        (pool([0, 16, 2, 1, 16, 1], [1, 0, 1]), []),
        (pool([0, 16, 2, 1, 16, 1], [1, 64, 7]), []),
        (pool([0, 16, 2, 1, 16, 1], []), []),
    ],
)
def test_groups_are_read_beside_the_first_of_full_attention(event: ev.PoolSeen, others: list[Group]) -> None:
    reader = TraceReader()
    reader.feed(event, ())

    assert others == reader.others
    assert bool(reader.problem) == (len(event.groups) > 3 or event.groups[2] != 2)
    assert reader.stopped == (bool(reader.problem) and not others)


def test_a_second_pool_can_not_be_read() -> None:
    reader = TraceReader()
    reader.feed(pool([0, 16, 2, 1, 16, 1], [1, 64, 0]), ())
    reader.feed(pool([2, 16, 2], [], 1), ())

    assert reader.stopped
