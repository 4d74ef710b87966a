"""Why prompt tokens missed the caches, over whole journals: causes that sum to all misses.

:mod:`kvledger.audit.analysis.cache_misses` finds the causes by position; this file adds them up and prints
them. The sum of the causes is checked against the ledger's own count of misses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Group
from rich.text import Text

from ...audit.analysis.cache_misses import missed_ranges, never_came
from ...audit.causes import MISSES
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_account
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from .audit import share, structs_csv
from .terminal import blocks, counted, figures_table, notes, part_of, percent, title

LEGEND = (
    "A prompt token is a miss each time it is computed, and once more if it had no KV when its request "
    "ended. A cause is named where the recorded events prove it."
)
MORE = (
    "Recorded at level {level}, which has no block events. Level blocks can tell tokens that were evicted "
    "from tokens that were never seen."
)
BLOCKS = "blocks"
"""The level that has block events."""

NO_BLOCK_SIZE = "{path}: its engine reported no block size, so no miss can be below block size."


class CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cause. ``share`` is of all misses, 1 for all; ``requests`` had at least one such miss."""

    cause: str
    text: str
    tokens: int
    share: float | None
    requests: int


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Misses (``no_hit`` tokens) by cause, and ``hit`` tokens. No figure includes ``unknown`` requests."""

    requests: int
    unknown: int
    prompt_tokens: int
    hit: int
    no_hit: int
    causes: list[CauseRow]
    notes: list[str]


class Tally(msgspec.Struct):
    """Misses of one journal, or of several merged."""

    tokens: Counter[str] = msgspec.field(default_factory=Counter)
    requests: Counter[str] = msgspec.field(default_factory=Counter)
    audited: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    hit: int = 0
    no_hit: int = 0
    levels: list[str] = []
    notes: list[str] = []

    def add(self, account: Account, block_size: int) -> None:
        """Add one request."""
        if account.unknown is not None:
            self.unknown += 1
            return
        self.audited += 1
        for settlement in account.settlements:
            self.prompt_tokens += settlement.prompt_tokens - settlement.carried
            self.hit += settlement.local + settlement.external
        self.no_hit += account.first_prompt
        self.no_hit += sum(end - start for start, end, _ in account.executed_again)
        if account.closed_at >= 0:
            self.no_hit += sum(end - start for start, end in never_came(account))
        causes = set()
        for start, end, cause in missed_ranges(account, block_size):
            self.tokens[cause] += end - start
            causes.add(cause)
        self.requests.update(causes)

    def merge(self, more: Tally) -> None:
        """Add the misses of another journal."""
        self.tokens.update(more.tokens)
        self.requests.update(more.requests)
        self.audited += more.audited
        self.unknown += more.unknown
        self.prompt_tokens += more.prompt_tokens
        self.hit += more.hit
        self.no_hit += more.no_hit
        self.levels += [level for level in more.levels if level not in self.levels]
        self.notes += more.notes


def why(paths: Sequence[Path], *, window: Window = EVERYTHING, run: Run = here) -> Why:
    """The causes, most tokens first. Raises LedgerError for a path that holds no journal."""
    everything = Tally()
    for tally in run(partial(_of_journal, window=window), journals_at(paths)):
        everything.merge(tally)
    return explained(everything)


def explained(tally: Tally) -> Why:
    """A tally as data."""
    assert tally.no_hit == sum(tally.tokens.values()), "the causes do not add up to the misses"
    causes = sorted(tally.tokens.items(), key=lambda row: (-row[1], row[0]))
    return Why(
        requests=tally.audited + tally.unknown,
        unknown=tally.unknown,
        prompt_tokens=tally.prompt_tokens,
        hit=tally.hit,
        no_hit=tally.no_hit,
        causes=[
            CauseRow(
                cause=cause,
                text=MISSES[cause],
                tokens=tokens,
                share=share(tokens, tally.no_hit),
                requests=tally.requests[cause],
            )
            for cause, tokens in causes
        ],
        notes=[*(MORE.format(level=level) for level in tally.levels), *tally.notes],
    )


def block_size(engine_audit: EngineAudit) -> int:
    """Tokens per block of the engine's cache; 0 where the engine did not report it."""
    size = engine_audit.engine.configuration.get("block_size") if engine_audit.engine else None
    return size if isinstance(size, int) and size > 0 else 0


def _of_journal(path: Path, window: Window) -> Tally:
    engine_audit, tally = EngineAudit(path, keep=True, window=window, with_metrics=False), Tally()
    for account in each_account(engine_audit):
        tally.add(account, block_size(engine_audit))
    remark(tally, engine_audit)
    return tally


def remark(tally: Tally, engine_audit: EngineAudit) -> None:
    """Note what this journal's recording can't prove."""
    if engine_audit.engine is not None and engine_audit.engine.level != BLOCKS:
        tally.levels = [engine_audit.engine.level]
    if not block_size(engine_audit):
        tally.notes.append(NO_BLOCK_SIZE.format(path=engine_audit.path))


def render(result: Why) -> Group:
    """Hits and misses in a sentence each, then the causes as a table."""
    return blocks(Group(*_answer(result)), _causes(result), notes(result.notes))


def _answer(result: Why) -> Iterator[Text]:
    hits = part_of(result.hit, result.prompt_tokens, "hits")
    yield Text(f"{counted(result.prompt_tokens, 'prompt token')}: {hits}.")
    if result.causes:
        first = result.causes[0]
        cause = f"{first.text} ({percent(first.share or 0)})"
        yield Text(f"{result.no_hit:,} misses. Most frequent cause: {cause}.")
    if result.unknown:
        unknown = counted(result.unknown, "request")
        yield Text(f"{unknown} unknown: events are missing, so no figure includes them.", style="yellow")


def _causes(result: Why) -> Group | None:
    if not result.causes:
        return None
    table = figures_table("", "tokens", "share", "requests")
    for row in result.causes:
        table.add_row(Text(row.text), f"{row.tokens:,}", percent(row.share or 0), f"{row.requests:,}")
    table.add_section()
    requests = result.requests - result.unknown
    table.add_row(Text("all misses", style="bold"), f"{result.no_hit:,}", percent(1), f"{requests:,}")
    return Group(title("Why prompt tokens missed the caches", LEGEND), table)


def as_csv(result: Why) -> str:
    """One line per cause, with a header."""
    return structs_csv(CauseRow, result.causes)
