"""What a connector's plan covers, and what its own books say: the register of readers.

A plan is opaque metadata that the scheduler hands to the workers. A reader says of it which blocks
its loads will fill and what it orders to be saved and, where the connector keeps count of a request
itself, what it counts. A connector without a reader still gets everything that the base interface
shows; its promises are then taken as covered (``docs/connectors.md``).

Readers stand in ``readers/``, a file a connector; none imports its host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple


class Saved(NamedTuple):
    """A plan orders KV of a request to be saved: positions [start, end)."""

    request_id: str
    start: int
    end: int


class Tracking(NamedTuple):
    """What a connector counts of one request, in tokens.

    ``tracked`` are known to it. ``saved`` of them it has ordered to be saved, or found saved; ``due`` is
    how many it should have by its own rules, -1 where it saves nothing of this request.
    """

    tracked: int
    saved: int
    due: int


class PlanReader:
    """Reads the plans of one live connector, scheduler side."""

    READS: ClassVar[tuple[str, ...]] = ("loads",)
    """What is read, of ``loads``, ``saves`` and ``tracker``."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector

    def filled(self, plan: Any, block_size: int) -> set[int]:
        """Ids of the blocks that the plan's loads will fill."""
        raise NotImplementedError

    def saves(self, plan: Any) -> Iterable[Saved]:
        """What the plan orders to be saved."""
        return ()

    def tracking(self, request: Any, tokens: int) -> Tracking | None:
        """What the connector counts of a request of which it may know ``tokens``; None: nothing."""
        return None


def reader_of(connector: Any) -> PlanReader | None:
    """A reader for a live connector; None where its plans are opaque to us."""
    kind = plan_readers().get(type(connector).__name__)
    try:
        return None if kind is None else kind(connector)
    except (AttributeError, TypeError, ValueError):  # of that name, and otherwise built
        return None


def plan_readers() -> dict[str, type[PlanReader]]:
    """Every reader by the name of the connector's class."""
    # Here and not above: the readers stand on this module.
    from ..readers import example, lmcache, lmcache_mp, multi, nixl, offloading, scripted

    return {
        "ExampleConnector": example.ExampleReader,
        "LMCacheConnectorV1": lmcache.LMCacheReader,
        "LMCacheConnectorV1Dynamic": lmcache.LMCacheReader,
        "LMCacheMPConnector": lmcache_mp.LMCacheMPReader,
        "LMCacheMPConnectorUpstream": lmcache_mp.LMCacheMPReader,
        "MultiConnector": multi.MultiReader,
        "NixlConnector": nixl.NixlReader,
        "NixlPullConnector": nixl.NixlReader,
        "OffloadingConnector": offloading.OffloadingReader,
        "ScriptedConnector": scripted.ScriptedReader,
        "ScriptedHybridConnector": scripted.ScriptedReader,
        "SharedStorageConnector": example.ExampleReader,
    }
