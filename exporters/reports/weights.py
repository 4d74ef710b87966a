"""What an audit says of weights that changed under running engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ...audit.causes import AGE_UNKNOWN
from ...audit.events import DECLARED, DETECTED, LABELLED, POSSIBLE
from ...audit.ledger.weights_postings import EQUAL
from ...audit.replay.journals import Audit
from ..answer import counted


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


def sentences(data: WeightsData) -> Iterator[str]:
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
