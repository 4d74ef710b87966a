"""What the facts keep of an engine."""

from __future__ import annotations

import msgspec

from ...audit.analysis.step_model import StepModel
from ...audit.events import EngineStarted
from ...audit.journal.host_folders import journal_name
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.observers import Steps
from .rows import block_size


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as far as its journal was read.

    ``busy_us``: time of its steps in the window. ``model``: the model of its step time. ``block_tokens``: 0
    if the engine did not report it. ``rows_from_seconds``: Unix time before which only sums by the hour are
    kept of the window's requests; None: it has all rows. ``forgotten_hashes``: evicted blocks that the audit
    does not remember any more, so that tokens in them count as never seen before.
    """

    journal: str
    path: str
    name: str
    engine: EngineStarted | None
    connector: str
    block_tokens: int
    busy_us: int
    model: StepModel
    rows_from_seconds: float | None = None
    forgotten_hashes: int = 0
    cut: list[str] = []
    """Of which invariants not all findings are rows."""


def engine_facts(audit: EngineAudit) -> EngineFacts:
    """What the facts keep of an engine."""
    return EngineFacts(
        journal=journal_name(audit.path),
        path=str(audit.path),
        name=audit.name,
        engine=audit.engine,
        connector=audit.connector,
        block_tokens=block_size(audit),
        busy_us=audit.of(Steps).sums.busy_us,
        model=audit.of(Steps).model,
        forgotten_hashes=sum(pool.forgotten_hashes for pool in audit.auditor.ledger.blocks.pools.values()),
        cut=audit.cut,
    )
