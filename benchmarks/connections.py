"""What a flood of connections does to the scrapes of the sidecar.

Run it with ``python benchmarks/connections.py``; it prints the table of ``docs/sidecar.md``. Each connection
sends nothing, one letter, or a whole request whose answer it never reads, and stays open until the file
handles of this process are used up; then the oldest are closed. Meanwhile ``/metrics`` is asked four times a
second.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import restarts

CONNECTIONS = 10_000
SPARE_HANDLES = 64
"""File handles of this process that are not of the flood."""
FIRST_BYTES = (b"", b"G", b"GET /metrics HTTP/1.1\r\n\r\n")
INTERVAL_SECONDS = 0.25


class Scraper(threading.Thread):
    """Asks for the metrics until :attr:`stop` is set."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        """Address of the metrics."""
        self.stop = threading.Event()
        """Set when the flood is over."""
        self.seconds: list[float] = []
        """What each answer took."""
        self.failed = 0
        """How many scrapes got no answer."""

    def run(self) -> None:
        while not self.stop.wait(INTERVAL_SECONDS):
            began = time.monotonic()
            try:
                with urllib.request.urlopen(self.url, timeout=30) as answer:
                    answer.read()
            except OSError:
                self.failed += 1
            else:
                self.seconds.append(time.monotonic() - began)


def flood(address: tuple[str, int], connections: int) -> int:
    """Open this many connections; the most that were open at once."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_HANDLES
    opened: collections.deque[socket.socket] = collections.deque()
    for number in range(connections):
        if len(opened) == room:
            opened.popleft().close()
        opened.append(socket.create_connection(address, timeout=30))
        with contextlib.suppress(OSError):  # closed already, for a newer one
            opened[-1].sendall(FIRST_BYTES[number % len(FIRST_BYTES)])
    most = len(opened)
    for each in opened:
        each.close()
    return most


def row(connections: int) -> str:
    """One line of the table."""
    with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name, socket.socket() as probe:
        restarts.write(Path(name), 0)
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
        probe.close()
        words = ["serve", name, "--web.listen-address", f"{address[0]}:{address[1]}", "--log.level", "error"]
        program = "from kvledger.cli import main; main()"
        with subprocess.Popen([sys.executable, "-c", program, *words]) as sidecar:
            scraper = Scraper(f"http://{address[0]}:{address[1]}/metrics")
            while not _answers(scraper.url):
                time.sleep(0.1)
            scraper.start()
            began = time.monotonic()
            most = flood(address, connections)
            seconds = time.monotonic() - began
            time.sleep(1.0)
            scraper.stop.set()
            scraper.join()
            sidecar.terminate()
        median, slowest = statistics.median(scraper.seconds), max(scraper.seconds)
    return (
        f"| {connections:,} | {most:,} | {seconds:.1f} s | {len(scraper.seconds)} | {scraper.failed} | "
        f"{median:.3f} s | {slowest:.3f} s | {sidecar.returncode} |"
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except OSError:
        return False


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("connections", type=int, nargs="?", default=CONNECTIONS)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * CONNECTIONS), hard))
    print("| connections | at once | within | scrapes | without an answer | median | slowest | exit code |")
    print("|---|---|---|---|---|---|---|---|")
    print(row(given.connections), flush=True)


if __name__ == "__main__":
    main()
