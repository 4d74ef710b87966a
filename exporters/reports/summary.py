"""Many requests in a few figures: totals of journals, in all or by group.

Streams: an account is added up when it closes and let go, so memory is bounded by what is open and
by the number of groups. The sums are those of the ledger (:class:`~kvledger.audit.ledger.ledger.Totals`);
shares are left to whoever draws them, but for what a table or a CSV file says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from math import floor
from pathlib import Path

import msgspec
from rich.console import Group
from rich.text import Text

from ...audit.errors import LedgerError
from ...audit.ledger.account import Account
from ...audit.ledger.totals import Totals
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at, matching_paths
from ...audit.replay.journals import each_account
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ..trace.tables import hour_name
from .audit import share, structs_csv
from .terminal import counted, figures_table, percent

REQUESTS = "requests.parquet"
"""The table that a folder of exported ones is known by."""

KEYS = ("engine", "model", "hour", "outcome")
ALL = "all requests"
NO_MATCH = "no match"

Key = Callable[[Account], str]


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
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


class Sums(msgspec.Struct):
    """One group's sums, of accounts as they are seen or of other sums."""

    totals: Totals
    waited: int = 0

    @classmethod
    def none(cls) -> Sums:
        """Of nobody."""
        return cls(Totals())

    def add(self, account: Account, until: int) -> None:
        """Add an account; one that is open waits ``until``."""
        self.totals.add(account)
        if account.unknown is None:
            self.waited += account.waited(until)

    def merge(self, more: Sums) -> None:
        """Add all that ``more`` holds."""
        self.totals.merge(more.totals)
        self.waited += more.waited

    def row(self, group: str) -> SummaryRow:
        """As data."""
        totals, rework = self.totals, sum(self.totals.rework.values())
        return SummaryRow(
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


Groups = dict[str, Sums]


def summarize(
    paths: Sequence[Path], by: str = "", *, window: Window = EVERYTHING, run: Run = here
) -> list[SummaryRow]:
    """A row a group, the largest prompt first, and one of all last.

    ``paths`` hold journals, or tables that ``export`` wrote. ``by``: one of :data:`KEYS`, or a regular
    expression over request ids, whose first group (else the whole match) names the group; "" for no
    groups. Raises :class:`LedgerError`.
    """
    if by and by not in KEYS:
        _pattern(by)
    places = [place for path in paths for place in matching_paths(path)]
    exported = [place for place in places if os.path.isfile(place / REQUESTS)]
    found = [_of_tables(folder, by, window) for folder in exported]
    journals = [place for place in places if place not in exported]
    if journals or not exported:
        found += run(partial(_of_journal, by=by, window=window), journals_at(journals))
    groups: Groups = {}
    everything = Sums.none()
    for some in found:
        for name, sums in some.items():
            everything.merge(sums)
            groups.setdefault(name, Sums.none()).merge(sums)
    rows = [group.row(name) for name, group in groups.items()] if by else []
    rows.sort(key=lambda row: (-row.prompt_tokens, row.group))
    return [*rows, everything.row(ALL)]


def _of_journal(path: Path, by: str, window: Window) -> Groups:
    book = EngineAudit(path, keep=True, window=window, with_metrics=False)
    key = _key(by, book)
    groups: Groups = {}
    for account in each_account(book):
        groups.setdefault(key(account), Sums.none()).add(account, book.last_at)
    return groups


def _of_tables(folder: Path, by: str, window: Window) -> Groups:
    from ..trace import parquet

    return {
        group: Sums(
            Totals(
                requests=sums["requests"],
                unknown_requests=sums["unknown"],
                preemptions=sums["preemptions"],
                prompt_tokens=sums["prompt_tokens"],
                local=sums["local"],
                external=sums["external"],
                computed=sums["computed"],
                unattained=sums["unattained"],
                scheduled=sums["scheduled"],
                rework={"": sums["rework"]},
                rejected=sums["rejected"],
                overrun=sums["overrun"],
                promised=sums["promised"],
                loaded=sums["loaded"],
            ),
            sums["waited_microseconds"],
        )
        for group, sums in parquet.sums(folder, by, _named_by(by), window).items()
    }


def _pattern(words: str) -> re.Pattern[str]:
    try:
        return re.compile(words)
    except re.error as error:
        raise LedgerError(
            f"{words!r} is none of {', '.join(KEYS)}, and no regular expression: {error}."
        ) from error


def _named_by(by: str) -> Callable[[str], str]:
    """By request id, the group that a pattern finds in it."""
    pattern = _pattern(by)

    def name(request_id: str) -> str:
        found = pattern.search(request_id)
        if found is None:
            return NO_MATCH
        return found[1] or "" if pattern.groups else found[0]

    return name


def _key(by: str, book: EngineAudit) -> Key:
    def of_hour(account: Account) -> str:
        return hour_name(floor(((book.began_seconds or 0.0) + account.added_at / 1e6) / 3600))

    def of_outcome(account: Account) -> str:
        return account.outcome or ("open" if account.closed_at < 0 else "unknown")

    keys: dict[str, Key] = {
        "": lambda _: "",
        "engine": lambda _: book.name,
        "model": lambda _: book.model,
        "hour": of_hour,
        "outcome": of_outcome,
    }
    if by in keys:
        return keys[by]
    name = _named_by(by)
    return lambda account: name(account.request_id)


def table(rows: Sequence[SummaryRow]) -> Group:
    """For a terminal: what matters of each group, the sum at the end; and who is in none of it."""
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
    unknown = rows[-1].unknown
    left_out = f"{counted(unknown, 'request')} unknown, in no figure but requests and preempted."
    return Group(drawn, *([Text(left_out, style="yellow")] if unknown else ()))


def as_csv(rows: Sequence[SummaryRow]) -> str:
    """All figures, header first; an empty cell where a share has nothing to divide by."""
    return structs_csv(SummaryRow, rows)
