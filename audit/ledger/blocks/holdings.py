"""The state of the ledger of blocks, and the changes that keep its tables consistent.

A holder is kept with its block and with its request, a hash with its block and with its pool; the methods
change both together. What an event means is in the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, Protocol, TypeAlias

import msgspec

from ... import events as ev
from ...bounded_tables import keep_newest
from ..account import Account, CachedRange, GroupBlock, Made
from ..entries import BlockFinding, CachedContent, Collision, Subject
from ..weights import Weights
from .pool import (
    DEFERRED,
    PIN,
    TABLE,
    UNKNOWN,
    Absent,
    Block,
    Holder,
    LifeLacks,
    Operation,
    Pool,
    Rewrite,
    hash_text,
    table_key,
)

# --- demand --------------------------------------------------------------------------------------------
#
# How many more blocks would have let preempted requests run on: the blocks in use, had they kept theirs.
#
# From its preemption to its next admission, a request counts with the blocks that it gave up and that no
# other request holds. The pool would have been large enough for a request if it never had fewer blocks than
# all requests count with during that time. A preempted request would also have grown and ended meanwhile,
# which is not known.


MOST_PERCENT = 1_000
"""A pool that is larger than this is not considered."""


class Released(msgspec.Struct):
    """Blocks that a request gave up. ``shared``: those that another request still holds."""

    free: int = 0
    shared: set[int] = set()


class Preempted(msgspec.Struct):
    """A preempted request that waits, and the most blocks that were needed since it began to wait."""

    kept: Released
    most: int = 0


class BlockDemand(msgspec.Struct):
    """Follows one pool. It consists of plain data, so a checkpoint can hold it."""

    step: int = -1
    """The step of ``released``."""
    released: dict[int, Released] = {}
    """What requests gave up in the present step, by request."""
    waiting: dict[int, Preempted] = {}
    """Preempted requests that hold no block, by request."""
    resumed: dict[int, int] = {}
    """The most blocks that were needed, of preempted requests that hold blocks again, by request."""

    def free(self, request: int, step: int, blocks: Sequence[int], references: Sequence[int]) -> None:
        """A request gives blocks up, which have so many references left."""
        if step != self.step:
            self.step, self.released = step, {}
        if self.waiting:
            self._take_over([block for block, left in zip(blocks, references, strict=True) if not left])
        mine = self.released.get(request)
        if mine is None:
            mine = self.released[request] = Released()
        free = references.count(0)
        mine.free += free
        if free < len(references):
            mine.shared |= {block for block, left in zip(blocks, references, strict=True) if left}

    def _take_over(self, blocks: Sequence[int]) -> None:
        """Blocks lose their last holder: they count for the preempted request that shared them."""
        for request in self.waiting.values():
            taken = request.kept.shared.intersection(blocks)
            request.kept.shared -= taken
            request.kept.free += len(taken)

    def preempt(self, request: int) -> None:
        """A request was preempted, after it had given its blocks up."""
        self.waiting[request] = Preempted(self.released.pop(request, Released()))

    def known(self, request: int) -> bool:
        """Whether a request was preempted and not admitted since."""
        return request in self.waiting or request in self.resumed

    def see(self, used: int) -> None:
        """So many blocks are in use now."""
        needed = used + sum(one.kept.free for one in self.waiting.values())
        for one in self.waiting.values():
            one.most = max(one.most, needed)

    def hold(self, request: int, used: int) -> None:
        """A preempted request gets blocks again, while so many are in use."""
        self.see(used)
        self.resumed[request] = self.waiting.pop(request).most

    def end(self, request: int, blocks: int) -> int:
        """A request is admitted again, or ends. Returns the percent by which a pool of ``blocks`` was too
        small for it since it was preempted, rounded up; -1: it was not preempted, or it is not known."""
        one = self.waiting.pop(request, None)
        most = self.resumed.pop(request, -1) if one is None else one.most
        if most < 0 or blocks <= 0:
            return -1
        percent = ceil(100 * max(1, most - blocks) / blocks)
        return percent if percent <= MOST_PERCENT else -1

    def forget(self) -> None:
        """Events were lost."""
        self.released, self.waiting, self.resumed = {}, {}, {}


# --- holdings ------------------------------------------------------------------------------------------
#
# The state of the ledger of blocks, and the changes that keep its tables consistent.
#
# A holder is kept with its block and with its request, a hash with its block and with its pool; the methods
# change both together. What an event means is in the other files of this folder.


REMOVED_HASHES_KEPT = 2
"""How many hashes that left the cache map are remembered at least, per block of the pool."""


class Requests(Protocol):
    """What the ledger of requests says to the ledger of blocks."""

    posted_step: int
    """The last step that was posted."""
    living: dict[int, Account]
    """The open accounts, which may lag behind; enough for a request's id and the number of its life."""

    @property
    def is_in_flight(self) -> bool:
        """Whether a step may be in flight."""

    def posted(self, request: int) -> Account | None:
        """The open account of a request, posted up to now."""

    def sequence_tokens(self, request: int) -> int:
        """Length of a request's sequence up to now; -1: not known."""

    def scheduled(self, request: int) -> tuple[int, int] | None:
        """Tokens and drafts that the last posted step scheduled of a request; None if it did not."""


