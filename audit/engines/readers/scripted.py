"""The scripted connectors of ``conformance``."""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import PlanReader


class ScriptedReader(PlanReader):
    """Block ids by load and KV cache group."""

    def filled(self, plan: Any, block_size: int) -> set[int]:
        return {block for load in plan.loads for group in load.block_ids for block in group}
