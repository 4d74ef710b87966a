"""Totals of many requests: hit rates, rework, preemptions and waiting, over all of them or by group.

Journals are streamed: an account is added to its group when it closes and then dropped, so memory is
bounded by the open requests and the number of groups. The sums are those of the ledger
(:class:`~kvledger.audit.ledger.totals.Totals`). Per-request figures are in ``statement.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Group
from rich.text import Text

from ...audit.analysis.costs import Costs, CostTally, priced
from ...audit.ledger.account import Account
from ...audit.ledger.totals import Totals
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import matching_paths
from ...audit.replay.journals import each_account
from ...audit.replay.parallel import Run, here
from ...audit.replay.split import Piece, Span, SpanAudit, joined, split_run
from ...audit.replay.windows import EVERYTHING, Window
from ..trace.groups import check, group_key
from . import costs as cost
from . import rollups
from .audit import csv_of, share
from .conclusions import conclusions, facts_of_totals
from .conclusions import with_costs as add_costs
from .costs import CostReport, ModelRow, cost_report, model_row
from .terminal import blocks, bullets, counted, figures_table, listed, part_of, percent

REQUESTS = "requests.parquet"
"""A folder that holds this file was written by ``kvledger export``."""

ALL = "all requests"


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group. Figures are tokens except ``requests``, ``unknown``, ``preemptions`` and shares of 1.

    ``unknown`` requests count in ``requests`` and ``preemptions`` and in no other figure. A share is None
    where the whole is 0. ``wait_seconds`` is the time that all its requests spent outside their lives.
    ``costs`` is None where they were not asked for, or the steps are not known.
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
    costs: CostReport | None = None
    conclusions: list[str] = []


class Sums(msgspec.Struct):
    """The sums of one group. ``costs`` are those of whole journals; ``tally`` is of the present one."""

    totals: Totals
    waited: int = 0
    tally: CostTally | None = None
    costs: Costs | None = None

    @classmethod
    def none(cls, with_costs: bool = False) -> Sums:
        """Sums of no request."""
        return cls(Totals(), tally=CostTally() if with_costs else None)

    def add(self, account: Account, until: int) -> None:
        """Add an account; an open one counts as waiting ``until`` now."""
        self.totals.add(account)
        if account.unknown is None:
            self.waited += account.waited(until)
        if self.tally is not None:
            self.tally.add(account)

    def merge(self, more: Sums) -> None:
        """Add the sums of ``more``, of the same journal if they have no price yet."""
        self.totals.merge(more.totals)
        self.waited += more.waited
        if self.tally is not None and more.tally is not None:
            self.tally.merge(more.tally)
        if more.costs is not None:
            self.costs = self.costs or Costs()
            self.costs.merge(more.costs)

    def row(self, group: str, models: Sequence[ModelRow] = (), gpu_hour: float | None = None) -> SummaryRow:
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
            costs=None if self.costs is None else cost_report(self.costs, models, gpu_hour),
        )


Groups = dict[str, Sums]


class Part(NamedTuple):
    """The groups of one journal, or of one folder of tables, and the model of the engine's step time."""

    groups: Groups
    model: ModelRow | None = None
    busy_us: int = 0
    """Engine time that no group has yet."""


