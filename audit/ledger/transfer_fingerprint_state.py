"""What the ledger keeps of the transfers of blocks: fingerprints that were stored, and loads to be judged."""

from __future__ import annotations

from typing import NamedTuple

from ..bounded_tables import take_oldest

DIGITS_KEPT = 64 << 20
"""The most digits of stored fingerprints that are kept; the oldest are dropped first."""

VERSIONS_KEPT = 4
"""How many different fingerprints of one hash are kept: each computation of a prefix differs in bits."""


Stored = tuple[str, int, int, str]
"""A block that was handed to the store: fingerprints, step, block, and the request that had filled it."""


class ForeignLoad(NamedTuple):
    """A block that a load has filled, and that another engine may have stored.

    ``reader``: the request for which it was loaded. ``counted_as``: the count that it is part of.
    """

    hash_id: int
    worker: int
    group: int
    pool: int
    block: int
    step: int
    at: int
    reader: str
    prints: str
    counted_as: str


class CustodyState:
    """Transfers of one engine's blocks, by block hash. All attributes are plain data."""

    def __init__(self) -> None:
        self.key_name = ""
        """The function and key of the fingerprints; others can't be compared."""
        self.stored: dict[tuple[int, int, int], list[Stored]] = {}
        """By hash id, worker and group: what was handed to the store. Fingerprints are hexadecimal digits."""
        self.digits = 0
        """Digits of these fingerprints."""
        self.waiting: dict[tuple[int, int, int], list[tuple[int, int, int, bool, bool, str]]] = {}
        """By pool, block and worker: transfers of a block without a hash: step of the block's allocation,
        group, step of the transfer, whether it was stored, whether the store is the engine's own,
        fingerprints."""
        self.fleet_store = False
        """Whether nothing but engines with the same key writes to the store."""
        self.foreign: list[tuple[int, int, int, int, int, int, int, str, str, str]] = []
        """Loads to be compared with what other engines stored, each a :class:`ForeignLoad`; only with
        ``fleet_store``."""
        self.foreign_digits = 0
        """Digits of their fingerprints."""

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
            oldest = take_oldest(self.stored)
            self.digits -= sum(len(version[0]) for versions in oldest for version in versions)

    def keep_foreign(self, load: ForeignLoad) -> None:
        """Keep a load, as long as there is room; a load without room stays uncompared."""
        if self.foreign_digits + len(load.prints) <= DIGITS_KEPT:
            self.foreign.append((*load,))
            self.foreign_digits += len(load.prints)

    def use_key(self, name: str) -> None:
        """Fingerprints of another key follow: forget all others."""
        if name != self.key_name:
            self.key_name, self.digits = name, 0
            self.stored.clear()
            self.waiting.clear()
            self.foreign, self.foreign_digits = [], 0
