"""Compare an engine's stream of KV events with the changes of its prefix cache.

For each hash id both accounts must have the same stores and removals in the same order; then they agree on
what is cached after every batch. KV events name no block, so two blocks with one hash are told apart by their
number only. A change that one account lacks is *lost* if the batch that had it was, *in flight* if it may
come after the end of either account, and else a subject for the checks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .. import events as ev
from .blocks.records import hash_text
from .cache_changes import CLEARED, REMOVED, STORED, CacheChanges, Change

GPU = "GPU"
"""The tier of vLLM's own blocks."""

SLACK_SECONDS = 0.05
"""How far the clocks of one host may differ: a batch has wall time, the journal monotonic time."""

MOST_PAIRS = 1 << 22
"""Longer accounts of one hash id are compared by their kinds alone."""

SHOWN = 8
"""Hash ids that a story names one by one."""


class KVEvent(NamedTuple):
    """One store or removal of one hash id in the stream, or a clearing of the cache (hash id 0)."""

    kind: int
    hash_id: int
    seconds: float
    sequence: int


class StreamGap(NamedTuple):
    """Batches ``first`` to ``last`` of the stream were not received; these ``changes`` were in them."""

    first: int
    last: int
    changes: list[Change]
    story: list[str]

    @property
    def number(self) -> int:
        """Each gap is a finding of its own; the number is below those of requests."""
        return -2 - self.first


class NotAnnounced(NamedTuple):
    """The cache changed and no KV event says so. ``kind``: STORED, REMOVED or CLEARED."""

    kind: int
    changes: list[Change]
    hash_ids: list[int]
    story: list[str]


class NotInCache(NamedTuple):
    """A KV event says that a hash was stored or removed, and the cache has no such change."""

    kind: int
    events: list[KVEvent]
    story: list[str]


class TierMissing(NamedTuple):
    """KV events do not name the tier of their blocks, although the stream has blocks of other tiers."""

    events: int
    tiers: list[str]
    story: list[str]


StreamSubject = StreamGap | NotAnnounced | NotInCache | TierMissing


class Comparison:
    """What the comparison of a stream with a cache found."""

    def __init__(self) -> None:
        self.subjects: list[tuple[StreamSubject, int, int]] = []
        """Differences, each with its step and its time in the engine's journal."""
        self.batches = 0
        """Batches of the stream that were received."""
        self.matched: Counter[int] = Counter()
        """Changes that both accounts have, by kind."""
        self.in_flight = 0
        """Changes that only one account has, at the end of the other."""
        self.before = 0
        """Changes before the first batch that was received, or before the journal."""
        self.repeated = 0
        """Stores of hashes that were cached already: vLLM's full report mode announces hits, too."""
        self.other_tiers = 0
        """Stores and removals in tiers other than the engine's own blocks."""
        self.lost: list[tuple[Change, StreamGap]] = []
        """Changes that were in batches that were not received."""


class Stream:
    """The batches of one publisher's life, in order of sequence; what was received twice counts once."""

    def __init__(self, received: Sequence[ev.KVEventsReceived]) -> None:
        by_sequence = {batch.sequence: batch for batch in received}
        self.batches = [by_sequence[sequence] for sequence in sorted(by_sequence)]
        """The batches, each once."""

    @property
    def missing(self) -> list[tuple[int, int, float, float]]:
        """Ranges of missing numbers, and the times of the batches around them. 0.0: no batch before."""
        found, expected, before = [], 0, 0.0
        for batch in self.batches:
            if batch.sequence > expected:
                found.append((expected, batch.sequence - 1, before, batch.published_seconds))
            expected, before = batch.sequence + 1, batch.published_seconds
        return found

    def events(self) -> Iterator[tuple[KVEvent, str]]:
        """Every store, removal and clearing, with its tier ("": not given)."""
        for batch in self.batches:
            rows, place = batch.rows, 0
            while place < len(rows):
                kind, _, tier, _, _, count = rows[place : place + ev.KV_HEAD]
                place += ev.KV_HEAD + count
                name = batch.tiers[tier] if tier >= 0 else ""
                for hash_id in rows[place - count : place] if kind != CLEARED else (0,):
                    yield KVEvent(kind, hash_id, batch.published_seconds, batch.sequence), name


