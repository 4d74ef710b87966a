"""Which request each allocated block belongs to, found from a scheduler output or from block tables.

Pure functions over block ids and request numbers, without any object of vLLM. ``allocations`` calls them, and
``call_buffer`` writes the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

NO_REQUEST = -1
"""The owner of a block that is in no request's table."""

FIRST = itemgetter(0)


class BlockRun(NamedTuple):
    """Blocks in a row that belong to one request and KV cache group, or a table that ends with them."""

    request_no: int
    group: int
    blocks: list[int]


class NamedBlocks(NamedTuple):
    """The blocks that a scheduler output lists: new blocks of running requests, tables of admitted ones."""

    running: list[int]
    """Numbers of the requests that ran before and got blocks."""
    running_blocks: list[Sequence[Sequence[int]]]
    """The new blocks of each request in ``running``, by KV cache group."""
    admitted: list[tuple[int, Sequence[list[int]]]]
    """Numbers of the admitted requests and the whole table of each, by KV cache group."""


class Owners(NamedTuple):
    """Who owns the allocated blocks, in the order of allocation."""

    runs: list[BlockRun]
    """Runs of all blocks after those in ``of_single_blocks``."""
    of_single_blocks: Sequence[int] = ()
    """Owners of the first blocks: each got one block, for group 0."""
    tables_known: bool = False
    """Whether the table of each admitted request is its hits and then the blocks allocated for it."""


def attribute(allocated: list[int], named: NamedBlocks, hits: Mapping[int, list[int]]) -> Owners | None:
    """Find the owners of the ``allocated`` blocks from a scheduler output.

    ``hits`` are the blocks that were touched for the admitted requests. None: some allocated block is not in
    the output.
    """
    return _in_order(allocated, named, hits) or _by_last_blocks(allocated, _by_last(_runs(named), hits))


def owners_from_tables(
    allocated: list[int], tables: Iterable[BlockRun], hits: Mapping[int, list[int]]
) -> Owners:
    """Find the owners of the ``allocated`` blocks by matching these with the ends of tables.

    ``hits`` are as for :func:`attribute`. If several tables end with the same block, the last of these tables
    counts. A block that matches no table belongs to no request.
    """
    of_nobody = {block: BlockRun(NO_REQUEST, -1, [block]) for block in allocated}
    owners = _by_last_blocks(allocated, of_nobody | _by_last(tables, hits))
    assert owners is not None
    return owners


def _in_order(allocated: list[int], named: NamedBlocks, hits: Mapping[int, list[int]]) -> Owners | None:
    """The usual step: one block for each running request in the output's order, then those of admissions.

    One comparison of two lists proves the first part, whatever the number of requests.
    """
    try:
        singles = list(map(FIRST, map(FIRST, named.running_blocks)))
    except IndexError:  # a request got nothing of the first group
        return None
    end = len(singles)
    if allocated[:end] != singles:
        return None
    runs: list[BlockRun] = []
    for request_no, groups in named.admitted:
        table, hit_blocks = groups[0], hits.get(request_no, [])
        blocks = allocated[end : end + len(table) - len(hit_blocks)]
        end += len(blocks)
        if len(groups) != 1 or table != hit_blocks + blocks:
            return None
        runs.append(BlockRun(request_no, 0, blocks))
    return Owners(runs, named.running, tables_known=True) if end == len(allocated) else None


def _runs(named: NamedBlocks) -> Iterable[BlockRun]:
    for request_no, groups in chain(zip(named.running, named.running_blocks, strict=True), named.admitted):
        for group, blocks in enumerate(groups):
            yield BlockRun(request_no, group, list(blocks))


def _by_last(tables: Iterable[BlockRun], hits: Mapping[int, list[int]]) -> dict[int, BlockRun]:
    """The tables by their last block, without the hits.

    A request may hit blocks that were allocated in the same step, just before its own.
    """
    by_last: dict[int, BlockRun] = {}
    for table in tables:
        hit_blocks = hits.get(table.request_no)
        if hit_blocks:
            table = table._replace(blocks=[block for block in table.blocks if block not in hit_blocks])
        if table.blocks:
            by_last[table.blocks[-1]] = table
    return by_last


def _by_last_blocks(allocated: list[int], tables: dict[int, BlockRun]) -> Owners | None:
    """Cut ``allocated`` into runs, from its end, each the end of a table. None: a block ends no table.

    ``tables`` has each table by its last block. A table without its matched run may match an earlier run.
    """
    left = allocated.copy()
    runs: list[BlockRun] = []
    while left:
        table = tables.get(left[-1])
        if table is None:
            return None
        count = _common_end(left, table.blocks)
        runs.append(BlockRun(table.request_no, table.group, left[-count:]))
        del left[-count:]
        rest = table.blocks[:-count]
        if rest and (rest[-1] not in tables or tables[rest[-1]].request_no == NO_REQUEST):
            tables[rest[-1]] = table._replace(blocks=rest)  # else another table ends with this block
    return Owners(runs[::-1])


def _common_end(left: list[int], right: list[int]) -> int:
    """The number of equal blocks at the ends of both lists."""
    count = 0
    for ours, theirs in zip(reversed(left), reversed(right), strict=False):
        if ours != theirs:
            break
        count += 1
    return count
