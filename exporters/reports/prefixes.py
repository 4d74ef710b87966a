"""The prefixes for which the cache saved and lost most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...audit.analysis.prefixes import Prefix
from ...audit.replay.block_traces import block_prefixes
from ...audit.replay.parallel import Run, here, readable
from ...audit.text import utc
from ..answer import Answer, Lines, Table, counted, of_fields
from ..facts.kept_blocks import recorded_blocks, traces_at

LEGEND = (
    "A prefix is a stretch of blocks that requests share until they differ. Saved tokens were hits. Lost "
    "tokens had been in the cache, were evicted, and were computed again. Labels come from keyed hashes."
)
COLUMNS = (
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
    for several, some_doubts in readable(run, _of_journal, traces_at(paths)):
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


def _of_journal(path: Path) -> tuple[list[Prefix], list[str]]:
    return block_prefixes(recorded_blocks(path, groups=True))


def answer(result: Prefixes) -> Answer:
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
        LEGEND,
    )
    records = of_fields(COLUMNS, result.shown)
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
