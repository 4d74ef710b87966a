"""How the blocks of engines were used, as text, data or CSV, and for the HTML report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Group
from rich.text import Text

from ...audit.analysis.block_states import STATES, BlockUse, Quantiles
from ...audit.errors import LedgerError
from ...audit.replay.parallel import Run, here, readable
from ..csv_cells import csv_of
from ..facts.kept import journals_and_sessions
from ..facts.kept_blocks import block_use as block_use_at
from .audit_data import share
from .terminal import blocks, counted, decimal, figures_table, listed, percent, title

NO_BLOCKS = "no journal here has block events, which KVLEDGER_LEVEL=blocks records"
LEGEND = (
    "Running: held by requests or the connector. Cached: free, and its content can be hit. Empty: free "
    "without content. Shares are of block-seconds."
)
DISTRIBUTIONS = (
    ("lifetimes", "life of evicted content, s", "from the caching to the eviction"),
    ("idle", "idle before eviction, s", "from the last release to the eviction"),
    ("reuse_seconds", "release to next hit, s", "seconds"),
    ("reuse_blocks", "release to next hit, blocks", "blocks allocated between"),
)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and 95th percentile, each within 5 %; None without a number."""

    name: str
    median: float | None
    p95: float | None
    numbers: int


class BlockUseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the blocks of all engines. Shares are of 1."""

    blocks: int
    most_running: int
    state_shares: dict[str, float | None]
    allocated: int
    cached: int
    hits: int
    evicted: int
    never_hit: int
    spreads: list[Spread]


def block_use(paths: Sequence[Path], *, run: Run = here) -> BlockUseReport:
    """Read the journals at ``paths``, or their kept rows. Raises LedgerError if none has block events."""
    everything, seen = BlockUse(), False
    for use in readable(run, block_use_at, journals_and_sessions(paths)):
        if use is not None:
            everything.merge(use)
            seen = True
    if not seen:
        raise LedgerError(f"{listed([str(path) for path in paths])}: {NO_BLOCKS}.")
    return as_report(everything)


def as_report(use: BlockUse) -> BlockUseReport:
    """The sums as data."""
    whole = sum(use.microseconds.values())
    return BlockUseReport(
        blocks=use.blocks,
        most_running=use.most_running,
        state_shares={name: share(use.microseconds[name], whole) for name in STATES},
        allocated=use.allocated,
        cached=use.cached,
        hits=use.hits,
        evicted=use.evicted,
        never_hit=use.never_hit,
        spreads=[_spread(name, getattr(use, name)) for name, _, _ in DISTRIBUTIONS],
    )


def _spread(name: str, numbers: Quantiles) -> Spread:
    return Spread(
        name=name, median=numbers.at(0.5), p95=numbers.at(0.95), numbers=sum(numbers.counts.values())
    )


def facts(use: BlockUseReport) -> Iterator[str]:
    """The most important facts, a sentence each."""
    running = use.state_shares["running"]
    if running is not None:
        yield (
            f"{percent(running)} of the {counted(use.blocks, 'block')} were running on average, and at most "
            f"{use.most_running:,}."
        )
    if use.evicted:
        never = f"nobody had hit {use.never_hit:,} of them ({percent(use.never_hit / use.evicted)})"
        evicted = f"{counted(use.evicted, 'cached block')} {'was' if use.evicted == 1 else 'were'} evicted"
        yield f"{evicted}; {never}."
    else:
        yield "No cached block was evicted."


def spread_rows(use: BlockUseReport) -> list[tuple[str, ...]]:
    """The distributions that have numbers: name, median, p95, count."""
    words = {name: text for name, text, _ in DISTRIBUTIONS}
    return [
        (words[row.name], _short(row.median), _short(row.p95), f"{row.numbers:,}")
        for row in use.spreads
        if row.numbers
    ]


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if number >= 100 else decimal(number, 2)


def render(use: BlockUseReport) -> Group:
    """The facts, the states, and the distributions."""
    states = figures_table("state", "share")
    for name, part in use.state_shares.items():
        if part:
            states.add_row(name, percent(part))
    counts = figures_table("", "blocks")
    for name in ("allocated", "cached", "hits", "evicted", "never_hit"):
        counts.add_row(name.replace("never_hit", "evicted, never hit"), f"{getattr(use, name):,}")
    spreads = figures_table("", "median", "95 %", "count")
    for row in spread_rows(use):
        spreads.add_row(*row)
    return blocks(
        Group(*(Text(fact) for fact in facts(use))),
        Group(title("Blocks by state", LEGEND), states),
        Group(title("What happened to blocks"), counts),
        Group(title("How long content stays, and when it is used again"), spreads) if spreads.rows else None,
    )


def as_csv(use: BlockUseReport) -> str:
    """One line per figure."""
    rows: list[tuple[object, ...]] = [(name, getattr(use, name)) for name in ("blocks", "most_running")]
    rows += [(f"{name}_share", part) for name, part in use.state_shares.items()]
    rows += [(name, getattr(use, name)) for name in ("allocated", "cached", "hits", "evicted", "never_hit")]
    for row in use.spreads:
        rows += [(f"{row.name}_median", row.median), (f"{row.name}_p95", row.p95)]
    return csv_of(("figure", "value"), rows)
