"""``LMCacheMPConnector``, of lmcache and of vLLM: loads and saves as ranges of tokens with their blocks.

Its trackers share the engine's own list of tokens, so they can't fall behind it. The blocks of a range
are one list, or one list for each KV cache group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from .metadata_reader import LoadedBlocks, MetadataReader, Moves, Saved, by_group


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
            for blocks in by_group(request.op.block_ids)
            for block in blocks
        }

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        rows = [row for row in metadata.requests if row.direction == "STORE"]
        return [block for row in rows for blocks in by_group(row.op.block_ids) for block in blocks]

    def groups(self, attention: Collection[int]) -> Collection[int]:
        return attention

    def moves(self, metadata: Any, block_tokens: Mapping[int, int]) -> Moves:
        found = Moves({group: [] for group in block_tokens}, [])
        for request in metadata.requests:
            for group, blocks in enumerate(by_group(request.op.block_ids)):
                if group not in block_tokens:
                    continue
                if request.direction == "STORE":
                    found.stored[group] += blocks
                else:
                    skipped = -(-int(getattr(request.op, "skip_first_n_tokens", 0)) // block_tokens[group])
                    found.loads.append(LoadedBlocks(request.request_id, blocks[skipped:], True, group))
        return found

    def saves(self, metadata: Any) -> Iterable[Saved]:
        for request in metadata.requests:
            if request.direction == "STORE":
                yield Saved(request.request_id, request.op.start, request.op.end)
