"""``ExampleConnector``, up to 0.11 ``SharedStorageConnector``: a slot mapping for each load and save.

A slot is block id * block size + offset. The metadata does not name its requests, so a save can't be
assigned to one.
"""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import MetadataReader


class ExampleReader(MetadataReader):
    """Reads loads by their slots."""

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for request in metadata.requests:
            if not request.is_store:
                filled.update(slot // block_size for slot in request.slot_mapping.flatten().tolist())
        return filled
