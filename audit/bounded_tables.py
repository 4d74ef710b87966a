"""Tables of bounded size that forget their oldest entries.

A dict of Python finds its oldest entry by a walk over the places of all entries that were removed since it
was resized. So to remove the oldest entry for each new one takes time in proportion to the table's size. Here
an eighth of the table leaves at a time.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(table: MutableMapping[K, V], most: int) -> list[V]:
    """Forget the oldest entries once there are an eighth more than ``most``; the values of those."""
    return _take(table, len(table) - most) if len(table) > most + most // 8 else []


def take_oldest(table: MutableMapping[K, V]) -> list[V]:
    """Forget the oldest eighth of the entries, at least one if there is any; their values."""
    return _take(table, max(1, len(table) // 8))


def _take(table: MutableMapping[K, V], entries: int) -> list[V]:
    return [table.pop(key) for key in list(islice(table, entries))]
