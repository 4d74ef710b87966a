"""The chart of the sidecar's page."""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace
from tests import journals
from tests.exporters.sidecar.test_http_server import served

from kvledger.audit import causes
from kvledger.audit.events import LeftWaiting, RequestAdded, Snapshot, Stepped
from kvledger.audit.journal.writer import JournalWriter

HEADING = "What bound each step of the last hour"


def written(folder: Path, *, hours_ago: float) -> None:
    """A step that leaves a request waiting for a seat, after one that leaves none."""
    began = time.time() - 3600 * hours_ago
    started = replace(journals.STARTED, wall_seconds=began, configuration={"queue_causes": True})
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write(
        [
            started,
            Snapshot(0, 0, [], 0),
            Stepped(5, 1, [], []),
            RequestAdded(6, 1, "<b>", 17),
            LeftWaiting(7, causes.QUEUED_RUNNING_LIMIT),
            Stepped(8, 2, [], []),
        ]
    )
    writer.close()


def test_the_page_draws_what_bound_the_steps_of_the_last_hour(tmp_path: Path) -> None:
    written(tmp_path / "engine-0", hours_ago=0.5)
    with served(tmp_path) as client:
        page = client.get("/").text

    assert HEADING in page
    assert "1 of 2 steps: all seats taken" in page
    assert "1 of 2 steps: no request waited" in page
    assert 1 == page.count('height="50.00"\nclass="limit-1"')


def test_steps_of_an_earlier_hour_are_not_drawn(tmp_path: Path) -> None:
    written(tmp_path / "engine-0", hours_ago=1.5)
    with served(tmp_path) as client:
        assert HEADING not in client.get("/").text
