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

from ..audit.foreign import Unreadable, parsed

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MODE = 0o640
"""The log tells who called when: it is for this user and group, like journals."""

logger = logging.getLogger("vllm.kvledger")

VARIABLE = "KVLEDGER_USAGE_LOG"

LARGEST_BODY = 16 << 20
"""Bytes of a body that are kept to be read; of a larger one nothing is."""
LARGEST_LINE = 1 << 20
"""Bytes of one line of a stream; a longer one is passed over."""


class UsageLog:
    """Logs the usage of each response to the file that ``KVLEDGER_USAGE_LOG`` names."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._path = os.environ.get(VARIABLE, "")
        """Empty: nothing is logged."""
        self._failed = False
        """Whether a line could not be logged, and this was reported."""
        if not self._path:
            logger.warning("kvledger: %s is not set, so no usage figures are logged.", VARIABLE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, and log it."""
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
            try:
                usage = response.usage()
                if usage is not None:
                    self._write({"x_request_id": _header(scope, b"x-request-id"), **usage})
            except Exception as error:
                self._report(error)

    def _write(self, line: dict[str, Any]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        with open(descriptor, "a", encoding="utf-8") as log:
            log.write(json.dumps({"at": time.time(), **line}) + "\n")

    def _report(self, error: Exception) -> None:
        """Say once that a line can't be logged, with the text of an I/O error and of no other one."""
        if not self._failed:
            self._failed = True
            why = str(error) if isinstance(error, OSError) else type(error).__name__
            logger.warning("kvledger: usage figures can't be logged to %s: %s.", self._path, why)


class _Response:
    """The ids and usage in a response: in its body, or in the last line of a stream that has usage."""

    def __init__(self) -> None:
        self._streams = False
        self._last: dict[str, Any] | None = None
        """Those of a stream; None: no line had any."""
        self._kept = b""
        """The body, or the beginning of the stream's next line; empty if it is too large."""
        self._too_large = False

    def read(self, message: Message) -> None:
        """Read one message that the server sends."""
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            part = message.get("body", b"")
            if self._streams:
                *lines, part = (self._kept + part).split(b"\n")
                self._kept = b""
                for line in lines:
                    if not self._too_large and line.startswith(b"data:"):
                        found = _usage(line[5:])
                        if found is not None:
                            # The last event of /v1/messages has no id, and may lack figures of the first.
                            first = self._last or {}
                            self._last = {
                                "id": found["id"] or first.get("id"),
                                "object": found["object"] or first.get("object"),
                                "usage": first.get("usage", {}) | found["usage"],
                            }
                    self._too_large = False
            self._keep(part, LARGEST_LINE if self._streams else LARGEST_BODY)

    def _keep(self, part: bytes, most: int) -> None:
        self._too_large = self._too_large or len(self._kept) + len(part) > most
        self._kept = b"" if self._too_large else self._kept + part

    def usage(self) -> dict[str, Any] | None:
        """``id``, ``object`` and ``usage``; None if the response has no usage."""
        return self._last if self._streams else _usage(self._kept)


def _header(scope: Message, name: bytes) -> str:
    """A header of the request; an empty string if it has none."""
    for each, value in scope.get("headers", ()):
        if each.lower() == name:
            return str(value.decode("latin-1"))
    return ""


def _usage(text: bytes) -> dict[str, Any] | None:
    """``id``, ``object`` and ``usage`` of a JSON response or event; None if it has no usage."""
    if b'"usage"' not in text:
        return None
    try:
        body = parsed(text, dict[str, Any])
    except Unreadable:
        return None
    for name in ("response", "message"):  # the events of /v1/responses, and the first of /v1/messages
        if isinstance(body.get(name), dict):
            body = body[name]
    if not isinstance(body.get("usage"), dict):
        return None
    return {"id": body.get("id"), "object": body.get("object") or body.get("type"), "usage": body["usage"]}
