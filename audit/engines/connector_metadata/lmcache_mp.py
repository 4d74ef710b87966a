"""``LMCacheMPConnector``, of lmcache and of vLLM: loads and saves as ranges of tokens with their blocks.

Its trackers share the engine's own list of tokens, so they can't fall behind it. The blocks of a range
are one list, or one list for each KV cache group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from .metadata_reader import LoadedBlocks, MetadataReader, Saved


class LMCacheMPReader(MetadataReader):
    """Reads loads and saves."""

    READS: ClassVar[tuple[str, ...]] = ("loads", "saves", "blocks")
    LOOKUP: ClassVar[str] = "scheduler_adapter.maybe_submit_lookup_request"

    @property
    def chunk_tokens(self) -> int:
        adapter = self.connector.scheduler_adapter
        return int(getattr(adapter, "lmcache_tokens_per_chunk", None) or adapter.chunk_size)

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        return {
            block
            for request in metadata.requests
            if request.direction == "RETRIEVE"
            for block in _blocks(request.op)
        }

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        rows = [row for row in metadata.requests if row.direction == "STORE"]
        return [block for row in rows for block in _blocks(row.op)]

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        loads = []
        for request in metadata.requests:
            if request.direction != "STORE":
                skipped = -(-int(getattr(request.op, "skip_first_n_tokens", 0)) // block_size)
                loads.append(LoadedBlocks(request.request_id, _blocks(request.op)[skipped:], True))
        return loads

    def saves(self, metadata: Any) -> Iterable[Saved]:
        for request in metadata.requests:
            if request.direction == "STORE":
                yield Saved(request.request_id, request.op.start, request.op.end)


def _blocks(op: Any) -> list[int]:
    """The blocks of a range of tokens, of all KV cache groups."""
    return [block for ids in op.block_ids for block in (ids if isinstance(ids, list | tuple) else (ids,))]
