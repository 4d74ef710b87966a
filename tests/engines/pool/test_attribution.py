"""Owners of allocated blocks, found from what an output names or from tables: ids and numbers, no engine."""

from __future__ import annotations

import pytest

from kvledger.audit.engines.pool.attribution import (
    NO_REQUEST,
    BlockRun,
    NamedBlocks,
    Owners,
    attribute,
    owners_from_tables,
)

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
