"""``NixlConnector``, scheduler side: the blocks that each request will receive."""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import MetadataReader


class NixlReader(MetadataReader):
    """Reads the blocks that a decode engine will receive."""

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for received in metadata.reqs_to_recv.values():
            for ids in received.local_block_ids:
                filled.update(ids if isinstance(ids, list | tuple) else (ids,))
        return filled
