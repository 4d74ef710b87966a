"""Compares what clients of servers of several processes were told with the ledger.

Each server of :data:`SERVERS` is started with the plugin and gets the load of ``load.py`` or ``pairs.py``.
When it has ended, ``kvledger check usage`` compares each answer with the journals of its engines, and
``kvledger audit`` checks them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import page
from proofs.parallel import load, pairs, report
from tests.serving.pair import PLAIN, SHARING
from tests.serving.processes import SETTLE_SECONDS, wait_until

from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.format import is_live


class Layout(NamedTuple):
    """A server's options, and how many engines, workers, answers and clients that leave it has."""

    options: str
    engines: int
    workers: int
    answers: int = load.ANSWERS
    left: int = load.LEFT
    harmed: bool = False
    """Whether one load brings other KV than was computed, which is one finding."""
    prefilled: int = 0
    """Calls that the prefill engine alone gets."""


SERVERS = {
    "api-servers": Layout("--api-server-count 2", 1, 1),
    "data-parallel": Layout("--api-server-count 2 --data-parallel-size 2", 2, 2),
    "tensor-parallel": Layout("--tensor-parallel-size 2", 1, 2),
    "pipeline-parallel": Layout(load.PIPELINE, 1, 2),
} | {
    name: Layout(f"prefill and decode, {connector}", 2, 2, pairs.ANSWERS, pairs.LEFT)
    for name, connector in pairs.CONNECTORS.items()
}
SERVERS["changed-byte"] = Layout(
    "prefill and decode, NixlConnector, one changed byte", 2, 2, pairs.ANSWERS + 1, pairs.LEFT, harmed=True
)
SERVERS["expired-lease"] = Layout(
    "prefill and decode, NixlConnector, read after a lease of 1 s",
    engines=2,
    workers=2,
    answers=PLAIN + SHARING + 1,
    left=0,
    harmed=True,
    prefilled=len(pairs.OTHER_PROMPTS),
)
"""Servers by name."""


def run(name: str, folder: Path, level: str) -> report.Row:
    """Start a server, send the load, end the server, and compare."""
    layout = SERVERS[name]
    _serve(name, folder, level)
    journals = folder / "journals"
    wait_until(lambda: not any(map(is_live, find_journals([journals]))), SETTLE_SECONDS)
    _, usage = kvledger("check", "usage", journals, "--log", folder / "usage.jsonl")
    _, audit = kvledger("audit", journals)
    requests = [kvledger("audit", journal)[1]["requests"] for journal in find_journals([journals])]
    row = report.row(layout.options, requests, usage, audit)
    if name == "changed-byte":
        row = row._replace(wrong=tuple(pairs.problems_of_change(folder, audit["violations"])))
    elif name == "expired-lease":
        row = row._replace(wrong=tuple(pairs.problems_of_lease(audit["violations"])))
    for problem in _problems(name, row):
        _say(f"{name}: {problem}")
    return row


def _serve(name: str, folder: Path, level: str) -> None:
    """Start a server, send the load, and end the server."""
    started = time.monotonic()
    if name in pairs.CONNECTORS:
        with pairs.running(name, folder, level) as pair:
            served = time.monotonic()
            sending = {"changed-byte": pairs.send_changed, "expired-lease": pairs.send_late}
            sending.get(name, pairs.send)(pair)
    else:
        with load.running(folder, SERVERS[name].options, level) as server:
            served = time.monotonic()
            load.send(server)
    _say(f"{name}: ready after {served - started:.0f} s, ended {time.monotonic() - served:.0f} s later")


def _problems(name: str, row: report.Row) -> list[str]:
    layout = SERVERS[name]
    expected = ("content/transfer",) if layout.harmed else ()
    counts = layout.engines, layout.workers, layout.answers, layout.left
    return list(report.problems(row, *counts, expected, layout.prefilled))


def kvledger(*arguments: object) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    command = [sys.executable, "-m", "kvledger", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=_environment())
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _environment() -> dict[str, str]:
    """Without variables that other engines were given."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVLEDGER_")}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the servers, print the table; exit with 1 if a call is unexplained or an audit has a finding."""
    parser = argparse.ArgumentParser(prog="make proof NAME=parallel", description=__doc__)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)}; all if none")
    parser.add_argument("--level", default="content", help="the level of KVLEDGER_LEVEL")
    parser.add_argument("--keep", type=Path, help="a new folder in which journals and logs are kept")
    parser.add_argument("--write", action="store_true", help="also write the table into docs/usage.md")
    arguments = parser.parse_args(words)
    for name in arguments.servers:
        if name not in SERVERS:
            parser.error(f"{name!r} is no server; there are {', '.join(SERVERS)}")
    with tempfile.TemporaryDirectory(prefix="kvledger-servers-") as folder:
        kept = arguments.keep or Path(folder)
        rows = {name: run(name, kept / name, arguments.level) for name in arguments.servers or SERVERS}
    before = report.written() if arguments.write else []
    lines = report.merged(before, [report.line(row) for row in rows.values()])
    text = report.section(lines, arguments.level, page.software())
    print(text)
    if arguments.write:
        page.put(text, report.PAGE)
    return 1 if any(_problems(name, row) for name, row in rows.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
