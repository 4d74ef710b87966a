"""Prefixes of prompts by what the cache saved and lost of them, from the block hashes of one engine.

Block hashes chain: a block's hash covers everything before it. So the hashes of all requests form a trie, and
a *prefix* here is a stretch of it without a branch: blocks that every request that has the first of them goes
on to share, until requests differ. The label of a prefix is made from the hash id of its last block, which
depends on a secret of the engine process and reveals nothing of the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from .trace_reader import ADMIT, CACHED, EVICT, HIT, BlockTrace, Change

UNSEEN = -1
"""Since when content was cached that the trace found in the cache. A request that ran then needed its own at
the same time, so it lost nothing."""

LOSSES_KEPT = 5
"""How many losses of a prefix are kept, the last ones."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Content that was evicted and computed again. Unix seconds; None: no engine was seen to start."""

    tokens: int
    evicted_seconds: float | None
    evicted_for: str
    """The request that got the block; empty: not known."""
    needed_seconds: float | None
    needed_by: str


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix: the tokens from ``start`` to ``end`` of every prompt that has them.

    ``saved_tokens`` were hits. ``lost_tokens`` had been in the cache, were evicted, they or a block before
    them, and were computed again.
    ``parent`` is the label of the prefix before it; empty: it begins the prompt.
    """

    engine: str
    label: str
    parent: str
    start: int
    end: int
    requests: int
    saved_tokens: int
    lost_tokens: int
    losses: int
    wait_seconds: float | None
    """Median time from the eviction to the next need; None without a loss."""
    last_losses: list[Loss]


_Loss = tuple[int, int, int, int, int]
"""Since when a block was cached, when it was evicted, for which life, which life needed it again, and when
that had computed it."""


class _Node(msgspec.Struct):
    """One block of the trie. The parent is a hash id; 0: the block begins prompts."""

    parent: int
    index: int
    requests: int = 0
    children: list[int] = []


class PrefixTrie:
    """Collects hits and losses by block from the changes of a trace."""

    def __init__(self) -> None:
        self._hits: Counter[int] = Counter()
        """By hash id: how many admissions hit the content."""
        self._losses: dict[int, list[_Loss]] = {}
        """By hash id: each time that the content was evicted and computed again, oldest first."""
        self._since: dict[int, int] = {}
        """Content that is in the cache: since when."""
        self._evicted: dict[int, tuple[int, int, int]] = {}
        """Content that has left the cache: since when it was there, when it was evicted, for which life."""
        self._began: dict[int, int] = {}
        self._nodes: dict[int, _Node] = {}
        """The trie, by hash id; empty until :meth:`prefixes` makes it."""
        self._trace = BlockTrace()
        self._first = 0
        """Its first life, in the count of the changes."""

    def add(self, changes: Iterable[Change]) -> None:
        """Add changes in their order."""
        for kind, life, _, ids, at in changes:
            if kind == HIT:
                self._hits.update(ids)
            elif kind == EVICT:
                for hash_id in ids:
                    self._evicted[hash_id] = self._since.pop(hash_id, UNSEEN), at, life
            elif kind == ADMIT:
                self._began[life] = at
            elif kind == CACHED:
                for hash_id in ids:
                    self._since.setdefault(hash_id, at)
                    evicted = self._evicted.pop(hash_id, None)
                    if evicted is not None:
                        self._losses.setdefault(hash_id, []).append((*evicted, life, at))

    def prefixes(self, trace: BlockTrace, first_life: int = 0) -> Iterator[Prefix]:
        """Every prefix, in no order. ``trace`` is that of all changes, from the ``first_life`` on."""
        self._trace, self._first = trace, first_life
        self._link()
        chains = [self._chain(hash_id) for hash_id in self._nodes if self._begins(hash_id)]
        for chain in chains:
            parent = self._nodes[chain[0]].parent
            yield self._prefix(chain, _label(parent) if parent in self._nodes else "")

    def _link(self) -> None:
        """Make the trie of the requests' hashes. Blocks may have been emitted in another order."""
        for request in self._trace.requests:
            before = 0
            for index, hash_id in enumerate(request.hashes):
                if hash_id:
                    node = self._nodes.get(hash_id)
                    if node is None:
                        node = self._nodes[hash_id] = _Node(before, index)
                        if before in self._nodes:
                            self._nodes[before].children.append(hash_id)
                    node.requests += 1
                before = hash_id

    def _begins(self, hash_id: int) -> bool:
        """Whether a prefix begins here: requests part before this block, or it is their first."""
        parent = self._nodes.get(self._nodes[hash_id].parent)
        return parent is None or len(parent.children) > 1

    def _chain(self, hash_id: int) -> list[int]:
        chain = [hash_id]
        while len(children := self._nodes[chain[-1]].children) == 1:
            chain.append(children[0])
        return chain

    def _prefix(self, chain: list[int], parent: str) -> Prefix:
        size, first, last = self._trace.block_tokens, self._nodes[chain[0]], self._nodes[chain[-1]]
        rows, waits = self._loss_rows(chain)
        waits = sorted(waits)
        return Prefix(
            engine=self._trace.engine,
            label=_label(chain[-1]),
            parent=parent,
            start=first.index * size,
            end=(last.index + 1) * size,
            requests=first.requests,
            saved_tokens=size * sum(self._hits[hash_id] for hash_id in chain),
            lost_tokens=sum(row.tokens for row in rows),
            losses=len(rows),
            wait_seconds=waits[len(waits) // 2] if waits else None,
            last_losses=rows[-LOSSES_KEPT:],
        )

    def _loss_rows(self, chain: list[int]) -> tuple[list[Loss], list[float]]:
        """A row for each request that needed evicted blocks again; the first eviction stands for all.

        Also the seconds from each eviction to the need.
        """
        needs: dict[tuple[int, int], list[_Loss]] = {}
        for hash_id in chain:
            for loss in self._losses.get(hash_id, ()):
                since, _, _, life, cached_at = loss
                needed_at = self._needed_at(life, cached_at)
                if since < needed_at:  # else it was being computed when the request needed it
                    needs.setdefault((needed_at, life), []).append(loss)
        rows = [
            Loss(
                tokens=self._trace.block_tokens * len(losses),
                evicted_seconds=self._seconds(losses[0][1]),
                evicted_for=self._request_id(losses[0][2]),
                needed_seconds=self._seconds(needed_at),
                needed_by=self._request_id(life),
            )
            for (needed_at, life), losses in sorted(needs.items())
        ]
        waits = [needed_at - losses[0][1] for (needed_at, _), losses in needs.items()]
        return rows, [wait / 1e6 for wait in waits if wait >= 0]  # else a block before it was evicted

    def _seconds(self, at: int) -> float | None:
        began = self._trace.began_seconds
        return began + at / 1e6 if began else None

    def _needed_at(self, life: int, cached_at: int) -> int:
        """When a life looked up what it computed: at its admission, or when its table began before it."""
        if life < self._first:
            return -1
        admitted_at = self._trace.lives[life - self._first].at
        return admitted_at if admitted_at <= cached_at else self._began[life]

    def _request_id(self, life: int) -> str:
        """The request of a life; "": none is known."""
        if life < self._first:
            return ""
        return self._trace.requests[self._trace.lives[life - self._first].request].request_id


def _label(hash_id: int) -> str:
    """Eight digits of a hash id."""
    return f"{hash_id & 2**64 - 1:016x}"[:8]