SavedBy = tuple[list[int], str]
"""The isolation classes under which KV was saved, and the id of the request."""

HitBlock = tuple[int, int, str, int, int, list[Made] | None]
"""A block that a request hit: its first position and its end, the id of its writer, which request fills it
(-1: not known) and in which life, and under which weights it was filled; None: the life lasts."""

InvalidRange = tuple[int, int, int]
"""Positions of a request whose KV is not valid: request, start, end."""


class Holdings(msgspec.Struct, dict=True, eq=False):
    """Pools, blocks and holders, and what the present event revealed about them."""

    hit_blocks: dict[int, dict[tuple[int, int], list[HitBlock]]] = {}
    """By request, until its admission: the blocks that it hit after the first change of weights, by pool
    and group."""
    saved_weights: dict[int, tuple[int, int]] = {}
    """By hash id: version and oldest version of the newest KV that was saved in the connector's store."""
    pools: dict[int, Pool] = {}
    """Pools by number."""
    held: dict[int, dict[tuple[int, int], int]] = {}
    """By request: how often its tables hold each (pool, block)."""
    ending: dict[int, int] = {}
    """Ended requests whose tables may still exist, with the time of their end."""
    deferred: dict[tuple[int, int], Holder] = {}
    """Blocks (pool, block) whose free is deferred, with the holder that gave them up."""
    pins_last: bool = True
    """Whether references outside the block tables may last: of a connector, or it is not known."""
    pinned: dict[tuple[int, int], Operation] = {}
    """Blocks (pool, block) with such a reference where none may last, and what took the last one."""
    lives: dict[int, LifeLacks] = {}
    """By request: the blocks that its present life fills."""
    unread: dict[tuple[int, int, int], int] = {}
    """Hits that no step has read: request, pool, block, and the step of the hit. 0: judge it at once."""
    hits: dict[int, dict[tuple[int, int], int]] = {}
    """By request, until its admission: how many blocks it hit of each pool and group."""
    exposed: dict[tuple[int, int, int], None] = {}
    """Hits on blocks that have lost KV since: request, pool, block. Each further step reads them."""
    leaving: list[tuple[int, int, int, int, Absent]] = []
    """What tables lost or never had by a step that was not posted: step, request, pool, group, and it."""
    left: dict[int, dict[tuple[int, int], Absent]] = {}
    """Where the tables of a request's life begin: by request, and by pool and group."""
    begun: dict[int, tuple[int, int]] = {}
    """By request: first position and number of its lowest step whose window is not judged yet."""
    keeps_state_places: bool = False
    """Whether a session's next turn goes on from the block of the step before, known by the runner."""
    state_ends: dict[int, int] = {}
    """Where the last state ends of a request whose count fell and that no step has scheduled since."""
    rewrites: dict[int, Rewrite] = {}
    """By session: the cached blocks that its next turn is to write over."""
    newly_cached: list[tuple[int, int, int, int]] = []
    """What this step cached: pool, request, block, end. Checked against loads after the step."""
    preempted_cached: list[tuple[int, int, int, int]] = []
    """Cached blocks of preempted requests, which lack positions: pool, block, hash id, step."""
    hash_awaited: set[tuple[int, int]] = set()
    """Blocks (pool, block) that were computed, and whose hash :mod:`..content_postings` waits for."""
    hash_arrived: list[tuple[int, int, int, int, str]] = []
    """Those of them that got a hash: pool, block, hash id, step of the allocation, and writer."""
    cached_before: list[tuple[int, CachedRange]] = []
    """Requests that this event makes fill positions whose KV the cache had before."""
    cached_in_group: list[tuple[int, GroupBlock]] = []
    """The same for blocks of groups that need not all blocks below a boundary."""
    isolation: dict[int, list[int]] = {}
    """Isolation classes by request, until the engine forgets the request; unknown if absent."""
    store_keys: dict[int, tuple[int, list[int]]] = {}
    """By request: tokens per chunk of the connector's store, and the key of each chunk of the request."""
    saved_keys: dict[int, list[SavedBy]] = {}
    """By key of the connector's store: who may have saved the KV, one request of each isolation class."""
    demand: BlockDemand = msgspec.field(default_factory=BlockDemand)
    """How many more blocks preempted requests would have needed to run on."""
    calls: int = 0
    """How many calls have allocated blocks."""

    def __post_init__(self) -> None:
        self.weights = Weights()
        """The versions of the weights. Only the ledger of requests changes them."""
        self.invalid_hits: list[InvalidRange] = []
        """Local hits on KV that is not valid, found after the present event."""
        self.findings: list[BlockFinding] = []
        """Subjects of this event, for the checks."""
        self.removed_kept = 0
        """How many hashes that left a cache map are remembered, if that is more than usual."""
        self.requests: Requests
        """The ledger of requests, which sets itself here."""

    def forget(self) -> None:
        """Drop everything because events were lost; the next PoolSeen begins anew."""
        self.pools.clear()
        self.held.clear()
        self.ending.clear()
        self.deferred.clear()
        self.pinned.clear()
        self.newly_cached.clear()
        self.preempted_cached.clear()
        self.lives.clear()
        self.unread.clear()
        self.exposed.clear()
        self.hits.clear()
        self.leaving.clear()
        self.left.clear()
        self.begun.clear()
        self.state_ends.clear()
        self.rewrites.clear()
        self.isolation.clear()
        self.store_keys.clear()
        self.hit_blocks.clear()
        self.demand.forget()

    def account(self, request: int) -> Account | None:
        """The open account of a request, posted up to now; None if there is none."""
        return self.requests.posted(request)

    # --- references and hashes -----------------------------------------------------------------

    def record(self, pool: Pool, block: int) -> Block:
        """The record of a block; a new one if there is none."""
        record = pool.records.get(block)
        if record is None:
            record = pool.records[block] = Block({}, pool.idle, pool.has_hash, [], operations=[])
        return record

    def table_of(self, request: int) -> dict[tuple[int, int], int]:
        """How often the tables of a request hold each (pool, block)."""
        held = self.held.get(request)
        if held is None:
            held = self.held[request] = {}
        return held

    def add_holder(self, pool: int, block: int, record: Block, holder: Holder) -> None:
        """Add a reference to a block."""
        holders, place = record.holders, (pool, block)
        if holder.kind == TABLE and holder.request >= 0:
            key = table_key(holder.request, holder.group)
            held = self.table_of(holder.request)
            held[place] = held.get(place, 0) + 1
            if key not in holders:
                holders[key] = holder
                return
        elif holder.kind == DEFERRED:
            self.deferred[place] = holder
        holders[min(0, *holders) - 1 if holders else UNKNOWN] = holder
        record.other_holders += 1

    def remove_holder(self, pool: int, block: int, record: Block, holder: Holder) -> None:
        """Take a reference from a block."""
        key = table_key(holder.request, holder.group)
        if record.holders.get(key) is not holder:
            key = next(key for key, held in record.holders.items() if held is holder)
            record.other_holders -= 1
        if holder.kind == TABLE and holder.request >= 0:
            self.drop_table_holder(pool, block, record, key, holder.request)
            return
        del record.holders[key]
        if holder.kind == DEFERRED:
            self.deferred.pop((pool, block), None)
        elif holder.kind == PIN and all(held.kind != PIN for held in record.holders.values()):
            self.pinned.pop((pool, block), None)

    def drop_table_holder(self, pool: int, block: int, record: Block, key: int, request: int) -> None:
        """Take the reference with this key, of a table of a request, from a block."""
        del record.holders[key]
        held = self.held.get(request)
        if held is not None:
            place = pool, block
            times = held.get(place, 0)
            if times > 1:
                held[place] = times - 1
            elif times:
                del held[place]
                if not held:
                    del self.held[request]

    def drop_hashes(
        self, pool: Pool, record: Block, step: int = UNKNOWN, how: str = "", request: int = UNKNOWN
    ) -> None:
        """Take all hashes from a block. ``how``: remember that they left the cache map, why, and for whom."""
        hashes, removed = pool.hashes, pool.removed
        for hash_id in record.hash_ids:
            cached = hashes[hash_id]
            if cached.blocks > 1:
                cached.blocks -= 1
                continue
            del hashes[hash_id]
            removed.pop(hash_id, None)
            if how:
                removed[hash_id] = (cached.step, cached.request, step, UNKNOWN, how, request, self.calls)
                if len(removed) > self.removed_kept:
                    most = max(self.removed_kept, REMOVED_HASHES_KEPT * pool.blocks)
                    pool.forgotten_hashes += len(keep_newest(removed, most))
        record.hash_ids = []
        record.end, record.cached_for = 0, UNKNOWN
        record.isolation = None
        if record.wrong:
            record.wrong = []

    # --- holders, operations, findings -------------------------------------------------------------

    def holder(self, kind: str, request: int, group: int) -> Holder:
        """A holder in the present life of a request."""
        account = self.requests.living.get(request)
        if account is None:
            return Holder(kind, request, f"#{request}" if request >= 0 else "", 0, group)
        life = account.life.number if account.life is not None else len(account.lives) + 1
        return Holder(kind, request, account.request_id, life, group)

    def actor(self, kind: str, request: int, group: int) -> Holder:
        """Like ``holder``, but a pin instead of a table if there is no request."""
        if request < 0 and kind == TABLE:
            return Holder(PIN, UNKNOWN, "", 0, UNKNOWN)
        return self.holder(kind, request, group)

    def operation(self, event: Any, what: str, by: str, request: int, group: int) -> Operation:
        """An operation on blocks, for a request."""
        account = self.requests.living.get(request)
        if account is None:
            whose, life = f"#{request}" if request >= 0 else "", 0
        else:
            whose = account.request_id
            life = account.life.number if account.life is not None else len(account.lives) + 1
        return Operation(event.step, event.at, what, by, whose, life, group, event.stack)

    def call_operation(self, event: ev.BlockEvent, what: str) -> Operation:
        """The operation of an event with one call."""
        return self.operation(event, what, event.by, event.request, event.group)

    def report(self, subject: Subject, request: int) -> None:
        """Pass a subject to the checks."""
        self.findings.append((subject, request))

    def report_cached(
        self, why: str, whose: str, pool: int, block: int, end: int, limit: int, request: int
    ) -> None:
        """Pass a block to the checks that is cached for positions below ``end`` and lacks KV for some."""
        begin, story = self.pools[pool].records[block].begin, self.story(pool, block)
        self.report(CachedContent(why, whose, pool, block, begin, end, limit, story), request)

    def report_collision(self, how: str, pool: int, block: int, first: Holder | None, second: Holder) -> None:
        """Pass a collision of two holders to the checks."""
        references = len(self.pools[pool].records[block].holders) + 1
        story = self.story(pool, block, second=second)
        self.report(Collision(how, pool, block, first, second, references, story), second.request)

    def story(
        self, pool: int, block: int, references: int | None = None, second: Holder | None = None
    ) -> list[str]:
        """What is known about a block, in lines of text."""
        record = self.pools[pool].records[block]
        hash_ = (
            f"hash {', '.join(hash_text(hash_id) for hash_id in record.hash_ids)}"
            if record.hash_ids
            else "no hash"
        )
        counted = "" if references is None else f"; the engine counts {references} references"
        lines = [f"block {block} of pool {pool}, {hash_}{counted}"]
        lines += [f"  held by {holder}" for holder in record.holders.values()] or ["  no known holder"]
        lines += [f"  now also held by {second}"] if second is not None else []
        lines += ["  last operations:"] if record.operations else []
        for done in record.operations:
            who = (
                f"request {done.request_id}, life {done.life}"
                if done.request_id
                else "outside the block tables"
            )
            who += f", group {done.group}" if done.request_id and done.group >= 0 else ""
            lines.append(f"    step {done.step}: {done}, {who}, by {done.by}")
            lines += [f"      {frame}" for frame in done.stack or ()]
        return lines


Following: TypeAlias = "dict[type[ev.Event], Callable[[Holdings, Any], None]]"
"""What a law of blocks does after an event of requests was posted, by the event's type."""
