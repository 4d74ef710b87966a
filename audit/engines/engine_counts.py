"""The engine's own counts for one request, where the releases keep them differently.

Here: 0.26 and later, which count tokens in flight. Subclasses for older releases are in the files of those
releases.
"""

from __future__ import annotations

from typing import Any

from ..text import cut_id

READY = frozenset(("WAITING", "RUNNING", "PREEMPTED"))
"""The names of the states in which a request waits for nothing but a step."""

WAITING = ("waiting", "skipped_waiting", "kv_holding_waiting")
"""The queues in which requests wait; one release has only some of them."""


class EngineCounts:
    """Reads the engine's counts of a request."""

    def of(self, request: Any) -> tuple[int, int, int]:
        """Computed tokens, tokens in flight and output placeholders; -1 for one that the engine lacks."""
        return request.num_computed_tokens, request.num_in_flight_tokens, request.num_output_placeholders

    def computed(self, request: Any) -> int:
        """Computed tokens; -1 while the engine keeps no count."""
        return int(request.num_computed_tokens)

    def preemptions(self, request: Any) -> int:
        """How often the request was preempted."""
        return int(request.num_preemptions)

    def waits_for_load(self, request: Any) -> bool:
        """Whether the request waits for an asynchronous load."""
        return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")

    def ready(self, request: Any) -> bool:
        """Whether the request waits for nothing but a step."""
        return request.status.name in READY

    def awaits_chunk(self, request: Any) -> bool:
        """Whether the request is a session that waits for its client's next chunk."""
        return bool(request.status.name == "WAITING_FOR_STREAMING_REQ")

    def paused(self, scheduler: Any) -> bool:
        """Whether the engine is paused."""
        state = getattr(scheduler, "_pause_state", None)
        return state is not None and state.name != "UNPAUSED"

    def passes_over(self, scheduler: Any) -> bool:
        """Whether steps may leave out ready requests: the engine is paused, or it waits for the inputs that
        another engine encodes."""
        return self.paused(scheduler) or getattr(scheduler, "ec_connector", None) is not None

    def waiting(self, scheduler: Any) -> list[Any]:
        """The queues of waiting requests. An open request is in one of them, or runs."""
        return [getattr(scheduler, name) for name in WAITING if hasattr(scheduler, name)]

    def transferred(self, request: Any) -> bool:
        """Whether a prefill engine hands the KV over; the connector clears this flag at allocation."""
        parameters = getattr(request, "kv_transfer_params", None)
        return bool(parameters and parameters.get("do_remote_prefill"))

    def handover(self, request: Any) -> tuple[bool, str]:
        """Whether this engine only prefills the request, and the request's id in its prefill engine."""
        parameters = getattr(request, "kv_transfer_params", None)
        if not parameters:
            return False, ""
        remote = parameters.get("remote_request_id") if parameters.get("do_remote_prefill") else None
        return bool(parameters.get("do_remote_decode")), cut_id(remote) if isinstance(remote, str) else ""

    def forget(self, request_id: str) -> None:
        """The engine has dropped the request."""


class EngineCounts020(EngineCounts):
    """Before 0.26: no count of tokens in flight."""

    def of(self, request: Any) -> tuple[int, int, int]:
        return (
            self.computed(request),
            int(getattr(request, "num_in_flight_tokens", -1)),
            request.num_output_placeholders,
        )
