"""What the ledger of blocks gives the checks to see: two sides of one thing, or what can't be.

Each names its block and comes with the block's story, a line a holder and operation. A figure of -1 is
not known.
"""

from __future__ import annotations

from typing import NamedTuple

from .records import Holder, Operation


class Collision(NamedTuple):
    """A block came to a second holder where it must not. ``how``: ``taken``, ``unhashed``, ``twice``.

    ``taken``: handed out as free while somebody held it. ``unhashed``: taken for a cached block, and it
    has no hash. ``twice``: it stands in two places of one request's tables.
    """

    how: str
    pool: int
    block: int
    first: Holder | None
    second: Holder
    references: int
    story: list[str]


class StrayFree(NamedTuple):
    """A block was given back by one who does not hold it. ``earlier``: who gave it back before."""

    pool: int
    block: int
    by: Operation
    earlier: Operation | None
    references: int
    story: list[str]


class BlockStatement(NamedTuple):
    """What the engine says of a block beside what the ledger holds. -1: the ledger does not know."""

    pool: int
    block: int
    references: int
    ledger_references: int
    queued: int
    hashed: int
    ledger_hashed: int
    mapped: int
    holders: list[str]
    story: list[str]


class PoolStatement(NamedTuple):
    """The lengths of a pool's free queue and cache map beside the ledger's; -1: not known."""

    pool: int
    free_blocks: int
    ledger_free_blocks: int
    hashes: int
    ledger_hashes: int


class HashedContent(NamedTuple):
    """A block is hashed for positions whose KV has not come to be.

    ``why``: ``sequence`` (the request has only ``limit`` tokens), ``pending`` (an asynchronous load has
    not finished: ``limit`` were there), ``failed`` (a load failed from position ``limit`` up).
    """

    why: str
    request_id: str
    pool: int
    block: int
    end: int
    limit: int
    story: list[str]


class SharedWrite(NamedTuple):
    """A request fills a block that somebody held before it."""

    pool: int
    block: int
    place: int
    first: Holder
    second: Holder
    story: list[str]


class Uncovered(NamedTuple):
    """A request's table has fewer slots than the request has computed tokens."""

    group: int
    blocks: int
    block_tokens: int
    computed_tokens: int


class Leak(NamedTuple):
    """Blocks are held for a request that the engine no longer knows, or that ended long ago."""

    holder: Holder
    blocks: list[int]
    seconds: int
    story: list[str]


Subject = (
    Collision | StrayFree | BlockStatement | PoolStatement | HashedContent | SharedWrite | Uncovered | Leak
)
Finding = tuple[Subject, int]
"""A subject and the request that it is of; -1 where it is of none."""
