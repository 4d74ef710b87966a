"""Open very many connections to a sidecar: ``python -m tests.fuzz.connections 10000``.

Some send nothing, some half a request, some what is no request, some a whole one and never read. Meanwhile
each scrape must be answered. Prints how long the slowest took, and what the process grew to.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import tempfile
import time
from pathlib import Path

from tests import journals
from tests.exporters.sidecar.crash import Process, scrape

OPEN = 200
"""Connections that are open at a time; the sidecar itself keeps fewer."""
EVERY = 100
SENT = (b"", b"GET /metrics HTT", b"\0\xff" * 200, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
MOST_SECONDS = 15.0
MOST_BYTES = 200 << 20


def of_process(pid: int) -> tuple[int, int, int]:
    """Its resident bytes, threads and open files."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["Threads"]), files


def main() -> int:
    """Returns 1 if a scrape was not answered, or the process grew."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    rng, slowest, unanswered = random.Random(number), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        journals.clean(Path(folder, "engine-0"))
        process = Process(Path(folder))
        process.start()
        process.wait_until_ready()
        host, _, port = process.address.rpartition(":")
        opened: list[socket.socket] = []
        most = (0, 0, 0)
        for each in range(1, number + 1):
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection((host, int(port)), 5))
                opened[-1].sendall(rng.choice(SENT))
            while len(opened) > OPEN:
                opened.pop(rng.randrange(len(opened))).close()
            if each % EVERY == 0:
                began = time.monotonic()
                unanswered += not scrape(process.url)
                slowest = max(slowest, time.monotonic() - began)
                most = tuple(map(max, most, of_process(process.pid)))  # type: ignore[assignment]
        code, said = process.terminate()
    size, threads, files = most
    print(
        f"{number:,} connections, {OPEN} at a time: {number // EVERY:,} scrapes, {unanswered:,} unanswered, "
        f"the slowest {slowest:.1f} s; at most {size >> 20} MiB, {threads} threads, {files} open files; "
        f"ended with {code}\n{said}"
    )
    return bool(unanswered or code or slowest > MOST_SECONDS or size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
