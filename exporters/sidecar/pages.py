"""The sidecar's pages as one WSGI application: metrics, findings, health, and HTML pages.

The HTML is in ``templates/``; sockets and TLS are in ``http_server.py``. Before the follower has caught up,
every page with figures answers 503: a counter that starts low and climbs would look like traffic.
"""

from __future__ import annotations

import gzip
import http.client
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from ... import __version__
from ...audit.analysis.step_times import LIMITS
from ...audit.checks.auditor import together
from ...audit.checks.coverage import count_words, verdict_words
from ...audit.checks.registry import catalogue, explain
from ...audit.errors import LedgerError
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.text import shown_id
from ..answer import percent
from ..files import environment
from ..metrics.metric_list import collect
from ..metrics.openmetrics import Exposition, exposition
from ..metrics.prometheus import AuditCollector
from .follower import Follower, Notify, ignore
from .http_server import (
    CUT_OFF,
    OPEN,
    OPENMETRICS,
    Busy,
    Environ,
    Security,
    Start,
    accepted_format,
    accepts_gzip,
)
from .processes import AccountReader, Shown

FINDINGS_SHOWN = 200

STRIPS = 12
"""Engines whose steps are drawn; a page of more is not looked at."""

Page = tuple[int, str, bytes]
"""Status, content type, body."""

TELEMETRY_PATH = "/metrics"
"""Where the metrics are, if ``--web.telemetry-path`` names no other path."""

GZIP_LEVEL = 6
"""The highest level takes three times as long for 2 % less."""

PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
METRICS = {
    False: "text/plain; version=0.0.4; charset=utf-8",
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
"""The content type of metrics, by whether the format is OpenMetrics."""
EXPLAIN = "/explain/"
REQUEST = "/request"

_TEMPLATES = environment(Path(__file__).parent / "templates", Path(__file__).parents[1] / "templates")


class Site:
    """The WSGI application: checks the password, then calls the function of the path."""

    def __init__(
        self,
        follower: Follower,
        security: Security = OPEN,
        notify: Notify = ignore,
        telemetry_path: str = TELEMETRY_PATH,
    ) -> None:
        self._follower = follower
        self._security = security
        self._notify = notify
        self._telemetry_path = telemetry_path
        self.accounts = AccountReader()
        """Reads the accounts that ``/request`` is asked for."""
        self._text = _registry(follower, created=False)
        self._openmetrics = _registry(follower, created=True)
        """The metrics in OpenMetrics, with ``_created`` samples."""
        self._process = CollectorRegistry(auto_describe=False)
        _register_process(self._process)
        self._exposition = Exposition()
        self._pages: dict[str, Callable[[], Page]] = {
            "/": self._landing,
            "/findings": self._findings,
            EXPLAIN: _explanations,
            EXPLAIN.rstrip("/"): _explanations,
            "/-/healthy": self._healthy,
            "/health": self._healthy,
            "/-/ready": lambda: (200, PLAIN, b"Ready.\n") if follower.ready.is_set() else _NOT_YET,
        }
        """By path: what makes the page."""

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Answer one request. An exception becomes a 500 with one sentence."""
        try:
            return self._answer(environ, start)
        except Exception as error:
            self._notify(f"kvledger itself failed to answer ({type(error).__name__}: {error}).")
            return self._send(start, environ, (500, PLAIN, b"kvledger itself failed.\n"))

    def _answer(self, environ: Environ, start: Start) -> Iterable[bytes]:
        try:
            if not self._authorized(environ):
                page = (401, PLAIN, b"Unauthorized.\n")
                return self._send(start, environ, page, [("WWW-Authenticate", 'Basic realm="kvledger"')])
        except Busy:
            page = (429, PLAIN, b"Too many passwords are being checked.\n")
            return self._send(start, environ, page, [("Retry-After", "1")])
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._send(start, environ, (405, PLAIN, b"Only GET and HEAD.\n"), [("Allow", "GET, HEAD")])
        path = environ.get("PATH_INFO", "")
        if path == self._telemetry_path:
            return self._metrics(environ, start)
        if path == REQUEST:
            return self._send(start, environ, self._request(environ))
        page_of = self._pages.get(path)
        if page_of is None and path.startswith(EXPLAIN):
            page = _explanation(path.removeprefix(EXPLAIN))
        else:
            page = page_of() if page_of else _NOT_FOUND
        return self._send(start, environ, page)

    def _authorized(self, environ: Environ) -> bool:
        authorizes = self._security.authorizes
        if authorizes is None:
            return True
        header, client = environ.get("HTTP_AUTHORIZATION", ""), environ.get("REMOTE_ADDR", "")
        return authorizes(header, client, environ.get(CUT_OFF, bool))

    def _metrics(self, environ: Environ, start: Start) -> Iterable[bytes]:
        if not self._follower.ready.is_set():
            return self._send(start, environ, _NOT_YET)
        openmetrics = accepted_format(environ.get("HTTP_ACCEPT", "")) == OPENMETRICS
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
        text = self._all_openmetrics() if openmetrics and not names else self._text_of(openmetrics, names)
        packed = accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING", ""))
        body = gzip.compress(text, GZIP_LEVEL) if packed else text
        more = [("Content-Encoding", "gzip")] if packed else []
        return self._send(start, environ, (200, METRICS[openmetrics], body), more)

    def _all_openmetrics(self) -> bytes:
        with self._follower.lock:
            engines = self._exposition.text(collect(self._follower.audits))
        return (engines + exposition(self._process.collect())).encode()

    def _text_of(self, openmetrics: bool, names: list[str] | None) -> bytes:
        registry = self._openmetrics if openmetrics else self._text
        asked = registry.restricted_registry(names) if names else registry
        return exposition(asked.collect()).encode() if openmetrics else generate_latest(asked)

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

    def _healthy(self) -> Page:
        """Whether the follower and the other threads move on. Takes no lock."""
        seconds = self._follower.stuck_seconds
        if seconds:
            return 503, PLAIN, f"No journal was read on for {seconds:.0f} seconds.\n".encode()
        dead = [name for name, one in list(self._follower.health.threads.items()) if one.is_dead]
        if dead:
            return 503, PLAIN, f"Not at work: {', '.join(dead)}. The log says why.\n".encode()
        return 200, PLAIN, b"Healthy.\n"

    def _findings(self) -> Page:
        if not self._follower.ready.is_set():
            return _NOT_YET
        with self._follower.lock:
            data = findings(self._follower.audits)
        return 200, "application/json", msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"

    def _request(self, environ: Environ) -> Page:
        """The account of the request that the query names by ``id``, in all journals or in one."""
        if not self._follower.ready.is_set():
            return _NOT_YET
        query = parse_qs(environ.get("QUERY_STRING", ""))
        asked = shown_id(query.get("id", [""])[-1].strip())
        chosen = query.get("journal", [""])[-1]
        with self._follower.lock:
            followed = sorted((name, one.exported.name) for name, one in self._follower.journals.items())
            paths = self._follower.paths
        if not asked:
            shown = Shown(200, "", [])
        elif chosen and chosen not in paths:
            shown = Shown(404, "", ["There is no such journal any more; choose another one."])
        else:
            where = paths[chosen] if chosen else self._follower.path
            read = [where] if chosen else paths.values()
            shown = self.accounts.read(where, read, asked, environ.get(CUT_OFF, bool))
        page = _html("request.html.j2", asked=asked, chosen=chosen, followed=followed, shown=shown)
        return page if shown.status == 200 else (shown.status, *page[1:])

    def _landing(self) -> Page:
        now = time.time()
        with self._follower.lock:
            rows = [_row(engine_audit) for engine_audit in self._follower.audits]
            strips, strips_left = _strips(self._follower.audits, int(now // 60))
            problems = self._follower.problems
            left = len(self._follower.ended.folded)
        return _html(
            "engines.html.j2",
            ready=self._follower.ready.is_set(),
            columns=_COLUMNS,
            rows=rows,
            strips=strips,
            strips_left=strips_left,
            limits=list(LIMITS.values()),
            problems=problems,
            left=left,
            telemetry_path=self._telemetry_path,
            request=REQUEST,
        )


class Bar(NamedTuple):
    """A part of a minute's steps in the chart; ``height`` and ``top`` in hundredths of the strip."""

    minute: int
    limit: int
    top: float
    height: float
    says: str


def _strips(audits: Iterable[FollowedAudit], now: int) -> tuple[list[tuple[str, int, str, list[Bar]]], int]:
    """Of the engines with the most steps of the last hour, and how many more had some.

    Each has its name, its steps, the shares of the limits in words, and its bars.
    """
    found = []
    for audit in audits:
        minutes = audit.step_limits.by_minute(now)
        by_limit = [sum(counts) for counts in zip(*(counts for _, counts in minutes), strict=True)]
        if steps := sum(by_limit):
            shares = ", ".join(
                f"{percent(count / steps)} {LIMITS[limit]}" for limit, count in enumerate(by_limit) if count
            )
            bars = [bar for place, row in enumerate(minutes) for bar in _bars(place, *row)]
            found.append((audit.name, steps, shares, bars))
    found.sort(key=lambda row: -row[1])
    return found[:STRIPS], len(found[STRIPS:])


def _bars(place: int, minute: int, counts: list[int]) -> Iterable[Bar]:
    """The shares of one minute's steps, from the top."""
    top, whole = 0.0, sum(counts)
    at = time.strftime("%H:%M UTC", time.gmtime(minute * 60))
    for limit, count in enumerate(counts):
        if count:
            height = 100 * count / whole
            yield Bar(place, limit, top, height, f"{at}: {count:,} of {whole:,} steps: {LIMITS[limit]}")
            top += height


_NOT_FOUND: Page = (404, PLAIN, b"Not found. Try /metrics, or / for the list of pages.\n")
_NOT_YET: Page = (
    503,
    PLAIN,
    b"Reading the events that were written before this process started; not ready yet.\n",
)


def _explanation(id: str) -> Page:
    """Explain an invariant as ``kvledger explain`` does; dashboards link here."""
    try:
        return 200, PLAIN, f"{explain(id)}\n".encode()
    except LedgerError as error:
        return 404, PLAIN, f"{error}\n".encode()


def _explanations() -> Page:
    """Every invariant, with a link to its explanation."""
    return _html("invariants.html.j2", invariants=catalogue().values())


def _registry(follower: Follower, *, created: bool) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AuditCollector(lambda: follower.audits, follower.lock, created=created))
    _register_process(registry)
    return registry


