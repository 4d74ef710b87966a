"""An engine's KV events beside what its cache did.

First the changes of the cache, then the stream of batches, their differences, and the comparison.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from .. import events as ev
from ..bounded_tables import keep_newest
from ..figures.sums import Sums, add_tokens
from .blocks import contents
from .blocks.contents import Change as PoolChange
from .blocks.contents import is_named
from .blocks.pool import hash_text

# --- cache changes -------------------------------------------------------------------------------------
#
# What entered and left an engine's prefix cache, by hash id, read from the events of level ``blocks``.
#
# The ledger of blocks keeps the present state; this reader keeps the order of changes, so that another
# account of the same cache, such as the engine's KV events, can be compared with it.
#
# An observer may emit a change some steps after the engine made it, so each change has the earliest and the
# latest time at which it was made.


STORED, REMOVED, CLEARED = ev.STORED, ev.REMOVED_BLOCKS, ev.CLEARED

EMITTED_STEPS = 9
"""A change is emitted at most eight steps after the step that made it."""


class Change(NamedTuple):
    """A hash entered the cache with a block, or left it; or the cache was cleared (hash id 0).

    ``earliest`` and ``at`` bound the time of the change, in microseconds since the engine started.
    """

    kind: int
    hash_id: int
    earliest: int
    at: int
    step: int
    pool: int
    block: int
    request: int


class CacheChanges(msgspec.Struct, eq=False):
    """The changes of one engine's prefix cache, in order."""

    changes: list[Change] = []
    """Every change so far."""
    cleared: dict[int, list[int]] = {}
    """By index of a CLEARED change: the hash ids that were in the cache."""
    whole: bool = True
    """Whether every change since the engine began is here."""
    _pool_seen: set[int] = set()
    """Pools whose first description was read; if a pool had content by then, ``whole`` is false."""
    _steps: list[tuple[int, int]] = []
    """Step and time of the last events that have both."""

    def feed(self, event: ev.Event, changes: Sequence[PoolChange]) -> None:
        """Read one event, in the journal's order, and its ``changes`` of the pools."""
        kind = type(event)
        if type(event) is ev.Stepped:
            self._note(event.step, event.at)
        elif type(event) is ev.PoolSeen and event.pool not in self._pool_seen:
            self._pool_seen.add(event.pool)
            self.whole = self.whole and not event.cached_hashes
        for change in changes:
            self.change(change)
        if kind is ev.PoolCalls:
            self._note(event.step, event.at)  # type: ignore[attr-defined]

    def taken(self) -> tuple[list[Change], dict[int, list[int]]]:
        """The changes since the last call, which are then no longer kept, and what each reset dropped."""
        changes, cleared = self.changes, self.cleared
        self.changes, self.cleared = [], {}
        return changes, cleared

    def change(self, change: PoolChange) -> None:
        """Follow one change of a pool."""
        if change.kind in (contents.ALLOCATED, contents.EVICTED):
            for block, ids in zip(change.blocks, change.contents, strict=True):
                for hash_id in filter(is_named, ids):
                    self._add(REMOVED, hash_id, change, block)
        elif change.kind == contents.CACHED:
            self.whole = self.whole and bool(change.blocks)
            for block, hash_id in zip(change.blocks, change.ids, strict=True):
                self._add(STORED, hash_id, change, block, change.request)
        elif change.kind == contents.RESET:
            dropped = [hash_id for ids in change.contents for hash_id in filter(is_named, ids)]
            self.cleared[len(self.changes)] = dropped
            self._add(CLEARED, 0, change, -1)
        elif change.kind == contents.LOST:
            self.whole = False

    def _note(self, step: int, at: int) -> None:
        if not self._steps or self._steps[-1][0] < step:
            self._steps.append((step, at))
            while len(self._steps) > 1 and self._steps[1][0] <= step - EMITTED_STEPS:
                del self._steps[0]

    def _add(self, kind: int, hash_id: int, of: PoolChange, block: int, request: int = -1) -> None:
        earliest = self._steps[0][1] if self._steps else 0
        self.changes.append(Change(kind, hash_id, earliest, of.at, of.step, of.pool, block, request))


# --- kv counts -----------------------------------------------------------------------------------------
#
# What an engine's recorded KV events said, and how they agree with its cache, as numbers that only rise.


KINDS = {ev.STORED: "stored", ev.REMOVED_BLOCKS: "removed", ev.CLEARED: "cleared"}
"""The word for each kind of KV event and of change."""


