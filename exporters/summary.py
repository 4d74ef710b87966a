"""Many requests in a few figures: totals of journals, in all or by group.

Streams: an account is added up when it closes and let go, so memory is bounded by what is open and
by the number of groups. The sums are those of the ledger (:class:`~kvledger.audit.ledger.Totals`);
shares are left to whoever draws them, but for what a table or a CSV file says.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from kvledger.audit.account import Account
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal import Reader
from kvledger.audit.ledger import Totals
from kvledger.audit.replay import Book, find
from kvledger.exporters.audit_report import share
from kvledger.exporters.terminal import figures_table, percent

KEYS = ("engine", "model", "hour", "outcome")
ALL = "all requests"
NO_MATCH = "no match"

Key = Callable[[Account], str]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One group. Tokens, but for ``requests``, ``unknown`` and ``preemptions``; shares are of 1.

    ``unknown`` requests are counted and are in no other figure but ``preemptions``. A share is None
    where there is nothing to divide by. ``wait_seconds`` are all its requests' time outside lives.
    """

    group: str
    requests: int
    unknown: int
    prompt_tokens: int
    local: int
    external: int
    computed: int
    unattained: int
    local_share: float | None
    external_share: float | None
    scheduled: int
    rework: int
    rework_share: float | None
    rejected: int
    overrun: int
    preemptions: int
    promised: int
    loaded: int
    wait_seconds: float


class _Group:
    def __init__(self) -> None:
        self.totals = Totals()
        self.waited = 0

    def add(self, account: Account, until: int) -> None:
        self.totals.add(account)
        if account.unknown is None:
            self.waited += _waited(account, until)

    def row(self, group: str) -> Row:
        totals, rework = self.totals, sum(self.totals.rework.values())
        return Row(
            group=group,
            requests=totals.requests,
            unknown=totals.unknown_requests,
            prompt_tokens=totals.prompt_tokens,
            local=totals.local,
            external=totals.external,
            computed=totals.computed,
            unattained=totals.unattained,
            local_share=share(totals.local, totals.prompt_tokens),
            external_share=share(totals.external, totals.prompt_tokens),
            scheduled=totals.scheduled,
            rework=rework,
            rework_share=share(rework, totals.scheduled),
            rejected=totals.rejected,
            overrun=totals.overrun,
            preemptions=totals.preemptions,
            promised=totals.promised,
            loaded=totals.loaded,
            wait_seconds=self.waited / 1e6,
        )


def summarize(paths: Sequence[Path], by: str = "") -> list[Row]:
    """A row a group, the largest prompt first, and one of all last.

    ``by``: one of :data:`KEYS`, or a regular expression over request ids, whose first group (else
    the whole match) names the group; "" for no groups. Raises :class:`LedgerError`.
    """
    pattern = _pattern(by) if by and by not in KEYS else None
    groups: dict[str, _Group] = {}
    everything = _Group()
    for path in find(paths):
        book = Book(path, keep=True)
        key = _key(by, pattern, book)
        last = 0

        def add(account: Account, until: int, key: Key = key) -> None:
            everything.add(account, until)
            if by:
                groups.setdefault(key(account), _Group()).add(account, until)

        with Reader(path) as reader:
            for batch, _ in book.batches(reader):
                last = batch.events[-1].at if batch.events else last
                for account in book.accounts:
                    add(account, account.closed_at)
                book.accounts.clear()
        for account in book.auditor.ledger.open.values():
            add(account, last)
    rows = [group.row(name) for name, group in groups.items()]
    rows.sort(key=lambda row: (-row.prompt_tokens, row.group))
    return [*rows, everything.row(ALL)]


def _pattern(words: str) -> re.Pattern[str]:
    try:
        return re.compile(words)
    except re.error as error:
        raise LedgerError(
            f"{words!r} is none of {', '.join(KEYS)}, and no regular expression: {error}."
        ) from error


def _key(by: str, pattern: re.Pattern[str] | None, book: Book) -> Key:
    def of_engine(account: Account) -> str:
        return book.name

    def of_model(account: Account) -> str:
        return str(book.engine.configuration.get("model", "")) if book.engine else ""

    def of_hour(account: Account) -> str:
        began = book.engine.wall_seconds - book.engine.at / 1e6 if book.engine else 0.0
        added = datetime.fromtimestamp(began + account.added_at / 1e6, timezone.utc)
        return added.strftime("%Y-%m-%dT%H:00Z")

    def of_outcome(account: Account) -> str:
        return account.outcome or ("open" if account.closed_at < 0 else "unknown")

    def of_pattern(account: Account) -> str:
        found = pattern.search(account.request_id) if pattern else None
        if found is None:
            return NO_MATCH
        return found[1] or "" if found.re.groups else found[0]

    keys: dict[str, Key] = dict(zip(KEYS, (of_engine, of_model, of_hour, of_outcome), strict=True))
    return keys.get(by, of_pattern)


def _waited(account: Account, until: int) -> int:
    """Microseconds in which it was there and had no life."""
    waited, since = 0, account.added_at
    for life in account.lives:
        waited += max(0, life.began_at - since)
        since = life.ended_at if life.ended_at >= 0 else until
    return waited + max(0, until - since)


def table(rows: Sequence[Row]) -> Table:
    """For a terminal: what matters of each group, the sum at the end."""
    columns = ("requests", "prompt", "local", "external", "rework", "preempted", "waited, s")
    drawn = figures_table("", *columns)
    for row in rows:
        total = row.group == ALL and len(rows) > 1
        if total:
            drawn.add_section()
        drawn.add_row(
            Text(row.group, style="bold" if total else ""),
            f"{row.requests:,}",
            f"{row.prompt_tokens:,}",
            "" if row.local_share is None else percent(row.local_share),
            "" if row.external_share is None else percent(row.external_share),
            "" if row.rework_share is None else percent(row.rework_share),
            f"{row.preemptions:,}",
            f"{row.wait_seconds:,.1f}",
        )
    return drawn


def as_csv(rows: Sequence[Row]) -> str:
    """All figures, header first; an empty cell where a share has nothing to divide by."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in msgspec.structs.fields(Row)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue().rstrip("\n")
