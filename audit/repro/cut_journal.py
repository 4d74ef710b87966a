"""Cuts a journal down to what a finding may depend on: some thousand operations before it.

:func:`cut` reads the journal from the segment in which the finding's request was added, up to the finding.
It keeps the requests and operations of that stretch, the latest :data:`MOST_ITEMS` of them. Findings are
found in ``choose_finding.py``; what is read of a journal is in ``traffic/reader.py``.
"""

from __future__ import annotations

import msgspec

from .. import events as ev
from ..errors import LedgerError
from ..journal.reader import Position, Reader
from ..traffic.reader import RecordedRequest, TrafficReader
from ..traffic.script import Op
from .choose_finding import Seen

MOST_ITEMS = 300_000
"""Most operations that a cut keeps."""


class NotRebuilt(LedgerError):
    """The journal does not have what a reproduction needs; the text is one sentence."""


class Cut(msgspec.Struct):
    """The stretch of a journal before one finding.

    ``hashes``: by request, the hash id of each full block by the position at which the block ends. ``added``:
    the requests that came in the stretch; the others were there before. ``target``: the number of the
    finding's request; -1 if it concerns none. ``undelivered``: steps that were in flight where the cut
    begins. ``whole``: the cut begins with the journal. ``groups``: as in Traffic; empty if not recorded.
    ``scheduler_class``: ``MODULE:CLASS`` of the recorded scheduler, if it is not vLLM's own.
    ``chunk_tokens``: of how many tokens a multiple the connector saves; 0 if no save was recorded. ``came``
    and ``steps``: how many requests came and how many steps there were, up to the finding.
    """

    seen: Seen
    configuration: dict[str, ev.Setting]
    requests: dict[int, RecordedRequest]
    hashes: dict[int, dict[int, int]]
    script: list[Op]
    added: set[int]
    target: int
    undelivered: int
    whole: bool
    groups: list[str]
    chunk_tokens: int
    came: int
    steps: int
    scheduler_class: str = ""


def cut(seen: Seen) -> Cut:
    """Read the stretch before a finding."""
    reader = TrafficReader(steps=True, most=MOST_ITEMS)
    start = None if seen.segment <= 1 else Position(segment=seen.segment, event=-1)
    with Reader(seen.journal, start) as journal:
        for batch in journal.poll():
            if batch.first_event >= seen.number:
                break
            for event in batch.events:
                reader.feed(event)
    started = reader.started
    if started is None:
        raise NotRebuilt("The journal does not say how its engine was configured.")
    requests, size = reader.by_number(), reader.block_tokens
    named = [request.number for request in requests.values() if request.request_id == seen.request_id]
    if seen.request_id and not named:
        raise NotRebuilt(f"The part of the journal that has request {seen.request_id} is gone.")
    script = reader.script[-MOST_ITEMS:]
    return Cut(
        seen=seen,
        configuration=started.configuration,
        requests=requests,
        hashes={
            number: {place * size: hash_id for place, hash_id in enumerate(request.hash_ids(), 1) if hash_id}
            for number, request in requests.items()
        },
        script=script,
        added={int(op.request) for op in script if op.do == "add"},
        target=named[-1] if named and seen.request_id else -1,
        undelivered=reader.undelivered,
        whole=reader.whole,
        groups=reader.groups(),
        chunk_tokens=reader.chunk_tokens,
        came=sum(request.at >= 0 for request in reader.requests),
        steps=reader.steps,
    )
