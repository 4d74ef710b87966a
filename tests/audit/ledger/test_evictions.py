"""Cache misses that ``why`` attributes to eviction: on the real scheduler, and histories near the limit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.scenarios.driving import start
from tests.scenarios.registry import HYBRID

import kvledger
from kvledger.audit.analysis.cache_misses import Groups, groups_of, missed_ranges
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import (
    Admitted,
    BlocksAllocated,
    BlocksCached,
    Delivered,
    Event,
    Finished,
    PoolSeen,
    RequestAdded,
    Stepped,
)
from kvledger.audit.ledger.account import Account
from kvledger.audit.traffic.driver import Driver
from kvledger.exporters.facts.rows import missed_tokens

BLOCK = 16


class Watched:
    """An engine of 12 blocks under the ledger."""

    def __init__(self, level: str = "blocks", *, attached: bool = True, **setup: Any) -> None:
        self.audits: list[Any] = []

        def attach(scheduler: Any) -> None:
            if attached:
                self.audits.append(kvledger.attach(scheduler, level=level))

        self.driver: Driver = start(attach, **{"blocks": 12, **setup})

    def run(self, name: str, tokens: int, **how: Any) -> None:
        self.driver.add(name, tokens, 2, **how)
        self.driver.run()

    def accounts(self, verdict: str = "clean") -> dict[str, Account]:
        (audit,) = self.audits
        audit.detach()
        assert verdict in ("", audit.verdict)
        return {account.request_id: account for account in audit.ledger.accounts()}

    def causes(self, name: str, verdict: str = "clean") -> dict[str, int]:
        account = self.accounts(verdict)[name]
        return causes(account, groups_of(self.audits[0].ledger.blocks.pools.get(0)))


def causes(account: Account, groups: Groups | None = None) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for start_, end, cause in missed_ranges(account, BLOCK, groups):
        tokens[cause] = tokens.get(cause, 0) + end - start_
    return tokens


# --- the real scheduler ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "shared", "missed"),
    [
        ("blocks", 50, {"evicted": 32}),
        ("blocks", 0, {"never_seen": 48}),
        ("tokens", 50, {"not_knowable": 32}),
    ],
)
def test_only_cached_blocks_that_another_request_replaced_were_evicted(
    level: str, shared: int, missed: dict[str, int]
) -> None:
    """Of eleven blocks b allocates nine, among them the last two of a's three."""
    engine = Watched(level)
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", shared))

    assert {**missed, "below_block": 2} == engine.causes("c")


def test_what_was_cached_before_the_observation_may_have_been_seen() -> None:
    """The cache is not empty, and what it had lost by then is not known."""
    engine = Watched(attached=False)
    engine.run("a", 50)
    engine.audits.append(kvledger.attach(engine.driver.scheduler, level="blocks"))
    engine.run("c", 50)

    assert {"not_knowable": 48, "below_block": 2} == engine.causes("c", verdict="")


def test_a_prompt_shorter_than_a_block_is_no_tail() -> None:
    engine = Watched()
    engine.run("a", 15)

    assert {"short_prompt": 15} == engine.causes("a")


def test_a_hash_that_covers_the_next_token_does_not_tell_whether_the_tokens_were_seen() -> None:
    """Only of the first block behind the hit: the next one begins with that token."""
    engine = Watched()
    engine.run("a", 66)
    engine.run("b", 66, shares=("a", 34))
    account = engine.accounts()["b"]

    found = list(missed_ranges(account, BLOCK, lookahead=True))
    assert [(32, 48, "next_token"), (48, 64, "never_seen"), (64, 66, "below_block")] == found
    assert {"never_seen": 32, "below_block": 2} == causes(account)


def test_second_request_after_an_eviction_hits_again() -> None:
    """The first request caches the blocks again, so the second one hits them."""
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))
    engine.run("d", 50, shares=("a", 50))

    assert {"below_block": 2} == engine.causes("d")


def test_blocks_removed_by_a_reset_were_not_evicted() -> None:
    engine = Watched()
    engine.run("a", 50)
    assert engine.driver.reset_prefix_cache()
    engine.run("c", 50, shares=("a", 50))

    assert {"cache_reset": 48, "below_block": 2} == engine.causes("c")


def test_tokens_lost_to_preemption_were_not_evicted() -> None:
    """The blocks were evicted as well, but the preemption is the cause."""
    engine = Watched()
    engine.driver.add("a", 50, 8)
    engine.driver.step()
    engine.driver.preempt("a")
    engine.driver.add("b", 150, 2, priority=-1)
    engine.driver.run()

    assert "evicted" not in engine.causes("a")


def test_sliding_window_blocks_prove_no_eviction() -> None:
    """A hit in a sliding window does not need every block below; a full-attention group does."""
    engine = Watched(groups=HYBRID, blocks=24)
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))

    account = engine.accounts()["c"]

    assert {"evicted"} == {before.how for before in account.cached_before}
    assert causes(account)["evicted"] == sum(before.end - before.start for before in account.cached_before)


def test_a_prompt_that_only_a_group_of_states_lacks_missed_by_it() -> None:
    """The state of `a` is kept where its prompt ends, and `b` needs it after 48 tokens."""
    engine = Watched(groups=("full", "mamba"), blocks=128)
    engine.run("a", 96)
    engine.run("b", 90, shares=("a", 48))

    assert {"state": 48, "never_seen": 32, "below_block": 10} == engine.causes("b")


