"""What the connector's store of each engine returned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...audit.analysis.step_model import fit
from ...audit.analysis.store_return import StoreReturn, store_return
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.observers import Steps, Stored
from ...audit.replay.parallel import Run, here, readable
from ..answer import Answer, Table, bytes_text, of_fields, percent, seconds

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
    for _ in audit.replay():
        pass
    started = audit.engine
    if started is None or not started.configuration.get("connector"):
        return None
    stored = audit.of(Stored)
    stored.store.settle(audit.last_at)
    model = fit(audit.of(Steps).sums.sample)
    return store_return(
        engine=audit.name, started=started, store=stored.store, loads=stored.sums, model=model
    )


def answer(report: StoreReport) -> Answer:
    """A sentence for each engine, and two tables."""
    lines = [sentence(each) for each in report.engines] or ["No engine here has a KV connector."]
    if report.engines and report.without:
        has = "1 engine has" if report.without == 1 else f"{report.without} engines have"
        lines.append(f"{has} no KV connector.")
    contents = Table(
        [each for each in report.engines if not each.unknown],
        "=engine | stored=stored_tokens | stored again=stored_again_tokens | read=read_tokens | "
        "never read=never_read_tokens | computed again=computed_again_tokens | "
        "read from elsewhere=read_elsewhere_tokens | first read after, s=first_read_seconds:,.2f | "
        "last read after, s=last_read_seconds:,.2f",
        "Tokens in the store",
        LEGEND,
    )
    loads = []
    for each in report.engines:
        for tier in each.tiers:
            saved, gib = tier.saved_seconds, each.stored_gib
            per_gib = None if saved is None or not gib else saved / gib
            figures = (tier.loads, tier.tokens, tier.waited_seconds, tier.vain_seconds, saved, per_gib)
            loads.append((each.engine, tier.tier, *figures))
    columns = "waited, s:,.2f | in vain, s:,.2f | saved, s:,.2f | saved, s per GiB stored:,.2f"
    by_tier = Table(loads, f" | tier | loads | tokens | {columns}", "Loads by tier", LOADS_LEGEND)
    return Answer(report, lines, [contents, by_tier], of_fields(COLUMNS, report.engines))


def sentence(each: StoreReturn) -> str:
    """What one store returned, in one sentence or two."""
    saved = each.saved_seconds
    loads = (
        f"Its loads saved {seconds(saved)} of computing"
        if saved is not None
        else f"What its loads saved is not known ({each.refused or 'no price of a token'})"
    )
    loads += f", and requests waited {seconds(each.waited_seconds)} for them."
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
