"""HTTP for the sidecar: the standard library's WSGI server, held within bounds.

The parser is http.server's, as in prometheus_client. What is added are limits, so that whoever is
slow, huge or malformed costs nobody else anything:

- A connection has :data:`DEADLINE_SECONDS` in all, and a socket answers within :data:`SOCKET_SECONDS`.
- There is room for :data:`CONNECTIONS`. One more costs the oldest that has not yet said what it wants
  its place, for a scrape says so at once; else the oldest that takes longer than
  :data:`ANSWER_SECONDS`.
- A request's headers have :data:`HEADER_BYTES`; bodies are not read.
- The handshake of TLS and the check of a password happen in the connection's own thread.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec

from ...audit.errors import LedgerError

CONNECTIONS = 32
DEADLINE_SECONDS = 15.0
SOCKET_SECONDS = 5.0
ANSWER_SECONDS = 2.0
HEADER_BYTES = 32 << 10
POLL_SECONDS = 0.2
"""How often deadlines are looked at, and at most how long an end is waited for."""

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]
"""WSGI's own types; the standard library names them from Python 3.11 on."""

Authorizes = Callable[[str], bool]
"""Whether an Authorization header (or its absence, as "") lets its sender in."""


class Security(msgspec.Struct, frozen=True):
    """What ``--web.config.file`` asks for. None: not asked for."""

    tls: ssl.SSLContext | None = None
    authorizes: Authorizes | None = None
    headers: dict[str, str] = {}


OPEN = Security()


class _Connection:
    """One that is open: since when, its socket, and whether it still has to say what it wants."""

    __slots__ = ("asking", "cut_off", "since", "socket")

    def __init__(self, opened: socket.socket) -> None:
        self.since = time.monotonic()
        self.socket = opened
        self.asking = True
        self.cut_off = False

    def cut(self) -> None:
        """Wake its thread with an end of file. On the plain socket: TLS has nothing to say any more."""
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
        self._tls = security.tls
        self._connections: dict[int, _Connection] = {}
        self._guard = threading.Lock()
        super().__init__((host, port), cast("Any", _Handler))
        self.set_app(site)

    def server_bind(self) -> None:
        """As the base, but its look-up of a full host name may take as long as a resolver likes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"{'https' if self._tls else 'http'}://{shown}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for this connection, if there is room or room can be made."""
        with self._guard:
            if len(self._connections) >= CONNECTIONS and not self._make_room():
                self.shutdown_request(request)
                return
            self._connections[id(request)] = _Connection(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            raise

    def _make_room(self) -> bool:
        """Cut off who has not said what it wants, else who takes long to hear the answer."""
        long_ago = time.monotonic() - ANSWER_SECONDS
        known = self._connections.values()
        slow = [one for one in known if not one.cut_off and (one.asking or one.since < long_ago)]
        if not slow or len(known) >= 2 * CONNECTIONS:
            return False
        min(slow, key=lambda one: (not one.asking, one.since)).cut()
        return True

    def _forget(self, request: Any) -> None:
        with self._guard:
            del self._connections[id(request)]

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread."""
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
        """Called at every poll: whoever is past the deadline goes."""
        long_ago = time.monotonic() - DEADLINE_SECONDS
        with self._guard:
            for connection in self._connections.values():
                if connection.since < long_ago:
                    connection.cut()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, spoke no TLS, or was cut off, is no news."""


class _Handler(WSGIRequestHandler):
    """One request a connection."""

    server_version = "kvledger"
    sys_version = ""

    def __init__(self, request: Any, address: Any, server: Server, connection: _Connection) -> None:
        self._connection = connection
        super().__init__(request, address, server)

    def setup(self) -> None:
        """Bound what is read."""
        super().setup()
        self.rfile = cast("io.BufferedReader", _Bounded(self.rfile))

    def parse_request(self) -> bool:
        """Now it has said what it wants."""
        parsed = super().parse_request()
        self._connection.asking = False
        return parsed

    def address_string(self) -> str:
        """No look-up of names."""
        return str(self.client_address[0])

    def get_stderr(self) -> Any:
        """Where wsgiref would tell of a client that went away in the midst of its answer."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class _Bounded:
    """Lines of a request: after the first, :data:`HEADER_BYTES` in all."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = HEADER_BYTES
        self._first = True

    def readline(self, size: int = -1) -> bytes:
        """One line; LineTooLong, which the parser answers with a 431, where they are too many."""
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
        raise LedgerError(f"{address!r} is no listen address; one looks like 127.0.0.1:9464.")
    return host.strip("[]") or "0.0.0.0", int(port)


def listen(address: str, site: Application, security: Security = OPEN) -> Server:
    """A server at ``address`` that answers from now on. Raises :class:`LedgerError` if it can't."""
    host, port = parse_address(address)
    try:
        server = Server(host, port, site, security)
    except OSError as error:
        raise LedgerError(f"Can't listen on {host}:{port}: {error.strerror}.") from error
    serving = functools.partial(server.serve_forever, poll_interval=POLL_SECONDS)
    threading.Thread(target=serving, name="kvledger-web", daemon=True).start()
    return server
