"""vLLM v1, releases 0.16 to 0.19: where they differ from 0.20.

Every output carries a prompt's figures: ``num_cached_tokens``, from the first admission that ran, and
``num_external_computed_tokens``, from the connector's last match, less the tokens that failed to load. At the
first output the front end derives local, external and computed tokens from these figures, in
``PromptTokenStats.update_from_output``. kvledger calls that method too, so that ``Reported`` has the figures
that vLLM counts.

Up to 0.17 the scheduler polls for asynchronous loads (:class:`V1Observer017`), from 0.18 it does not
(:class:`V1Observer018`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..hooks import Hook
from .hook_tables import amended, signature
from .polled_loads import PolledCounts, PolledLoads
from .prompt_reports import PromptReports
from .v1_since_0_27 import Parts, V1Observer
from .v1_until_0_26 import HOOKS as HOOKS_020
from .v1_until_0_26 import V1Observer020

HOOKS_018 = amended(
    HOOKS_020,
    signature(HOOKS_020, "schedule", ()),
    signature(
        HOOKS_020,
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
