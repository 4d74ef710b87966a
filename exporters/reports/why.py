"""Why prompt tokens were no hits, over whole journals: a table of causes that sums to all of them.

The causes are found by position in :mod:`kvledger.audit.analysis.cache_misses`; here they are added up
and drawn. The sum of the causes is held against what the ledger counted by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ...audit.analysis.cache_misses import misses, never_came
from ...audit.causes import MISSES
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_account
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from .audit import share, structs_csv
from .terminal import counted, figures_table, notes, percent, title

LEGEND = (
    "Prompt tokens that were computed, each as often as it was, and those that never came to be.\n"
    "A cause is named where the recorded events prove it."
)
MORE = (
    "Recorded at level {level}, which has no block events: level blocks would tell what was evicted "
    "from what was never seen."
)
BLOCKS = "blocks"
"""The level that has block events."""

NO_BLOCK_SIZE = "{path}: its engine told no block size, so nothing is known to be below it."


class CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cause. ``share`` is of all tokens that were no hit, 1 for all; ``requests`` were touched."""

    cause: str
    text: str
    tokens: int
    share: float | None
    requests: int


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """``no_hit`` tokens by cause. ``unknown`` requests take no part; ``hit`` tokens are beside them."""

    requests: int
    unknown: int
    prompt_tokens: int
    hit: int
    no_hit: int
    causes: list[CauseRow]
    notes: list[str]


class Tally(msgspec.Struct):
    """One journal's part, or several journals' together."""

    tokens: dict[str, int] = {}
    requests: dict[str, int] = {}
    known: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    hit: int = 0
    no_hit: int = 0
    levels: list[str] = []
    notes: list[str] = []

    def add(self, account: Account, block_size: int) -> None:
        """Take in one request."""
        if account.unknown is not None:
            self.unknown += 1
            return
        self.known += 1
        for settlement in account.settlements:
            self.prompt_tokens += settlement.prompt_tokens - settlement.carried
            self.hit += settlement.local + settlement.external
        self.no_hit += account.first_prompt
        self.no_hit += sum(end - start for start, end, _ in account.executed_again)
        if account.closed_at >= 0:
            self.no_hit += sum(end - start for start, end in never_came(account))
        causes = set()
        for start, end, cause in misses(account, block_size):
            self.tokens[cause] = self.tokens.get(cause, 0) + end - start
            causes.add(cause)
        for cause in causes:
            self.requests[cause] = self.requests.get(cause, 0) + 1

    def merge(self, more: Tally) -> None:
        """Take in another journal's."""
        for own, other in ((self.tokens, more.tokens), (self.requests, more.requests)):
            for cause, count in other.items():
                own[cause] = own.get(cause, 0) + count
        self.known += more.known
        self.unknown += more.unknown
        self.prompt_tokens += more.prompt_tokens
        self.hit += more.hit
        self.no_hit += more.no_hit
        self.levels += [level for level in more.levels if level not in self.levels]
        self.notes += more.notes


def why(paths: Sequence[Path], *, window: Window = EVERYTHING, run: Run = here) -> Why:
    """The causes, most tokens first. Raises :class:`LedgerError` for a path that holds no journal."""
    everything = Tally()
    for some in run(partial(_of_journal, window=window), journals_at(paths)):
        everything.merge(some)
    return explained(everything)


def explained(tally: Tally) -> Why:
    """A tally as data."""
    assert tally.no_hit == sum(tally.tokens.values()), "the causes do not add up to what was no hit"
    causes = sorted(tally.tokens.items(), key=lambda row: (-row[1], row[0]))
    return Why(
        requests=tally.known + tally.unknown,
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


def block_size(book: EngineAudit) -> int:
    """Tokens of a block of the engine's cache; 0 where that was not told."""
    said = book.engine.configuration.get("block_size") if book.engine else None
    return said if isinstance(said, int) and said > 0 else 0


def _of_journal(path: Path, window: Window) -> Tally:
    book, tally = EngineAudit(path, keep=True, window=window, with_metrics=False), Tally()
    for account in each_account(book):
        tally.add(account, block_size(book))
    remark(tally, book)
    return tally


def remark(tally: Tally, book: EngineAudit) -> None:
    """What the journal's recording leaves open."""
    if book.engine is not None and book.engine.level != BLOCKS:
        tally.levels = [book.engine.level]
    if not block_size(book):
        tally.notes.append(NO_BLOCK_SIZE.format(path=book.path))


def drawn(found: Why) -> Group:
    """For a terminal."""
    table = figures_table("", "tokens", "share", "requests")
    for row in found.causes:
        table.add_row(Text(row.text), f"{row.tokens:,}", percent(row.share or 0), f"{row.requests:,}")
    table.add_section()
    whole = percent(1) if found.no_hit else ""
    known = found.requests - found.unknown
    table.add_row(Text("no hit", style="bold"), f"{found.no_hit:,}", whole, f"{known:,}")
    beside = f"Beside them, {found.hit:,} of {found.prompt_tokens:,} prompt tokens were hits."
    if found.unknown:
        beside += f" {counted(found.unknown, 'request')} unknown, in no figure."
    parts: list[RenderableType] = [title("Why prompt tokens were no hits", LEGEND), table, Text(beside)]
    said = notes(found.notes)
    if said is not None:
        parts += [Text(), said]
    return Group(*parts)


def as_csv(found: Why) -> str:
    """A line a cause, header first."""
    return structs_csv(CauseRow, found.causes)
