"""vLLM v1, releases 0.20 to 0.26: where they differ from 0.27.

- A preempted request keeps its placeholders, and its output in flight is delivered. There is one exception:
  after a reset of the prefix cache under running requests the asynchronous scheduler drops that output, by a
  flag (0.20) or a number of outputs (0.22). kvledger sees this when the request's output has not grown.
- Before 0.26 the engine does not count tokens in flight, and reports the last admission's hits.
- The lookup's answer is the hit that is used, and the lookup statistics count it at once, also for an attempt
  that leads to no admission. ``LookupsCounted`` tells these attempts apart.
- The end of a session's turn keeps the whole count, placeholders included.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .. import events as ev
from ..hooks import Hook
from .admissions import NOTHING, Admissions, Attempt
from .ends_of_lives import Lives
from .engine_counts import EngineCounts020
from .hook_tables import V1, amended, signature
from .loads import PolledCounts, PolledLoads
from .prompt_reports import PromptReports
from .v1_since_0_27 import Parts, V1Observer

HOOKS = amended(
    V1,
    signature(V1, "schedule", (), ("throttle_prefills",)),
    signature(V1, "_preempt_request", ("request", "timestamp")),
    signature(V1, "get_computed_blocks", ("request",)),
    without=(
        "_handle_failed_recving",
        "get_computed_blocks_for_connector",
        "record_prefix_cache_stats",
    ),
)


class Admissions020(Admissions):
    """Local lookups are counted at the lookup, external ones once an admission."""

    def counts_lookups(self, request: Any) -> bool:
        exempt = getattr(request, "skip_reading_prefix_cache", False)
        return bool(self._scheduler.kv_cache_manager.enable_caching and not exempt)

    def _not_admitted(self, events: list[ev.Event], now: int, request_id: str, attempt: Attempt) -> None:
        if attempt.looked_up >= 0 and self.counts_lookups(attempt.request):
            attempts, queries, hits = self.not_admitted
            queries += attempt.request.num_tokens + attempt.cut
            self.not_admitted = attempts + 1, queries, hits + attempt.looked_up
        super()._not_admitted(events, now, request_id, attempt)

    def cut(self, attempt: Attempt) -> int:
        return attempt.cut

    def lookups_counted(self, now: int, admitted: bool) -> ev.LookupsCounted | None:
        counted = super().lookups_counted(now, admitted)
        self.not_admitted = NOTHING
        return counted

    def matched(self, _: None, result: Any, request: Any, num_computed_tokens: int) -> None:
        attempt = self.attempt(request)
        if attempt.looked_up < 0:  # for hybrids with Mamba layers the scheduler asks the coordinator
            attempt.looked_up = attempt.local = num_computed_tokens
        super().matched(None, result, request, num_computed_tokens)


class Lives020(Lives):
    """Output in flight at a preemption is delivered, but may be dropped after a reset."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.extended: set[str] = set()
        """Ids of draining sessions whose turn ended in this output, which was delivered."""

    def preempted(
        self, before: tuple[int, int, int] | None, _: None, request: Any, *__: Any, **___: Any
    ) -> None:
        if before is None:
            return
        if self._log.undelivered:
            self.draining.add(request.request_id)
        delivered = self._resetting_in != self._observer.step
        self.emit_preempted(request, before, self.held_blocks(request), delivered)

    def stale(self, scheduled: dict[str, int]) -> Any:
        """Requests whose output may be dropped, each with its output tokens so far."""
        self.extended.clear()
        requests = self._scheduler.requests
        ids = [each for each in self.draining if each in scheduled and each in requests]
        return [(requests[each], requests[each].num_output_tokens) for each in ids]

    def dropped(self, stale: Any) -> list[str]:
        dropped = []
        for request, output_tokens in stale:
            if request.request_id in self.extended:
                continue  # the engine took its outputs into the prompt
            if request.num_output_tokens == output_tokens:
                dropped.append(request.request_id)
            else:  # outputs are dropped in order, so no later one will be
                self.draining.discard(request.request_id)
        return dropped

    def session_extends(self, session: Any, *_: Any) -> int:
        if self.output is not None and session.request_id in self.draining:
            self.extended.add(session.request_id)
        return super().session_extends(session)