def aligned(
    ours: Sequence[Change], theirs: Sequence[KVEvent], began: float
) -> Iterator[tuple[Change | None, KVEvent | None]]:
    """Pair the changes of one hash id with its KV events: the most pairs, and of these the nearest in time.

    What only one account has comes alone, in order. ``began``: Unix time from which the changes count.
    """
    best = _best(ours, theirs, began)
    i = j = 0
    while i < len(ours) and j < len(theirs):
        if best[i][j] == best[i + 1][j]:
            yield ours[i], None
            i += 1
        elif best[i][j] == best[i][j + 1]:
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


class _Comparer:
    """Compares one stream with one cache."""

    def __init__(self, cache: CacheChanges, began_seconds: float, until_at: int, stream: Stream) -> None:
        self.cache = cache
        """The changes of the engine's prefix cache."""
        self.began = began_seconds
        """Unix time from which the times of the changes count."""
        self.stream = stream
        """The batches."""
        self.until = began_seconds + until_at / 1e6
        """Unix time of the journal's last event."""
        self.result = Comparison()
        """What was found so far."""
        self.result.batches = len(stream.batches)
        self.published = [batch.published_seconds for batch in stream.batches]
        """When each batch was published."""
        self.last = self.published[-1] if self.published else 0.0
        self.gaps = [(row, StreamGap(row[0], row[1], [], [])) for row in stream.missing]
        """Missing ranges; the changes that were in them are added."""
        self.begins = bool(stream.batches) and stream.batches[0].sequence == 0
        """Whether the first batch of the publisher was received."""

    def run(self) -> Comparison:
        ours: dict[int, list[Change]] = {}
        theirs: dict[int, list[KVEvent]] = {}
        for change in self.cache.changes:
            ours.setdefault(change.hash_id, []).append(change)
        unnamed, tiers = 0, Counter[str]()
        for event, tier in self.stream.events():
            tiers[tier] += event.kind != CLEARED
            if tier in ("", GPU):
                theirs.setdefault(event.hash_id, []).append(event)
                unnamed += event.kind != CLEARED and not tier
            else:
                self.result.other_tiers += 1
        silent: dict[int, list[Change]] = {}
        unfounded: dict[int, list[KVEvent]] = {}
        for hash_id in dict.fromkeys([*ours, *theirs]):
            mine, others = ours.get(hash_id, []), theirs.get(hash_id, [])
            left, right = self._aligned(mine, others)
            for change in left:
                self._place_change(change, silent)
            for event in right:
                self._place_event(event, mine, unfounded)
        self._report(silent, unfounded)
        named = sorted(set(tiers) - {""})
        if unnamed and any(tier != GPU for tier in named):
            story = [f"{tier or 'no tier'}: {count:,} stores and removals" for tier, count in tiers.items()]
            self.result.subjects.append((TierMissing(unnamed, named, story), 0, 0))
        return self.result

    # --- one hash id ----------------------------------------------------------------------------------

    def _aligned(self, ours: list[Change], theirs: list[KVEvent]) -> tuple[list[Change], list[KVEvent]]:
        """What only one of both accounts has."""
        if [change.kind for change in ours] == [event.kind for event in theirs]:
            self.result.matched.update(change.kind for change in ours)
            return [], []
        if len(ours) * len(theirs) > MOST_PAIRS:
            ours, theirs = ours[-1000:], theirs[-1000:]
        left, right = [], []
        for change, event in aligned(ours, theirs, self.began):
            if change is not None and event is not None:
                self.result.matched[change.kind] += 1
            elif change is not None:
                left.append(change)
            elif event is not None:
                right.append(event)
        return left, right

    def _seconds(self, at: int) -> float:
        return self.began + at / 1e6

    def _place_change(self, change: Change, silent: dict[int, list[Change]]) -> None:
        """A change of the cache that no KV event was found for."""
        earliest, latest = self._seconds(change.earliest), self._seconds(change.at)
        if not self.stream.batches or latest + SLACK_SECONDS >= self.last:
            self.result.in_flight += 1
            return
        gap = self._gap_of(earliest, latest)
        if gap is None:
            silent.setdefault(change.kind, []).append(change)
        elif gap.first == 0 and not self.begins:
            self.result.before += 1
        else:
            gap.changes.append(change)
            self.result.lost.append((change, gap))

    def _gap_of(self, earliest: float, latest: float) -> StreamGap | None:
        """The gap that has most of this time; None if no gap has any of it."""
        shared = [
            (min(latest, after) - max(earliest, before) + SLACK_SECONDS, gap)
            for (_, _, before, after), gap in self.gaps
        ]
        most, gap = max(shared, key=lambda each: each[0], default=(-1.0, None))
        return gap if most >= 0 else None

    def _place_event(self, event: KVEvent, ours: list[Change], unfounded: dict[int, list[KVEvent]]) -> None:
        """A KV event that no change of the cache was found for."""
        if event.seconds + SLACK_SECONDS >= self.until:
            self.result.in_flight += 1
        elif event.seconds < self.began or not self.cache.whole:
            self.result.before += 1
        elif event.kind == STORED and self._cached_at(event.seconds, ours):
            self.result.repeated += 1
        else:
            unfounded.setdefault(event.kind, []).append(event)

    def _cached_at(self, seconds: float, ours: list[Change]) -> bool:
        """Whether a block with these changes was, or may have been, in the cache when a batch was published.

        The batch holds what happened since the batch before it.
        """
        index = bisect_left(self.published, seconds)
        since = self.published[index - 1] if index else 0.0
        blocks = 0
        for change in ours:
            if change.kind == STORED:
                blocks += self._seconds(change.earliest) <= seconds + SLACK_SECONDS
            else:
                blocks -= self._seconds(change.at) < since - SLACK_SECONDS
        return blocks > 0

    # --- subjects -------------------------------------------------------------------------------------

    def _report(self, silent: dict[int, list[Change]], unfounded: dict[int, list[KVEvent]]) -> None:
        add = self.result.subjects.append
        for (first, _, _, after), gap in self.gaps:
            if first == 0 and not self.begins:
                continue  # the recording began after the publisher
            at = max(0, round((after - self.began) * 1e6))
            step = gap.changes[-1].step if gap.changes else self._step_at(at)
            gap.changes.sort(key=lambda change: (change.step, change.at))
            gap.story.extend(lines_of(gap.changes))
            add((gap, step, at))
        for kind, changes in silent.items():
            changes.sort(key=lambda change: (change.step, change.at))
            ids = [each.hash_id for each in changes]
            if kind == CLEARED:
                ids = [i for each in changes for i in self._cleared(each)]
            story = lines_of(changes)
            add((NotAnnounced(kind, changes, ids, story), changes[0].step, changes[0].at))
        for kind, events in unfounded.items():
            at = round((events[0].seconds - self.began) * 1e6)
            story = [self._event_line(event) for event in events[:SHOWN]]
            add((NotInCache(kind, events, story), self._step_at(at), at))

    def _cleared(self, change: Change) -> list[int]:
        return self.cache.cleared.get(self.cache.changes.index(change), [])

    def _step_at(self, at: int) -> int:
        """The step of the last change before a time."""
        index = bisect_right(self.cache.changes, at, key=lambda change: change.at)
        return self.cache.changes[index - 1].step if index else 0

    def _event_line(self, event: KVEvent) -> str:
        return event_line(event, self.began)


def event_line(event: KVEvent, began: float) -> str:
    """A KV event in one line of text."""
    what = {STORED: "stored", REMOVED: "removed", CLEARED: "all blocks cleared"}[event.kind]
    of = f" {hash_text(event.hash_id)}" if event.hash_id else ""
    return f"batch {event.sequence}, {event.seconds - began:.3f} s after the engine started: {what}{of}"


def lines_of(changes: Sequence[Change]) -> list[str]:
    """The changes of the cache, in lines of text."""
    words = {STORED: "cached", REMOVED: "evicted", CLEARED: "the cache was reset"}
    lines = []
    for change in changes[:SHOWN]:
        of = f" {hash_text(change.hash_id)}, block {change.block} of pool {change.pool}"
        lines.append(f"step {change.step}: {words[change.kind]}{of if change.hash_id else ''}")
    if len(changes) > SHOWN:
        lines.append(f"and {len(changes) - SHOWN:,} more")
    return lines or ["no change of the cache is known in these batches"]


def compare(cache: CacheChanges, began_seconds: float, until_at: int, stream: Stream) -> Comparison:
    """Compare a stream with a cache whose journal ends at ``until_at``, in microseconds since the start."""
    return _Comparer(cache, began_seconds, until_at, stream).run()
