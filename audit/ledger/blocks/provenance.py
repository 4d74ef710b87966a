"""What a block holds: which life filled it, which positions of it have no valid KV, and why.

A block that is allocated to a request is filled by the request's life: with the tokens that it computes,
from its local hit up to its computed count, and with those that are loaded for it. While the life lasts, its
account says how far that is, so a step costs nothing here. When the life ends, its blocks keep what they
lack. A block whose allocation was not observed has no such record: what it holds is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ...causes import BLOCKS, NEVER_LOADED, NOT_PLANNED, RESET
from ..account import Account
from ..life import Life
from ..weights import BEFORE
from .holdings import Holdings
from .records import UNKNOWN, Block, Filled, Holder, Lack, LifeLacks, Pool

EVERY = 1 << 62
"""Above every position."""

SEQUENCE, PENDING, FAILED, UNFILLED = "sequence", "pending", "failed", "unfilled"
TAINTED, LEFT, ABSENT, OVERWRITTEN = "tainted", "left", "absent", "overwritten"
REWRITTEN, WITHDRAWN, IN_STEP = "rewritten", "withdrawn", "in_step"
"""Why positions have no valid KV: the sequence had no such tokens; their load has not finished; their load
failed; nothing computed them; they were computed from KV that was not valid; their block left the table;
the table never had a block for them; a later step wrote its state over theirs;
a later turn of a session wrote other tokens over them; the scheduler took the request out of the step that
was to compute them; the step that reads their state writes it.
See also :data:`USED_UNLOADED`."""

HASHED_OTHERWISE = "hashed_otherwise"
"""Why a cached block has the wrong KV: its hash is that of a block for other positions."""

USED_UNLOADED = (NOT_PLANNED, NEVER_LOADED)
"""Causes of lost external tokens that the engine does not know of, so that it uses the tokens."""

UNCOMMITTED = (WITHDRAWN, IN_STEP)
"""Why a cached block was hit too early: the step that writes it had not run, and may never run."""

PROMISED = (PENDING, FAILED, UNFILLED, WITHDRAWN)
"""What a cached block may lack although nothing else reports it."""


def allocated(holdings: Holdings, number: int, blocks: Iterable[int], holder: Holder) -> Filled | None:
    """Blocks are allocated: the holder's life fills them from now on."""
    if holder.request < 0:
        return None
    lacks_of(holdings, holder.request, holder.life).blocks += [(number, block) for block in blocks]
    return Filled(holder.request, holder.request_id, holder.life)


def lacks_of(holdings: Holdings, request: int, life: int) -> LifeLacks:
    """What is kept of a life that lasts; a new one if there is none yet."""
    lacks = holdings.lives.get(request)
    if lacks is None or lacks.life != life:
        lacks = holdings.lives[request] = LifeLacks(life)
    return lacks


def life_of(holdings: Holdings, request: int) -> Life | None:
    """The present life of a request; None if it has none."""
    account = holdings.account(request)
    return account.life if account is not None else None


def placed(pool: Pool, record: Block, group: int, end: int) -> None:
    """A block is cached for positions below ``end``, from which its own positions follow."""
    known = pool.groups.get(group)
    size = known[0] if known is not None else max((size for size, _ in pool.groups.values()), default=0)
    record.begin = (end - 1) // size * size if size > 0 else end
    record.room_end = record.begin + size
    record.of_state = group in pool.states


def lacking(holdings: Holdings, number: int, block: int, start: int, end: int) -> list[Lack]:
    """The positions of [start, end) in a block that have no valid KV, as far as known, in order."""
    record = holdings.pools[number].records[block]
    lacks: list[Lack] = []
    if record.filled is not None:
        known = record.filled.lacks
        lacks += _of_life(holdings, number, block, record, record.filled) if known is None else known
    lacks += record.wrong
    return _clipped(lacks, max(start, _first(record)), min(end, record.room_end)) if lacks else lacks


def _first(record: Block) -> int:
    """The first position for which a cached block stands."""
    return 0 if record.of_state else record.begin


def _clipped(lacks: Iterable[Lack], start: int, end: int) -> list[Lack]:
    """The parts of ``lacks`` in [start, end), sorted, each position once."""
    clipped: list[Lack] = []
    for low, high, why in sorted(lacks):
        low, high = max(low, start), min(high, end)
        if low < high:
            clipped.append((low, high, why))
            start = high
    return clipped


