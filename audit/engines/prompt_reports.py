"""The engine's own count of where each prompt came from: the figures that it sends to vLLM's front end.

The engine reports them once a request, with the first output. Here: 0.20 and later, whose outputs carry
``prefill_stats``.
"""

from __future__ import annotations

from typing import Any

from .. import events as ev
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
