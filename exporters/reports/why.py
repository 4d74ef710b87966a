"""Why prompt tokens missed the caches, over whole journals: causes that sum to all misses.

:mod:`kvledger.audit.analysis.cache_misses` finds the causes by position, the rows of
:mod:`kvledger.exporters.facts` keep them, and this file prints their sums. The sum of the causes is checked
against the ledger's own count of misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...audit.analysis.costs import MoreBlocks
from ...audit.causes import EVICTED, MISSES, SAMPLED_MISSES
from ...audit.release_semantics import contract
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ..answer import (
    DIM,
    DOUBT,
    Answer,
    Lines,
    Part,
    Records,
    Sum,
    Table,
    Words,
    counted,
    listed,
    notes,
    part_of,
    percent,
    records,
    share,
)
from .costs import FirstToken, ModelRow, model_row, model_text, money, part

if TYPE_CHECKING:
    from ..facts.misses import Misses, Sampled
    from ..facts.rows import EngineFacts

LEGEND = (
    "A prompt token is a miss each time it is computed, and once more if it had no KV when its request "
    "ended. A cause is named where the recorded events prove it."
)
MORE = (
    "Recorded at level {level}, which has no block events. Level blocks tells of each request's tokens "
    "whether they were evicted; a sample tells it of all together."
)
TOKENS = "tokens"
"""The level without block events."""

NO_BLOCK_SIZE = "{path}: its engine reported no block size, so no miss can be below block size."


class CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cause. ``share`` is of all misses, 1 for all; ``requests`` had at least one such miss.

    ``seconds`` is the engine time that computing the tokens took, and ``engine_share`` its share of all
    engine time. ``first_token_*``: how much later the first token came in the requests concerned.
    None: not known.
    """

    cause: str
    text: str
    tokens: int
    share: float | None
    requests: int
    seconds: float | None = None
    engine_share: float | None = None
    first_token_median_seconds: float | None = None
    first_token_p95_seconds: float | None = None
    money: float | None = None


