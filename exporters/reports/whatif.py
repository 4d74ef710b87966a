"""What-if reports: which hits another number of blocks would have had, as text, data or CSV."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ...audit.analysis.block_trace import BlockTrace
from ...audit.analysis.whatif import TRUSTED_POINTS, Calibration, Options, SizePoint, WhatIf, what_if
from ...audit.errors import LedgerError
from ...audit.replay.block_traces import block_trace, is_request_trace, request_trace
from ...audit.replay.parallel import Run, here, readable
from ...audit.replay.windows import EVERYTHING, Window
from ..csv_cells import structs_csv
from ..facts.kept_blocks import recorded_blocks, traces_at
from .terminal import blocks, bytes_text, counted, figures_table, notes, percent, size, title

BAR = 40
"""Columns of the longest bar of the curve."""

LEGEND = (
    "Local hits of first admissions as a share of their prompt tokens, if the pool had so many blocks. The "
    "engine's own timing is kept: a larger cache would also end prefills sooner."
)
NO_BLOCK_BYTES = (
    "--tiers needs the bytes of one block, which this trace does not name: add --block-bytes, which is "
    "block tokens x layers x 2 x KV heads x head size x bytes per number."
)
NO_FIRST_TIER = "--tiers of a request trace needs the size of the first tier: add --blocks."


class WhatIfReport(msgspec.Struct, frozen=True, kw_only=True):
    """One result for each engine or request trace."""

    engines: list[WhatIf]


class CurveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the CSV."""

    engine: str
    blocks: int | None
    present: bool
    hit_tokens: int
    hit_share: float
    gained_points: float
    evicted_blocks: int
    short_blocks: int


def study(
    paths: Sequence[Path],
    options: Options,
    *,
    block_tokens: int = 0,
    window: Window = EVERYTHING,
    run: Run = here,
) -> WhatIfReport:
    """Replay every journal and request trace at ``paths``. Raises LedgerError."""
    requests = [path for path in paths if is_request_trace(path)]
    others = [path for path in paths if path not in requests]
    read = partial(_of_journal, options=options, window=window)
    results = [*readable(run, read, traces_at(others, window))]
    results += [_of_trace(block_trace(request_trace(path, block_tokens)), options) for path in requests]
    return WhatIfReport(engines=results)


def _of_journal(path: Path, options: Options, window: Window) -> WhatIf:
    return _of_trace(block_trace(recorded_blocks(path), window), options)


def _of_trace(trace: BlockTrace, options: Options) -> WhatIf:
    if options.tiers and not (options.block_bytes or trace.block_bytes):
        raise LedgerError(NO_BLOCK_BYTES)
    if options.tiers and not (options.blocks or trace.blocks):
        raise LedgerError(NO_FIRST_TIER)
    return what_if(trace, options)


# --- options --------------------------------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """Block counts as a user writes them: ``1000,2000``. Raises LedgerError."""
    words = [word.strip().replace("_", "") for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise LedgerError(f"{text!r} is no list of block counts: write --blocks 1000,2000.")
    return [int(word) for word in words]


def sizes(text: str) -> list[int]:
    """Sizes in bytes as a user writes them: ``40GiB,500GB``. Raises LedgerError."""
    return [size(word.strip()) for word in text.split(",") if word.strip()]


# --- text -----------------------------------------------------------------------------------------------


def render(report: WhatIfReport) -> Group:
    """Each engine: the conclusion, the curve, the second tier."""
    several = len(report.engines) > 1
    return blocks(*(part for one in report.engines for part in _engine(one, named=several)))


def _engine(one: WhatIf, *, named: bool) -> Iterator[RenderableType | None]:
    lines = [Text(one.engine, style="bold")] if named else []
    lines.append(Text(one.sentence, style="bold"))
    lines.append(Text(calibrated(one.calibration), style="" if one.calibration.trusted else "bold yellow"))
    yield Group(*lines)
    yield _curve(one)
    yield _tiers(one)
    yield notes([*_scheduler(one), *one.calibration.doubts])


def calibrated(calibration: Calibration) -> str:
    """How far the replay at the recorded size is from the recorded hits, and whether to trust the rest."""
    residual = calibration.residual_points
    if residual is None:
        return "The trace has no recorded hits to compare with."
    compared = (
        f"At the recorded size the replay hits {calibration.hit_tokens:,} tokens and the engine hit "
        f"{calibration.recorded_hit_tokens:,}: a residual of {residual:+.2f} points "
        f"({calibration.equal_admissions:,} of {counted(calibration.admissions, 'admission')} equal)."
    )
    if calibration.trusted:
        return compared
    why = "; ".join(calibration.doubts) or "the trace names no cause"
    return (
        f"{compared} That is more than {TRUSTED_POINTS:g} points, so do not trust the figures below. Known "
        f"causes: {why}."
    )


def _curve(one: WhatIf) -> Group:
    bar = "█" if (getattr(sys.stdout, "encoding", "") or "").lower().startswith("utf") else "#"
    table = figures_table("blocks", "hit rate", "points")
    table.add_column("")
    for point in [*one.curve, one.ideal]:
        name = "no limit" if point.blocks is None else f"{point.blocks:,}"
        name += "  (present)" if _is_present(one, point) else ""
        short = f"  {point.short_blocks:,} blocks short" if point.short_blocks else ""
        table.add_row(
            Text(name, style="bold" if _is_present(one, point) else ""),
            percent(point.hit_share),
            f"{point.gained_points:+.1f}" if point.gained_points and one.blocks else "",
            Text(f"{bar * round(BAR * point.hit_share)}{short}"),
        )
    return Group(title("Hit rate by number of blocks", LEGEND), table)


def _is_present(one: WhatIf, point: SizePoint) -> bool:
    return point.blocks is not None and point.blocks == one.blocks


def _tiers(one: WhatIf) -> Group | None:
    if not one.tiers:
        return None
    table = figures_table("second tier", "blocks", "tokens", "of prompts")
    for tier in one.tiers:
        table.add_row(
            bytes_text(tier.bytes), f"{tier.blocks:,}", f"{tier.tier_tokens:,}", percent(tier.tier_share)
        )
    legend = (
        f"Tokens that a second tier would have given beyond the local hits. One block is "
        f"{bytes_text(one.block_bytes)}; every cached block is written to the tier."
    )
    return Group(title("Second tier", legend), table)


def _scheduler(one: WhatIf) -> Iterator[str]:
    """Where the order of requests would matter, which a pool alone does not know."""
    short = [point.blocks for point in one.curve if point.short_blocks and point.blocks is not None]
    if one.blocks and (short or one.preemptions):
        size = min(short, default=2 * one.blocks)
        yield (
            "Preempted requests come back in another order, and a pool alone doesn't know "
            "it: kvledger simulate "
            f"JOURNAL --set num_gpu_blocks={size + 1} runs the scheduler too."
        )


def as_csv(report: WhatIfReport) -> str:
    """The curve, one line per size."""
    rows = [
        CurveRow(
            engine=one.engine,
            present=_is_present(one, point),
            **{name: getattr(point, name) for name in point.__struct_fields__},
        )
        for one in report.engines
        for point in [*one.curve, one.ideal]
    ]
    return structs_csv(CurveRow, rows)
