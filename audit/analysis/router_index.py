"""Indexes of routers that are replayed beside our own: what they promise of the caches of several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from .. import events as ev
from ..ledger.kv_events import CLEARED, GPU, STORED, batch_rows, kv_events


class Index(Protocol):
    """A router's index of the caches of several engines."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        """Take one batch of an engine's KV events."""

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        """How many of these blocks, from the first on, each engine holds."""


class TokensIndex:
    """An index that knows the tokens of blocks and not their salt or adapter.

    ``contents``: by hash id, the keyed hash of all tokens up to the end of the block. A block without it is
    only itself.
    """

    def __init__(self, contents: Mapping[int, int]) -> None:
        self._contents = contents
        self._held: dict[int, Counter[int]] = {}
        """By engine: how many blocks with each content it holds, as its KV events say."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        held = self._held.setdefault(engine, Counter())
        for event, tier in kv_events(batch):
            if event.kind == CLEARED:
                held.clear()
            elif tier in ("", GPU):
                content = self._contents.get(event.hash_id, event.hash_id)
                held[content] += 1 if event.kind == STORED else -1
                if held[content] <= 0:
                    del held[content]

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        return _leading(self._held, [self._contents.get(hash_id, hash_id) for hash_id in hashes])


class UncountedIndex:
    """An index that drops a hash at its first removal, also if the engine has other blocks with it."""

    def __init__(self, contents: Mapping[int, int]) -> None:
        self._held: dict[int, set[int]] = {}
        """By engine: the hash ids that it holds, as the index has it."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        held = self._held.setdefault(engine, set())
        for event, tier in kv_events(batch):
            if event.kind == CLEARED:
                held.clear()
            elif tier in ("", GPU):
                (held.add if event.kind == STORED else held.discard)(event.hash_id)

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        return _leading(self._held, hashes)


def _leading(held: Mapping[int, Container[int]], wanted: Sequence[int]) -> dict[int, int]:
    """How many of what is wanted, from the first on, each engine holds; engines with none are left out."""
    found = {}
    for engine, has in held.items():
        if blocks := next((place for place, one in enumerate(wanted) if one not in has), len(wanted)):
            found[engine] = blocks
    return found


def contents_of(batches: Iterable[ev.KVEventsReceived]) -> dict[int, int]:
    """By hash id, the keyed hash of the tokens up to the end of the block, as far as it was recorded."""
    return {
        hash_id: content
        for batch in batches
        for row in batch_rows(batch)
        for hash_id, content in zip(row.ids, row.contents, strict=False)
        if content
    }