class SampledRow(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the sample with one cause. ``share`` is of all its blocks, ``margin`` half its 95 % interval;
    None: not known."""

    cause: str
    text: str
    blocks: int
    share: float | None
    margin: float | None = None


class WhyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The misses of one group of requests. Figures as in :class:`Why`."""

    group: str
    requests: int
    unknown: int
    prompt_tokens: int
    hit: int
    no_hit: int
    causes: list[CauseRow]


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Misses (``no_hit`` tokens) by cause, and ``hit`` tokens. No figure includes ``unknown`` requests."""

    requests: int
    unknown: int
    prompt_tokens: int
    hit: int
    no_hit: int
    causes: list[CauseRow]
    notes: list[str]
    engine_seconds: float = 0.0
    models: list[ModelRow] = []
    block_size: int = 0
    """Tokens per block; 0: not known, or different in several engines."""
    levels: list[str] = []
    """The levels below ``blocks`` at which journals were recorded."""
    forgotten_hashes: int = 0
    """Evicted blocks that were not remembered to the end: tokens in them count as never seen before."""
    conclusions: list[str] = []
    groups: list[WhyGroup] = []
    """Most misses first; empty where no groups were asked for."""
    scheduled: int = 0
    """Scheduled tokens of all requests."""
    preempted: int = 0
    """Tokens computed again, of prompts and outputs, after preemptions for lack of free blocks."""
    more_blocks: MoreBlocks | None = None
    """The fewest blocks that would have avoided most of ``preempted``; None if that is not known."""
    sampled: list[SampledRow] = []
    """What became before of the contents that first hits did not cover, of a sample of their blocks."""

    @property
    def sampled_evictions(self) -> tuple[int, float] | None:
        """Blocks of the sample, and the share of them that was evicted; None: too few blocks."""
        shares = {row.cause: row.share for row in self.sampled if row.share is not None}
        return (sum(row.blocks for row in self.sampled), shares.get(EVICTED, 0.0)) if shares else None


def why(
    paths: Sequence[Path],
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    gpu_hour: float | None = None,
    by: str = "",
    where: str = "",
) -> Why:
    """The causes, most tokens first, and those of each group if ``by`` names groups.

    ``by`` is as for :func:`~kvledger.exporters.facts.groups.group_columns`; ``where`` is an SQL condition on
    the columns of requests. Raises :class:`~kvledger.audit.errors.LedgerError`, also for a path that holds no
    journal.
    """
    from ..facts.dataset import facts
    from ..facts.groups import group_columns, group_names
    from ..facts.misses import misses_by_group, sampled_misses
    from ..facts.sums import by_group

    columns = group_columns(by)
    with facts(paths, window=window, run=run) as found:
        sums = by_group(found, columns, where, group_costs=True)
        everything = misses_by_group(found, sums, (), where)[()]
        groups = misses_by_group(found, sums, columns, where) if columns else {}
        result = explained(everything, sampled_misses(found, where), found.engines, gpu_hour)
    seconds = result.engine_seconds  # a part of the requests shares its engines' time with the others
    rows = [_group_row(group_names(by, name), group, seconds, gpu_hour) for name, group in groups.items()]
    rows.sort(key=lambda row: (-row.no_hit, row.group))
    return msgspec.structs.replace(result, groups=rows, notes=[*result.notes, *found.notes])


def _sampled_rows(found: Sampled) -> list[SampledRow]:
    return [
        SampledRow(
            cause=cause,
            text=SAMPLED_MISSES.get(cause, cause),
            blocks=blocks,
            share=found.share(cause),
            margin=found.margins.get(cause),
        )
        for cause, blocks in sorted(found.blocks.items(), key=lambda row: (-row[1], row[0]))
    ]


def _group_row(name: str, misses: Misses, engine_seconds: float, gpu_hour: float | None) -> WhyGroup:
    return WhyGroup(group=name, **_sums(misses, engine_seconds, gpu_hour))


def _sums(misses: Misses, engine_seconds: float, gpu_hour: float | None) -> dict[str, Any]:
    """What all requests and each group have: requests, hits, misses, and these by cause, most first."""
    figures = misses.sums.figures
    causes = sorted(misses.tokens.items(), key=lambda row: (-row[1], row[0]))
    return {
        "requests": figures["requests"],
        "unknown": figures["unknown_requests"],
        "prompt_tokens": figures["prompt_tokens"],
        "hit": figures["local"] + figures["external"],
        "no_hit": misses.sums.missed,
        "causes": [_cause_row(misses, *row, engine_seconds, gpu_hour) for row in causes],
    }


def explained(
    misses: Misses, sampled: Sampled, engines: Sequence[EngineFacts], gpu_hour: float | None = None
) -> Why:
    """The misses of these engines as data. ``gpu_hour``: the price of an hour of one engine."""
    assert misses.sums.missed == sum(misses.tokens.values()), "the causes do not add up to the misses"
    preempted = misses.preempted
    models = [model_row(engine.name, engine.busy_us, engine.model) for engine in engines]
    engine_seconds = sum(row.engine_seconds for row in models)
    below = [e.engine for e in engines if e.engine and e.engine.level == TOKENS]
    levels = [TOKENS] if any(contract(each.engine).level != TOKENS for each in below) else []
    sizes = {engine.block_tokens for engine in engines}
    return Why(
        **_sums(misses, engine_seconds, gpu_hour),
        notes=[
            *(MORE.format(level=level) for level in levels),
            *(NO_BLOCK_SIZE.format(path=engine.path) for engine in engines if not engine.block_tokens),
        ],
        engine_seconds=engine_seconds,
        models=models,
        block_size=sizes.pop() if len(sizes) == 1 else 0,
        levels=levels,
        forgotten_hashes=sum(engine.forgotten_hashes for engine in engines),
        scheduled=misses.sums.figures["scheduled"],
        preempted=preempted.tokens,
        more_blocks=preempted.more_blocks,
        sampled=_sampled_rows(sampled),
    )


def _cause_row(
    misses: Misses, cause: str, tokens: int, engine_seconds: float, gpu_hour: float | None
) -> CauseRow:
    took = misses.seconds.get(cause)
    first_token = misses.first_tokens.get(cause, FirstToken())
    return CauseRow(
        cause=cause,
        text=MISSES[cause],
        tokens=tokens,
        share=share(tokens, misses.sums.missed),
        requests=misses.requests[cause],
        seconds=took,
        engine_share=part(took, engine_seconds),
        first_token_median_seconds=first_token.median_seconds,
        first_token_p95_seconds=first_token.p95_seconds,
        money=money(took, gpu_hour),
    )


# --- the answer -----------------------------------------------------------------------------------------

SHOWN_CAUSES = 3
"""How many causes have a column in the table of groups."""


def answer(result: Why) -> Answer:
    """Hits and misses in a sentence each, then the causes as a table."""
    first, *rest = _sentences(result)
    lines = []
    if result.engine_seconds:
        lines = [f"{result.engine_seconds:,.1f} s of engine time. {model_text(result.models[0].model)}"]
        if len(result.models) > 1:
            lines.append(f"That is the model of {result.models[0].engine}; --format json has all.")
    parts: list[Part] = [
        causes(result),
        _groups(result),
        Lines([Words(line, DIM) for line in lines]),
        notes(result.notes),
    ]
    found = records(CauseRow, result.causes)
    if result.groups:
        by_group = (
            [group.group, *msgspec.structs.astuple(row)] for group in result.groups for row in group.causes
        )
        found = Records(["group", *found.names], by_group)
    return Answer(result, [first, *(f"- {each}" for each in result.conclusions), *rest], parts, found)


def _sentences(result: Why) -> Iterator[str]:
    hits = part_of(result.hit, result.prompt_tokens, "hits")
    yield f"{counted(result.prompt_tokens, 'prompt token')}: {hits}."
    if result.causes:
        most = result.causes[0]
        yield f"{result.no_hit:,} misses. Most frequent cause: {most.text} ({percent(most.share or 0)})."
    known = [row for row in result.sampled if row.share is not None]
    if known:
        parts = listed([f"{percent(row.share or 0)}{_margin(row)} {row.text}" for row in known])
        total = counted(sum(row.blocks for row in known), "block")
        yield f"What first hits did not cover, by a sample of {total}: {parts}."
    if result.unknown:
        unknown = counted(result.unknown, "request")
        yield Words(f"{unknown} unknown: events are missing, so no figure includes them.", DOUBT)


def _margin(row: SampledRow) -> str:
    return "" if row.margin is None else f" (± {percent(row.margin)})"


def causes(result: Why) -> Table:
    """The causes, and their sum."""
    columns = "=text | tokens | share:% | requests"
    if any(row.seconds is not None for row in result.causes):
        columns += (
            " | seconds:s | engine time=engine_share:% | first token, median=first_token_median_seconds:s | "
            "p95=first_token_p95_seconds:s"
        )
    if any(row.money is not None for row in result.causes):
        columns += " | cost=money:,.2f"
    whole = Sum(("all misses", result.no_hit, 1.0, result.requests - result.unknown))
    rows = [*result.causes, whole] if result.causes else ()
    return Table(rows, columns, "Why prompt tokens missed the caches", LEGEND)


def _groups(result: Why) -> Table:
    """Hits and misses of each group, and the share of the most frequent causes in its misses."""
    most = result.causes[:SHOWN_CAUSES]
    rows = []
    for group in result.groups:
        tokens = {row.cause: row.tokens for row in group.causes}
        shares = (share(tokens.get(row.cause, 0), group.no_hit) for row in most)
        hits = share(group.hit, group.prompt_tokens)
        rows.append((group.group, group.requests, group.prompt_tokens, hits, group.no_hit, *shares))
    names = "".join(f" | {row.text.replace(':', ',')}:%" for row in most)
    columns = f" | requests | prompt | hits:% | misses{names}"
    return Table(rows, columns, "Misses by group", "Causes: share of the group's misses.")
