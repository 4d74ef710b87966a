"""Whether a hit block holds the KV of the reader's own tokens.

The engine finds a hit by its block hashes. If such a hash stands for other tokens than those that were
computed into the block, the engine cannot know. So the observer knows of each cached block which request has
written it, keeps that request's tokens as long as one of its blocks is not allocated anew, and compares them
with the tokens of a request that hits the block. Neither the engine's hashes nor its tables are used for it.
What else KV depends on is compared by its class (``isolation``).

The tokens stay in the memory of this process, each once: of a request that has ended only those after its hit
are kept, and where the hit's are. Else requests of long conversations would each keep the whole of it for the
few blocks that they have computed.

A block that was filled before the observation, or for a prompt of embeddings, has no known tokens: a hit on
it is counted as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .attribution import Owners


class Written:
    """The tokens for which a request has written its blocks."""

    __slots__ = ("base", "begin", "shared", "tokens")

    def __init__(self, tokens: Sequence[int], base: Written | None, shared: int) -> None:
        self.tokens = tokens
        """The tokens from ``begin`` on: vLLM's own list, to which outputs are appended, until it leaves."""
        self.begin = 0
        """The position of the first of ``tokens``; those before are in ``base``."""
        self.base = base
        """Who wrote the blocks before; None: nobody, or it is not known."""
        self.shared = shared
        """How many tokens are those of ``base``; -1: the first ones, it was not looked yet how many."""

    def leaves(self) -> None:
        """No more tokens come: keep those that ``base`` has not."""
        if self.base is None:
            return
        if self.shared < 0:
            self.shared = self.base.differs_at(self.tokens, self.base.begin + len(self.base.tokens))
        self.tokens, self.begin = self.tokens[self.shared :], self.shared

    def differs_at(self, own: Sequence[int], end: int) -> int:
        """The first position below ``end`` at which ``own`` has another token or none; else ``end``."""
        writer, until = self, end
        while True:
            begin = writer.begin
            theirs, mine = writer.tokens[: max(0, until - begin)], own[begin:until]
            if theirs != mine or begin + len(mine) < until:
                pairs = enumerate(zip(theirs, mine, strict=False), begin)
                differing = (place for place, (one, other) in pairs if one != other)
                end = next(differing, begin + min(len(theirs), len(mine)))
            if writer.base is None or not begin:
                return end
            writer, until = writer.base, min(begin, end)


