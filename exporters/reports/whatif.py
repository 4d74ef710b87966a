"""Which hits another number of blocks would have had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ...audit.analysis.trace_reader import BlockTrace
from ...audit.analysis.whatif import TRUSTED_POINTS, Calibration, Options, SizePoint, WhatIf, what_if
from ...audit.errors import LedgerError
from ...audit.replay.parallel import Run, here, readable
from ...audit.replay.request_traces import block_trace, is_request_trace, request_trace
from ...audit.replay.windows import EVERYTHING, Window
from ..answer import (
    DOUBT,
    Answer,
    Lines,
    Part,
    Sum,
    Table,
    Words,
    bytes_text,
    counted,
    made,
    notes,
    records,
    size,
)
from ..facts.kept_blocks import recorded_blocks, traces_at

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


# --- the answer -----------------------------------------------------------------------------------------


def answer(report: WhatIfReport) -> Answer:
    """The conclusion, then each engine: the curve, the second tier."""
    rows = [
        made(CurveRow, point, engine=one.engine, present=_is_present(one, point))
        for one in report.engines
        for point in [*one.curve, one.ideal]
    ]
    if len(report.engines) == 1:
        first, *parts = _engine(report.engines[0])
        sentences = first.lines if isinstance(first, Lines) else ()
    else:
        sentences = [_most(report.engines)]
        parts = [part for one in report.engines for part in _engine(one, one.engine)]
    return Answer(report, sentences, parts, records(CurveRow, rows))


def _most(engines: Sequence[WhatIf]) -> str:
    """Which of several engines would gain most, and what."""
    gains = [(point.gained_points, one) for one in engines for point in [*one.curve, one.ideal] if one.blocks]
    most, one = max(gains, key=lambda gain: gain[0], default=(0.0, engines[0]))
    if most <= 0:
        return f"More blocks would not add hits on any of {counted(len(engines), 'engine')}."
    return f"Of {len(engines)} engines, {one.engine} would gain most by more blocks: {one.sentence}"


def _engine(one: WhatIf, name: str = "") -> Iterator[Part]:
    trust = calibrated(one.calibration)
    yield Lines([one.sentence, trust if one.calibration.trusted else Words(trust, DOUBT)], name)
    curve = []
    for point in [*one.curve, one.ideal]:
        present = _is_present(one, point)
        size = "no limit" if point.blocks is None else f"{point.blocks:,}{'  (present)' if present else ''}"
        gained = f"{point.gained_points:+.1f}" if point.gained_points and one.blocks else ""
        short = f"{point.short_blocks:,} blocks short" if point.short_blocks else ""
        row = (size, point.hit_share, gained, point.hit_share, short)
        curve.append(Sum(row) if present else row)
    yield Table(curve, "blocks | hit rate:% | points | :bar | ", "Hit rate by number of blocks", LEGEND)
    yield Table(
        one.tiers,
        "second tier=bytes:bytes | blocks | tokens=tier_tokens | of prompts=tier_share:%",
        "Second tier",
        f"Tokens that a second tier would have given beyond the local hits. One block is "
        f"{bytes_text(one.block_bytes)}; every cached block is written to the tier.",
    )
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


def _is_present(one: WhatIf, point: SizePoint) -> bool:
    return point.blocks is not None and point.blocks == one.blocks


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
