"""The law of reads: every position that a step reads from a block of another life holds valid KV.

In this order: what a block holds and what it lacks, states, blocks that left a window, the law itself, and
the tokens that a session's next turn writes over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from ... import events as ev
from ...bounded_tables import keep_newest
from ...causes import BLOCKS, NEVER_LOADED, NOT_PLANNED, REPLAY, RESET
from ..account import Account, Life, Made
from ..entries import LoadInFlight, ReadInvalid, UncommittedHit
from ..weights import BEFORE, extend, oldest_of_all, spans
from .holdings import Following, HitBlock, Holdings
from .pool import (
    TABLE,
    UNKNOWN,
    Absent,
    Block,
    Filled,
    Holder,
    Lack,
    LifeLacks,
    Operation,
    Pool,
    Rewrite,
    table_holders,
    table_key,
)

# --- provenance ----------------------------------------------------------------------------------------
#
# What a block holds: which life filled it, which positions of it have no valid KV, and why.
#
# A block that is allocated to a request is filled by the request's life: with the tokens that it computes,
# from its local hit up to its computed count, and with those that are loaded for it. While the life lasts,
# its account says how far that is, so a step costs nothing here. When the life ends, its blocks keep what
# they lack. A block whose allocation was not observed has no such record: what it holds is not known.


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


def allocated(
    holdings: Holdings, number: int, blocks: Iterable[int], done: Operation, request: int
) -> tuple[Holder, Filled]:
    """Blocks are allocated to a request: its life holds them, and fills them from now on."""
    lacks = holdings.lives.get(request)
    if lacks is None or lacks.life != done.life:
        lacks = holdings.lives[request] = LifeLacks(done.life)
    if not lacks.blocks:
        lacks.call, lacks.step = holdings.calls, done.step
    for block in blocks:
        lacks.blocks.append((number, block))
    holder, filled = lacks.holder, lacks.filled
    if holder is None or holder.group != done.group or filled is None:
        holder = lacks.holder = Holder(TABLE, request, done.request_id, done.life, done.group)
        filled = lacks.filled = Filled(request, done.request_id, done.life)
    return holder, filled


def given_back_in_flight(
    holdings: Holdings, request: int, in_flight: Sequence[dict[int, tuple[Account, int, int]]]
) -> None:
    """Report the blocks of an asynchronous load that a step ``in_flight`` may still write.

    Their last owner gave them back with its life, and runs in such a step. The step does not write a block
    that was cached before it. A load is in no order with the steps; another step is.
    """
    lacks, final = holdings.lives.get(request), holdings.requests.posted_step - len(in_flight)
    found: dict[int, list[tuple[int, str, int]]] = {}
    for number, block in lacks.blocks if lacks is not None else ():
        record = holdings.pools[number].records[block]
        owner = record.allocations[1] if len(record.allocations) == 4 else UNKNOWN
        row = next((step[owner] for step in in_flight if owner in step), None)
        if row is None or owner == request:
            continue
        life = row[0].life if owner in holdings.requests.living else None
        before = [done for done in record.operations if done.step >= record.allocations[0]]
        freed = next((done for done in reversed(before) if done.what == "freed"), None)
        if freed is None or life is not None or any(d.what == "cached" and d.step <= final for d in before):
            continue
        found.setdefault(number, []).append((block, row[0].request_id, freed.step))
    for number, rows in found.items():
        block, writer, freed_in = rows[0]
        tokens = len(rows) * block_tokens(holdings.pools[number], UNKNOWN)
        blocks, story = [row[0] for row in rows], holdings.story(number, block)
        subject = LoadInFlight(number, blocks, tokens, writer, freed_in, story)
        holdings.report(subject, request)


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


def block_tokens(pool: Pool, group: int) -> int:
    """The tokens of a group's blocks; of a group that is not known, those of the largest one."""
    known = pool.groups.get(group)
    return known[0] if known is not None else max((size for size, _ in pool.groups.values()), default=0)


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
    pools, own, request = holdings.pools, lacks.filled, account.request
    for number, block in lacks.blocks:
        record = pools[number].records[block]
        filled = record.filled
        if filled is None:
            continue
        if filled is not own and (filled.lacks is not None or filled.request != request):
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


