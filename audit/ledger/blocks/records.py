"""What is kept of one pool and of one block: its holders, its hashes, the last operations on it.

Plain data: a checkpoint writes it as it is.
"""

from __future__ import annotations

import msgspec

OPERATIONS_KEPT = 6
"""The last so many operations on a block are remembered."""

UNKNOWN = -1

TABLE, DEFERRED, COPY, PIN = "table", "deferred", "copy", "pin"


class Holder(msgspec.Struct, frozen=True, gc=False):
    """One reference to a block.

    ``kind``: ``table`` (of a request and group), ``deferred`` (it comes back later), ``copy`` (one end
    of a copy that is still to be made) or ``pin`` (a connector's, or the engine's own).
    """

    kind: str
    request: int
    request_id: str
    life: int
    group: int

    def __str__(self) -> str:
        if self.kind == PIN:
            return "a pin outside of any table"
        whose = f"request {self.request_id}, life {self.life}" if self.request >= 0 else "nobody"
        return {
            TABLE: f"{whose}, group {self.group}",
            DEFERRED: f"{whose}, a deferred free",
            COPY: f"{whose}, a pending copy",
        }[self.kind]


class Operation(msgspec.Struct, frozen=True, gc=False):
    """Something that was done to blocks, and by whom."""

    step: int
    at: int
    what: str
    by: str
    request_id: str
    life: int
    group: int
    stack: list[str] | None


class Block(msgspec.Struct):
    """One physical block. ``end``: the positions below it, of its hasher, are what its hash promises."""

    holders: list[Holder]
    known: bool
    hashed: int
    names: list[int]
    end: int = 0
    hasher: int = UNKNOWN
    learned: bool = False
    """Some holder is known from a table that was stated, not from how it came to be."""
    operations: list[Operation] = []


class Pool(msgspec.Struct):
    """One pool. Blocks without a record are ``idle`` (free, known) and ``hashed`` or not, or unknown."""

    blocks: int
    null_block: int
    idle: bool
    hashed: int
    free_blocks: int
    groups: dict[int, tuple[int, bool]]
    """Tokens a block, and whether a place in a table stands for positions, by group."""
    hashes: dict[int, int]
    """Blocks by name of their hash."""
    named: bool
    """Whether the names are all that the cache map has."""
    whole: list[int] = []
    """Groups in which a hit needs every block below it."""
    lost: dict[int, tuple[int, int, str]] = {}
    """Names that left the cache: in which step, in which they came back (-1: not yet), and how."""
    records: dict[int, Block] = {}


def remember(record: Block, done: Operation) -> None:
    """Add an operation to a block's last ones."""
    record.operations.append(done)
    if len(record.operations) > OPERATIONS_KEPT:
        del record.operations[0]


def written(name: int) -> str:
    """The name of a hash as a person reads it."""
    return f"h{name & 2**64 - 1:x}"
