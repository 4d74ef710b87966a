"""Upstream defects, put back into a live vLLM 0.32 on purpose.

Here: one table of patches to the engine's own classes, in this process, before the engine is built.
Each makes 0.32 do what a release did before its fix, no more, so that what an audit finds is what it
would have found then. Not here: the demo's run (engine.py), and any observation. An entry whose
`apply` does nothing needs no patch: its workload shows a defect that 0.32 still has.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvledger.audit.demo.workload import (
    CROWDED,
    EVICTED_WHILE_WAITING,
    OLDEST_HIT,
    OUTGROWN,
    Wave,
)

Refusals = list[str]
"""What the engine's own counters said when they refused a figure; a result names it."""


@dataclass(frozen=True)
class Injection:
    """A defect on demand: what it is, where it was reported, and what should find it."""

    name: str
    summary: str
    reference_url: str
    expected_invariant: str
    apply: Callable[[Refusals], None]
    waves: tuple[Wave, ...] = CROWDED


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts `make(original)` where `owner.name` is, under the original's name and signature."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _external_asked_again(local: Callable[[int], int]) -> None:
    """At a re-admission in mid-prefill the external figure is taken anew, the sum stays frozen.

    Up to 0.19.1 `num_cached_tokens` was set once and `num_external_computed_tokens` at every
    look-up; the front end called the difference a local hit. `local` is what it made of that.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def make(original: Any) -> Any:
        def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            figures, again = request.prefill_stats, request.num_preemptions > 0
            if again and figures and "num_external_computed_tokens" in kwargs:
                external_tokens = kwargs["num_external_computed_tokens"]
                figures.num_external_cached_tokens = external_tokens
                figures.num_local_cached_tokens = local(figures.num_cached_tokens - external_tokens)
            return original(self, request, *args, **kwargs)

        return allocate_slots

    _replace(KVCacheManager, "allocate_slots", make)


def _negative_local_hit(refusals: Refusals) -> None:
    """The difference goes out as it is. The engine's counter refuses it; we let the engine live.

    Upstream the refusal ended the server's step. What the counter had not yet taken of that
    iteration is lost here as it was there.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    def make(original: Any) -> Any:
        def record(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(self, *args, **kwargs)
            except ValueError as refusal:
                refusals.append(str(refusal))

        return record

    _external_asked_again(lambda tokens: tokens)
    _replace(PrometheusStatLogger, "record", make)


def _clamped_local_hit(refusals: Refusals) -> None:
    _external_asked_again(lambda tokens: max(0, tokens))


def _promise_not_loaded(refusals: Refusals) -> None:
    """The load plan leaves out requests that resume, whatever was promised for them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    def make(original: Any) -> Any:
        def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
            for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
                self._requests_need_load.pop(request_id, None)
            return original(self, scheduler_output)

        return build_connector_meta

    _replace(ExampleConnector, "build_connector_meta", make)


def _lookup_counted(refusals: Refusals) -> None:
    """The look-up counts itself, whether or not it leads to an admission."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    count = KVCacheManager.record_prefix_cache_stats

    def looked_up(original: Any) -> Any:
        def get_computed_blocks(self: Any, request: Any) -> Any:
            found = original(self, request)
            count(self, request, found[1])
            return found

        return get_computed_blocks

    def admitted(original: Any) -> Any:
        return lambda self, request, num_hits: None

    _replace(KVCacheManager, "get_computed_blocks", looked_up)
    _replace(KVCacheManager, "record_prefix_cache_stats", admitted)


def _stale_lookup(refusals: Refusals) -> None:
    """What a failed attempt found is used at the next one, though the cache has moved on."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    found_before: dict[str, Any] = {}

    def looked_up(original: Any) -> Any:
        def get_computed_blocks(self: Any, request: Any) -> Any:
            if request.request_id not in found_before:
                found_before[request.request_id] = original(self, request)
            return found_before[request.request_id]

        return get_computed_blocks

    def allocated(original: Any) -> Any:
        def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = original(self, request, *args, **kwargs)
            if blocks is not None:
                found_before.pop(request.request_id, None)
            return blocks

        return allocate_slots

    _replace(KVCacheManager, "get_computed_blocks", looked_up)
    _replace(KVCacheManager, "allocate_slots", allocated)


def _double_allocation(refusals: Refusals) -> None:
    """The blocks of an external hit come out of the free queue while the local hits still lie in it.

    Upstream this needed two cache groups, one taking what the other had found. Here one group does
    both, and its order is turned round; the effect is the same block twice in a request's table.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    def make(original: Any) -> Any:
        def allocate_new_computed_blocks(self: Any, *args: Any, **kwargs: Any) -> None:
            late: list[Any] = []
            with patch.object(self.block_pool, "touch", late.append):
                original(self, *args, **kwargs)
            for hits in late:
                self.block_pool.touch(hits)

        return allocate_new_computed_blocks

    _replace(KVCacheCoordinator, "allocate_new_computed_blocks", make)


def _nothing(refusals: Refusals) -> None:
    """The released engine does it unaided."""


_TABLE = (
    Injection(
        "negative-local-hit",
        "a request preempted in mid-prefill reports fewer than no local tokens",
        "https://github.com/vllm-project/vllm/pull/36752",
        "tokens/negative",
        _negative_local_hit,
    ),
    Injection(
        "clamped-local-hit",
        "the same, cut off at nought as in 0.19.1: the sources no longer add up to the prompt",
        "https://github.com/vllm-project/vllm/pull/36752",
        "tokens/source-sum",
        _clamped_local_hit,
    ),
    Injection(
        "promise-not-loaded",
        "a resumed request's external tokens are promised, counted and never loaded",
        "https://github.com/LMCache/LMCache/issues/1969",
        "connector/promise-not-loaded",
        _promise_not_loaded,
    ),
    Injection(
        "lookup-counted",
        "the prefix cache counts a look-up at every failed attempt to admit, as up to 0.26",
        "https://github.com/vllm-project/vllm/issues/43736",
        "tokens/lookup-counted-once",
        _lookup_counted,
    ),
    Injection(
        "stale-lookup",
        "an admission uses what an earlier, failed attempt found in the cache, as v0 did",
        "https://github.com/vllm-project/vllm/pull/18957",
        "tokens/stale-lookup",
        _stale_lookup,
        EVICTED_WHILE_WAITING,
    ),
    Injection(
        "double-allocation",
        "blocks for external tokens are taken before the local hits are held, and may be those",
        "https://github.com/vllm-project/vllm/pull/44409",
        "blocks/double-allocation",
        _double_allocation,
        OLDEST_HIT,
    ),
    Injection(
        "negative-match",
        "no patch: 0.32's ExampleConnector answers below nought once the local hit outgrew the prompt",
        "https://github.com/LMCache/LMCache/issues/2158",
        "connector/negative-match",
        _nothing,
        OUTGROWN,
    ),
)

INJECTIONS = {injection.name: injection for injection in _TABLE}
