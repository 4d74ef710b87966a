"""Compare an engine's stream of KV events with its prefix cache while both grow.

:mod:`kvledger.audit.ledger.kv_stream` compares two whole accounts and keeps both. This comparison keeps what
has no counterpart yet: a change and a KV event leave as a pair. What stays alone is judged once both accounts
have been read for :data:`HORIZON_SECONDS` beyond it, by the same rules. More than :data:`MOST` changes and
events are not kept: what is dropped is counted and not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from .. import events as ev
from .cache_changes import CLEARED, REMOVED, STORED, CacheChanges, Change
from .kv_stream import (
    GPU,
    SHOWN,
    SLACK_SECONDS,
    KVEvent,
    NotAnnounced,
    NotInCache,
    Stream,
    StreamGap,
    StreamSubject,
    TierMissing,
    aligned,
    event_line,
    lines_of,
)

HORIZON_SECONDS = 15.0
"""How long a missing batch may be repeated, and a change or KV event may wait for its counterpart."""

NEAR_SECONDS = 2.0
"""A KV event so long after a change, with no missing batch between them, is the one of that change."""

MOST = 1 << 16
"""Changes and KV events without a counterpart that are kept of one engine."""

MOST_OF_HASH = 1 << 10
"""Changes and KV events of one hash id that are aligned at once."""

MOST_GAPS = 64
"""Gaps that are remembered, for changes that turn out later to be in them."""


class KVEventCounts(msgspec.Struct):
    """What an engine's recorded KV events said, and how they agree with its cache. No count falls."""

    batches: int = 0
    announced: dict[str, int] = {}
    """Stored and removed blocks and clearings of the cache that were announced."""
    gaps: int = 0
    """Gaps in the sequence numbers that nobody repeated."""
    lost_batches: int = 0
    """Batches in these gaps."""
    agreed: int = 0
    """Changes of the cache that a KV event announced."""
    not_compared: int = 0
    """Changes and KV events without a counterpart that could not be judged."""
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

    def merge(self, other: KVEventCounts) -> None:
        """Add the counts of an engine that ran later under the same name."""
        for name in self.__struct_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(more, dict):
                for word, number in more.items():
                    mine[word] = mine.get(word, 0) + number
            else:
                setattr(self, name, mine + more)


KINDS = {STORED: "stored", REMOVED: "removed", CLEARED: "cleared"}


class LiveGap(msgspec.Struct):
    """Missing batches ``first`` to ``last``, the times of the batches around them, and what was in them."""

    first: int
    last: int
    before: float
    after: float
    changes: list[Change]
    reported: bool = False


Found = tuple[StreamSubject, int, int]
"""A difference, its step and its time in the engine's journal."""


