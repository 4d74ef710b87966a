"""``ExampleConnector``: a slot mapping for each load and save.

A slot is block id * block size + offset. The metadata does not name its requests, so a save can't be
assigned to one.
"""

from __future__ import annotations

from typing import Any

from .metadata_reader import LoadedBlocks, MetadataReader, whole_blocks


class ExampleReader(MetadataReader):
    """Reads loads and stores by their slots. The store is a folder, which other engines may share."""

    READS = ("loads", "blocks")

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for request in metadata.requests:
            if not request.is_store:
                filled.update(slot // block_size for slot in request.slot_mapping.flatten().tolist())
        return filled

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        return [block for row in metadata.requests if row.is_store for block in _blocks(row, block_size)]

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        rows = [row for row in metadata.requests if not row.is_store]
        return [LoadedBlocks("", _blocks(row, block_size), False) for row in rows]


def _blocks(request: Any, block_size: int) -> list[int]:
    return whole_blocks(request.slot_mapping.flatten().tolist(), block_size)
