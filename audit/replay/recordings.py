"""Find the recordings of an engine's KV events.

A recording is a journal of its own beside the engine's, in a folder whose name begins with ``events-``. It
belongs to the engine if both have the same ``KVLEDGER_EVENTS_KEY`` and port, and the publisher's batches fall
into the time of the engine's journal.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..events import EngineStarted
from ..journal.folder import KV_EVENTS

AFTER_END_SECONDS = 5.0
"""An engine whose journal has no end may have published so long after the last event that was written."""

Identity = tuple[object, object]
"""The print of the key and the port of the publisher; None: not set."""


def recordings_beside(path: Path) -> list[Path]:
    """The journals of KV events in the same folder as an engine's journal."""
    if not path.is_dir():
        return []
    with contextlib.suppress(OSError):
        return [path.parent / name for name in sorted(os.listdir(path.parent)) if name.startswith(KV_EVENTS)]
    return []


def identity_of(started: EngineStarted) -> Identity:
    """What a recording and its engine have in common."""
    return started.configuration.get("hash_key"), started.configuration.get("kv_events_port")


def incomparable(engine: EngineStarted) -> str:
    """Why an engine's KV events can't be compared with its blocks; "" if they can."""
    if engine.level == "tokens":
        return "the KV events can't be compared: the engine was recorded at level tokens"
    if "kv_events_port" not in engine.configuration:
        return "the KV events can't be compared: this engine publishes none, or an older kvledger recorded it"
    if "hash_key" not in engine.configuration:
        return "the KV events can't be compared: the engine ran without KVLEDGER_EVENTS_KEY"
    return ""
