"""Connectors for the score card: two that load what they promise, and some that do not.

The store is a table in this process. It holds whole blocks, each by all tokens up to the end of the block.
vLLM imports this module by its name, or ``--module`` gives its path.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


@dataclass
class BlockTransfer:
    """A load or save of one block; ``key`` is all tokens up to the end of the block."""

    request_id: str
    block: int
    key: tuple[int, ...]


@dataclass
class StoreMetadata(KVConnectorMetadata):
    loads: list[BlockTransfer] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)


class HonestConnector(KVConnectorBase_V1):
    """Loads what it promised, synchronously; defers the first lookup of each request."""

    STORES: ClassVar[dict[str, dict[tuple[int, ...], dict[str, Any]]]] = {}
    ASYNCHRONOUS: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.store = self.STORES.setdefault(options.get("store", ""), {})
        self.block_size = vllm_config.cache_config.block_size
        self.caches: dict[str, Any] = {}
        self._looked_up: set[str] = set()
        self._local: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._loads: dict[str, list[BlockTransfer]] = {}
        self._saved: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._received: set[str] = set()
        self._failed: set[int] = set()

    # The scheduler's side.

    def _keys(self, request: Any) -> list[tuple[int, ...]]:
        tokens = tuple(request.all_token_ids)
        return [tokens[:end] for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id not in self._looked_up:
            self._looked_up.add(request.request_id)
            return None, False
        self._local[request.request_id] = num_computed_tokens
        stored_tokens = 0
        for key in self._keys(request):
            if key not in self.store:
                break
            stored_tokens += self.block_size
        limit = request.num_tokens - (0 if self.ASYNCHRONOUS else 1)
        external = max(0, min(stored_tokens, limit) - num_computed_tokens)
        return external, self.ASYNCHRONOUS and external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id, block_ids = request.request_id, list(blocks.get_block_ids()[0])
        self._requests[request_id] = request
        self._blocks[request_id], self._saved[request_id] = block_ids, 0
        if num_external_tokens:
            keys = self._keys(request)
            last = -(-(self._local[request_id] + num_external_tokens) // self.block_size)
            self._loads[request_id] = [
                BlockTransfer(request_id, block_ids[n], keys[n]) for n in range(min(last, len(keys)))
            ]

    def build_connector_meta(self, scheduler_output: Any) -> StoreMetadata:
        metadata = StoreMetadata([load for loads in self._loads.values() for load in loads])
        self._loads = {}
        cached = scheduler_output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_blocks and request_id not in cached.resumed_req_ids:
                self._blocks[request_id] += new_blocks[0]
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            self._save(request_id, starts[request_id] + count, metadata)
        return metadata

    def _save(self, request_id: str, tokens: int, metadata: StoreMetadata) -> None:
        """Add the saves of the blocks that this step fills and whose tokens are known."""
        keys = self._keys(self._requests[request_id])
        for index in range(self._saved[request_id], min(tokens // self.block_size, len(keys))):
            metadata.saves.append(BlockTransfer(request_id, self._blocks[request_id][index], keys[index]))
            self._saved[request_id] = index + 1

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        for load in metadata.loads:
            for layer, cache in self.caches.items():
                cache[load.block] = self.stored_block(load)[layer]
            if self.ASYNCHRONOUS:
                self._received.add(load.request_id)

    def stored_block(self, load: BlockTransfer) -> dict[str, Any]:
        """The KV that a load copies, by layer."""
        return self.store[load.key]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: :meth:`start_load_kv` has copied everything."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved here: :meth:`wait_for_save` saves whole blocks."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        for save in metadata.saves:
            self.store[save.key] = {name: cache[save.block].clone() for name, cache in self.caches.items()}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None


class LaterConnector(HonestConnector):
    """Loads asynchronously; a load may cover the whole prompt."""

    ASYNCHRONOUS = True


class ForgetfulConnector(HonestConnector):
    """Promises external tokens to a resumed request and never loads them (LMCache#1969)."""

    def build_connector_meta(self, scheduler_output: Any) -> StoreMetadata:
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._loads.pop(request_id, None)
        return super().build_connector_meta(scheduler_output)


class FailingConnector(HonestConnector):
    """Promises as before while its store is down, and reports every block of a load as failed."""

    down: ClassVar[bool] = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        if self.down:
            self._failed |= {load.block for load in metadata.loads}
            metadata.loads = []
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


class MuddledConnector(HonestConnector):
    """Loads the block that was stored first in place of every block."""

    def stored_block(self, load: BlockTransfer) -> dict[str, Any]:
        return next(iter(self.store.values()))


class ExchangingConnector(HonestConnector):
    """Exchanges keys and values when it loads."""

    def stored_block(self, load: BlockTransfer) -> dict[str, Any]:
        return {name: block.flip(-1) for name, block in super().stored_block(load).items()}


class ShortConnector(HonestConnector):
    """Loads a block less than it promises."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        del metadata.loads[-1:]
        super().start_load_kv(forward_context, **kwargs)


class EagerConnector(HonestConnector):
    """Saves the block in which a step ends as if the step had filled it."""

    def _save(self, request_id: str, tokens: int, metadata: StoreMetadata) -> None:
        super()._save(request_id, -(-tokens // self.block_size) * self.block_size, metadata)


class LaggingConnector(HonestConnector):
    """Saves one step late, when a block may belong to another request."""

    late: ClassVar[list[BlockTransfer]] = []

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        LaggingConnector.late, metadata.saves = metadata.saves, self.late
        super().wait_for_save()


class MiscountingConnector(HonestConnector):
    """Names a tier for one block less than it promises; vLLM asks since 0.32."""

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[str, int]:
        return {"host": num_external_tokens - self.block_size}


class AssertingConnector(HonestConnector):
    """Refuses a load with a bare assertion."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        assert not metadata.loads
        super().start_load_kv(forward_context, **kwargs)


class CorrectSubclass(ExampleConnector):
    """Adds nothing that could go wrong."""

    def update_state_after_alloc(self, *args: Any, **kwargs: Any) -> None:
        super().update_state_after_alloc(*args, **kwargs)


class BrokenSubclass(ExampleConnector):
    """Stores keys and values in the wrong order."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, kv_layer.flip(-1), attn_metadata, **kwargs)
