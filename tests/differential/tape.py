"""Records what a scheduler's methods were given and returned, without kvledger's hooks.

The tape is raw material for :mod:`tests.differential.oracle`, and for tests that a scenario does what it
says: arguments, return values and the public state of requests before and after each call. Nothing is
interpreted here; fields of vLLM's objects are copied, because vLLM changes the objects later.
"""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FINISHED = "FINISHED"
"""The statuses of ended requests begin with this word."""


Cached = dict[int, tuple[int, Any]]
"""The KV cache group and the hash of each block that is in the prefix cache, by block id."""
Tables = tuple[tuple[int, ...], ...]
"""A request's blocks of each KV cache group."""


@dataclass(frozen=True)
class Group:
    """What the tokens of one KV cache group read."""

    kind: Literal["full", "sliding", "chunked", "state", "other"]
    """State: the checkpoint of the token before; other: what the oracle does not know."""
    block_size: int
    tokens: int = 0
    """Length of a window or a chunk."""

    def first_read(self, position: int) -> int:
        """The first position that the token at ``position`` reads."""
        if self.kind == "sliding":
            return max(0, position - self.tokens + 1)
        return position // self.tokens * self.tokens if self.kind == "chunked" else 0


def layout(config: Any) -> tuple[Group, ...]:
    """The groups of a scheduler's own KVCacheConfig."""
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        match type(spec).__name__:
            case "FullAttentionSpec":
                groups.append(Group("full", spec.block_size))
            case "SlidingWindowSpec":
                groups.append(Group("sliding", spec.block_size, spec.sliding_window))
            case "ChunkedLocalAttentionSpec":
                groups.append(Group("chunked", spec.block_size, spec.attention_chunk_size))
            case "MambaSpec":
                groups.append(Group("state", spec.block_size))
            case _:
                groups.append(Group("other", spec.block_size))
    return tuple(groups)


@dataclass(frozen=True)
class State:
    """A request's public state at one instant."""

    status: str
    computed: int
    tokens: int
    prompt_tokens: int
    tables: Tables

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of the first KV cache group."""
        return self.tables[0] if self.tables else ()

    @property
    def finished(self) -> bool:
        return self.status.startswith(FINISHED)


@dataclass(frozen=True)
class Added:
    """`add_request` took a request, or a chunk of a session. ``before``: the session's state."""

    request_id: str
    before: State | None
    after: State
    resumable: bool


@dataclass(frozen=True)
class LookedUp:
    """The prefix cache was looked up for a request that may read it."""

    request_id: str
    tokens: int
    """Length of the request's sequence."""
    local: int


@dataclass(frozen=True)
class Matched:
    """The connector answered a lookup. ``external`` is None if it asks to be asked again."""

    request_id: str
    local: int
    external: int | None
    asynchronous: bool


@dataclass(frozen=True)
class Allocated:
    """`allocate_slots` gave a request without computed tokens its blocks."""

    request_id: str
    sequence: tuple[int, ...]
    """The token ids of the request so far."""
    local: int
    external: int
    asynchronous: bool
    tables: Tables


@dataclass(frozen=True)
class Preempted:
    """A running request was put back into the waiting queue. ``dropped``: with a step's output in flight.

    ``reset``: by a reset of the prefix cache.
    """

    request_id: str
    dropped: bool
    reset: bool


@dataclass(frozen=True)
class Arrived:
    """An asynchronous load ended: the request's count before and after the scheduler took it over."""

    request_id: str
    before: int
    after: int


@dataclass(frozen=True)
class Scheduled:
    """`schedule()` returned a step. ``rows``: scheduled and draft tokens by request."""

    rows: dict[str, tuple[int, int]]
    computed: dict[str, int]
    """Computed tokens of the scheduled requests before they are advanced by this step."""
    tables: dict[str, Tables]
    sequences: dict[str, tuple[int, ...]]
    """Their token ids, as far as the scheduler knows them; those of an encoder input stand for the input."""
    cached: Cached


@dataclass(frozen=True)
class Output:
    """`update_from_output` took the output of the oldest step."""

    step: dict[str, tuple[int, int]]
    """The rows of the step."""
    sampled: dict[str, tuple[int, ...]]
    """Token ids that the model sampled."""
    invalid_blocks: frozenset[int]
    received: frozenset[str]
    failed: frozenset[str]
    """Requests whose load failed as a whole."""
    before: dict[str, State]
    after: dict[str, State]
    returned: dict[str, int]
    """Tokens handed to the client by request; a request without tokens has 0 if its end is reported."""
    ended: frozenset[str]
    """Requests whose output has a finish reason."""
    cached: Cached


@dataclass(frozen=True)
class Aborted:
    """`finish_requests` was called from outside the scheduler."""

    before: dict[str, State]
    after: dict[str, State]
    cached: Cached


@dataclass(frozen=True)
class Reset:
    """The prefix cache was reset, or the scheduler refused."""

    succeeded: bool


@dataclass(frozen=True)
class WeightsChanged:
    """The weights changed. The scheduler is not told."""


