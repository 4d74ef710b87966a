"""A book captured at any event and restored goes on exactly as it would have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import journals
from tests.audit.checks.false_reports import miscounted
from tests.histories import GOLDEN
from tests.strategies import Story, random_histories

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStopped, Event, Gap, HookFailed, Snapshot
from kvledger.audit.journal.folder import read
from kvledger.audit.ledger.blocks.ledger import BlockLedger
from kvledger.audit.ledger.ledger import Ledger
from kvledger.audit.replay import serialize
from kvledger.audit.replay.engine_audit import EngineAudit

PATH = Path("engine")
BEGINNING: list[Event] = [journals.STARTED, Snapshot(0, 0, [], 0)]
NOT_CARRIED = {
    EngineAudit: {
        "path",
        "accounts",
        "_keep",
        "on_closed",
        "engine_counters",
        "read_seconds",
        "checkpoint_seconds",
        "workers",
    },
    Auditor: {"_debug", "_subscribed", "_on_violation"},
    Ledger: {"keep_closed", "watch", "entries"},
    BlockLedger: {"findings", "accounts", "refilled"},
}
"""Said once more, by hand: what a book may lose without a difference."""


def picture(value: Any, seen: dict[int, int] | None = None) -> Any:
    """All that ``value`` holds, attribute by attribute, objects met again by their number.

    By identity: two equal accounts are not one account.
    """
    seen = {} if seen is None else seen
    if isinstance(value, msgspec.Struct) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return type(value).__name__, [picture(one, seen) for one in fields(value)]
    if isinstance(value, dict):
        return [(picture(key, seen), picture(one, seen)) for key, one in value.items()]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, [picture(one, seen) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    names = sorted(getattr(type(value), "__slots__", None) or vars(value))
    left_out = NOT_CARRIED.get(type(value), set())
    held = [(name, picture(getattr(value, name), seen)) for name in names if name not in left_out]
    return type(value).__name__, held


def fields(value: Any) -> Iterator[Any]:
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else value._fields
    return (getattr(value, name) for name in names)


def fed(events: Sequence[Event], book: EngineAudit | None = None, first: int = 0) -> EngineAudit:
    book = book or EngineAudit(PATH)
    for number, event in enumerate(events, first):
        book.feed(number, event)
    book.events += len(events)
    return book


def assert_carries_on(events: Sequence[Event], cut: int) -> None:
    """The same book in the end, cut off at ``cut`` or not, and each finding told just once."""
    whole = EngineAudit(PATH)
    fed(events[:cut], whole)
    other = serialize.restore(serialize.capture(whole), PATH)
    assert picture(whole) == picture(other)

    for number, event in enumerate(events[cut:], cut):
        assert whole.feed(number, event) == other.feed(number, event)
    for book in (whole, other):
        book.events += len(events) - cut

    assert picture(whole) == picture(other)
    assert whole.auditor.violations == other.auditor.violations
    assert whole.auditor.ledger.totals() == other.auditor.ledger.totals()
    assert statements(whole) == statements(other)


def statements(book: EngineAudit) -> list[Any]:
    return [account.freeze() for account in book.auditor.ledger.open.values()]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_golden_histories_carry_on_from_any_event(row: Any) -> None:
    events = [*BEGINNING, *row.events(), EngineStopped(10_000, "shutdown")]
    for cut in range(len(events) + 1):
        assert_carries_on(events, cut)


@given(random_histories(), st.integers(min_value=0), st.sampled_from(["", "gap", "hook", "snapshot"]))
def test_any_history_carries_on_from_any_event(drawn: Story, place: int, loss: str) -> None:
    """What was lost, and what a snapshot finds afterwards, are carried too."""
    events = [*BEGINNING, *drawn.events]
    cut = place % (len(events) + 1)
    middle = events[cut].at if cut < len(events) else 0
    if loss:
        lost: list[Event] = [Gap(middle, 3, "lost")]
        if loss == "hook":
            lost = [HookFailed(middle, "step", "ValueError", False)]
        if loss == "snapshot":
            lost += [journals.STARTED, Snapshot(middle, 9, [], 1)]
        events[max(2, cut - 2) : max(2, cut - 2)] = lost
    assert_carries_on(events, cut)


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_findings_are_carried(row: Any) -> None:
    """The engine states one token too many after its first step: found, repeated, reported."""
    try:
        events = [*BEGINNING, *miscounted(row.events(), 0, 1)]
    except IndexError:
        pytest.skip("it takes no step")
    assert fed(events).auditor.violations
    for cut in range(len(events) + 1):
        assert_carries_on(events, cut)


def test_a_journal_carries_on_from_any_event(tmp_path: Path) -> None:
    events = [event for _, event in read(journals.violated(tmp_path / "engine"))]
    for cut in range(len(events) + 1):
        assert_carries_on(events, cut)


def test_a_book_that_was_restored_is_found_in_what_it_finds() -> None:
    """A finding known before is a repeat after: nothing is told twice."""
    events = [*BEGINNING, *miscounted(journals.titled("cold prompt").events(), 0, 1)]
    found = fed(events).auditor.violations
    book = EngineAudit(PATH)
    new = []
    for number, event in enumerate(events):
        new += book.feed(number, event)
        book = serialize.restore(serialize.capture(book), PATH)

    assert [violation.id for violation in found] == [violation.id for violation in new]


def test_all_that_a_book_holds_is_carried() -> None:
    """Whoever adds an attribute to these carries it, or says above why it may be lost."""
    for kind, instance in ((EngineAudit, EngineAudit(PATH)), (Auditor, Auditor()), (Ledger, Ledger())):
        assert set(vars(instance)) == set(serialize.attributes(kind)) | NOT_CARRIED[kind]


class Sums(msgspec.Struct):
    """What somebody may count besides."""

    waits: dict[tuple[str, str], int] = {}
    buckets: list[float] = []


def test_a_struct_that_a_book_holds_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its class: nothing need be said of it."""
    constructor = EngineAudit.__init__

    def extended(self: EngineAudit, *args: Any, **given: Any) -> None:
        constructor(self, *args, **given)
        self.sums = Sums()  # type: ignore[attr-defined]

    monkeypatch.setattr(EngineAudit, "__init__", extended)
    monkeypatch.setattr(serialize, "attributes", serialize.attributes.__wrapped__)
    monkeypatch.setattr(serialize, "layout", serialize.layout.__wrapped__)
    book: Any = EngineAudit(PATH)
    book.sums.waits["a", "b"] = 7
    book.sums.buckets += [0.5, 2.0]

    restored: Any = serialize.restore(serialize.capture(book), PATH)

    assert Sums({("a", "b"): 7}, [0.5, 2.0]) == restored.sums


def test_what_has_no_place_is_refused_by_name() -> None:
    book = EngineAudit(PATH)
    book.notes.append(cast("str", object()))

    with pytest.raises(TypeError, match=r"can't hold a builtins\.object"):
        serialize.capture(book)


def test_another_layout_is_told_from_damage() -> None:
    data = msgspec.msgpack.encode(["0.00000000", []])
    with pytest.raises(serialize.OtherLayout):
        serialize.restore(data, PATH)


@given(st.binary(max_size=40))
def test_noise_is_damage(noise: bytes) -> None:
    with pytest.raises(LedgerError):
        serialize.restore(noise, PATH)


@given(st.data())
def test_a_state_that_was_tampered_with_is_refused_or_read(data: st.DataObject) -> None:
    """Whatever stands where, there is a sentence and no other error."""
    good = serialize.capture(fed([*BEGINNING, *journals.titled("vLLM#36752").events()[:-2]]))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + data.draw(st.binary(min_size=1, max_size=3)) + good[at + 1 :]
    try:
        serialize.restore(bad, PATH)
    except LedgerError as error:
        assert "\n" not in str(error)
