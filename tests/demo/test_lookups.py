"""What the caches were asked for: admissions, counters and reports, every difference by name."""

from __future__ import annotations

from tests.audit.checks.false_reports import report, reported
from tests.histories import events, weave
from tests.journals import CLEAN

from kvledger.audit.demo.lookups import COUNTERS, LookupReport, LookupTotals
from kvledger.audit.events import AdmissionFailed, Event, Gap


def looked_up(stream: list[Event], *counters: int) -> LookupReport:
    """The look-ups of a stream; the engine counted local queries and hits, external queries and hits."""
    return LookupReport(enumerate(stream), dict(zip(COUNTERS.values(), counters, strict=False)))


def test_no_difference() -> None:
    found = looked_up(reported(events(100, "A64+0 s36 o+ F"), report(100, 64, 0)), 100, 64, 36, 0)

    assert LookupTotals(1, 100, 64, 36, 0) == found.admitted == found.reported
    assert {} == found.to_counters == found.to_reported


def test_a_resumed_request_is_looked_up_and_not_counted() -> None:
    found = looked_up(reported(events(200, CLEAN), report(200, 0, 32), output=1), 200, 0, 200, 32)

    assert LookupTotals(2, 400, 0, 400, 192) == found.admitted
    assert {"resumed": LookupTotals(-1, -200, 0, -200, -160)} == found.to_counters
    assert {} == found.to_reported


def test_a_request_that_ended_before_any_output_was_counted_and_never_reported() -> None:
    stream = weave({0: 100, 1: 300}, "a.A64+0 b.A0+0 a.s36&b.s128 a.o+&b.o a.F b.F")
    found = looked_up(reported(stream, report(100, 64, 0), output=0), 400, 64, 336, 0)

    assert {} == found.to_counters
    assert {"not_reported": LookupTotals(-1, -300, 0, -300, 0)} == found.to_reported
    assert LookupTotals(1, 100, 64, 36, 0) == found.reported


def test_attempts_that_were_counted_are_named() -> None:
    added, *rest = events(100, "A64+0 s36 o+ F")
    stream = [added, AdmissionFailed(0, 0, 0, "not_allocated", 32, 0, 3), *rest]

    counted = looked_up(reported(stream, report(100, 64, 0)), 400, 160, 36, 0)

    assert {"failed_attempts": LookupTotals(3, 300, 96, 0, 0)} == counted.to_counters


def test_what_no_rule_names_is_unexplained() -> None:
    found = looked_up(reported(events(100, "A64+0 s36 o+ F"), report(100, 64, 0)), 107, 64, 36, 0)

    assert {"unexplained": LookupTotals(0, 7, 0, 0, 0)} == found.to_counters


def test_where_events_were_lost_nothing_is_claimed() -> None:
    stream = reported(events(100, "A64+0 s36 o+ F"), report(100, 64, 0))
    found = looked_up([*stream[:2], Gap(0, 1, "full"), *stream[2:]], 107, 64, 36, 0)

    assert ["unknown_here"] == list(found.to_counters) == list(found.to_reported)


def test_an_engine_that_never_reports() -> None:
    found = looked_up(events(100, "A64+0 s36 o+ F"), 100, 64, 36, 0)

    assert found.reported is None
    assert {} == found.to_reported


def test_an_engine_that_tells_no_counters() -> None:
    found = looked_up(events(100, "A64+0 s36 o+ F"))

    assert found.counters is None
    assert found.reported is None
    assert LookupTotals(1, 100, 64, 36, 0) == found.admitted
