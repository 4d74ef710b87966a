"""``OffloadingConnector``: transfer jobs with the engine's blocks as destination.

Before 0.22 the metadata has transfers by request, later it has jobs by number. Up to 0.24 a job has its
source and destination in one pair. Since 0.20 the blocks of several KV cache groups stand one group behind
another, with the number of blocks of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import Any

from .metadata_reader import LoadedBlocks, MetadataReader, Moves


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
            specs = [_target(job) for job in metadata.load_jobs.values()]
        else:
            specs = [transfer[1] for transfer in metadata.reqs_to_load.values()]
        return {int(block) for spec in specs for block in spec.block_ids}

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        jobs = getattr(metadata, "store_jobs", {}).values()
        return [int(block) for job in jobs for block in _source(job).block_ids]

    def groups(self, attention: Collection[int]) -> Collection[int]:
        return attention

    def moves(self, metadata: Any, block_tokens: Mapping[int, int]) -> Moves:
        found = Moves({group: [] for group in block_tokens}, [])
        for job in getattr(metadata, "store_jobs", {}).values():
            for group, blocks in _by_group(_source(job), block_tokens):
                found.stored[group] += blocks
        for job in getattr(metadata, "load_jobs", {}).values():
            for group, blocks in _by_group(_target(job), block_tokens):
                found.loads.append(LoadedBlocks(job.req_id, blocks, True, group))
        return found


def _source(job: Any) -> Any:
    return job.src_spec if hasattr(job, "src_spec") else job.transfer_spec[0]


def _target(job: Any) -> Any:
    return job.dst_spec if hasattr(job, "dst_spec") else job.transfer_spec[1]


def _by_group(spec: Any, groups: Collection[int]) -> Iterator[tuple[int, list[int]]]:
    """The blocks of a job's end in the engine, of each of these groups; they stand in the groups' order."""
    blocks = list(map(int, spec.block_ids))
    sizes = getattr(spec, "group_sizes", None) or [len(blocks)]
    ends = list(accumulate(sizes))
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        if group in groups and size:
            yield group, blocks[end - size : end]


# --- ``SimpleCPUOffloadConnector``: one list of blocks for all loads of a step, and one for all stores.


class SimpleCPUOffloadReader(MetadataReader):
    """Reads loads and stores. The store is the memory of the worker, or a file that only it writes to."""

    READS = ("loads", "blocks")

    @property
    def own_store(self) -> bool:
        """Whether nothing but this engine writes to the store."""
        return True

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        return set(metadata.load_gpu_blocks)

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        return list(metadata.store_gpu_blocks)

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        """All loads of a step finish together, so they belong to the first request of the step."""
        if not metadata.load_gpu_blocks:
            return []
        request_id = metadata.load_event_to_reqs[metadata.load_event][0]
        return [LoadedBlocks(request_id, list(metadata.load_gpu_blocks), True)]
