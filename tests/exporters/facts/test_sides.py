"""Sides of a comparison: tenants are those of accounts, and two windows are read at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events

from kvledger.audit import text
from kvledger.audit.events import Event, Finished, Gap, RequestAdded, RequestLabels
from kvledger.audit.figures.figure import BY_NAME
from kvledger.audit.replay.parallel import here
from kvledger.audit.replay.windows import EVERYTHING, Window
from kvledger.audit.text import tenant_of
from kvledger.exporters.facts.sides import TENANT, Side, sides_at

LABELS = (
    None,
    RequestLabels(),
    RequestLabels(group="acme"),
    RequestLabels(salt_class=-5),
    RequestLabels(group="acme", salt_class=-5),
)


@pytest.mark.parametrize("order", [text.TENANT, text.TENANT[::-1]])
def test_rows_and_accounts_name_the_same_tenants(
    order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "TENANT", order)
    stream: list[Event] = []
    for number, labels in enumerate(LABELS):
        of_one = events(100, "A0+0 s100 o+ F", request=number)
        stream += [
            replace(each, labels=labels) if isinstance(each, RequestAdded) else each for each in of_one
        ]
    folder = journals.write(tmp_path / "engine-0", stream)

    expected: dict[str, int] = {}
    for labels in LABELS:
        tenant = tenant_of(labels) or BY_NAME["group"].none
        expected[tenant] = expected.get(tenant, 0) + 1
    (side,) = sides_at([folder], [EVERYTHING], here)
    found = side.labels[TENANT]
    assert expected == {tenant: figures["requests"] for tenant, figures in found.items()}


def said(side: Side) -> list[object]:
    audit = side.audit
    found = [(one.id, one.request, one.at) for one in audit.violations]
    doubts = [engine.doubts for engine in audit.engines]
    figures = side.figures, side.missed, side.findings, side.work, side.busy_us, audit.totals.requests
    return [audit.verdict, audit.notes, found, doubts, *figures]


def test_two_windows_that_are_read_at_once_are_those_that_are_read_alone(tmp_path: Path) -> None:
    """The first request has a finding, and after the second one events are lost."""
    first = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    second = [replace(each, at=each.at + 60_000_000) for each in events(40, "A0+0 s40 o+ F", request=1)]
    stream = [*first, *second, Gap(second[-1].at, 5, "full")]
    folder = journals.write(tmp_path / "engine-0", stream, stopped=False)
    ends = [journals.STARTED.began_seconds + one.at / 1e6 for one in stream if isinstance(one, Finished)]
    middle = sum(ends) / 2
    windows = [Window(middle, None), Window(None, middle), Window(ends[0], ends[1] + 1.0)]

    alone = [said(*sides_at([folder], [window], here)) for window in windows]

    assert alone == [said(side) for side in sides_at([folder], windows, here)]
    assert ["unknown", "violated", "violated"] == [verdict for verdict, *_ in alone]


def test_the_time_between_two_engines_is_no_time_in_which_engines_ran(tmp_path: Path) -> None:
    """Each runs as long as the other; they run at once, after each other, and with a day between."""
    stream: list[Event] = [
        replace(each, at=each.at + 1_000_000 * number)
        for number in range(11)
        for each in events(100, "A0+0 s100 o+ F", request=number)
    ]
    found = []
    for later in (0.0, 5.0, 86_400.0):
        folder = tmp_path / str(later)
        for name, wall in (("engine-0", 0.0), ("engine-1", later)):
            journals.write(folder / name, stream, wall_seconds=journals.STARTED.wall_seconds + wall)
        (side,) = sides_at([folder], [EVERYTHING], here)
        assert 22 == side.of("requests")
        found.append(side.seconds)

    assert pytest.approx([10.0, 15.0, 20.0], abs=0.1) == found
