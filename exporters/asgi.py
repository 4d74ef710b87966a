"""What ASGI middlewares that log share: one JSON line a request, made of its body and its response."""

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

logger = logging.getLogger("vllm.kvledger")

LARGEST_BODY = 16 << 20
"""Bytes of a body that are kept to be read; of a larger one nothing is."""
LARGEST_LINE = 1 << 20
"""Bytes of one line of a stream; a longer one is passed over."""


class Body:
    """A body that is kept while it passes."""

    def __init__(self) -> None:
        self.kept = b""
        """The body so far; empty if it is too large."""
        self._too_large = False
        """Whether it is."""

    def add(self, part: bytes) -> None:
        """Keep another part."""
        if not self._too_large:
            self.kept += part
            self._too_large = len(self.kept) > LARGEST_BODY
            if self._too_large:
                self.kept = b""


class Response:
    """The body of a response; of a stream of server-sent events each line, which ``read_data`` is given."""

    def __init__(self, read_data: Callable[[bytes], None]) -> None:
        self._read_data = read_data
        """Called with what follows ``data:`` in each line."""
        self._streams = False
        """Whether the body is a stream."""
        self._body = Body()
        """The body, if it is no stream."""
        self._line = b""
        """The beginning of the stream's next line."""
        self._too_long = False
        """Whether the present line is too long to be kept."""

    @property
    def body(self) -> bytes:
        """The whole body; empty: it is a stream, or too large."""
        return self._body.kept

    def read(self, message: Message) -> None:
        """Read one message that the server sends."""
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            part = message.get("body", b"")
            if self._streams:
                self._read_lines(part)
            else:
                self._body.add(part)

    def _read_lines(self, part: bytes) -> None:
        *lines, rest = (self._line + part).split(b"\n")
        for line in lines:
            if not self._too_long and line.startswith(b"data:"):
                self._read_data(line[5:])
            self._too_long = False
        self._too_long = self._too_long or len(rest) > LARGEST_LINE
        self._line = b"" if self._too_long else rest


class Exchange:
    """One request and its response, as far as they are read."""

    def __init__(self, scope: Message) -> None:
        self.scope = scope
        """What the server knows of the request."""
        self.asked: Body | None = None
        """The body of the request; None: it is not read."""

    def read(self, text: bytes) -> None:
        """Read the body of the response, or the data of one event of a stream."""
        raise NotImplementedError

    def line(self) -> dict[str, Any] | None:
        """What is logged; None: nothing."""
        raise NotImplementedError


class LineLog:
    """Logs a line for each request to the file that an environment variable names.

    It changes no response. What can't be logged is reported once, and the server goes on.
    """

    variable = ""
    """Names the file."""
    what = ""
    """What is logged, in the plural."""

    def __init__(self, app: App) -> None:
        self._app = app
        """The server."""
        self._path = os.environ.get(self.variable, "")
        """The log; empty: nothing is logged."""
        self._failed = False
        """Whether something could not be logged, and this was reported."""
        if not self._path:
            logger.warning("kvledger: %s is not set, so no %s are logged.", self.variable, self.what)

    def exchange(self, scope: Message) -> Exchange | None:
        """What reads one request and its response; None: nothing of it is logged."""
        raise NotImplementedError

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, and log it."""
        exchange = self.exchange(scope) if scope["type"] == "http" and self._path else None
        if exchange is None:
            await self._app(scope, receive, send)
            return
        asked = exchange.asked
        response = Response(exchange.read)

        async def listen() -> Message:
            message = await receive()
            if asked is not None and message["type"] == "http.request":
                asked.add(message.get("body", b""))
            return message

        async def read(message: Message) -> None:
            await send(message)
            try:
                response.read(message)
            except Exception as error:
                self._report(error)

        try:
            await self._app(scope, listen, read)
        finally:
            try:
                exchange.read(response.body)
                self._write(exchange.line())
            except Exception as error:
                self._report(error)

    def _write(self, line: dict[str, Any] | None) -> None:
        if line is not None:
            with open(self._path, "a", encoding="utf-8") as log:
                log.write(json.dumps({"at": time.time(), **line}) + "\n")

    def _report(self, error: Exception) -> None:
        """Say once that something can't be logged, with the text of an I/O error and of no other one."""
        if not self._failed:
            self._failed = True
            why = str(error) if isinstance(error, OSError) else type(error).__name__
            logger.warning("kvledger: %s can't be logged to %s: %s.", self.what, self._path, why)


def header(scope: Message, name: bytes) -> str:
    """A header of the request; an empty string if it has none."""
    for each, value in scope.get("headers", ()):
        if each.lower() == name:
            return str(value.decode("latin-1"))
    return ""
