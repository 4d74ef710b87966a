"""A KV connector whose answers are scripted; scheduler side only.

vLLM loads this module by its name (`kv_connector_module_path`), so the module imports vLLM at the top. The
driver does not import this module; it gets the connector from the scheduler.

A lookup is answered by the first rule that applies:

- `answer_lookups(request_id, *answers)`: one answer for each lookup of the request, until none is left;
- `store(request_id, tokens)`: the external cache holds the first `tokens` of the sequence, in whole
  blocks; a synchronous hit leaves the last token to compute, an asynchronous hit may cover it, unless the
  model has states: the engine computes the last token again, which a state can't undo;
- otherwise the external cache holds nothing.
"""

# mypy: disallow-subclassing-any=False

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.scenarios.scripted_reader import ScriptedReader
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from kvledger.audit.engines.connector_metadata import register

Answer = int | tuple[int, bool] | None
"""External tokens beyond the local hit; with True where they load asynchronously; None to defer."""


@dataclass(frozen=True)
class ScriptedLoad:
    """One load that the connector metadata of a step orders."""

    request_id: str
    external_tokens: int
    asynchronous: bool
    block_ids: tuple[tuple[int, ...], ...]
    """For each KV cache group, the blocks that the request held when the load was ordered."""


@dataclass
class ScriptedMetadata(KVConnectorMetadata):
    """The connector metadata of one step."""

    loads: tuple[ScriptedLoad, ...] = ()


@dataclass(frozen=True)
class LookupCall:
    request_id: str
    local_tokens: int
    answer: tuple[int | None, bool]


@dataclass(frozen=True)
class AllocatedCall:
    request_id: str
    external_tokens: int


@dataclass(frozen=True)
class FinishedCall:
    request_id: str
    delayed: bool


@dataclass(frozen=True)
class TiersCall:
    request_id: str
    external_tokens: int


Call = LookupCall | TiersCall | AllocatedCall | FinishedCall | ScriptedMetadata


@dataclass
class Script:
    """The connector's scripted answers, and the calls that it received, in order."""

    answers: dict[str, deque[Answer]] = field(default_factory=dict)
    stored: dict[str, tuple[int, bool]] = field(default_factory=dict)
    delay_free: set[str] = field(default_factory=set)
    """Requests whose blocks stay allocated after they finish, until `finished_sending` lists them."""
    cut: set[str] = field(default_factory=set)
    """Requests whose prompt loses its last token when the connector is asked, as NIXL does for states."""
    failing: set[str] = field(default_factory=set)
    """Names of methods that raise AssertionError."""
    sources: Callable[[str, int], dict[str, int]] | None = None
    """The tiers that hold so many external tokens of a request; vLLM asks since 0.32."""
    calls: list[Call] = field(default_factory=list)


class ScriptedConnector(KVConnectorBase_V1):
    """The scripted scheduler side of an external cache; the worker side is never called."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.script = Script()
        self.block_size: int = vllm_config.cache_config.block_size
        self.held: set[str] = set()
        """Finished requests whose blocks stay allocated for a transfer."""
        self._loads: list[ScriptedLoad] = []
        self._answered: dict[str, bool] = {}
        groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
        self._has_states = any(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups)

    # Calls of tests.

    def answer_lookups(self, request_id: str, *answers: Answer) -> None:
        self.script.answers.setdefault(request_id, deque()).extend(answers)

    def store(self, request_id: str, tokens: int, *, asynchronous: bool = False) -> None:
        self.script.stored[request_id] = (tokens, asynchronous)

    def calls(self, kind: type[Any]) -> list[Any]:
        """The calls and metadata of one kind, in order."""
        return [call for call in self.script.calls if isinstance(call, kind)]

    def _answer(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        answers = self.script.answers.get(request.request_id)
        if answers:
            answer = answers.popleft()
            return answer if isinstance(answer, tuple) else (answer, False)
        stored, asynchronous = self.script.stored.get(request.request_id, (0, False))
        limit = request.num_tokens if asynchronous and not self._has_states else request.num_tokens - 1
        hit_tokens = min(stored, limit) // self.block_size * self.block_size
        external = max(0, hit_tokens - local_tokens)
        return external, asynchronous and external > 0

    def _fail(self, method: str) -> None:
        assert method not in self.script.failing, "tokens 1 2 3 of a prompt"

    # Calls of the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._fail("get_num_new_matched_tokens")
        if request.request_id in self.script.cut:
            self.script.cut.discard(request.request_id)
            request.prompt_token_ids.pop()
            request._all_token_ids.pop()
            request.num_prompt_tokens -= 1
        answer = self._answer(request, num_computed_tokens)
        self._answered[request.request_id] = answer[1]
        self.script.calls.append(LookupCall(request.request_id, num_computed_tokens, answer))
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id = request.request_id
        self.script.calls.append(AllocatedCall(request_id, num_external_tokens))
        if num_external_tokens:
            block_ids = tuple(map(tuple, blocks.get_block_ids()))
            asynchronous = self._answered[request_id]
            self._loads.append(ScriptedLoad(request_id, num_external_tokens, asynchronous, block_ids))

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        if self.script.sources is None:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        self.script.calls.append(TiersCall(request.request_id, num_external_tokens))
        return self.script.sources(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ScriptedMetadata:
        self._fail("build_connector_meta")
        metadata = ScriptedMetadata(tuple(self._loads))
        self._loads.clear()
        if metadata.loads:
            self.script.calls.append(metadata)
        return metadata

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._fail("request_finished")
        delayed = request.request_id in self.script.delay_free
        if delayed:
            self.held.add(request.request_id)
        self.script.calls.append(FinishedCall(request.request_id, delayed))
        return delayed, None

    # The worker side: the driver has no worker.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class ScriptedHybridConnector(ScriptedConnector, SupportsHMA):
    """A scripted connector for pools with more than one KV cache group."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)


register(ScriptedConnector.__name__, ScriptedReader)
register(ScriptedHybridConnector.__name__, ScriptedReader)