# --- states --------------------------------------------------------------------------------------------
#
# The law of reads for groups of states: a step begins where the state that it reads ends.
#
# A state is one checkpoint of a whole prefix, in the block of the prefix's last position, and the steps of a
# request write it over one another. So a step that begins lower than the step before it ended, in the same
# block, reads a state with tokens that are not before it. In another block it reads the same state if the
# worker remembers where the last step left it, as the V1 model runner does. The V2 runner looks into the
# block before the step's first position, whose state may be of any step: that is not judged.
#
# A step reads a state before it writes one, so a state that another request hit in the step that writes it
# is not there yet. In later steps it is, also before the output of that step: workers run steps in order.
#
# A request that rejects drafts keeps the state of each draft, and goes on from the last accepted one. Of a
# step in flight with drafts only one token counts here, because the others may be rejected.


def _rolled_back(holdings: Holdings, event: ev.RolledBack) -> None:
    if event.cause != REPLAY and any(pool.states for pool in holdings.pools.values()):
        account = holdings.account(event.request)
        end = max(_state_end(event, account), holdings.state_ends.get(event.request, 0))
        holdings.state_ends[event.request] = end


def _stepped(holdings: Holdings, event: ev.Stepped) -> None:
    for request in list(holdings.state_ends):
        if holdings.requests.scheduled(request):
            _judge_state(holdings, request, holdings.state_ends.pop(request), holdings.requests.posted_step)


def _state_end(event: ev.RolledBack, account: Account | None) -> int:
    """Where the last state surely ends when a request is rolled back.

    Where the count falls, what is in flight lies above it. Where it stays, as before 0.31.0, it counts that.
    """
    flights = [each for each in account.in_flight if each.life is account.life] if account is not None else []
    least = event.before_tokens - sum(flight.drafts for flight in flights)
    if event.computed_tokens < event.before_tokens:
        least = max(least, event.computed_tokens + bool(flights))
    return least


def _judge_state(holdings: Holdings, request: int, end: int, step: int) -> None:
    """A request whose last state ends at position ``end`` has been scheduled again."""
    account = holdings.account(request)
    if account is None or account.unknown is not None or not account.in_flight:
        return
    flight = account.in_flight[-1]
    lacks = lacks_of(holdings, request, flight.life.number)
    for number, pool in holdings.pools.items():
        for group in pool.states:
            size = pool.groups[group][0]
            own = [
                block
                for pool_no, block in lacks.blocks
                if pool_no == number and table_key(request, group) in pool.records[block].holders
            ]
            same_block = (flight.start - 1) // size == (end - 1) // size
            same_state = same_block or (account.resumable and holdings.keeps_state_places)
            if own and 0 < flight.start < end and same_state:
                story, whose = holdings.story(number, own[-1]), account.request_id
                row = number, own[-1:], end - flight.start, flight.start, end
                holdings.report(ReadInvalid(*row, whose, OVERWRITTEN, story, step), request)
                lacks.tainted_from = flight.start
                return


def written_in_step(holdings: Holdings, number: int, block: int, reader: int, end: int) -> list[Lack]:
    """The positions below ``end`` that the last posted step computes for a state which it reads."""
    pool = holdings.pools[number]
    record = pool.records[block]
    groups = [h.group for h in table_holders(holdings.pools[number], record, reader)]
    filled = record.filled
    if not any(group in pool.states for group in groups) or filled is None or filled.request == reader:
        return []
    writer, life = holdings.account(filled.request), life_of(holdings, filled.request)
    if writer is None or writer.unknown is not None or life is None or life.number != filled.life:
        return []
    if not holdings.requests.scheduled(filled.request) or not writer.in_flight:
        return []
    start, end = writer.in_flight[-1].start, min(end, record.room_end)
    return [(start, end, IN_STEP)] if start < end <= writer.computed else []


