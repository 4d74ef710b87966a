"""The law of reads for groups with windows: the table has the blocks of the window of each step.

A token reads the positions of its window. A table begins above the positions for which an admission put the
null block, and it loses a block when the window has left the block. No step may begin so low that its window
has positions below the table. A step's first position is known when the step is posted. It is known only
later where the engine schedules a step before the drafts of the last one are rejected: the step begins as
many positions lower. A step is judged when its request runs on, because an engine may also trim the table of
a request that has just ended.
"""

from __future__ import annotations

from ... import events as ev
from ... import pool_calls
from ...causes import REPLAY
from .entries import ReadInvalid
from .holdings import Following, Holdings
from .provenance import ABSENT, LEFT, lacks_of
from .records import TABLE, Absent, Block, Holder, Pool, table_holders

OF_WHOLE_TABLES = ("free", "free_blocks")
"""Calls of the engine that free the whole table of a request: its life ends."""


def freed(
    holdings: Holdings,
    event: pool_calls.BlocksFreed,
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


def _load_failed(holdings: Holdings, event: ev.LoadFailed) -> None:
    account = holdings.account(event.request)
    if account is not None:
        _begins(holdings, event.request, account.computed, holdings.requests.posted_step + 1)


def _admitted(holdings: Holdings, event: ev.Admitted) -> None:
    """A life begins: note where its tables begin in groups with windows.

    Its hits end with the local tokens. Its own blocks end with the load, or with the slots of its first step.
    """
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


def _steps_posted(holdings: Holdings, event: ev.Stepped | ev.Repeated) -> None:
    if not holdings.begun and not holdings.leaving:
        return
    step, scheduled = holdings.requests.posted_step, holdings.requests.scheduled
    repeated = isinstance(event, ev.Repeated)
    begun, holdings.begun = holdings.begun, {}
    for request, (start, of_step) in begun.items():
        if scheduled(request):
            for place in list(holdings.left.get(request, ())):
                _judge(holdings, request, place, start, of_step)
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
                _judge(holdings, request, (pool, group), start - (step - of_step) * computed, of_step)
            elif admitted:
                _judge(holdings, request, (pool, group), start, step)
            else:
                _begins(holdings, request, start, step)


def _judge(holdings: Holdings, request: int, place: tuple[int, int], start: int, step: int) -> None:
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


def life_ends(holdings: Holdings, request: int) -> None:
    """A life ends: its tables are gone."""
    holdings.left.pop(request, None)
    holdings.begun.pop(request, None)


FOLLOWING: Following = {
    ev.Stepped: _steps_posted,
    ev.Repeated: _steps_posted,
    ev.Admitted: _admitted,
    ev.Delivered: _delivered,
    ev.DeliveredWhole: _delivered,
    ev.LoadFailed: _load_failed,
}
