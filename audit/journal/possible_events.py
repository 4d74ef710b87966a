"""Events that no engine can have emitted: a length below zero, rows that end in the middle.

A checksum says that bytes are as they were written, not that an engine wrote them. A reader checks every
event after decoding it, so that the code behind it may rely on the layouts in ``events.py``. Rules of this
file:

- Only what our own hooks count is checked here: lengths, row layouts and indices.
  A count that the engine reported may be wrong in any way; finding that is the job of the checks.
- A check costs no more than a look at lengths for the events of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import events as ev

LARGEST = 1 << 53
"""The largest length, count or number of tokens that an event may hold."""

Check = Callable[[Any], str]
"""Says what is impossible in an event; "" if nothing is."""


def impossible(events: Sequence[ev.Event]) -> str:
    """What no engine can have emitted among ``events``, as one phrase; "" if every event is possible."""
    check_of = _CHECKS.get
    for event in events:
        check = check_of(type(event))
        if check is not None and (phrase := check(event)):
            return f"{type(event).__name__}: {phrase}"
    return ""


# --- flat rows ------------------------------------------------------------------------------------------


def _stepped(event: ev.Stepped) -> str:
    changed = ev.numbers(event.changed)
    if changed:
        if len(changed) % 4:
            return "changed does not hold four numbers for each request"
        if min(changed) >= 0 and max(changed) <= LARGEST:
            return ""
        if min(changed[1::4]) < 0 or min(changed[2::4]) < 0:
            return "a request has a negative number of scheduled tokens"
        return _too_large("changed", changed)
    return ""


def _delivered(event: ev.Delivered) -> str:
    changed = ev.numbers(event.changed)
    if changed:
        if len(changed) % 2:
            return "changed does not hold two numbers for each request"
        return _too_large("changed", changed)
    return ""


def _delivered_whole(event: ev.DeliveredWhole) -> str:
    if event.requests and len(event.requests) != len(event.sampled):
        return f"{len(event.requests)} requests have {len(event.sampled)} counts of sampled tokens"
    return ""


def _census(event: ev.Census) -> str:
    if len(event.rows) % 5 or len(event.waiting_rows) % 5:
        return "rows does not hold five numbers for each request"
    if event.misqueued and min(event.misqueued.values()) < 0:
        return "a request has a negative number of places"
    return _too_large("rows", event.rows) or _too_large("waiting_rows", event.waiting_rows)


def _pool_seen(event: ev.PoolSeen) -> str:
    groups = event.groups
    if len(groups) % 3:
        return "groups does not hold three numbers for each group"
    if groups and min(groups[1::3]) < 1:
        return "a block of a group holds no token"
    return _within(event, 0, "blocks")


def _block_states(event: ev.BlockStatesReported) -> str:
    return _within(event, 0, "first") or _too_large("states", event.states)


def _row_layout(header: int, per_item: int) -> Callable[[str, Sequence[int]], str]:
    """A check of rows that consist of a header, whose last number is a count, and that many items."""

    def check(name: str, rows: Sequence[int]) -> str:
        place, end = 0, len(rows)
        while place < end:
            if place + header > end:
                return f"{name} ends within a header"
            count = rows[place + header - 1]
            if count < 0:
                return f"{name} has a count of {count}"
            place += header + count * per_item
        return "" if place == end else f"{name} ends before its last row does"

    return check


_cached_rows = _row_layout(header=4, per_item=3)
_allocated_rows = _row_layout(header=3, per_item=1)
_table_rows = _row_layout(header=4, per_item=1)
_hit_rows = _row_layout(header=4, per_item=2)


def _references(event: ev.BlocksTouched | ev.BlocksFreed) -> str:
    if len(event.blocks) != len(event.references):
        return f"{len(event.blocks)} blocks have {len(event.references)} reference counts"
    return ""


def _hits_compared(event: ev.HitsCompared) -> str:
    return _in_rows_of(3, "other", event.other) or _within(event, 0, "equal", "unknown")


def _block_copied(event: ev.BlockCopied) -> str:
    return "" if len(event.blocks) == 2 else "a copy has no source and target"


# --- the contents of blocks -------------------------------------------------------------------------------

LAYER_PRINT_BYTES = 16
"""The fingerprints of one layer of a block: its keys and its values."""


def _content_watched(event: ev.ContentWatched) -> str:
    groups = event.groups
    if len(groups) % 4:
        return "groups does not hold four numbers for each group"
    if groups and min(groups[1::4]) < 1:
        return "a block of a group holds no token"
    return _within(event, 0, "blocks") or _too_large("groups", groups)


def _hits_verified(event: ev.HitsVerified) -> str:
    rows, requests = event.rows, len(event.request_ids)
    if phrase := _hit_rows("rows", rows):
        return phrase
    place = 0
    while place < len(rows):
        if not 0 <= rows[place] < requests:
            return f"a run of blocks is of request {rows[place]} of {requests}"
        place += 4 + 2 * rows[place + 3]
    return _in_rows_of(2, "differed", event.differed) or _too_large("rows", rows)


def _blocks_moved(event: ev.BlocksMoved) -> str:
    size, rest = divmod(len(event.prints), max(1, len(event.blocks)))
    if rest or size % LAYER_PRINT_BYTES or bool(size) != bool(event.blocks):
        return f"{len(event.blocks)} blocks have {len(event.prints)} bytes of fingerprints"
    return _in_rows_of(2, "differed", event.differed)


def _blocks_sketched(event: ev.BlocksSketched) -> str:
    size, rest = divmod(len(event.sketches), max(1, len(event.blocks)))
    if event.projections < 1:
        return f"a sketch has {event.projections} projections"
    if rest or size % (8 * event.projections) or bool(size) != bool(event.blocks):
        return f"{len(event.blocks)} blocks have {len(event.sketches)} bytes of sketches"
    return ""


def _tiers_reported(event: ev.TiersReported) -> str:
    if len(event.tiers) != len(event.tokens):
        return f"{len(event.tiers)} tiers have {len(event.tokens)} numbers of tokens"
    return _too_large("tokens", event.tokens)


def _encoder_inputs(event: ev.EncoderInputsSeen) -> str:
    rows = event.rows
    if len(rows) % 4:
        return "rows does not hold 4 numbers for each input"
    sizes = [*rows[1::4], *rows[2::4], *rows[3::4]]
    return "an input has a negative size" if sizes and min(sizes) < 0 else _too_large("rows", sizes)


def _encoder_cache(event: ev.EncoderCacheSeen) -> str:
    if len(event.entries or ()) % 2:
        return "entries does not hold 2 numbers for each output"
    return (
        _within(event, 0, "size")
        or _within(event, -LARGEST, "free")
        or _within(event, -LARGEST, "freeable")
        or _too_large("ended", list(event.ended.values()))
    )


def _encoder_used(event: ev.EncoderCacheUsed) -> str:
    rows = event.rows
    if len(rows) % 3:
        return "rows does not hold 3 numbers for each operation"
    for place in range(0, len(rows), 3):
        code, request, of = rows[place : place + 3]
        if not ev.ENCODER_HIT <= code <= ev.ENCODER_CLEARED:
            return f"an operation has the code {code}"
        if code in _OF_INPUTS and (request < 0 or not 0 <= of <= LARGEST):
            return f"an operation is of input {of} of request {request}"
    return _within(event, -LARGEST, "free")


_OF_INPUTS = frozenset((ev.ENCODER_HIT, ev.ENCODER_RESERVED, ev.ENCODER_COMPUTED))


def _in_rows_of(length: int, name: str, numbers: Sequence[int]) -> str:
    if len(numbers) % length:
        return f"{name} does not hold {length} numbers for each block"
    return _too_large(name, numbers)


# --- recorded KV events -----------------------------------------------------------------------------------

_kv_rows = _row_layout(header=ev.KV_HEAD, per_item=1)


def _kv_events(event: ev.KVEventsReceived) -> str:
    rows, place, stores = event.rows, 0, 0
    if phrase := _kv_rows("rows", rows):
        return phrase
    while place < len(rows):
        if not -1 <= rows[place + 2] < len(event.tiers):
            return f"a KV event names tier {rows[place + 2]} of {len(event.tiers)}"
        stores += rows[place] == ev.STORED
        place += ev.KV_HEAD + rows[place + ev.KV_HEAD - 1]
    if event.details and len(event.details) != stores * ev.KV_DETAILS:
        return f"details do not hold {ev.KV_DETAILS} numbers for each of {stores} stores"
    return _within(event, 0, "stream", "sequence", "unreadable")


# --- the calls of pools -----------------------------------------------------------------------------------

_BY_OPERATION = frozenset((ev.ALLOCATED, ev.TOUCHED, ev.FREED, ev.ALLOCATED_EACH))
_IN_PAIRS = frozenset((ev.TOUCHED, ev.FREED, ev.ALLOCATED_EACH))


def _pool_calls(event: ev.PoolCalls) -> str:
    rows, operations = ev.numbers(event.rows), len(event.by)
    place, end = 0, len(rows)
    while place < end:
        if place + ev.HEAD > end:
            return "rows ends within the header of a call"
        code, more, count = rows[place] & 7, rows[place + 3], rows[place + 4]
        place += ev.HEAD
        if count < 0:
            return f"a call is followed by {count} numbers"
        if count > end - place:
            return "rows ends before its last call does"
        if code in _BY_OPERATION and not 0 <= more < operations:
            return f"a call names operation {more} of {operations}"
        if (code in _IN_PAIRS and count % 2) or (code == ev.CACHED and count % 3):
            return f"a call of kind {code} is followed by {count} numbers"
        if code == ev.TABLES_REPORTED and (phrase := _table_rows("a call", rows[place : place + count])):
            return phrase
        place += count
    return ""


# --- single numbers -----------------------------------------------------------------------------------------


def _within(event: ev.Event, least: int, *names: str) -> str:
    for name in names:
        value = getattr(event, name)
        if value is not None and not least <= value <= LARGEST:
            return f"{name} is {value}"
    return ""


def _too_large(name: str, numbers: Sequence[int]) -> str:
    """Whether a flat list of counts holds a number that no count can reach."""
    if numbers and not (-LARGEST <= min(numbers) and max(numbers) <= LARGEST):
        return f"{name} holds a number beyond {LARGEST}"
    return ""


def _counts(*names: str, least: int = 0) -> Check:
    return lambda event: _within(event, least, *names)


def _reported(*names: str) -> Check:
    """Counts of the engine, which may be negative: an audit finds that."""
    return _counts(*names, least=-LARGEST)


def _blocks_promised(event: ev.BlocksPromised) -> str:
    return _within(event, 0, "start", "tokens") or _within(event, 1, "block_tokens")


def _isolation(classes: ev.Isolation | None) -> str:
    if classes and len(classes) % 2:
        return "isolation does not hold pairs of numbers"
    return ""


def _request_added(event: ev.RequestAdded) -> str:
    limit = event.max_tokens
    if 0 <= event.prompt_tokens <= LARGEST and (limit is None or 0 <= limit <= LARGEST):
        return _isolation(event.isolation)
    return _within(event, 0, "prompt_tokens", "max_tokens") or _isolation(event.isolation)


def _extended(event: ev.Extended) -> str:
    return _within(event, 0, "prompt_tokens") or _isolation(event.isolation)


def _snapshot(event: ev.Snapshot) -> str:
    reported = ("computed_tokens", "in_flight_tokens", "placeholder_tokens", "sequence_tokens")
    for row in event.rows:
        if not 0 <= row.prompt_tokens <= LARGEST or not 0 <= row.preemptions <= LARGEST:
            return f"request {row.request} has {row.prompt_tokens} prompt tokens"
        if phrase := _isolation(row.isolation):
            return f"request {row.request}: {phrase}"
        if any(not -LARGEST <= getattr(row, name) <= LARGEST for name in reported):
            return f"request {row.request} has a count beyond {LARGEST}"
    return ""


_CHECKS: dict[type[ev.Event], Check] = {
    ev.Stepped: _stepped,
    ev.Delivered: _delivered,
    ev.DeliveredWhole: _delivered_whole,
    ev.Census: _census,
    ev.Snapshot: _snapshot,
    ev.PoolSeen: _pool_seen,
    ev.PoolCalls: _pool_calls,
    ev.BlockStatesReported: _block_states,
    ev.BlocksCached: lambda event: _cached_rows("rows", event.rows),
    ev.BlockCopied: _block_copied,
    ev.HitsCompared: _hits_compared,
    ev.BlocksPromised: _blocks_promised,
    ev.TiersReported: _tiers_reported,
    ev.EncoderInputsSeen: _encoder_inputs,
    ev.EncoderCacheSeen: _encoder_cache,
    ev.EncoderCacheUsed: _encoder_used,
    ev.BlocksAllocated: lambda event: _allocated_rows("rows", event.rows),
    ev.BlocksTouched: _references,
    ev.BlocksFreed: _references,
    ev.TablesReported: lambda event: _table_rows("rows", event.rows),
    ev.Gap: _counts("lost_events", least=-1),
    ev.RequestAdded: _request_added,
    ev.Extended: _extended,
    ev.LoadPlanned: _reported("tokens"),
    ev.LoadFinished: _reported("computed_tokens"),
    ev.LoadFailed: _reported("before_tokens", "computed_tokens"),
    ev.RolledBack: _reported("before_tokens", "computed_tokens"),
    ev.Preempted: _reported("before_tokens", "in_flight_tokens", "placeholder_tokens", "computed_tokens"),
    ev.SavePlanned: _reported("start", "end"),
    ev.ContentWatched: _content_watched,
    ev.ContentCounted: _counts("sealed", "verified", "scrubbed", "bytes", "microseconds"),
    ev.HitsVerified: _hits_verified,
    ev.ScrubDiffered: lambda event: _in_rows_of(4, "rows", event.rows),
    ev.BlocksMoved: _blocks_moved,
    ev.BlocksSketched: _blocks_sketched,
    ev.KVEventsReceived: _kv_events,
    ev.HandedOver: lambda event: _within(event, 0, "blocks") or _within(event, -1, "room_tokens"),
}
