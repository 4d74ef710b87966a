"""Compare an engine's stream of KV events with the changes of its prefix cache while both grow.

For each hash id both accounts must have the same stores and removals in the same order; then they agree on
what is cached after every batch. A change and the KV event that announces it leave as a pair. What stays
alone is judged once both accounts have been read for :data:`HORIZON_SECONDS` beyond it: it is *lost* if the
batch that had it was, *in flight* if it may come after the end of either account, and else a difference for
the checks. More than :data:`MOST` changes and events are not kept: what is dropped is counted and not judged.
A journal that has ended is compared by the same steps, run to its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from msgspec.structs import replace

from .. import events as ev
from ..bounded_tables import keep_newest
from ..figures.sums import add_tokens
from .cache_changes import CLEARED, REMOVED, STORED, CacheChanges, Change
from .kv_counts import KINDS, KVEventCounts
from .kv_differences import CopyRemoved, NotAnnounced, NotInCache, StreamGap, StreamSubject, TierMissing
from .kv_stream import GPU, SLACK_SECONDS, KVEvent, aligned, kv_events

HORIZON_SECONDS = 15.0
"""How long a missing batch may be repeated, and a change or KV event may wait for its counterpart."""

NEAR_SECONDS = 2.0
"""A KV event so long after a change, with no missing batch between them, is the one of that change."""

MOST = 1 << 16
"""Changes and KV events without a counterpart that are kept of one engine."""

MOST_OF_HASH = 1 << 10
"""Changes and KV events of one hash id that are aligned at once."""

MOST_GAPS = 64
"""Reported gaps that are remembered, for changes that turn out later to be in them."""

STEPS_SECONDS = 60.0
"""How long the steps of changes are remembered, for what is judged later."""

Found = tuple[StreamSubject, int, int]
"""A difference, its step and its time in the engine's journal."""


class KVComparison:
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
        self.cleared: dict[tuple[int, int], list[int]] = {}
        """The hash ids that a reset dropped, by the time and the pool of the reset."""
        self.kept = 0
        """How many changes and KV events are kept."""
        self.blocks: dict[int, int] = {}
        """Blocks with each hash id, by the changes that were taken away."""
        self.resets: list[tuple[int, list[int]]] = []
        """Resets that were taken away and are not in ``blocks`` yet: the time, and the hash ids dropped."""
        self.gaps: list[StreamGap] = []
        """The gaps that are not reported yet, and the last of the others."""
        self.silent: dict[int, NotAnnounced] = {}
        """Changes that no KV event announced and that are not reported yet, by kind."""
        self.unfounded: dict[int, NotInCache] = {}
        """KV events without a change that are not reported yet, by kind."""
        self.copies: list[Change] = []
        """Announced removals of one of several blocks with a hash that are not reported yet."""
        self.steps: list[tuple[int, int]] = []
        """Time and step of the last changes."""
        self.lost: dict[int, Change] = {}
        """The last change of each hash id whose last change was in a gap."""
        self.lost_changes: dict[Change, None] = {}
        """The last changes that were in a gap; not in a checkpoint."""
        self.begins = 0.0
        """When the first batch was published, if batches before it were never received; else 0.0."""
        self.doubtful = 0.0
        """Up to this Unix time, what stays alone is not judged: its counterpart may have been dropped."""
        self.by_tier: dict[str, int] = {}
        """Stores and removals by tier; "": the KV event names none."""
        self.tier_reported = False
        """Whether missing tiers were reported."""
        self.judged_to = 0.0
        """Unix time up to which changes were judged."""
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
        self.next = first

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
            wrong = self.unfounded.setdefault(kind, NotInCache(kind, self.began))
            wrong.add(events)
            wrong.step = wrong.step if wrong.step >= 0 else self._step(wrong.at)
        while self.resets and self._seconds(self.resets[0][0]) < changes_to - SLACK_SECONDS:
            for hash_id in self.resets.pop(0)[1]:
                self._count(hash_id, -1)
        for gap in self.gaps:
            if not gap.complete and (ended or gap.after + SLACK_SECONDS < changes_to):
                gap.complete, gap.step = True, self._step(self._at(gap.after))

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
