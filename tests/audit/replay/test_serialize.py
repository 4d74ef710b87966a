"""An engine audit that is captured at any event and restored continues exactly as before."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from tests import journals
from tests.audit.checks.false_reports import miscounted
from tests.drawn import drawn_histories
from tests.histories import GOLDEN

from kvledger.audit.analysis.routing import RecentCounts
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStopped, Event, Gap, HookFailed, Snapshot
from kvledger.audit.journal.host_folders import read
from kvledger.audit.ledger.account import Account, Life
from kvledger.audit.ledger.blocks.contents import Contents
from kvledger.audit.ledger.blocks.ledger import BlockLedger
from kvledger.audit.ledger.kv_events import KVComparison
from kvledger.audit.ledger.ledger import Ledger
from kvledger.audit.replay import serialize
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.recorded_events import RecordedEvents
from kvledger.audit.replay.worker_journals import WorkerJournals

PATH = Path("engine")
BEGINNING: list[Event] = [journals.STARTED, Snapshot(0, 0, [], 0)]
CARRIED = {
    FollowedAudit: {"auditor", "journal", "contents", "workers", "series", "live_events", "read_clock"},
    Auditor: {"ledger", "findings", "found_in", "given_name"},
    WorkerJournals: {"progress", "began"},
}
"""By class that is no struct: the attributes that a checkpoint carries."""

NOT_CARRIED: dict[type, set[str]] = {
    FollowedAudit: {
        "path",
        "window",
        "observers",
        "event",
        "_handlers",
        "_by_class",
        "_others",
        "_ended",
        "_troubled",
        "on_event",
        "on_closed",
        "on_violation",
        "on_trouble",
        "engine_counters",
        "read_seconds",
        "checkpoint_seconds",
    },
    Auditor: {"_debug", "_subscribed", "_name_of", "_on_violation", "_is_in_window"},
    WorkerJournals: {"next_step", "calls", "_folder", "_readers", "_steps"},
    Ledger: {"watch", "counted", "wanted", "entries"},
    BlockLedger: {"findings", "invalid_hits", "removed_kept", "weights", "requests"},
    Contents: {"_last"},
    KVComparison: {"cache"},
    RecordedEvents: {
        "enabled",
        "on_batch",
        "state",
        "_contents",
        "_neighbours",
        "_path",
        "_readers",
        "_searched",
    },
    RecentCounts: {"_changes", "_dropped", "_order"},
}
"""Attributes that a checkpoint need not carry: of a struct, those that are no fields."""

SHARED = (Account, Life)
"""Structs of which there is one, whatever names it."""

SCALARS = frozenset({type(None), bool, int, float, str})


def picture(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that ``value`` holds, attribute by attribute. An object seen before is given by its number.

    Objects are compared by identity: two equal accounts are not one account.
    """
    if type(value) in SCALARS:
        return value
    seen = {} if seen is None else seen
    if isinstance(value, SHARED):
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, msgspec.Struct) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return type(value).__name__, [picture(one, seen) for one in fields(value)]
    if isinstance(value, dict):
        return [(picture(key, seen), picture(one, seen)) for key, one in value.items()]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [picture(one, seen) for one in value]
    carried = CARRIED[type(value)]
    return type(value).__name__, [(name, picture(getattr(value, name), seen)) for name in sorted(carried)]


def whole_picture(audit: FollowedAudit) -> Any:
    """The picture of an audit and of what its observers save."""
    return picture(audit), [one.saved for one in audit.observers]


def fields(value: Any) -> Iterator[Any]:
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else value._fields
    return (getattr(value, name) for name in names)


def audit_after(events: Sequence[Event], audit: FollowedAudit | None = None, first: int = 0) -> FollowedAudit:
    audit = audit or FollowedAudit(PATH)
    for number, event in enumerate(events, first):
        audit.feed(number, event)
    audit.journal.events += len(events)
    return audit


def open_accounts(audit: FollowedAudit) -> list[Any]:
    return [account.freeze() for account in audit.auditor.ledger.open.values()]


def assert_continues(events: Sequence[Event], cuts: Collection[int]) -> FollowedAudit:
    """An audit holds the same after a restore, and one restored at each cut finds and ends the same.

    Returns the audit that was never restored.
    """
    uninterrupted, restored = FollowedAudit(PATH), FollowedAudit(PATH)
    for number in range(len(events) + 1):
        if number in cuts:
            copy = serialize.restore(serialize.capture(uninterrupted), FollowedAudit(PATH))
            assert whole_picture(uninterrupted) == whole_picture(copy)
            restored = serialize.restore(serialize.capture(restored), FollowedAudit(PATH))
        if number < len(events):
            event = events[number]
            assert uninterrupted.feed(number, event) == restored.feed(number, event)
            for audit in (uninterrupted, restored):
                audit.journal.events += 1
    assert whole_picture(uninterrupted) == whole_picture(restored)
    assert uninterrupted.auditor.violations == restored.auditor.violations
    assert uninterrupted.auditor.ledger.totals() == restored.auditor.ledger.totals()
    assert open_accounts(uninterrupted) == open_accounts(restored)
    return uninterrupted


def assert_continues_from_any_event(events: Sequence[Event]) -> FollowedAudit:
    return assert_continues(events, range(len(events) + 1))


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_golden_histories_continue_from_any_event(row: Any) -> None:
    assert_continues_from_any_event([*BEGINNING, *row.events(), EngineStopped(10_000, "shutdown")])