def summarize(
    paths: Sequence[Path],
    by: str = "",
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    with_costs: bool = False,
    gpu_hour: float | None = None,
) -> list[SummaryRow]:
    """One row per group, most prompt tokens first, then a row of all requests.

    ``paths`` hold journals, or tables that ``export`` wrote. ``by`` is as for
    :func:`~kvledger.exporters.trace.groups.group_key`, or "" for no groups. ``with_costs`` adds what lost
    work cost, which tables can't tell; ``gpu_hour`` is the price of an hour of one engine. Raises
    :class:`~kvledger.audit.errors.LedgerError`.
    """
    check(by)
    places = [place for path in paths for place in matching_paths(path)]
    exported = [place for place in places if os.path.isfile(place / REQUESTS)]
    parts = [_of_tables(folder, by, window) for folder in exported]
    journals = [place for place in places if place not in exported]
    if journals or not exported:
        read = partial(_of_journal, by=by, window=window, with_costs=with_costs and not exported)
        places = rollups.journals_and_rollups(journals, by, window)
        piece = partial(_of_span, by=by, with_costs=with_costs and not exported)
        parts += rollups.each_journal(run, places, window, piece, _joined, read)
    groups: Groups = {}
    everything = Sums.none()
    for part in parts:
        for name, sums in part.groups.items():
            everything.merge(sums)
            groups.setdefault(name, Sums.none()).merge(sums)
    models = [part.model for part in parts if part.model is not None]
    # A part of the requests shares its engines' time with the others.
    busy_us = everything.costs.busy_us if everything.costs else 0
    rows = []
    for name, group in groups.items() if by else ():
        if group.costs is not None:
            group.costs.busy_us = busy_us
        rows.append(group.row(name, gpu_hour=gpu_hour))
    rows.sort(key=lambda row: (-row.prompt_tokens, row.group))
    total = everything.row(ALL, models, gpu_hour)
    if with_costs:
        facts = facts_of_totals(everything.totals)
        facts = facts if total.costs is None else add_costs(facts, total.costs)
        total = msgspec.structs.replace(total, conclusions=conclusions(facts))
    return [*rows, total]


def _of_journal(path: Path, by: str, window: Window, with_costs: bool) -> Part:
    rollup = rollups.found(path, by, window)
    if rollup is not None:
        return _of_rollup(rollup, path, by, window, with_costs)
    engine_audit = EngineAudit(
        path, keep=True, window=window, with_metrics=False, times_steps=with_costs, accounts_only=True
    )
    return _summed(engine_audit, each_account(engine_audit), by, with_costs)


def audited_groups(
    paths: Sequence[Path], by: str, window: Window, run: Run
) -> Iterator[tuple[EngineAudit, Groups]]:
    """The audit of each journal, with costs, and its groups without."""
    whole = partial(_audited_groups, by=by, window=window)
    if window.bounded:
        return run(whole, paths)
    return split_run(run, paths, partial(_audited_span, by=by), _joined_groups, whole)


def _audited_groups(path: Path, by: str, window: Window) -> tuple[EngineAudit, Groups]:
    engine_audit = EngineAudit(path, keep=True, window=window, with_metrics=False, with_costs=True)
    key, groups = group_key(by, engine_audit), dict[str, Sums]()
    for account in each_account(engine_audit):
        groups.setdefault(key(account), Sums.none()).add(account, engine_audit.last_at)
    return engine_audit, groups


def _audited_span(span: Span, by: str) -> _GroupsOfSpan:
    engine_audit = EngineAudit(span.path, keep=True, with_metrics=False, with_costs=True)
    return _grouped(engine_audit, span, by, with_costs=False)


def _joined_groups(spans: Sequence[_GroupsOfSpan]) -> tuple[EngineAudit, Groups] | None:
    engine_audit = joined([span.piece for span in spans])
    return None if engine_audit is None else (engine_audit, _merged(spans))


def _summed(engine_audit: EngineAudit, accounts: Iterable[Account], by: str, with_costs: bool) -> Part:
    """The accounts of one journal by group."""
    key = group_key(by, engine_audit)
    groups: Groups = {}
    for account in accounts:
        groups.setdefault(key(account), Sums.none(with_costs)).add(account, engine_audit.last_at)
    return _priced(engine_audit, groups, with_costs)


def _priced(engine_audit: EngineAudit, groups: Groups, with_costs: bool) -> Part:
    """The groups of one journal, with what their lost work cost."""
    if not with_costs:
        return Part(groups)
    model, busy_us = engine_audit.step_model(), engine_audit.step_times.busy_us
    for sums in groups.values():
        if sums.tally is not None:
            sums.costs, sums.tally = priced(sums.tally, model, busy_us, engine_audit.connector), None
            busy_us = 0  # counted once for the journal
    return Part(groups, model_row(engine_audit, model), busy_us)


class _GroupsOfSpan(msgspec.Struct):
    """The groups of one span of a journal, without prices."""

    piece: Piece
    groups: Groups
    with_costs: bool


