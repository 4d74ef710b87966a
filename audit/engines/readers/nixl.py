"""``NixlConnector``, as far as its scheduler side goes: blocks to be received, a request each."""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import PlanReader


class NixlReader(PlanReader):
    """Reads what a decode side is to receive."""

    def filled(self, plan: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for received in plan.reqs_to_recv.values():
            for ids in received.local_block_ids:
                filled.update(ids if isinstance(ids, list | tuple) else (ids,))
        return filled
