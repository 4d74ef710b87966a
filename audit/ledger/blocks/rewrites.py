"""The law of reads after a session's turn: the next turn's tokens are written over those that were given up.

The next chunk of a session begins at some position, and the KV below it stays. A cached block of the session
that ends above this position stands for tokens that the sequence no longer has. It holds their KV until a
step writes into it: then every request that has hit the block, or hits it later, reads KV of other tokens.
"""

from __future__ import annotations

from ... import events as ev
from .holdings import Following, Holdings
from .provenance import REWRITTEN
from .reads import expose, in_table
from .records import Rewrite, table_holders


def _steps_posted(holdings: Holdings, event: ev.Stepped | ev.Repeated) -> None:
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


def life_ends(holdings: Holdings, request: int) -> None:
    """A life ends: no step of it writes any more."""
    holdings.rewrites.pop(request, None)


FOLLOWING: Following = {ev.Extended: _extended, ev.Stepped: _steps_posted, ev.Repeated: _steps_posted}
