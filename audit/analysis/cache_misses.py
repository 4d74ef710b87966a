"""Why prompt tokens were not hits: each goes to the one cause that the recorded events prove.

A prompt position is *no hit* as often as it was executed, first or again, and once more if its KV never
came to be. Each of these is given to one cause by position; nothing is a remainder of a subtraction. What
the events do not prove is called not knowable: who was never in a cache and who was evicted from one look
alike where no block was watched.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.account import Account, Life

BELOW_BLOCK = "below_block"
PREEMPTED = "preempted"
LOAD_FAILED = "load_failed"
VOID = "promised_and_void"
RESET = "cache_reset"
LAST_TOKEN = "last_token"
REPLAYED = "replayed"
ENDED = "ended_first"
EVICTED = "evicted"
UNKNOWABLE = "not_knowable"

CAUSES = {
    BELOW_BLOCK: "below block size: the cache holds whole blocks only",
    PREEMPTED: "lost to preemption",
    LOAD_FAILED: "the load failed",
    VOID: "promised by the connector, and never loaded",
    RESET: "the cache was reset",
    LAST_TOKEN: "full hit, but the last token must be executed",
    REPLAYED: "in a replayed window",
    ENDED: "the request ended before",
    EVICTED: "evicted",
    UNKNOWABLE: "never seen before, or not knowable",
}
"""Every cause, in words. ``evicted`` takes block events, which level ``blocks`` records."""

_LOST = {
    "blocks": PREEMPTED,
    "reset": RESET,
    "load_failed": LOAD_FAILED,
    "full_hit": LAST_TOKEN,
    "replay": REPLAYED,
    "negative_match": VOID,
}
_LEFT = {"evicted": EVICTED, "reset": RESET}
_VOIDED = {"failed": LOAD_FAILED, "not_planned": VOID, "never_loaded": VOID}

Piece = tuple[int, int, str]


def misses(account: Account, block_size: int) -> Iterator[Piece]:
    """Stretches [start, end) of the prompt that were no hit, with their cause; one a time it was none.

    ``block_size`` 0: not known. Of an unknown account there are none.
    """
    if account.unknown is not None:
        return
    for start, end, cause in account.executed_again:
        yield start, end, _LOST.get(cause, UNKNOWABLE)
    for start, end, number in account.executed_first:
        lives = account.lives[:number]
        for low, high, cause in _by_promise(start, end, lives):
            if cause:
                yield low, high, cause
            else:
                yield from _by_block(low, high, account, lives[-1], block_size)
    if account.closed_at >= 0:
        for start, end in never_came(account):
            for low, high, cause in _by_promise(start, end, account.lives):
                yield low, high, cause or ENDED


def never_came(account: Account) -> Iterator[tuple[int, int]]:
    """Stretches of the prompt, of a session all chunks, whose KV never came to be."""
    for start, prompt in chunks(account):
        for row in account.spans.rows:
            if row.end <= start or row.start >= prompt:
                continue
            if start < row.start:
                yield start, row.start
            start = max(start, min(row.end, prompt))
        if start < prompt:
            yield start, prompt


def chunks(account: Account) -> Iterator[tuple[int, int]]:
    """Where each chunk of a prompt stands; what is not settled yet counts as it is."""
    for settlement in account.settlements:
        yield settlement.carried, settlement.prompt_tokens
    if not account.settled:
        yield account.carried, account.prompt_tokens


def _by_promise(start: int, end: int, lives: list[Life]) -> Iterator[Piece]:
    """[start, end) by what became of a hit or a promise of it, the latest first; "" for neither."""
    pieces = [(start, end)]
    for life in reversed(lives):
        for low, high, cause in _broken(life):
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


def _broken(life: Life) -> Iterator[Piece]:
    """Where a life's hits and promises came to nothing, and why. One cut short by the end has no say."""
    if life.invalid_from >= 0:
        yield life.invalid_from, life.local + max(0, life.external), LOAD_FAILED
    for start, end, cause in life.voids:
        if cause == "preempted":
            yield start, end, RESET if life.ended_by == "reset" else PREEMPTED
        elif cause in _VOIDED:
            yield start, end, _VOIDED[cause]


def _by_block(start: int, end: int, account: Account, life: Life, block_size: int) -> Iterator[Piece]:
    """What a hit could not have covered, at the end of its chunk; below it nothing is proved."""
    prompt = next((prompt for carried, prompt in chunks(account) if carried <= start < prompt), 0)
    if not block_size or not prompt:
        yield from _by_loss(start, end, account, life)
        return
    whole = prompt // block_size * block_size
    cause = BELOW_BLOCK
    if whole == prompt:
        # The longest hit leaves the last token out, and so its block.
        whole = prompt - block_size
        cause = LAST_TOKEN if life.local + life.external == whole else UNKNOWABLE
    middle = min(max(start, whole), end)
    yield from _by_loss(start, middle, account, life)
    if middle < end:
        yield middle, end, cause


def _by_loss(start: int, end: int, account: Account, life: Life) -> Iterator[Piece]:
    """What was in the cache, and left it before the step in which the life was admitted."""
    for lost in sorted(account.lost):
        first, last = max(start, lost.start), min(end, lost.end)
        back = lost.came_back < 0 or lost.came_back >= life.began_step
        if first >= last or not back or lost.left >= life.began_step:
            continue
        if start < first:
            yield start, first, UNKNOWABLE
        yield first, last, _LEFT[lost.how]
        start = last
    if start < end:
        yield start, end, UNKNOWABLE
