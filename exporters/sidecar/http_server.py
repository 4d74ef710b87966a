"""HTTP for the sidecar: the standard library's WSGI server with limits. Pages are in ``pages.py``.

The parser is http.server's, as in prometheus_client. The limits keep a slow, large or malformed request
from delaying others:

- A connection lasts at most :data:`DEADLINE_SECONDS`, a single read or write at most :data:`SOCKET_SECONDS`.
- At most :data:`CONNECTIONS` are open. One more closes the oldest connection that has not sent its request
  yet, because a scraper sends it at once; else the oldest that is older than :data:`ANSWER_SECONDS`.
- A request's headers are limited to :data:`HEADER_BYTES`; bodies are not read.
- The TLS handshake and the password check run in the connection's own thread.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec

from ...audit.errors import LedgerError

CONNECTIONS = 32
DEADLINE_SECONDS = 15.0
SOCKET_SECONDS = 5.0
ANSWER_SECONDS = 2.0
ROOM_SECONDS = 1.0
"""How long a new connection waits until the threads of closed ones have ended."""

HEADER_BYTES = 32 << 10
NAME = "kvledger"
"""The ``Server`` of every answer, without a version."""

POLL_SECONDS = 0.2
"""How often deadlines are checked; shutting down takes at most this long."""

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]
"""WSGI's types; the standard library has them from Python 3.11 on."""

Authorizes = Callable[[str, str, Callable[[], bool]], bool]
"""Checks an Authorization header, "" if the request has none. It also gets the client's address, and a
function that says whether the connection was closed meanwhile. Raises :class:`Busy` if it can't check now."""

CUT_OFF = "kvledger.cut_off"
"""The key of that function among a request's variables."""


class Busy(Exception):
    """So many passwords are being checked that another one can't be."""


class Security(msgspec.Struct, frozen=True):
    """The settings of ``--web.config.file``; None for what it does not configure."""

    tls: ssl.SSLContext | None = None
    authorizes: Authorizes | None = None
    headers: dict[str, str] = {}


OPEN = Security()


class _Connection:
    """An open connection: its start, its socket, and whether its request is still awaited."""

    __slots__ = ("awaits_request", "cut_off", "since", "socket")

    def __init__(self, opened: socket.socket) -> None:
        self.since = time.monotonic()
        """Monotonic time, in seconds, at which the connection was accepted."""
        self.socket = opened
        """The plain socket; with TLS, the one above it."""
        self.awaits_request = True
        """Whether the head of the request has not been read yet."""
        self.cut_off = False
        """Whether the server ended the connection before its answer was sent."""

    def cut(self) -> None:
        """Shut down the plain socket below TLS, so that the connection's thread reads an end of file."""
        self.cut_off = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class Server(ThreadingMixIn, WSGIServer):
    """Listens on ``host:port`` and answers with ``site``. Raises OSError if it can't listen there."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, site: Application, security: Security = OPEN) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        """IPv6 if the host has a colon, else IPv4; the base class reads it."""
        self._tls = security.tls
        """How to encrypt; None: plain HTTP."""
        self._connections: dict[int, _Connection] = {}
        """The open connections, by the identity of the plain socket."""
        self._guard = threading.Condition()
        """Held while connections are added, removed or looked through; notified when one is removed."""
        super().__init__((host, port), cast("Any", _Handler))
        self.set_app(_named(site))

    def server_bind(self) -> None:
        """Bind without the base class's host-name lookup, which may block on a resolver."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    @property
    def url(self) -> str:
        """The address at which the server listens."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"{'https' if self._tls else 'http'}://{shown}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for this connection if there is room or room can be made."""
        with self._guard:
            free = self._guard.wait_for(lambda: len(self._connections) < 2 * CONNECTIONS, ROOM_SECONDS)
            if not free or not self._make_room():
                self.shutdown_request(request)
                return
            self._connections[id(request)] = _Connection(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            raise

    def _make_room(self) -> bool:
        """Whether there is room for one more connection; if need be, close the oldest without a request, else
        the oldest that is slow to read its answer."""
        left = [one for one in self._connections.values() if not one.cut_off]
        if len(left) < CONNECTIONS:
            return True
        long_ago = time.monotonic() - ANSWER_SECONDS
        slow = [one for one in left if one.awaits_request or one.since < long_ago]
        if not slow:
            return False
        min(slow, key=lambda one: (not one.awaits_request, one.since)).cut()
        return True

    def _forget(self, request: Any) -> None:
        with self._guard:
            del self._connections[id(request)]
            self._guard.notify()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake and answer, in the connection's own thread."""
        connection = self._connections[id(request)]
        try:
            request.settimeout(SOCKET_SECONDS)
            if self._tls is None:
                _Handler(request, client_address, self, connection)
                return
            with self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as tls:
                connection.socket = tls
                tls.do_handshake()
                _Handler(cast("socket.socket", tls), client_address, self, connection)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Close connections past their deadline. The base class calls this at every poll."""
        long_ago = time.monotonic() - DEADLINE_SECONDS
        with self._guard:
            for connection in self._connections.values():
                if connection.since < long_ago:
                    connection.cut()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: clients that disconnect, speak no TLS or are cut off are normal."""


def _named(site: Application) -> Application:
    """``site`` with the name of the server in each answer, in place of the standard library's versions."""

    def application(environ: Environ, start: Start) -> Iterable[bytes]:
        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [("Server", NAME), *headers], *rest)

        return site(environ, started)

    return application


