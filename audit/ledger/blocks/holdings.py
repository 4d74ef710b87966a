"""The state of the ledger of blocks, and the moves that keep its sides in step with each other.

A holder stands with its block and with its request, a hash with its block and with its pool: whoever
changes one side here changes both. What an event means is said in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import events as ev
from ..account import Account
from ..frozen import RemovedRange
from .records import PIN, TABLE, UNKNOWN, Block, Holder, Operation, Pool, written
from .subjects import Collision, Finding, Subject

LOSSES_KEPT = 2
"""So many hashes that left the cache are remembered, by block of the pool."""

Accounts = Mapping[int, Account]


class Holdings:
    """Pools and their blocks, by number, and what the present event has told of them."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}
        self.held: dict[int, dict[tuple[int, int], int]] = {}
        """By request, how often it holds each (pool, block) by a table."""
        self.ending: dict[int, int] = {}
        """Requests that ended and whose tables are not known to be gone, with the time of their end."""
        self.failed: dict[tuple[int, int], tuple[int, str, int]] = {}
        """Blocks hashed for what failed to load and is to be computed in its place: the request, by
        number and id, and from which position up."""
        self.hashed: list[tuple[int, int, int, int]] = []
        """Pool, block, request and end of what was hashed and has not been judged yet."""
        self.hit: list[tuple[int, int]] = []
        """Those of ``failed`` that were hit since the last step."""
        self.lost: list[tuple[int, RemovedRange]] = []
        """What the event just applied says was in the cache before, with the request that fills it again."""
        self.found: list[Finding] = []
        """What the checks should see of the event just applied."""
        self.accounts: Accounts = {}

    def forget(self) -> None:
        """Events are missing: nothing is known, until pools are seen again."""
        self.pools.clear()
        self.held.clear()
        self.ending.clear()
        self.failed.clear()
        self.hashed.clear()
        self.hit.clear()

    # --- both sides of a reference, and of a hash --------------------------------------------------

    def record(self, pool: Pool, block: int) -> Block:
        record = pool.records.get(block)
        if record is None:
            record = pool.records[block] = Block([], pool.idle, pool.hashed, [], operations=[])
        return record

    def hold(self, pool: int, block: int, record: Block, holder: Holder) -> None:
        record.holders.append(holder)
        if holder.kind == TABLE and holder.request >= 0:
            held = self.held.setdefault(holder.request, {})
            held[pool, block] = held.get((pool, block), 0) + 1

    def unhold(self, pool: int, block: int, record: Block, holder: Holder) -> None:
        record.holders.remove(holder)
        if holder.kind == TABLE and holder.request >= 0:
            held = self.held.get(holder.request)
            if held is not None and (pool, block) in held:
                held[pool, block] -= 1
                if not held[pool, block]:
                    del held[pool, block]
                    if not held:
                        del self.held[holder.request]

    def unname(self, pool: Pool, record: Block, step: int = UNKNOWN, how: str = "") -> None:
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

    # --- who, and what it is told as ---------------------------------------------------------------

    def holder(self, kind: str, request: int, group: int) -> Holder:
        account = self.accounts.get(request)
        if account is None:
            return Holder(kind, request, f"#{request}" if request >= 0 else "", 0, group)
        life = account.life.number if account.life is not None else len(account.lives) + 1
        return Holder(kind, request, account.request_id, life, group)

    def actor(self, kind: str, request: int, group: int) -> Holder:
        if request < 0 and kind == TABLE:
            return Holder(PIN, UNKNOWN, "", 0, UNKNOWN)
        return self.holder(kind, request, group)

    def operation(self, event: Any, what: str, by: str, request: int, group: int) -> Operation:
        who = self.holder(TABLE, request, group)
        return Operation(event.step, event.at, what, by, who.request_id, who.life, group, event.stack)

    def done(self, event: ev.BlockEvent, what: str) -> Operation:
        return self.operation(event, what, event.by, event.request, event.group)

    def tell(self, subject: Subject, request: int) -> None:
        self.found.append((subject, request))

    def collide(self, how: str, pool: int, block: int, first: Holder | None, second: Holder) -> None:
        references = len(self.pools[pool].records[block].holders) + 1
        story = self.story(pool, block, second=second)
        self.tell(Collision(how, pool, block, first, second, references, story), second.request)

    def story(
        self, pool: int, block: int, references: int | None = None, second: Holder | None = None
    ) -> list[str]:
        """What is known of a block, a line each, for a person."""
        record = self.pools[pool].records[block]
        hash_ = f"hash {', '.join(written(name) for name in record.names)}" if record.names else "no hash"
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
