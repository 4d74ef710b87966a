"""Dynamo's ``KvRouter`` over the KV events of real engines, asked for its prediction of each prompt.

Runs with ``ai-dynamo-runtime`` (PyPI) alone, in an environment of its own, and imports nothing of kvledger:

    python dynamo_router.py worker STORE MODEL BLOCK_TOKENS EVENTS_ADDRESS
    python dynamo_router.py router STORE BLOCK_TOKENS

Neither etcd nor NATS is needed: workers are found in the folder STORE (discovery ``file``), and events go
over ZeroMQ. A worker stands for one engine, relays its KV events, and prints its id. The router answers a
line of JSON, the arguments of ``get_overlap_scores``, with a line of JSON: the blocks of each worker that its
index holds, or the error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

ENDPOINT = "kvledger.backend.generate"


def runtime(store: str) -> Any:
    """A runtime without etcd and NATS."""
    os.environ["DYN_FILE_KV"] = store
    os.environ["DYN_SELF_HOST_METADATA"] = "0"
    os.environ.setdefault("DYN_LOG", "error")
    from dynamo import _core

    return _core.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")


async def worker(store: str, model: str, block_tokens: int, events: str) -> None:
    """Relay the KV events of one engine until the process is ended."""
    from dynamo import _core

    async def never(_: Any) -> AsyncIterator[Any]:
        yield {}

    endpoint = runtime(store).endpoint(ENDPOINT)
    serving = asyncio.ensure_future(endpoint.serve_endpoint(never))
    await asyncio.sleep(1)
    config = _core.ModelRuntimeConfig()
    config.enable_local_indexer = config.kv_event_publishing_enabled = True
    await _core.register_model(
        _core.ModelInput.Tokens,
        _core.ModelType.Completions,
        endpoint,
        model,
        "tiny",
        worker_type=_core.WorkerType.Aggregated,
        kv_cache_block_size=block_tokens,
        runtime_config=config,
        ignore_weights=True,
    )
    relay = _core.KvEventPublisher(
        endpoint, kv_block_size=block_tokens, enable_local_indexer=True, zmq_endpoint=events
    )
    print(endpoint.connection_id(), flush=True)
    await serving
    relay.shutdown()


async def router(store: str, block_tokens: int) -> None:
    """Answer each line of the input."""
    from dynamo import _core

    endpoint = runtime(store).endpoint(ENDPOINT)
    chosen = _core.KvRouter(endpoint, block_tokens, _core.KvRouterConfig())
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            scores = await chosen.get_overlap_scores(**json.loads(line))
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        blocks = {str(row["worker_id"]): row["device_blocks"] for row in scores["workers"]}
        print(json.dumps(blocks), flush=True)


def main() -> None:
    """One of both roles."""
    role, *rest = sys.argv[1:]
    if role == "worker":
        asyncio.run(worker(rest[0], rest[1], int(rest[2]), rest[3]))
    else:
        asyncio.run(router(rest[0], int(rest[1])))


if __name__ == "__main__":
    main()
