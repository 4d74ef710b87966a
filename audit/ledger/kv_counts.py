"""What an engine's recorded KV events said, and how they agree with its cache, as numbers that only rise."""

from __future__ import annotations

from .. import events as ev
from ..figures.sums import Sums, add_tokens

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
        rows, place = batch.rows, 0
        while place < len(rows):
            kind, count = rows[place], rows[place + ev.KV_HEAD - 1]
            place += ev.KV_HEAD + count
            add_tokens(self.announced, KINDS[kind], 1 if kind == ev.CLEARED else count)
