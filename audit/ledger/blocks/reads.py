"""The law of reads: every position that a step reads from a block of another life holds valid KV.

A request reads the blocks that it hit at each of its steps. Steps run in the order in which they were
scheduled, and a step writes before it reads, so KV that the step itself computes is valid. A state is read
before it is written (:mod:`.states`). A hit is judged at the first step that reads it; it is judged again
when a block that it uses loses KV. Then nothing can become wrong without an event, so a steady step costs
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from ... import events as ev
from ... import pool_calls
from ..life import Life
from . import states, weights_of_blocks
from .entries import ReadInvalid, UncommittedHit
from .holdings import Following, Holdings
from .provenance import (
    ABSENT,
    EVERY,
    FAILED,
    TAINTED,
    UNCOMMITTED,
    UNFILLED,
    USED_UNLOADED,
    lacking,
    lacks_of,
    life_of,
    report_promised,
)
from .records import TABLE, UNKNOWN, Block, Lack, Pool

Reads = dict[tuple[int, int], list[Lack]]
"""What a request reads without valid KV, by pool and block."""


def hit(holdings: Holdings, event: pool_calls.BlocksTouched, block: int, record: Block) -> None:
    """A request hit a cached block: its first read is judged, unless the block is known to be valid."""
    filled, hits = record.filled, holdings.hits.setdefault(event.request, {})
    hits[event.pool, event.group] = hits.get((event.pool, event.group), 0) + 1
    if record.wrong or (filled is not None and filled.lacks != []):
        holdings.unread[event.request, event.pool, block] = event.step
    if holdings.weights.stage:
        weights_of_blocks.hit(holdings, event, record)


def admitted(holdings: Holdings, event: ev.Admitted) -> None:
    """A life begins. Report the local tokens for which it got its own blocks and no cached ones, or no state.

    Its own blocks are empty until it fills them, and it fills none below its local hit. A load may bring the
    state.
    """
    request = event.request
    hits, lacks = holdings.hits.pop(request, {}), holdings.lives.get(request)
    account = holdings.account(request)
    if lacks is None or account is None or account.unknown is not None or event.local_tokens <= 0:
        return
    if len(holdings.held.get(request, ())) != sum(hits.values()) + len(set(lacks.blocks)):
        return  # the request kept blocks of an earlier life
    for number, pool in holdings.pools.items():
        if event.external_tokens <= 0 and any((number, group) not in hits for group in pool.states):
            whole = event.local_tokens, 0, event.local_tokens
            whose = account.request_id
            holdings.report(ReadInvalid(number, [pool.null_block], *whole, whose, ABSENT, []), request)
            holdings.invalid_hits.append((request, *whole[1:]))
            lacks.tainted_from = event.local_tokens
        for group in pool.prefix_groups:
            covered = pool.groups[group][0] * hits.get((number, group), 0)
            own = [block for each, block in lacks.blocks if each == number]
            if own and covered < event.local_tokens and not _copied_to(pool, own[0]):
                story, whose = holdings.story(number, own[0]), account.request_id
                tokens = event.local_tokens - covered
                subject = ReadInvalid(
                    number, own[:1], tokens, covered, event.local_tokens, whose, UNFILLED, story
                )
                holdings.report(subject, request)
                holdings.invalid_hits.append((request, covered, event.local_tokens))


def _copied_to(pool: Pool, block: int) -> bool:
    """Whether a copy filled the first part of a block."""
    return any(done.what.startswith("copied from") for done in pool.records[block].operations)


def lost(holdings: Holdings, request: int, life: int, start: int, end: int, cause: str) -> None:
    """External tokens [start, end) of a life were lost, and the engine may use them."""
    if cause not in USED_UNLOADED:
        return
    lacks = holdings.lives.get(request)
    if lacks is not None and lacks.life == life:
        lacks.never_loaded.append((start, end, cause))
        for number, block in lacks.blocks:  # those who have hit them have read them
            for reader in _readers(holdings, number, block):
                holdings.unread[reader, number, block] = 0
    else:
        _lost_after_the_end(holdings, request, life, start, end, cause)


def _lost_after_the_end(
    holdings: Holdings, request: int, life: int, start: int, end: int, cause: str
) -> None:
    """It turns out later: the blocks that the request had filled lack the tokens."""
    for number, pool in holdings.pools.items():
        for block, record in pool.records.items():
            filled = record.filled
            if filled is None or filled.lacks is None:
                continue
            if (filled.request, filled.life) == (request, life):
                low, high = start, end
                if record.begin >= 0:
                    low, high = max(start, record.begin), min(end, record.room_end)
                if low < high:
                    _lack(record, low, high, cause)
                    for reader in _readers(holdings, number, block):
                        holdings.unread[reader, number, block] = 0


def _lack(record: Block, start: int, end: int, why: str) -> None:
    """A block that an ended life filled lacks the positions [start, end)."""
    assert record.filled is not None and record.filled.lacks is not None
    record.filled = replace(record.filled, lacks=[*record.filled.lacks, (start, end, why)])


def failed_after_the_end(holdings: Holdings, request: int, life: Life, failed: Collection[int]) -> None:
    """Blocks failed that a life loaded before it ended: they lack the tokens, and so does what it computed.

    A block that a request holds is left out: the engine makes this request compute it.
    """
    loaded_end, wrong = life.local + max(0, life.external), False
    unplaced: list[Block] = []
    for begin, number, block in sorted(_filled_by(holdings, request, life.number)):
        record = holdings.pools[number].records[block]
        if begin < 0:  # it is not known yet which positions the block has
            unplaced.append(record)
            if block in failed and life.local < loaded_end:
                _lack(record, life.local, loaded_end, FAILED)
                wrong = True
            continue
        start, end = max(life.local, begin), min(loaded_end, record.room_end)
        if block in failed and start < end:
            _lack(record, start, end, FAILED)
            report_promised(holdings, number, block, record)
            wrong = True
        if wrong and loaded_end < record.room_end:
            _lack(record, max(loaded_end, begin), record.room_end, TAINTED)
    for record in unplaced if wrong else ():
        _lack(record, loaded_end, EVERY, TAINTED)


def _filled_by(holdings: Holdings, request: int, life: int) -> Iterator[tuple[int, int, int]]:
    """First position, pool and block of each block that a life which has ended filled and no table holds.

    The first position is -1 of a block that was not cached.
    """
    for number, pool in holdings.pools.items():
        for block, record in pool.records.items():
            filled = record.filled
            if filled is not None and filled.lacks is not None:
                held = any(holder.kind == TABLE for holder in record.holders.values())
                if (filled.request, filled.life) == (request, life) and not held:
                    yield record.begin, number, block


def _load_failed(holdings: Holdings, event: ev.LoadFailed) -> None:
    """A load failed: requests that use its blocks read them at the next step, if nothing fills them before.

    The engine itself tells those who read them in the step that failed.
    """
    life, lacks = life_of(holdings, event.request), holdings.lives.get(event.request)
    if life is None or lacks is None:
        return
    if event.failed_blocks is not None:
        lacks.failed |= {(number, block) for number in holdings.pools for block in event.failed_blocks}
        lacks.loaded_end = life.local + max(0, life.external)
    lacks.never_loaded = [row for row in lacks.never_loaded if row[0] < event.computed_tokens]
    if lacks.tainted_from >= event.computed_tokens:
        lacks.tainted_from = UNKNOWN  # these are computed again
    for number, block in lacks.blocks:
        expose(holdings, number, block)


def expose(holdings: Holdings, number: int, block: int) -> None:
    """A block has lost KV: those who have hit it read it at each further step."""
    for reader in _readers(holdings, number, block):
        holdings.exposed[reader, number, block] = None


def _readers(holdings: Holdings, number: int, block: int) -> list[int]:
    """The requests that hold a block in their tables, but the one whose life fills it."""
    record = holdings.pools[number].records[block]
    filler = record.filled.request if record.filled is not None else UNKNOWN
    return [h.request for h in record.holders.values() if h.kind == TABLE and h.request != filler]


def _steps_posted(holdings: Holdings, event: ev.Stepped | ev.Repeated) -> None:
    """Judge the reads that the steps posted up to now are the first to make.

    A pool's calls are emitted before the steps that were held back, so a hit may be one of a later step.
    """
    if not holdings.unread and not holdings.exposed:
        return
    posted = event.step if isinstance(event, ev.Stepped) else UNKNOWN
    reads: dict[int, Reads] = {}
    for (request, number, block), step in list(holdings.unread.items()):
        life = life_of(holdings, request)
        begun = life is not None and life.began_step >= step
        if step > posted or (begun and life is not None and not life.ran):
            continue  # of a later step, or the request waits for a load
        del holdings.unread[request, number, block]
        if life is not None and (begun or not step):
            _read(holdings, reads, request, number, block, life.local)
    for request, number, block in list(holdings.exposed):
        life = life_of(holdings, request)
        if life is None or not in_table(holdings, number, block, request):
            del holdings.exposed[request, number, block]
            continue
        if holdings.requests.scheduled(request):
            _read(holdings, reads, request, number, block, life.local)
        if not lacking(holdings, number, block, 0, life.local):
            del holdings.exposed[request, number, block]
    for request, invalid in reads.items():
        early = {place: lacks for place, lacks in invalid.items() if lacks[0][2] in UNCOMMITTED}
        other = {place: lacks for place, lacks in invalid.items() if place not in early}
        for kind, of_kind in ((UncommittedHit, early), (ReadInvalid, other)):
            if of_kind:
                _report(holdings, request, of_kind, kind)
        for number, block in invalid:
            holdings.exposed.pop((request, number, block), None)


def in_table(holdings: Holdings, number: int, block: int, request: int) -> bool:
    """Whether a table of a request has a block."""
    return (number, block) in holdings.held.get(request, ())


def _read(
    holdings: Holdings,
    reads: dict[int, Reads],
    request: int,
    number: int,
    block: int,
    end: int,
) -> None:
    """Note what a request reads without valid KV in a block below position ``end``."""
    if in_table(holdings, number, block, request):
        lacks = lacking(holdings, number, block, 0, end)
        if not lacks and holdings.pools[number].states:
            lacks = states.written_in_step(holdings, number, block, request, end)
        if lacks:
            reads.setdefault(request, {})[number, block] = lacks


def _report(holdings: Holdings, request: int, reads: Reads, kind: type[ReadInvalid]) -> None:
    account = holdings.account(request)
    assert account is not None and account.life is not None
    rows = sorted(row for lacks in reads.values() for row in lacks)
    tokens = counted = 0
    for start, end, _ in rows:  # the groups of a hybrid model have the same positions
        tokens += max(0, end - max(start, counted))
        counted = max(counted, end)
    number, block = min(reads, key=lambda each: reads[each])
    record = holdings.pools[number].records[block]
    blocks = [each for pool, each in reads if pool == number]
    filler = record.filled.request_id if record.filled is not None else record.writer
    story, why = holdings.story(number, block), rows[0][2]
    subject = kind(number, blocks, tokens, rows[0][0], counted, record.writer or filler, why, story)
    holdings.report(subject, request)
    holdings.invalid_hits += [(request, start, end) for start, end, _ in rows]
    lacks = lacks_of(holdings, request, account.life.number)
    lacks.tainted_from = account.in_flight[-1].start if account.in_flight else account.computed


FOLLOWING: Following = {
    ev.LoadFailed: _load_failed,
    ev.Admitted: admitted,
    ev.Stepped: _steps_posted,
    ev.Repeated: _steps_posted,
}
