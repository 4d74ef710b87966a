"""The KV connectors of scripts: their answers to lookups come from the requests.

vLLM loads this module by its name (``kv_connector_module_path``), so it imports vLLM at the top; nothing else
in this package does. Only the scheduler side exists. What the worker side would report is in the script.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from ..engines.connector_metadata import register
from ..engines.connector_metadata.metadata_reader import MetadataReader
from .script import Answer


@dataclass(frozen=True)
class PlannedLoad:
    """One load that the connector metadata of a step orders, into these blocks of each group."""

    request_id: str
    external_tokens: int
    asynchronous: bool
    block_ids: tuple[tuple[int, ...], ...]


@dataclass
class PlannedLoads(KVConnectorMetadata):
    """The connector metadata of one step."""

    loads: tuple[PlannedLoad, ...] = ()


class WorkloadConnector(KVConnectorBase_V1):
    """Answers lookups, and plans every load that the scheduler accepts.

    An answer is used up when it was to ask again later, or when the request was admitted with it: an attempt
    that fails for lack of blocks gets the same answer again.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers: dict[str, deque[Answer]] = {}
        """The answers that each request has still to get."""
        self.holds: set[str] = set()
        """Requests whose blocks stay allocated after their end."""
        self.held: set[str] = set()
        """Those of them that have ended and were not sent yet."""
        self._asynchronous: dict[str, bool] = {}
        """Whether the last answer promised an asynchronous load, by request."""
        self._asked: set[str] = set()
        """Requests that asked since they were admitted last."""
        self._loads: list[PlannedLoad] = []
        """The loads that the next step orders."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answers = self.answers.get(request.request_id)
        answer = answers[0] if answers else 0
        self._asked.add(request.request_id)
        if answers and answer is None:
            answers.popleft()
        found, asynchronous = answer if isinstance(answer, tuple) else (answer, False)
        if found is not None:
            room = request.num_tokens - num_computed_tokens - (not asynchronous)
            found = max(0, min(found, room))
        self._asynchronous[request.request_id] = asynchronous
        return found, asynchronous and bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        answers = self.answers.get(name)
        if name in self._asked and answers:
            answers.popleft()
        self._asked.discard(name)
        if num_external_tokens:
            block_ids = tuple(map(tuple, blocks.get_block_ids()))
            self._loads.append(PlannedLoad(name, num_external_tokens, self._asynchronous[name], block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> PlannedLoads:
        loads, self._loads = tuple(self._loads), []
        return PlannedLoads(loads)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        delayed = request.request_id in self.holds
        if delayed:
            self.held.add(request.request_id)
        return delayed, None

    # The worker side: a workload has no worker.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class WorkloadHybridConnector(WorkloadConnector, SupportsHMA):
    """The same for pools with more than one KV cache group."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)


class PlannedLoadsReader(MetadataReader):
    """Reads the blocks that the planned loads fill."""

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        return {block for load in metadata.loads for group in load.block_ids for block in group}


class RecordedConnector(WorkloadConnector):
    """An answer is what the connector holds of the request, from its first token on, in place of what it
    holds beyond the local hit. So it fits any local hit. The last answer stays."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answers: Any = self.answers.get(request.request_id)
        if not answers or answers[0] is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        held, asynchronous, attempts, local = answer = answers[0]
        answers[0] = max(0, held - num_computed_tokens), asynchronous
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        answers[0] = answer if attempts < 2 else (held, asynchronous, attempts - 1, local)
        if attempts == 1:
            answers.popleft()
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        answers = self.answers.get(request.request_id)
        if answers is not None and len(answers) == 1:
            answers.append(answers[0])  # the last answer stays
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class RecordedHybridConnector(RecordedConnector, WorkloadHybridConnector):
    """The same for pools with more than one KV cache group."""


for each in (WorkloadConnector, WorkloadHybridConnector, RecordedConnector, RecordedHybridConnector):
    register(each.__name__, PlannedLoadsReader)
