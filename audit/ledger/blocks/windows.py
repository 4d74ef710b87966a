"""The law of reads for groups with windows: no block leaves a table before the window has left the block.

A token reads the positions of its window, so a request's table may lose a block when no later step begins so
low that its window has positions of the block. A step's first position is known when the step is posted. It
is known only later where the engine schedules a step before the drafts of the last one are rejected: the step
begins as many positions lower. A step is judged when its request runs on, because an engine may also trim the
table of a request that has just ended.
"""

from __future__ import annotations

from ... import events as ev
from ... import pool_calls
from .entries import ReadInvalid
from .holdings import Holdings, Scheduled
from .provenance import LEFT, lacks_of
from .records import TABLE, Block, Freed, Holder, Pool

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
    twice = any(other.request == holder.request for other in record.holders)
    windowed = holder.kind == TABLE and holder.group in pool.windows and not twice
    if windowed and record.begin >= 0 and event.by not in OF_WHOLE_TABLES:
        left = Freed(holder.life, record.room_end, block)
        holdings.leaving.append((event.step, holder.request, event.pool, holder.group, left))


def after(holdings: Holdings, event: ev.Event, step: int, scheduled: Scheduled) -> None:
    """Called after an event other than those of the pools, when steps up to ``step`` have been posted."""
    if isinstance(event, ev.Stepped | ev.Repeated):
        _steps_posted(holdings, step, isinstance(event, ev.Repeated), scheduled)
    elif isinstance(event, ev.Delivered | ev.DeliveredWhole):
        for request in holdings.left:
            account = holdings.accounts.get(request)
            if account is not None and account.drafted and account.in_flight:
                _begins(holdings, request, account.in_flight[-1].start, step)
    elif isinstance(event, ev.LoadFailed):
        account = holdings.accounts.get(event.request)
        if account is not None:
            _begins(holdings, event.request, account.computed, step + 1)


def _begins(holdings: Holdings, request: int, start: int, step: int) -> None:
    """A step of a request begins at position ``start``."""
    holdings.begun[request] = min((start, step), holdings.begun.get(request, (start, step)))


def _steps_posted(holdings: Holdings, step: int, repeated: bool, scheduled: Scheduled) -> None:
    begun, holdings.begun = holdings.begun, {}
    for request, (start, of_step) in begun.items():
        if scheduled(request):
            for place in list(holdings.left.get(request, ())):
                _judge(holdings, request, place, start, of_step)
        elif request in holdings.accounts:
            holdings.begun[request] = start, of_step
    leaving, holdings.leaving = holdings.leaving, []
    for row in leaving:
        of_step, request, pool, group, left = row
        account = holdings.accounts.get(request)
        if of_step > step or (account is not None and scheduled(request) is None):
            holdings.leaving.append(row)
        elif account is not None and account.life is not None and account.life.number == left.life:
            of_request = holdings.left.setdefault(request, {})
            of_request[pool, group] = max(
                left, of_request.get((pool, group), left), key=lambda each: each.end
            )
            tokens, drafts = scheduled(request) or (0, 0)
            computed = account.sampled if drafts else tokens
            start = account.in_flight[-1].start if account.in_flight else account.computed - computed
            if repeated and step > of_step:
                _judge(holdings, request, (pool, group), start - (step - of_step) * computed, of_step)
            else:
                _begins(holdings, request, start, step)


def _judge(holdings: Holdings, request: int, place: tuple[int, int], start: int, step: int) -> None:
    """A step of the request begins at position ``start``: its window must be in the table."""
    left, account, pool = holdings.left[request][place], holdings.accounts[request], holdings.pools[place[0]]
    if account.unknown is not None or place[1] not in pool.windows:
        return
    low = pool.windows[place[1]].first_read(start)
    if low < left.end:
        story, whose = holdings.story(place[0], left.block), account.request_id
        tokens = left.end - low
        subject = ReadInvalid(place[0], [left.block], tokens, low, left.end, whose, LEFT, story, step)
        holdings.report(subject, request)
        lacks_of(holdings, request, left.life).tainted_from = start
        del holdings.left[request][place]


def life_ends(holdings: Holdings, request: int) -> None:
    """A life ends: its tables are gone."""
    holdings.left.pop(request, None)
    holdings.begun.pop(request, None)
