"""What an audit says of the KV in blocks, by level ``content``, and of weights that changed under engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from ...audit.causes import AGE_UNKNOWN
from ...audit.events import DECLARED, DETECTED, LABELLED, POSSIBLE
from ...audit.ledger.ledger_state import LedgerSums
from ...audit.ledger.weights_postings import EQUAL
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


class WeightsData(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of weights, and the tokens that were read or sampled after them.

    ``declared`` and ``detected``: by a call whose purpose it is, and by a digest alone. ``possible``: calls
    that may have changed weights; ``equal``: calls after which all were as before; ``labelled``: new labels.
    ``*_older`` are of weights older than the request's, ``*_unknown`` of weights that are not known.
    """

    declared: int
    detected: int
    possible: int
    equal: int
    labelled: int
    hits: int
    hits_older: int
    hits_unknown: int
    loads_older: int
    loads_unknown: int
    outputs: int
    outputs_suspect: int
    outputs_unknown: int


def weights(audit: Audit) -> WeightsData | None:
    """The changes of weights of all journals; None if nothing is known to have touched weights."""
    changes: dict[str, int] = {}
    for engine in audit.engines:
        for kind, times in engine.auditor.ledger.sums.weights_changes.items():
            changes[kind] = changes.get(kind, 0) + times
    if not changes:
        return None
    totals = audit.totals
    return WeightsData(
        declared=changes.get(DECLARED, 0),
        detected=changes.get(DETECTED, 0),
        possible=changes.get(POSSIBLE, 0),
        equal=changes.get(EQUAL, 0),
        labelled=changes.get(LABELLED, 0),
        hits=totals.hits,
        hits_older=_known(totals.older_hits),
        hits_unknown=totals.older_hits.get(AGE_UNKNOWN, 0),
        loads_older=_known(totals.older_loads),
        loads_unknown=totals.older_loads.get(AGE_UNKNOWN, 0),
        outputs=totals.output_tokens,
        outputs_suspect=_known(totals.suspect_outputs),
        outputs_unknown=totals.suspect_outputs.get(AGE_UNKNOWN, 0),
    )


def _known(by_age: Mapping[str, int]) -> int:
    return sum(by_age.values()) - by_age.get(AGE_UNKNOWN, 0)


def weights_sentences(data: WeightsData) -> Iterator[str]:
    """``7 changes of weights: 0 of 12,480 hits and 0 of 9,310 output tokens read KV of older weights.``"""
    changes, hits, outputs = data.declared + data.detected, data.hits_older, data.outputs_suspect
    if changes:
        of_hits, of_outputs = counted(data.hits, "hit token"), counted(data.outputs, "output token")
        yield (
            f"{counted(changes, 'change')} of weights: {hits:,} of {of_hits} and {outputs:,} of {of_outputs} "
            "read KV of older weights."
        )
    if data.detected:
        yield f"Seen by a digest alone: {counted(data.detected, 'change')}."
    if data.loads_older:
        yield f"{counted(data.loads_older, 'promised token')} had KV of older weights."
    if data.hits_unknown or data.outputs_unknown:
        of_hits = counted(data.hits_unknown, "hit token")
        of_outputs = counted(data.outputs_unknown, "output token")
        yield f"Of {of_hits} and {of_outputs} it is not known which weights made their KV."
    if data.possible:
        yield f"{counted(data.possible, 'call')} may have changed weights; KVLEDGER_LEVEL=content tells."