def states_end(holdings: Holdings, request: int) -> None:
    """A life ends: its states are gone."""
    holdings.state_ends.pop(request, None)


OF_STATES: Following = {ev.RolledBack: _rolled_back, ev.Stepped: _stepped}


# --- windows -------------------------------------------------------------------------------------------
#
# The law of reads for groups with windows: the table has the blocks of the window of each step.
#
# A token reads the positions of its window. A table begins above the positions for which an admission put
# the null block, and it loses a block when the window has left the block. No step may begin so low that its
# window has positions below the table. A step's first position is known when the step is posted. It is known
# only later where the engine schedules a step before the drafts of the last one are rejected: the step
# begins as many positions lower. A step is judged when its request runs on, because an engine may also trim
# the table of a request that has just ended.


OF_WHOLE_TABLES = ("free", "free_blocks")
"""Calls of the engine that free the whole table of a request: its life ends."""


def left_window(
    holdings: Holdings,
    event: ev.BlocksFreed,
    pool: Pool,
    block: int,
    record: Block,
    holder: Holder,
) -> None:
    """A reference to a block was freed: note the positions that left the table of a group with windows.

    Nothing is noted of a block that is in another table of the request, whose positions it may have.
    """
    windowed = holder.kind == TABLE and holder.group in pool.windows and record.begin >= 0
    if not windowed or event.by in OF_WHOLE_TABLES:
        return
    if all(other.request != holder.request for other in record.holders.values()):
        left = Absent(holder.life, record.room_end, block)
        holdings.leaving.append((event.step, holder.request, event.pool, holder.group, left))


def _delivered(holdings: Holdings, event: ev.Delivered | ev.DeliveredWhole) -> None:
    for request in holdings.left:
        account = holdings.account(request)
        if account is not None and account.drafted and account.in_flight:
            _begins(holdings, request, account.in_flight[-1].start, holdings.requests.posted_step)


def _window_after_failure(holdings: Holdings, event: ev.LoadFailed) -> None:
    account = holdings.account(event.request)
    if account is not None:
        _begins(holdings, event.request, account.computed, holdings.requests.posted_step + 1)


