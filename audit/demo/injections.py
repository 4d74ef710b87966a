"""Upstream defects on demand: what can be put back into the demo's engine, as a table.

Here: names, words, sources and workloads, and which invariant should find each. Not here: the
patches (defects.py) and the run (engine.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

from . import defects
from .workload import CROWDED, EVICTED_WHILE_WAITING, OLDEST_HIT, OUTGROWN, Wave


@dataclass(frozen=True)
class Injection:
    """A defect on demand: what it is, where it was reported, and what should find it."""

    name: str
    summary: str
    reference_url: str
    expected_invariant: str
    apply: Callable[[defects.Refusals], None]
    waves: tuple[Wave, ...] = CROWDED

    @property
    def level(self) -> str:
        """What has to be observed for it to be found."""
        return "blocks" if self.expected_invariant.startswith("blocks/") else "tokens"


_TABLE = (
    Injection(
        "negative-local-hit",
        "a request preempted in mid-prefill reports fewer than no local tokens",
        "https://github.com/vllm-project/vllm/pull/36752",
        "tokens/negative",
        defects.negative_local_hit,
    ),
    Injection(
        "clamped-local-hit",
        "the same, cut off at nought as in 0.19.1: the sources no longer add up to the prompt",
        "https://github.com/vllm-project/vllm/pull/36752",
        "tokens/source-sum",
        defects.clamped_local_hit,
    ),
    Injection(
        "promise-not-loaded",
        "a resumed request's external tokens are promised, counted and never loaded",
        "https://github.com/LMCache/LMCache/issues/1969",
        "connector/promise-not-loaded",
        defects.promise_not_loaded,
    ),
    Injection(
        "lookup-counted",
        "the prefix cache counts a look-up at every failed attempt to admit, as up to 0.26",
        "https://github.com/vllm-project/vllm/issues/43736",
        "tokens/lookup-counted-once",
        defects.lookup_counted,
    ),
    Injection(
        "stale-lookup",
        "an admission uses what an earlier, failed attempt found in the cache, as v0 did",
        "https://github.com/vllm-project/vllm/pull/18957",
        "tokens/stale-lookup",
        defects.stale_lookup,
        EVICTED_WHILE_WAITING,
    ),
    Injection(
        "double-allocation",
        "blocks for external tokens are taken before the local hits are held, and may be those",
        "https://github.com/vllm-project/vllm/pull/44409",
        "blocks/double-allocation",
        defects.double_allocation,
        OLDEST_HIT,
    ),
    Injection(
        "double-free",
        "a preempted request frees its first block twice; vLLM 0.32 stops when it is taken again",
        "https://github.com/vllm-project/vllm/issues/42571",
        "blocks/double-free",
        defects.double_free,
    ),
    Injection(
        "negative-match",
        "no patch: 0.32's ExampleConnector answers below nought for a local hit past the prompt",
        "https://github.com/LMCache/LMCache/issues/2158",
        "connector/negative-match",
        defects.nothing,
        OUTGROWN,
    ),
)

INJECTIONS = {injection.name: injection for injection in _TABLE}
