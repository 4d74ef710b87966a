"""What the ledger keeps of an engine's encoder cache: its entries, and what its workers hold."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class EncoderInput(NamedTuple):
    """One encoder input of a request: identity, first position, positions, and embeddings."""

    identity: int
    start: int
    positions: int
    embeddings: int

    @property
    def end(self) -> int:
        """The first position behind the input."""
        return self.start + self.positions


class EncoderCache(msgspec.Struct):
    """The encoder cache of one engine, by identity of the input. Sizes are embeddings."""

    size: int = -1
    """The size of the cache; -1: not known."""
    shared: bool = True
    """Whether outputs stay for later requests."""
    loads: bool = False
    """Whether a connector may load outputs."""
    entries: dict[int, int] = {}
    """Embeddings of each cached output; -1: not known."""
    at_workers: dict[int, None] = {}
    """The outputs that workers have, or may have."""
    readers: dict[int, dict[int, None]] = {}
    """Numbers of the requests that have read an output, by identity."""
    budget_differs: bool = False
    """Whether the engine's count of free embeddings differed when it was last seen."""

    def forget(self) -> None:
        """Events were lost: what the cache holds is not known until the next segment."""
        self.size = -1
        self.clear()

    def clear(self) -> None:
        """The cache is empty."""
        self.entries, self.at_workers, self.readers = {}, {}, {}

    def used(self) -> int | None:
        """Embeddings of all entries; None: not known."""
        sizes = self.entries.values()
        return None if -1 in sizes else sum(sizes)
