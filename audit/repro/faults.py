"""The faults of released engines whose cause is known: what goes wrong, where, and since when.

Here: texts, found by what a journal knows of a finding: the invariant, the release, and what the workload
contains. Not here: how each fault is reproduced by hand, which is in ``scripts/findings.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

SCHEDULER = "`Scheduler.{}` (`vllm/v1/core/sched/scheduler.py`)"


class Fault(NamedTuple):
    """One known fault.

    ``title``: the same in one line, with the engine as its subject. ``where``: the code at fault; empty if
    the cause is not known. ``ids``: the invariants that it violates. ``first`` and ``last``: the first and
    the last release of the matrix that has it, ``fixed`` the first without it; empty where none is known.
    ``needs``: what a workload contains that shows it, see :func:`traits`.
    """

    name: str
    title: str
    says: str
    where: str
    ids: tuple[str, ...]
    first: str
    last: str = ""
    fixed: str = ""
    needs: frozenset[str] = frozenset()
    reports: tuple[str, ...] = ()
    """Addresses of upstream's reports and fixes."""


def _vllm(*numbers: int) -> tuple[str, ...]:
    return tuple(f"https://github.com/vllm-project/vllm/issues/{number}" for number in numbers)


def _lmcache(*numbers: int) -> tuple[str, ...]:
    return tuple(f"https://github.com/LMCache/LMCache/issues/{number}" for number in numbers)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "placeholder-leak",
        "an output placeholder is left after a failed synchronous load",
        "Under async scheduling, the scheduler skips the output of a step whose synchronous load failed, and "
        "does not remove the placeholder of its token. The request keeps the placeholder until it ends: its "
        "next step is one token longer than its sequence, and every figure computed as computed tokens "
        "minus placeholders is one too low.",
        SCHEDULER.format("update_from_output") + ", for requests that `_handle_invalid_blocks` names",
        ("tokens/in-flight",),
        "0.12.0",
        needs=frozenset({"async", "failed load"}),
        reports=_vllm(57562),
    ),
    Fault(
        "failed-load-counted",
        "external tokens that failed to load are reported as external",
        "External tokens that failed to load and were computed instead stay in the external figure and are "
        "missing from the computed figure. Savings read from it credit the external cache with work that "
        "the device did. Upstream decided this deliberately (vLLM#37460), so kvledger calls it a drift.",
        SCHEDULER.format("schedule") + ", which sets `Request.prefill_stats`; a failure does not",
        ("connector/failed-load-counted",),
        "0.20.0",
        needs=frozenset({"failed load"}),
        reports=_vllm(37460),
    ),
    Fault(
        "failed-load-as-local-hit",
        "external tokens that failed to load are reported as a local hit",
        "External tokens that failed to load synchronously are subtracted from the external figure but not "
        "from the whole hit, and the local figure is the difference of the two. The front end reports a "
        "local prefix-cache hit where nothing was cached, and too few computed tokens.",
        SCHEDULER.format("_update_requests_with_invalid_blocks")
        + " and `PromptTokenStats.update_from_output` (`vllm/v1/metrics/stats.py`)",
        ("tokens/set-once",),
        "0.17.0",
        "0.19.1",
        "0.20.0",
        frozenset({"failed load"}),
        _vllm(37460),
    ),
    Fault(
        "ended-before-it-ran",
        "a request that ends before its first step is counted with -1 cached tokens",
        "A request that ends because its asynchronous load failed (policy `fail`), before its first step, "
        "still has -1 cached tokens, which means not set. The front end reads it as a number: it counts one "
        "computed token more than the prompt has, although nothing was computed. Up to 0.18.1 it also "
        "decrements a counter of local hits; 0.19.1 clamps the negative figure.",
        "`Request.num_cached_tokens`, and the error output in " + SCHEDULER.format("update_from_output"),
        ("tokens/negative", "tokens/source-sum"),
        "0.17.0",
        "0.19.1",
        "0.20.0",
        frozenset({"failed load", "policy fail"}),
    ),
    Fault(
        "negative-local-hit",
        "the local and external tokens of a prompt are from different admissions",
        "A request's cached tokens are set once, at its first admission, and the external part of them again "
        "at each later admission before the first output. After a preemption during prefill the two figures "
        "are of different admissions, and the front end reports their difference as the local hit. In "
        "0.18.1 and earlier the difference can be negative, and the Prometheus counter raises ValueError; "
        "0.19.1 clamps it to 0, and the sources no longer sum to the prompt.",
        SCHEDULER.format("schedule")
        + ", which sets `num_cached_tokens` and `num_external_computed_tokens`, and "
        + "`PromptTokenStats.update_from_output` (`vllm/v1/metrics/stats.py`)",
        ("tokens/negative", "tokens/source-sum", "tokens/set-once"),
        "0.16.0",
        "0.19.1",
        "0.20.0",
        frozenset({"connector"}),
        _vllm(36752, 36812, 37460),
    ),
    Fault(
        "reset-drops-valid-token",
        "a valid token is discarded after a reset of the prefix cache",
        "Under async scheduling, `reset_prefix_cache(reset_running_requests=True)` marks the next token of "
        "every running request to be discarded, even for a request in prefill, which has no token in "
        "flight. A later, valid token is discarded instead, and its placeholder stays. The token is "
        "computed again, and the request ends with one computed token too many.",
        SCHEDULER.format("reset_prefix_cache")
        + " and `AsyncScheduler._update_request_with_output` (`vllm/v1/core/sched/async_scheduler.py`)",
        ("tokens/in-flight",),
        "0.12.0",
        "0.20.0",
        "0.22.1",
        frozenset({"async", "reset"}),
    ),
    Fault(
        "rejection-of-a-past-life",
        "drafts rejected before a reset are subtracted after it",
        "A reset of the prefix cache preempts running requests while a step is in flight, whose output still "
        "arrives. Draft tokens rejected in it belong to the life that the reset ended, but are subtracted "
        "from the count of the new life, which then executes valid positions again.",
        SCHEDULER.format("update_from_output") + ", where rejected drafts are subtracted",
        ("tokens/unexplained-drop",),
        "0.12.0",
        "0.24.0",
        "0.27.1",
        frozenset({"reset", "drafts"}),
    ),
    Fault(
        "load-rounded-up",
        "an asynchronous load is rounded up to whole blocks",
        "When an asynchronous load ends, the scheduler sets the request's computed tokens to the size of all "
        "blocks that it holds, not to the promised tokens. So up to a block of tokens that were not loaded "
        "count as computed. They are never executed, and the output comes from blocks that were not filled.",
        SCHEDULER.format("_update_waiting_for_remote_kv"),
        ("tokens/balance",),
        "0.10.2",
        "0.17.0",
        "0.18.1",
        frozenset({"connector"}),
    ),
    Fault(
        "double-allocation",
        "one block is allocated for two KV cache groups of one request",
        "With more than one KV cache group, the blocks for external tokens are allocated group by group, and "
        "a group's local hits are touched only when its turn comes. The allocation for one group can take "
        "free blocks that another group has hit and not yet touched: one physical block is then in both "
        "block tables, both groups write to it, and attention reads what was written last.",
        "`KVCacheCoordinator.allocate_new_computed_blocks` (`vllm/v1/core/kv_cache_coordinator.py`) and "
        "`SingleTypeKVCacheManager.allocate_new_computed_blocks` "
        "(`vllm/v1/core/single_type_kv_cache_manager.py`)",
        ("blocks/double-allocation",),
        "0.14.0",
        "0.23.0",
        "0.24.0",
        frozenset({"connector", "groups"}),
        _vllm(44409, 33775, 43884),
    ),
    Fault(
        "failed-load-stays-cached",
        "blocks whose load failed stay in the prefix cache",
        "With the policy `recompute`, the blocks of a failed synchronous load keep their hashes, because the "
        "request will compute them. If the request is aborted or preempted before that, the blocks are "
        "never filled, and the next request with this prefix gets a hit on them: its output is made from "
        "their old content.",
        SCHEDULER.format("_handle_invalid_blocks") + ", which evicts them only under the policy `fail`",
        ("blocks/hash-content",),
        "0.12.0",
        needs=frozenset({"failed load"}),
    ),
    Fault(
        "session-waits-with-placeholders",
        "a session waits with output placeholders that nothing fills",
        "A session with drafts under async scheduling waits for its next chunk with output placeholders "
        "that no step in flight fills. It may never run again, and its blocks are never freed.",
        "",
        ("tokens/in-flight",),
        "0.27.1",
        "0.30.0",
        "0.32.0",
        frozenset({"async", "drafts", "session"}),
    ),
    Fault(
        "stale-lookup",
        "an admission uses the hit count of an earlier, failed attempt",
        "The scheduler asks how many tokens of a waiting request are cached, and the tracker keeps the "
        "answer. If the request can't be admitted, the answer stays. By the next attempt the cache has "
        "changed, but the old answer is used: tokens count as cached that are not, and their blocks are "
        "read without having been computed. Answers for requests that are ignored are never released.",
        "`Scheduler._schedule_prefills` (`vllm/core/scheduler.py`) and "
        "`ComputedBlocksTracker.get_num_cached_tokens` (`vllm/core/block/prefix_caching_block.py`)",
        ("tokens/stale-lookup",),
        "0.9.0",
        "0.9.1",
        "0.9.2",
        frozenset({"v0"}),
        _vllm(18957, 18955),
    ),
    Fault(
        "never-fits-again",
        "the prefix-cache lookup of an ignored request is never released",
        "A swapped group that no longer fits into the cache is ignored but not freed, and its prefix-cache "
        "lookup is never released. The engine keeps the result of the lookup for a request that has ended, "
        "one for each such request.",
        "`Scheduler._schedule_swapped` (`vllm/core/scheduler.py`)",
        ("tokens/stale-lookup",),
        "0.9.2",
        needs=frozenset({"v0"}),
    ),
    Fault(
        "promise-not-loaded",
        "the connector promises tokens to a resumed request and does not load them",
        "A request is preempted and resumes, and LMCache's adapter promises the tokens that its store has. "
        "But the connector metadata of that step has no load for a resumed request (`load_spec=None`). The "
        "request runs over blocks that were never filled.",
        "`LMCacheConnectorV1Impl.build_connector_meta` (`vllm_v1_adapter.py` of LMCache up to 0.3.9, and of "
        "the adapter that vLLM bundles)",
        ("connector/promise-not-loaded",),
        "0.3.9",
        "",
        "",
        frozenset({"lmcache"}),
        _lmcache(1969, 1361, 2007),
    ),
    Fault(
        "tracker-lag",
        "the connector loses track of a request's tokens, and never saves decoded ones",
        "Under async scheduling LMCache's adapter slices the request's tokens at the scheduler's count, "
        "which is ahead of the tokens. The slice is empty, so the adapter's own list of tokens stops "
        "growing, and decoded tokens are never saved.",
        "`LMCacheConnectorV1Impl.build_connector_meta` (`vllm_v1_adapter.py` of LMCache 0.3.10 to 0.4.2)",
        ("connector/tracker-lag", "connector/save-gap"),
        "0.3.10",
        "0.4.2",
        "0.4.3",
        frozenset({"lmcache", "async"}),
        _lmcache(2821, 2929),
    ),
)


def known(finding: str, release: str, traits: Collection[str]) -> Fault | None:
    """The fault behind a finding of this release; None if none is known, or none for sure.

    Of several that fit, the one that needs most of what the workload contains. ``release`` is the release
    of LMCache where the fault is LMCache's.
    """
    rows = [
        fault
        for fault in FAULTS
        if finding in fault.ids and fault.needs <= set(traits) and _within(release, fault)
    ]
    return max(rows, key=lambda fault: len(fault.needs), default=None)


def _within(release: str, fault: Fault) -> bool:
    if "lmcache" in fault.needs:
        return True  # a journal tells vLLM's release, not LMCache's
    first, last = parsed(fault.first), parsed(fault.last or "999")
    return first <= parsed(release)[: len(first)] and parsed(release)[: len(last)] <= last


def parsed(release: str) -> tuple[int, ...]:
    """The numbers of a release in front of its suffix: (0, 9, 1) for 0.9.1.post2."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, match[0].split("."))) if match else ()
