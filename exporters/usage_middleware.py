"""An ASGI middleware that logs what a server tells its clients: ``usage`` and ids, one JSON line a response.

    KVLEDGER_USAGE_LOG=usage.jsonl vllm serve MODEL --middleware kvledger.exporters.usage_middleware.UsageLog

It changes no response and keeps no text of one. Of a stream it reads each line for ``usage``, which vLLM
sends if the client asks for it (``stream_options``), or with ``--enable-force-include-usage``. A response
without ``usage`` is not logged. A log that can't be written is reported once, and the server goes on.
"""

from __future__ import annotations

import json
from typing import Any

from .asgi import Exchange, LineLog, Message, header

VARIABLE = "KVLEDGER_USAGE_LOG"


class UsageLog(LineLog):
    """Logs the usage of each response to the file that ``KVLEDGER_USAGE_LOG`` names."""

    variable, what = VARIABLE, "usage figures"

    def exchange(self, scope: Message) -> Exchange:
        """See the base."""
        return _Usage(scope)


class _Usage(Exchange):
    """The ids and usage of one response."""

    def __init__(self, scope: Message) -> None:
        super().__init__(scope)
        self._last: dict[str, Any] | None = None
        """Those in the last text that had usage; None: none had."""

    def read(self, text: bytes) -> None:
        """Read a body, or the data of one event of a stream."""
        self._last = _usage(text) or self._last

    def line(self) -> dict[str, Any] | None:
        """The ids and usage."""
        request_id = header(self.scope, b"x-request-id")
        return None if self._last is None else {"x_request_id": request_id, **self._last}


def _usage(text: bytes) -> dict[str, Any] | None:
    """``id``, ``object`` and ``usage`` of a JSON response or event; None if it has no usage."""
    if b'"usage"' not in text:
        return None
    try:
        body = json.loads(text)
    except ValueError:
        return None
    if isinstance(body, dict) and isinstance(body.get("response"), dict):  # the events of /v1/responses
        body = body["response"]
    if not isinstance(body, dict) or not isinstance(body.get("usage"), dict):
        return None
    return {name: body.get(name) for name in ("id", "object", "usage")}
