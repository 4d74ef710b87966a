"""Engines that have ended: their sums by label, and when a label leaves the metrics.

Engines restart, and their journals stay. Neither a scrape nor a restart of the sidecar may depend on how
many engines ever ran:

- The engine of a name that ended last keeps its own audit, with all its findings. The engines before it are
  folded into one audit: their sums, and one finding per invariant. Of a folded journal the sidecar keeps
  only what identifies it, so that it is not read again.
- A name leaves as a whole when its last engine ended long ago, or when too many names have ended. Then its
  series end; no counter falls. A name with an engine that is still followed stays.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from ...audit.bounded_tables import keep_newest
from ...audit.replay.checkpoint import FoldedJournal, beginning
from ...audit.replay.followed_audit import FollowedAudit, folded
from ..metrics.labels import engine_label

MOST_GONE = 1024
"""How many removed journals are remembered."""


class Leaving(msgspec.Struct, frozen=True):
    """A name that leaves: the journal of its last engine ("" if it was removed), and if it leaves early."""

    name: str
    journal: str
    early: bool


class EndedEngines:
    """The ended engines of a follower. Times are Unix seconds."""

    def __init__(self) -> None:
        self.sums: dict[str, FollowedAudit] = {}
        """The folded engines of each name, in one audit."""
        self.latest: dict[str, str] = {}
        """The journal of the engine of each name that ended last, unless it was removed."""
        self.ended_at: dict[str, float] = {}
        """When the last engine of each name ended, the longest ago first."""
        self.folded: dict[str, FoldedJournal] = {}
        """The journals that were folded and still exist, by their names."""
        self.gone: dict[str, FoldedJournal] = {}
        """Journals of ended engines that were removed, the longest ago first. One that is there again, as
        after its volume was unmounted, is in the sums and is not read."""

    def add(self, engine: str, journal: str, now: float) -> str:
        """Note that an engine ended; returns the journal of the engine before it, which is to be folded."""
        earlier = self.latest.pop(engine, "")
        self.latest[engine] = journal
        self._touch(engine, now)
        return earlier

    def fold(self, engine_audit: FollowedAudit, now: float) -> None:
        """Add the sums of an ended engine to those of the earlier engines of its name."""
        name = engine_label(engine_audit)
        self.sums[name] = folded(name, engine_audit, self.sums.pop(name, None))
        if name not in self.ended_at:
            self._touch(name, now)

    def removed(self, engine: str, journal: str, now: float) -> None:
        """Note that the journal of an ended engine was removed."""
        if self.latest.get(engine) == journal:
            del self.latest[engine]
        self._touch(engine, now)

    def revoked(self, engine: str, journal: str) -> None:
        """Note that the engine of a journal goes on."""
        if self.latest.get(engine) == journal:
            del self.latest[engine]

    def left(self, journal: FoldedJournal) -> None:
        """Note that the journal of an ended engine is not there any more."""
        self.gone.pop(journal.name, None)
        self.gone[journal.name] = journal
        keep_newest(self.gone, MOST_GONE)

    def came_back(self, name: str, path: Path) -> bool:
        """Whether this is a journal that was gone; it is a folded one then."""
        known = self.gone.pop(name, None)
        if known is None or not known.beginning or beginning(path, known.segment) != known.beginning:
            return False
        self.folded[name] = known
        return True

    def leaving(self, followed: Collection[str], most: int, before: float) -> list[Leaving]:
        """The names that leave now, and forget them: those that ended ``before``, and all but ``most``.

        ``followed`` are the names of the engines that have not ended.
        """
        ended = [name for name in self.ended_at if name not in followed]
        too_many = max(0, len(ended) - most)
        left = []
        for place, name in enumerate(ended):
            late = self.ended_at[name] < before
            if late or place < too_many:
                left.append(Leaving(name, self.latest.pop(name, ""), not late))
                self.sums.pop(name, None)
                del self.ended_at[name]
        return left

    def sort(self) -> None:
        """Order the names by the time at which their last engines ended."""
        self.ended_at = dict(sorted(self.ended_at.items(), key=lambda item: item[1]))

    def _touch(self, engine: str, now: float) -> None:
        self.ended_at.pop(engine, None)
        self.ended_at[engine] = now
