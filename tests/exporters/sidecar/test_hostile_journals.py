"""`kvledger serve` beside journals that only an attacker writes: other engines, health, SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests import journals
from tests.planted import KINDS, OF_ROOT, plant
from tests.time_limits import HANGS

from kvledger.audit import events as ev
from kvledger.audit.journal.writer import JournalWriter

HUGE = 1 << 62
HOSTILE = (
    ev.PoolCalls(5, 1, ["f"], [0, 1, 0, 0, -5]),
    ev.PoolCalls(5, 1, ["f"], [4, -1, -1, 0, 4, 1, 0, 8, -HUGE]),
    ev.BlocksCached(5, 1, 0, [1, 0, 8, HUGE]),
    ev.Snapshot(5, 1, [], HUGE),
    ev.Repeated(5, HUGE),
    ev.Repeated(5, -HUGE),
)


def write_hostile(folder: Path) -> None:
    """A journal for each hostile event, and one with a FIFO in the place of a segment."""
    for number, event in enumerate(HOSTILE):
        writer = JournalWriter(folder / f"engine-{number}-66-0")
        writer.rotate()
        pool = ev.PoolSeen(0, 0, 0, 9, 0, 8, 0, [0, 16, 2])
        writer.write([journals.STARTED, ev.Snapshot(0, 0, [], HUGE if number == 4 else 0), pool])
        writer.write([event])
        writer.abandon()
    fifo = folder / "engine-9-66-0"
    journals.write(fifo, [], stopped=False)
    os.mkfifo(fifo / "00000002.kvl")


def test_a_hostile_journal_stops_neither_scrapes_nor_a_signal(tmp_path: Path) -> None:
    journals.write(tmp_path / "engine-8-8-0", [], configuration={"model": "served"})
    write_hostile(tmp_path)
    command = [
        sys.executable,
        "-m",
        "kvledger",
        "serve",
        str(tmp_path),
        "--web.listen-address",
        "127.0.0.1:0",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(line for line in process.stderr if line.startswith("Serving")).split()[1]
        began = time.monotonic()
        with urllib.request.urlopen(url, timeout=HANGS) as answer:
            text = answer.read().decode()
        with urllib.request.urlopen(url.replace("metrics", "-/healthy"), timeout=HANGS) as answer:
            healthy = answer.status
        process.send_signal(signal.SIGTERM)
        code = process.wait(HANGS)
    finally:
        process.kill()
        process.stderr.close()

    assert (0, 200) == (code, healthy)
    assert time.monotonic() - began < HANGS
    assert 'kvledger_requests_total{engine="served / engine 0"' in text
    assert 'kvledger_gaps_total{engine="vllm / engine 0"' in text


def test_what_is_planted_stops_neither_scrapes_nor_a_signal(tmp_path: Path) -> None:
    """All kinds take turns; tests/cli/test_planted_files.py plants each under every name."""
    folder = tmp_path / "journals"
    journals.write(folder / "engine-0-8-0", [], configuration={"model": "served"})
    plant(folder, *(make for make in KINDS.values() if os.geteuid() == 0 or make not in OF_ROOT))
    command = [sys.executable, "-m", "kvledger", "serve", str(folder), "--state", str(tmp_path / "state")]
    with subprocess.Popen(
        [*command, "--web.listen-address", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            url = next(line for line in process.stderr if line.startswith("Serving")).split()[1]
            with urllib.request.urlopen(url, timeout=HANGS) as answer:
                text = answer.read().decode()
            for page in ("-/healthy", "-/ready", "findings", ""):
                with urllib.request.urlopen(url.replace("metrics", page), timeout=HANGS) as answer:
                    assert 200 == answer.status
            process.send_signal(signal.SIGTERM)
            assert 0 == process.wait(HANGS)
        finally:
            process.kill()

    assert 'kvledger_requests_total{engine="served / engine 0"' in text
