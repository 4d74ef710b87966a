"""Connectors that read from another engine's cache: one that keeps its word, and some that do not.

Engines are known by the ``engine_id`` of their configuration, and all are in this process.
``kvledger conformance --disaggregated --module`` finds this module by its path.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Read:
    """Blocks of a request, by those of the engine that prefilled it."""

    request_id: str
    engine: str
    theirs: str
    blocks: list[tuple[int, int]]


@dataclass
class Plan(KVConnectorMetadata):
    reads: list[Read] = field(default_factory=list)


class PairedConnector(KVConnectorBase_V1):
    """Reads the whole prompt but what is in the local cache, and tells the engine that it has."""

    CACHES: ClassVar[dict[str, dict[str, Any]]] = {}
    READ: ClassVar[dict[str, set[str]]] = defaultdict(set)
    """By engine: whose blocks were read, and may go."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine = vllm_config.kv_transfer_config.engine_id
        self.size = vllm_config.cache_config.block_size
        self._reads: list[Read] = []
        self._received: set[str] = set()

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        said = request.kv_transfer_params or {}
        external = request.num_prompt_tokens - num_computed_tokens if said.get("do_remote_prefill") else 0
        return external, external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        said = request.kv_transfer_params or {}
        if said.get("do_remote_prefill"):
            said["do_remote_prefill"] = False
            first = (request.num_prompt_tokens - num_external_tokens) // self.size
            pairs = list(zip(blocks.get_block_ids()[0], said["blocks"], strict=False))
            self._read(request, pairs[first:] if num_external_tokens else [])

    def _read(self, request: Any, blocks: list[tuple[int, int]]) -> None:
        said = request.kv_transfer_params
        self._reads.append(Read(request.request_id, said["engine"], said["theirs"], blocks))

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        reads, self._reads = self._reads, []
        return Plan(reads)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        said = request.kv_transfer_params or {}
        if said.get("do_remote_prefill"):
            self._read(request, [])  # given up before it was admitted: nobody will read them
        if not said.get("do_remote_decode"):
            return False, None
        where = {"engine": self.engine, "theirs": request.request_id, "blocks": list(block_ids)}
        return True, {"do_remote_prefill": True, **where}

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.CACHES[self.engine] = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        for read in plan.reads:
            for layer, cache in self.CACHES[self.engine].items():
                for ours, theirs in self.taken(read.blocks):
                    cache[ours] = self.CACHES[read.engine][layer][theirs]
            if read.blocks:
                self._received.add(read.request_id)
            self.told(read)

    def taken(self, blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Which blocks are read into which."""
        return blocks

    def told(self, read: Read) -> None:
        """Tell the other engine that it may let go."""
        self.READ[read.engine].add(read.theirs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is waited for: a request is not admitted before it was received."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return self.READ.pop(self.engine, None), received or None


class HastyConnector(PairedConnector):
    """Reports a request as received of which it has read no block but the first."""

    def taken(self, blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return blocks[:1]


class SwappedConnector(PairedConnector):
    """Reads the right blocks into the wrong places."""

    def taken(self, blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        ours, theirs = [pair[0] for pair in blocks], [pair[1] for pair in blocks]
        return list(zip(ours, reversed(theirs), strict=True))


class SilentConnector(PairedConnector):
    """Never tells the other engine that its blocks may go."""

    def told(self, read: Read) -> None:
        pass
