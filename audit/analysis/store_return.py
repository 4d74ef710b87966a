"""What a connector's store returned: what was stored, how much of it was ever read, and what loads saved.

Stored content is known by the hash ids of the blocks that the connector was ordered to store, at level
``blocks``. A block is *read* when a load has filled it for a request. What a store drops it does not tell, so
stored content that a request computes again is only known as that: nobody loaded it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from .. import events as ev
from ..figures.sums import Sums, add_tokens
from ..ledger.account import Account, Life
from ..ledger.blocks.contents import ALLOCATED, CACHED, EVICTED, LOST, MOVED, RESET, Change, Ids
from ..ledger.blocks.ledger import pool_of
from ..ledger.blocks.pool import Pool
from .costs import PREFILL, Loads, seconds, total
from .step_model import StepModel

TIER_UNREPORTED = "not reported"
"""The tier of loads whose connector reported none."""

SEVERAL = "several"
"""The tier of loads that come from more than one."""

GIB = 1 << 30


class Content(msgspec.Struct):
    """One block's content in the store. Times are microseconds since the engine started; -1: never."""

    stored_at: int
    first_read_at: int = -1
    last_read_at: int = -1
    reads: int = 0
    again: int = 0
    """How often a request computed it after it was stored."""


class TierReturn(msgspec.Struct, frozen=True, kw_only=True):
    """What the loads of one tier brought. ``loads``: lives with a promise.

    ``waited_seconds``: measured, for asynchronous loads. ``saved_seconds``: what computing the loaded tokens
    would have taken, by the engine's model of step time; None: not known.
    """

    tier: str
    loads: int
    tokens: int
    waited_seconds: float
    vain_seconds: float
    saved_seconds: float | None


class StoreReturn(msgspec.Struct, frozen=True, kw_only=True):
    """The return of one engine's store.

    ``stored_tokens`` are of different contents; ``stored_again_tokens`` were stored more than once.
    ``read_tokens`` of them were ever read, in ``reads`` loads of a block; ``never_read_tokens`` were not,
    until the journal's end. ``computed_again_tokens``: stored, and computed again by a later request.
    ``read_elsewhere_tokens`` were read and not stored by this engine while it was observed.
    ``token_bytes``: KV of one token on all workers; 0: not known. ``unknown``: why nothing is said of what
    was stored; "": it is known.
    """

    engine: str
    connector: str
    unknown: str
    token_bytes: int
    stored_tokens: int
    stored_again_tokens: int
    read_tokens: int
    reads: int
    never_read_tokens: int
    computed_again_tokens: int
    read_elsewhere_tokens: int
    first_read_seconds: float | None
    last_read_seconds: float | None
    tiers: list[TierReturn]
    refused: str

    @property
    def stored_gib(self) -> float | None:
        """GiB of KV that were stored; None: not known."""
        return self.stored_tokens * self.token_bytes / GIB if self.token_bytes else None

    @property
    def saved_seconds(self) -> float | None:
        """What all loads saved; None: not known."""
        return total(tier.saved_seconds for tier in self.tiers)

    @property
    def waited_seconds(self) -> float:
        """What all requests waited for loads."""
        return sum(tier.waited_seconds for tier in self.tiers)