def _of_span(span: Span, by: str, with_costs: bool) -> _GroupsOfSpan:
    engine_audit = EngineAudit(
        span.path, keep=True, with_metrics=False, times_steps=with_costs, accounts_only=True
    )
    return _grouped(engine_audit, span, by, with_costs)


def _grouped(engine_audit: EngineAudit, span: Span, by: str, with_costs: bool) -> _GroupsOfSpan:
    part, groups = SpanAudit(engine_audit, span), dict[str, Sums]()
    key = None
    for accounts in part.accounts():
        key = key or group_key(by, engine_audit)
        for account in accounts:
            groups.setdefault(key(account), Sums.none(with_costs)).add(account, engine_audit.last_at)
    return _GroupsOfSpan(Piece(engine_audit, part.begin, part.end), groups, with_costs)


def _joined(spans: Sequence[_GroupsOfSpan]) -> Part | None:
    engine_audit = joined([span.piece for span in spans])
    return None if engine_audit is None else _priced(engine_audit, _merged(spans), spans[0].with_costs)


def _merged(spans: Sequence[_GroupsOfSpan]) -> Groups:
    groups: Groups = {}
    for span in spans:
        for name, sums in span.groups.items():
            groups.setdefault(name, Sums.none(span.with_costs)).merge(sums)
    return groups


def _of_rollup(rollup: rollups.Rollup, path: Path, by: str, window: Window, with_costs: bool) -> Part:
    """The sums of a rollup, and of what the journal has beyond it."""
    engine_audit, accounts = rollup.rest_of(path, window)
    part = _summed(engine_audit, accounts, by, with_costs)
    busy_us = part.busy_us
    for key, cell in rollup.within(path, window).items():
        sums = part.groups.setdefault(rollups.group_of(by, key, engine_audit), Sums.none())
        sums.totals.merge(cell.totals)
        sums.waited += cell.waited
        if part.model is not None:
            sums.costs = sums.costs or Costs()
            sums.costs.merge(cell.costs(part.model.model, engine_audit.connector))
            sums.costs.busy_us += busy_us
            busy_us = 0
    return part


def _of_tables(folder: Path, by: str, window: Window) -> Part:
    from ..trace import parquet

    groups = {
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
        for group, sums in parquet.sums(folder, by, window).items()
    }
    return Part(groups)


COLUMNS = ("requests", "prompt", "local", "external", "rework", "preempted", "waited, s")
"""The columns of the table, after the group's name."""


def cells(row: SummaryRow) -> tuple[str, ...]:
    """The figures of a group, for :data:`COLUMNS`."""
    return (
        f"{row.requests:,}",
        f"{row.prompt_tokens:,}",
        "" if row.local_share is None else percent(row.local_share),
        "" if row.external_share is None else percent(row.external_share),
        "" if row.rework_share is None else percent(row.rework_share),
        f"{row.preemptions:,}",
        f"{row.wait_seconds:,.1f}",
    )


def render(rows: Sequence[SummaryRow]) -> Group:
    """All requests in a sentence, then a table with a row per group."""
    table = figures_table("", *COLUMNS)
    for row in rows:
        total = row.group == ALL and len(rows) > 1
        if total:
            table.add_section()
        table.add_row(Text(row.group, style="bold" if total else ""), *cells(row))
    costs = rows[-1].costs
    first, *rest = _answer(rows[-1])
    return blocks(
        Group(first, *bullets(rows[-1].conclusions), *rest),
        table if rows[-1].requests else None,
        None if costs is None else cost.render(costs),
    )


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
    """All figures, with a header; an empty cell for what is not known. Costs are totals of the group."""
    names = [
        field.name
        for field in msgspec.structs.fields(SummaryRow)
        if field.name not in ("costs", "conclusions")
    ]
    columns = [*names, *COST_COLUMNS] if rows[-1].costs else names
    return csv_of(columns, ([getattr(row, name) for name in names] + _cost_cells(row) for row in rows))


COST_COLUMNS = ("engine_seconds", "lost_seconds", "lost_share", "money")


def _cost_cells(row: SummaryRow) -> list[object]:
    return [getattr(row.costs, name) for name in COST_COLUMNS] if row.costs else []
