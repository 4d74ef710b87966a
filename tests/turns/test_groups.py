"""Turns on engines with several KV cache groups, whose hits end at a boundary that all groups have.

What each group has cached when a turn comes is asked of the real pool, just before the turn is scheduled.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.turns.chats import BLOCK, Engine, Sent, of, shared, words

from kvledger.audit.analysis.turns import Turn
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.serialize import capture, restore
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.reports.page import gather
from kvledger.exporters.reports.turns import turns

GROUPS = (("full", "sliding"), ("full", "mamba"), ("sliding", "full"), ("full", "sliding", "full"))


def by_id(folder: Path) -> dict[str, Turn]:
    """The turns, by request id."""
    return {turn.request_id: turn for turn in turns([folder]).each}


OF_GROUPS = {"evicted", "groups", "window", "window_evicted", "state", "state_evicted", "boundary"}
"""Causes of what full attention had, or had had."""


class Asked(Engine):
    """An engine that asks its pool what full attention has of each request, before it is scheduled."""

    def __init__(self, name: str, groups: tuple[str, ...], **setup: Any) -> None:
        self.cached: dict[str, int] = {}
        """By request: tokens that the first group of full attention has cached of it."""
        super().__init__(name, groups=groups, sliding_window=48, **setup)
        self._whole = groups.index("full")

    def added(self, request: Any) -> None:
        """See the base."""
        pool, count = self.driver.scheduler.kv_cache_manager.block_pool, 0
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if not pool.get_cached_block(block_hash, [self._whole]):
                break
            count += BLOCK
        self.cached[request.request_id] = count


def test_a_state_at_another_boundary_is_no_divergence(tmp_path: Path) -> None:
    """The last question is asked anew. Full attention has all before it, and no state was kept there."""
    engine, dice = Asked("one", ("full", "mamba")), Random(3)
    first = engine.send("chat-1", words(dice, 10 * BLOCK + 3), **of("chat"))
    engine.send("chat-2", first.prompt[: 6 * BLOCK + 1] + words(dice, 60), **of("chat"))
    engine.stop(tmp_path)

    turn = by_id(tmp_path)["chat-2"]
    assert 0 == turn.hit and 6 * BLOCK == engine.cached["chat-2"]
    assert {"state": 6 * BLOCK, "diverged": turn.reusable - 6 * BLOCK} == turn.lost


def test_a_state_that_was_evicted_is_an_eviction(tmp_path: Path) -> None:
    """The near miss: the state was cached at this boundary, and left."""
    engine, dice = Asked("one", ("full", "mamba"), blocks=40), Random(4)
    first = engine.send("chat-1", words(dice, 10 * BLOCK + 3), 2, **of("chat"))
    engine.send("filler", words(dice, 36 * BLOCK), 2, **of("other"))
    engine.send("chat-2", first.sequence + words(dice, 60), **of("chat"))
    engine.stop(tmp_path)

    turn = by_id(tmp_path)["chat-2"]
    assert 0 == turn.hit
    assert {"evicted": 10 * BLOCK, "below_block": turn.reusable - 10 * BLOCK} == turn.lost
    assert turn.evicted is not None and "filler" == turn.evicted.by


def test_a_request_that_may_not_read_the_cache_lacks_no_boundary(tmp_path: Path) -> None:
    engine, dice = Asked("one", ("full", "sliding")), Random(5)
    first = engine.send("chat-1", words(dice, 100), **of("chat"))
    engine.send("chat-2", first.sequence + words(dice, 30), prompt_logprobs=True, **of("chat"))
    engine.stop(tmp_path)

    assert {"not_hit", "below_block"} >= by_id(tmp_path)["chat-2"].lost.keys()
    assert "not_hit" in by_id(tmp_path)["chat-2"].lost


def test_kept_rows_the_page_and_the_metrics_have_the_turns_of_the_command(tmp_path: Path) -> None:
    engine, dice = Asked("one", ("full", "mamba"), blocks=90, token_seconds=0.001), Random(6)
    for number in range(5):
        first = engine.send(f"chat{number}-1", words(dice, 150), **of(f"chat{number}"))
        engine.send(f"chat{number}-2", first.prompt[:100] + words(dice, 30), **of(f"chat{number}"))
        engine.send(f"chat{number}-3", first.sequence + words(dice, 300), **of(f"chat{number}"))
    engine.stop(tmp_path)

    told, journal = turns([tmp_path]), tmp_path / "one"
    lost = {row.cause: row.tokens for row in told.causes}
    assert lost["state"]
    page = gather([tmp_path]).turns
    assert page is not None and told.causes == page.causes and told.lost_seconds == page.lost_seconds

    followed = FollowedAudit(journal)
    with Reader(journal) as reader:
        for _ in followed.batches(reader):
            pass
    assert lost == restore(capture(followed), FollowedAudit(journal)).turns.lost

    assert "" == compact(journal).problem
    assert told == turns([tmp_path])


@pytest.mark.parametrize("blocks", [4_000, 110])
@pytest.mark.parametrize("groups", GROUPS, ids="-".join)
@pytest.mark.parametrize("seed", range(3))
def test_each_block_that_full_attention_had_and_no_hit_covers_has_its_groups_cause(
    tmp_path: Path, groups: tuple[str, ...], blocks: int, seed: int
) -> None:
    """Chats that go on, go back, and are edited: what is lost in shared blocks, beside what the pool had."""
    engine, dice = Asked("one", groups, blocks=blocks), Random(seed)
    sent: dict[str, list[Sent]] = {name: [] for name in "abc"}
    for number in range(1, 9):
        for name, chat in sent.items():
            prompt = words(dice, 120)
            if chat:
                whole = chat[-1].sequence
                cut = len(whole) if dice.random() < 0.5 else dice.randrange(20, len(whole))
                prompt = whole[:cut] + words(dice, dice.randrange(5, 60))
            chat.append(engine.send(f"{name}-{number}", prompt, dice.randrange(5, 40), **of(name)))
    engine.stop(tmp_path)

    found, causes = by_id(tmp_path), Counter[str]()
    for chat in sent.values():
        for before, turn in pairwise(chat):
            known = found[turn.request_id]
            if known.before != before.request_id:
                continue  # a branch
            assert known.reusable == min(len(before.sequence) - 1, len(turn.prompt) - 1)
            same = min(shared(before.sequence, turn.prompt), known.reusable) // BLOCK * BLOCK
            lost = {cause: tokens for cause, tokens in known.lost.items() if cause in OF_GROUPS}
            assert max(0, same - min(known.hit, known.reusable)) == sum(lost.values()), known
            assert lost.keys() | {"diverged", "answer", "below_block"} >= known.lost.keys()
            if blocks == 4_000:
                assert not lost or {"state"} == lost.keys()
                assert max(0, min(engine.cached[turn.request_id], same) - known.hit) == sum(lost.values())
            causes.update(known.lost)
    assert causes["diverged"]
    assert bool(causes["state"]) == ("mamba" in groups), causes  # all blocks of windows were cached
