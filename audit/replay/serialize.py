"""The session of an :class:`EngineAudit`, and its sums, as one struct in msgpack, for a checkpoint.

After :func:`capture` at any event, :func:`restore` gives an audit that continues exactly as the first would
have. An engine's container may be able to write the file, so nothing in it may name code: msgspec reads it by
the types of the fields, and refuses everything else.

A struct is a value in msgpack, but an account is one thing that several tables name. So each account is saved
once, and the tables have its place in the list of accounts. A life is saved wherever it is named, and the one
in the list of the account's lives takes the others' places.

The names and types of all fields are part of the layout (:func:`layout`). Data of another layout is not
restored, because a new field would have no right value; the journals are read again instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints
from zlib import crc32

import msgspec
from msgspec.structs import replace

from ..checks.auditor import Findings
from ..errors import LedgerError
from ..ledger.account import Account, Life
from ..ledger.blocks.contents import Contents
from ..ledger.ledger_state import LedgerState
from .engine_audit import EngineAudit, JournalSums
from .followed_audit import FollowedAudit
from .recorded_events import RecordedEvents
from .worker_journals import Progress

SCHEMA = 5
"""Version of the meaning of the fields, and of the checkpoint around them."""

Audit = TypeVar("Audit", bound=EngineAudit)

Rows = list[tuple[int, int, int, int]]
"""What a step scheduled: request, place of its account, tokens, draft tokens."""


class _Written(msgspec.Struct, array_like=True):
    """The beginning of what any version has written since version 4."""

    layout: str


class AuditState(msgspec.Struct, array_like=True):
    """Everything that decides how an audit goes on, and its sums."""

    layout: str
    name: str
    """The engine's name in findings, if the caller gave it."""
    clock: float | None
    """Unix time from which the journal's times count."""
    ledger: LedgerState
    """The ledger, without the tables that name accounts."""
    accounts: list[Account]
    """Each account that a table names."""
    living: dict[int, int]
    """By request: the place of its account."""
    steady: list[int]
    """The requests whose postings are deferred."""
    last_step: Rows
    undelivered: list[Rows]
    counted: list[tuple[int, str, int, int, int]]
    """What was counted of weights since the last look, with the place of each account."""
    findings: Findings
    found_in: dict[int, set[str]]
    journal: JournalSums
    contents: Contents
    workers: dict[str, Progress]
    """How far each worker's journal was audited."""
    workers_began: dict[str, float]
    """From which Unix time each worker's journal counts."""
    series: str
    """The label of the engine's metrics, if a follower chose it."""
    live_events: RecordedEvents | None
    """The recorded KV events, of an audit that is followed."""
    observers: dict[str, msgspec.Raw]
    """What each observer saves, by the name of its class."""


def capture(audit: EngineAudit) -> bytes:
    """The open state of ``audit`` and its sums. Accounts that it keeps must have been taken."""
    auditor, workers = audit.auditor, audit.workers
    ledger, accounts = auditor.ledger, list[Account]()
    places: dict[int, int] = {}

    def place(account: Account) -> int:
        found = places.setdefault(id(account), len(accounts))
        if found == len(accounts):
            accounts.append(account)
        return found

    def rows(step: dict[int, tuple[Account, int, int]]) -> Rows:
        return [(request, place(row[0]), row[1], row[2]) for request, row in step.items()]

    followed = audit if isinstance(audit, FollowedAudit) else None
    encode = msgspec.msgpack.encode
    return encode(
        AuditState(
            layout=layout(),
            name=auditor.given_name,
            clock=audit.read_clock,
            ledger=LedgerState(**_but_accounts(ledger)),
            accounts=accounts,
            living={request: place(account) for request, account in ledger.living.items()},
            steady=list(ledger.steady),
            last_step=rows(ledger.last_step),
            undelivered=[rows(step) for step in ledger.undelivered],
            counted=[(place(row[0]), *row[1:]) for row in ledger.weights.counted],
            findings=auditor.findings,
            found_in=auditor.found_in,
            journal=audit.journal,
            contents=audit.contents,
            workers=workers.progress,
            workers_began=workers.began,
            series=followed.series if followed else "",
            live_events=followed.live_events if followed else None,
            observers={type(one).__name__: msgspec.Raw(encode(one.saved)) for one in audit.observers},
        )
    )


