"""Totals of many requests: hit rates, rework, preemptions and waiting, over all of them or by group.

Journals are streamed: an account is added to its group when it closes and then dropped, so memory is
bounded by the open requests and the number of groups. The sums are those of the ledger
(:class:`~kvledger.audit.ledger.totals.Totals`). Per-request figures are in ``statement.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
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
from .terminal import blocks, counted, figures_table, listed, part_of, percent

REQUESTS = "requests.parquet"
"""A folder that holds this file was written by ``kvledger export``."""

KEYS = ("engine", "model", "hour", "outcome")
ALL = "all requests"
NO_MATCH = "no match"

Key = Callable[[Account], str]


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group. Figures are tokens except ``requests``, ``unknown``, ``preemptions`` and shares of 1.

    ``unknown`` requests count in ``requests`` and ``preemptions`` and in no other figure. A share is None
    where the whole is 0. ``wait_seconds`` is the time that all its requests spent outside their lives.
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
    """The sums of one group."""

    totals: Totals
    waited: int = 0

    @classmethod
    def none(cls) -> Sums:
        """Sums of no request."""
        return cls(Totals())

    def add(self, account: Account, until: int) -> None:
        """Add an account; an open one counts as waiting ``until`` now."""
        self.totals.add(account)
        if account.unknown is None:
            self.waited += account.waited(until)

    def merge(self, more: Sums) -> None:
        """Add the sums of ``more``."""
        self.totals.merge(more.totals)
        self.waited += more.waited

    def row(self, group: str) -> SummaryRow:
        """The sums as a row called ``group``."""
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
    """One row per group, most prompt tokens first, then a row of all requests.

    ``paths`` hold journals, or tables that ``export`` wrote. ``by`` is one of :data:`KEYS`, or a regular
    expression over request ids whose first group (else the whole match) names the group, or "" for no
    groups. Raises :class:`LedgerError`.
    """
    if by and by not in KEYS:
        _pattern(by)
    places = [place for path in paths for place in matching_paths(path)]
    exported = [place for place in places if os.path.isfile(place / REQUESTS)]
    partial_sums = [_of_tables(folder, by, window) for folder in exported]
    journals = [place for place in places if place not in exported]
    if journals or not exported:
        partial_sums += run(partial(_of_journal, by=by, window=window), journals_at(journals))
    groups: Groups = {}
    everything = Sums.none()
    for part in partial_sums:
        for name, sums in part.items():
            everything.merge(sums)
            groups.setdefault(name, Sums.none()).merge(sums)
    rows = [group.row(name) for name, group in groups.items()] if by else []
    rows.sort(key=lambda row: (-row.prompt_tokens, row.group))
    return [*rows, everything.row(ALL)]


def _of_journal(path: Path, by: str, window: Window) -> Groups:
    engine_audit = EngineAudit(path, keep=True, window=window, with_metrics=False)
    key = _key(by, engine_audit)
    groups: Groups = {}
    for account in each_account(engine_audit):
        groups.setdefault(key(account), Sums.none()).add(account, engine_audit.last_at)
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


def _pattern(by: str) -> re.Pattern[str]:
    try:
        return re.compile(by)
    except re.error as error:
        raise LedgerError(
            f"{by!r} is none of {', '.join(KEYS)}, and no regular expression: {error}."
        ) from error


def _named_by(by: str) -> Callable[[str], str]:
    """A function from a request id to its group, by a regular expression."""
    pattern = _pattern(by)

    def name(request_id: str) -> str:
        match = pattern.search(request_id)
        if match is None:
            return NO_MATCH
        return match[1] or "" if pattern.groups else match[0]

    return name


def _key(by: str, engine_audit: EngineAudit) -> Key:
    def of_hour(account: Account) -> str:
        return hour_name(floor(((engine_audit.began_seconds or 0.0) + account.added_at / 1e6) / 3600))

    def of_outcome(account: Account) -> str:
        return account.outcome or ("open" if account.closed_at < 0 else "unknown")

    keys: dict[str, Key] = {
        "": lambda _: "",
        "engine": lambda _: engine_audit.name,
        "model": lambda _: engine_audit.model,
        "hour": of_hour,
        "outcome": of_outcome,
    }
    if by in keys:
        return keys[by]
    name = _named_by(by)
    return lambda account: name(account.request_id)


def render(rows: Sequence[SummaryRow]) -> Group:
    """All requests in a sentence, then a table with a row per group."""
    columns = ("requests", "prompt", "local", "external", "rework", "preempted", "waited, s")
    table = figures_table("", *columns)
    for row in rows:
        total = row.group == ALL and len(rows) > 1
        if total:
            table.add_section()
        table.add_row(
            Text(row.group, style="bold" if total else ""),
            f"{row.requests:,}",
            f"{row.prompt_tokens:,}",
            "" if row.local_share is None else percent(row.local_share),
            "" if row.external_share is None else percent(row.external_share),
            "" if row.rework_share is None else percent(row.rework_share),
            f"{row.preemptions:,}",
            f"{row.wait_seconds:,.1f}",
        )
    return blocks(Group(*_answer(rows[-1])), table if rows[-1].requests else None)


def _answer(row: SummaryRow) -> Iterator[Text]:
    requests, preemptions = counted(row.requests, "request"), counted(row.preemptions, "preemption")
    yield Text(f"{requests}, {preemptions}, {row.wait_seconds:,.1f} s spent waiting.")
    if row.prompt_tokens:
        hits = [
            part_of(tokens, row.prompt_tokens, name)
            for name, tokens in (("local", row.local), ("external", row.external))
        ]
        yield Text(f"Prefix-cache hits: {listed(hits)} of {counted(row.prompt_tokens, 'prompt token')}.")
    if row.scheduled:
        rework = part_of(row.rework, row.scheduled, "rework")
        yield Text(f"Work: {counted(row.scheduled, 'scheduled token')}, {rework}.")
    if row.unknown:
        unknown = counted(row.unknown, "request")
        yield Text(
            f"{unknown} unknown: events are missing, so only requests and preempted include them.",
            style="yellow",
        )


def as_csv(rows: Sequence[SummaryRow]) -> str:
    """All figures, with a header; an empty cell for a share of nothing."""
    return structs_csv(SummaryRow, rows)
