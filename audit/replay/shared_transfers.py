"""Compare what an engine loaded with what other engines stored, in engines that share a store.

Each engine's ledger judges its own transfers (``ledger/transfer_fingerprints.py``). A load of a block
that another engine stored is kept there, and compared here once all journals are read. Engines belong
together if they have one ``KVLEDGER_CONTENT_KEY``: then equal hashes have equal ids, and equal bytes equal
fingerprints.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ledger.content_postings import DIGITS, differences
from ..ledger.entries import ContentTransfer, Entry
from ..ledger.ledger_state import VERSIONS_KEPT, ForeignLoad, Stored
from .engine_audit import EngineAudit


def compare_transfers(engines: Sequence[EngineAudit]) -> None:
    """Judge the loads that were kept, and add what was found to the audits of the engines that loaded."""
    sharing: dict[str, list[EngineAudit]] = {}
    for engine in engines:
        custody = engine.auditor.ledger.custody
        if custody.fleet_store:
            sharing.setdefault(custody.key_name, []).append(engine)
    for together in sharing.values():
        whole = not any(engine.doubts for engine in together)
        for engine in together:
            _compare(engine, together, whole)


def _compare(engine: EngineAudit, together: Sequence[EngineAudit], whole: bool) -> None:
    """``whole``: no journal lacks events, so a version that was not seen was not stored."""
    custody, counts = engine.auditor.ledger.custody, engine.auditor.ledger.sums
    loads, custody.foreign, custody.foreign_digits = custody.foreign, [], 0
    judged: dict[tuple[object, ...], ContentTransfer] = {}
    at: dict[tuple[object, ...], int] = {}
    for load in (ForeignLoad(*each) for each in loads):
        versions, complete = _versions(load, together)
        if any(load.prints == version[0] for version, _ in versions):
            counts.count_transfer(load.counted_as, -1)
            counts.count_transfer("moved")
        elif versions and complete and whole:
            counts.count_transfer(load.counted_as, -1)
            counts.count_transfer("transfer_differed")
            found = _subject(load, versions)
            key: tuple[object, ...] = (found.how, found.layers, found.part, found.reader)
            known = judged.get(key)
            judged[key] = found if known is None else known._replace(blocks=[*known.blocks, load.block])
            at.setdefault(key, load.at)
    sizes = engine.auditor.ledger.contents.block_tokens
    for key, found in judged.items():
        subject = found._replace(tokens=len(found.blocks) * sizes.get(found.group, 0))
        engine.auditor.enter(Entry(0, found.step, at[key], subject, None))


def _versions(load: ForeignLoad, engines: Sequence[EngineAudit]) -> tuple[list[tuple[Stored, str]], bool]:
    """What was stored under the hash of a load, with the engines that stored it; whether this is all."""
    place = load.hash_id, load.worker, load.group
    versions: list[tuple[Stored, str]] = []
    complete = True
    for engine in engines:
        stored = engine.auditor.ledger.custody.stored.get(place, [])
        complete = complete and len(stored) < VERSIONS_KEPT
        versions += [(version, engine.name) for version in stored]
    return versions, complete


def _subject(load: ForeignLoad, versions: Sequence[tuple[Stored, str]]) -> ContentTransfer:
    how, layers, part = differences(load.prints, [version[0] for version, _ in versions])
    (_, stored_step, _, writer), name = versions[-1]
    sources = [
        f"  stored in step {step} of {engine}: block {source}, filled by request {filler or 'not known'}"
        for (_, step, source, filler), engine in versions
    ]
    return ContentTransfer(
        load.worker,
        load.group,
        load.pool,
        [load.block],
        load.step,
        how,
        layers,
        part,
        len(load.prints) // (2 * DIGITS),
        load.reader,
        stored_step,
        f"{writer or 'not known'} in {name}",
        sources,
        load.prints,
    )
