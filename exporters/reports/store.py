"""What the connector's store of each engine returned, as text, data or CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...audit.analysis.step_model import fit
from ...audit.analysis.store_return import StoreReturn, store_return
from ...audit.journal.reader import Reader
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.observers import Steps, Stored
from ...audit.replay.parallel import Run, here, readable
from ..csv_cells import csv_of
from .costs import NOT_KNOWN, shown_seconds
from .terminal import blocks, bytes_text, figures_table, percent, title

LEGEND = (
    "Stored is KV of different contents that the connector was ordered to store. Read: a load filled a block "
    "with it, before the journal ended. Computed again: stored, and computed by a later request all the same."
)
LOADS_LEGEND = (
    "Waited is measured, for asynchronous loads. Saved is what computing the loaded tokens would have taken, "
    "by the model of the engine's step time."
)
COLUMNS = (
    "engine", "connector", "token_bytes", "stored_tokens", "stored_again_tokens", "read_tokens", "reads",
    "never_read_tokens", "computed_again_tokens", "read_elsewhere_tokens", "first_read_seconds",
    "last_read_seconds", "waited_seconds", "saved_seconds",
)  # fmt: skip


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """The return of the store of each engine that has a connector; ``without``: how many have none."""

    engines: list[StoreReturn]
    without: int


def store(paths: Sequence[Path], *, run: Run = here) -> StoreReport:
    """The stores of all journals at ``paths``. Raises LedgerError."""
    found = list(readable(run, _of_journal, journals_at(paths)))
    engines = [each for each in found if each is not None]
    return StoreReport(engines=engines, without=len(found) - len(engines))


def _of_journal(path: Path) -> StoreReturn | None:
    audit = EngineAudit(path, (Stored, Steps), invariants=())
    with Reader(path) as reader:
        audit.read(reader)
    audit.finish()
    started = audit.engine
    if started is None or not started.configuration.get("connector"):
        return None
    stored = audit.of(Stored)
    stored.store.settle(audit.last_at)
    model = fit(audit.of(Steps).sums.sample)
    return store_return(
        engine=audit.name, started=started, store=stored.store, loads=stored.sums, model=model
    )


def render(report: StoreReport) -> RenderableType:
    """A sentence for each engine, and two tables."""
    if not report.engines:
        return Text("No engine here has a KV connector.")
    lines = [Text(sentence(each)) for each in report.engines]
    if report.without:
        engines = f"{report.without} engine has" if report.without == 1 else f"{report.without} engines have"
        lines.append(Text(f"{engines} no KV connector."))
    return blocks(Group(*lines), _contents(report), _loads(report))


def sentence(each: StoreReturn) -> str:
    """What one store returned, in one sentence or two."""
    saved = each.saved_seconds
    loads = (
        f"Its loads saved {shown_seconds(saved)} of computing"
        if saved is not None
        else f"What its loads saved is not known ({each.refused or 'no price of a token'})"
    )
    loads += f", and requests waited {shown_seconds(each.waited_seconds)} for them."
    if each.unknown:
        return (
            f"{each.engine}, {each.connector}: what was stored is not known, because {each.unknown}. {loads}"
        )
    size = f" ({bytes_text(each.stored_tokens * each.token_bytes)})" if each.token_bytes else ""
    amount = f"{each.stored_tokens:,} tokens{size}"
    if not each.stored_tokens:
        return f"{each.engine}, {each.connector}: nothing was stored. {loads}"
    share = percent(each.read_tokens / each.stored_tokens)
    return f"{each.engine}, {each.connector}: of {amount} stored, {share} were ever read. {loads}"


def _contents(report: StoreReport) -> Group | None:
    known = [each for each in report.engines if not each.unknown]
    if not known:
        return None
    table = figures_table(
        "", "stored", "stored again", "read", "never read", "computed again", "read from elsewhere",
        "first read after, s", "last read after, s",
    )  # fmt: skip
    for each in known:
        table.add_row(
            each.engine,
            f"{each.stored_tokens:,}",
            f"{each.stored_again_tokens:,}",
            f"{each.read_tokens:,}",
            f"{each.never_read_tokens:,}",
            f"{each.computed_again_tokens:,}",
            f"{each.read_elsewhere_tokens:,}",
            _seconds(each.first_read_seconds),
            _seconds(each.last_read_seconds),
        )
    return Group(title("Tokens in the store", LEGEND), table)


def _loads(report: StoreReport) -> Group | None:
    rows = list(_load_rows(report.engines))
    if not rows:
        return None
    table: Table = figures_table(
        "", "tier", "loads", "tokens", "waited, s", "in vain, s", "saved, s", "saved, s per GiB stored"
    )
    for row in rows:
        table.add_row(*row)
    return Group(title("Loads by tier", LOADS_LEGEND), table)


def _load_rows(engines: Sequence[StoreReturn]) -> Iterator[tuple[str, ...]]:
    for each in engines:
        for tier in each.tiers:
            gib, saved = each.stored_gib, tier.saved_seconds
            per_gib = saved / gib if gib and saved is not None else None
            yield (
                each.engine,
                tier.tier,
                f"{tier.loads:,}",
                f"{tier.tokens:,}",
                _seconds(tier.waited_seconds),
                _seconds(tier.vain_seconds),
                NOT_KNOWN if saved is None else _seconds(saved),
                NOT_KNOWN if per_gib is None else _seconds(per_gib),
            )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def as_csv(report: StoreReport) -> str:
    """One line per engine."""
    return csv_of(COLUMNS, ([getattr(each, name) for name in COLUMNS] for each in report.engines))