class KVEventCounts(Sums):
    """The sums of one engine, or of engines that ran after each other under one name."""

    batches: int = 0
    announced: dict[str, int] = {}
    """Stored and removed blocks and clearings of the cache that were announced."""
    gaps: int = 0
    """Gaps in the sequence numbers that nobody repeated."""
    lost_batches: int = 0
    """Batches in these gaps."""
    matched: dict[str, int] = {}
    """Changes of the cache that a KV event announced, by kind."""
    in_flight: int = 0
    """Changes and KV events that only one account has, at the end of the other."""
    before: int = 0
    """Those from before the recording or the journal began, or beside a journal that is not whole."""
    dropped: int = 0
    """Those that were too many to keep, and those whose counterpart may be among them."""
    repeated: int = 0
    """Stores of hashes that were cached already: vLLM's full report mode announces hits, too."""
    copies: int = 0
    """Removals that were not announced, of a block whose hash stays cached in another block."""
    other_tiers: int = 0
    """Stores and removals in tiers other than the engine's own blocks."""
    routed: int = 0
    """Requests that this engine got, whose tokens were predicted from the KV events."""
    not_routed: int = 0
    """Requests whose prediction is not known any more."""
    predicted: int = 0
    """Tokens that were predicted, of the engine that had most."""
    found: int = 0
    """Local and loaded external tokens of the first admissions."""
    missed: dict[str, int] = {}
    """Predicted tokens that were not found, by cause."""
    surplus: dict[str, int] = {}
    """Found tokens that were not predicted, by cause."""

    @property
    def agreed(self) -> int:
        """Changes of the cache that a KV event announced."""
        return sum(self.matched.values())

    @property
    def not_compared(self) -> int:
        """Changes and KV events without a counterpart that could not be judged."""
        return self.in_flight + self.before + self.dropped

    def announce(self, batch: ev.KVEventsReceived) -> None:
        """Count one batch, and what it says."""
        self.batches += 1
        for row in batch_rows(batch):
            add_tokens(self.announced, KINDS[row.kind], 1 if row.kind == ev.CLEARED else len(row.ids))


# --- kv stream -----------------------------------------------------------------------------------------
#
# An engine's stream of KV events, and how the events of one hash id pair with the changes of its cache.
#
# KV events name no block, so two blocks with one hash are told apart by their number only.


GPU = "GPU"
"""The tier of vLLM's own blocks."""

CHAINED = ("full_attention", "mla_attention", "sink_full_attention")
"""Kinds of KV cache groups that cache every block of a prefix; below a window or a state are none."""

SLACK_SECONDS = 0.05
"""How far the clocks of one host may differ: a batch has wall time, the journal monotonic time."""


class KVEvent(NamedTuple):
    """One store or removal of one hash id in the stream, or a clearing of the cache (hash id 0)."""

    kind: int
    hash_id: int
    seconds: float
    """Unix time at which its batch was published."""
    sequence: int
    since: float = 0.0
    """Unix time at which the batch before was published."""
    parent: int = 0
    """The hash id of the block before a stored one; 0: none."""


class BatchRow(NamedTuple):
    """One KV event of a batch, see :class:`~kvledger.audit.events.KVEventsReceived`."""

    kind: int
    group: int
    tier: str
    block_tokens: int
    parent: int
    ids: list[int]
    contents: list[int]
    details: list[int]
    spec: str
    """The kind of the group, and its window; "": not given."""

    @property
    def flags(self) -> int:
        """``KEYED`` and ``LOOKAHEAD``, as far as they are known."""
        return self.details[1] if self.details else 0


def batch_rows(batch: ev.KVEventsReceived) -> Iterator[BatchRow]:
    """The KV events of a batch."""
    rows, place, known, details = batch.rows, 0, iter(batch.contents), iter(batch.details)
    while place < len(rows):
        kind, group, tier, tokens, parent, count = rows[place : place + ev.KV_HEAD]
        place += ev.KV_HEAD + count
        of_store = list(islice(details, ev.KV_DETAILS)) if kind == STORED else []
        yield BatchRow(
            kind,
            group,
            batch.tiers[tier] if tier >= 0 else "",
            tokens,
            parent,
            rows[place - count : place],
            list(islice(known, count)) if kind == STORED else [],
            of_store,
            batch.kinds[of_store[0]] if of_store and of_store[0] >= 0 else "",
        )


def kv_events(batch: ev.KVEventsReceived, since: float = 0.0) -> Iterator[tuple[KVEvent, str]]:
    """Every store, removal and clearing of a batch, with its tier ("": not given).

    ``since``: Unix time at which the batch before was published.
    """
    for row in batch_rows(batch):
        parent = row.parent
        for hash_id in row.ids if row.kind != CLEARED else (0,):
            yield KVEvent(row.kind, hash_id, batch.published_seconds, batch.sequence, since, parent), row.tier
            parent = hash_id


