"""The sidecar compares recorded KV events with the blocks, also over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.checks.kv_histories import CACHE, POOL, STREAM, at, without
from tests.exporters.sidecar.test_follower import following

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStopped, Event, KVEventsReceived, Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.ledger import kv_events
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.recorded_events import routing
from kvledger.exporters.metrics.metric_list import collect
from kvledger.exporters.sidecar.follower import Follower

BEGAN = journals.STARTED.wall_seconds
SETTINGS = {"hash_key": "0123456789abcdef", "kv_events_port": 5557, "model": "tiny"}
STARTED = replace(journals.STARTED, level="blocks", configuration=SETTINGS)


class Written:
    """An engine's journal and a recording beside it, which grow."""

    def __init__(self, folder: Path, settings: dict[str, str | int] = SETTINGS, number: int = 1) -> None:
        self.engine = JournalWriter(folder / f"engine-{number}-1-0")
        self.events = JournalWriter(folder / f"events-{number}-1-0")
        for writer, started in (
            (self.engine, STARTED),
            (self.events, replace(STARTED, engine="kv-events", configuration=settings)),
        ):
            writer.rotate()
            writer.write([started, Snapshot(0, 0, [], 0)])
        self.engine.write([POOL])

    def changed(self, *some: list[Event]) -> None:
        for events in some:
            self.engine.write(events)

    def published(self, batches: list[KVEventsReceived]) -> None:
        shifted = [replace(each, published_seconds=each.published_seconds - 1000 + BEGAN) for each in batches]
        self.events.write([replace(each, at=at(round(each.published_seconds - BEGAN))) for each in shifted])

    def close(self) -> None:
        self.engine.write([EngineStopped(at(200), "shutdown")])
        self.engine.close()
        self.events.close()


def figures(follower: Follower) -> dict[str, float]:
    """The metrics of KV events and the findings in them, summed over their labels."""
    found: dict[str, float] = {}
    for metric, samples in collect(follower.audits):
        for sample in samples:
            about_events = metric.name.startswith(("kvledger_kv_event", "kvledger_rout"))
            if about_events or (metric.name == "kvledger_violations" and sample.labels[1][:7] == "events/"):
                name = metric.name.removeprefix("kvledger_")
                assert isinstance(sample.value, int | float)
                found[name] = found.get(name, 0) + sample.value
    return found


def expected(**given: int) -> dict[str, float]:
    names = ("kv_event_batches", "kv_event_blocks", "kv_event_gaps", "kv_event_lost_batches",
             "kv_event_agreed_changes", "kv_event_not_compared", "violations")  # fmt: skip
    names += ("routed_requests", "routing_predicted_tokens", "routing_found_tokens", "routing_missed_tokens",
              "routing_surplus_tokens", "routing_not_compared")  # fmt: skip
    return {name: given.get(name, 0) for name in names}


WHOLE = expected(kv_event_batches=6, kv_event_blocks=6, kv_event_agreed_changes=6)
GAP = expected(kv_event_batches=4, kv_event_blocks=4, kv_event_agreed_changes=4, kv_event_gaps=1,
               kv_event_lost_batches=2, violations=1)  # fmt: skip


@pytest.mark.parametrize(("stream", "wanted"), [(STREAM, WHOLE), (without(2, 3), GAP)], ids=["whole", "gap"])
def test_a_recording_beside_a_journal_is_compared(
    tmp_path: Path, stream: list[KVEventsReceived], wanted: dict[str, float]
) -> None:
    written = Written(tmp_path)
    written.changed(*CACHE)
    written.published(stream)
    written.close()

    with following(tmp_path) as follower:
        assert wanted == figures(follower)


@pytest.mark.parametrize(("stream", "wanted"), [(STREAM, WHOLE), (without(2, 3), GAP)], ids=["whole", "gap"])
def test_a_restart_at_any_time_changes_no_figure_and_no_counter_falls(
    tmp_path: Path, stream: list[KVEventsReceived], wanted: dict[str, float]
) -> None:
    written, before, rest = Written(tmp_path), dict.fromkeys(expected(), 0.0), list(stream)
    for number, changes in enumerate(CACHE):
        written.changed(changes)
        with following(tmp_path) as follower:
            follower.save()
        sent = [each for each in rest if each.sequence <= number]
        rest = rest[len(sent) :]
        written.published(sent)
        with following(tmp_path) as follower:
            follower.save()
            now = figures(follower)
        assert all(now.get(name, 0) >= value for name, value in before.items())
        before = now
    written.close()
    with following(tmp_path) as follower:
        follower.save()
        assert wanted == figures(follower)
    with following(tmp_path) as follower:
        assert wanted == figures(follower)


def test_the_figures_stay_when_the_journal_is_removed(tmp_path: Path) -> None:
    import shutil

    written = Written(tmp_path)
    written.changed(*CACHE)
    written.published(without(2, 3))
    written.close()
    with following(tmp_path) as follower:
        shutil.rmtree(tmp_path / "engine-1-1-0")
        follower.poll()
        assert GAP == figures(follower)


@pytest.mark.parametrize("settings", [{**SETTINGS, "kv_events_port": 5558}, {**SETTINGS, "hash_key": "x"}])
def test_a_recording_of_another_engine_is_not_read(tmp_path: Path, settings: dict[str, str | int]) -> None:
    written = Written(tmp_path, settings)
    written.changed(*CACHE)
    written.published(STREAM)
    with following(tmp_path) as follower:
        assert expected() == figures(follower)


def test_two_engines_at_one_port_at_the_same_time_are_not_compared(tmp_path: Path) -> None:
    """Two containers write into one folder, and both engines publish at the same port."""
    written, other = Written(tmp_path), Written(tmp_path, number=2)
    for each in (written, other):
        each.changed(*CACHE)
        each.published(STREAM)
    with following(tmp_path) as follower:
        assert {"violations": 0} == figures(follower)
        written.close()
        other.close()
        follower.poll()
        assert {"violations": 0} == figures(follower)
    audits = audit_paths([tmp_path]).engines
    assert [[], []] == [audit.violations for audit in audits]
    assert all("published at the same port at the same time" in audit.notes[-1] for audit in audits)
    with pytest.raises(LedgerError, match="published at the same port"):
        routing(journals_at([tmp_path]))


def test_an_engine_that_publishes_nothing_has_no_series(tmp_path: Path) -> None:
    journals.clean(tmp_path / "engine-1-1-0")
    with following(tmp_path) as follower:
        assert {"violations": 0} == figures(follower)


def test_a_long_journal_is_read_beside_its_recording_and_little_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MOST", 2)
    written = Written(tmp_path)
    for changes in CACHE:
        written.changed(changes)
    for each in STREAM:
        written.published([each])
    written.close()

    with following(tmp_path) as follower:
        assert WHOLE == figures(follower)
