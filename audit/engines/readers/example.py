"""``ExampleConnector``, up to 0.11 ``SharedStorageConnector``: a slot mapping for each load and save.

A slot is block id * block size + offset. The plan does not name its requests, so what it saves can't
be told to one.
"""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import PlanReader


class ExampleReader(PlanReader):
    """Reads loads by their slots."""

    def filled(self, plan: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for request in plan.requests:
            if not request.is_store:
                filled.update(slot // block_size for slot in request.slot_mapping.flatten().tolist())
        return filled
