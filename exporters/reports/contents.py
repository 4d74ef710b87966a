"""What level ``content`` found out about the KV in the blocks: the data, and its sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from ...audit.ledger.ledger_state import LedgerSums
from ...audit.replay.journals import Audit
from ..answer import counted

_NOT_COMPARED = {
    "same_step": "computed in the same step",
    "unsampled": "left out of the sample",
    "unseen": "filled before the observation",
    "loaded": "loaded by a connector that kvledger can't follow",
    "unmatched": "read by requests that the journal does not show in that step",
}


class ContentsData(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by what was found, each counted for every hit and every worker; ``seconds`` are of the engine.

    ``verified`` held what was sealed, ``differed`` did not, and nobody was seen to fill ``unsealed`` ones.
    ``not_compared``: the other hit blocks, by reason. ``tokens`` are those of verified blocks.
    """

    workers: int
    verified: int
    tokens: int
    differed: int
    unsealed: int
    not_compared: dict[str, int]
    sealed: int
    scrubbed: int
    scrub_differed: int
    bytes: int
    seconds: float
    excluded: list[str]
    stored: int = 0
    """Blocks that were handed to a connector's store."""
    moved: int = 0
    """Blocks that a connector loaded with the bytes that were stored."""
    moved_differed: int = 0
    """Blocks that a connector loaded with other bytes."""
    moved_unknown: int = 0
    """Blocks that a connector loaded and that could not be compared."""
    recomputed: int = 0
    """Blocks that were compared with an earlier computation of the same tokens."""
    recomputed_differed: int = 0
    """Those of them that differ by more than rounding."""
    recomputed_distance: float = 0.0
    """The largest distance of the others."""


def contents(audit: Audit) -> ContentsData | None:
    """The sums over all engines; None if no engine was to check its contents."""
    asked = [
        engine for engine in audit.engines if engine.engine is not None and engine.engine.level == "content"
    ]
    if not asked:
        return None
    total, workers = LedgerSums(), 0
    excluded: list[str] = []
    for engine in asked:
        state = engine.auditor.ledger.contents
        total += engine.auditor.ledger.sums
        workers += len(state.workers)
        excluded += state.excluded
        if not state.watches and not state.excluded:
            excluded.append("The contents of blocks are not checked: no worker wrote what it found.")
    counts, transfers = total.contents, Counter(total.transfers)
    return ContentsData(
        workers=workers,
        verified=counts.get("verified", 0),
        tokens=counts.get("tokens", 0),
        differed=counts.get("differed", 0),
        unsealed=counts.get("unsealed", 0),
        not_compared={name: counts[name] for name in _NOT_COMPARED if counts.get(name)},
        sealed=counts.get("sealed", 0),
        scrubbed=counts.get("scrubbed", 0),
        scrub_differed=counts.get("scrub_differed", 0),
        bytes=counts.get("bytes", 0),
        seconds=counts.get("microseconds", 0) / 1e6,
        excluded=list(dict.fromkeys(excluded)),
        stored=transfers["stored"],
        moved=transfers["moved"],
        moved_differed=transfers["transfer_differed"],
        moved_unknown=transfers["unknown"] + transfers["foreign"] + transfers["unmatched"],
        recomputed=total.recomputed.compared,
        recomputed_differed=total.recomputed.differed,
        recomputed_distance=total.recomputed.largest,
    )


def sentences(found: ContentsData) -> Iterator[str]:
    """The answer first: how many hit blocks held the KV that was computed."""
    hits = found.verified + found.differed + found.unsealed
    if hits:
        yield (
            f"{found.verified:,} of {counted(hits, 'hit block')} held the bytes that were computed or loaded "
            f"({counted(found.tokens, 'token')})."
        )
    if found.sealed or found.scrubbed:
        differed = f", {found.scrub_differed:,} of them changed" if found.scrub_differed else ""
        yield f"{counted(found.sealed, 'block')} sealed, {found.scrubbed:,} verified at rest{differed}."
    loads = found.moved + found.moved_differed
    if loads:
        yield (
            f"{found.moved:,} of {counted(loads, 'loaded block')} held the bytes that were stored "
            f"({counted(found.stored, 'block')} stored)."
        )
    if found.recomputed:
        alike, largest = found.recomputed - found.recomputed_differed, found.recomputed_distance
        again = counted(found.recomputed, "recomputed block")
        yield f"{alike:,} of {again} differed by rounding only (at most {largest:.2g})."
    if found.moved_unknown:
        loaded = counted(found.moved_unknown, "loaded block")
        yield f"Not compared: {loaded}, stored unseen or perhaps by another engine."
    if found.not_compared:
        reasons = ", ".join(f"{n:,} {_NOT_COMPARED[name]}" for name, n in found.not_compared.items())
        yield f"Not compared: {reasons}."
    yield from found.excluded
