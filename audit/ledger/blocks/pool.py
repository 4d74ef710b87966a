"""What a block pool holds: plain data of pools and blocks, which a checkpoint saves as it is.

Also here: how a :class:`~kvledger.audit.events.PoolCalls` is split into one event for each call, which the
ledger of blocks posts and ``contents.py`` makes changes of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from ... import events as ev
from ..account import Made

# --- records -------------------------------------------------------------------------------------------
#
# Plain data: what the ledger holds of a pool and of a block. A checkpoint saves it as it is.


OPERATIONS_KEPT = 6
"""How many operations are remembered for each block."""

UNKNOWN = -1
"""A count, request or step that is not known."""

TABLE, DEFERRED, COPY, PIN = "table", "deferred", "copy", "pin"
"""Kinds of holders, see :class:`Holder`."""


class Holder(msgspec.Struct, frozen=True, gc=False):
    """One reference to a block.

    ``kind``: ``table`` (the block table of a request and group), ``deferred`` (the free is deferred),
    ``copy`` (one end of a pending copy) or ``pin`` (of a connector, or the engine's own).
    """

    kind: str
    request: int
    request_id: str
    life: int
    group: int

    def __str__(self) -> str:
        if self.kind == PIN:
            return "a pin outside the block tables"
        whose = f"request {self.request_id}, life {self.life}" if self.request >= 0 else "no request"
        return {
            TABLE: f"{whose}, group {self.group}",
            DEFERRED: f"{whose}, a deferred free",
            COPY: f"{whose}, a pending copy",
        }[self.kind]


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One operation on blocks: what was done, by which engine operation, for which request."""

    step: int
    at: int
    what: str
    by: str
    request_id: str
    life: int
    group: int
    stack: list[str] | None
    hash_ids: list[int] = []
    """The hashes that the operation gave the block, or took from it."""
    end: int = UNKNOWN
    """The block was cached for positions below this one."""

    def __str__(self) -> str:
        hashes = ", ".join(map(hash_text, self.hash_ids))
        if self.end >= 0:
            return f"{self.what} {hashes} up to {self.end}"
        return f"{self.what}, evicting {hashes}" if hashes else self.what


Lack = tuple[int, int, str]
"""Positions without valid KV, start and end, and why: a word of :mod:`.reads`, or a cause of
:mod:`kvledger.audit.causes` for which external tokens were not loaded."""


class Filled(msgspec.Struct, frozen=True, gc=False):
    """Which life fills a block, or has filled it. The blocks of a life share it."""

    request: int
    request_id: str
    life: int
    lacks: list[Lack] | None = None
    """The positions that the life left without valid KV; None while it lasts, and if it is not known.

    Of a block that was not cached these are the positions of the whole life.
    """
    made: list[Made] | None = None
    """Under which weights the life filled the block; None: before the first change, or the life lasts."""


class LifeLacks(msgspec.Struct):
    """The blocks of a life that lasts, and what its count does not say of them."""

    life: int
    call: int = 0
    """The number of the call that allocated its first block."""
    step: int = UNKNOWN
    """The step of this call."""
    blocks: list[tuple[int, int]] = []
    """Pool and block of each block that was allocated to the life."""
    holder: Holder | None = None
    """How the life holds the last of them."""
    filled: Filled | None = None
    """What they share as long as the life lasts."""
    never_loaded: list[Lack] = []
    """Positions that the engine takes as loaded and that were not."""
    loaded_end: int = UNKNOWN
    """A load failed in part: the blocks of the load, which ends here, have KV unless they are ``failed``."""
    failed: set[tuple[int, int]] = set()
    """The blocks (pool, block) that failed to load."""
    tainted_from: int = UNKNOWN
    """The first position that was computed from KV that was not valid; -1: none is known."""


class Rewrite(msgspec.Struct):
    """A session's next chunk begins at position ``begin``, and some of its cached blocks end above it.

    ``blocks``: pool, block and hash id of each of them into which no step has written since.
    """

    begin: int
    blocks: list[tuple[int, int, int]]


class Block(msgspec.Struct):
    """One physical block."""

    holders: dict[int, Holder]
    """The known references to the block, oldest first. The one of a table has the key :func:`table_key`, so
    the time to find it does not depend on how many requests share the block. All others, and the second one
    of a table, have keys below 0."""
    holders_known: bool
    """Whether all references are known."""
    has_hash: int
    """1: the block has a hash; 0: it has none; -1: not known."""
    hash_ids: list[int]
    """Ids of the block's hashes, as far as known."""
    end: int = 0
    """The hashes cover the positions of ``cached_for`` below this one."""
    cached_for: int = UNKNOWN
    """The request whose tokens the hashes cover."""
    writer: str = ""
    """Id of the same request, which may have ended."""
    isolation: list[int] | None = None
    """The isolation classes under which the KV below ``least_end`` was written; None: not known."""
    least_end: int = 0
    """The shortest of the block's hashes covers the positions below this one."""
    filled: Filled | None = None
    """Which life fills the block; None: not known."""
    begin: int = UNKNOWN
    """The first position of the block, from its last hash; -1: it was not cached since it was allocated."""
    room_end: int = UNKNOWN
    """One above the last position for which the block has room."""
    of_state: bool = False
    """Whether its last hash is that of a state, which stands for every position below its end."""
    wrong: list[Lack] = []
    """Positions at which the KV is not that of the tokens for which the hash stands, and why."""
    reported: bool = False
    """Whether some holder is known only from a reported table, not from an allocation or touch."""
    operations: list[Operation] = []
    """The last operations on the block, oldest first."""
    allocations: list[int] = []
    """Step and request of the last two allocations, oldest first."""
    other_holders: int = 0
    """How many of ``holders`` have keys below 0."""


class Window(msgspec.Struct, frozen=True, gc=False):
    """What a token reads in a group with windows. ``in_chunks``: windows begin at multiples of ``tokens``."""

    tokens: int
    in_chunks: bool

    def first_read(self, position: int) -> int:
        """The first position that the token at ``position`` reads."""
        if self.in_chunks:
            return position // self.tokens * self.tokens
        return max(0, position - self.tokens + 1)


class Absent(msgspec.Struct, gc=False):
    """Where the table of a life begins in a group with windows.

    ``end``: the end of the positions below it. Negative until the life's first step is posted: how far it is
    below the end of the slots that this step fills. ``block``: the last block that left the table; the null
    block where the admission left it absent.
    """

    life: int
    end: int
    block: int


Removed: TypeAlias = tuple[int, int, int, int, str, int, int]
"""How a hash id left the cache map: since when and for whom it was there, the step in which it left, the step
of its return (-1: none yet), how it left, the request that got its block (-1: none), and how many calls had
allocated blocks by then."""


class CachedHash(msgspec.Struct, gc=False):
    """A hash id in the cache map."""

    end: int
    """The end of the positions that the hash covers."""
    step: int
    """The step since which it is there."""
    request: int
    """For which request it came."""
    blocks: int = 0
    """How many blocks have it."""


class Pool(msgspec.Struct):
    """One block pool."""

    blocks: int
    """Number of blocks, including the null block."""
    null_block: int
    """Id of the null block; -1: the pool has none."""
    idle: bool
    """Whether a block without a record is free."""
    has_hash: int
    """Whether a block without a record has a hash; as in :class:`Block`."""
    free_blocks: int
    """Length of the free queue, by the ledger's own count."""
    groups: dict[int, tuple[int, bool]]
    """By group: tokens per block, and whether an index in a table is a position."""
    hashes: dict[int, CachedHash]
    """The cache map, by hash id."""
    hashes_known: bool
    """Whether ``hashes`` are all hashes of the cache map."""
    since_start: bool = False
    """Whether all that was cached since the engine began was observed: it is known what never was."""
    prefix_groups: list[int] = []
    """Groups in which a hit needs every block below it."""
    windows: dict[int, Window] = {}
    """By group: what a token reads; a group that is absent has no window, or it is not known."""
    states: list[int] = []
    """Groups of states: a block has one checkpoint, of the prefix that ends with its last position."""
    removed: dict[int, Removed] = {}
    """Hash ids that left the cache map, the last ones."""
    forgotten_hashes: int = 0
    """How many of them are not remembered any more."""
    records: dict[int, Block] = {}
    """Records of single blocks, by block id."""


def table_key(request: int, group: int) -> int:
    """The key of the reference that the table of a request and group has to a block."""
    return (request << 8) + group + 1


def table_holders(pool: Pool, record: Block, request: int) -> list[Holder]:
    """The references of a request's tables to a block."""
    holders = record.holders
    keys = [table_key(request, group) for group in (UNKNOWN, *pool.groups)]
    found = [holders[key] for key in keys if key in holders]
    if record.other_holders:
        found += [h for key, h in holders.items() if key < 0 and (h.kind, h.request) == (TABLE, request)]
    return found


def oldest(record: Block) -> Holder | None:
    """The oldest known reference to a block."""
    return next(iter(record.holders.values()), None)


def usable(pool: Pool) -> int:
    """Blocks of a pool that requests can use."""
    return pool.blocks - (pool.null_block >= 0)


def used(pool: Pool) -> int:
    """Blocks of a pool that are in use."""
    return usable(pool) - pool.free_blocks


def remember(record: Block, done: Operation) -> None:
    """Remember an operation on a block."""
    record.operations.append(done)
    if len(record.operations) > OPERATIONS_KEPT:
        del record.operations[0]


def hash_text(hash_id: int) -> str:
    """A hash id in words."""
    return f"h{hash_id & 2**64 - 1:x}"


# --- split calls ---------------------------------------------------------------------------------------
#
# Split a :class:`~kvledger.audit.events.PoolCalls` into one event for each call of a pool.


_last_split: tuple[ev.PoolCalls | None, list[ev.Event]] = (None, [])
"""The event that was split last, and its calls: the ledger and the observers of an audit read one event in
turn, so it is split once for all of them."""


def calls(event: ev.PoolCalls) -> list[ev.Event]:
    """The calls in order, as events that the ledger of blocks posts. All readers share them, unchanged."""
    global _last_split
    last, split = _last_split
    if last is not event:
        split = list(_split(event))
        _last_split = event, split
    return split


def _split(event: ev.PoolCalls) -> Iterator[ev.Event]:
    at, step, stack, rows = event.at, event.step, event.stack, ev.numbers(event.rows)
    start = 0
    while start < len(rows):
        code, request, group, more, count = rows[start : start + ev.HEAD]
        start += ev.HEAD + count
        follow = rows[start - count : start]
        pool, code = divmod(code, 8)
        if code == ev.CACHED:
            row = [request, group, more >> 1, count // 3, *follow]
            yield ev.BlocksCached(at, step, pool, row, bool(more & 1), stack)
        elif code == ev.ALLOCATED:
            yield ev.BlocksAllocated(at, step, pool, event.by[more], [request, group, count, *follow], stack)
        elif code in (ev.TOUCHED, ev.FREED):
            kind = ev.BlocksTouched if code == ev.TOUCHED else ev.BlocksFreed
            half = count // 2
            by, ids, references = event.by[more], follow[:half], follow[half:]
            yield kind(at, step, pool, request, group, by, ids, references, stack)
        elif code == ev.ALLOCATED_EACH:
            half = count // 2
            allocated = [group, group, 1, group] * half
            allocated[::4], allocated[3::4] = follow[half:], follow[:half]
            yield ev.BlocksAllocated(at, step, pool, event.by[more], allocated, stack)
        elif code == ev.IN_STEP:
            step = more
        elif code == ev.TABLES_REPORTED:
            yield ev.TablesReported(at, step, follow)
        else:
            yield ev.TablesRemoved(at, [request])
