"""Readers that begin in the middle of a real scheduler's trace, as on a journal that has rotated.

Every scenario of the corpus is recorded with a segment after every few events, and read from each segment
on. A finding that the whole trace does not have is a false alarm.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, findings
from tests.scenarios.corpus import SCENARIOS

from kvledger.audit.causes import BEGAN_BEFORE
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import EngineStarted, Event, Snapshot
from kvledger.audit.journal.memory_recorder import MemoryRecorder
from kvledger.audit.traffic.observation import Observation

SEGMENT_EVENTS = 25
MOST_READERS = 12
"""A scenario with more segments is read from some of them, its second and its last one included."""


class SegmentedRecorder(MemoryRecorder):
    """Wants a new segment after every few events."""

    segment_events = 0

    def record(self, event: Event) -> None:
        super().record(event)
        self.segment_events += 1
        self.wants_snapshot |= self.segment_events > SEGMENT_EVENTS

    def restart(self, started: EngineStarted, snapshot: Snapshot) -> None:
        super().restart(started, snapshot)
        self.segment_events = 0


def recorded(name: str, level: str) -> list[Event]:
    """The events of a scenario, with many segments."""
    observation = Observation(level, sink=SegmentedRecorder())
    SCENARIOS[name](observation)
    return observation.stop()


@pytest.mark.parametrize("level", ["tokens", "blocks"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_reader_that_begins_at_any_segment_has_no_false_finding(name: str, level: str) -> None:
    events = recorded(name, level)
    whole = findings(audited(events))
    starts = [place for place, event in enumerate(events) if place and isinstance(event, EngineStarted)]
    for start in {*starts[:: -(-len(starts) // MOST_READERS) or 1], *starts[-1:]}:
        auditor = Auditor(keep_closed=True, debug=True)
        for number, event in enumerate(events[start:], start):
            auditor.feed(event, number)

        assert findings(auditor) <= whole, f"from event {start}"
        assert [] == auditor.doubts, f"from event {start}"
        reasons = {account.unknown for account in auditor.ledger.accounts()}
        assert reasons <= {None, BEGAN_BEFORE}