class _Handler(WSGIRequestHandler):
    """Answers one request per connection."""

    def __init__(self, request: Any, address: Any, server: Server, connection: _Connection) -> None:
        self._connection = connection
        super().__init__(request, address, server)

    def setup(self) -> None:
        """Limit the bytes that are read."""
        super().setup()
        self.rfile = cast("io.BufferedReader", _Bounded(self.rfile))

    def parse_request(self) -> bool:
        """Parse, and note that the request has been received."""
        parsed = super().parse_request()
        self._connection.awaits_request = False
        return parsed

    def version_string(self) -> str:
        """The ``Server`` of answers to malformed requests."""
        return NAME

    def get_environ(self) -> Environ:
        """The request's variables, with a function that says whether the connection was closed."""
        return {**super().get_environ(), CUT_OFF: lambda: self._connection.cut_off}

    def address_string(self) -> str:
        """Return the address without a name lookup."""
        return str(self.client_address[0])

    def get_stderr(self) -> Any:
        """Swallow wsgiref's messages about clients that disconnect during the answer."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are frequent."""


class _Bounded:
    """A request's lines; all lines after the first may have :data:`HEADER_BYTES` together."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = HEADER_BYTES
        """Bytes that all lines after the first may still have."""
        self._first = True
        """Whether the first line has not been read yet."""

    def readline(self, size: int = -1) -> bytes:
        """Read one line. Raises LineTooLong past the limit, which the parser answers with a 431."""
        line = cast("bytes", self._file.readline(size))
        if not self._first:
            self._left -= len(line)
            if self._left < 0:
                raise http.client.LineTooLong("headers")
        self._first = False
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``[HOST]:PORT`` or ``:PORT``. Raises :class:`LedgerError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise LedgerError(f"{address!r} is no listen address; an example is 127.0.0.1:9464.")
    return host.strip("[]") or "0.0.0.0", int(port)


def listen(address: str, site: Application, security: Security = OPEN) -> Server:
    """Start a server at ``address`` in a thread. Raises :class:`LedgerError` if it can't listen there."""
    host, port = parse_address(address)
    try:
        server = Server(host, port, site, security)
    except OSError as error:
        raise LedgerError(f"Can't listen on {host}:{port}: {error.strerror}.") from error
    serving = functools.partial(server.serve_forever, poll_interval=POLL_SECONDS)
    threading.Thread(target=serving, name="kvledger-web", daemon=True).start()
    return server


# --- Which format and encoding a scraper accepts, by RFC 9110.
#
# prometheus_client reads the same headers without their weights, and raises on some of them.

OPENMETRICS = "application/openmetrics-text"
TEXT = "text/plain"

_WEIGHT = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
_VERSION = re.compile(r"(\d{1,3})\.\d{1,3}\.\d{1,3}")


class Range(NamedTuple):
    """One element of an ``Accept`` or ``Accept-Encoding`` header. ``place``: its number in the header."""

    name: str
    parameters: dict[str, str]
    weight: float
    place: int


def ranges(header: str) -> list[Range]:
    """The elements of a header, without those whose weight is malformed."""
    found = []
    for place, element in enumerate(header.split(",")):
        name, *rest = (part.strip() for part in element.split(";"))
        parameters = {
            key.strip().lower(): text.strip().strip('"')
            for key, _, text in (part.partition("=") for part in rest)
        }
        weight = parameters.get("q", "1")
        if name and _WEIGHT.fullmatch(weight):
            found.append(Range(name.lower(), parameters, float(weight), place))
    return found


def accepted_format(header: str) -> str:
    """The format that an ``Accept`` header likes best, else plain text."""
    found = ranges(header)
    offers = [(*_liking(offer, found), offer) for offer in (TEXT, OPENMETRICS)]
    weight, _, offer = max(offers, key=lambda liking: liking[:2])
    return offer if weight else TEXT


def accepts_gzip(header: str) -> bool:
    """Whether an ``Accept-Encoding`` header asks for gzip."""
    return any(one.name == "gzip" and one.weight > 0 for one in ranges(header))


def _liking(offer: str, found: Sequence[Range]) -> tuple[float, int]:
    """The weight of a format, and minus its place in the header; the closest match counts."""
    kinds = offer.partition("/")[0] + "/*", "*/*"
    matches = _exact(offer, found)
    for kind in kinds:
        matches = matches or [one for one in found if one.name == kind]
    return max(((one.weight, -one.place) for one in matches), default=(0.0, 0))


def _exact(offer: str, found: Sequence[Range]) -> list[Range]:
    """The elements that name a format in a version that can be answered."""
    return [
        one
        for one in found
        if one.name == offer and (offer == TEXT or _first(one.parameters.get("version", "1.0.0")) >= 1)
    ]


def _first(version: str) -> int:
    """The first number of a version; 0 for what is no version."""
    match = _VERSION.fullmatch(version)
    return int(match[1]) if match else 0
