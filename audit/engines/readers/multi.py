"""``MultiConnector``: a plan a child, in the order of its children.

The first child that holds something of a request loads it; each child saves by its own rules, so
saves and trackers are not read: two children's would be taken for one's.
"""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import PlanReader, reader_of


class MultiReader(PlanReader):
    """Reads the loads of all its children. Raises ValueError for one whose plans are opaque."""

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.children: list[PlanReader] = []
        for child in connector._connectors:
            reader = reader_of(child)
            if reader is None:
                raise ValueError(f"the plans of {type(child).__name__} are opaque")
            self.children.append(reader)

    def filled(self, plan: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for reader, of_child in zip(self.children, plan.metadata, strict=True):
            filled |= reader.filled(of_child, block_size)
        return filled
