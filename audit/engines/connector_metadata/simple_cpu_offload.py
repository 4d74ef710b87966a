"""``SimpleCPUOffloadConnector``: one list of blocks for all loads of a step, and one for all stores."""

from __future__ import annotations

from typing import Any

from .metadata_reader import LoadedBlocks, MetadataReader


class SimpleCPUOffloadReader(MetadataReader):
    """Reads loads and stores. The store is the memory of the worker, or a file that only it writes to."""

    READS = ("loads", "blocks")

    @property
    def own_store(self) -> bool:
        """Whether nothing but this engine writes to the store."""
        return True

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        return set(metadata.load_gpu_blocks)

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        return list(metadata.store_gpu_blocks)

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        """All loads of a step finish together, so they belong to the first request of the step."""
        if not metadata.load_gpu_blocks:
            return []
        request_id = metadata.load_event_to_reqs[metadata.load_event][0]
        return [LoadedBlocks(request_id, list(metadata.load_gpu_blocks), True)]
