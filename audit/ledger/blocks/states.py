"""The law of reads for groups of states: a step begins where the state that it reads ends.

A state is one checkpoint of a whole prefix, in the block of the prefix's last position, and the steps of a
request write it over one another. So a step that begins lower than the step before it ended, in the same
block, reads a state with tokens that are not before it. In another block it reads the same state if the
worker remembers where the last step left it, as the V1 model runner does. The V2 runner looks into the block
before the step's first position, whose state may be of any step: that is not judged.

A step reads a state before it writes one, so a state that another request hit in the step that writes it is
not there yet. In later steps it is, also before the output of that step: workers run steps in order.

A request that rejects drafts keeps the state of each draft, and goes on from the last accepted one. Of a step
in flight with drafts only one token counts here, because the others may be rejected.
"""

from __future__ import annotations

from ... import events as ev
from ...causes import REPLAY
from ..account import Account
from .entries import ReadInvalid
from .holdings import Following, Holdings
from .provenance import IN_STEP, OVERWRITTEN, lacks_of, life_of
from .records import Lack, table_holders, table_key


def _rolled_back(holdings: Holdings, event: ev.RolledBack) -> None:
    if event.cause != REPLAY and any(pool.states for pool in holdings.pools.values()):
        account = holdings.account(event.request)
        end = max(_state_end(event, account), holdings.state_ends.get(event.request, 0))
        holdings.state_ends[event.request] = end


def _stepped(holdings: Holdings, event: ev.Stepped) -> None:
    for request in list(holdings.state_ends):
        if holdings.requests.scheduled(request):
            _judge(holdings, request, holdings.state_ends.pop(request), holdings.requests.posted_step)


def _state_end(event: ev.RolledBack, account: Account | None) -> int:
    """Where the last state surely ends when a request is rolled back.

    Where the count falls, what is in flight lies above it. Where it stays, as before 0.31.0, it counts that.
    """
    flights = [each for each in account.in_flight if each.life is account.life] if account is not None else []
    least = event.before_tokens - sum(flight.drafts for flight in flights)
    if event.computed_tokens < event.before_tokens:
        least = max(least, event.computed_tokens + bool(flights))
    return least


def _judge(holdings: Holdings, request: int, end: int, step: int) -> None:
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


def life_ends(holdings: Holdings, request: int) -> None:
    """A life ends: its states are gone."""
    holdings.state_ends.pop(request, None)


FOLLOWING: Following = {ev.RolledBack: _rolled_back, ev.Stepped: _stepped}
