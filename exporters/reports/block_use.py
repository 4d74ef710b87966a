"""How the blocks of engines were used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...audit.analysis.block_states import STATES, BlockUse, Quantiles
from ...audit.analysis.prefixes import Prefix
from ...audit.analysis.step_model import fit
from ...audit.analysis.store_return import StoreReturn, store_return
from ...audit.errors import LedgerError
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.observers import Steps, Stored
from ...audit.replay.parallel import Run, here, readable
from ...audit.replay.request_traces import block_prefixes
from ...audit.text import utc
from ..answer import (
    Answer,
    Lines,
    Records,
    Table,
    bytes_text,
    counted,
    decimal,
    listed,
    made,
    of_fields,
    percent,
    seconds,
    share,
)
from ..facts.kept import journals_and_sessions
from ..facts.kept_blocks import block_use as block_use_at
from ..facts.kept_blocks import recorded_blocks, traces_at

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


# --- The prefixes for which the cache saved and lost most.

PREFIXES_LEGEND = (
    "A prefix is a stretch of blocks that requests share until they differ. Saved tokens were hits. Lost "
    "tokens had been in the cache, were evicted, and were computed again. Labels come from keyed hashes."
)
PREFIXES_COLUMNS = (
    "engine", "label", "parent", "start", "end", "requests", "saved_tokens", "lost_tokens", "losses",
    "wait_seconds",
)  # fmt: skip


class Prefixes(msgspec.Struct, frozen=True, kw_only=True):
    """The first prefixes by saved and lost tokens, and the sums over all ``prefixes``.

    ``doubts``: what the figures may lack.
    """

    prefixes: int
    saved_tokens: int
    lost_tokens: int
    shown: list[Prefix]
    doubts: list[str] = []


def prefixes(paths: Sequence[Path], *, most: int = 20, run: Run = here) -> Prefixes:
    """The prefixes of all journals at ``paths``. Raises LedgerError."""
    found: list[Prefix] = []
    doubts: list[str] = []
    for several, some_doubts in readable(run, _prefixes_of, traces_at(paths)):
        found += several
        doubts += some_doubts
    found.sort(key=lambda each: (-each.saved_tokens - each.lost_tokens, each.engine, each.start, each.label))
    return Prefixes(
        prefixes=len(found),
        saved_tokens=sum(each.saved_tokens for each in found),
        lost_tokens=sum(each.lost_tokens for each in found),
        shown=found[:most],
        doubts=doubts,
    )


def _prefixes_of(path: Path) -> tuple[list[Prefix], list[str]]:
    return block_prefixes(recorded_blocks(path, groups=True))


def prefixes_answer(result: Prefixes) -> Answer:
    """Two sentences, the table, and who lost what to whom."""
    sentences = [
        f"{counted(result.prefixes, 'prefix', 'prefixes')}: the cache saved {result.saved_tokens:,} tokens; "
        f"{result.lost_tokens:,} tokens were evicted and computed again."
    ]
    if result.shown and (result.shown[0].saved_tokens or result.shown[0].lost_tokens):
        first = result.shown[0]
        sentences.append(
            f"Most by prefix {first.label}, tokens {first.start:,} to {first.end:,} of "
            f"{counted(first.requests, 'request')}: {first.saved_tokens:,} saved, {first.lost_tokens:,} lost."
        )
    sentences += [f"{doubt[:1].upper()}{doubt[1:]}." for doubt in dict.fromkeys(result.doubts)]
    table = Table(
        result.shown,
        "prefix=label | after=parent | from=start | to=end | requests | saved=saved_tokens | "
        "lost=lost_tokens | losses | again, s=wait_seconds:,.1f",
        "Prefixes by tokens saved and lost",
        PREFIXES_LEGEND,
    )
    records = of_fields(PREFIXES_COLUMNS, result.shown)
    return Answer(result, sentences, [table, _last_losses(result.shown)], records)


def _last_losses(shown: Sequence[Prefix]) -> Lines:
    """The last loss of each of the prefixes that lost most, by time."""
    most = sorted(shown, key=lambda each: -each.lost_tokens)[:5]
    losses = [(loss, each.label) for each in most for loss in each.last_losses[-1:]]
    lines = [
        f"  {_time(loss.needed_seconds)}: {loss.needed_by} computed {loss.tokens:,} tokens of {label} again, "
        f"evicted at {_time(loss.evicted_seconds)} for {loss.evicted_for or 'no known request'}"
        for loss, label in sorted(losses, key=lambda one: one[0].needed_seconds or 0.0)
    ]
    return Lines(lines, "Last losses")


def _time(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else utc(seconds, milliseconds=True)


# --- What the connector's store of each engine returned.

STORE_LEGEND = (
    "Stored is KV of different contents that the connector was ordered to store. Read: a load filled a block "
    "with it, before the journal ended. Computed again: stored, and computed by a later request all the same."
)
LOADS_LEGEND = (
    "Waited is measured, for asynchronous loads. Saved is what computing the loaded tokens would have taken, "
    "by the model of the engine's step time."
)
STORE_COLUMNS = (
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
    found = list(readable(run, _store_of, journals_at(paths)))
    engines = [each for each in found if each is not None]
    return StoreReport(engines=engines, without=len(found) - len(engines))


def _store_of(path: Path) -> StoreReturn | None:
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


def store_answer(report: StoreReport) -> Answer:
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
        STORE_LEGEND,
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
    return Answer(report, lines, [contents, by_tier], of_fields(STORE_COLUMNS, report.engines))


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
