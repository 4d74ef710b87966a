"""Dynamo's RadixTree as a router's index: another project's code over the same KV events."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..audit import events as ev
from ..audit.errors import LedgerError

UNSIGNED = (1 << 64) - 1


class DynamoIndex:
    """An index in Dynamo's RadixTree. Raises LedgerError without ``ai-dynamo-runtime``.

    The tree names a block twice: by its position in a sequence, and by its tokens alone. ``contents`` has a
    keyed hash of the tokens by hash id; without it, a hash id serves as both.

    ``counts``: a removal reaches the tree only when the engine has removed as many blocks with the hash as it
    stored, as in the publisher of Dynamo's workers (``EventDedupFilter``), from which its router has its KV
    events. The standalone indexer reads the engine's events itself, and drops a hash at its first removal.
    """

    def __init__(self, contents: Mapping[int, int] | None = None, *, counts: bool = True) -> None:
        try:
            from dynamo._core import RadixTree
        except ImportError:
            raise LedgerError(
                "--index dynamo needs ai-dynamo-runtime: pip install ai-dynamo-runtime."
            ) from None
        self._tree: Any = RadixTree()
        self._events = 0
        """How many events the tree got; it is the id of the next one."""
        self._contents = contents or {}
        self._counts = counts
        self._stored: dict[int, Counter[int]] = {}
        """By engine: how many blocks with each hash id it holds."""
        self.refused = 0
        """Stores that the tree did not take, because it does not know their parent block."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        rows, place = batch.rows, 0
        while place < len(rows):
            kind, _, tier, _, parent, count = rows[place : place + ev.KV_HEAD]
            place += ev.KV_HEAD + count
            if tier >= 0 and batch.tiers[tier] != "GPU":
                continue
            self._apply(engine, kind, parent, rows[place - count : place])

    def _apply(self, engine: int, kind: int, parent: int, ids: list[int]) -> None:
        data: Any = "cleared"
        ids = self._counted(self._stored.setdefault(engine, Counter()), kind, ids) if self._counts else ids
        if kind == ev.STORED:
            blocks = [
                {"block_hash": number & UNSIGNED, "tokens_hash": self._tokens(number)} for number in ids
            ]
            data = {"stored": {"parent_hash": parent & UNSIGNED if parent else None, "blocks": blocks}}
        elif kind == ev.REMOVED_BLOCKS:
            data = {"removed": {"block_hashes": [number & UNSIGNED for number in ids]}}
        if kind != ev.CLEARED and not ids:
            return
        event = {"event_id": self._events, "data": data, "dp_rank": 0}
        self._events += 1
        try:
            self._tree.apply_event(engine, json.dumps(event).encode())
        except RuntimeError:  # a removal of what the tree does not hold is refused, too: it lacks nothing
            self.refused += kind == ev.STORED

    @staticmethod
    def _counted(stored: Counter[int], kind: int, ids: list[int]) -> list[int]:
        """The hash ids that reach the tree: stores, and removals of the last block or of unknown ones."""
        if kind == ev.CLEARED:
            stored.clear()
        elif kind == ev.STORED:
            stored.update(ids)
        else:
            stored.subtract(ids)
            ids = [hash_id for hash_id in ids if stored[hash_id] <= 0]
            for hash_id in ids:
                del stored[hash_id]
        return ids

    def _tokens(self, hash_id: int) -> int:
        return self._contents.get(hash_id, hash_id) & UNSIGNED

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        scores: dict[Any, int] = {}
        with contextlib.suppress(RuntimeError):
            scores = self._tree.find_matches([self._tokens(number) for number in hashes]).scores
        return {
            worker[0] if isinstance(worker, tuple) else worker: blocks for worker, blocks in scores.items()
        }
