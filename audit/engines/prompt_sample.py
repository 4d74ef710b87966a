"""Which missed blocks of a prompt the engine had before: of one in sixteen contents.

Contents are sampled by their hash, so that of a sampled content every use is seen: spatially hashed sampling
(Waldspurger et al., Efficient MRC Construction with SHARDS, FAST 2015). Hashes stay in the engine's process;
events have only counts.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from ..causes import SAMPLED_MISSES

MASK = 15
"""A content is in the sample if these bits of its hash are 0."""

MOST = 32_768
"""Contents that are remembered, those used last. Others count as never seen."""

NEVER_SEEN, EVICTED, RESET, BEING_COMPUTED = range(len(SAMPLED_MISSES))
"""The places of the causes in the counts."""

KEY = slice(1, 9)
"""The bytes of a hash by which a content is remembered."""


class Seen(NamedTuple):
    """The last use of a content: its request, where its block ends in it, and the resets before."""

    request_id: str
    end: int
    resets: int


class PromptSample:
    """Counts a prompt's missed blocks by what became of their contents before."""

    def __init__(self, scheduler: Any) -> None:
        self._requests: dict[str, Any] = scheduler.requests
        pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
        self._size = int(getattr(pool, "hash_block_size", scheduler.block_size))
        """Tokens that one hash stands for."""
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()
        """The contents that were used, the last use last."""
        self._resets = 0

    def admitted(self, request: Any, hit: int) -> list[int] | None:
        """How many blocks a hit could have covered and did not, by what became of their contents before.

        ``hit``: tokens that need not be computed. None: no such block is in the sample.
        """
        counts = [0] * len(SAMPLED_MISSES)
        prompt = request.num_prompt_tokens
        for place, key in self._sampled(request, 0, prompt // self._size):
            end = (place + 1) * self._size
            if hit < end < prompt:
                counts[self._before(key)] += 1
            self._use(key, request, end)
        return counts if any(counts) else None

    def ended(self, request: Any) -> None:
        """A request has ended: its outputs have contents too, and what it never computed was never cached."""
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        for place, key in self._sampled(request, prompt // self._size if computed >= prompt else 0, None):
            end = (place + 1) * self._size
            if end <= computed:
                self._use(key, request, end)
            elif key in self._seen and self._seen[key].request_id == request.request_id:
                del self._seen[key]

    def reset(self) -> None:
        """The prefix cache was reset."""
        self._resets += 1

    def _sampled(self, request: Any, first: int, end: int | None) -> list[tuple[int, bytes]]:
        """Place and key of each sampled content from block ``first`` up to ``end``; None: of all."""
        hashes = request.block_hashes[first:end]
        return [(place, hash[KEY]) for place, hash in enumerate(hashes, first) if not hash[0] & MASK]

    def _before(self, key: bytes) -> int:
        """What became of a content before, as a place in the counts."""
        seen = self._seen.get(key)
        if seen is None:
            return NEVER_SEEN
        user = self._requests.get(seen.request_id)
        if user is not None and user.num_computed_tokens < seen.end:
            return BEING_COMPUTED
        return RESET if seen.resets < self._resets else EVICTED

    def _use(self, key: bytes, request: Any, end: int) -> None:
        self._seen[key] = Seen(request.request_id, end, self._resets)
        self._seen.move_to_end(key)
        if len(self._seen) > MOST:
            self._seen.popitem(last=False)


def prompt_sample(scheduler: Any) -> PromptSample | None:
    """A sample for a scheduler; None if it caches no prefixes."""
    return PromptSample(scheduler) if getattr(scheduler.kv_cache_manager, "enable_caching", False) else None
