"""The table of upstream defects that the demo can put back into its engine.

Here: name, summary and upstream report of each, its workload, and the invariant that should report it.
Not here: the patches (defect_patches.py) and the run (engine.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

from . import content_defect_patches as content_defects
from . import defect_patches as defects
from .workload import COMPUTED_TWICE, DEFAULT_WAVES, EVICTED_WHILE_WAITING, OLDEST_HIT, OUTGROWN, Wave


@dataclass(frozen=True)
class Injection:
    """A defect that can be injected, where it was reported, and the invariant that should report it."""

    name: str
    summary: str
    reference_url: str
    expected_invariant: str
    apply: Callable[[defects.Refusals], None]
    waves: tuple[Wave, ...] = DEFAULT_WAVES

    @property
    def level(self) -> str:
        """The level of observation that is needed to find it."""
        family = self.expected_invariant.partition("/")[0]
        return family if family in ("blocks", "content") else "tokens"


_TABLE = (
    Injection(
        "negative-local-hit",
        "a request preempted during prefill reports a negative local hit",
        "https://github.com/vllm-project/vllm/pull/36752",
        "tokens/negative",
        defects.negative_local_hit,
    ),
    Injection(
        "clamped-local-hit",
        "the same, clamped to zero as in 0.19.1: the sources no longer add up to the prompt",
        "https://github.com/vllm-project/vllm/pull/36752",
        "tokens/source-sum",
        defects.clamped_local_hit,
    ),
    Injection(
        "promise-not-loaded",
        "external tokens of a resumed request are promised and counted, but never loaded",
        "https://github.com/LMCache/LMCache/issues/1969",
        "connector/promise-not-loaded",
        defects.promise_not_loaded,
    ),
    Injection(
        "lookup-counted",
        "the prefix cache counts a lookup at every failed admission, as up to 0.26",
        "https://github.com/vllm-project/vllm/issues/43736",
        "tokens/lookup-counted-once",
        defects.lookup_counted,
    ),
    Injection(
        "stale-lookup",
        "an admission uses the stale cache hit of an earlier, failed attempt, as in v0",
        "https://github.com/vllm-project/vllm/pull/18957",
        "tokens/stale-lookup",
        defects.stale_lookup,
        EVICTED_WHILE_WAITING,
    ),
    Injection(
        "double-allocation",
        "blocks for external tokens are allocated before the local hits are held, and may be the same",
        "https://github.com/vllm-project/vllm/pull/44409",
        "blocks/double-allocation",
        defects.double_allocation,
        OLDEST_HIT,
    ),
    Injection(
        "double-free",
        "a preempted request frees its first block twice; vLLM 0.32 asserts at the next allocation",
        "https://github.com/vllm-project/vllm/issues/42571",
        "blocks/double-free",
        defects.double_free,
    ),
    Injection(
        "negative-match",
        "no patch: ExampleConnector in 0.32 answers with a negative match for a local hit past the prompt",
        "https://github.com/LMCache/LMCache/issues/2158",
        "connector/negative-match",
        defects.nothing,
        OUTGROWN,
    ),
    Injection(
        "bit-flip",
        "one bit of a cached block flips before a request hits the block",
        "https://github.com/vllm-project/vllm/issues/56104",
        "content/changed",
        content_defects.bit_flip,
    ),
    Injection(
        "late-write",
        "a request that has ended writes into a cached block that it had freed",
        "https://github.com/vllm-project/vllm/issues/56104",
        "content/changed",
        content_defects.late_write,
    ),
    Injection(
        "swapped-blocks",
        "two cached blocks of one prefix exchange their contents",
        "https://github.com/vllm-project/vllm/issues/45357",
        "content/changed",
        content_defects.swapped_blocks,
    ),
    Injection(
        "wrong-half",
        "a connector exchanges keys and values when it loads",
        "https://github.com/LMCache/LMCache/issues/4463",
        "content/transfer",
        content_defects.wrong_half,
    ),
    Injection(
        "truncated-load",
        "a connector's loads end before the last layer",
        "https://github.com/vllm-project/vllm/issues/57661",
        "content/transfer",
        content_defects.truncated_load,
    ),
    Injection(
        "stale-store",
        "a connector's store returns an older object for the last block of each load",
        "https://github.com/vllm-project/vllm/issues/46951",
        "content/transfer",
        content_defects.stale_store,
    ),
    Injection(
        "wrong-compute",
        "a prompt is computed twice, and the second time one block's keys are written at another position",
        "https://github.com/vllm-project/vllm/issues/39146",
        "content/recomputed",
        content_defects.wrong_compute,
        COMPUTED_TWICE,
    ),
)

INJECTIONS = {injection.name: injection for injection in _TABLE}