def of_group(batch: ev.KVEventsReceived, group: int) -> ev.KVEventsReceived:
    """A batch without the stores and removals of other KV cache groups; those without a group stay."""
    rows, contents, details = list[int](), list[int](), list[int]()
    place = 0
    for row in batch_rows(batch):
        start, place = place, place + ev.KV_HEAD + len(row.ids)
        if row.kind == CLEARED or row.group in (-1, group):
            rows += batch.rows[start:place]
            contents += row.contents
            details += row.details
    return replace(batch, rows=rows, contents=contents, details=details)


def aligned(
    ours: Sequence[Change], theirs: Sequence[KVEvent], began: float
) -> Iterator[tuple[Change | None, KVEvent | None]]:
    """Pair the changes of one hash id with its KV events: the most pairs, and of these the nearest in time.

    What only one account has comes alone, in the order of time. ``began``: Unix time from which the changes
    count.
    """
    best = _best(ours, theirs, began)
    i = j = 0
    while i < len(ours) and j < len(theirs):
        without_ours, without_theirs = best[i][j] == best[i + 1][j], best[i][j] == best[i][j + 1]
        if without_ours and not (without_theirs and theirs[j].seconds < began + ours[i].at / 1e6):
            yield ours[i], None
            i += 1
        elif without_theirs:
            yield None, theirs[j]
            j += 1
        else:
            yield ours[i], theirs[j]
            i, j = i + 1, j + 1
    yield from ((change, None) for change in ours[i:])
    yield from ((None, event) for event in theirs[j:])


