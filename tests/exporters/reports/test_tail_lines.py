"""``kvledger audit follow``: lines for a journal that is being written, and when it ends."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import journals
from tests.histories import events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStopped, Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.reports.tail import LiveTail, follow, line

EXAMINED = "at level tokens: counts, progress; not examined: block contents, ownership"


def started(folder: Path) -> JournalWriter:
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write([journals.STARTED, Snapshot(0, 0, [], 0)])
    return writer


def test_a_growing_journal_is_followed(tmp_path: Path) -> None:
    writer = started(tmp_path / "engine")
    stream = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    tail = LiveTail(tmp_path)
    writer.write(stream[:6])
    assert [] == tail.poll()
    assert line(tail.now()).startswith(
        f"clean {EXAMINED}. 1 request, 0 violations, 1 running, 0 waiting, 0 preemptions, 0 prompt tokens"
    )
    assert not tail.ended

    writer.write([*stream[6:], EngineStopped(1_000, "shutdown")])
    writer.close()

    assert "tokens/negative" in {violation.id for violation in tail.poll()}
    assert line(tail.now()).startswith(
        f"violated {EXAMINED}. 1 request, 2 violations, 0 running, 0 waiting, 1 preemption, 200 prompt tokens"
    )
    assert tail.ended


def test_later_journals_are_followed(tmp_path: Path) -> None:
    journals.clean(tmp_path / "one")
    tail = LiveTail(tmp_path)
    tail.poll()
    journals.clean(tmp_path / "two")

    tail.poll()

    assert line(tail.now()).startswith(f"clean {EXAMINED}. 2 requests")


def test_open_requests_of_a_killed_engine_are_unknown(tmp_path: Path) -> None:
    """As in the sidecar, whose follower tail uses."""
    writer = started(tmp_path / "engine")
    writer.write(events(200, journals.CLEAN)[:6])
    tail = LiveTail(tmp_path)
    tail.poll()
    assert line(tail.now()).startswith(f"clean {EXAMINED}. 1 request, 0 violations, 1 running")

    writer.abandon()
    tail.poll()

    assert tail.ended
    assert line(tail.now()).startswith(f"unknown {EXAMINED}. 1 request, 0 violations, 0 running")


def test_tail_ends_when_all_engines_have_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journals.violated(tmp_path / "violated")

    follow(tmp_path, poll_seconds=0.01)

    total, *findings = capsys.readouterr().out.splitlines()
    assert total.startswith(f"violated {EXAMINED}. 1 request")
    assert all(line.startswith("violation tokens/") for line in findings)


def test_a_folder_without_a_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is empty: no journal was written there yet"):
        follow(tmp_path)


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_exits_with_130(tmp_path: Path, terminal: bool) -> None:
    """A pipe gets plain lines; on a terminal the last table stays."""
    journals.clean(tmp_path / "clean")
    reads, writes = os.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvledger", "audit", "follow", str(tmp_path), "--wait"],
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(writes)
    seen = b""
    while b"clean" not in seen:
        seen += os.read(reads, 4096)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    with process.stderr as stderr:
        assert ("", 130) == (stderr.read(), process.wait(30))
    assert terminal == (b"\x1b" in seen)
    os.close(reads)


def test_json_is_one_object_per_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journals.violated(tmp_path / "violated")

    follow(tmp_path, poll_seconds=0.01, format="json")

    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["finding", "finding", "totals"] == [one["kind"] for one in objects]
    assert ("violated", 1, 200) == tuple(
        objects[-1][name] for name in ("verdict", "requests", "prompt_tokens")
    )


def test_csv_has_the_totals_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journals.violated(tmp_path / "violated")

    follow(tmp_path, poll_seconds=0.01, format="csv")

    (line,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert ("violated", "1") == (line["verdict"], line["requests"])


def test_a_remote_address_can_not_be_followed() -> None:
    with pytest.raises(LedgerError, match="only folders of this machine can"):
        follow(Path("memory://traces"))