@pytest.mark.parametrize("loss", ["", "gap", "hook", "snapshot"])
def test_any_history_continues_from_any_event(loss: str) -> None:
    """Losses, and the figures of a later snapshot, are carried too."""
    dice = random.Random(loss)
    for events in dice.sample(drawn_histories(), 40):
        continues_from(list(events), dice.randint(0, len(events)), loss)


def continues_from(events: list[Event], cut: int, loss: str) -> None:
    middle = events[cut].at if cut < len(events) else 0
    if loss:
        lost: list[Event] = [Gap(middle, 3, "lost")]
        if loss == "hook":
            lost = [HookFailed(middle, "step", "ValueError", False)]
        if loss == "snapshot":
            lost += [journals.STARTED, Snapshot(middle, 9, [], 1)]
        events[max(2, cut - 2) : max(2, cut - 2)] = lost
    assert_continues(events, [cut])


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_findings_are_carried(row: Any) -> None:
    """The engine reports one token too many after its first step."""
    try:
        events = [*BEGINNING, *miscounted(row.events(), 0, 1)]
    except IndexError:
        pytest.skip("it takes no step")
    assert assert_continues_from_any_event(events).auditor.violations


def test_a_journal_continues_from_any_event(tmp_path: Path) -> None:
    events = [event for _, event in read(journals.violated(tmp_path / "engine"))]
    assert_continues_from_any_event(events)


def test_a_finding_made_before_a_restore_is_a_repeat_after_it() -> None:
    """Otherwise the finding would be returned twice."""
    events = [*BEGINNING, *miscounted(journals.titled("cold prompt").events(), 0, 1)]
    expected = audit_after(events).auditor.violations
    audit = FollowedAudit(PATH)
    returned = []
    for number, event in enumerate(events):
        returned += audit.feed(number, event)
        audit = serialize.restore(serialize.capture(audit), FollowedAudit(PATH))

    assert [violation.id for violation in expected] == [violation.id for violation in returned]


def test_every_attribute_is_carried_or_listed_as_not_carried() -> None:
    """A new attribute must be a field of a struct, be named in AuditState, or be added to ``NOT_CARRIED``."""
    audit = FollowedAudit(PATH)
    ledger, events = audit.auditor.ledger, audit.live_events
    for one in (audit, audit.auditor, audit.workers, ledger, ledger.blocks, audit.contents, events):
        assert set(vars(one)) == CARRIED.get(type(one), set()) | NOT_CARRIED[type(one)], type(one)
    for one in (events.comparison, events.announced):
        assert set(vars(one)) == NOT_CARRIED[type(one)], type(one)


def an_example(kind: inspect.Type) -> Any:
    """A value of a type with something in each table."""
    match kind:
        case inspect.StructType(cls=cls, fields=parts):
            return cls(**{part.name: an_example(part.type) for part in parts})
        case inspect.NamedTupleType(cls=cls, fields=parts):
            return cls(*(an_example(part.type) for part in parts))
        case inspect.DictType(key_type=key, value_type=value):
            return {an_example(key): an_example(value)}
        case inspect.ListType(item_type=item):
            return [an_example(item)]
        case inspect.SetType(item_type=item):
            return {an_example(item)}
        case inspect.TupleType(item_types=items):
            return tuple(map(an_example, items))
        case inspect.VarTupleType(item_type=item):
            return (an_example(item),)
        case inspect.UnionType(types=kinds):
            return an_example(next(one for one in kinds if not isinstance(one, inspect.NoneType)))
        case inspect.NoneType():
            return None
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.RawType():
            return msgspec.Raw(msgspec.msgpack.encode(3))
    scalars = {inspect.IntType: 3, inspect.FloatType: 0.5, inspect.BoolType: True, inspect.StrType: "x"}
    return scalars.get(type(kind), b"x" if isinstance(kind, inspect.BytesType) else 3)


def test_whatever_the_session_of_an_audit_can_hold_is_saved_and_read() -> None:
    """Blocks whose free was deferred could not be saved once: no history of the tests had any at its cuts."""
    state = an_example(inspect.type_info(serialize.AuditState))
    saved = msgspec.msgpack.encode(state)
    assert saved == msgspec.msgpack.encode(msgspec.msgpack.decode(saved, type=serialize.AuditState))
    assert 100 < saved.count(b"x")


def test_another_layout_is_distinguished_from_damage() -> None:
    data = msgspec.msgpack.encode(["0.00000000", [], {}])
    with pytest.raises(serialize.OtherLayout):
        serialize.restore(data, FollowedAudit(PATH))


@given(st.binary(max_size=40))
def test_random_bytes_are_damage(noise: bytes) -> None:
    with pytest.raises(LedgerError):
        serialize.restore(noise, FollowedAudit(PATH))


@given(st.data())
def test_a_state_that_was_tampered_with_is_refused_or_read(data: st.DataObject) -> None:
    """Any changed byte gives a one-line error or none."""
    good = serialize.capture(audit_after([*BEGINNING, *journals.titled("vLLM#36752").events()[:-2]]))
    position = data.draw(st.integers(0, len(good) - 1))
    bad = good[:position] + data.draw(st.binary(min_size=1, max_size=3)) + good[position + 1 :]
    try:
        serialize.restore(bad, FollowedAudit(PATH))
    except LedgerError as error:
        assert "\n" not in str(error)