def _best(ours: Sequence[Change], theirs: Sequence[KVEvent], began: float) -> list[list[tuple[int, float]]]:
    """For each two ends of both accounts: the most pairs, and less their distance in time."""
    best = [[(0, 0.0)] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for i in range(len(ours) - 1, -1, -1):
        change = ours[i]
        earliest, latest = began + change.earliest / 1e6, began + change.at / 1e6
        for j in range(len(theirs) - 1, -1, -1):
            event = theirs[j]
            choice = max(best[i + 1][j], best[i][j + 1])
            if change.kind == event.kind and event.seconds >= earliest - SLACK_SECONDS:
                pairs, nearness = best[i + 1][j + 1]
                apart = abs(event.seconds - latest)
                choice = max(choice, (pairs + 1, nearness - apart))
            best[i][j] = choice
    return best


# --- kv differences ------------------------------------------------------------------------------------
#
# The differences between an engine's stream of KV events and its prefix cache, which the checks judge.
#
# A difference keeps how much it is about and the first examples, so it stays small however long it lasts.


SHOWN = 8
"""Hash ids that a story names one by one."""

FIRST = 64
"""Examples that a difference keeps."""


class StreamGap(msgspec.Struct):
    """Batches ``first`` to ``last`` of the stream were not received; these ``changes`` were in them."""

    first: int
    last: int
    before: float
    """Unix time at which the batch before the gap was published."""
    after: float
    """Unix time at which the batch after the gap was published."""
    changes: list[Change] = []
    step: int = 0
    """The step of the last change before the batch after the gap."""
    complete: bool = False
    """Whether all changes of its time were judged."""
    reported: bool = False
    """Whether it was reported; its changes are then no longer kept."""

    @property
    def number(self) -> int:
        """Each gap is a finding of its own; the number is below those of requests."""
        return -2 - self.first

    @property
    def story(self) -> list[str]:
        """The changes that were in it, in lines of text."""
        return lines_of(self.changes, len(self.changes))


class NotAnnounced(msgspec.Struct):
    """The cache changed and no KV event says so. ``kind``: STORED, REMOVED or CLEARED."""

    kind: int
    total: int = 0
    """How many changes."""
    hashes: int = 0
    """How many hash ids they stored, removed or cleared."""
    examples: list[Change] = []
    """The first changes."""

    def add(self, changes: list[Change], hashes: int) -> None:
        """Add changes, and how many hash ids they are about."""
        self.total += len(changes)
        self.hashes += hashes
        changes.sort(key=lambda change: (change.step, change.at))
        self.examples += changes[: FIRST - len(self.examples)]

    @property
    def story(self) -> list[str]:
        """The changes, in lines of text."""
        return lines_of(self.examples, self.total)


AGAIN, ORPHAN = -1, -2
"""Besides the kinds of KV events: stores of blocks that were cached already, and stores after a parent that
the stream has not announced, or has announced as removed."""


class Unfounded(msgspec.Struct):
    """KV events that say something else than what happened. ``kind``: of the KV events, AGAIN or ORPHAN."""

    kind: int
    began: float
    """Unix time at which the engine started."""
    total: int = 0
    """How many KV events."""
    step: int = -1
    """The step of the last change before the first of them."""
    examples: list[KVEvent] = []
    """The first KV events."""

    @property
    def at(self) -> int:
        """When the first was published, in microseconds since the engine started."""
        return round((self.examples[0].seconds - self.began) * 1e6)

    def add(self, events: list[KVEvent]) -> None:
        """Add KV events."""
        self.total += len(events)
        events.sort(key=lambda event: event.sequence)
        self.examples += events[: SHOWN - len(self.examples)]

    @property
    def story(self) -> list[str]:
        """The first KV events, in lines of text."""
        after = self.kind == ORPHAN
        return [
            _event_line(event, self.began) + f" after {hash_text(event.parent)}" * after
            for event in self.examples
        ]


class CopyRemoved(msgspec.Struct):
    """A KV event says that a hash was removed, of which the cache still had another block."""

    change: Change

    @property
    def story(self) -> list[str]:
        """The change, in a line of text."""
        return lines_of([self.change], 1)


class TierMissing(msgspec.Struct):
    """KV events do not name the tier of their blocks, although the stream has blocks of other tiers."""

    by_tier: dict[str, int]
    """Stores and removals by tier; "": it is not named."""

    @property
    def tiers(self) -> list[str]:
        """The tiers that are named."""
        return sorted(set(self.by_tier) - {""})

    @property
    def story(self) -> list[str]:
        """The tiers, in lines of text."""
        return [f"{tier or 'no tier'}: {count:,} stores and removals" for tier, count in self.by_tier.items()]


StreamSubject = StreamGap | NotAnnounced | Unfounded | CopyRemoved | TierMissing


def _event_line(event: KVEvent, began: float) -> str:
    what = {STORED: "stored", REMOVED: "removed", CLEARED: "all blocks cleared"}[event.kind]
    of = f" {hash_text(event.hash_id)}" if event.hash_id else ""
    return f"batch {event.sequence}, {event.seconds - began:.3f} s after the engine started: {what}{of}"


def lines_of(changes: Sequence[Change], total: int) -> list[str]:
    """The first of ``total`` changes of the cache, in lines of text."""
    words = {STORED: "cached", REMOVED: "evicted", CLEARED: "the cache was reset"}
    lines = []
    for change in changes[:SHOWN]:
        of = f" {hash_text(change.hash_id)}, block {change.block} of pool {change.pool}"
        lines.append(f"step {change.step}: {words[change.kind]}{of if change.hash_id else ''}")
    if total > SHOWN:
        lines.append(f"and {total - SHOWN:,} more")
    return lines or ["no change of the cache is known in these batches"]


# --- kv comparison -------------------------------------------------------------------------------------
#
# Compare an engine's stream of KV events with the changes of its prefix cache while both grow.
#
# For each hash id both accounts must have the same stores and removals in the same order; then they agree on
# what is cached after every batch. A change and the KV event that announces it leave as a pair. What stays
# alone is judged once both accounts have been read for :data:`HORIZON_SECONDS` beyond it: it is *lost* if
# the batch that had it was, *in flight* if it may come after the end of either account, and else a
# difference for the checks. More than :data:`MOST` changes and events are not kept: what is dropped is
# counted and not judged. A journal that has ended is compared by the same steps, run to its end.


HORIZON_SECONDS = 15.0
"""How long a missing batch may be repeated, and a change or KV event may wait for its counterpart."""

NEAR_SECONDS = 2.0
"""A KV event so long after a change, with no missing batch between them, is the one of that change."""

MOST = 1 << 16
"""Changes and KV events without a counterpart that are kept of one engine."""

MOST_ANNOUNCED = 1 << 20
"""Blocks of the stream that are followed; a stream that says of more that they are cached is not judged."""

MOST_OF_HASH = 1 << 10
"""Changes and KV events of one hash id that are aligned at once."""

MOST_GAPS = 64
"""Reported gaps that are remembered, for changes that turn out later to be in them."""

STEPS_SECONDS = 60.0
"""How long the steps of changes are remembered, for what is judged later."""

Found = tuple[StreamSubject, int, int]
"""A difference, its step and its time in the engine's journal."""


class KVComparison(msgspec.Struct, dict=True, eq=False):
    """Compares one engine's stream with its cache, in pieces."""

    began: float = 0.0
    """Unix time from which the times of changes count."""
    next: int = 0
    """The number of the next batch."""
    published: float = 0.0
    """When the last batch was published; 0.0: none was received."""
    waiting: dict[int, tuple[float, ev.KVEventsReceived]] = {}
    """Batches behind a missing one, with the times at which they were received."""
    ours: dict[int, list[Change]] = {}
    """Changes without a KV event, by hash id."""
    theirs: dict[int, list[KVEvent]] = {}
    """KV events without a change, by hash id."""
    cleared: dict[tuple[int, int], list[int]] = {}
    """The hash ids that a reset dropped, by the time and the pool of the reset."""
    kept: int = 0
    """How many changes and KV events are kept."""
    blocks: dict[int, int] = {}
    """Blocks with each hash id, by the changes that were taken away."""
    resets: list[tuple[int, list[int]]] = []
    """Resets that were taken away and are not in ``blocks`` yet: the time, and the hash ids dropped."""
    gaps: list[StreamGap] = []
    """The gaps that are not reported yet, and the last of the others."""
    silent: dict[int, NotAnnounced] = {}
    """Changes that no KV event announced and that are not reported yet, by kind."""
    unfounded: dict[int, Unfounded] = {}
    """KV events that say something else than what happened and are not reported yet, by kind."""
    announced: dict[int, int] = {}
    """How many more stores than removals of each hash id were announced."""
    incomplete: bool = False
    """Whether a part of the stream since the last reset is missing: what it announced is not known."""
    copies: list[Change] = []
    """Announced removals of one of several blocks with a hash that are not reported yet."""
    steps: list[tuple[int, int]] = []
    """Time and step of the last changes."""
    lost: dict[int, Change] = {}
    """The last change of each hash id whose last change was in a gap."""
    lost_changes: dict[Change, None] = {}
    """The last changes that were in a gap; not in a checkpoint."""
    begins: float = 0.0
    """When the first batch was published, if batches before it were never received; else 0.0."""
    doubtful: float = 0.0
    """Up to this Unix time, what stays alone is not judged: its counterpart may have been dropped."""
    by_tier: dict[str, int] = {}
    """Stores and removals by tier; "": the KV event names none."""
    tier_reported: bool = False
    """Whether missing tiers were reported."""
    judged_to: float = 0.0
    """Unix time up to which changes were judged."""
    version: int = 0
    """Rises with each change of this object."""

    def __post_init__(self) -> None:
        self.cache = CacheChanges()
        """Reads the journal; its changes are taken away at each pass."""

    # --- what comes in ----------------------------------------------------------------------------------

    def receive(self, batch: ev.KVEventsReceived, received: float, counts: KVEventCounts) -> bool:
        """Take one batch of a recording; the same batch may come from several recordings.

        Returns whether the batch is new.
        """
        if batch.sequence < self.next or batch.sequence in self.waiting:
            return False
        self.version += 1
        counts.announce(batch)
        self.waiting[batch.sequence] = received, batch
        return True

    def advance(self, now: float, until: float, counts: KVEventCounts, *, ended: bool = False) -> None:
        """Pair what came in, and judge what is certain by now; :meth:`differences` has the result.

        ``until``: Unix time up to which the journal was read. ``ended``: nothing follows in either account.
        """
        self._take_changes(counts)
        self._take_batches(now, counts, ended)
        self._pair_cleared(counts)
        if self.kept > MOST:
            self._drop(counts, ended=False)
        if not self.published:
            return
        if ended:
            self._judge(self.published, until, counts, ended)
            self._drop(counts, ended=True)
        else:
            self._judge(
                min(now, self.published) - HORIZON_SECONDS, min(now, until) - HORIZON_SECONDS, counts, ended
            )
        self._forget_steps(until)

    def _take_changes(self, counts: KVEventCounts) -> None:
        changes, cleared = self.cache.taken()
        for number, change in enumerate(changes):
            self.ours.setdefault(change.hash_id, []).append(change)
            if change.kind == CLEARED:
                self.cleared[change.at, change.pool] = cleared.get(number, [])
            if not self.steps or self.steps[-1][1] != change.step:
                self.steps.append((change.at, change.step))
        self.kept += len(changes)
        self.version += bool(changes)
        for hash_id in dict.fromkeys(change.hash_id for change in changes):
            self._pair(hash_id, counts)

    def _take_batches(self, now: float, counts: KVEventCounts, ended: bool) -> None:
        while self.waiting:
            first = self.next if self.next in self.waiting else min(self.waiting)
            received, batch = self.waiting[first]
            if first != self.next:
                if not (ended or received < now - HORIZON_SECONDS):
                    return
                self._miss(first, batch.published_seconds, counts)
            del self.waiting[first]
            self.next = first + 1
            self._take(batch, counts)
            self.published = max(self.published, batch.published_seconds)

    def _miss(self, first: int, published: float, counts: KVEventCounts) -> None:
        """The batches before number ``first`` were not received, and nobody repeats them."""
        if not self.published:  # the recording began after the publisher
            self.begins = published
        else:
            open_gaps = [gap for gap in self.gaps[:-MOST_GAPS] if not gap.reported]
            gap = StreamGap(self.next, first - 1, self.published, published)
            self.gaps = [*open_gaps, *self.gaps[-MOST_GAPS:], gap]
            counts.gaps += 1
            counts.lost_batches += first - self.next
        self.next, self.incomplete = first, True

    def _take(self, batch: ev.KVEventsReceived, counts: KVEventCounts) -> None:
        for event, tier in kv_events(batch, self.published):
            if event.kind != CLEARED:
                add_tokens(self.by_tier, tier, 1)
            if tier not in ("", GPU):
                counts.other_tiers += 1
                continue
            self.theirs.setdefault(event.hash_id, []).append(event)
            self.kept += 1
            self._pair(event.hash_id, counts)
        self.incomplete = self.incomplete or batch.unreadable > 0
        for row in batch_rows(batch):
            self._follow(row, batch)

    def _follow(self, row: BatchRow, batch: ev.KVEventsReceived) -> None:
        """Follow what the stream says is cached: a block of full attention is stored after its parent."""
        if row.kind == CLEARED:
            self.announced, self.incomplete = {}, False
        if row.tier not in ("", GPU) or self.incomplete:
            return
        chained = row.kind == STORED and row.spec.partition(" ")[0] in CHAINED
        if chained and row.parent and row.parent not in self.announced:
            event = KVEvent(STORED, row.ids[0], batch.published_seconds, batch.sequence, 0.0, row.parent)
            self._contradict(ORPHAN, [event])
        for hash_id in row.ids:
            number = self.announced.get(hash_id, 0) + (1 if row.kind == STORED else -1)
            self.announced[hash_id] = number
            if number <= 0:
                del self.announced[hash_id]
        if len(self.announced) > MOST_ANNOUNCED:
            self.announced, self.incomplete = {}, True

    # --- pairs ------------------------------------------------------------------------------------------

    def _pair(self, hash_id: int, counts: KVEventCounts) -> None:
        """Take away pairs at the beginning of both accounts, where no other pairing is possible."""
        ours, theirs = self.ours.get(hash_id), self.theirs.get(hash_id)
        pairs = 0
        if ours and theirs and hash_id:
            for change, event in zip(ours, theirs, strict=False):
                if not self._certain(change, event):
                    break
                self._match(change, counts)
                pairs += 1
        if pairs:
            self._remove(hash_id, pairs, pairs)

    def _certain(self, change: Change, event: KVEvent) -> bool:
        """Whether these two belong together whatever follows."""
        earliest, latest = self._seconds(change.earliest), self._seconds(change.at)
        gap = self.gaps[-1].after if self.gaps else self.begins
        return (
            change.kind == event.kind
            and earliest - SLACK_SECONDS <= event.seconds <= latest + NEAR_SECONDS
            and event.seconds > gap + NEAR_SECONDS
        )

    def _pair_cleared(self, counts: KVEventCounts) -> None:
        """A clearing may be announced long after the reset, and each is announced once."""
        ours, theirs = self.ours.get(0), self.theirs.get(0)
        if ours and theirs and len(ours) == len(theirs) and not self.gaps and not self.waiting:
            for change in ours:
                self._match(change, counts)
            self._remove(0, len(ours), len(theirs))

    def _match(self, change: Change, counts: KVEventCounts) -> None:
        """A change and a KV event are a pair."""
        add_tokens(counts.matched, KINDS[change.kind], 1)
        self._settle(change)
        if change.kind == REMOVED and self._has_copy(change):
            self.copies.append(change)

    def _settle(self, change: Change, *, lost: bool = False) -> None:
        """A change is taken away: note which blocks are cached by then, and if nobody announced it."""
        ids = [change.hash_id]
        if change.kind == CLEARED:
            ids = self.cleared.pop((change.at, change.pool), [])
            self.resets.append((change.at, ids))
        else:
            self._count(change.hash_id, 1 if change.kind == STORED else -1)
        for hash_id in ids if lost or self.lost else ():
            self.lost.pop(hash_id, None)
            if lost:
                self.lost[hash_id] = change
        keep_newest(self.lost, MOST)
        keep_newest(self.lost_changes, MOST)
        if lost:
            self.lost_changes[change] = None

    def _has_copy(self, removed: Change) -> bool:
        """Whether another block with the hash stays cached after this removal, which is settled."""
        resets = [(at, ids) for (at, _), ids in self.cleared.items()] + self.resets
        dropped = sum(ids.count(removed.hash_id) for at, ids in resets if at <= removed.at)
        return self.blocks.get(removed.hash_id, 0) > dropped

    def _count(self, hash_id: int, more: int) -> None:
        number = self.blocks.get(hash_id, 0) + more
        if number:
            self.blocks[hash_id] = number
        else:
            self.blocks.pop(hash_id, None)

    def _remove(self, hash_id: int, ours: int, theirs: int) -> None:
        """Take away the first changes and KV events of a hash id."""
        self.version += 1
        self.kept -= ours + theirs
        sides: tuple[tuple[dict[int, list[Change]] | dict[int, list[KVEvent]], int], ...]
        sides = (self.ours, ours), (self.theirs, theirs)
        for side, number in sides:
            if number:
                rest = side[hash_id][number:]
                if rest:
                    side[hash_id] = rest  # type: ignore[assignment]
                else:
                    del side[hash_id]

    def _drop(self, counts: KVEventCounts, *, ended: bool) -> None:
        """Drop what is kept, and judge nothing whose counterpart may have been dropped."""
        for changes in self.ours.values():
            for change in changes:
                self.doubtful = max(self.doubtful, self._seconds(change.at) + NEAR_SECONDS)
                self._settle(change)
        for events in self.theirs.values():
            self.doubtful = max(self.doubtful, events[-1].seconds + NEAR_SECONDS)
        if ended:
            counts.in_flight += self.kept
        else:
            counts.dropped += self.kept
        self.ours, self.theirs, self.cleared, self.kept = {}, {}, {}, 0
        self.version += 1

    # --- what stays alone -------------------------------------------------------------------------------

    def _judge(self, changes_to: float, events_to: float, counts: KVEventCounts, ended: bool) -> None:
        """Judge what is older than these Unix times, and find the gaps that are over.

        ``ended``: whatever the time, pairs are pairs, and what is later and alone can't be judged.
        """
        silent: dict[int, list[Change]] = {}
        unfounded: dict[int, list[KVEvent]] = {}
        ids = [*self.theirs]
        if ended or changes_to > self.judged_to:  # no change is due after the last batch of a recording
            ids = [*self.ours, *(hash_id for hash_id in self.theirs if hash_id not in self.ours)]
        self.judged_to = changes_to
        for hash_id in sorted(ids, key=lambda one: one == 0):  # resets last: they drop what was stored before
            ours, theirs = self.ours.get(hash_id, []), self.theirs.get(hash_id, [])
            old = ours and self._seconds(ours[0].at) < changes_to
            if not (ended or old or (theirs and theirs[0].seconds < events_to)):
                continue
            gone, said = 0, 0
            for change, event in aligned(ours[:MOST_OF_HASH], theirs[:MOST_OF_HASH], self.began):
                young = (change is not None and self._seconds(change.at) + SLACK_SECONDS >= changes_to) or (
                    event is not None and event.seconds + SLACK_SECONDS >= events_to
                )
                if young and not (ended and change is not None and event is not None):
                    break
                gone, said = gone + (change is not None), said + (event is not None)
                if change is None:
                    assert event is not None
                    self._judge_event(event, ours[gone:], unfounded, counts)
                elif event is None:
                    self._judge_change(change, silent, counts)
                else:
                    self._match(change, counts)
            if gone or said:
                self._remove(hash_id, gone, said)
                self._pair(hash_id, counts)  # what was lost no longer stands before them
        for kind, changes in silent.items():
            hashes = len(changes) if kind != CLEARED else sum(map(self._clear, changes))
            self.silent.setdefault(kind, NotAnnounced(kind)).add(changes, hashes)
        for kind, events in unfounded.items():
            self._contradict(kind, events)
        while self.resets and self._seconds(self.resets[0][0]) < changes_to - SLACK_SECONDS:
            for hash_id in self.resets.pop(0)[1]:
                self._count(hash_id, -1)
        for gap in self.gaps:
            if not gap.complete and (ended or gap.after + SLACK_SECONDS < changes_to):
                gap.complete, gap.step = True, self._step(self._at(gap.after))

    def _contradict(self, kind: int, events: list[KVEvent]) -> None:
        wrong = self.unfounded.setdefault(kind, Unfounded(kind, self.began))
        wrong.add(events)
        wrong.step = wrong.step if wrong.step >= 0 else self._step(wrong.at)

    def _seconds(self, at: int) -> float:
        return self.began + at / 1e6

    def _clear(self, change: Change) -> int:
        """A reset that nobody announced is taken away; returns how many hash ids it dropped."""
        ids = len(self.cleared.get((change.at, change.pool), []))
        self._settle(change)
        return ids

    def _judge_change(self, change: Change, silent: dict[int, list[Change]], counts: KVEventCounts) -> None:
        earliest, latest = self._seconds(change.earliest), self._seconds(change.at)
        gap = self._gap_of(earliest, latest)
        if gap is not None:
            if not gap.reported:
                gap.changes.append(change)
            self._settle(change, lost=True)
        elif earliest - SLACK_SECONDS <= self.begins:
            counts.before += 1
            self._settle(change)
        elif earliest - SLACK_SECONDS <= self.doubtful:
            counts.dropped += 1
            self._settle(change)
        elif change.kind == CLEARED:
            silent.setdefault(CLEARED, []).append(change)
        else:
            self._settle(change)
            if change.kind == REMOVED and self._has_copy(change):
                counts.copies += 1
            else:
                silent.setdefault(change.kind, []).append(change)

    def _gap_of(self, earliest: float, latest: float) -> StreamGap | None:
        """The gap that has most of this time; None if no gap has any of it."""
        shared = [
            (min(latest, gap.after) - max(earliest, gap.before) + SLACK_SECONDS, gap) for gap in self.gaps
        ]
        most, gap = max(shared, key=lambda each: each[0], default=(-1.0, None))
        return gap if most >= 0 else None

    def _judge_event(
        self,
        event: KVEvent,
        changes: list[Change],
        unfounded: dict[int, list[KVEvent]],
        counts: KVEventCounts,
    ) -> None:
        """``changes``: those of the same hash id that come after it in the pairing."""
        if event.kind == STORED and self._cached(event, changes):
            counts.repeated += 1
            unfounded.setdefault(AGAIN, []).append(event)
        elif event.seconds < self.began or not self.cache.whole:
            counts.before += 1
        elif event.seconds <= self.doubtful:
            counts.dropped += 1
        else:
            unfounded.setdefault(event.kind, []).append(event)

    def _cached(self, event: KVEvent, changes: list[Change]) -> bool:
        """Whether a block with a hash was, or may have been, in the cache when a batch was published.

        The batch holds what happened since the batch before it.
        """
        later = any(self._seconds(change.earliest) <= event.seconds + SLACK_SECONDS for change in changes)
        dropped = sum(
            ids.count(event.hash_id)
            for at, ids in self.resets
            if self._seconds(at) < event.since - SLACK_SECONDS
        )
        return self.blocks.get(event.hash_id, 0) > dropped or (later and changes[0].kind == STORED)

    # --- what was found ---------------------------------------------------------------------------------

    def differences(self) -> Iterator[Found]:
        """The differences that were found since the last call."""
        for gap in self.gaps:
            if gap.complete and not gap.reported:
                gap.changes.sort(key=lambda change: (change.step, change.at))
                step = gap.changes[-1].step if gap.changes else gap.step
                yield replace(gap), step, max(0, self._at(gap.after))
                gap.reported, gap.changes = True, []
        silent, self.silent = self.silent, {}
        for missing in silent.values():
            yield missing, missing.examples[0].step, missing.examples[0].at
        unfounded, self.unfounded = self.unfounded, {}
        for wrong in unfounded.values():
            yield wrong, wrong.step, wrong.at
        copies, self.copies = self.copies, []
        for change in copies:
            yield CopyRemoved(change), change.step, change.at
        if self.by_tier.get("") and self.by_tier.keys() - {"", GPU} and not self.tier_reported:
            self.tier_reported = True
            yield TierMissing(dict(self.by_tier)), 0, 0

    def _at(self, seconds: float) -> int:
        return round((seconds - self.began) * 1e6)

    def _step(self, at: int) -> int:
        """The step of the last change before a time, if it is remembered."""
        place = bisect_right(self.steps, at, key=lambda each: each[0])
        return self.steps[place - 1][1] if place else 0

    def _forget_steps(self, until: float) -> None:
        oldest = self._at(until - STEPS_SECONDS)
        place = bisect_right(self.steps, oldest, key=lambda each: each[0])
        if place > 1:
            del self.steps[: place - 1]
