"""The clock of an engine's machine is corrected while the engine runs: it started in 1970."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.checks.kv_histories import CACHE, without
from tests.exporters.sidecar.test_follower import following
from tests.exporters.sidecar.test_live_events import STARTED, Written, figures

from kvledger.audit.events import Gap, Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.metrics.metric_list import collect
from kvledger.exporters.sidecar.follower import Follower

AT = 60_000_000
CORRECT = 1.7e9


def newest(follower: Follower) -> float:
    return next(
        float(sample.value)  # type: ignore[arg-type]
        for metric, samples in collect(follower.audits)
        if metric.name == "kvledger_last_event_timestamp_seconds"
        for sample in samples
    )


@pytest.mark.parametrize("restart", [False, True])
def test_the_sidecar_counts_times_by_the_corrected_clock(tmp_path: Path, restart: bool) -> None:
    writer = JournalWriter(tmp_path / "engine")
    writer.rotate()
    started = replace(journals.STARTED, wall_seconds=30.0)
    writer.write([started, Snapshot(0, 0, [], 0)])
    with following(tmp_path) as follower:
        assert 30.0 == newest(follower)
        follower.save()
        writer.rotate()
        writer.write([replace(started, at=AT, wall_seconds=CORRECT), Snapshot(AT, 0, [], 0)])
        if not restart:
            follower.poll()
            assert CORRECT == newest(follower)
            assert [CORRECT - 60] == [audit.began_seconds for audit in follower.audits]
    with following(tmp_path) as follower:
        assert CORRECT == newest(follower)
        writer.write([Gap(AT + 1_000_000, 1, "test")])
        writer.close()
        follower.poll()
        follower.poll()
        assert CORRECT + 1 == newest(follower)


@pytest.mark.parametrize("corrected_by", [0.5, CORRECT])
def test_kv_events_are_compared_only_while_the_clock_is_one(tmp_path: Path, corrected_by: float) -> None:
    """Lost KV events are found, unless the journal and the recording have times by different clocks."""
    written = Written(tmp_path)
    written.changed(*CACHE[:3])
    written.published(without(2, 3, 4, 5))
    with following(tmp_path) as follower:
        before = figures(follower)
        wall_seconds = STARTED.wall_seconds + 50 + corrected_by
        written.engine.rotate()
        written.changed([replace(STARTED, at=50_000_000, wall_seconds=wall_seconds)])
        written.changed([Snapshot(50_000_000, 40, [], 0)], *CACHE[3:])
        written.published(without(0, 1, 2, 3))
        written.close()
        follower.poll()
        found = figures(follower)["violations"] - before["violations"]
    (audit,) = audit_paths([tmp_path]).engines

    compared = corrected_by < 1
    assert compared == (found > 0) == bool(audit.violations)
    assert compared != any("the machine's clock was corrected" in note for note in audit.notes)
