"""Tells systemd that the sidecar is ready, and that it stops: a unit of ``Type=notify`` waits for it.

The protocol is one datagram to the socket in ``NOTIFY_SOCKET``:
https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ...audit.errors import LedgerError
from ...audit.journal.catalogue import find_journals
from ...audit.replay.checkpoint import HIDDEN
from ...audit.text import printable
from ..http_client import check_url
from ..metrics.otel import attach_telemetry
from . import http_server
from .engine_metrics import Reconciler
from .follower import Follower, Notify, ignore
from .pages import TELEMETRY_PATH, Site
from .processes import Compactor, seconds_of
from .threads import Threads

VARIABLE = "NOTIFY_SOCKET"


def tell_systemd(**state: object) -> bool:
    """Send ``READY=1`` and the like; returns False without systemd. Never raises."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract socket
        address = f"\0{address[1:]}"
    lines = "\n".join(f"{name}={value}" for name, value in state.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(lines.encode(), address)
        return True
    return False


# --- log -----------------------------------------------------------------------------------------------
#
# The sidecar's log on standard error: sentences, logfmt or JSON, as ``--log.format`` chooses.
#
# The keys and levels are those of Prometheus's own programs.


LEVELS = ("debug", "info", "warn", "error")
FORMATS = ("text", "logfmt", "json")


class Log:
    """Writes one line per sentence. A call logs a problem, :meth:`info` what is as it should be."""

    def __init__(self, level: str = "info", format: str = "text", stream: TextIO | None = None) -> None:
        self._least = LEVELS.index(level)
        """The lowest level that is written, as an index in ``LEVELS``."""
        self._format = format
        """One of ``FORMATS``."""
        self._stream = stream
        """Where lines go; None: the standard error of the moment."""

    def __call__(self, sentence: str) -> None:
        """Log a problem."""
        self._write("warn", sentence)

    def info(self, sentence: str) -> None:
        """Log the course of things."""
        self._write("info", sentence)

    def _write(self, level: str, sentence: str) -> None:
        if LEVELS.index(level) >= self._least:
            print(self._line(level, printable(sentence)), file=self._stream or sys.stderr, flush=True)

    def _line(self, level: str, sentence: str) -> str:
        if self._format == "text":
            return sentence
        now = time.time()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        fields = {
            "time": f"{seconds}.{int(now * 1000) % 1000:03}Z",
            "level": level.upper(),
            "msg": sentence,
        }
        if self._format == "json":
            return json.dumps(fields)
        fields["msg"] = json.dumps(sentence, ensure_ascii=False)
        return " ".join(f"{name}={value}" for name, value in fields.items())


# --- serve ---------------------------------------------------------------------------------------------
#
# ``kvledger serve``: start the follower, the HTTP server and OpenTelemetry; stop them at a signal.


STOP_SECONDS = 0.5
"""How long the batch that is being posted and the last checkpoint may delay the end, so that the sidecar
ends within a second. Without the last checkpoint, the next start reads the events since the one before."""

TELEMETRY_MILLISECONDS = 200
"""How long OpenTelemetry may delay the end."""

LATENCY_SECONDS = 0.05
"""How long a signal may go unseen."""


def serve(
    path: Path,
    address: str,
    notify: Notify,
    *,
    folder: Path | None,
    config: Path | None,
    engine_urls: Sequence[str] = (),
    inform: Notify | None = None,
    telemetry_path: str = TELEMETRY_PATH,
    compact: str = "",
    keep: str = "",
) -> None:
    """Follow the journals under ``path`` and answer at ``address`` until SIGTERM or SIGINT.

    ``folder`` keeps the checkpoint (:func:`state_folder` if None), ``config`` is the web
    configuration, and ``engine_urls`` are engines' own metrics, which are compared with the ledger.
    ``compact`` is the interval at which the journals are compacted, such as ``1h``; "": never. ``keep`` is
    the age up to which their rows are kept, such as ``30d``; "": all are. The ``OTEL_*`` variables turn
    OpenTelemetry on. ``notify`` gets a sentence for each problem, and ``inform`` the address of the metrics
    once they are ready. Raises :class:`LedgerError` for an address that is malformed or in use, a path that
    does not exist, and a folder that can't be written or is in use by another follower.
    """
    inform = inform or notify
    writer = _compactor(path, compact, keep, notify, inform)
    security = _checked(path, address, config, engine_urls, telemetry_path)
    kept = folder or state_folder(path, notify)
    try:
        follower = Follower(path, kept, notify)
    except OSError as error:
        raise LedgerError(f"{kept} can't be written: {error.strerror}.") from error
    reading = _Reading(follower)
    stop = reading.stop
    threads = Threads(follower.health, notify, stop)
    telemetry = None

    def ready(url: str) -> None:
        inform(f"Serving {url}{telemetry_path}")
        tell_systemd(STATUS=f"Serving {url}{telemetry_path}")
        if engine_urls:
            reconciler = Reconciler(engine_urls, lambda: follower.audits, follower.lock)
            threads.start("reconcile", lambda beat: reconciler.run(stop, beat))

    try:
        telemetry = attach_telemetry(lambda: follower.audits, follower.lock, start=threads.start)
        if telemetry is not None:
            follower.on_opened.append(telemetry.watch)
        site = Site(follower, security, notify, telemetry_path)
        server = http_server.listen(address, site, security)
        if writer is not None:
            writer.health = follower.health
            writer.start(threads.start)
        tell_systemd(READY=1, STATUS="Reading the events that were written before the start")
        try:
            reading.when_ready = lambda: ready(server.url)
            with _signals() as received:
                if not reading.until(received):
                    notify("Stopped without a last checkpoint, because a journal kept the follower busy.")
        finally:
            tell_systemd(STOPPING=1)
            site.accounts.close()
            server.shutdown()
            server.server_close()
    finally:
        if writer is not None:
            writer.close()
        if telemetry is not None:
            telemetry.close(TELEMETRY_MILLISECONDS)
        follower.close()


def check_config(
    path: Path,
    address: str,
    *,
    folder: Path | None,
    config: Path | None,
    engine_urls: Sequence[str] = (),
    telemetry_path: str = TELEMETRY_PATH,
    compact: str = "",
    keep: str = "",
) -> None:
    """Raise :class:`LedgerError` for what :func:`serve` would refuse; listens nowhere and writes nothing."""
    _checked(path, address, config, engine_urls, telemetry_path)
    if not path.exists():
        raise LedgerError(f"There is no {path}.")
    _compactor(path, compact, keep, ignore, ignore)
    if folder is not None:
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise LedgerError(f"{folder} can't be written.")


def _compactor(path: Path, compact: str, keep: str, notify: Notify, inform: Notify) -> Compactor | None:
    seconds = seconds_of(compact)
    if keep and not seconds:
        raise LedgerError("--keep removes rows when journals are compacted: it needs --compact.")
    return Compactor(path, seconds, notify, keep=keep, inform=inform) if seconds else None


def _checked(
    path: Path, address: str, config: Path | None, engine_urls: Sequence[str], telemetry_path: str
) -> http_server.Security:
    """Check the options; returns the settings of the web configuration."""
    http_server.parse_address(address)
    if not telemetry_path.startswith("/"):
        raise LedgerError(f"{telemetry_path!r} is no path of an address; an example is {TELEMETRY_PATH}.")
    for url in engine_urls:
        check_url(url, "an engine's metrics", "http://localhost:8000/metrics")
    security = http_server.OPEN
    if config is not None:
        from .web_config import load

        security = load(config)
    if path.is_file():
        find_journals([path])
    return security


def state_folder(path: Path, notify: Notify) -> Path | None:
    """Return the hidden folder in the journals' folder; None, with a notice, if that can't be written."""
    if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
        return path / HIDDEN
    if path.exists():
        notify(f"No checkpoint is kept, because {path} can't be written. Name a folder with --state.")
    return None


class _Reading:
    """The thread that follows the journals, so that no journal can keep the main thread from a signal."""

    def __init__(self, follower: Follower) -> None:
        self.stop = threading.Event()
        """Ends the thread after the batch that it reads."""
        self.when_ready: Callable[[], None] = ignore
        """Called once everything that was written before has been read."""
        self._follower = follower
        self._error: BaseException | None = None
        """What ended the thread before it was stopped."""

    def until(self, received: list[int]) -> bool:
        """Follow until a signal is ``received``; returns False if the thread did not end in time after it.

        Raises what the thread raised.
        """
        thread = threading.Thread(target=self._run, name="kvledger-reader", daemon=True)
        thread.start()
        while thread.is_alive() and not received:
            thread.join(LATENCY_SECONDS)
        self.stop.set()
        thread.join(STOP_SECONDS)
        if self._error is not None:
            raise self._error
        return not thread.is_alive()

    def _run(self) -> None:
        try:
            self._follower.catch_up(self.stop)
            if self._follower.ready.is_set():
                self.when_ready()
            self._follower.follow(self.stop)
        except BaseException as error:
            self._error = error


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT. The handler takes no lock, so it may interrupt any code."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
