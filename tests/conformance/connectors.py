"""Connectors for the score card: one that keeps its word in every row, and some that do not.

The store is a table in this process, of whole blocks by all tokens up to their end. vLLM imports this
module by its name, or finds it by ``--module``.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Move:
    """One block, by the tokens up to its end."""

    request_id: str
    block: int
    key: tuple[int, ...]


@dataclass
class Plan(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


class HonestConnector(KVConnectorBase_V1):
    """Loads what it promised, within the step; has no answer the first time it is asked."""

    STORES: ClassVar[dict[str, dict[tuple[int, ...], dict[str, Any]]]] = {}
    LATER: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.store = self.STORES.setdefault(options.get("store", ""), {})
        self.size = vllm_config.cache_config.block_size
        self.caches: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._local: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._loads: dict[str, list[Move]] = {}
        self._saved: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._received: set[str] = set()
        self._failed: set[int] = set()

    # The scheduler's side.

    def _keys(self, request: Any) -> list[tuple[int, ...]]:
        tokens = tuple(request.all_token_ids)
        return [tokens[:end] for end in range(self.size, len(tokens) + 1, self.size)]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id not in self._asked:
            self._asked.add(request.request_id)
            return None, False
        self._local[request.request_id] = num_computed_tokens
        held = 0
        for key in self._keys(request):
            if key not in self.store:
                break
            held += self.size
        most = request.num_tokens - (0 if self.LATER else 1)
        external = max(0, min(held, most) - num_computed_tokens)
        return external, self.LATER and external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name, ids = request.request_id, list(blocks.get_block_ids()[0])
        self._requests[name], self._blocks[name], self._saved[name] = request, ids, 0
        if num_external_tokens:
            keys = self._keys(request)
            last = -(-(self._local[name] + num_external_tokens) // self.size)
            self._loads[name] = [Move(name, ids[n], keys[n]) for n in range(min(last, len(keys)))]

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan = Plan([move for moves in self._loads.values() for move in moves])
        self._loads = {}
        cached = scheduler_output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more and name not in cached.resumed_req_ids:
                self._blocks[name] += more[0]
        for name, count in scheduler_output.num_scheduled_tokens.items():
            self._save(name, starts[name] + count, plan)
        return plan

    def _save(self, name: str, tokens: int, plan: Plan) -> None:
        """Blocks that this step completes, of tokens that are known."""
        keys = self._keys(self._requests[name])
        for place in range(self._saved[name], min(tokens // self.size, len(keys))):
            plan.saves.append(Move(name, self._blocks[name][place], keys[place]))
            self._saved[name] = place + 1

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        for move in plan.loads:
            for layer, cache in self.caches.items():
                cache[move.block] = self.stored(move)[layer]
            if self.LATER:
                self._received.add(move.request_id)

    def stored(self, move: Move) -> dict[str, Any]:
        """What is stored of a block."""
        return self.store[move.key]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """It came in :meth:`start_load_kv`."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """In :meth:`wait_for_save`."""

    def wait_for_save(self) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        for move in plan.saves:
            self.store[move.key] = {name: cache[move.block].clone() for name, cache in self.caches.items()}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None


class LaterConnector(HonestConnector):
    """Loads asynchronously, and may cover the whole prompt."""

    LATER = True


class ForgetfulConnector(HonestConnector):
    """Promises to a request that resumes, and never loads (LMCache#1969)."""

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        for name in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._loads.pop(name, None)
        return super().build_connector_meta(scheduler_output)


class FailingConnector(HonestConnector):
    """Once its store is down, promises as before and reports every block of a load as failed."""

    down: ClassVar[bool] = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        if self.down:
            self._failed |= {move.block for move in plan.loads}
            plan.loads = []
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


class MuddledConnector(HonestConnector):
    """Loads, for any block, the one that was stored first."""

    def stored(self, move: Move) -> dict[str, Any]:
        return next(iter(self.store.values()))
