"""How the blocks of engines were used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...audit.analysis.block_states import STATES, BlockUse, Quantiles
from ...audit.errors import LedgerError
from ...audit.replay.parallel import Run, here, readable
from ..answer import Answer, Records, Table, counted, decimal, listed, made, percent, share
from ..facts.kept import journals_and_sessions
from ..facts.kept_blocks import block_use as block_use_at

NO_BLOCKS = "no journal here has block events, which KVLEDGER_LEVEL=blocks records"
LEGEND = (
    "Running: held by requests or the connector. Cached: free, and its content can be hit. Empty: free "
    "without content. Shares are of block-seconds."
)
DISTRIBUTIONS = {
    "lifetimes": "life of evicted content, s",
    "idle": "idle before eviction, s",
    "reuse_seconds": "release to next hit, s",
    "reuse_blocks": "release to next hit, blocks",
}
COUNTS = ("allocated", "cached", "hits", "evicted", "never_hit")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and 95th percentile, each within 5 %; None without a number."""

    name: str
    median: float | None
    p95: float | None
    numbers: int

    @property
    def words(self) -> str:
        """What is distributed."""
        return DISTRIBUTIONS[self.name]


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
    return made(
        BlockUseReport,
        use,
        state_shares={name: share(use.microseconds[name], whole) for name in STATES},
        spreads=[_spread(name, getattr(use, name)) for name in DISTRIBUTIONS],
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


def spreads(use: BlockUseReport) -> Table:
    """The distributions that have numbers."""
    rows = [(r.words, _short(r.median), _short(r.p95), r.numbers) for r in use.spreads if r.numbers]
    return Table(rows, " | median | 95 % | count", "How long content stays, and when it is used again")


def _short(number: float | None) -> str | None:
    return None if number is None else f"{number:,.0f}" if number >= 100 else decimal(number, 2)


def answer(use: BlockUseReport) -> Answer:
    """The facts, the states, and the distributions."""
    states = [(name, part) for name, part in use.state_shares.items() if part]
    words = {"never_hit": "evicted, never hit"}
    counts = [(words.get(name, name), getattr(use, name)) for name in COUNTS]
    rows: list[tuple[object, ...]] = [(name, getattr(use, name)) for name in ("blocks", "most_running")]
    rows += [(f"{name}_share", part) for name, part in use.state_shares.items()]
    rows += [(name, getattr(use, name)) for name in COUNTS]
    for row in use.spreads:
        rows += [(f"{row.name}_median", row.median), (f"{row.name}_p95", row.p95)]
    return Answer(
        use,
        list(facts(use)),
        [
            Table(states, "state | share:%", "Blocks by state", LEGEND),
            Table(counts, " | blocks", "What happened to blocks"),
            spreads(use),
        ],
        Records(("figure", "value"), rows),
    )
