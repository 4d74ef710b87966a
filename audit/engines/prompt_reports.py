"""The engine's own count of where each prompt came from: the figures that it sends to vLLM's front end.

The engine reports them once a request, with the first output. Here: 0.20 and later, whose outputs carry
``prefill_stats``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from .. import events as ev
from ..causes import SAMPLED_MISSES
from .step_log import StepLog

REPLACED = "remote_num_cached_tokens"
"""A key of ``kv_transfer_params``: the cached tokens that the prefill engine counted. Where vLLM#46898 is
applied, the decode engine reports this figure as its own."""


class PromptReports:
    """Reads the engine-reported prompt figures from the engine's outputs."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.due: dict[str, int] = {}
        """Prompt tokens by request id, of living requests whose figures the engine has still to report."""

    def expect(self, request: Any) -> None:
        """A request arrived, lives already, or got a further chunk: its figures are due unless reported.

        Figures of another engine are never due: they say nothing about this engine's account.
        """
        transfer = getattr(request, "kv_transfer_params", None)
        if self._will_report(request) and not (transfer and REPLACED in transfer):
            self.due[request.request_id] = request.num_prompt_tokens

    def extended(self, request: Any) -> None:
        """A session got its next chunk: the chunk's figures are due if the engine will report them."""
        self.expect(request)

    def prompt_cut(self, request: Any) -> None:
        """The connector shortened the prompt."""
        if request.request_id in self.due:
            self.due[request.request_id] = request.num_prompt_tokens

    def read(
        self, at: int, result: Any, model_output: Any, lengths: list[int], load_failures: int
    ) -> list[ev.Event]:
        """``Reported`` for each request whose figures came with this output.

        ``load_failures`` requests had a failed load in this output. The requests that arrived last stand last
        in an output, so they are searched first.
        """
        most = self._at_most(model_output.req_id_to_index, lengths, load_failures)
        reports: list[ev.Event] = []
        for outputs in result.values() if most else ():
            for output in reversed(outputs.outputs):
                if output.request_id not in self.due:
                    continue
                figures = self._figures(output)
                if figures is None:
                    continue
                del self.due[output.request_id]
                reports.append(ev.Reported(at, self._log.ids[output.request_id], *figures))
                most -= 1
                if most <= 0:
                    break
        reports.reverse()
        return reports

    def _will_report(self, request: Any) -> bool:
        """Whether the engine has still to report this request's figures."""
        return request.prefill_stats is not None

    def _at_most(self, index: dict[str, int], lengths: list[int], load_failures: int) -> int:
        """An upper bound for the requests whose figures came with this output."""
        most = 0
        for request_id in self.due:
            if request_id in index and (not lengths or lengths[index[request_id]]):
                most += 1
        return most

    def _figures(self, output: Any) -> tuple[int, ...] | None:
        """Prompt, local, external, computed, cached and written tokens, if the request's output has them."""
        figures = output.prefill_stats
        if figures is None:
            return None
        return (
            figures.num_prompt_tokens,
            figures.num_local_cached_tokens,
            figures.num_external_cached_tokens,
            figures.num_computed_tokens,
            figures.num_cached_tokens,
            getattr(figures, "num_cache_creation_tokens", -1),
        )


# --- Which missed blocks of a prompt the engine had before: of one in sixteen contents.
#
# Contents are sampled by their hash, so that of a sampled content every use is seen: spatially hashed
# sampling (Waldspurger et al., Efficient MRC Construction with SHARDS, FAST 2015). Hashes stay in the
# engine's process; events have only counts.

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
