"""An ASGI middleware that logs what a server tells its clients: ``usage`` and ids, one JSON line a response.

    KVLEDGER_USAGE_LOG=usage.jsonl vllm serve MODEL --middleware kvledger.exporters.usage_middleware.UsageLog

It changes no response and keeps no text of one. Of a stream it reads each line for ``usage``, which vLLM
sends if the client asks for it (``stream_options``), or with ``--enable-force-include-usage``. A response
without ``usage`` is not logged. A log that can't be written is reported once, and the server goes on.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

VARIABLE = "KVLEDGER_USAGE_LOG"
LARGEST_BODY = 16 << 20
"""Bytes of a response without a stream that are kept to be read; a larger one is not logged."""
LARGEST_LINE = 1 << 20
"""Bytes of one line of a stream; a longer one is passed over."""

logger = logging.getLogger("vllm.kvledger")


class UsageLog:
    """Logs the usage of each response to the file that ``KVLEDGER_USAGE_LOG`` names."""

    def __init__(self, app: App) -> None:
        self._app = app
        """The server."""
        self._path = os.environ.get(VARIABLE, "")
        """The log; empty: nothing is logged."""
        self._failed = False
        """Whether the log could not be written, and this was reported."""
        if not self._path:
            logger.warning("kvledger: %s is not set, so no usage is logged.", VARIABLE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, and log the usage in its response."""
        if scope["type"] != "http" or not self._path:
            await self._app(scope, receive, send)
            return
        response = _Response()

        async def read(message: Message) -> None:
            await send(message)
            try:
                response.read(message)
            except Exception as error:
                self._report(error)

        try:
            await self._app(scope, receive, read)
        finally:
            self._write(response, _request_id(scope))

    def _write(self, response: _Response, request_id: str) -> None:
        try:
            usage = response.usage()
            if usage is None:
                return
            line = {"at": time.time(), "x_request_id": request_id, **usage}
            with open(self._path, "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("kvledger: usage can't be logged to %s: %s.", self._path, error)


class _Response:
    """The parts of one response that may hold its usage."""

    def __init__(self) -> None:
        self._streams = False
        """Whether the body is a stream of server-sent events."""
        self._waiting = b""
        """The body so far, or the beginning of a stream's next line."""
        self._too_large = False
        """Whether the body, or the present line, is too large to be kept."""
        self._usage: dict[str, Any] | None = None
        """The ids and usage in the last event that had usage."""

    def read(self, message: Message) -> None:
        """Read one message that the server sends."""
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if self._streams:
                self._read_lines(body)
            elif not self._too_large:
                self._waiting += body
                self._too_large = len(self._waiting) > LARGEST_BODY
                if self._too_large:
                    self._waiting = b""

    def _read_lines(self, body: bytes) -> None:
        *lines, rest = (self._waiting + body).split(b"\n")
        for line in lines:
            if not self._too_large and line.startswith(b"data:") and b'"usage"' in line:
                self._usage = _usage(line[5:]) or self._usage
            self._too_large = False
        self._too_large = self._too_large or len(rest) > LARGEST_LINE
        self._waiting = b"" if self._too_large else rest

    def usage(self) -> dict[str, Any] | None:
        """The ids and the usage of the response, if it has usage."""
        return self._usage if self._streams else _usage(self._waiting)


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


def _request_id(scope: Message) -> str:
    """The client's ``X-Request-Id``, or an empty string."""
    for name, value in scope.get("headers", ()):
        if name.lower() == b"x-request-id":
            return str(value.decode("latin-1"))
    return ""
