"""The differences between an engine's stream of KV events and its prefix cache, which the checks judge.

A difference keeps how much it is about and the first examples, so it stays small however long it lasts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .blocks.records import hash_text
from .cache_changes import CLEARED, REMOVED, STORED, Change
from .kv_stream import KVEvent

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


class NotInCache(msgspec.Struct):
    """KV events say that hashes were stored or removed, and the cache has no such change."""

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
        return [_event_line(event, self.began) for event in self.examples]


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


StreamSubject = StreamGap | NotAnnounced | NotInCache | CopyRemoved | TierMissing


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