class Prefixes:
    """Who has written each block of an engine's pools, with its tokens.

    ``request_of`` gives the engine's request by its number, None if there is none. ``tracked``: blocks are
    not reported when they are cached, but when they are allocated.
    """

    def __init__(self, managers: Sequence[Any], request_of: Callable[[int], Any], *, tracked: bool) -> None:
        self._managers = managers
        """The managers of the KV cache groups, in the order of the groups."""
        self._request_of = request_of
        self._tracked = tracked
        self._writers: dict[int, list[Written | None]] = {
            id(pool): [None] * len(pool.blocks) for pool in (each.block_pool for each in managers)
        }
        """By pool, the writer of each block. None: not known."""
        self._ahead = int(getattr(managers[0].block_pool, "num_hash_lookahead_tokens", 0) or 0)
        """Tokens after a block that its hash covers too: a drafter's KV depends on them."""
        self._living: dict[int, Written] = {}
        """By number: the requests that have written blocks and may write more."""
        self._hits: dict[str, tuple[Written, int]] = {}
        """By request id: who wrote the last block of its hit, and the tokens up to the end of that block."""
        self._equal = self._unknown = 0

    # --- who writes blocks ----------------------------------------------------------------------------

    def allocated(self, owners: Owners, ids: list[int]) -> None:
        """Blocks were allocated, and their owners fill them. Only where ``tracked``."""
        writers = self._writers[id(self._managers[0].block_pool)]
        living, find = self._living.get, self._writer
        for block_id, number in zip(ids, owners.of_single_blocks, strict=False):
            writers[block_id] = living(number) or find(number)
        for number, _, blocks in owners.runs:
            writer = living(number) or find(number)
            for block_id in blocks:
                writers[block_id] = writer

    def cached(self, pool: Any, number: int, ids: Sequence[int]) -> None:
        """Blocks of a request were cached. Only where not ``tracked``."""
        writers, writer = self._writers[id(pool)], self._living.get(number) or self._writer(number)
        for block_id in ids:
            writers[block_id] = writer

    def forget_block(self, pool: Any, block_id: int) -> None:
        """A block got a hash for a part of its tokens: hits on it are not compared."""
        self._writers[id(pool)][block_id] = None

    def moved(self, pool: Any, source: int, target: int) -> None:
        """The KV and the hashes of a block have moved to another one."""
        writers = self._writers[id(pool)]
        writers[target] = writers[source]

    def tokens_change(self, request: Any, number: int) -> None:
        """Tokens of a request are about to be replaced: what it has cached by now keeps the present ones."""
        before = self._living.pop(number, None)
        if before is None:
            return
        before.tokens = list(before.tokens)
        before.leaves()
        self._hits[request.request_id] = before, -1
        after = self._writer(number)
        if self._tracked:
            manager = self._managers[0]
            writers = self._writers[id(manager.block_pool)]
            cached = manager.num_cached_block.get(request.request_id, 0)
            for block in manager.req_to_blocks.get(request.request_id, ())[cached:]:
                writers[block.block_id] = after

    def ends(self, request: Any, number: int) -> None:
        """A request writes no more."""
        self._hits.pop(request.request_id, None)
        writer = self._living.pop(number, None)
        if writer is not None:
            writer.leaves()

    def _writer(self, number: int) -> Written | None:
        request = self._request_of(number)
        if request is None or getattr(request, "prompt_embeds", None) is not None:
            return None
        base, shared = self._hits.pop(request.request_id, (None, 0))
        writer = self._living[number] = Written(request._all_token_ids, base, shared)
        return writer

    # --- hits ---------------------------------------------------------------------------------------

    def hit(self, request: Any, groups: Sequence[Sequence[Any]] | None, tokens: int) -> list[int]:
        """A request was admitted with a local hit of ``tokens``, whose blocks are given by group.

        Returns the blocks that hold the KV of other tokens: flat, three numbers for each, its group, id, and
        the position up to which it reaches.
        """
        other: list[int] = []
        own = request._all_token_ids
        unknown = getattr(request, "prompt_embeds", None) is not None
        for group, manager in enumerate(self._managers):
            size, writers = int(manager.block_size), self._writers[id(manager.block_pool)]
            count = -(-tokens // size)
            if groups is None or unknown:
                self._unknown += count
                continue
            null = getattr(manager.block_pool, "null_block", None)
            by_writer: dict[Written | None, list[int]] = {}
            for place, block in enumerate(groups[group][:count]):
                if block is not null:
                    writer = writers[block.block_id] if (place + 1) * size <= tokens else None
                    by_writer.setdefault(writer, []).append(place)
            self._unknown += len(by_writer.pop(None, ()))
            for writer, places in by_writer.items():
                assert writer is not None
                end = (places[-1] + 1) * size + self._ahead
                first = end if writer.tokens is own else writer.differs_at(own, end)
                equal = sum((place + 1) * size + self._ahead <= first for place in places)
                for place in places[equal:]:
                    other += (group, groups[group][place].block_id, (place + 1) * size)
                self._equal += equal
                if (
                    equal == len(places)
                    and end - self._ahead > self._hits.get(request.request_id, (None, 0))[1]
                ):
                    self._hits[request.request_id] = writer, end - self._ahead
        return other

    @property
    def counts(self) -> tuple[int, int]:
        """Hit blocks with the reader's tokens, and those that could not be compared, since the last take."""
        return self._equal, self._unknown

    def take_counts(self) -> tuple[int, int]:
        """The counts, which begin again."""
        counts = self.counts
        self._equal = self._unknown = 0
        return counts
