"""``ExampleConnector``, up to 0.11 ``SharedStorageConnector``: a slot mapping for each load and save.

A slot is block id * block size + offset. The metadata does not name its requests, so a save can't be
assigned to one.
"""

from __future__ import annotations

from typing import Any

from .metadata_reader import LoadedBlocks, MetadataReader, Moves, whole_blocks


class ExampleReader(MetadataReader):
    """Reads loads and stores by their slots. The store is a folder, which other engines may share."""

    READS = ("loads", "blocks")

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for request in metadata.requests:
            if not request.is_store:
                filled.update(slot // block_size for slot in request.slot_mapping.flatten().tolist())
        return filled

    def moves(self, metadata: Any, block_size: int) -> Moves:
        moves = Moves([], [])
        for request in metadata.requests:
            blocks = whole_blocks(request.slot_mapping.flatten().tolist(), block_size)
            if request.is_store:
                moves.stored.extend(blocks)
            else:
                moves.loads.append(LoadedBlocks("", blocks, False))
        return moves
