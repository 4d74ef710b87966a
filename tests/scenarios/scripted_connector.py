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

from kvledger.audit.engines.connector_metadata import register
from kvledger.audit.traffic.connector import (
    PlannedLoads,
    PlannedLoadsReader,
    WorkloadConnector,
    WorkloadHybridConnector,
)
from kvledger.audit.traffic.script import Answer


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


Call = LookupCall | TiersCall | AllocatedCall | FinishedCall | PlannedLoads


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


class ScriptedConnector(WorkloadConnector):
    """The scripted scheduler side of an external cache."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.script = Script()
        self.holds = self.script.delay_free
        self.block_size: int = vllm_config.cache_config.block_size
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
        self._asynchronous[request.request_id] = answer[1]
        self.script.calls.append(LookupCall(request.request_id, num_computed_tokens, answer))
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.script.calls.append(AllocatedCall(request.request_id, num_external_tokens))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        if self.script.sources is None:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        self.script.calls.append(TiersCall(request.request_id, num_external_tokens))
        return self.script.sources(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PlannedLoads:
        self._fail("build_connector_meta")
        metadata = super().build_connector_meta(scheduler_output)
        if metadata.loads:
            self.script.calls.append(metadata)
        return metadata

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._fail("request_finished")
        delayed, parameters = super().request_finished(request, block_ids)
        self.script.calls.append(FinishedCall(request.request_id, delayed))
        return delayed, parameters


class ScriptedHybridConnector(ScriptedConnector, WorkloadHybridConnector):
    """A scripted connector for pools with more than one KV cache group."""


register(ScriptedConnector.__name__, PlannedLoadsReader)
register(ScriptedHybridConnector.__name__, PlannedLoadsReader)
