"""``OffloadingConnector``: transfer jobs with the engine's blocks as destination.

Before 0.22 the metadata has transfers by request, later it has jobs by number. Up to 0.24 a job has its
source and destination in one pair.
"""

from __future__ import annotations

from typing import Any

from ..connectors.metadata_reader import MetadataReader


class OffloadingReader(MetadataReader):
    """Reads loads."""

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        if hasattr(metadata, "load_jobs"):
            jobs = metadata.load_jobs.values()
            specs = [job.dst_spec if hasattr(job, "dst_spec") else job.transfer_spec[1] for job in jobs]
        else:
            specs = [transfer[1] for transfer in metadata.reqs_to_load.values()]
        return {int(block) for spec in specs for block in spec.block_ids}
