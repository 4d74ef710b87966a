"""vLLM's OpenAI-compatible server whose NIXL connector changes one byte of a block that it received.

After NIXL has filled the blocks of the request whose id begins with ``CHANGED_REQUEST``, and before anybody
reads them, one bit of the last layer of the first block is turned. ``CHANGED_FILE`` then says which. vLLM's
processes import this module as their main module, so the change is made in each.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

REQUEST, FILE = "CHANGED_REQUEST", "CHANGED_FILE"

_results = NixlBaseConnectorWorker.get_transfer_results


def results(worker: Any) -> Any:
    """The transfers that are complete; of the one that was asked for, a byte is changed."""
    loading = dict(worker._recving_metadata)
    found = _results(worker)
    for request_id in sorted(found.finished_recving & loading.keys()):
        if request_id.startswith(os.environ[REQUEST]) and not Path(os.environ[FILE]).exists():
            change(worker, request_id, loading[request_id].local_block_ids[0][0])
    return found


def change(worker: Any, request_id: str, block: int) -> None:
    """Turn one bit of a block in the last layer."""
    import torch

    layer = max(worker.device_kv_caches)
    cache = worker.device_kv_caches[layer]
    (axis,) = (place for place, size in enumerate(cache.shape) if size == worker.num_blocks)
    inside = cache.select(axis, block)
    first = (0,) * inside.dim()
    inside.view(torch.int32)[first] ^= 1
    said = {"request": request_id, "block": block, "layer": layer, "layers": len(worker.device_kv_caches)}
    Path(os.environ[FILE]).write_text(json.dumps(said))


if REQUEST in os.environ:
    NixlBaseConnectorWorker.get_transfer_results = results

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
