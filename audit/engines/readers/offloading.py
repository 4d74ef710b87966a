"""``OffloadingConnector``: transfer jobs, whose destination names the engine's blocks.

Before 0.22 the plan has transfers by request, later jobs by number; up to 0.24 a job has source and
destination in one pair.
"""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import PlanReader


class OffloadingReader(PlanReader):
    """Reads loads."""

    def filled(self, plan: Any, block_size: int) -> set[int]:
        if hasattr(plan, "load_jobs"):
            jobs = plan.load_jobs.values()
            specs = [job.dst_spec if hasattr(job, "dst_spec") else job.transfer_spec[1] for job in jobs]
        else:
            specs = [transfer[1] for transfer in plan.reqs_to_load.values()]
        return {int(block) for spec in specs for block in spec.block_ids}
