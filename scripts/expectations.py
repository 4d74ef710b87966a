"""What the release matrix expects: the upstream reports, and other faults of released engines.

A release has its name in scripts/releases.py. A scenario is a name of `tests/scenarios`, or the common
beginning of the names of its variants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """An upstream report: the scenarios that drive an engine into it, and the releases that have it."""

    key: str
    scenarios: tuple[str, ...]
    ids: tuple[str, ...]
    found_in: tuple[str, ...]
    reference: tuple[str, str]
    says: str
    settles: Mapping[str, Mapping[str, list[list[int]]]] = field(default_factory=dict)
    """By scenario and request: local, external, computed and unattained tokens, equal in every release."""

    def drives(self, scenario: str) -> bool:
        """Whether a scenario drives an engine into the fault; variants of a scenario share its name."""
        return scenario.startswith(self.scenarios)


@dataclass(frozen=True)
class Known:
    """A fault of released engines that the scenarios show beyond the reports.

    ``host_fails``: the scenario can't be driven to its end in these releases, so its accounts are not
    checked. ``id`` is empty if the audit finds nothing.
    """

    id: str
    scenarios: tuple[str, ...]
    first: str
    last: str
    why: str
    host_fails: bool = False

    def covers(self, scenario: str, release: str) -> bool:
        """Whether the audit may find the fault in this scenario of this release."""
        return scenario.startswith(self.scenarios) and _number(self.first) <= _number(release) <= _number(
            self.last
        )


@dataclass(frozen=True)
class Drift:
    """A drift of a figure: the scenarios that must show it, in the releases that have it, and in no other.

    Other scenarios of these releases may show it too; tests/engines/test_corpus.py names all of vLLM 0.32.
    """

    id: str
    scenarios: tuple[str, ...]
    first: str
    last: str = "0.33.0"

    def covers(self, release: str) -> bool:
        """Whether the release has the drift; what LMCache runs with is not told apart."""
        package, number = _number(release)
        return bool(package) or _number(self.first)[1] <= number <= _number(self.last)[1]

    def shows(self, scenario: str, release: str) -> bool:
        """Whether the audit must find the drift in this scenario of this release."""
        return scenario in self.scenarios and not _number(release)[0] and self.covers(release)


def _number(release: str) -> tuple[str, tuple[int, ...]]:
    """The package, "" for vLLM, and the numbers of its version; a pre-release counts as its release."""
    package, _, version = release.partition("/")[0].removesuffix("-v0").rpartition("-")
    numbers = re.match(r"[\d.]*\d", version)
    assert numbers is not None
    return package, tuple(map(int, numbers[0].split(".")))


REPORTS: tuple[Report, ...] = (
    Report(
        "stale-lookup",
        (
            "too_few_blocks_at_first",
            "no_budget_of_requests",
            "no_budget_of_tokens",
            "no_budget_of_chunks",
            "no_room_for_its_lora",
            "no_embeds_beside_tokens",
            "preempts_by_priority",
            "behind_the_swapped",
            "preempted_and_tried_again",
            "ignored_too_long",
            "ignored_never_fits",
            "aborted_after_an_attempt",
        ),
        ("tokens/stale-lookup",),
        ("0.9.1-v0",),
        ("vLLM#18957", "https://github.com/vllm-project/vllm/pull/18957"),
        "a later admission used the hit count of a failed attempt, or the count was never released.",
    ),
    Report(
        "negative-local-hit",
        ("asked_again_after_preemption", "external_preempted"),
        ("tokens/negative", "tokens/source-sum", "tokens/set-once"),
        ("0.17.0", "0.18.1", "0.19.1"),
        ("vLLM#36752", "https://github.com/vllm-project/vllm/pull/36752"),
        "the engine's external figure is from a later admission than its total: their difference is negative "
        "in 0.17.0 and 0.18.1, and clamped in 0.19.1 so that the sources no longer add up. The settled "
        "figures are right, and equal in every release.",
        settles={"asked_again_after_preemption": {"r": [[0, 104, 96, 0]]}},
    ),
    Report(
        "double-allocation",
        ("double_allocation",),
        ("blocks/double-allocation",),
        ("0.17.0", "0.18.1", "0.19.1", "0.20.0", "0.22.1", "0.23.0"),
        ("vLLM#44409", "https://github.com/vllm-project/vllm/pull/44409"),
        "blocks for external tokens of one group are allocated before another group's hits are touched, and "
        "may be the same blocks: one block is in two groups of one request (two groups, three groups, "
        "preempted and allocated again).",
    ),
    Report(
        "promise-not-loaded",
        ("lmcache_resumed_package", "lmcache_resumed_in_part_package"),
        ("connector/promise-not-loaded",),
        ("lmcache-0.3.9", "lmcache-0.3.9/vllm-0.33.0"),
        ("LMCache#1969", "https://github.com/LMCache/LMCache/issues/1969"),
        "the connector metadata lacks the load promised to a request that resumes after a preemption: the "
        "request runs over blocks that were never filled. The adapter of the lmcache package.",
    ),
    Report(
        "the same, bundled",
        ("lmcache_resumed_bundled", "lmcache_resumed_in_part_bundled"),
        ("connector/promise-not-loaded",),
        ("lmcache-0.3.9", "lmcache-0.3.11", "lmcache-0.3.9/vllm-0.33.0"),
        ("LMCache#2007", "https://github.com/LMCache/LMCache/pull/2007"),
        "the same in the adapter that vLLM bundles (`use_native`), which never got the fix; it can't be "
        "imported together with LMCache 0.4 and later.",
    ),
    Report(
        "tracker-lag",
        (
            "lmcache_decoded_package_async",
            "lmcache_prompt_only_package_async",
            "lmcache_in_chunks_package_async",
            "lmcache_resumed_package_async",
            "lmcache_resumed_in_part_package_async",
            "lmcache_resumed_without_package_async",
        ),
        ("connector/tracker-lag", "connector/save-gap"),
        ("lmcache-0.3.11", "lmcache-0.4.2", "lmcache-0.4.2/vllm-0.17.0"),
        ("LMCache#2821", "https://github.com/LMCache/LMCache/pull/2821"),
        "under async scheduling the adapter slices the request's tokens at a count that is ahead of them: "
        "its own list stops growing, and decoded tokens are never saved.",
    ),
    Report(
        "shared-between-clients",
        ("lmcache_shared_between",),
        ("blocks/isolation",),
        (
            *("lmcache-0.3.9", "lmcache-0.3.11", "lmcache-0.4.2", "lmcache-0.4.3", "lmcache-0.5.6"),
            "lmcache-0.5.7rc2",
            *("lmcache-0.4.2/vllm-0.17.0", "lmcache-0.3.9/vllm-0.33.0"),
        ),
        ("LMCache#2880", "https://github.com/LMCache/LMCache/pull/2880"),
        "the store keys KV by tokens alone: a request gets KV that was saved with another cache salt, or "
        "with another LoRA adapter (LMCache#2961).",
    ),
)

DRIFTS: tuple[Drift, ...] = (
    Drift("metrics/prompt-missing", ("aborted_in_prefill", "abort_before_output_sync"), "0.16.0"),
    Drift("metrics/session-chunk-missing", ("session_sync", "session_async"), "0.20.0"),
    Drift("metrics/session-chunk-whole", (), "0.16.0", "0.19.1"),
    Drift("metrics/full-hit-token-missing", ("full_external_hit",), "0.20.0"),
    Drift("metrics/replay-missing", ("replayed_window_sync", "replayed_window_async"), "0.28.0"),
    Drift(
        "metrics/recomputed-prompt-missing",
        ("preempted_in_prefill_sync", "preempted_in_prefill_async"),
        "0.16.0",
    ),
    Drift("metrics/later-source-missing", (), "0.16.0", "0.19.1"),
    Drift("metrics/later-source-missing", ("asked_again_after_preemption",), "0.20.0"),
    Drift("metrics/failed-hit-reported", ("local_hit_fails_sync",), "0.20.0"),
    Drift("metrics/transfer-as-cached", ("handed_over_sync",), "0.16.0"),
    Drift("metrics/cache-write-overstated", ("asked_again_after_preemption",), "0.26.0"),
    Drift("metrics/chunks-in-one-step", ("chunked_prefill", "chunked_sync", "chunked_async"), "0.16.0"),
    Drift("metrics/lookup-never-ran", ("aborted_in_remote_wait",), "0.16.0"),
    Drift("metrics/lookup-load-failed", ("asynchronous_load_fails_in_part",), "0.16.0"),
    Drift("metrics/lookup-resumed-missing", ("resumed_from_cache", "resumed_cold"), "0.16.0"),
    Drift("metrics/lookup-exempt-counted", ("prompt_logprobs_sync", "prompt_logprobs_async"), "0.16.0"),
    Drift(
        "metrics/lookup-attempt-counted",
        ("attempts_before_admission_sync", "attempts_before_admission_async"),
        "0.16.0",
        "0.26.0",
    ),
    Drift("metrics/drafts-past-stop", ("stop_within_drafts",), "0.9.1"),
    Drift("metrics/padding-as-drafts", ("padded_decode_sync", "padded_decode_async"), "0.27.0"),
    Drift("metrics/samples-counted-each", ("samples_of_one_request_sync",), "0.9.1"),
)

KNOWN: tuple[Known, ...] = (
    Known(
        "tokens/set-once",
        ("local_hit_fails",),
        "0.17.0",
        "0.19.1",
        "external tokens that failed to load are subtracted from the local hit",
    ),
    Known(
        "tokens/stale-lookup",
        ("never_fits_again",),
        "0.9.1",
        "0.9.2",
        "a swapped group that no longer fits is ignored but not freed: its lookup is never released",
    ),
    Known(
        "tokens/stale-lookup",
        ("crowd",),
        "0.9.1",
        "0.9.1",
        "the same fault as the report, in a random workload",
    ),
    Known(
        "connector/failed-load-counted",
        (
            "asynchronous_load_fails_in_part",
            "load_failure_sync_sync",
            "load_failure_sync_async",
            "load_failure_async_partial",
            "load_failure_recomputed_in_chunks",
            "load_failure_sync_before_next_output",
            "load_failure_then_reset",
            "local_hit_fails",
        ),
        "0.20.0",
        "0.33.0",
        "failed loads stay in the external figure, deliberately (vLLM#37460): a drift",
    ),
    Known(
        "tokens/in-flight",
        (
            "load_failure_sync_async",
            "load_failure_sync_before_next_output",
            "load_failure_of_a_shared_block",
            "local_hit_fails_async",
        ),
        "0.12.0",
        "0.33.0",
        "a synchronous load failure under async scheduling leaks an output placeholder",
    ),
    Known(
        "tokens/set-once",
        (
            "load_failure_sync",
            "load_failure_recomputed_in_chunks",
            "load_failure_then_reset",
            "load_failure_of_a_shared_block",
        ),
        "0.17.0",
        "0.19.1",
        "external tokens that failed to load are counted as local hits",
    ),
    Known(
        "tokens/negative",
        ("load_failure_of_a_shared_block", "local_hit_fails"),
        "0.17.0",
        "0.19.1",
        "tokens that a failed load takes away are subtracted from the external figure, which had none",
    ),
    Known(
        "tokens/set-once",
        ("crowd_external", "crowd_async_external", "crowd_async_consumer"),
        "0.17.0",
        "0.19.1",
        "the fault of the report, in a random workload",
    ),
    Known(
        "tokens/negative",
        ("double_allocation_after_preemption",),
        "0.17.0",
        "0.18.1",
        "the fault of the report negative-local-hit: only the second admission promises external tokens",
    ),
    Known(
        "tokens/set-once",
        ("double_allocation_after_preemption",),
        "0.17.0",
        "0.19.1",
        "the same",
    ),
    Known(
        "tokens/source-sum",
        ("double_allocation_after_preemption",),
        "0.19.1",
        "0.19.1",
        "the same, clamped",
    ),
    Known(
        "tokens/negative",
        ("load_failure_async_policy_fail", "local_hit_fails"),
        "0.17.0",
        "0.18.1",
        "a request that ends before its first step because its load failed is counted with -1 cached tokens",
    ),
    Known(
        "tokens/source-sum",
        ("load_failure_async_policy_fail",),
        "0.19.1",
        "0.19.1",
        "the same, clamped: the sources sum to one token too many",
    ),
    Known(
        "tokens/in-flight",
        ("reset_running_async", "reset_running_speculative"),
        "0.12.0",
        "0.20.0",
        "a cache reset marks a request in prefill: a later, valid token is discarded",
    ),
    Known(
        "tokens/unexplained-drop",
        ("reset_running_speculative",),
        "0.12.0",
        "0.24.0",
        "draft tokens rejected in a life that a reset ended are subtracted from the count of the next life",
    ),
    Known(
        "tokens/balance",
        ("resumed_local_then_external",),
        "0.10.2",
        "0.17.0",
        "an asynchronous load is rounded up to whole blocks: tokens that were not loaded count as computed",
    ),
    Known(
        "blocks/isolation",
        ("adapter_named_like_a_salt", "adapter_from_another_path"),
        "0.12.0",
        "0.30.0",
        "block hashes hold the bare name of a LoRA adapter, without its path (vLLM#30931); a cache salt of "
        "that name gives the same hash (vLLM#44701)",
    ),
    Known(
        "tokens/in-flight",
        ("session_async_speculative",),
        "0.17.0",
        "0.17.0",
        "a session waits with output placeholders that no step in flight fills, and never runs again",
    ),
    Known(
        "tokens/in-flight",
        ("session_async_speculative",),
        "0.27.1",
        "0.30.0",
        "a session waits with output placeholders that no step in flight fills, and never runs again",
    ),
    Known(
        "",
        ("session_async_speculative",),
        "0.17.0",
        "0.30.0",
        "a session with drafts under async scheduling: the scheduler raises, or the request never ends",
        host_fails=True,
    ),
    Known(
        "",
        ("crowd_hybrid",),
        "0.20.0",
        "0.20.0",
        "the scheduler requests more blocks than are free in a pool of several groups, and raises",
        host_fails=True,
    ),
    Known(
        "",
        ("crowd_async_external",),
        "0.27.1",
        "0.27.1",
        "the scheduler runs without end; the cause is not known",
        host_fails=True,
    ),
)
