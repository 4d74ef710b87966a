"""Prefix-cache lookups: admissions, counters and reports, and the named differences between them."""

from __future__ import annotations

from tests.audit.checks.false_reports import report, with_report
from tests.histories import events, weave
from tests.journals import CLEAN

from kvledger.audit.demo.run import COUNTERS, LookupReport, LookupTotals
from kvledger.audit.events import AdmissionFailed, Event, Gap


def lookups_of(stream: list[Event], *counters: int) -> LookupReport:
    """The lookups of a stream. ``counters``: the engine's local and external queries and hits."""
    return LookupReport(enumerate(stream), dict(zip(COUNTERS.values(), counters, strict=False)))


def test_lookups_that_agree_have_no_difference() -> None:
    lookups = lookups_of(with_report(events(100, "A64+0 s36 o+ F"), report(100, 64, 0)), 100, 64, 36, 0)

    assert LookupTotals(1, 100, 64, 36, 0) == lookups.admitted == lookups.reported
    assert {} == lookups.to_counters == lookups.to_reported


def test_lookups_of_a_resumed_request_are_not_exported() -> None:
    lookups = lookups_of(with_report(events(200, CLEAN), report(200, 0, 32), output=1), 200, 0, 200, 32)

    assert LookupTotals(2, 400, 0, 400, 192) == lookups.admitted
    assert {"resumed": LookupTotals(-1, -200, 0, -200, -160)} == lookups.to_counters
    assert {} == lookups.to_reported


def test_a_request_that_ends_before_any_output_is_counted_and_not_reported() -> None:
    stream = weave({0: 100, 1: 300}, "a.A64+0 b.A0+0 a.s36&b.s128 a.o+&b.o a.F b.F")
    lookups = lookups_of(with_report(stream, report(100, 64, 0), output=0), 400, 64, 336, 0)

    assert {} == lookups.to_counters
    assert {"not_reported": LookupTotals(-1, -300, 0, -300, 0)} == lookups.to_reported
    assert LookupTotals(1, 100, 64, 36, 0) == lookups.reported


def test_counted_failed_attempts_are_a_named_difference() -> None:
    added, *rest = events(100, "A64+0 s36 o+ F")
    stream = [added, AdmissionFailed(0, 0, 0, "not_allocated", 32, 0, 3), *rest]

    counted = lookups_of(with_report(stream, report(100, 64, 0)), 400, 160, 36, 0)

    assert {"failed_attempts": LookupTotals(3, 300, 96, 0, 0)} == counted.to_counters


def test_a_difference_without_a_rule_is_unexplained() -> None:
    lookups = lookups_of(with_report(events(100, "A64+0 s36 o+ F"), report(100, 64, 0)), 107, 64, 36, 0)

    assert {"unexplained": LookupTotals(0, 7, 0, 0, 0)} == lookups.to_counters


def test_lost_events_make_differences_unknown() -> None:
    stream = with_report(events(100, "A64+0 s36 o+ F"), report(100, 64, 0))
    lookups = lookups_of([*stream[:2], Gap(0, 1, "full"), *stream[2:]], 107, 64, 36, 0)

    assert ["unknown_here"] == list(lookups.to_counters) == list(lookups.to_reported)


def test_an_engine_that_never_reports_has_no_reported_lookups() -> None:
    lookups = lookups_of(events(100, "A64+0 s36 o+ F"), 100, 64, 36, 0)

    assert lookups.reported is None
    assert {} == lookups.to_reported


def test_an_engine_without_counters_has_no_differences() -> None:
    lookups = lookups_of(events(100, "A64+0 s36 o+ F"))

    assert lookups.counters is None
    assert lookups.reported is None
    assert LookupTotals(1, 100, 64, 36, 0) == lookups.admitted
