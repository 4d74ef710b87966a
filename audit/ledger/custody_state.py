"""What the ledger keeps of the transfers of blocks: fingerprints that were stored, and loads to be judged."""

from __future__ import annotations

DIGITS_KEPT = 64 << 20
"""The most digits of stored fingerprints that are kept; the oldest are dropped first."""

VERSIONS_KEPT = 4
"""How many different fingerprints of one hash are kept: each computation of a prefix differs in bits."""


Stored = tuple[str, int, int, str]
"""A block that was handed to the store: fingerprints, step, block, and the request that had filled it."""


class CustodyState:
    """Transfers of one engine's blocks, by block hash. All attributes are plain data."""

    def __init__(self) -> None:
        self.key_name = ""
        """The function and key of the fingerprints; others can't be compared."""
        self.stored: dict[tuple[int, int, int], list[Stored]] = {}
        """By hash id, worker and group: what was handed to the store. Fingerprints are hexadecimal digits."""
        self.digits = 0
        """Digits of these fingerprints."""
        self.waiting: dict[tuple[int, int, int], list[tuple[int, int, bool, bool, str]]] = {}
        """By pool, block and worker: transfers of a block without a hash: step of the block's allocation,
        step of the transfer, whether it was stored, whether the store is the engine's own, fingerprints."""
        self.counts: dict[str, int] = {}
        """Blocks by what their transfers showed."""

    def count(self, name: str, blocks: int = 1) -> None:
        """Count blocks."""
        self.counts[name] = self.counts.get(name, 0) + blocks

    def keep(self, key: tuple[int, int, int], stored: Stored) -> None:
        """Keep what is known of a block that was handed to the store."""
        versions = self.stored.setdefault(key, [])
        if any(stored[0] == version[0] for version in versions):
            return
        versions.append(stored)
        self.digits += len(stored[0])
        if len(versions) > VERSIONS_KEPT:
            self.digits -= len(versions.pop(0)[0])
        while self.digits > DIGITS_KEPT:
            oldest = next(iter(self.stored))
            self.digits -= sum(len(version[0]) for version in self.stored.pop(oldest))

    def use_key(self, name: str) -> None:
        """Fingerprints of another key follow: forget all others."""
        if name != self.key_name:
            self.key_name, self.digits = name, 0
            self.stored.clear()
            self.waiting.clear()
