"""``kvledger serve``: start the follower, the HTTP server and OpenTelemetry; stop them at a signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...audit.errors import LedgerError
from ...audit.journal.folder import find_journals
from ...audit.replay.checkpoint import HIDDEN
from ..metrics.otel import attach_telemetry
from . import http_server
from .follower import Follower
from .journal_finder import Notify
from .pages import Site
from .scrape_engine import attach_reconciliation, check_url


def serve(
    path: Path,
    address: str,
    notify: Notify,
    *,
    folder: Path | None,
    config: Path | None,
    engine_urls: Sequence[str] = (),
) -> None:
    """Follow the journals under ``path`` and answer at ``address`` until SIGTERM or SIGINT.

    ``folder`` keeps the checkpoint (:func:`state_folder` if None), ``config`` is the web
    configuration, ``engine_urls`` are engines' own metrics, which are compared with the ledger. The
    ``OTEL_*`` variables turn OpenTelemetry on. ``notify`` gets the address of the metrics once they are
    ready, and a sentence for each problem. Raises :class:`LedgerError` for an address that is malformed or
    in use, a path that does not exist, and a folder that can't be written or is in use by another follower.
    """
    http_server.parse_address(address)
    for url in engine_urls:
        check_url(url)
    security = http_server.OPEN
    if config is not None:
        from .web_config import load

        security = load(config)
    if path.is_file():
        find_journals([path])
    kept = folder or state_folder(path, notify)
    try:
        follower = Follower(path, kept, notify)
    except OSError as error:
        raise LedgerError(f"{kept} can't be written: {error.strerror}.") from error
    stop = threading.Event()
    telemetry = None
    try:
        telemetry = attach_telemetry(lambda: follower.audits, follower.lock)
        if telemetry is not None:
            follower.on_opened = telemetry.watch
        server = http_server.listen(address, Site(follower, security, notify), security)
        try:
            with _stopping(stop):
                follower.catch_up(stop)
                if follower.ready.is_set():
                    notify(f"Serving {server.url}/metrics")
                    if engine_urls:
                        attach_reconciliation(engine_urls, lambda: follower.audits, follower.lock, stop)
                follower.follow(stop)
        finally:
            server.shutdown()
            server.server_close()
    finally:
        if telemetry is not None:
            telemetry.close()
        follower.close()


def state_folder(path: Path, notify: Notify) -> Path | None:
    """Return the hidden folder in the journals' folder; None, with a notice, if that can't be written."""
    if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
        return path / HIDDEN
    if path.exists():
        notify(f"No checkpoint is kept, because {path} can't be written. Name a folder with --state.")
    return None


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set ``stop``."""
    before = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
