"""What the ledger of blocks passes to the checks: two counts of one thing, or an impossible state.

Most subjects name their block, with a story: one line for each holder and operation. A count of -1 is not
known.
"""

from __future__ import annotations

from typing import NamedTuple

from .pool import Holder, Operation


class Collision(NamedTuple):
    """A block got a second holder that it must not have.

    ``how``: ``taken`` (allocated as free while held), ``unhashed`` (touched as a cached block, but it has no
    hash), ``twice`` (two places in the tables of one request), ``unheld`` (in a table without a reference).
    """

    how: str
    pool: int
    block: int
    first: Holder | None
    second: Holder
    references: int
    story: list[str]


class StrayFree(NamedTuple):
    """A block was freed for a request that does not hold it. ``earlier``: the free before."""

    pool: int
    block: int
    by: Operation
    earlier: Operation | None
    references: int
    story: list[str]


class BlockComparison(NamedTuple):
    """The engine-reported state of a block beside the ledger's."""

    pool: int
    block: int
    references: int
    ledger_references: int
    queued: int
    has_hash: int
    ledger_has_hash: int
    mapped: int
    holders: list[str]
    story: list[str]


class PoolComparison(NamedTuple):
    """The engine-reported lengths of a pool's free queue and cache map beside the ledger's."""

    pool: int
    free_blocks: int
    ledger_free_blocks: int
    hashes: int
    ledger_hashes: int


class CachedContent(NamedTuple):
    """A block is cached for the positions [start, end), and some of these have no KV.

    ``why``: ``sequence`` (the request has only ``limit`` tokens), ``pending`` (an asynchronous load has
    not finished: ``limit`` tokens have KV), ``failed`` (a load failed from position ``limit`` up),
    ``unfilled`` (the request's life ended when it had computed ``limit`` tokens), ``withdrawn`` (the same,
    and the step that was to compute the others never ran) or ``hashed_otherwise`` (the hash is that of a
    block for positions up to ``limit``).
    """

    why: str
    request_id: str
    pool: int
    block: int
    start: int
    end: int
    limit: int
    story: list[str]


class ReadInvalid(NamedTuple):
    """A step reads positions that have no valid KV.

    These are ``tokens`` positions from ``start`` up and below ``end``. ``why``: of the first of them, see
    :data:`~kvledger.audit.ledger.blocks.pool.Lack`. ``filler``: the request that fills the first block.
    ``step``: the step that reads them; -1: the one that was posted last.
    """

    pool: int
    blocks: list[int]
    tokens: int
    start: int
    end: int
    filler: str
    why: str
    story: list[str]
    step: int = -1


class UncommittedHit(ReadInvalid):
    """A step reads positions of a cached block before the step that writes them.

    ``why``: ``withdrawn`` (the scheduler took the request out of that step) or ``in_step`` (a state is read
    in the step that writes it).
    """

    __slots__ = ()


class ForeignHit(NamedTuple):
    """A request hit cached blocks that were written under other isolation classes.

    ``differs``: what the request and ``writer``, who wrote the first of these blocks, do not share.
    """

    pool: int
    blocks: list[int]
    tokens: int
    writer: str
    holder: Holder
    differs: list[str]
    story: list[str]


class ForeignLoad(NamedTuple):
    """A request was promised external tokens whose KV was saved under other isolation classes.

    ``tokens`` positions from ``start`` up are in chunks of the connector's store whose keys ``writer`` used.
    """

    tokens: int
    start: int
    writer: str
    differs: list[str]


class SharedWrite(NamedTuple):
    """A request writes to a block that another request held first."""

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
    """Blocks are held for a request that the engine has forgotten, or that ended long ago."""

    holder: Holder
    blocks: list[int]
    seconds: int
    story: list[str]


Subject = (
    Collision
    | StrayFree
    | BlockComparison
    | PoolComparison
    | CachedContent
    | ReadInvalid
    | UncommittedHit
    | ForeignHit
    | ForeignLoad
    | SharedWrite
    | Uncovered
    | Leak
)
BlockFinding = tuple[Subject, int]
"""A subject and its request; -1: no request."""