def _of_life(holdings: Holdings, number: int, block: int, record: Block, filled: Filled) -> Iterator[Lack]:
    """What a life that lasts has not filled."""
    account = holdings.account(filled.request)
    life = account.life if account is not None else None
    if account is not None and account.unknown is None and life is not None and life.number == filled.life:
        yield from _life_lacks(holdings, account, life, (number, block), record.room_end)


def _life_lacks(
    holdings: Holdings, account: Account, life: Life, block: tuple[int, int], room_end: int
) -> Iterator[Lack]:
    """What the life of an account has not filled of one of its blocks."""
    lacks = holdings.lives.get(account.request, LifeLacks(life.number))
    waits = life.asynchronous and life.pending and not life.ran
    loaded = 0 <= room_end <= lacks.loaded_end and block not in lacks.failed
    if waits:
        yield life.local, EVERY, PENDING
    elif life.invalid_from >= 0 and not loaded:
        yield account.computed, EVERY, FAILED
    elif life.invalid_from < 0:
        yield max(account.computed, life.kept_end), EVERY, UNFILLED
    yield from lacks.never_loaded
    if lacks.tainted_from >= 0:
        yield lacks.tainted_from, EVERY, TAINTED


def life_ends(holdings: Holdings, account: Account, life: Life, cause: str) -> None:
    """A life ends: its blocks keep what they lack. Report those that stay in the cache all the same."""
    lacks = holdings.lives.get(account.request)
    if lacks is None or lacks.life != life.number:
        return
    known = account.unknown is None
    withdrawn = cause == BLOCKS and account.computed > life.local + max(0, life.external)
    of_any = list(_ended(_life_lacks(holdings, account, life, (UNKNOWN, UNKNOWN), UNKNOWN), withdrawn))
    filled_below = min((low for low, _, _ in of_any), default=EVERY)
    whole = Filled(account.request, account.request_id, life.number, [], life.made or None)
    unplaced = replace(whole, lacks=of_any)
    uncached = Filled(account.request, account.request_id, life.number, None, life.made or [BEFORE])
    for number, block in lacks.blocks:
        record = holdings.pools[number].records[block]
        filled = record.filled
        if filled is None or filled.lacks is not None or filled.request != account.request:
            continue
        if not known:
            record.filled = None
            continue
        if record.begin < 0:  # its positions are known if it is cached later
            in_part = lacks.loaded_end >= 0 and (number, block) not in lacks.failed
            record.filled = uncached if in_part else unplaced
            continue
        if record.room_end <= filled_below:
            record.filled = whole
            continue
        of_block = _life_lacks(holdings, account, life, (number, block), record.room_end)
        left = _clipped(_ended(of_block, withdrawn), _first(record), record.room_end)
        record.filled = replace(whole, lacks=left)
        if left and record.has_hash == 1 and record.cached_for == account.request and cause != RESET:
            if cause == BLOCKS:  # the request that it was preempted for takes its last blocks at once
                step = record.operations[-1].step if record.operations else UNKNOWN
                holdings.preempted_cached.append((number, block, record.hash_ids[-1], step))
            else:
                report_promised(holdings, number, block, record)
    del holdings.lives[account.request]


def _ended(lacks: Iterable[Lack], withdrawn: bool) -> Iterator[Lack]:
    """What a life has not filled when it ends.

    A block is cached when its step is scheduled. ``withdrawn``: what a preempted life did not compute was the
    work of the step that was being scheduled, and no worker gets it.
    """
    for start, end, why in lacks:
        yield start, end, WITHDRAWN if withdrawn and why == UNFILLED else why


def check_preempted(holdings: Holdings) -> None:
    """Report blocks of preempted requests that lack positions and are still cached after the step."""
    left, holdings.preempted_cached = holdings.preempted_cached, []
    for number, block, hash_id, step in left:
        record = holdings.pools[number].records[block]
        if hash_id in record.hash_ids:
            if step > holdings.requests.posted_step:
                holdings.preempted_cached.append((number, block, hash_id, step))
            else:
                report_promised(holdings, number, block, record)


def report_promised(holdings: Holdings, number: int, block: int, record: Block) -> None:
    """Report a cached block that lacks positions that its hash stands for, and that nothing will fill."""
    for low, _, why in lacking(holdings, number, block, record.begin, record.end):
        if why in PROMISED:
            holdings.report_cached(why, record.writer, number, block, record.end, low, record.cached_for)
            return
