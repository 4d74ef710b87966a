"""Why a hit ended where it did, in an engine whose KV cache has several groups.

A hit must be one that every group has at a common *boundary*: full attention needs every block below it, a
window its last blocks, a state the one checkpoint at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from .. import causes
from ..ledger.blocks.pool import Pool

SLIDING, CHUNKED, STATE, WHOLE = range(4)
"""What a group needs of the tokens below a boundary: their last window, the chunk that goes on, the state, or
all."""


class Group(msgspec.Struct, frozen=True):
    """A KV cache group beside the one that is followed. ``tokens`` per block; ``window`` in tokens."""

    number: int
    tokens: int
    kind: int
    window: int = 0

    def ends(self, boundary: int, below: int) -> range:
        """The ends of the blocks that a hit up to ``boundary``, a multiple of its blocks, needs.

        Of a group that needs all blocks, those behind ``below``, the boundary before.
        """
        if self.kind == STATE:
            return range(boundary, boundary + 1)
        if self.kind == SLIDING:
            first = max(0, boundary - -(-(self.window - 1) // self.tokens) * self.tokens)
        elif self.kind == CHUNKED:
            first = boundary // self.window * self.window // self.tokens * self.tokens
        else:
            first = below // self.tokens * self.tokens
        return range(first + self.tokens, boundary + 1, self.tokens)

    def lacks(self, how: str = "") -> str:
        """The cause of a block of this group that was not cached. ``how`` it left the cache, if it ever was.

        Only an eviction has a cause for each kind of group.
        """
        if how == causes.EVICTED:
            return {STATE: causes.STATE_EVICTED, WHOLE: causes.EVICTED}.get(self.kind, causes.WINDOW_EVICTED)
        return how or {STATE: causes.STATE, WHOLE: causes.GROUPS}.get(self.kind, causes.WINDOW)


class Groups(NamedTuple):
    """The KV cache groups of a pool: the group that is followed, its tokens per block, and the others."""

    followed: int
    tokens: int
    others: list[Group]


def groups_of(pool: Pool | None) -> Groups | None:
    """The groups of a pool; None if none is of full attention, or if what one of them needs is not known."""
    if pool is None or not pool.prefix_groups:
        return None
    followed, others = pool.prefix_groups[0], []
    for number, (tokens, _) in pool.groups.items():
        window = pool.windows.get(number)
        if number == followed:
            continue
        if number in pool.prefix_groups:
            others.append(Group(number, tokens, WHOLE))
        elif number in pool.states:
            others.append(Group(number, tokens, STATE, 1))
        elif window is not None:
            others.append(Group(number, tokens, CHUNKED if window.in_chunks else SLIDING, window.tokens))
        else:
            return None
    return Groups(followed, pool.groups[followed][0], others)


def several_groups_of(pool: Pool | None) -> Groups | None:
    """The same; None also if there is one group only."""
    groups = groups_of(pool)
    return groups if groups is not None and groups.others else None


def common_boundary(groups: Groups, blocks: int, has: Callable[[Group, int], bool]) -> int:
    """How many of the first ``blocks`` of the followed group end at the last boundary that all groups have.

    ``has``: whether another group has the block that ends at a token.
    """
    best = 0
    for place in range(blocks):
        below, boundary = place * groups.tokens, (place + 1) * groups.tokens
        whole = [group for group in groups.others if group.kind == WHOLE]
        if not all(has(group, end) for group in whole for end in group.ends(boundary, below)):
            break
        if all(
            not boundary % group.tokens
            and (group.kind == WHOLE or all(has(group, end) for end in group.ends(boundary, below)))
            for group in groups.others
        ):
            best = place + 1
    return best


NEVER = (causes.GROUPS, causes.WINDOW, causes.STATE)
"""Causes of what a group never had."""

InGroup = Callable[[Group, int], str]
"""Why the block of a group that ends at a token was not cached; "": it was."""


def lacking(groups: Sequence[Group], tokens: int, first: int, end: int, in_group: InGroup) -> list[str]:
    """For each block from ``first`` to ``end``: why no boundary behind it could be hit; "": one could.

    All these blocks, of ``tokens`` each, were cached in the group of full attention that is followed, and the
    hit ended before the first. ``groups`` are the others.
    """
    found: list[str] = []
    whole = ""
    for index in range(first, end):
        below, boundary = index * tokens, (index + 1) * tokens
        lacks = [whole]
        for group in groups:
            if boundary % group.tokens:
                lacks.append(causes.BOUNDARY)
                continue
            each = [in_group(group, block) for block in group.ends(boundary, below)]
            lacks += each
            if group.kind == WHOLE:
                whole = max([whole, *each], key=_at_one)
        found.append(max(lacks, key=_at_one))
    for place in range(len(found) - 2, -1, -1):
        found[place] = min(found[place : place + 2], key=_of_several)
    return found


def _at_one(cause: str) -> int:
    """Which cause counts where several blocks lack at one boundary: the highest."""
    if cause in NEVER:
        return 3
    return {causes.BOUNDARY: 4, causes.UNKNOWN: 2, "": 0}.get(cause, 1)


def _of_several(cause: str) -> int:
    """Which cause counts where any of several boundaries would do: the lowest."""
    if cause in NEVER:
        return 3
    return {causes.BOUNDARY: 4, causes.UNKNOWN: 1, "": 0}.get(cause, 2)