def _register_process(registry: CollectorRegistry) -> None:
    ProcessCollector(registry=registry)  # process_*: this process, not an engine's
    PlatformCollector(registry=registry)  # python_info
    GCCollector(registry=registry)  # python_gc_*


def findings(audits: Iterable[FollowedAudit]) -> dict[str, Any]:
    """The last findings of all engines, newest last.

    ``left_out`` counts the others, ``found`` all of them by invariant; ``examined`` has each engine's verdict
    with what it covers.
    """
    by_time, engines = [], list(audits)
    for engine_audit in engines:
        began = engine_audit.began_seconds
        for violation in engine_audit.auditor.violations:
            seconds = 0.0 if began is None else began + violation.at / 1e6
            by_time.append((seconds, violation))
    by_time.sort(key=lambda pair: pair[0])
    shown = [
        {
            "time": seconds,
            **msgspec.to_builtins(violation),
            "stop_now": catalogue()[violation.id].stop_now,
        }
        for seconds, violation in by_time[-FINDINGS_SHOWN:]
    ]
    found = together(row for engine_audit in engines for row in engine_audit.found)
    return {
        "findings": shown,
        "left_out": sum(row.findings for row in found) - len(shown),
        "found": msgspec.to_builtins(found),
        "examined": {one.name: verdict_words(one.verdict, one.coverage) for one in engines},
    }


def _row(engine_audit: FollowedAudit) -> tuple[str, ...]:
    auditor = engine_audit.auditor
    last_event = time.gmtime(auditor.ledger.read_to)
    return (
        engine_audit.name,
        verdict_words(engine_audit.verdict, engine_audit.coverage),
        f"{engine_audit.closed.requests:,}",
        f"{len(auditor.ledger.open):,}",
        count_words(engine_audit.found),
        time.strftime("%Y-%m-%d %H:%M:%S", last_event) if engine_audit.engine else "",
    )


_COLUMNS = ("Engine", "Verdict", "Requests ended", "Open", "Findings", "Last event (UTC)")


def _html(template: str, **values: Any) -> Page:
    return (
        200,
        HTML,
        _TEMPLATES.get_template(template).render(explain=EXPLAIN, version=__version__, **values).encode(),
    )