Fact = (
    Added
    | LookedUp
    | Matched
    | Allocated
    | Preempted
    | Arrived
    | Scheduled
    | Output
    | Aborted
    | Reset
    | WeightsChanged
)


@dataclass
class LookupStats:
    """Sums of the prefix-cache statistics that the scheduler returns."""

    requests: int = 0
    queries: int = 0
    hits: int = 0

    def add(self, stats: Any) -> None:
        for name in ("requests", "queries", "hits"):
            both = getattr(stats, name) + getattr(stats, f"preempted_{name}", 0)
            setattr(self, name, getattr(self, name) + both)


@dataclass
class Tape:
    """Everything recorded of one scheduler, oldest first."""

    facts: list[Fact] = field(default_factory=list)
    local_stats: LookupStats = field(default_factory=LookupStats)
    external_stats: LookupStats = field(default_factory=LookupStats)
    prefixes: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    """The token ids up to the end of a block, by the block's hash."""
    raised: bool = False
    """Whether a method of the scheduler raised an exception."""
    layout: tuple[Group, ...] = ()
    null_block: int = -1
    _scheduler: Any = None
    _resetting: bool = False
    _ended_by_output: bool = False
    """Whether `update_from_output` is running: the requests that it ends are part of its own record."""

    def attach(self, scheduler: Any) -> None:
        """Wrap the methods of a scheduler that has no requests yet."""
        self._scheduler = scheduler
        scheduler.note_weights = lambda: self.facts.append(WeightsChanged())
        self.layout = layout(scheduler.kv_cache_config)
        self.null_block = scheduler.kv_cache_manager.block_pool.null_block.block_id
        for name in (
            "add_request",
            "finish_requests",
            "schedule",
            "update_from_output",
            "reset_prefix_cache",
        ):
            self._wrap(scheduler, name, getattr(self, f"_of_{name}"))
        self._wrap(scheduler, "_preempt_request", self._of_preempt_request)
        self._wrap(scheduler.kv_cache_manager, "allocate_slots", self._of_allocate_slots)
        self._wrap(scheduler.kv_cache_manager, "get_computed_blocks", self._of_lookup)
        coordinator = scheduler.kv_cache_manager.coordinator
        if hasattr(coordinator, "find_longest_cache_hit_per_group"):
            self._wrap(coordinator, "find_longest_cache_hit_per_group", self._of_lookup_by_group)
        self._wrap(scheduler, "_update_waiting_for_remote_kv", self._of_arrival)
        if scheduler.connector is not None:
            self._wrap(scheduler.connector, "get_num_new_matched_tokens", self._of_match)

    def _wrap(self, owner: Any, name: str, record: Callable[..., Any]) -> None:
        call = getattr(owner, name)

        def recording(*args: Any, **kwargs: Any) -> Any:
            try:
                return record(call, *args, **kwargs)
            except Exception:
                self.raised = True
                raise

        recording.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
        setattr(owner, name, recording)

    def _state(self, request: Any) -> State:
        known = request.request_id in self._scheduler.requests
        return State(
            request.status.name,
            request.num_computed_tokens,
            request.num_tokens,
            request.num_prompt_tokens,
            self._tables(request) if known else (),
        )

    def _tables(self, request: Any) -> Tables:
        with contextlib.suppress(KeyError):
            return tuple(map(tuple, self._scheduler.kv_cache_manager.get_block_ids(request.request_id)))
        return ()

    def _states(self, requests: list[Any]) -> dict[str, State]:
        return {request.request_id: self._state(request) for request in requests}

    def _cached(self) -> Cached:
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        keys = [
            (block.block_id, block.block_hash) for block in self._scheduler.kv_cache_manager.block_pool.blocks
        ]
        return {number: (get_group_id(key), get_block_hash(key)) for number, key in keys if key is not None}

    def _note_hashes(self) -> None:
        size = self._scheduler.block_size
        for request in self._scheduler.requests.values():
            for number, block_hash in enumerate(request.block_hashes, 1):
                if block_hash not in self.prefixes:
                    self.prefixes[block_hash] = _sequence(request)[: number * size]

    # The wrapped methods.

    def _of_add_request(self, call: Callable[..., Any], request: Any) -> Any:
        known = self._scheduler.requests.get(request.request_id)
        before = self._state(known) if known is not None else None
        result = call(request)
        request = known if known is not None else request
        self.facts.append(
            Added(request.request_id, before, self._state(request), getattr(request, "resumable", False))
        )
        return result

    def _of_finish_requests(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._ended_by_output:
            return call(*args, **kwargs)
        requests = list(self._scheduler.requests.values())
        before = self._states(requests)
        result = call(*args, **kwargs)
        self.facts.append(Aborted(before, self._states(requests), self._cached()))
        return result

    def _of_preempt_request(self, call: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = bool(kwargs.get("drop_stale_output") and request.num_in_flight_tokens)
        result = call(request, *args, **kwargs)
        self.facts.append(Preempted(request.request_id, dropped, self._resetting))
        return result

    def _of_arrival(self, call: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        before = request.num_computed_tokens
        result = call(request, *args, **kwargs)
        if result is not False:  # up to 0.17 the scheduler asks until the load has ended
            self.facts.append(Arrived(request.request_id, before, request.num_computed_tokens))
        return result

    def _of_reset_prefix_cache(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        succeeded, self._resetting = False, True
        try:
            succeeded = bool(call(*args, **kwargs))
        finally:
            self._resetting = False
            self.facts.append(Reset(succeeded))
        return succeeded

    def _of_allocate_slots(self, call: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(call).bind(request, *args, **kwargs)
        given = bound.arguments
        admission = "new_computed_blocks" in given and request.num_computed_tokens == 0
        result = call(request, *args, **kwargs)
        if admission and result is not None:
            self.facts.append(
                Allocated(
                    request.request_id,
                    _sequence(request),
                    given.get("num_new_computed_tokens", 0),
                    given.get("num_external_computed_tokens", 0),
                    bool(given.get("delay_cache_blocks", False)),
                    self._tables(request),
                )
            )
        return result

    def _of_lookup(self, call: Callable[..., Any], request: Any, *args: Any) -> Any:
        result = call(request, *args)
        exempt = getattr(request, "skip_reading_prefix_cache", False)
        if self._scheduler.kv_cache_manager.enable_caching and not exempt:
            self.facts.append(LookedUp(request.request_id, request.num_tokens, result[1]))
        return result

    def _of_lookup_by_group(self, call: Callable[..., Any], block_hashes: Any, *args: Any) -> Any:
        """The scheduler itself looks up a request of a model with states, where it has a connector."""
        result = call(block_hashes, *args)
        for request in self._scheduler.requests.values():
            if request.block_hashes is block_hashes:
                self.facts.append(LookedUp(request.request_id, request.num_tokens, max(result[1])))
        return result

    def _of_match(self, call: Callable[..., Any], request: Any, local: int) -> Any:
        external, asynchronous = call(request, local)
        self.facts.append(Matched(request.request_id, local, external, asynchronous))
        return external, asynchronous

    def _of_schedule(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scheduled = call(*args, **kwargs)
        rows = _rows(scheduled)
        computed = {
            name: self._scheduler.requests[name].num_computed_tokens - tokens
            for name, (tokens, _) in rows.items()
        }
        requests = [self._scheduler.requests[name] for name in rows]
        tables = {request.request_id: self._state(request).tables for request in requests}
        sequences = {request.request_id: _sequence(request) for request in requests}
        self._note_hashes()
        self.facts.append(Scheduled(rows, computed, tables, sequences, self._cached()))
        return scheduled

    def _of_update_from_output(self, call: Callable[..., Any], scheduled: Any, answer: Any) -> Any:
        requests = list(self._scheduler.requests.values())
        before = self._states(requests)
        # vLLM cuts the lists of sampled tokens at a stop, so they are counted before the call.
        lists = answer.sampled_token_ids or [[] for _ in answer.req_ids]
        sampled = {name: tuple(tokens) for name, tokens in zip(answer.req_ids, lists, strict=True)}
        self._ended_by_output = True
        try:
            outputs = call(scheduled, answer)
        finally:
            self._ended_by_output = False
        self._note_hashes()
        transfers = answer.kv_connector_output
        returned: dict[str, int] = {}
        ended: set[str] = set()
        for of_client in outputs.values():
            for output in of_client.outputs:
                returned[output.request_id] = len(output.new_token_ids)
                if output.finish_reason is not None:
                    ended.add(output.request_id)
            self._add_stats(of_client.scheduler_stats)
        self.facts.append(
            Output(
                _rows(scheduled),
                sampled,
                _given(transfers, "invalid_block_ids"),
                _given(transfers, "finished_recving"),
                _given(transfers, "failed_recving"),
                before,
                self._states(requests),
                returned,
                frozenset(ended),
                self._cached(),
            )
        )
        return outputs

    def _add_stats(self, stats: Any) -> None:
        if stats is None:
            return
        if stats.prefix_cache_stats is not None:
            self.local_stats.add(stats.prefix_cache_stats)
        if getattr(stats, "connector_prefix_cache_stats", None) is not None:
            self.external_stats.add(stats.connector_prefix_cache_stats)


def _sequence(request: Any) -> tuple[int, ...]:
    """A request's token ids; negative ones, made of its name, in the place of an encoder input."""
    sequence = list(request.all_token_ids)
    for feature in getattr(request, "mm_features", None) or ():
        at = feature.mm_position
        sequence[at.offset : at.offset + at.length] = [
            -1 - zlib.crc32(feature.identifier.encode())
        ] * at.length
    return tuple(sequence)


def _rows(scheduled: Any) -> dict[str, tuple[int, int]]:
    drafts = scheduled.scheduled_spec_decode_tokens
    return {
        name: (tokens, len(drafts.get(name, ()))) for name, tokens in scheduled.num_scheduled_tokens.items()
    }


def _given(transfers: Any, name: str) -> frozenset[Any]:
    return frozenset(getattr(transfers, name, None) or ())
