"""What-if reports: which hits another cache would have had, as text, data, CSV or one HTML page."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ... import __version__
from ...audit.analysis.block_trace import BlockTrace
from ...audit.analysis.cache_simulation import Replay, Replays
from ...audit.analysis.simulated_pool import MakePolicy, Replayed
from ...audit.analysis.trace_sample import TraceSample
from ...audit.analysis.whatif import (
    TRUSTED_POINTS,
    Calibration,
    GroupPoint,
    Many,
    Options,
    SizePoint,
    WhatIf,
    what_if,
)
from ...audit.errors import LedgerError
from ...audit.journal.format import is_live
from ...audit.replay.block_traces import block_trace, request_trace
from ...audit.replay.parallel import WORTH_BYTES, Processes, Run, cores, here, readable
from ...audit.replay.request_traces import is_request_trace
from ...audit.replay.windows import EVERYTHING, Window
from ..csv_cells import structs_csv
from ..facts.kept_blocks import recorded_blocks, traces_at
from ..templating import environment
from ..trace.groups import check_trace, trace_group
from .terminal import blocks, bytes_text, counted, figures_table, indented, notes, percent, title
from .whatif_chart import curve_chart

TEMPLATES = Path(__file__).parent / "templates"

WORTH_OPERATIONS = 200_000
"""The replays of a shorter trace take less time than starting processes."""

MOST_OPERATIONS = 20_000_000
"""Processes that share the replays of one trace hold so many operations together, about 300 bytes each."""

BAR = 40
"""Columns of the longest bar of the curve."""

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for base, unit in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate("kmgt", 1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")

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
    policy: str
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
    by: str = "",
    share: float | None = None,
) -> WhatIfReport:
    """Replay every journal and request trace at ``paths``. Raises LedgerError.

    ``by`` breaks the hits down by groups of requests, as for
    :func:`~kvledger.exporters.trace.groups.trace_group`. ``share``: replay a sample of so many of the blocks.
    """
    check_trace(by)
    requests = [path for path in paths if is_request_trace(path)]
    others = [path for path in paths if path not in requests]
    read = partial(_of_journal, options=options, window=window, by=by, share=share)
    places = traces_at(others, window)
    if len(places) == 1 and isinstance(run, Processes):
        read = partial(read, run=run)
        run = here
    results = [*readable(run, read, places)]
    for path in requests:
        trace, sample = block_trace(request_trace(path, block_tokens), share=share)
        results.append(_of_trace(trace, sample, options, by))
    return WhatIfReport(engines=results)


def _of_journal(
    path: Path,
    options: Options,
    window: Window,
    by: str,
    share: float | None,
    run: Processes | None = None,
) -> WhatIf:
    """``run``: the processes that share the replays of this journal. Each reads it, so it must have ended."""
    ended = not is_live(path)
    trace, sample = block_trace(recorded_blocks(path), window, share)
    operations = len((sample.trace if sample else trace).operations)
    jobs = 1 if run is None else min(run.jobs or cores(), MOST_OPERATIONS // max(1, operations))
    if run is None or jobs < 2 or operations < WORTH_OPERATIONS or not ended:
        return _of_trace(trace, sample, options, by)
    work = partial(_replayed, path=path, policies=options.policies, share=share)
    processes = copy(run)
    processes.jobs = jobs

    def many(wanted: Sequence[Replay]) -> Iterator[Replayed]:
        return processes.each(work, wanted, [WORTH_BYTES] * len(wanted))

    return _of_trace(trace, sample, options, by, many)


def _replayed(one: Replay, path: Path, policies: Mapping[str, MakePolicy], share: float | None) -> Replayed:
    """One replay, in a process that reads the trace for its first one."""
    return Replays(_loaded(path, share), policies, share or 1.0).run(one)


@lru_cache(maxsize=1)
def _loaded(path: Path, share: float | None) -> BlockTrace:
    trace, sample = block_trace(recorded_blocks(path), EVERYTHING, share)
    return sample.trace if sample else trace


def _of_trace(
    trace: BlockTrace, sample: TraceSample | None, options: Options, by: str, many: Many | None = None
) -> WhatIf:
    if options.tiers and not (options.block_bytes or trace.block_bytes):
        raise LedgerError(NO_BLOCK_BYTES)
    if options.tiers and not (options.blocks or trace.blocks):
        raise LedgerError(NO_FIRST_TIER)
    group_of = trace_group(by, trace) if by else None
    return what_if(trace, options, group_of=group_of, sample=sample, many=many)


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


def size(text: str) -> int:
    """One size in bytes. Raises LedgerError."""
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("0", "")
    found = int(float(number) * UNITS.get(unit.lower(), 0))
    if not found:
        raise LedgerError(f"{text!r} is no size: write 512MiB, 40GiB or 500GB.")
    return found


# --- text -----------------------------------------------------------------------------------------------


def render(report: WhatIfReport) -> Group:
    """Each engine: the conclusion, the curve, the other effects."""
    several = len(report.engines) > 1
    return blocks(*(part for one in report.engines for part in _engine(one, named=several)))


def _engine(one: WhatIf, *, named: bool) -> Iterator[RenderableType | None]:
    lines = [Text(one.engine, style="bold")] if named else []
    lines.append(Text(one.sentence, style="bold"))
    lines.append(Text(calibrated(one.calibration), style="" if one.calibration.trusted else "bold yellow"))
    yield Group(*lines)
    yield _curve(one)
    yield _groups(one)
    yield _tiers(one)
    yield Group(title("Other effects"), *(indented(Text(line)) for line in effects(one)))
    yield notes(one.calibration.doubts)


def calibrated(calibration: Calibration) -> str:
    """How far the replay at the recorded size is from the recorded hits, and whether to trust the rest."""
    residual = calibration.residual_points
    if residual is None:
        return f"{_sampled(calibration)}The trace has no recorded hits to compare with."
    equal = (
        f" ({calibration.equal_admissions:,} of {counted(calibration.admissions, 'admission')} equal)"
        if calibration.sample_share is None
        else ""
    )
    compared = (
        f"{_sampled(calibration)}At the recorded size the replay hits {calibration.hit_tokens:,} tokens and "
        f"the engine hit {calibration.recorded_hit_tokens:,}: a residual of {residual:+.2f} points{equal}."
    )
    if calibration.trusted:
        return compared
    why = "; ".join(calibration.doubts) or "the trace names no cause"
    return (
        f"{compared} That is more than {TRUSTED_POINTS:g} points, so do not trust the figures below. Known "
        f"causes: {why}."
    )


def _sampled(calibration: Calibration) -> str:
    """What share of the blocks was replayed, and how far the sample alone is off."""
    if calibration.sample_share is None:
        return ""
    answer = f"Estimated from a sample of {100 * calibration.sample_share:g} % of the blocks"
    if calibration.residual_points is None or calibration.sample_points is None:
        return f"{answer}. "
    return f"{answer}, whose recorded hits are {calibration.sample_points:+.2f} points off. "


def _curve(one: WhatIf) -> Group:
    bar = "█" if (getattr(sys.stdout, "encoding", "") or "").lower().startswith("utf") else "#"
    several = len({point.policy for point in one.curve}) > 1
    table = figures_table("blocks", "hit rate", "points")
    table.add_column("")
    for point in [*one.curve, one.ideal]:
        name = "no limit" if point.blocks is None else f"{point.blocks:,}"
        name += f"  {point.policy}" if several and point.policy else ""
        name += "  (present)" if _is_present(one, point) else ""
        drawn = bar * round(BAR * point.hit_share)
        table.add_row(
            Text(name, style="bold" if _is_present(one, point) else ""),
            percent(point.hit_share),
            f"{point.gained_points:+.1f}" if point.gained_points and one.blocks else "",
            Text(f"{drawn}{_short(point)}"),
        )
    return Group(title("Hit rate by number of blocks", LEGEND), table)


def _groups(one: WhatIf) -> Group | None:
    if not one.groups:
        return None
    table = figures_table("", *GROUP_COLUMNS)
    for row in one.groups:
        table.add_row(Text(row.group), *group_cells(row))
    return Group(title("Hit rate by group", GROUPS_LEGEND), table)


GROUP_COLUMNS = ("requests", "prompt", "present", "twice", "no limit")
GROUPS_LEGEND = "All groups share each cache, so what one gains may be lost by another."


def group_cells(row: GroupPoint) -> tuple[str, ...]:
    """The figures of a group, for the columns."""
    shares = (row.present_share, row.twice_share, row.ideal_share)
    return (
        f"{row.requests:,}",
        f"{row.prompt_tokens:,}",
        *("" if part is None else percent(part) for part in shares),
    )


def _is_present(one: WhatIf, point: SizePoint) -> bool:
    return point.blocks is not None and point.blocks == one.blocks


def _short(point: SizePoint) -> str:
    return f"  {point.short_blocks:,} blocks short" if point.short_blocks else ""


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


def effects(one: WhatIf) -> Iterator[str]:
    """The other effects, a sentence each."""
    for row in one.block_sizes:
        yield (
            f"Blocks of {row.block_tokens} tokens and as much memory ({row.blocks:,} blocks): "
            f"{percent(row.hit_share)} hits, {row.gained_points:+.1f} points."
        )
    yield (
        f"Blocks smaller than {one.block_tokens} tokens: at most "
        f"{one.smaller_blocks_gain_at_most:+.1f} points; the hashes cover whole blocks only."
    )
    if one.blocks:
        yield _preemptions(one)
        yield from _resets(one)
        yield from _scheduler(one)


def _scheduler(one: WhatIf) -> Iterator[str]:
    """Where the order of requests would matter, which a pool alone does not know."""
    short = [point.blocks for point in one.curve if point.short_blocks and point.blocks is not None]
    if short or one.preemptions.preemptions:
        size = min(short, default=2 * one.blocks)
        yield (
            "Preempted requests come back in another order, and a pool alone doesn't know "
            "it: kvledger simulate "
            f"JOURNAL --set num_gpu_blocks={size + 1} runs the scheduler too."
        )


def _preemptions(one: WhatIf) -> str:
    row = one.preemptions
    needed = f"all tables together would need {counted(row.blocks_needed, 'block')}"
    if not row.preemptions:
        return (
            f"No request was preempted: {needed.replace('would need', 'needed at most')} of {one.blocks:,}."
        )
    return (
        f"{counted(row.preemptions, 'preemption')} made {row.computed_again_tokens:,} tokens be computed "
        f"again. Without preemption {needed}; the pool has {one.blocks:,}."
    )


def _resets(one: WhatIf) -> Iterator[str]:
    row = one.resets
    if row.resets:
        yield f"{counted(row.resets, 'reset')} of the cache cost {row.lost_tokens:,} tokens of hits."
    yield (
        f"{'One more' if row.resets else 'A'} reset of the cache half way would have cost "
        f"{row.one_more_lost_tokens:,} tokens of hits."
    )


def as_csv(report: WhatIfReport) -> str:
    """The curve, one line per size and policy."""
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


# --- the page -------------------------------------------------------------------------------------------


def html(report: WhatIfReport) -> str:
    """Render the page, which loads nothing from the network."""
    engines = [
        {
            "result": one,
            "calibration": calibrated(one.calibration),
            "chart": curve_chart(one),
            "effects": list(effects(one)),
            "groups": [(row.group, *group_cells(row)) for row in one.groups],
            "group_columns": ["", *GROUP_COLUMNS],
            "curve": [_row(one, point) for point in [*one.curve, one.ideal]],
            "tiers": [
                (bytes_text(t.bytes), f"{t.blocks:,}", f"{t.tier_tokens:,}", percent(t.tier_share))
                for t in one.tiers
            ],
        }
        for one in report.engines
    ]
    template = environment(TEMPLATES).get_template("whatif.html.j2")
    return template.render(engines=engines, legend=LEGEND, version=__version__)


def _row(one: WhatIf, point: SizePoint) -> tuple[str, ...]:
    name = "no limit" if point.blocks is None else f"{point.blocks:,}"
    return (
        f"{name} (present)" if _is_present(one, point) else name,
        point.policy,
        percent(point.hit_share),
        f"{point.hit_tokens:,}",
        f"{point.gained_points:+.1f}",
        f"{point.evicted_blocks:,}",
        f"{point.short_blocks:,}",
    )
