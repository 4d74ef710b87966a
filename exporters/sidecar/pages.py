"""The sidecar's pages, as one WSGI application: metrics, findings, health, and one to look at.

Nothing but /-/healthy claims anything before the follower has caught up: a counter that is seen to
fall looks like a reset.
"""

from __future__ import annotations

import html
import http.client
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from ... import __version__
from ...audit.checks.registry import catalogue, explain
from ...audit.errors import LedgerError
from ...audit.replay.engine_audit import EngineAudit
from ..metrics.prometheus import AuditCollector
from .follower import Follower, Tell
from .http_server import OPEN, Application, Environ, Security, Start

FINDINGS_SHOWN = 200

Page = tuple[int, str, bytes]
"""Status, content type, body."""

PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
EXPLAIN = "/explain/"


class Site:
    """The WSGI application: who may come in, and which page answers."""

    def __init__(self, follower: Follower, security: Security = OPEN, tell: Tell = lambda _: None) -> None:
        self._follower = follower
        self._security = security
        self._tell = tell
        self._text = _exposition(follower, created=False)
        self._openmetrics = _exposition(follower, created=True)
        self._pages: dict[str, Callable[[], Page]] = {
            "/": self._landing,
            "/findings": self._findings,
            EXPLAIN: _explanations,
            EXPLAIN.rstrip("/"): _explanations,
            "/-/healthy": lambda: (200, PLAIN, b"Healthy.\n"),
            "/-/ready": lambda: (200, PLAIN, b"Ready.\n") if follower.ready.is_set() else _NOT_YET,
        }

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Answer one request. Nothing is raised: what fails is a 500 and one sentence."""
        try:
            return self._answer(environ, start)
        except Exception as error:
            self._tell(f"kvledger itself failed to answer ({type(error).__name__}: {error}).")
            return self._send(start, environ, (500, PLAIN, b"kvledger itself failed.\n"))

    def _answer(self, environ: Environ, start: Start) -> Iterable[bytes]:
        authorizes = self._security.authorizes
        if authorizes is not None and not authorizes(environ.get("HTTP_AUTHORIZATION", "")):
            page = (401, PLAIN, b"Unauthorized.\n")
            return self._send(start, environ, page, [("WWW-Authenticate", 'Basic realm="kvledger"')])
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._send(start, environ, (405, PLAIN, b"Only GET and HEAD.\n"), [("Allow", "GET, HEAD")])
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return self._metrics(environ, start)
        page_of = self._pages.get(path)
        if page_of is None and path.startswith(EXPLAIN):
            page = _explanation(path.removeprefix(EXPLAIN))
        else:
            page = page_of() if page_of else _NOT_FOUND
        return self._send(start, environ, page)

    def _metrics(self, environ: Environ, start: Start) -> Iterable[bytes]:
        if not self._follower.ready.is_set():
            return self._send(start, environ, _NOT_YET)
        _, content_type = choose_encoder(environ.get("HTTP_ACCEPT", ""))
        created = content_type.startswith("application/openmetrics-text")
        application = self._openmetrics if created else self._text

        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [*headers, *self._security.headers.items()], *rest)

        body = application({**environ, "REQUEST_METHOD": "GET"}, started)
        return [b""] if environ["REQUEST_METHOD"] == "HEAD" else body

    def _send(
        self,
        start: Start,
        environ: Environ,
        page: Page,
        more: Iterable[tuple[str, str]] = (),
    ) -> Iterable[bytes]:
        status, content_type, body = page
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body))), *more]
        headers += self._security.headers.items()
        start(f"{status} {http.client.responses[status]}", headers)
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def _findings(self) -> Page:
        if not self._follower.ready.is_set():
            return _NOT_YET
        with self._follower.lock:
            found = findings(self._follower.books)
        return 200, "application/json", msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"

    def _landing(self) -> Page:
        with self._follower.lock:
            rows = [_row(book) for book in self._follower.books]
            troubles = self._follower.troubles
        body = _landing_page(rows, troubles, ready=self._follower.ready.is_set())
        return 200, HTML, body.encode()


_NOT_FOUND: Page = (404, PLAIN, b"Not found. Try /metrics, or / for all there is.\n")
_NOT_YET: Page = (503, PLAIN, b"Reading what was written while nobody followed; not ready yet.\n")


def _explanation(id: str) -> Page:
    """What an invariant promises, as ``kvledger explain`` prints it: boards lead here."""
    try:
        return 200, PLAIN, f"{explain(id)}\n".encode()
    except LedgerError as error:
        return 404, PLAIN, f"{error}\n".encode()


def _explanations() -> Page:
    """Every invariant, each leading to what it promises."""
    rows = "".join(
        f'<li><a href="{EXPLAIN}{html.escape(id)}">{html.escape(id)}</a>, {row.severity}: '
        f"{html.escape(row.promise.replace('``', ''))}</li>"
        for id, row in catalogue().items()
    )
    return 200, HTML, _page("What is checked", f"<ul>{rows}</ul>").encode()


def _exposition(follower: Follower, *, created: bool) -> Application:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AuditCollector(lambda: follower.books, follower.lock, created=created))
    return cast("Application", make_wsgi_app(registry))


def findings(books: Iterable[EngineAudit]) -> dict[str, Any]:
    """The last findings of all engines by their first sight, newest last; ``left_out`` are older."""
    found = []
    for book in books:
        started = book.engine
        for violation in book.auditor.violations:
            at = started.wall_seconds + (violation.at - started.at) / 1e6 if started else 0.0
            found.append((at, violation))
    found.sort(key=lambda pair: pair[0])
    shown = [{"time": at, **msgspec.to_builtins(violation)} for at, violation in found[-FINDINGS_SHOWN:]]
    return {"findings": shown, "left_out": len(found) - len(shown)}


def _row(book: EngineAudit) -> tuple[str, ...]:
    ledger = book.auditor.ledger
    read_to = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ledger.read_to)) if book.engine else ""
    return (
        book.name,
        book.auditor.verdict,
        f"{book.closed.requests:,}",
        f"{len(ledger.open):,}",
        str(sum(1 + violation.repeats for violation in book.auditor.violations)),
        read_to,
    )


_COLUMNS = ("Engine", "Verdict", "Requests ended", "Open", "Findings", "Last event (UTC)")
_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em;max-width:60em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ddd}"
    "td,th{white-space:nowrap}td:nth-child(n+3),th:nth-child(n+3){text-align:right}"
    "td{font-variant-numeric:tabular-nums}"
)


def _landing_page(rows: list[tuple[str, ...]], troubles: list[str], *, ready: bool) -> str:
    escaped = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    table = "".join(f"<tr>{cells}</tr>" for cells in escaped)
    heads = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    said = "" if ready else "<p>Reading what was written while nobody followed; not ready yet.</p>"
    if ready and not rows:
        said = "<p>No engine has written a journal yet.</p>"
    said += "".join(f"<p><strong>{html.escape(trouble)}</strong></p>" for trouble in troubles)
    body = (
        f"<p>The KV-cache token ledger beside these engines, version {__version__}.</p>{said}"
        '<ul><li><a href="/metrics">/metrics</a>, for Prometheus</li>'
        '<li><a href="/findings">/findings</a>, what is wrong, as JSON</li>'
        f'<li><a href="{EXPLAIN}">{EXPLAIN}</a>, what is checked</li>'
        '<li><a href="/-/healthy">/-/healthy</a>: the process answers</li>'
        '<li><a href="/-/ready">/-/ready</a>: everything written before it started was read</li></ul>'
        + (f"<table><thead><tr>{heads}</tr></thead><tbody>{table}</tbody></table>" if rows else "")
    )
    return _page("kvledger", body)


def _page(heading: str, body: str) -> str:
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>kvledger</title>'
        f"<style>{_STYLE}</style></head><body><h1>{heading}</h1>{body}</body></html>\n"
    )
