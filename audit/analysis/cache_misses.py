"""Explain prefix-cache misses: each missed prompt token has the one cause that the recorded events prove.

A prompt position is missed each time it is computed, and once more if it has no KV when the request ends.
Causes are found position by position; none is the remainder of a subtraction. If the events prove no cause,
the cause is *not knowable*: without block events, tokens that were never cached and tokens that were evicted
look alike. The causes and their words are in ``causes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from .. import causes
from ..ledger.account import Account, CachedRange, GroupBlock, Life
from ..ledger.blocks.pool import Pool

# --- Why a hit ended where it did, in an engine whose KV cache has several groups.
#
# A hit must be one that every group has at a common *boundary*: full attention needs every block below it,
# a window its last blocks, a state the one checkpoint at the boundary.

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


_BY_LOSS = {
    **dict.fromkeys(causes.PREEMPTIONS, causes.PREEMPTED),
    causes.RESET: causes.CACHE_RESET,
    causes.LOAD_FAILED: causes.LOAD_FAILED,
    causes.FULL_HIT: causes.LAST_TOKEN,
    causes.REPLAY: causes.REPLAYED,
    causes.NEGATIVE_MATCH: causes.NOT_LOADED,
}
_BY_REMOVAL = {causes.EVICTED: causes.EVICTED, causes.RESET: causes.CACHE_RESET}
"""The cause of misses of blocks that had left the cache, by how they had."""
_REMOVED = frozenset(_BY_REMOVAL.values())

_BY_EXTERNAL_LOSS = {
    causes.FAILED: causes.LOAD_FAILED,
    causes.NOT_PLANNED: causes.NOT_LOADED,
    causes.NEVER_LOADED: causes.NOT_LOADED,
}

Piece = tuple[int, int, str]


def missed_ranges(
    account: Account, block_size: int, groups: Groups | None = None, *, lookahead: bool = False
) -> Iterator[Piece]:
    """Yield missed ranges [start, end) of the prompt with their cause, once for each time they were missed.

    ``block_size`` 0 means that it is not known. ``groups`` of the engine's KV cache; None: one, or not known.
    ``lookahead``: the hash of a block covers tokens behind it, too. An unknown account yields nothing.
    """
    if account.unknown is not None:
        return
    for start, end, cause in account.executed_again:
        yield start, end, _BY_LOSS.get(cause, causes.NOT_KNOWABLE)
    for start, end, number in account.executed_first:
        lives = account.lives[:number]
        for low, high, cause in _by_broken_hit(start, end, lives):
            if cause:
                yield low, high, cause
            else:
                pieces = _by_block(low, high, account, lives[-1], block_size, groups)
                yield from _by_next_token(pieces, _hit_end(lives[-1]) + block_size) if lookahead else pieces
    if account.closed_at >= 0:
        for start, end in never_came(account):
            for low, high, cause in _by_broken_hit(start, end, account.lives):
                if cause:
                    yield low, high, cause
                else:
                    yield from _by_invalid_hit(low, high, account)


def never_came(account: Account) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the prompt, all chunks of a session included, that never had KV."""
    for start, prompt in chunks(account):
        for row in account.positions.ranges:
            if row.end <= start or row.start >= prompt:
                continue
            if start < row.start:
                yield start, row.start
            start = max(start, min(row.end, prompt))
        if start < prompt:
            yield start, prompt


def chunks(account: Account) -> Iterator[tuple[int, int]]:
    """Yield the range of each chunk of the prompt. A chunk that is not settled yet counts as it stands."""
    for settlement in account.settlements:
        yield settlement.carried, settlement.prompt_tokens
    if not account.settled:
        yield account.carried, account.prompt_tokens


def _by_broken_hit(start: int, end: int, lives: list[Life]) -> Iterator[Piece]:
    """Split [start, end) by the cause that broke a hit or promise there, last life first; "": none."""
    pieces = [(start, end)]
    for life in reversed(lives):
        for low, high, cause in _broken_hits(life):
            rest: list[tuple[int, int]] = []
            for first, last in pieces:
                begin, stop = max(first, low), min(last, high)
                if begin >= stop:
                    rest.append((first, last))
                    continue
                yield begin, stop, cause
                rest += [piece for piece in ((first, begin), (stop, last)) if piece[0] < piece[1]]
            pieces = rest
    for first, last in pieces:
        yield first, last, ""


def _broken_hits(life: Life) -> Iterator[Piece]:
    """Yield where a life's hits or promised tokens were lost, and why. The end of a request is no cause."""
    if life.invalid_from >= 0:
        yield life.invalid_from, life.local + max(0, life.external), causes.LOAD_FAILED
    for start, end, cause in life.voids:
        if cause == causes.PREEMPTED:
            yield start, end, causes.CACHE_RESET if life.ended_by == causes.RESET else causes.PREEMPTED
        elif cause in _BY_EXTERNAL_LOSS:
            yield start, end, _BY_EXTERNAL_LOSS[cause]


def _by_invalid_hit(start: int, end: int, account: Account) -> Iterator[Piece]:
    """Split [start, end), which never had KV, by the local hits on cached blocks without valid KV."""
    for low, high in sorted(account.invalid_hits):
        first, last = max(start, low), min(end, high)
        if first < last:
            if start < first:
                yield start, first, causes.ENDED_FIRST
            yield first, last, causes.INVALID_HIT
            start = last
    if start < end:
        yield start, end, causes.ENDED_FIRST