class StoreContents:
    """Follows which contents one engine stored and read."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}
        """The pools as the engine describes them."""
        self._hashes: dict[int, Ids] = {}
        """The hash ids of each block that was cached for the followed group."""
        self.contents: dict[int, Content] = {}
        """Stored content by hash id."""
        self.stored_again = 0
        """Orders to store a content that was stored before."""
        self.elsewhere = 0
        """Loads of blocks whose content this engine was not seen to store."""
        self._loading: dict[int, frozenset[int]] = {}
        """Blocks that a load fills, by request, from the promise to the end of the life."""
        self._cached: list[tuple[int, int, bool]] = []
        """Blocks cached since the last step was scheduled, their hash ids, and whether the store had them
        then. A step's promises and orders to store come after them."""
        self._read: dict[int, list[tuple[int, int]]] = {}
        """Blocks that the load of a request has filled, and their hash ids. It may yet be reported as
        failed."""

    @property
    def _followed(self) -> tuple[int, int]:
        """The KV cache group whose blocks are counted, and its tokens per block; 0: there is none.

        It is the only group of the only pool, or the first of full attention.
        """
        pool = next(iter(self._pools.values())) if len(self._pools) == 1 else None
        if pool is None or not pool.groups:
            return -1, 0
        group = next(iter(pool.prefix_groups if len(pool.groups) > 1 else pool.groups), -1)
        return group, pool.groups[group][0] if group >= 0 else 0

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 for an engine with several KV cache groups and none of full attention."""
        return self._followed[1]

    def feed(self, event: ev.Event, changes: Sequence[Change]) -> None:
        """Read one event and its ``changes`` of the pool."""
        if type(event) is ev.PoolSeen:
            self._pools[event.pool] = pool_of(event)
        for change in changes:
            self._change(change)
        handler = STORE_EVENTS.get(type(event))
        if handler is not None:
            handler(self, event)

    def _change(self, change: Change) -> None:
        """Blocks are cached: they were computed, or a load has filled them. Or content leaves."""
        if change.kind == CACHED and change.group in (-1, self._followed[0]):
            for block, hash_id in zip(change.blocks, change.ids, strict=True):
                self._hashes[block] = (*self._hashes.get(block, ()), hash_id)
                self._cached.append((block, hash_id, hash_id in self.contents))
        elif change.kind in (ALLOCATED, EVICTED, RESET):
            for block in change.blocks:
                self._hashes.pop(block, None)
        elif change.kind == MOVED:
            source, target = change.blocks
            self._hashes[target] = self._hashes.pop(source, ())
        elif change.kind == LOST:
            self._hashes = {}

    def saved(self, event: ev.BlocksSaved) -> None:
        """The connector was ordered to store blocks."""
        for block in event.blocks:
            for hash_id in self._hashes.get(block, ()):
                content = self.contents.get(hash_id)
                if content is None:
                    self.contents[hash_id] = Content(event.at)
                else:
                    self.stored_again += 1

    def promised(self, event: ev.BlocksPromised) -> None:
        """A load is to fill blocks."""
        self._settle(event.request, event.at)
        self._loading[event.request] = frozenset(event.blocks)

    def failed(self, event: ev.LoadFailed) -> None:
        """A load failed: only the blocks that did not fail were filled."""
        failed, read = event.failed_blocks, self._read.pop(event.request, [])
        if failed is not None:
            self._read[event.request] = [(block, hash_id) for block, hash_id in read if block not in failed]
            self._loading[event.request] = self._loading.get(event.request, frozenset()).difference(failed)
        else:
            self._loading.pop(event.request, None)

    def ended(self, event: ev.Finished | ev.Preempted) -> None:
        """A life ends: what its load filled was read."""
        self._settle(event.request, event.at)

    def scheduled(self, _: ev.Stepped) -> None:
        """A step was scheduled: it is known which of the blocks cached before are filled by loads."""
        if not self._cached:
            return
        filled = {block: request for request, blocks in self._loading.items() for block in blocks}
        for block, hash_id, stored in self._cached:
            request = filled.get(block)
            if request is not None:
                self._read.setdefault(request, []).append((block, hash_id))
            elif stored:
                self.contents[hash_id].again += 1
        self._cached = []

    def settle(self, at: int) -> None:
        """The journal ends."""
        for request in list(self._read):
            self._settle(request, at)

    def _settle(self, request: int, at: int) -> None:
        self._loading.pop(request, None)
        for _, hash_id in self._read.pop(request, ()):
            content = self.contents.get(hash_id)
            if content is None:
                self.elsewhere += 1
                continue
            content.reads += 1
            content.last_read_at = at
            if content.first_read_at < 0:
                content.first_read_at = at


STORE_EVENTS: dict[type[ev.Event], Callable[[StoreContents, Any], None]] = {
    ev.BlocksSaved: StoreContents.saved,
    ev.BlocksPromised: StoreContents.promised,
    ev.LoadFailed: StoreContents.failed,
    ev.Finished: StoreContents.ended,
    ev.Preempted: StoreContents.ended,
    ev.Stepped: StoreContents.scheduled,
}
"""The method for each type of event."""


class LoadsByTier(Sums):
    """Loads of ended requests, by the tier that the connector reported."""

    tiers: dict[str, Loads] = {}
    lives: dict[str, int] = {}
    """How many lives loaded."""

    def add(self, account: Account) -> None:
        """Add one request; an unknown account adds nothing."""
        for life in account.lives if account.unknown is None else ():
            if life.external > 0:
                tier = tier_of(life)
                self.tiers.setdefault(tier, Loads()).add_life(life)
                add_tokens(self.lives, tier, 1)


def tier_of(life: Life) -> str:
    """The tier of a life's external tokens."""
    tiers = [tier for tier, tokens in life.tiers.items() if tokens]
    return tiers[0] if len(tiers) == 1 else SEVERAL if tiers else TIER_UNREPORTED


def store_return(
    *, engine: str, started: ev.EngineStarted, store: StoreContents, loads: LoadsByTier, model: StepModel
) -> StoreReturn:
    """The return of one engine's store."""
    settings, size = started.configuration, store.block_tokens
    contents = list(store.contents.values())
    read = [content for content in contents if content.reads]
    unknown = ""
    if started.level == "tokens":
        unknown = "the journal is of level tokens; KVLEDGER_LEVEL=blocks records what is stored"
    elif not size:
        unknown = "the engine has several KV cache groups, and none of full attention"
    elif settings.get("plan") == "opaque":
        unknown = "the connector's metadata can't be read"
    block_bytes, workers = int(settings.get("block_bytes") or 0), int(settings.get("workers") or 1)
    return StoreReturn(
        engine=engine,
        connector=str(settings.get("connector")),
        unknown=unknown,
        token_bytes=block_bytes * workers // size if size else 0,
        stored_tokens=len(contents) * size,
        stored_again_tokens=store.stored_again * size,
        read_tokens=len(read) * size,
        reads=sum(content.reads for content in read),
        never_read_tokens=(len(contents) - len(read)) * size,
        computed_again_tokens=sum(content.again for content in contents) * size,
        read_elsewhere_tokens=store.elsewhere * size,
        first_read_seconds=_median(content.first_read_at - content.stored_at for content in read),
        last_read_seconds=_median(content.last_read_at - content.stored_at for content in read),
        tiers=list(_tiers(loads, model)),
        refused=model.refused,
    )


def _tiers(loads: LoadsByTier, model: StepModel) -> Iterator[TierReturn]:
    for tier, row in sorted(loads.tiers.items()):
        tokens = row.asynchronous_tokens + row.synchronous_tokens
        yield TierReturn(
            tier=tier,
            loads=loads.lives.get(tier, 0),
            tokens=tokens,
            waited_seconds=row.waited_us / 1e6,
            vain_seconds=row.vain_us / 1e6,
            saved_seconds=seconds(model, PREFILL, tokens),
        )


def _median(microseconds: Iterable[int]) -> float | None:
    rows = list(microseconds)
    return median(rows) / 1e6 if rows else None
