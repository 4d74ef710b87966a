"""The KV connector of a simulation: it holds as much of each request as the recorded one did.

vLLM loads this module by its name, so it imports vLLM at the top.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import Any

from ..engines.connector_metadata import register
from ..repro.connector import PlannedLoadsReader, WorkloadConnector, WorkloadHybridConnector


class RecordedConnector(WorkloadConnector):
    """An answer is what the connector holds of the request, from its first token on, in place of what it
    holds beyond the local hit. So it fits any local hit. The last answer stays."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answers: Any = self.answers.get(request.request_id)
        if not answers or answers[0] is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        held, asynchronous, attempts, local = answer = answers[0]
        answers[0] = max(0, held - num_computed_tokens), asynchronous
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        answers[0] = answer if attempts < 2 else (held, asynchronous, attempts - 1, local)
        if attempts == 1:
            answers.popleft()
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        answers = self.answers.get(request.request_id)
        if answers is not None and len(answers) == 1:
            answers.append(answers[0])  # the last answer stays
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class RecordedHybridConnector(RecordedConnector, WorkloadHybridConnector):
    """The same for pools with more than one KV cache group."""


register(RecordedConnector.__name__, PlannedLoadsReader)
register(RecordedHybridConnector.__name__, PlannedLoadsReader)
