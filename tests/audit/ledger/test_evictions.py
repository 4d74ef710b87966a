"""Cache misses that ``why`` attributes to eviction: on the real scheduler, and histories near the limit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.scenarios.driving import start
from tests.scenarios.registry import HYBRID

import kvledger
from kvledger.audit.analysis.cache_misses import missed_ranges
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.conformance.driver import Driver
from kvledger.audit.events import (
    Admitted,
    BlocksCached,
    Delivered,
    Event,
    Finished,
    PoolSeen,
    RequestAdded,
    Stepped,
)
from kvledger.audit.ledger.account import Account
from kvledger.audit.pool_calls import BlocksAllocated
from kvledger.exporters.facts.rows import missed_tokens

BLOCK = 16


class Watched:
    """An engine of 12 blocks under the ledger."""

    def __init__(self, level: str = "blocks", **setup: Any) -> None:
        self.audits: list[Any] = []
        attach = self.audits.append
        self.driver: Driver = start(
            lambda scheduler: attach(kvledger.attach(scheduler, level=level)), **{"blocks": 12, **setup}
        )

    def run(self, name: str, tokens: int, **how: Any) -> None:
        self.driver.add(name, tokens, 2, **how)
        self.driver.run()

    def accounts(self) -> dict[str, Account]:
        (audit,) = self.audits
        audit.detach()
        assert "clean" == audit.verdict
        return {account.request_id: account for account in audit.ledger.accounts()}

    def causes(self, name: str) -> dict[str, int]:
        return causes(self.accounts()[name])


def causes(account: Account) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for start_, end, cause in missed_ranges(account, BLOCK):
        tokens[cause] = tokens.get(cause, 0) + end - start_
    return tokens


# --- the real scheduler ---------------------------------------------------------------------------


def test_blocks_replaced_by_another_request_were_evicted() -> None:
    """Of eleven blocks b allocates nine, among them the last two of a's three."""
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))

    assert {"evicted": 32, "below_block": 2} == engine.causes("c")


def test_tokens_never_cached_were_not_evicted() -> None:
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50)

    assert {"not_knowable": 48, "below_block": 2} == engine.causes("c")


def test_level_tokens_does_not_know_evictions() -> None:
    engine = Watched(level="tokens")
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))

    assert {"not_knowable": 32, "below_block": 2} == engine.causes("c")


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

    assert len(account.lost) == len({lost.start for lost in account.lost})
    assert causes(account)["evicted"] == BLOCK * len(account.lost)


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


def history(*, taken_at: int, back_at: int = -1, group_kind: int = 2, resumable: bool = False) -> Account:
    """Block 1 is cached as h0 for request 0 in step 1, and allocated to request 1 in step ``taken_at``.

    Request 3 caches another block as h0 in step ``back_at``, if any. Request 2, of 20 tokens, is admitted in
    step 10 without a hit, and caches one more in step 20. Step n is at n microseconds.
    """
    seen: list[Event] = [
        PoolSeen(0, 0, 0, 8, 0, 7, 0, [0, BLOCK, group_kind]),
        BlocksAllocated(1, 1, 0, "allocate", [0, 0, 1, 1]),
        BlocksCached(1, 1, 0, [0, 0, 20, 1, 1, 0, 16]),
        BlocksAllocated(taken_at, taken_at, 0, "allocate", [1, 0, 1, 1]),
        RequestAdded(ADMITTED, 2, "two", 20, resumable=resumable),
        Admitted(ADMITTED, 2, ADMITTED, False, 0, 0, False, 0),
        Stepped(ADMITTED, ADMITTED, [2, 20, 0, 20], []),
        BlocksAllocated(20, 20, 0, "allocate", [2, 0, 1, 3]),
        BlocksCached(20, 20, 0, [2, 0, 20, 1, 3, 0, 16]),
        Delivered(20, [2, 1], []),
        Finished(20, 2, "stopped", -1, -1, -1, -1, -1),
    ]
    if back_at >= 0:
        seen.append(BlocksAllocated(back_at, back_at, 0, "allocate", [3, 0, 1, 2]))
        seen.append(BlocksCached(back_at, back_at, 0, [3, 0, 20, 1, 2, 0, 16]))
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(sorted(seen, key=lambda event: event.at))
    return next(account for account in auditor.ledger.accounts() if account.request == 2)


EVICTED = {"evicted": 16, "below_block": 4}
NOT_KNOWN = {"not_knowable": 16, "below_block": 4}


def test_block_allocated_before_the_admission_was_evicted() -> None:
    assert EVICTED == causes(history(taken_at=5))


def test_block_allocated_after_the_admission_does_not_explain_the_miss() -> None:
    """The block was cached at the admission, so the cause of the miss is not known."""
    assert NOT_KNOWN == causes(history(taken_at=15))


def test_block_allocated_in_the_step_of_the_admission_does_not_explain_the_miss() -> None:
    """The events of one step do not show whether the allocation came before the lookup."""
    assert NOT_KNOWN == causes(history(taken_at=ADMITTED))


def test_hash_back_before_the_admission_does_not_explain_the_miss() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, back_at=7))


def test_hash_back_after_the_admission_was_evicted() -> None:
    assert EVICTED == causes(history(taken_at=5, back_at=15))


def test_group_that_does_not_need_every_block_proves_no_eviction() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, group_kind=1))


def test_later_chunks_of_a_session_are_never_looked_up() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, resumable=True))