def _by_block(
    start: int, end: int, account: Account, life: Life, block_size: int, groups: Groups | None
) -> Iterator[Piece]:
    """Split [start, end) at the end of what a hit could cover in its chunk, which has whole blocks only."""
    if not account.reads_cache:
        yield start, end, causes.MAY_NOT_READ
        return
    prompt = next((prompt for carried, prompt in chunks(account) if carried <= start < prompt), 0)
    if not block_size or not prompt:
        yield from _by_cache(start, end, account, life, groups)
        return
    whole = prompt // block_size * block_size
    cause = causes.BELOW_BLOCK if whole else causes.SHORT_PROMPT
    if whole == prompt:
        # The longest possible hit leaves out the last token, and with it the last block.
        whole = prompt - block_size
        cause = causes.LAST_TOKEN if life.local + life.external == whole else causes.NOT_KNOWABLE
    middle = min(max(start, whole), end)
    yield from _by_cache(start, middle, account, life, groups)
    if middle < end:
        yield middle, end, cause


def _by_next_token(pieces: Iterable[Piece], end: int) -> Iterator[Piece]:
    """The first block behind a hit may be known with another next token, with which those behind it begin."""
    for start, stop, cause in pieces:
        split = min(max(start, end), stop) if cause == causes.NEVER_SEEN else start
        if start < split:
            yield start, split, causes.NEXT_TOKEN
        if split < stop:
            yield split, stop, cause


def _by_cache(start: int, end: int, account: Account, life: Life, groups: Groups | None) -> Iterator[Piece]:
    """Split [start, end) by what the cache had of the same tokens when the life was admitted."""
    known, reached = _known(account, life)
    for cached, cause in known:
        first, last = max(start, cached.start), min(end, cached.end)
        if not cause or first >= last:
            continue
        if start < first:
            yield start, first, causes.NOT_KNOWABLE
        if cause == causes.GROUPS and groups is not None:
            yield from _by_group(first, last, account, life, groups, reached)
        else:
            yield first, last, cause
        start = last
    if start < end:
        yield start, end, causes.NOT_KNOWABLE


def _known(account: Account, life: Life) -> tuple[list[tuple[CachedRange, str]], int]:
    """Why the life did not hit each range that the cache had before; and up to where it had every block."""
    reached, broken = _hit_end(life), ""
    known = []
    for cached in sorted(account.cached_before):
        cause = _what_became(cached, life, reached)
        if cause == causes.NEVER_SEEN:
            known.append((cached, cause))
            continue
        if cause in _REMOVED:
            broken = broken or cause
        elif broken and cached.missed != causes.GROUPS and _was_there(cached, life):
            cause = broken  # a hit needs every block before it, and one of them had left the cache
        elif cause and cause == cached.missed:
            reached = max(reached, cached.end)
        known.append((cached, cause))
    return known, reached


def _was_there(cached: CachedRange, life: Life) -> bool:
    """Whether the cache may have had the range when the life was admitted."""
    return cached.since < life.began_step and not 0 <= cached.left < life.began_step


def _hit_end(life: Life) -> int:
    return life.local + max(0, life.external)


def _by_group(
    start: int, end: int, account: Account, life: Life, groups: Groups, reached: int
) -> Iterator[Piece]:
    """Split [start, end), which the group of full attention had cached, by what the other groups lacked."""
    size, first = groups.tokens, _hit_end(life) // groups.tokens

    made: dict[tuple[int, int], list[GroupBlock]] = {}
    for block in account.cached_in_group:
        made.setdefault((block.group, block.end), []).append(block)

    def in_group(group: Group, block_end: int) -> str:
        if block_end <= _hit_end(life):
            return ""
        return _in_group(made.get((group.number, block_end), ()), life, group)

    lacks = lacking(groups.others, size, first, reached // size, in_group)
    while start < end:
        place, upto = start // size - first, min(end, start // size * size + size)
        cause = lacks[place] or causes.NOT_HIT if 0 <= place < len(lacks) else causes.GROUPS
        yield start, upto, causes.GROUPS if cause == causes.UNKNOWN else cause
        start = upto


def _in_group(before: Iterable[GroupBlock], life: Life, group: Group) -> str:
    """Why a group's block, of which the cache had this before, was not there at the admission; "": it was."""
    began, how = life.began_step, ""
    for block in before:
        if block.since >= began:
            continue
        there = not 0 <= block.left <= began or (block.left == began and block.own)
        if there or 0 <= block.came_back < began:
            return ""
        how = causes.UNKNOWN if block.left == began else _BY_REMOVAL[block.how]
    return group.lacks(how)


def _what_became(cached: CachedRange, life: Life, reached: int) -> str:
    """Why the life did not hit what the cache had before it; "": that does not explain it.

    ``reached``: the cache had every block below it.
    """
    began = life.began_step
    if cached.how == causes.NEVER_SEEN:
        return causes.NEVER_SEEN
    if 0 <= cached.left < began:
        away = cached.came_back < 0 or cached.came_back >= began
        return _BY_REMOVAL[cached.how] if away else ""
    if cached.missed and cached.since >= began:
        return causes.BEING_COMPUTED
    if cached.left == began and not cached.own:
        if cached.gone and cached.came_back < 0:
            return _BY_REMOVAL[cached.how]
        return ""  # the events of one step do not show whether the lookup came first
    return causes.NOT_HIT if cached.missed and cached.start > reached else cached.missed