class V1Observer020(V1Observer):
    """Observes one scheduler of 0.20 to 0.25."""

    NAME: ClassVar[str] = "v1-0.20"
    FIGURES: ClassVar[str] = "last"
    HOOKS: ClassVar[tuple[Hook, ...]] = HOOKS
    PARTS: ClassVar[Parts] = Parts(counts=EngineCounts020, admissions=Admissions020, lives=Lives020)


class V1Observer026(V1Observer020):
    """Observes one scheduler of 0.26, which already reports the first admission's hits."""

    NAME: ClassVar[str] = "v1-0.26"
    FIGURES: ClassVar[str] = "first"
    HAS: ClassVar[tuple[str, ...]] = ("kv_cache_manager.estimate_cached_tokens",)


# --- vLLM v1, releases 0.16 to 0.19: where they differ from 0.20.
#
# Every output carries a prompt's figures: ``num_cached_tokens``, from the first admission that ran, and
# ``num_external_computed_tokens``, from the connector's last match, less the tokens that failed to load. At
# the first output the front end derives local, external and computed tokens from these figures, in
# ``PromptTokenStats.update_from_output``. kvledger calls that method too, so that ``Reported`` has the
# figures that vLLM counts.
#
# Up to 0.17 the scheduler polls for asynchronous loads (:class:`V1Observer017`), from 0.18 it does not
# (:class:`V1Observer018`).

HOOKS_018 = amended(
    HOOKS,
    signature(HOOKS, "schedule", ()),
    signature(
        HOOKS,
        "_handle_invalid_blocks",
        ("invalid_block_ids",),
        ("invalid_block_ids", "num_scheduled_tokens"),
    ),
)
HOOKS_017 = amended(
    HOOKS_018,
    signature(HOOKS_018, "update_state_after_alloc")._replace(after="loads.promised"),
)


class PromptReports017(PromptReports):
    """Reads the figures of 0.16 to 0.19, as vLLM's front end derives them."""

    def _will_report(self, request: Any) -> bool:
        return bool(request.num_output_tokens == 0)

    def extended(self, request: Any) -> None:
        """Every output carries figures, and one of the chunk before could be taken for the next one's."""

    def _at_most(self, index: dict[str, int], lengths: list[int], load_failures: int) -> int:
        # A request that ends because its load failed is reported too.
        return super()._at_most(index, lengths, load_failures) + load_failures

    def _figures(self, output: Any) -> tuple[int, ...] | None:
        prompt = self.due[output.request_id]
        counted = prompt_token_stats()
        counted.update_from_output(output.num_cached_tokens, output.num_external_computed_tokens, prompt)
        return (
            prompt,
            counted.local_cache_hit,
            counted.external_kv_transfer,
            counted.computed,
            counted.cached_tokens,
        )


class V1Observer018(V1Observer):
    """Observes one scheduler of 0.18 or 0.19."""

    NAME: ClassVar[str] = "v1-0.18"
    FIGURES: ClassVar[str] = "mixed"
    HAS: ClassVar[tuple[str, ...]] = ("_try_promote_blocked_waiting_request",)
    OUTPUT: ClassVar[tuple[str, ...]] = ("num_cached_tokens", "num_external_computed_tokens")
    HOOKS: ClassVar[tuple[Hook, ...]] = HOOKS_018
    PARTS: ClassVar[Parts] = V1Observer020.PARTS._replace(reports=PromptReports017)


class V1Observer017(V1Observer):
    """Observes one scheduler of 0.16 or 0.17."""

    NAME: ClassVar[str] = "v1-0.17"
    FIGURES: ClassVar[str] = "mixed"
    OUTPUT: ClassVar[tuple[str, ...]] = V1Observer018.OUTPUT
    HOOKS: ClassVar[tuple[Hook, ...]] = HOOKS_017
    PARTS: ClassVar[Parts] = V1Observer018.PARTS._replace(counts=PolledCounts, loads=PolledLoads)


def prompt_token_stats() -> Any:
    """vLLM's own sum of prompt tokens by source, empty."""
    from vllm.v1.metrics.stats import PromptTokenStats

    return PromptTokenStats()
