"""What a connector's load plan covers: one small reader a connector.

A plan is opaque metadata that the scheduler hands to the workers. A reader gives the set of block
ids that the plan's loads will fill. A connector without a reader still gets everything that the
base interface shows; its promises are then taken as covered (``docs/connectors.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PlanReader = Callable[[Any, int], set[int]]


def example_connector(plan: Any, block_size: int) -> set[int]:
    """``ExampleConnector``: a slot mapping a request; a slot is block id * block size + offset."""
    filled: set[int] = set()
    for request in plan.requests:
        if not request.is_store:
            filled.update(slot // block_size for slot in request.slot_mapping.flatten().tolist())
    return filled


def scripted_connector(plan: Any, block_size: int) -> set[int]:
    """The scripted connector of ``conformance``: block ids by load and KV cache group."""
    return {block for load in plan.loads for group in load.block_ids for block in group}


READERS: dict[str, PlanReader] = {
    "ExampleConnector": example_connector,
    "SharedStorageConnector": example_connector,
    "ScriptedConnector": scripted_connector,
}