class LiveComparison:
    """Compares one engine's stream with its cache, in pieces."""

    def __init__(self, cache: CacheChanges | None = None) -> None:
        self.cache = cache or CacheChanges()
        """Reads the journal; its changes are taken away at each pass."""
        self.began = 0.0
        """Unix time from which the times of changes count."""
        self.next = 0
        """The number of the next batch."""
        self.published = 0.0
        """When the last batch was published; 0.0: none was received."""
        self.waiting: dict[int, tuple[float, ev.KVEventsReceived]] = {}
        """Batches behind a missing one, with the times at which they were received."""
        self.ours: dict[int, list[Change]] = {}
        """Changes without a KV event, by hash id."""
        self.theirs: dict[int, list[KVEvent]] = {}
        """KV events without a change, by hash id."""
        self.cleared: dict[int, list[int]] = {}
        """The hash ids that a reset dropped, by the time of the reset."""
        self.kept = 0
        """How many changes and KV events are kept."""
        self.blocks: dict[int, int] = {}
        """Blocks with each hash id, by the changes that were taken away."""
        self.gaps: list[LiveGap] = []
        """The last gaps."""
        self.lost: dict[int, Change] = {}
        """The last change of each hash id whose last change was in a gap."""
        self.lost_changes: dict[Change, None] = {}
        """The last changes that were in a gap; not in a checkpoint."""
        self.begins = 0.0
        """When the first batch was published, if batches before it were never received; else 0.0."""
        self.doubtful = 0.0
        """Up to this Unix time, what stays alone is not judged: its counterpart may have been dropped."""
        self.tiers: list[str] = []
        """Tiers that KV events named."""
        self.unnamed = 0
        """Stores and removals that named no tier."""
        self.tier_reported = False
        """Whether missing tiers were reported."""
        self.version = 0
        """Rises with each change of this object."""

    # --- what comes in ----------------------------------------------------------------------------------

    def receive(self, batch: ev.KVEventsReceived, received: float, counts: KVEventCounts) -> bool:
        """Take one batch of a recording; the same batch may come from several recordings.

        Returns whether the batch is new.
        """
        if batch.sequence < self.next or batch.sequence in self.waiting:
            return False
        self.version += 1
        counts.batches += 1
        rows, place = batch.rows, 0
        while place < len(rows):
            kind, count = rows[place], rows[place + ev.KV_HEAD - 1]
            place += ev.KV_HEAD + count
            word, number = KINDS[kind], 1 if kind == CLEARED else count
            counts.announced[word] = counts.announced.get(word, 0) + number
        self.waiting[batch.sequence] = received, batch
        return True

    def advance(self, now: float, until: float, counts: KVEventCounts, *, ended: bool = False) -> list[Found]:
        """Pair what came in, and return the differences that are certain by now.

        ``until``: Unix time up to which the journal was read. ``ended``: nothing follows in either account.
        """
        self._take_changes(counts)
        self._take_batches(now, counts, ended)
        self._pair_cleared(counts)
        if self.kept > MOST:
            self._drop(counts)
        if not self.published:
            return []
        behind = HORIZON_SECONDS if not ended else SLACK_SECONDS
        now = math.inf if ended else now
        found = self._judge(min(now, self.published) - behind, min(now, until) - behind, counts, ended)
        if ended:
            self._drop(counts)
        return found

    def _take_changes(self, counts: KVEventCounts) -> None:
        changes, cleared = self.cache.taken()
        for number, change in enumerate(changes):
            self.ours.setdefault(change.hash_id, []).append(change)
            if change.kind == CLEARED:
                self.cleared[change.at] = cleared.get(number, [])
        self.kept += len(changes)
        self.version += bool(changes)
        for hash_id in dict.fromkeys(change.hash_id for change in changes):
            self._pair(hash_id, counts)

    def _take_batches(self, now: float, counts: KVEventCounts, ended: bool) -> None:
        while self.waiting:
            if self.next not in self.waiting:
                first = min(self.waiting)
                if not (ended or self.waiting[first][0] < now - HORIZON_SECONDS):
                    return
                self._miss(first, self.waiting[first][1].published_seconds, counts)
            _, batch = self.waiting.pop(self.next)
            self.next = batch.sequence + 1
            self._take(batch, counts)
            self.published = max(self.published, batch.published_seconds)

    def _miss(self, first: int, published: float, counts: KVEventCounts) -> None:
        """The batches before number ``first`` were not received, and nobody repeats them."""
        if not self.published:  # the recording began after the publisher
            self.begins = published
        else:
            self.gaps = [*self.gaps, LiveGap(self.next, first - 1, self.published, published, [])][
                -MOST_GAPS:
            ]
            counts.gaps += 1
            counts.lost_batches += first - self.next
        self.next = first

    def _take(self, batch: ev.KVEventsReceived, counts: KVEventCounts) -> None:
        for event, tier in Stream([batch]).events():
            if tier and tier not in self.tiers:
                self.tiers.append(tier)
            if tier not in ("", GPU):
                continue
            self.unnamed += event.kind != CLEARED and not tier
            self.theirs.setdefault(event.hash_id, []).append(event)
            self.kept += 1
            self._pair(event.hash_id, counts)

    # --- pairs ------------------------------------------------------------------------------------------

    def _pair(self, hash_id: int, counts: KVEventCounts) -> None:
        """Take away pairs at the beginning of both accounts, where no other pairing is possible."""
        ours, theirs = self.ours.get(hash_id), self.theirs.get(hash_id)
        pairs = 0
        if ours and theirs and hash_id:
            for change, event in zip(ours, theirs, strict=False):
                if not self._certain(change, event):
                    break
                self._settle(change)
                pairs += 1
        if pairs:
            counts.agreed += pairs
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
                self._settle(change)
            counts.agreed += len(ours)
            self._remove(0, len(ours), len(theirs))

    def _settle(self, change: Change, *, lost: bool = False) -> None:
        """A change is taken away: note which blocks are cached by then, and if nobody announced it."""
        if change.kind == CLEARED:
            for hash_id in self.cleared.pop(change.at, []):
                self._count(hash_id, -1, change, lost)
        else:
            self._count(change.hash_id, 1 if change.kind == STORED else -1, change, lost)
        if lost:
            self.lost_changes[change] = None
            if len(self.lost_changes) > MOST:
                del self.lost_changes[next(iter(self.lost_changes))]

    def _count(self, hash_id: int, more: int, change: Change, lost: bool) -> None:
        self.lost.pop(hash_id, None)
        if lost:
            self.lost[hash_id] = change
            if len(self.lost) > MOST:
                del self.lost[next(iter(self.lost))]
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

    def _drop(self, counts: KVEventCounts) -> None:
        """Drop what is kept, and judge nothing whose counterpart may have been dropped."""
        for changes in self.ours.values():
            for change in changes:
                self.doubtful = max(self.doubtful, self._seconds(change.at) + NEAR_SECONDS)
                self._settle(change)
        for events in self.theirs.values():
            self.doubtful = max(self.doubtful, events[-1].seconds + NEAR_SECONDS)
        counts.not_compared += self.kept
        self.ours, self.theirs, self.cleared, self.kept = {}, {}, {}, 0
        self.version += 1

    # --- what stays alone -------------------------------------------------------------------------------

    def _judge(self, changes_to: float, events_to: float, counts: KVEventCounts, ended: bool) -> list[Found]:
        """Judge what is older than these Unix times, and report the gaps that are over.

        ``ended``: whatever the time, pairs are pairs, and what is later and alone can't be judged.
        """
        silent: dict[int, list[Change]] = {}
        unfounded: dict[int, list[KVEvent]] = {}
        resets: list[int] = []
        ids = [*self.ours, *(hash_id for hash_id in self.theirs if hash_id not in self.ours)]
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
                    self._judge_change(change, silent, resets, counts)
                else:
                    counts.agreed += 1
                    self._settle(change)
            if gone or said:
                self._remove(hash_id, gone, said)
                self._pair(hash_id, counts)  # what was lost no longer stands before them
        return [*self._reported_gaps(changes_to), *self._differences(silent, resets, unfounded)]

    def _seconds(self, at: int) -> float:
        return self.began + at / 1e6

    def _judge_change(
        self, change: Change, silent: dict[int, list[Change]], resets: list[int], counts: KVEventCounts
    ) -> None:
        earliest, latest = self._seconds(change.earliest), self._seconds(change.at)
        gap = self._gap_of(earliest, latest)
        if gap is not None:
            gap.changes.append(change)
            self._settle(change, lost=True)
            return
        if earliest - SLACK_SECONDS <= max(self.begins, self.doubtful):
            counts.not_compared += 1
        else:
            silent.setdefault(change.kind, []).append(change)
            resets += self.cleared.get(change.at, [])
        self._settle(change)

    def _gap_of(self, earliest: float, latest: float) -> LiveGap | None:
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
        later = any(self._seconds(change.earliest) <= event.seconds + SLACK_SECONDS for change in changes)
        cached = self.blocks.get(event.hash_id, 0) > 0 or (later and changes[0].kind == STORED)
        if event.kind == STORED and cached:
            return  # the full report mode announces hits, too
        if event.seconds < self.began or event.seconds <= self.doubtful or not self.cache.whole:
            counts.not_compared += 1
        else:
            unfounded.setdefault(event.kind, []).append(event)

    # --- subjects ---------------------------------------------------------------------------------------

    def _reported_gaps(self, changes_to: float) -> Iterator[Found]:
        for gap in self.gaps:
            if gap.reported or gap.after + SLACK_SECONDS >= changes_to:
                continue
            gap.reported = True
            gap.changes.sort(key=lambda change: (change.step, change.at))
            at = max(0, round((gap.after - self.began) * 1e6))
            step = gap.changes[-1].step if gap.changes else 0
            yield StreamGap(gap.first, gap.last, gap.changes, lines_of(gap.changes)), step, at
            gap.changes = []

    def _differences(
        self, silent: dict[int, list[Change]], resets: list[int], unfounded: dict[int, list[KVEvent]]
    ) -> Iterator[Found]:
        for kind, changes in silent.items():
            changes.sort(key=lambda change: (change.step, change.at))
            ids = resets if kind == CLEARED else [change.hash_id for change in changes]
            yield NotAnnounced(kind, changes, ids, lines_of(changes)), changes[0].step, changes[0].at
        for kind, events in unfounded.items():
            at = round((events[0].seconds - self.began) * 1e6)
            story = [event_line(event, self.began) for event in events[:SHOWN]]
            yield NotInCache(kind, events, story), 0, at
        if self.unnamed and set(self.tiers) - {GPU} and not self.tier_reported:
            self.tier_reported = True
            yield TierMissing(self.unnamed, sorted(self.tiers), []), 0, 0
