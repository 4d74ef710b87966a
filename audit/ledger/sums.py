"""What a ledger adds up. Nothing here decides how an event is posted, so two ledgers' sums can be added."""

from __future__ import annotations

import msgspec

from ..figures.sums import Sums, add_tokens
from ..figures.totals import Totals

ERRORS_KEPT = 16
"""Kinds of exceptions that are counted by name."""

OTHER_ERRORS = "other exceptions"
"""All further kinds."""


class Recomputed(Sums):
    """Blocks that were computed more than once, by their sketches."""

    compared: int = 0
    """Blocks that were compared with an earlier computation."""
    differed: int = 0
    """Those of them whose distance is above the threshold."""
    largest: float = 0.0
    """The largest distance of the others."""

    def merge(self, more: Recomputed) -> None:
        """Add the counts of another engine; of the largest distances the larger one stays."""
        self.compared += more.compared
        self.differed += more.differed
        self.largest = max(self.largest, more.largest)


class LedgerSums(Sums):
    """The sums of one engine's ledger, or of several ledgers."""

    ended: Totals = msgspec.field(default_factory=Totals)
    """Sums over the accounts of ended requests; they only rise."""
    gaps: int = 0
    """How many times events were lost."""
    removed_events: int = 0
    """Events that rotation removed from the beginning of the journal; they are no loss."""
    hook_failures: int = 0
    """How many times a hook failed."""
    engine_errors: dict[str, int] = {}
    """How often each exception left a hooked method of the engine, by type and method: the first
    :data:`ERRORS_KEPT` kinds, and :data:`OTHER_ERRORS`."""
    watches: int = 0
    """How many workers began to seal their blocks."""
    weights_changes: dict[str, int] = {}
    """Changes of weights by kind, and the calls that changed none or may have changed some."""
    contents: dict[str, int] = {}
    """Bytes and microseconds, and blocks at hits, each once for every request that reads it and every worker.

    ``verified``: held the sealed bytes; ``differed``: held others; ``unsealed``: nobody was seen to fill it.
    The others could not be compared. ``same_step``: computed in the same step; ``unsampled``: left out of the
    sample; ``unseen``: filled before the observation; ``loaded``: filled by a load that the worker did not
    see; ``arrived``: a miss, the connector loaded the block for this request; ``unmatched``: read by a
    request that the ledger can't find in that step.
    """
    transfers: dict[str, int] = {}
    """Blocks by what their transfers to and from a store showed."""
    recomputed: Recomputed = msgspec.field(default_factory=Recomputed)
    """Blocks that were computed more than once."""

    def merge(self, more: LedgerSums) -> None:
        """Add the sums of another ledger, which read later events."""
        super().merge(more)
        errors, self.engine_errors = self.engine_errors, {}
        for error, times in errors.items():
            self.count_error(error, times)

    def count_error(self, error: str, times: int = 1) -> None:
        """Count exceptions that left a hooked method."""
        room = error in self.engine_errors or len(self.engine_errors) < ERRORS_KEPT
        add_tokens(self.engine_errors, error if room else OTHER_ERRORS, times)

    def count_content(self, name: str, blocks: int = 1) -> None:
        """Count blocks by what happened to their contents."""
        add_tokens(self.contents, name, blocks)

    def count_transfer(self, name: str, blocks: int = 1) -> None:
        """Count blocks by what a transfer showed."""
        add_tokens(self.transfers, name, blocks)
