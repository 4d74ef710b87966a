"""What workers found out about the contents of blocks, judged with the ledger of blocks.

A worker compares a block with its seal and knows nothing of who holds it. A difference is a change only if
the block was not allocated anew between seal and comparison: a connector may load other KV into it. A hit
without a seal is a fault only if no load was to fill the block, or if the load failed.

If the steps of a worker and of its scheduler do not match, nothing is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .. import events as ev
from .account import Account
from .accounts import add_line, enter
from .blocks.records import Block
from .entries import ContentChanged, Entry, UnsealedHit
from .ledger_state import LedgerState
from .life import Life
from .unchanged_steps import open_accounts


class _Run(NamedTuple):
    """Consecutive blocks of one request's table that a worker looked at."""

    request_id: str
    group: int
    first: int
    blocks: list[tuple[int, int]]
    """Each block, with the step of its seal or its code."""


def runs(event: ev.HitsVerified) -> Iterator[_Run]:
    """The rows of an event, one run of blocks after the other."""
    rows, index = event.rows, 0
    while index + 4 <= len(rows):
        who, group, first, count = rows[index : index + 4]
        index += 4 + 2 * count
        pairs = rows[index - 2 * count : index]
        blocks = list(zip(pairs[::2], pairs[1::2], strict=True))
        yield _Run(event.request_ids[who], group, first, blocks)


def _watched(state: LedgerState, event: ev.ContentWatched) -> None:
    state.contents.watched(event)
    state.sums.watches += bool(event.groups)
    enter(state, event)


def _counted(state: LedgerState, event: ev.ContentCounted) -> None:
    sums = state.sums.contents
    for name in ("sealed", "scrubbed", "bytes", "microseconds"):
        sums[name] = sums.get(name, 0) + getattr(event, name)
    sums["compared"] = sums.get("compared", 0) + event.verified


def _hits(state: LedgerState, event: ev.HitsVerified) -> None:
    accounts = {account.request_id: account for account in open_accounts(state).values()}
    differed = {event.differed[i]: event.differed[i + 1] for i in range(0, len(event.differed), 2)}
    for run in runs(event):
        account = accounts.get(run.request_id)
        life = None if account is None else _life_in(account, event.step)
        if account is None or life is None:
            state.sums.count_content("unmatched", len(run.blocks))
            continue
        _judge_run(state, event, run, account, life, differed)


def _life_in(account: Account, step: int) -> Life | None:
    """The life in which a request begins to run in a worker's step, or gets a session's next chunk."""
    for life in reversed(account.lives):
        if life.began_step <= step:
            return life if life.began_step == step or life.asynchronous or account.resumable else None
    return None


def _judge_run(
    state: LedgerState,
    event: ev.HitsVerified,
    run: _Run,
    account: Account,
    life: Life,
    differed: dict[int, int],
) -> None:
    contents, found = state.contents, _Found({}, [], [])
    for index, (block, code) in enumerate(run.blocks, run.first):
        record, number = record_of(state, run.group, block)
        if record is None:
            continue
        allocated = allocation(record, event.step)
        if allocated is None:
            state.sums.count_content("unseen")
        elif allocated[1] == account.request and allocated[0] >= life.began_step:
            in_part = contents.filled_in_part(block, code, allocated)
            state.sums.count_content("unsealed" if in_part else "arrived")
            if in_part:  # the engine counts the rest as computed
                found.unsealed.append((number, block, *allocated))
        elif code > 0 and allocated[0] <= code:
            changed = block in differed or contents.changed.get(block, -1) >= allocated[0]
            state.sums.count_content("differed" if changed else "verified")
            if changed:
                contents.changed[block] = event.step
                found.changed.setdefault(number, []).append((block, code, differed.get(block, code)))
            else:
                found.intact.append(index)
        elif code in (ev.UNSEEN, ev.UNSAMPLED, ev.SAME_STEP):
            state.sums.count_content(_NOT_VERIFIED[code])
        elif code == ev.MISMATCHED and contents.changed.get(block, -1) >= allocated[0]:
            state.sums.count_content("differed")
            found.changed.setdefault(number, []).append((block, contents.changed[block], 0))
        elif contents.loads_into(state.blocks, block, allocated):
            state.sums.count_content("loaded")
        else:
            state.sums.count_content("unsealed")
            found.unsealed.append((number, block, *allocated))
    _enter_found(state, event, run, account, found)