def _but_accounts(ledger: LedgerState) -> dict[str, Any]:
    """The fields of a ledger, without the accounts in them."""
    fields = {name: getattr(ledger, name) for name in LedgerState.__struct_fields__}
    fields.update(living={}, closed={}, steady={}, last_step={}, undelivered=[])
    return {**fields, "weights": replace(ledger.weights, counted=[])}


def restore(data: bytes, audit: Audit) -> Audit:
    """Give a new ``audit`` the state that :func:`capture` turned into ``data``.

    The caller has made it with the same observers, for the journal where it is now, and with the window that
    counts from here on. Raises :class:`OtherLayout` for data of another version, and :class:`LedgerError` for
    damaged data.
    """
    try:
        if msgspec.msgpack.decode(data, type=_Written).layout == layout():
            _take_up(audit, msgspec.msgpack.decode(data, type=AuditState))
            return audit
    except (msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise LedgerError("The saved audit of an engine is damaged.") from None
    raise OtherLayout("The saved audit of an engine was written by another version of kvledger.")


def _take_up(audit: EngineAudit, saved: AuditState) -> None:
    ledger, accounts = saved.ledger, saved.accounts
    for account in accounts:
        _relink(account)
    living = ledger.living = {request: accounts[place] for request, place in saved.living.items()}
    ledger.steady = {request: living[request] for request in saved.steady}
    ledger.last_step, *ledger.undelivered = (
        {row[0]: (accounts[row[1]], row[2], row[3]) for row in step}
        for step in (saved.last_step, *saved.undelivered)
    )
    ledger.weights.counted = [(accounts[row[0]], *row[1:]) for row in saved.counted]
    for promise in (*ledger.transfers.promises.values(), *ledger.transfers.earlier.values()):
        promise.account = living[promise.account.request]
        promise.life = promise.account.lives[promise.life.number - 1]
    auditor = audit.auditor
    auditor.ledger.take_up(ledger)
    auditor.given_name, auditor.findings, auditor.found_in = saved.name, saved.findings, saved.found_in
    audit.read_clock, audit.journal, audit.contents = saved.clock, saved.journal, saved.contents
    audit.workers.progress, audit.workers.began = saved.workers, saved.workers_began
    if isinstance(audit, FollowedAudit) and saved.live_events is not None:
        audit.series = saved.series
        audit.live_events.take_up(saved.live_events)
    for one in audit.observers:
        one.saved = msgspec.msgpack.decode(saved.observers[type(one).__name__], type=type(one.saved))
    audit.sums = audit.sums  # the observers count on in what was read


def _relink(account: Account) -> None:
    """Put the lives of an account in the places of their copies."""
    lives = account.lives
    account.life = _of(lives, account.life)
    account.reporting = _of(lives, account.reporting)
    for flight in account.in_flight:
        flight.life = lives[flight.life.number - 1]


def _of(lives: list[Life], copy: Life | None) -> Life | None:
    return None if copy is None else lives[copy.number - 1]


class OtherLayout(LedgerError):
    """The data is not damaged, but another version of kvledger with another layout wrote it."""


@cache
def layout() -> str:
    """The schema, and a checksum over the names and types of all fields that are written."""
    fields = [(kind.__name__, kind.__annotations__) for kind in dict.fromkeys(_structs(AuditState, set()))]
    return f"{SCHEMA}.{crc32(repr(fields).encode()):08x}"


def _structs(kind: Any, seen: set[Any]) -> Iterator[type]:
    """The structs and named tuples that a type is made of, with their bases."""
    if isinstance(kind, type) and kind not in seen and hasattr(kind, "__annotations__"):
        seen.add(kind)
        yield from kind.__mro__[:-2]
        for part in get_type_hints(kind).values():
            yield from _structs(part, seen)
    for part in get_args(kind):
        yield from _structs(part, seen)