def _admitted(holdings: Holdings, event: ev.Admitted) -> None:
    """A life begins: note where its tables begin in groups with windows.

    Its hits end with the local tokens. Its own blocks end with the load, or with the slots of its first step.
    """
    if not any(pool.windows for pool in holdings.pools.values()):
        return
    account = holdings.account(event.request)
    if account is None or account.life is None:
        return
    if any(times > 1 for times in holdings.held.get(event.request, {}).values()):
        return  # a block is in two of its tables, so whose part of them it fills is not known
    life, lacks = account.life, holdings.lives.get(event.request)
    filled = set(lacks.blocks) if lacks is not None else set()
    for number, pool in holdings.pools.items():
        for group in pool.windows:
            in_table = [
                (pool_no, block) in filled
                for pool_no, block in holdings.held.get(event.request, ())
                if pool_no == number
                for holder in table_holders(pool, pool.records[block], event.request)
                if holder.group == group
            ]
            size, own = pool.groups[group][0], sum(in_table)
            hits = len(in_table) - own
            end = -own * size
            if hits or life.asynchronous:
                known = life.local if hits else life.local + max(0, life.external)
                end = (-(-known // size) - (hits or own)) * size
            absent = Absent(life.number, end, pool.null_block)
            holdings.leaving.append((event.step, event.request, number, group, absent))


def _begins(holdings: Holdings, request: int, start: int, step: int) -> None:
    """A step of a request begins at position ``start``."""
    holdings.begun[request] = min((start, step), holdings.begun.get(request, (start, step)))


def _windows_of_steps(holdings: Holdings, event: ev.Stepped | ev.Repeated) -> None:
    if not holdings.begun and not holdings.leaving:
        return
    step, scheduled = holdings.requests.posted_step, holdings.requests.scheduled
    repeated = isinstance(event, ev.Repeated)
    begun, holdings.begun = holdings.begun, {}
    for request, (start, of_step) in begun.items():
        if scheduled(request):
            for place in list(holdings.left.get(request, ())):
                _judge_window(holdings, request, place, start, of_step)
        elif holdings.account(request) is not None:
            holdings.begun[request] = start, of_step
    leaving, holdings.leaving = holdings.leaving, []
    for row in leaving:
        of_step, request, pool, group, left = row
        account = holdings.account(request)
        if of_step > step or (account is not None and scheduled(request) is None):
            holdings.leaving.append(row)
        elif account is not None and account.life is not None and account.life.number == left.life:
            tokens, drafts = scheduled(request) or (0, 0)
            computed = account.sampled if drafts else tokens
            start = account.in_flight[-1].start if account.in_flight else account.computed - computed
            admitted = left.block == holdings.pools[pool].null_block
            if admitted and account.life.rolled_back.get(REPLAY):
                continue  # the step computes the window anew, from its first position on
            if admitted and left.end < 0:
                size = holdings.pools[pool].groups[group][0]
                left.end += -(-(start + tokens) // size) * size
            of_request = holdings.left.setdefault(request, {})
            of_request[pool, group] = max(
                left, of_request.get((pool, group), left), key=lambda each: each.end
            )
            if repeated and step > of_step:
                _judge_window(holdings, request, (pool, group), start - (step - of_step) * computed, of_step)
            elif admitted:
                _judge_window(holdings, request, (pool, group), start, step)
            else:
                _begins(holdings, request, start, step)


def _judge_window(holdings: Holdings, request: int, place: tuple[int, int], start: int, step: int) -> None:
    """A step of the request begins at position ``start``: its window must be in the table."""
    left, account, pool = holdings.left[request][place], holdings.account(request), holdings.pools[place[0]]
    if account is None or account.unknown is not None or place[1] not in pool.windows:
        return
    low = pool.windows[place[1]].first_read(start)
    if low < left.end:
        absent = left.block == pool.null_block
        story = [] if absent else holdings.story(place[0], left.block)
        why, whose = ABSENT if absent else LEFT, account.request_id
        tokens = left.end - low
        subject = ReadInvalid(place[0], [left.block], tokens, low, left.end, whose, why, story, step)
        holdings.report(subject, request)
        lacks_of(holdings, request, left.life).tainted_from = start
        del holdings.left[request][place]


def windows_end(holdings: Holdings, request: int) -> None:
    """A life ends: its tables are gone."""
    holdings.left.pop(request, None)
    holdings.begun.pop(request, None)


OF_WINDOWS: Following = {
    ev.Stepped: _windows_of_steps,
    ev.Repeated: _windows_of_steps,
    ev.Admitted: _admitted,
    ev.Delivered: _delivered,
    ev.DeliveredWhole: _delivered,
    ev.LoadFailed: _window_after_failure,
}


# --- reads ---------------------------------------------------------------------------------------------
#
# The law of reads: every position that a step reads from a block of another life holds valid KV.
#
# A request reads the blocks that it hit at each of its steps. Steps run in the order in which they were
# scheduled, and a step writes before it reads, so KV that the step itself computes is valid. A state is read
# before it is written (see states above). A hit is judged at the first step that reads it; it is judged again
# when a block that it uses loses KV. Then nothing can become wrong without an event, so a steady step costs
# nothing.


Reads = dict[tuple[int, int], list[Lack]]
"""What a request reads without valid KV, by pool and block."""


def hit(holdings: Holdings, event: ev.BlocksTouched, block: int, record: Block) -> None:
    """A request hit a cached block: its first read is judged, unless the block is known to be valid."""
    filled, hits = record.filled, holdings.hits.setdefault(event.request, {})
    hits[event.pool, event.group] = hits.get((event.pool, event.group), 0) + 1
    if record.wrong or (filled is not None and filled.lacks != []):
        holdings.unread[event.request, event.pool, block] = event.step
    if holdings.weights.stage:
        note_weights(holdings, event, record)


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
            if covered >= event.local_tokens:
                continue
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


def _reads_of_steps(holdings: Holdings, event: ev.Stepped | ev.Repeated) -> None:
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
            lacks = written_in_step(holdings, number, block, request, end)
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


OF_READS: Following = {
    ev.LoadFailed: _load_failed,
    ev.Admitted: admitted,
    ev.Stepped: _reads_of_steps,
    ev.Repeated: _reads_of_steps,
}


# --- rewrites ------------------------------------------------------------------------------------------
#
# The law of reads after a session's turn: the next turn's tokens are written over those that were given up.
#
# The next chunk of a session begins at some position, and the KV below it stays. A cached block of the
# session that ends above this position stands for tokens that the sequence no longer has. It holds their KV
# until a step writes into it: then every request that has hit the block, or hits it later, reads KV of other
# tokens.


def _rewrites_of_steps(holdings: Holdings, event: ev.Stepped | ev.Repeated) -> None:
    for request in list(holdings.rewrites):
        if holdings.requests.scheduled(request):
            _written(holdings, request, holdings.rewrites.pop(request), isinstance(event, ev.Repeated))


def _extended(holdings: Holdings, event: ev.Extended) -> None:
    """The next chunk of a session begins: note the cached blocks that stand for tokens which it replaces."""
    lacks, account = holdings.lives.get(event.request), holdings.account(event.request)
    if lacks is None or account is None or account.unknown is not None or event.computed_tokens < 0:
        return
    blocks = []
    for number, block in lacks.blocks:
        record = holdings.pools[number].records[block]
        own = record.hash_ids and record.cached_for == event.request and record.end > event.computed_tokens
        if own and in_table(holdings, number, block, event.request):
            blocks.append((number, block, record.hash_ids[-1]))
    if blocks:
        holdings.rewrites[event.request] = Rewrite(event.computed_tokens, blocks)


def _written(holdings: Holdings, request: int, rewrite: Rewrite, repeated: bool) -> None:
    """A step of the session was scheduled: note into which of the blocks it writes."""
    account, left = holdings.account(request), []
    if account is None or account.unknown is not None:
        return
    for number, block, hash_id in rewrite.blocks:
        pool = holdings.pools[number]
        record = pool.records[block]
        if hash_id not in record.hash_ids or not in_table(holdings, number, block, request):
            continue
        groups = [h.group for h in table_holders(pool, record, request)]
        # A step leaves one state, in the block of its last position.
        passed = groups[0] in pool.states and not repeated and account.computed > record.room_end
        if record.begin < account.computed and not passed:
            record.wrong = [(rewrite.begin, record.end, REWRITTEN)]
            expose(holdings, number, block)
        elif record.begin >= account.computed:
            left.append((number, block, hash_id))
    if left:
        holdings.rewrites[request] = Rewrite(rewrite.begin, left)


def rewrites_end(holdings: Holdings, request: int) -> None:
    """A life ends: no step of it writes any more."""
    holdings.rewrites.pop(request, None)


OF_REWRITES: Following = {
    ev.Extended: _extended,
    ev.Stepped: _rewrites_of_steps,
    ev.Repeated: _rewrites_of_steps,
}


# --- weights of blocks ---------------------------------------------------------------------------------
#
# Under which weights blocks, and KV in the connector's store, were filled.
#
# The store's KV is known by the hashes of its blocks: a request that saves a block saves it under the block's
# hash, and what is promised to another request is found by the hashes that its own blocks get.


NOT_KNOWN = UNKNOWN, UNKNOWN

SAVED_KEPT = 1 << 16
"""Of how many hashes it is remembered under which weights their KV was saved, the last ones."""

HitWeights = tuple[int, int, int, int, str]
"""Start and end of positions that a request hit, version and oldest version of their KV, and who wrote it."""


def note_weights(holdings: Holdings, event: ev.BlocksTouched, record: Block) -> None:
    """A request hit a cached block after the weights had changed: note who filled the block."""
    rows = holdings.hit_blocks.setdefault(event.request, {}).setdefault((event.pool, event.group), [])
    rows.append(_writer_of(record))


def _writer_of(record: Block) -> HitBlock:
    """Who filled a block. The life that fills it may be of the same step, and is then posted after this."""
    filled, begin = record.filled, max(0, record.begin)
    request, life, made = UNKNOWN, 0, None
    if filled is not None and record.begin >= 0:
        request, life = filled.request, filled.life
        made = filled.made if filled.lacks is None else filled.made or [BEFORE]
    return begin, max(begin + 1, record.room_end), record.writer, request, life, made


def _filled(holdings: Holdings, row: HitBlock) -> Iterator[tuple[int, int, int, int]]:
    """Start, end, version and oldest version of the positions of a block."""
    begin, end, _, request, number, made = row
    if made is None:
        account = holdings.account(request)
        known = account is not None and account.unknown is None and 0 < number <= len(account.lives)
        made = (account.lives[number - 1].made or [BEFORE]) if account and known else [(0, *NOT_KNOWN)]
    yield from spans(made, begin, end)


def hits(holdings: Holdings, request: int, end: int) -> tuple[list[Made], list[HitWeights]] | None:
    """Under which weights the first ``end`` positions of a request were filled, which it has just hit.

    Also the rows of this by block. None: nothing is known of the blocks.
    """
    groups = holdings.hit_blocks.pop(request, None)
    if not groups:
        return None
    tables, known = [], []
    for rows in groups.values():
        made: list[Made] = []
        for row in sorted(rows, key=lambda row: row[0]):
            for start, stop, version, oldest in _filled(holdings, row):
                extend(made, start, version, oldest)
                known.append((start, stop, version, oldest, row[2]))
        tables.append(made)
    return oldest_of_all(tables, end), known


def _blocks(holdings: Holdings, request: int, start: int, end: int) -> Iterator[Block]:
    """The cached blocks in the tables of a request that lie in the positions [start, end)."""
    for number, block in holdings.held.get(request, ()):
        record = holdings.pools[number].records[block]
        if start < record.room_end and 0 <= record.begin < end and record.hash_ids:
            yield record


def saved(holdings: Holdings, event: ev.BlocksSaved) -> None:
    """Blocks are saved in the connector's store: note their weights, by hash. The newest count."""
    if len(holdings.pools) != 1:
        return
    ((_, pool),) = holdings.pools.items()
    saved = holdings.saved_weights
    for block in event.blocks:
        record = pool.records.get(block)
        rows = [] if record is None else list(_filled(holdings, _writer_of(record)))
        for hash_id in record.hash_ids if record is not None and rows else ():
            earlier = saved.get(hash_id, NOT_KNOWN)
            version, oldest = min(row[2] for row in rows), min(row[3] for row in rows)
            saved[hash_id] = max(version, earlier[0]), max(oldest, earlier[1])
            keep_newest(saved, SAVED_KEPT)


def loads(holdings: Holdings, request: int, start: int, end: int) -> list[Made]:
    """Under which weights the positions [start, end) were saved that a request loads."""
    made: list[Made] = [(start, *NOT_KNOWN)]
    known_to = start
    for record in sorted(_blocks(holdings, request, start, end), key=lambda each: each.begin):
        known = [holdings.saved_weights.get(hash_id, NOT_KNOWN) for hash_id in record.hash_ids]
        extend(made, max(start, record.begin), *max(known))
        known_to = max(known_to, record.end)
    if known_to < end:
        extend(made, known_to, *NOT_KNOWN)
    return made
