"""Records a fault in a crowd: `python -m tests.repro.crowds FAULT FOLDER [--requests N]`.

Runs in the release that has the fault (`python3 scripts/releases.py run 0.18.1 -- python -m ...`). Requests
arrive before, among and after those of the fault's history, which is repeated until the audit finds the
fault. The observed events are written to FOLDER by the journal's own writer. Prints one JSON line: the
requests, the steps, the findings, and which other findings the engine ran into.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.repro.crowd import Crowd, LoadingDriver
from tests.repro.faults import FAULTS, Fault

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.engines import host_version
from kvledger.audit.events import EngineStarted, Event
from kvledger.audit.faults.catalogue import catalogue
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.traffic.driver import Observation

ATTEMPTS = 60


class Recording:
    """Observes one scheduler; audits its events as they come and writes them to a journal."""

    def __init__(self, folder: Path, level: str, segment_bytes: int = 16 << 20) -> None:
        self.auditor = Auditor()
        self.level = level
        self.events = 0
        self._observation = Observation("" if level == "blocks" else level)
        self._writer = JournalWriter(folder, Limits(segment_bytes=segment_bytes, folder_bytes=1 << 40))

    def attach(self, scheduler: Any) -> None:
        """Observe a scheduler before its first request."""
        self._observation(scheduler)
        self.level = self._observation.level

    def begin_segment(self) -> None:
        """Begin a segment of the journal; the engine must be between two steps."""
        self._observation.sink.wants_snapshot = True
        self._observation.observers[0].at_rest()

    def catch_up(self) -> None:
        """Audit and write what was observed since the last call."""
        events = self._observation.sink.take()
        self.auditor.feed_all(events)
        self.events += len(events)
        for segment in _by_segment(events):
            if type(segment[0]) is EngineStarted:
                self._writer.rotate()
            self._writer.write(segment)
        if self._writer.wants_rotation:
            self._observation.sink.wants_snapshot = True

    def found(self, finding: str) -> bool:
        """Whether the audit has a finding by now."""
        self.catch_up()
        return any(violation.id == finding for violation in self.auditor.violations)

    def close(self) -> None:
        """End the observation and the journal."""
        for observer in self._observation.observers:
            observer.stop("shutdown")
        self._observation.sink.close("shutdown")
        self.catch_up()
        self._writer.close()
        assert not self._writer.lost_events


def _by_segment(events: list[Event]) -> Iterator[list[Event]]:
    starts = [place for place, event in enumerate(events) if type(event) is EngineStarted and place]
    for start, end in zip([0, *starts], [*starts, len(events)], strict=True):
        if events[start:end]:
            yield events[start:end]


def start(fault: Fault, recording: Recording, dice: random.Random) -> Crowd:
    """A crowd on the engine that a fault needs, observed."""
    setup = dict(fault.setup)
    store = None
    if fault.start == "v0":
        from tests.scenarios.v0.driver import start as start_v0

        driver: Any = start_v0(recording.attach, **setup)
    elif fault.start == "lmcache":
        from tests.scenarios.lmcache import missing_adapter, start_with_table

        missing = missing_adapter(setup.get("adapter", "package"))
        if missing:
            raise SystemExit(f"This environment can't record {fault.name}: {missing}.")
        driver, store = start_with_table(recording.attach, **setup)
    else:
        from tests.scenarios.driving import engine_setup

        driver = LoadingDriver(engine_setup(**setup), dice)
        recording.attach(driver.scheduler)
    crowd = Crowd(driver, dice, fault.traffic, store)
    crowd.after_step = recording.catch_up
    return crowd


def record(
    fault: Fault,
    folder: Path,
    *,
    requests: int = 200,
    level: str = "blocks",
    seed: int = 0,
    segment_bytes: int = 16 << 20,
) -> dict[str, Any]:
    """Record a crowd of at least ``requests`` requests with a fault amid it; returns what was recorded."""
    recording = Recording(folder, level, segment_bytes)
    crowd = start(fault, recording, random.Random(seed))
    while crowd.added < requests // 2:
        crowd.arrive()
    attempts = 0
    while not recording.found(fault.finding) and attempts < ATTEMPTS:
        fault.history(crowd)
        attempts += 1
    for _ in range(max(requests - crowd.added, requests // 4)):
        crowd.arrive()
    crowd.driver.run()
    recording.close()
    known = catalogue()[fault.name].findings if fault.name in catalogue() else ()
    findings = [
        (violation.id, violation.severity)
        for violation in recording.auditor.violations
        if violation.id == fault.finding or violation.id not in known
    ]
    return {
        "fault": fault.name,
        "level": recording.level,
        "release": host_version(),
        "requests": crowd.added,
        "steps": crowd.steps,
        "events": recording.events,
        "attempts": attempts,
        "found": sum(each == fault.finding for each, _ in findings),
        "others": sorted({each for each, kind in findings if each != fault.finding and kind == "violation"}),
        "drifts": sorted({each for each, kind in findings if each != fault.finding and kind == "drift"}),
        "doubts": recording.auditor.doubts,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Record one crowd."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=list(FAULTS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--level", choices=("blocks", "tokens"), default="blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--segment-bytes", type=int, default=16 << 20)
    options = vars(parser.parse_args(arguments))
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        recorded = record(FAULTS[options.pop("fault")], options.pop("folder"), **options)
    print(json.dumps(recorded), file=stdout, flush=True)
    return 0 if recorded["found"] else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # LMCache may have left threads
