"""Connectors that read another engine's cache: one that reads what it promises, and some that do not.

All engines are in this process, each under the ``engine_id`` of its configuration.
``kvledger conformance --disaggregated --module`` imports this module from its path.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class RemoteRead:
    """Blocks to read for a request from the engine that prefilled it."""

    request_id: str
    remote_engine: str
    remote_request_id: str
    blocks: list[tuple[int, int]]
    """Pairs of a block of this engine and the block of the other engine to copy into it."""


@dataclass
class ReadMetadata(KVConnectorMetadata):
    reads: list[RemoteRead] = field(default_factory=list)


class PairedConnector(KVConnectorBase_V1):
    """Reads every prompt token that is not a local hit, and reports the read to the other engine."""

    CACHES: ClassVar[dict[str, dict[str, Any]]] = {}
    READ_REQUESTS: ClassVar[dict[str, set[str]]] = defaultdict(set)
    """By engine, the requests whose blocks were read and may be freed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine = vllm_config.kv_transfer_config.engine_id
        self.block_size = vllm_config.cache_config.block_size
        self._reads: list[RemoteRead] = []
        self._received: set[str] = set()

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        external = request.num_prompt_tokens - num_computed_tokens if params.get("do_remote_prefill") else 0
        return external, external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            first = (request.num_prompt_tokens - num_external_tokens) // self.block_size
            pairs = list(zip(blocks.get_block_ids()[0], params["blocks"], strict=False))
            self._read(request, pairs[first:] if num_external_tokens else [])

    def _read(self, request: Any, blocks: list[tuple[int, int]]) -> None:
        params = request.kv_transfer_params
        self._reads.append(RemoteRead(request.request_id, params["engine"], params["theirs"], blocks))

    def build_connector_meta(self, scheduler_output: Any) -> ReadMetadata:
        reads, self._reads = self._reads, []
        return ReadMetadata(reads)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._read(request, [])  # ended before its admission: release the remote blocks
        if not params.get("do_remote_decode"):
            return False, None
        remote = {"engine": self.engine, "theirs": request.request_id, "blocks": list(block_ids)}
        return True, {"do_remote_prefill": True, **remote}

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.CACHES[self.engine] = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ReadMetadata)
        for read in metadata.reads:
            for layer, cache in self.CACHES[self.engine].items():
                for local, remote in self.pairs_to_copy(read.blocks):
                    cache[local] = self.CACHES[read.remote_engine][layer][remote]
            if read.blocks:
                self._received.add(read.request_id)
            self.report_read(read)

    def pairs_to_copy(self, blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The pairs of blocks to copy, as in :class:`RemoteRead`."""
        return blocks

    def report_read(self, read: RemoteRead) -> None:
        """Report to the other engine that it may free the blocks."""
        self.READ_REQUESTS[read.remote_engine].add(read.remote_request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its blocks were received."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return self.READ_REQUESTS.pop(self.engine, None), received or None


class HastyConnector(PairedConnector):
    """Reads the first block of a request only, and reports the whole request as received."""

    def pairs_to_copy(self, blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return blocks[:1]


class SwappedConnector(PairedConnector):
    """Reads the right blocks in the wrong order."""

    def pairs_to_copy(self, blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        local, remote = [pair[0] for pair in blocks], [pair[1] for pair in blocks]
        return list(zip(local, reversed(remote), strict=True))


class SilentConnector(PairedConnector):
    """Never reports to the other engine that it may free its blocks."""

    def report_read(self, read: RemoteRead) -> None:
        pass