def test_blocks_that_can_not_be_hit_because_a_window_was_evicted_missed_by_the_window() -> None:
    """`b` takes the end of `a` in both groups, so no boundary of `a` has its window; `c` takes the rest."""
    engine = Watched(groups=HYBRID, blocks=40)
    engine.run("a", 160)
    engine.run("b", 200)
    engine.run("c", 170, shares=("a", 160))

    assert {"window_evicted": 144, "evicted": 16, "below_block": 10} == engine.causes("c")


def test_a_request_that_asks_for_the_log_probabilities_of_its_prompt_may_not_read_the_cache() -> None:
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 50, shares=("a", 50), prompt_logprobs=True)

    assert {"may_not_read": 50} == engine.causes("b")


def test_causes_sum_to_all_misses() -> None:
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))
    engine.run("d", 80, shares=("b", 80))
    accounts = list(engine.accounts().values())
    missed: Counter[str] = Counter()
    for account in accounts:
        missed.update(causes(account))
    settled = [settlement for account in accounts for settlement in account.settlements]

    assert sum(map(missed_tokens, accounts)) == missed.total()
    assert "evicted" in missed
    hits = sum(each.local + each.external for each in settled)
    assert missed.total() + hits == sum(each.prompt_tokens for each in settled)


# --- histories, event by event ----------------------------------------------------------------------

ADMITTED = 10


def history(
    *,
    taken_at: int = -1,
    back_at: int = -1,
    taken_by: int = 1,
    group_kind: int = 2,
    resumable: bool = False,
    allocated_at: int = 20,
) -> Account:
    """Block 1 is cached as h0 for request 0 in step 1, and allocated to another in step ``taken_at``, if any.

    Request 3 caches another block as h0 in step ``back_at``, if any. Request 2, of 20 tokens, is admitted in
    step 10 without a hit, and caches one more in step 20, which it got in step ``allocated_at``. Step n is at
    n microseconds.
    """
    seen: list[Event] = [
        PoolSeen(0, 0, 0, 8, 0, 7, 0, [0, BLOCK, group_kind]),
        RequestAdded(ADMITTED, 2, "two", 20, resumable=resumable),
        Admitted(ADMITTED, 2, ADMITTED, False, 0, 0, False, 0),
        Stepped(ADMITTED, ADMITTED, [2, 20, 0, 20], []),
    ]
    if taken_at >= 0:
        seen.append(BlocksAllocated(1, 1, 0, "allocate", [0, 0, 1, 1]))
        seen.append(BlocksCached(1, 1, 0, [0, 0, 20, 1, 1, 0, 16]))
        seen.append(BlocksAllocated(taken_at, taken_at, 0, "allocate", [taken_by, 0, 1, 1]))
    if back_at >= 0:
        seen.append(BlocksAllocated(back_at, back_at, 0, "allocate", [3, 0, 1, 2]))
        seen.append(BlocksCached(back_at, back_at, 0, [3, 0, 20, 1, 2, 0, 16]))
    seen.append(BlocksAllocated(allocated_at, allocated_at, 0, "allocate", [2, 0, 1, 3]))
    seen.append(BlocksCached(20, 20, 0, [2, 0, 20, 1, 3, 0, 16]))
    seen += [Delivered(20, [2, 1], []), Finished(20, 2, "stopped", -1, -1, -1, -1, -1)]
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(sorted(seen, key=lambda event: event.at))
    return next(account for account in auditor.ledger.accounts() if account.request == 2)


EVICTED = {"evicted": 16, "below_block": 4}
NOT_KNOWN = {"not_knowable": 16, "below_block": 4}


def test_block_allocated_before_the_admission_was_evicted() -> None:
    assert EVICTED == causes(history(taken_at=5))


def test_block_allocated_after_the_admission_does_not_explain_the_miss() -> None:
    """The block was cached at the admission, and was not hit."""
    assert {"not_hit": 16, "below_block": 4} == causes(history(taken_at=15))


def test_block_allocated_in_the_step_of_the_admission_does_not_explain_the_miss() -> None:
    """Nothing shows whether the allocation came before the lookup: the request got no block in this step."""
    assert NOT_KNOWN == causes(history(taken_at=ADMITTED))


def test_block_allocated_in_the_step_of_the_admission_by_an_earlier_call_was_evicted() -> None:
    """The scheduler looks a request up after it has allocated blocks to those before it."""
    assert EVICTED == causes(history(taken_at=ADMITTED, allocated_at=ADMITTED))


def test_block_that_the_request_itself_took_was_cached_at_its_admission() -> None:
    assert {"not_hit": 16, "below_block": 4} == causes(history(taken_at=ADMITTED, taken_by=2))


def test_hash_back_before_the_admission_does_not_explain_the_miss() -> None:
    """It was in the cache, in another block, and was not hit."""
    assert {"not_hit": 16, "below_block": 4} == causes(history(taken_at=5, back_at=7))


@pytest.mark.parametrize("back_at", [ADMITTED, 12])
def test_block_that_another_request_cached_since_the_admission_was_being_computed(back_at: int) -> None:
    assert {"being_computed": 16, "below_block": 4} == causes(history(back_at=back_at))


def test_hash_back_after_the_admission_was_evicted() -> None:
    assert EVICTED == causes(history(taken_at=5, back_at=15))


def test_group_that_does_not_need_every_block_proves_no_eviction() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, group_kind=1))


def test_later_chunks_of_a_session_are_never_looked_up() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, resumable=True))
