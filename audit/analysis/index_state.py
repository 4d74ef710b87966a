"""How exact a router's index of one engine is that is kept from KV events: since when, and what it lacks.

Exact is an index that has every store and removal since the engine began, or since its cache was last reset.
What it lacks by its own rules (it can't name a block, or counts it wrongly) is counted beside that.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from .. import events as ev
from ..figures.sums import add_tokens
from ..ledger.kv_events import CLEARED, GPU, batch_rows

LACKS = {
    "reported-twice": "stores of blocks that were cached already: an index that counts blocks promises them "
    "after their removal",
    "other-size": "blocks of another size than the engine's: they match no prompt",
    "unknown-parent": "blocks whose parent is not in the index: a tree refuses them",
    "keyed": "blocks with a salt, an adapter or an image: an index of tokens gives them to other prompts",
    "next-token": "blocks whose hash covers the next token: an index of tokens gives them to prompts that "
    "differ there",
    "other-groups": "blocks of other KV cache groups: a hit needs them, an index of tokens does not",
    "other-tiers": "blocks in other tiers, or of other engines: they are not in the index",
}
"""What an index can lack, in words. All are blocks."""


class IndexState(msgspec.Struct):
    """Of one engine's KV events. Times are Unix times at which batches were published; 0.0: never."""

    first: float = 0.0
    """The first batch."""
    cleared: float = 0.0
    """The last reset of the cache."""
    lost: float = 0.0
    """The last batch before which some were lost."""
    lacks: dict[str, int] = {}

    @property
    def exact_since(self) -> float | None:
        """Since when the index is exact; None: it is not."""
        if not self.first or self.cleared < self.lost:
            return None
        return self.cleared if self.lost else self.first

    def take(self, batch: ev.KVEventsReceived, held: Container[int], group: int, block_tokens: int) -> None:
        """Take a batch of the engine whose followed ``group`` has blocks of so many tokens.

        ``held``: the hash ids that the index holds before the batch.
        """
        self.first = self.first or batch.published_seconds
        before: set[int] = set()
        for row in batch_rows(batch):
            if row.kind == CLEARED:
                self.cleared = batch.published_seconds
                continue
            blocks = len(row.ids)
            if row.tier not in ("", GPU):
                self._lack("other-tiers", blocks * (row.kind == ev.STORED))
            elif row.kind == ev.STORED:
                other = row.group not in (-1, group)
                self._lack("other-groups", blocks * other)
                self._lack("other-size", blocks * (not other and row.block_tokens != block_tokens))
                known = not row.parent or row.parent in held or row.parent in before
                self._lack("unknown-parent", blocks * (not known))
                self._lack("keyed", blocks * bool(row.flags & ev.KEYED))
                self._lack("next-token", blocks * bool(row.flags & ev.LOOKAHEAD))
                before.update(row.ids)

    def _lack(self, what: str, blocks: int) -> None:
        if blocks:
            add_tokens(self.lacks, what, blocks)
