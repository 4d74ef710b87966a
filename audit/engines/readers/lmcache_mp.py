"""``LMCacheMPConnector``, of lmcache and of vLLM: loads and saves as ranges of tokens with their blocks.

Its trackers hold the engine's own list of tokens, so they can't fall behind it. The blocks of a
range are a list, or a list a KV cache group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ..connectors.metadata_reader import PlanReader, Saved


class LMCacheMPReader(PlanReader):
    """Reads loads and saves."""

    READS: ClassVar[tuple[str, ...]] = ("loads", "saves")

    def filled(self, plan: Any, block_size: int) -> set[int]:
        filled: set[int] = set()
        for request in plan.requests:
            if request.direction == "RETRIEVE":
                for ids in request.op.block_ids:
                    filled.update(ids if isinstance(ids, list | tuple) else (ids,))
        return filled

    def saves(self, plan: Any) -> Iterable[Saved]:
        for request in plan.requests:
            if request.direction == "STORE":
                yield Saved(request.request_id, request.op.start, request.op.end)
