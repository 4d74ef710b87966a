"""``OffloadingConnector``: transfer jobs, whose destination names the engine's blocks.

Up to 0.22 the plan has transfers by request; later jobs by number.
"""

from __future__ import annotations

from typing import Any

from kvledger.audit.engines.plans import PlanReader


class OffloadingReader(PlanReader):
    """Reads loads."""

    def filled(self, plan: Any, block_size: int) -> set[int]:
        if hasattr(plan, "load_jobs"):
            specs = [job.dst_spec for job in plan.load_jobs.values()]
        else:
            specs = [transfer[1] for transfer in plan.reqs_to_load.values()]
        return {int(block) for spec in specs for block in spec.block_ids}
