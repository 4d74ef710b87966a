"""An offloading spec for ``OffloadingConnector`` on a machine without a GPU; vLLM's own spec needs one.

Transfers are copies between tensors. A copy runs at once and is reported in the next step. A chunk is one
block.
vLLM imports this module by its name (``spec_module_path``).
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies whole blocks between the engine's cache and a store of ``chunks`` blocks."""

    def __init__(self, caches: Any, chunks: int) -> None:
        self._caches = [canonical.tensor for canonical in caches.tensors]
        self._store = [torch.zeros((chunks, cache.shape[1]), dtype=cache.dtype) for cache in self._caches]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._caches, src_spec, self._store, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._store, src_spec, self._caches, dst_spec)

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        size = 0
        for read, written in zip(sources, targets, strict=True):
            moved = read[torch.from_numpy(source.block_ids).long()]
            written[torch.from_numpy(target.block_ids).long()] = moved
            size += moved.numel()
        self._done.append(TransferResult(job_id, True, size, 0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: every copy runs at once."""


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's chunk manager with a worker that needs no GPU."""

    def get_worker(self, kv_caches: Any) -> Any:
        return CopyingWorker(kv_caches, self.num_chunks)
