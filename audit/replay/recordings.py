"""Find the recordings of an engine's KV events.

A recording is a journal of its own beside the engine's, in a folder whose name begins with ``events-``. It
belongs to the engine if both have the same ``KVLEDGER_EVENTS_KEY`` and port, and the publisher's batches fall
into the time of the engine's journal.
"""

from __future__ import annotations

import math
from pathlib import Path

from ..errors import LedgerError
from ..events import EngineStarted
from ..journal.catalogue import ENGINE, KV_EVENTS, Catalogue
from ..journal.format import is_live
from ..journal.listing import facts
from ..release_semantics import meanings
from .windows import last_start

AFTER_END_SECONDS = 5.0
"""An engine whose journal has no end may have published so long after the last event that was written."""

Identity = tuple[object, object]
"""The print of the key and the port of the publisher; None: not set."""


def recordings_beside(path: Path) -> list[Path]:
    """The journals of KV events in the same folder as an engine's journal."""
    return Catalogue.beside(path).named(KV_EVENTS)


def identity_of(started: EngineStarted) -> Identity:
    """What a recording and its engine have in common."""
    return started.configuration.get("hash_key"), started.configuration.get("kv_events_port")


class Neighbours:
    """The engines whose journals are in one folder with that of one engine.

    A recording names a port and no host: of two engines that published at one port at the same time, as in
    two containers, nobody can tell whose events were recorded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        """The journal of the engine; its folder is searched."""
        self._started: dict[str, EngineStarted | None] = {}
        """By name of a journal: how its engine started; None if it is not known."""

    def rival(self, engine: EngineStarted) -> str:
        """The journal of another engine at the same port while this one ran; "" if there is none."""
        until = _until(self._path)
        began = (last_start(self._path) or engine).began_seconds
        for path in Catalogue.beside(self._path).named(ENGINE):
            name = path.name
            if name == self._path.name:
                continue
            if name not in self._started:
                self._started[name] = last_start(path)
            other = self._started[name]
            if other is None or identity_of(other) != identity_of(engine) or other.began_seconds >= until:
                continue
            if _until(path) > began:
                return name
        return ""


def same_port(rival: str) -> str:
    """Why the events of two engines can't be told apart."""
    return (
        f"the KV events can't be compared: the engine of {rival} published at the same port at the same "
        "time; give each host or container a folder of its own, or each engine a port"
    )


def _until(path: Path) -> float:
    """Unix time up to which an engine ran: infinity if it still does."""
    try:
        return math.inf if is_live(path) else facts(path).until_seconds or 0.0
    except (LedgerError, OSError):
        return 0.0


def incomparable(engine: EngineStarted) -> str:
    """Why an engine's KV events can't be compared with its blocks; "" if they can."""
    if engine.level == "tokens":
        return "the KV events can't be compared: the engine was recorded at level tokens"
    if "kv_events_port" not in engine.configuration:
        return "the KV events can't be compared: the journal names no port of this engine for them"
    if "hash_key" not in engine.configuration:
        return "the KV events can't be compared: the engine ran without KVLEDGER_EVENTS_KEY"
    groups = engine.configuration.get("groups")
    if (
        isinstance(groups, int)
        and groups > 1
        and "kv events" in meanings(engine.version, engine=engine.engine)
    ):
        return "the KV events can't be compared: those of this release do not name the group of a block"
    return ""
