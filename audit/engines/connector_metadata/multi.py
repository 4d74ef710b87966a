"""``MultiConnector``: the metadata of each child, in the order of the children.

The first child that holds tokens of a request loads them. Each child saves and counts by its own rules, so
saves and trackers are not read: they could not be assigned to a child.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .metadata_reader import MetadataReader


class MultiReader(MetadataReader):
    """Reads the loads of every child.

    ``reader_of`` gives the reader of a child. Raises ValueError if one child has none.
    """

    def __init__(self, connector: Any, reader_of: Callable[[Any], MetadataReader | None]) -> None:
        super().__init__(connector)
        self.children: list[MetadataReader] = []
        """The reader of each child, in the order of the children."""
        for child in connector._connectors:
            reader = reader_of(child)
            if reader is None:
                raise ValueError(f"kvledger has no reader for the metadata of {type(child).__name__}")
            self.children.append(reader)

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for reader, of_child in zip(self.children, metadata.metadata, strict=True):
            filled |= reader.filled(of_child, block_size)
        return filled
