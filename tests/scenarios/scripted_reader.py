"""The metadata reader of the scripted connectors; ``scripted_connector`` registers it."""

from __future__ import annotations

from typing import Any

from kvledger.audit.engines.connector_metadata.metadata_reader import MetadataReader


class ScriptedReader(MetadataReader):
    """Reads the block ids of each load, one tuple per KV cache group."""

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        return {block for load in metadata.loads for group in load.block_ids for block in group}
