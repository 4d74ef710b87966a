"""``OffloadingConnector``: transfer jobs with the engine's blocks as destination.

Before 0.22 the metadata has transfers by request, later it has jobs by number. Up to 0.24 a job has its
source and destination in one pair.
"""

from __future__ import annotations

from typing import Any

from .metadata_reader import LoadedBlocks, MetadataReader


class OffloadingReader(MetadataReader):
    """Reads loads and stores. The store is the memory of the worker, or a tier that only it writes to."""

    READS = ("loads", "blocks")

    @property
    def own_store(self) -> bool:
        """Whether the tier is the worker's memory; tiers below it may be shared."""
        spec = getattr(getattr(self.connector, "connector_worker", None), "spec", None)
        classes = {kind.__name__ for kind in type(spec).__mro__}
        return "CPUOffloadingSpec" in classes and "TieringOffloadingSpec" not in classes

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        if hasattr(metadata, "load_jobs"):
            jobs = metadata.load_jobs.values()
            specs = [job.dst_spec if hasattr(job, "dst_spec") else job.transfer_spec[1] for job in jobs]
        else:
            specs = [transfer[1] for transfer in metadata.reqs_to_load.values()]
        return {int(block) for spec in specs for block in spec.block_ids}

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        stored: list[int] = []
        for job in getattr(metadata, "store_jobs", {}).values():
            source = job.src_spec if hasattr(job, "src_spec") else job.transfer_spec[0]
            stored.extend(map(int, source.block_ids))
        return stored

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        loads = []
        for job in getattr(metadata, "load_jobs", {}).values():
            target = job.dst_spec if hasattr(job, "dst_spec") else job.transfer_spec[1]
            loads.append(LoadedBlocks(job.req_id, list(map(int, target.block_ids)), True))
        return loads
