"""The interface of a metadata reader: what kvledger asks about a connector's metadata and token counts.

A scheduler hands its workers opaque connector metadata (vLLM's ``KVConnectorMetadata``). The reader of a
connector says which blocks the loads in it will fill and which positions it saves, and, for a connector that
keeps its own token counts, what these are. Without a reader kvledger observes what vLLM's base interface
shows and takes every promised load as ordered (``docs/connectors.md``).

The readers stand beside this file; which connector each is for is in ``__init__.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple


class Saved(NamedTuple):
    """The metadata orders the KV of a request's positions [start, end) to be saved."""

    request_id: str
    start: int
    end: int


class Tracking(NamedTuple):
    """A connector's own counts for one request, in tokens."""

    tracked: int
    """Tokens of the request that the connector knows."""
    saved: int
    """Tokens that it has ordered to be saved, or knows to be stored already."""
    due: int
    """Tokens that it should have saved by its own rules; -1 where it saves nothing of this request."""


class LoadedBlocks(NamedTuple):
    """The metadata orders whole blocks to be loaded. ``request_id`` is "" where the load is synchronous."""

    request_id: str
    blocks: list[int]
    asynchronous: bool
    group: int = 0
    """The KV cache group of the blocks."""


class Moves(NamedTuple):
    """Whole blocks that the metadata orders to be stored and loaded. Partly moved blocks are left out."""

    stored: dict[int, list[int]]
    """By KV cache group."""
    loads: list[LoadedBlocks]


def by_group(ids: Iterable[Any]) -> list[list[int]]:
    """Block ids of each KV cache group. A list without groups is that of the only one."""
    rows = list(ids)
    if rows and not isinstance(rows[0], list | tuple):
        rows = [rows]
    return [list(map(int, row)) for row in rows]


def whole_blocks(slots: Iterable[int], block_size: int) -> list[int]:
    """The blocks of which every slot is among ``slots``; a slot is block id * block size + offset."""
    counts = Counter(slot // block_size for slot in set(slots))
    return [block for block, count in counts.items() if count == block_size]


class MetadataReader:
    """Reads the metadata of one live connector, scheduler side. Does not import the connector's package."""

    READS: ClassVar[tuple[str, ...]] = ("loads",)
    """Which of ``loads``, ``saves``, ``tracker`` and ``blocks`` (see :meth:`moves`) this reader can read."""

    LOOKUP: ClassVar[str] = ""
    """The method that looks up tokens in the store, as a dotted path from the connector; "": none is known.

    Its parameters are ``token_ids``, the request's id, and what else selects an object of the store.
    """

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        """vLLM's connector."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens per object of the store, for a reader with a ``LOOKUP``."""
        raise NotImplementedError

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        """Ids of the blocks that the loads in ``metadata`` will fill."""
        raise NotImplementedError

    @property
    def exact(self) -> bool:
        """Whether the store gives back the bytes that it was handed. False where a codec may lose some."""
        return True

    @property
    def own_store(self) -> bool:
        """Whether nothing but this engine writes to the store."""
        return False

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        """The whole blocks that ``metadata`` orders to be stored, of all KV cache groups."""
        return []

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        """The loads that ``metadata`` orders, with their whole blocks."""
        raise NotImplementedError

    def groups(self, attention: Collection[int]) -> Collection[int]:
        """Of an engine with several KV cache groups: those whose blocks :meth:`moves` can tell.

        ``attention`` are its groups that have keys and values of each position.
        """
        return ()

    def moves(self, metadata: Any, block_tokens: Mapping[int, int]) -> Moves:
        """Both. ``block_tokens`` has the groups that are asked for, each with the tokens of its blocks.

        A reader that does not tell the groups of blocks is asked for the only one.
        """
        [(group, tokens)] = block_tokens.items()
        loads = [load._replace(group=group) for load in self.loads(metadata, tokens)]
        return Moves({group: self.stored(metadata, tokens)}, loads)

    def handed_over(self, metadata: Any) -> Iterable[str]:
        """Requests of which ``metadata`` says that another engine will read their blocks, each once."""
        return ()

    def saves(self, metadata: Any) -> Iterable[Saved]:
        """The saves that ``metadata`` orders."""
        return ()

    def tracking(self, request: Any, tokens: int) -> Tracking | None:
        """The connector's counts for a request of at least ``tokens`` tokens; None if it has none."""
        return None
