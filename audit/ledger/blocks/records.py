"""Plain data: what the ledger holds of a pool and of a block. A checkpoint saves it as it is."""

from __future__ import annotations

import msgspec

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


class InvalidKV(msgspec.Struct, frozen=True, gc=False):
    """Why a cached block's KV is not valid from position ``start`` up.

    ``why``: as in ``CachedContent``, or a cause of :mod:`kvledger.audit.causes` for which external tokens
    were not loaded.
    """

    why: str
    start: int


class Block(msgspec.Struct):
    """One physical block."""

    holders: list[Holder]
    """The known references to the block, oldest first."""
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
    invalid: InvalidKV | None = None
    """Why the block's KV is not valid although the block is cached; None: nothing says so."""
    reported: bool = False
    """Whether some holder is known only from a reported table, not from an allocation or touch."""
    operations: list[Operation] = []
    """The last operations on the block, oldest first."""
    allocations: list[int] = []
    """Step and request of the last two allocations, oldest first."""


class FailedLoad(msgspec.Struct):
    """A cached block whose load failed, while the life that caches it may still compute its tokens."""

    request: int
    request_id: str
    life: int
    valid_to: int
    """First position without valid KV. It rises with every step that computes the tokens again."""


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
    hashes: dict[int, int]
    """Number of blocks by hash id."""
    hashes_known: bool
    """Whether ``hashes`` are all hashes of the cache map."""
    prefix_groups: list[int] = []
    """Groups in which a hit needs every block below it."""
    removed: dict[int, tuple[int, int, str]] = {}
    """Hash ids that left the cache map: the step, the step of their return (-1: none yet), and how."""
    records: dict[int, Block] = {}
    """Records of single blocks, by block id."""


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
