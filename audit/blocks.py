"""The ledger of blocks: who holds which, how often, what each is hashed for, and what befell it last.

Kept from the events of level ``blocks`` alone. A block that nothing is known of has no record; one
whose holders may not all be known is not ``known``, and then nothing is claimed of its count. What a
pool states of a block (:class:`~kvledger.audit.events.BlocksStated`, the counts that come with a touch
or a free) is compared and then believed, so that one fault is told once.

``BlockLedger`` judges nothing: it gives what two sides say of one thing, or what cannot be, as
subjects for ``invariants/blocks.py``. Its state is plain: structs, dicts, lists and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec.structs import replace

from kvledger.audit import events as ev
from kvledger.audit.account import Account, Lost

OPERATIONS_KEPT = 6
"""The last so many operations on a block are remembered."""

LEAK_SECONDS = 900.0
"""A connector may keep the blocks of a request that has ended for so long."""

UNKNOWN = -1

LOSSES_KEPT = 2
"""So many hashes that left the cache are remembered, by block of the pool: as many as engines name again."""

EVICTED, RESET = "evicted", "reset"
"""How a hash leaves the cache."""

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


# --- subjects: what the checks see --------------------------------------------------------------


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

Accounts = Mapping[int, Account]


class BlockLedger:
    """Blocks of one engine, kept from its events in order."""

    EVENTS: ClassVar[frozenset[type[ev.Event]]] = frozenset(
        (
            ev.PoolSeen,
            ev.BlocksTaken,
            ev.BlocksTouched,
            ev.BlocksFreed,
            ev.BlocksHashed,
            ev.BlocksEvicted,
            ev.BlockCopied,
            ev.BlocksDeferred,
            ev.PoolReset,
            ev.TablesStated,
            ev.BlocksStated,
            ev.TablesGone,
        )
    )

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}
        self.held: dict[int, dict[tuple[int, int], int]] = {}
        """By request, how often it holds each (pool, block) by a table."""
        self.ending: dict[int, int] = {}
        """Requests that ended and whose tables are not known to be gone, with the time of their end."""
        self.failed: dict[tuple[int, int], tuple[int, str, int]] = {}
        """Blocks hashed for what failed to load and is to be computed in its place: the request, by
        number and id, and from which position up."""
        self._hashed: list[tuple[int, int, int, int]] = []
        self._hit: list[tuple[int, int]] = []
        self.lost: list[tuple[int, Lost]] = []
        """What the event just applied says was in the cache before, with the request that fills it again."""
        self._found: list[Finding] = []
        self._accounts: Accounts = {}
        self._applying: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.PoolSeen: self._pool_seen,
            ev.BlocksTaken: self._taken,
            ev.BlocksTouched: self._touched,
            ev.BlocksFreed: self._freed,
            ev.BlocksHashed: self._hashed_blocks,
            ev.BlocksEvicted: self._evicted,
            ev.BlockCopied: self._copied,
            ev.BlocksDeferred: self._deferred,
            ev.PoolReset: self._reset,
            ev.TablesStated: self._tables,
            ev.BlocksStated: self._stated,
            ev.TablesGone: self._gone,
        }

    def apply(self, event: ev.Event, accounts: Accounts) -> list[Finding]:
        """Keep one event of blocks; what the checks should see of it."""
        self._found = []
        self.lost = []
        self._accounts = accounts
        self._applying[type(event)](event)
        return self._found

    def forget(self) -> None:
        """Events are missing: nothing is known, until pools are seen again."""
        self.pools.clear()
        self.held.clear()
        self.ending.clear()
        self.failed.clear()
        self._hashed.clear()
        self._hit.clear()

    # --- what other events mean for blocks -------------------------------------------------------

    def after(self, event: ev.Event, accounts: Accounts) -> list[Finding]:
        """What an event of tokens, just posted, says of blocks."""
        self._found = []
        self._accounts = accounts
        # Steps may only be told when something else is; a load that was polled for comes after them.
        if self._hashed and type(event) not in (ev.Stepped, ev.Repeated):
            self._judge_hashed(accounts)
        if type(event) is ev.LoadFailed:
            self._load_failed(event)
        elif self.failed and type(event) is ev.Stepped:
            self._computed_again(accounts)
        elif type(event) is ev.Finished and event.request in self.held:
            self.ending[event.request] = event.at
        return self._found

    def _judge_hashed(self, accounts: Accounts) -> None:
        """Blocks hashed before an asynchronous load has filled them."""
        hashed, self._hashed = self._hashed, []
        for pool, block, request, end in hashed:
            account = accounts.get(request)
            life = account.life if account is not None else None
            record = self.pools[pool].records.get(block) if pool in self.pools else None
            if account is None or life is None or record is None or record.hasher != request:
                continue
            if life.asynchronous and life.pending and not life.ran and end > life.local:
                whose, story = account.request_id, self._story(pool, block)
                self._tell(HashedContent("pending", whose, pool, block, end, life.local, story), request)

    def _load_failed(self, event: ev.LoadFailed) -> None:
        """What the request had hashed above the failure is good only when it has been computed."""
        for pool, block in self.held.get(event.request, ()):
            record = self.pools[pool].records[block]
            if record.hashed == 1 and record.hasher == event.request and record.end > event.computed_tokens:
                whose = self._holder(TABLE, event.request, UNKNOWN).request_id
                self.failed[pool, block] = event.request, whose, event.computed_tokens

    def _computed_again(self, accounts: Accounts) -> None:
        """A step: what it computes is good; a hit on the rest read what is not there."""
        for (pool, block), (request, _, _) in list(self.failed.items()):
            account, record = accounts.get(request), self.pools[pool].records[block]
            if record.hasher != request or (account is not None and account.computed >= record.end):
                del self.failed[pool, block]
        for key in self._hit:
            if key in self.failed:
                self._not_there(*key)
        self._hit = []

    def _not_there(self, pool: int, block: int) -> None:
        """A block that is hashed for what never came is hit, or left to be hit."""
        request, request_id, limit = self.failed.pop((pool, block))
        end, story = self.pools[pool].records[block].end, self._story(pool, block)
        self._tell(HashedContent("failed", request_id, pool, block, end, limit, story), request)

    # --- pools -----------------------------------------------------------------------------------

    def _pool_seen(self, event: ev.PoolSeen) -> None:
        groups = {
            event.groups[i]: (event.groups[i + 1], bool(event.groups[i + 2]))
            for i in range(0, len(event.groups), 3)
        }
        whole = [event.groups[i] for i in range(0, len(event.groups), 3) if event.groups[i + 2] > 1]
        pool = self.pools.get(event.pool)
        if pool is not None and pool.blocks == event.blocks:
            self._state_pool(event.pool, event.free_blocks, event.cached_hashes)
            pool.groups, pool.whole = groups, whole
            return
        idle = event.free_blocks == event.blocks - (event.null_block >= 0)
        empty = event.cached_hashes == 0
        self.pools[event.pool] = Pool(
            blocks=event.blocks,
            null_block=event.null_block,
            idle=idle,
            hashed=0 if empty else UNKNOWN,
            free_blocks=event.free_blocks,
            groups=groups,
            hashes={},
            named=empty,
            whole=whole,
        )

    def _record(self, pool: Pool, block: int) -> Block:
        record = pool.records.get(block)
        if record is None:
            record = pool.records[block] = Block([], pool.idle, pool.hashed, [], operations=[])
        return record

    def _state_pool(self, number: int, free_blocks: int, hashes: int) -> None:
        pool = self.pools[number]
        pool.named = pool.named and hashes >= 0
        own = len(pool.hashes) if pool.named else UNKNOWN
        if free_blocks != pool.free_blocks or (own >= 0 and own != hashes):
            self._tell(PoolStatement(number, free_blocks, pool.free_blocks, hashes, own), UNKNOWN)
            pool.free_blocks = free_blocks
            pool.named = False

    # --- operations ------------------------------------------------------------------------------

    def _taken(self, event: ev.BlocksTaken) -> None:
        pool = self.pools.get(event.pool)
        rows, at = event.rows, 0
        while pool is not None and at < len(rows):
            request, group, count = rows[at : at + 3]
            self._take(event, pool, request, group, rows[at + 3 : at + 3 + count])
            at += 3 + count

    def _take(self, event: ev.BlocksTaken, pool: Pool, request: int, group: int, blocks: list[int]) -> None:
        holder = self._actor(TABLE, request, group)
        done = self._operation(event, "taken", event.by, request, group)
        for block in blocks:
            if block == pool.null_block:
                continue
            record = self._record(pool, block)
            evicted = ", ".join(f"h{name}" for name in record.names)
            self._unname(pool, record, event.step, EVICTED)
            record.hashed = 0
            _remember(record, replace(done, what=f"taken, evicting {evicted}") if evicted else done)
            if record.holders:
                self._collide("taken", event.pool, block, record.holders[0], holder)
            else:
                record.known, record.learned = True, False
            self._hold(event.pool, block, record, holder)
            pool.free_blocks -= 1

    def _touched(self, event: ev.BlocksTouched) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            return
        holder, done = self._actor(TABLE, event.request, event.group), self._done(event, "touched")
        for block, references in zip(event.blocks, event.references, strict=True):
            if block == pool.null_block:
                continue
            record = self._record(pool, block)
            _remember(record, done)
            if holder.kind == TABLE:
                twice = [h for h in record.holders if h.kind == TABLE and h.request == holder.request]
                if twice:
                    self._collide("twice", event.pool, block, twice[0], holder)
                elif record.hashed == 0:
                    first = record.holders[0] if record.holders else None
                    self._collide("unhashed", event.pool, block, first, holder)
            if (event.pool, block) in self.failed:
                self._hit.append((event.pool, block))
            self._hold(event.pool, block, record, holder)
            pool.free_blocks -= references == 1
            self._count(event.pool, block, record, references)

    def _freed(self, event: ev.BlocksFreed) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            return
        done = self._done(event, "freed")
        counts: dict[int, int] = {}
        for block, references in zip(event.blocks, event.references, strict=True):
            if block == pool.null_block:
                continue
            record = self._record(pool, block)
            earlier = next((o for o in reversed(record.operations) if o.what == "freed"), None)
            _remember(record, done)
            if not self._let_go(event, block, record) and record.known:
                stray = StrayFree(
                    event.pool, block, done, earlier, references, self._story(event.pool, block)
                )
                self._tell(stray, event.request)
                record.known = False  # what it is now is the engine's to say
            counts[block] = references
            if self.failed.get((event.pool, block), (UNKNOWN,))[0] == event.request >= 0:
                if record.hashed == 1 and record.hasher == event.request:
                    self._not_there(event.pool, block)
                self.failed.pop((event.pool, block), None)
        for block, references in counts.items():
            pool.free_blocks += references == 0
            self._count(event.pool, block, pool.records[block], references)

    def _let_go(self, event: ev.BlocksFreed, block: int, record: Block) -> bool:
        """Take away the reference that was given back; False if there is none of that holder."""
        if event.request >= 0:
            fits = [
                h
                for h in record.holders
                if h.request == event.request and h.kind == TABLE and event.group in (h.group, UNKNOWN)
            ]
        else:
            order = {
                "_drain_deferred_frees": (DEFERRED, COPY, PIN),
                "_free_cow_retained_blocks": (COPY, PIN),
            }.get(event.by, (PIN, COPY, DEFERRED))
            fits = [h for kind in order for h in record.holders if h.kind == kind]
        if not fits:
            return False
        self._unhold(event.pool, block, record, fits[0])
        return True

    def _hashed_blocks(self, event: ev.BlocksHashed) -> None:
        pool = self.pools.get(event.pool)
        rows, at = event.rows, 0
        while pool is not None and at < len(rows):
            request, group, sequence_tokens, count = rows[at : at + 4]
            at += 4
            done = self._operation(event, "hashed", "cache_blocks", request, group)
            for _ in range(count):
                block, name, end = rows[at : at + 3]
                at += 3
                told = replace(done, what=f"hashed h{name} up to {end}")
                self._hash(event, pool, block, name, end, group, request, told)
                if end > sequence_tokens >= 0:
                    story = self._story(event.pool, block)
                    whose = self._holder(TABLE, request, group).request_id
                    said = HashedContent("sequence", whose, event.pool, block, end, sequence_tokens, story)
                    self._tell(said, request)

    def _hash(
        self,
        event: ev.BlocksHashed,
        pool: Pool,
        block: int,
        name: int,
        end: int,
        group: int,
        request: int,
        done: Operation,
    ) -> None:
        record = self._record(pool, block)
        if event.replaced:
            self._unname(pool, record)
        if name in pool.lost:
            self._back(event.step, pool, name, group, request, end)
        if name not in record.names:
            record.names.append(name)
            pool.hashes[name] = pool.hashes.get(name, 0) + 1
        record.hashed = 1
        record.end = max(end, record.end) if len(record.names) > 1 else end
        record.hasher = request
        _remember(record, done)
        self._hashed.append((event.pool, block, request, end))

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            return
        for block in event.blocks:
            record = self._record(pool, block)
            self._unname(pool, record, event.step, EVICTED)
            record.hashed = 0
            _remember(record, self._done(event, "evicted"))

    def _copied(self, event: ev.BlockCopied) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            return
        copy, (source, target) = self._actor(COPY, event.request, event.group), event.blocks
        from_, to = self._record(pool, source), self._record(pool, target)
        _remember(from_, self._done(event, f"copied to {target}"))
        _remember(to, self._done(event, f"copied from {source}"))
        given_up, kept = ((target, to), (source, from_)) if event.moved else ((source, from_), (target, to))
        for held in [h for h in given_up[1].holders if h.kind == TABLE and h.request == event.request][:1]:
            self._unhold(event.pool, given_up[0], given_up[1], held)
            self._hold(event.pool, given_up[0], given_up[1], copy)
        self._hold(event.pool, kept[0], kept[1], copy)
        if event.moved:
            to.names, from_.names = from_.names, []
            to.hashed, from_.hashed = from_.hashed, 0
            to.end, to.hasher = from_.end, from_.hasher

    def _deferred(self, event: ev.BlocksDeferred) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            return
        deferred, done = self._actor(DEFERRED, event.request, event.group), self._done(event, "deferred")
        for block in event.blocks:
            if block == pool.null_block:
                continue
            record = self._record(pool, block)
            _remember(record, done)
            for held in [h for h in record.holders if h.kind == TABLE and h.request == event.request][:1]:
                self._unhold(event.pool, block, record, held)
                self._hold(event.pool, block, record, deferred)

    def _reset(self, event: ev.PoolReset) -> None:
        pool = self.pools.get(event.pool)
        if pool is None or not event.succeeded:
            return
        for record in pool.records.values():
            self._unname(pool, record, event.step, RESET)
            record.hashed = 0
        pool.hashes.clear()
        pool.hashed, pool.named = 0, True

    # --- statements ------------------------------------------------------------------------------

    def _tables(self, event: ev.TablesStated) -> None:
        rows, at = event.rows, 0
        stood: dict[tuple[int, int, int], int] = {}
        while at < len(rows):
            request, group, computed, length = rows[at : at + 4]
            table = rows[at + 4 : at + 4 + length]
            at += 4 + length
            number = next((n for n, pool in self.pools.items() if group in pool.groups), None)
            if number is not None:
                self._table(number, request, group, table, stood)
                size, positional = self.pools[number].groups[group]
                if positional and length * size < computed:
                    self._tell(Uncovered(group, length, size, computed), request)

    def _table(
        self,
        number: int,
        request: int,
        group: int,
        table: list[int],
        stood: dict[tuple[int, int, int], int],
    ) -> None:
        pool, account = self.pools[number], self._accounts.get(request)
        size, positional = pool.groups[group]
        holder = self._holder(TABLE, request, group)
        for block in table:
            if block == pool.null_block:
                continue
            record = self._record(pool, block)
            if (number, request, block) in stood:
                other = self._holder(TABLE, request, stood[number, request, block])
                self._collide("twice", number, block, other, holder)
            stood[number, request, block] = group
            if not any(h.kind == TABLE and h.request == request and h.group == group for h in record.holders):
                if record.known:
                    self._collide("unheld", number, block, next(iter(record.holders), None), holder)
                record.learned = True
                self._hold(number, block, record, holder)
        if not positional or account is None or account.unknown is not None or account.life is None:
            return
        for place in range(account.life.local // size, len(table)):
            record = self._record(pool, table[place])
            first = record.holders[0] if record.holders else holder
            if table[place] != pool.null_block and not record.learned and first.request != request:
                story = self._story(number, table[place])
                self._tell(SharedWrite(number, table[place], place, first, holder, story), request)

    def _stated(self, event: ev.BlocksStated) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            return
        for block, state in enumerate(event.states, event.first):
            if block == pool.null_block or (state == 1 and block not in pool.records and pool.idle):
                continue
            self._state(event.pool, pool, block, state)
        if event.free_blocks >= 0:
            self._state_pool(event.pool, event.free_blocks, event.cached_hashes)
        self._overdue(event.at)

    def _state(self, number: int, pool: Pool, block: int, state: int) -> None:
        record = self._record(pool, block)
        references, queued, hashed, mapped = state >> 3, state & 1, state >> 1 & 1, state >> 2 & 1
        own = len(record.holders) if record.known else UNKNOWN
        if (
            (references == 0) != bool(queued)
            or references < 0
            or hashed != mapped
            or (own >= 0 and own != references)
            or (record.hashed >= 0 and record.hashed != hashed)
        ):
            holders = [str(holder) for holder in record.holders]
            story = self._story(number, block, references)
            said = BlockStatement(
                number, block, references, own, queued, hashed, record.hashed, mapped, holders, story
            )
            self._tell(said, record.holders[0].request if record.holders else UNKNOWN)
        if record.known and own != references:
            record.known = False
        elif not record.known and references == len(record.holders):
            record.known = True
        if record.hashed != hashed:
            if not hashed:
                self._unname(pool, record)
            record.hashed = hashed

    def _count(self, number: int, block: int, record: Block, references: int) -> None:
        """The engine's count just after one of our own operations."""
        if not record.known:
            record.known = references == len(record.holders)
            return
        if references != len(record.holders):
            holders = [str(holder) for holder in record.holders]
            story = self._story(number, block, references)
            said = BlockStatement(
                number, block, references, len(holders), UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, holders, story
            )
            self._tell(said, record.holders[0].request if record.holders else UNKNOWN)
            record.known = False

    def _gone(self, event: ev.TablesGone) -> None:
        for request in event.requests:
            self.ending.pop(request, None)
            self._leak(request, 0)

    def _overdue(self, at: int) -> None:
        """Requests that ended so long ago that no connector can still want their blocks."""
        for request, ended in list(self.ending.items()):
            if at - ended < LEAK_SECONDS * 1e6:
                return
            del self.ending[request]
            self._leak(request, (at - ended) // 1_000_000)

    def _leak(self, request: int, seconds: int) -> None:
        held = self.held.pop(request, None)
        if held:
            pool, block = next(iter(held))
            holders = self.pools[pool].records[block].holders
            holder = next(h for h in holders if h.kind == TABLE and h.request == request)
            blocks = sorted(block for _, block in held)
            self._tell(Leak(holder, blocks, seconds, self._story(pool, block)), request)

    # --- helpers ---------------------------------------------------------------------------------

    def _tell(self, subject: Subject, request: int) -> None:
        self._found.append((subject, request))

    def _collide(self, how: str, pool: int, block: int, first: Holder | None, second: Holder) -> None:
        references = len(self.pools[pool].records[block].holders) + 1
        story = self._story(pool, block, second=second)
        self._tell(Collision(how, pool, block, first, second, references, story), second.request)

    def _holder(self, kind: str, request: int, group: int) -> Holder:
        account = self._accounts.get(request)
        if account is None:
            return Holder(kind, request, f"#{request}" if request >= 0 else "", 0, group)
        life = account.life.number if account.life is not None else len(account.lives) + 1
        return Holder(kind, request, account.request_id, life, group)

    def _actor(self, kind: str, request: int, group: int) -> Holder:
        if request < 0 and kind == TABLE:
            return Holder(PIN, UNKNOWN, "", 0, UNKNOWN)
        return self._holder(kind, request, group)

    def _operation(self, event: Any, what: str, by: str, request: int, group: int) -> Operation:
        who = self._holder(TABLE, request, group)
        return Operation(event.step, event.at, what, by, who.request_id, who.life, group, event.stack)

    def _done(self, event: ev.BlockEvent, what: str) -> Operation:
        return self._operation(event, what, event.by, event.request, event.group)

    def _hold(self, pool: int, block: int, record: Block, holder: Holder) -> None:
        record.holders.append(holder)
        if holder.kind == TABLE and holder.request >= 0:
            held = self.held.setdefault(holder.request, {})
            held[pool, block] = held.get((pool, block), 0) + 1

    def _unhold(self, pool: int, block: int, record: Block, holder: Holder) -> None:
        record.holders.remove(holder)
        if holder.kind == TABLE and holder.request >= 0:
            held = self.held.get(holder.request)
            if held is not None and (pool, block) in held:
                held[pool, block] -= 1
                if not held[pool, block]:
                    del held[pool, block]
                    if not held:
                        del self.held[holder.request]

    def _unname(self, pool: Pool, record: Block, step: int = UNKNOWN, how: str = "") -> None:
        """It has no hash any more. ``how`` a hash left the cache is kept, where an operation says it."""
        for name in record.names:
            pool.hashes[name] -= 1
            if not pool.hashes[name]:
                del pool.hashes[name]
                pool.lost.pop(name, None)
                if how:
                    pool.lost[name] = (step, UNKNOWN, how)
                    if len(pool.lost) > LOSSES_KEPT * pool.blocks:
                        del pool.lost[next(iter(pool.lost))]
        record.names = []
        record.end, record.hasher = 0, UNKNOWN

    def _back(self, step: int, pool: Pool, name: int, group: int, request: int, end: int) -> None:
        """What was in the cache before is filled again, and had to be if a hit needs every block."""
        left, came_back, how = pool.lost[name]
        if group in pool.whole:
            size, _ = pool.groups[group]
            start = (end - 1) // size * size  # of a block that is hashed in part, that part
            self.lost.append((request, Lost(start, end, left, came_back, how)))
        if came_back < 0:
            pool.lost[name] = (left, step, how)

    def _story(
        self, pool: int, block: int, references: int | None = None, second: Holder | None = None
    ) -> list[str]:
        """What is known of a block, a line each, for a person."""
        record = self.pools[pool].records[block]
        hash_ = f"hash {', '.join(f'h{name}' for name in record.names)}" if record.names else "no hash"
        counted = "" if references is None else f"; the engine counts {references} references"
        lines = [f"block {block} of pool {pool}, {hash_}{counted}"]
        lines += [f"  held by {holder}" for holder in record.holders] or ["  held by nobody that is known"]
        lines += [f"  and now by {second}"] if second is not None else []
        lines += ["  last operations on it:"] if record.operations else []
        for done in record.operations:
            who = (
                f"request {done.request_id}, life {done.life}" if done.request_id else "outside of any table"
            )
            who += f", group {done.group}" if done.request_id and done.group >= 0 else ""
            lines.append(f"    step {done.step}: {done.what}, {who}, by {done.by}")
            lines += [f"      {frame}" for frame in done.stack or ()]
        return lines


def _remember(record: Block, done: Operation) -> None:
    record.operations.append(done)
    if len(record.operations) > OPERATIONS_KEPT:
        del record.operations[0]