class _Found(NamedTuple):
    """What one run of hit blocks showed."""

    changed: dict[int, list[tuple[int, int, int]]]
    """By pool: block, step of its seal, and the last step at which it was intact."""
    intact: list[int]
    """Table indices of the blocks that held the bytes that were sealed."""
    unsealed: list[tuple[int, int, int, int]]
    """Pool, block, and step and request of its allocation."""


_NOT_VERIFIED = {ev.UNSEEN: "unseen", ev.UNSAMPLED: "unsampled", ev.SAME_STEP: "same_step"}
"""What to count for a code of a hit block."""


def _enter_found(
    state: LedgerState, event: ev.HitsVerified, run: _Run, account: Account, found: _Found
) -> None:
    size = state.contents.block_tokens.get(run.group, 0)
    if found.intact:
        state.sums.count_content("tokens", len(found.intact) * size)
        for start, end in _ranges(found.intact):
            add_line(state, account, f"verified: positions {start * size} to {end * size} hold the sealed KV")
    for number, rows in found.changed.items():
        block, sealed, intact = rows[0]
        story = _story(state, number, block, sealed, intact, event.step, f"read by request {run.request_id}")
        writer = state.blocks.pools[number].records[block].writer
        blocks = [each for each, _, _ in rows]
        place = event.worker, run.group, number, blocks, len(blocks) * size
        subject = ContentChanged(*place, sealed, intact, event.step, run.request_id, writer, story)
        state.entries.append(Entry(state.number, event.step, state.at, subject, account))
    if found.unsealed:
        number, block, step, request = found.unsealed[0]
        holder = state.blocks.holder("table", request, run.group)
        blocks = [each for _, each, _, _ in found.unsealed]
        unsealed = UnsealedHit(
            event.worker,
            run.group,
            number,
            blocks,
            len(blocks) * size,
            step,
            _name(state, number, block, holder.request_id),
            event.step,
            state.blocks.story(number, block),
        )
        state.entries.append(Entry(state.number, event.step, state.at, unsealed, account))


def _name(state: LedgerState, number: int, block: int, known: str) -> str:
    """The request for which a block was allocated, which may have ended."""
    operations = state.blocks.pools[number].records[block].operations
    named = [done.request_id for done in operations if done.what.startswith("allocated")]
    return named[-1] if named and named[-1] else known


def _scrubbed(state: LedgerState, event: ev.ScrubDiffered) -> None:
    contents = state.contents
    for index in range(0, len(event.rows), 4):
        group, block, sealed, intact = event.rows[index : index + 4]
        record, number = record_of(state, group, block)
        allocated = None if record is None else allocation(record, event.step)
        if record is None or allocated is None or allocated[0] > sealed:
            continue
        state.sums.count_content("scrub_differed")
        contents.changed[block] = event.step
        story = _story(state, number, block, sealed, intact, event.step, "read by a scrub")
        place = event.worker, group, number, [block], contents.block_tokens.get(group, 0)
        subject = ContentChanged(*place, sealed, intact, event.step, "", record.writer, story)
        state.entries.append(Entry(state.number, event.step, state.at, subject, None))


def _story(
    state: LedgerState, number: int, block: int, sealed: int, intact: int, step: int, how: str
) -> list[str]:
    known = f", and was still the same at step {intact}" if intact > sealed else ""
    return [
        *state.blocks.story(number, block),
        f"  its bytes: sealed after step {sealed}{known}; other bytes in step {step}, {how}",
    ]


def record_of(state: LedgerState, group: int, block: int) -> tuple[Block | None, int]:
    """The record of a block of a group, and the number of its pool."""
    for number, pool in state.blocks.pools.items():
        if group in pool.groups:
            return (None if block == pool.null_block else pool.records.get(block)), number
    return None, -1


def allocation(record: Block, step: int) -> tuple[int, int] | None:
    """Step and request of a block's last allocation up to ``step``; None if it is not known."""
    rows = record.allocations
    known = [(rows[i], rows[i + 1]) for i in range(0, len(rows), 2) if rows[i] <= step]
    return known[-1] if known else None


def _ranges(indices: list[int]) -> Iterator[tuple[int, int]]:
    """Consecutive indices as ranges."""
    start = indices[0]
    for before, after in zip(indices, [*indices[1:], -1], strict=True):
        if after != before + 1:
            yield start, before + 1
            start = after


CONTENTS: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.ContentWatched: _watched,
    ev.ContentCounted: _counted,
    ev.HitsVerified: _hits,
    ev.ScrubDiffered: _scrubbed,
}
"""Postings by event."""
