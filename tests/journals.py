"""Writes histories to journals on disk, for tests that read journals."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace
from tests.histories import GOLDEN, Golden, events

from kvledger.audit.events import EngineStarted, EngineStopped, Event, Reported, Setting, Snapshot
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.followed_audit import FollowedAudit

STARTED = EngineStarted(0, 1.7e9, "vllm", "0.32.0", "v1", "tokens", 4000, {})
CLEAN = "A0+32 L s56 o P A0+160 L s40 o+ s1 o+ F"
"""A prompt of 200 tokens, preempted during prefill and admitted again (vLLM#36752)."""


def followed_audits(path: Path) -> list[FollowedAudit]:
    """The audits that metrics are made of, each of a whole journal at or under ``path``."""
    audits = [FollowedAudit(journal) for journal in journals_at([path])]
    for audit in audits:
        with Reader(audit.path) as reader:
            audit.read(reader)
    return audits


def write(
    folder: Path,
    stream: Iterable[Event],
    *,
    stopped: bool = True,
    version: str = STARTED.version,
    configuration: dict[str, Setting] | None = None,
    wall_seconds: float = STARTED.wall_seconds,
    level: str = STARTED.level,
) -> Path:
    """Write a journal of one engine with the events of ``stream``; returns its folder."""
    writer = JournalWriter(folder)
    writer.rotate()
    fields = {"version": version, "wall_seconds": wall_seconds, "level": level}
    started = replace(STARTED, configuration=configuration or {}, **fields)
    writer.write([started, Snapshot(0, 0, [], 0), *stream])
    if stopped:
        writer.write([EngineStopped(1_000_000, "shutdown")])
    writer.close()
    return folder


def golden(folder: Path, configuration: dict[str, Setting] | None = None) -> Path:
    """A folder with a journal of each golden history."""
    for number, row in enumerate(GOLDEN):
        write(folder / f"engine-{number:02d}", row.events(), configuration=configuration)
    return folder


def clean(folder: Path) -> Path:
    """A journal of one request with two lives and no finding."""
    return write(folder, events(200, CLEAN))


def violated(folder: Path, wall_seconds: float = STARTED.wall_seconds) -> Path:
    """The same, but the engine reports local and external tokens of different admissions."""
    stream = reported(events(200, CLEAN), local=-128, external=160, computed=168)
    return write(folder, stream, wall_seconds=wall_seconds)


def reported(stream: list[Event], *, local: int, external: int, computed: int) -> list[Event]:
    """The stream with the engine's report inserted before the last event."""
    prompt = local + external + computed
    report = Reported(stream[-1].at, 0, prompt, local, external, computed, local + external)
    return [*stream[:-1], report, stream[-1]]


def titled(beginning: str) -> Golden:
    """The first golden history whose title starts with ``beginning``."""
    return next(row for row in GOLDEN if row.title.startswith(beginning))
