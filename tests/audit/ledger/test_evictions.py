"""What ``why`` calls evicted: on the real scheduler, and histories that come close to it."""

from __future__ import annotations

from typing import Any

from tests.scenarios.driving import start
from tests.scenarios.registry import HYBRID

import kvledger
from kvledger.audit.analysis.cache_misses import misses
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
from kvledger.audit.old_events import BlocksAllocated
from kvledger.exporters.reports.why import Tally, explained

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
        return {account.request_id: account for account in audit._auditor.ledger.accounts()}

    def causes(self, name: str) -> dict[str, int]:
        return causes(self.accounts()[name])


def causes(account: Account) -> dict[str, int]:
    found: dict[str, int] = {}
    for start_, end, cause in misses(account, BLOCK):
        found[cause] = found.get(cause, 0) + end - start_
    return found


# --- the real scheduler ---------------------------------------------------------------------------


def test_what_others_took_the_place_of_was_evicted() -> None:
    """Eleven blocks: b takes nine, and of the three of a's the last two."""
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))

    assert {"evicted": 32, "below_block": 2} == engine.causes("c")


def test_what_was_never_there_is_not_evicted() -> None:
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50)

    assert {"not_knowable": 48, "below_block": 2} == engine.causes("c")


def test_level_tokens_can_not_tell() -> None:
    engine = Watched(level="tokens")
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))

    assert {"not_knowable": 32, "below_block": 2} == engine.causes("c")


def test_of_two_that_ask_again_only_the_first_was_late() -> None:
    """The first brings it back, so that the second hits it."""
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))
    engine.run("d", 50, shares=("a", 50))

    assert {"below_block": 2} == engine.causes("d")


def test_what_a_reset_emptied_was_not_evicted() -> None:
    engine = Watched()
    engine.run("a", 50)
    assert engine.driver.reset_prefix_cache()
    engine.run("c", 50, shares=("a", 50))

    assert {"cache_reset": 48, "below_block": 2} == engine.causes("c")


def test_what_was_lost_to_preemption_stays_that() -> None:
    """Its blocks were evicted too, but it is the preemption that took them from it."""
    engine = Watched()
    engine.driver.add("a", 50, 8)
    engine.driver.step()
    engine.driver.preempt("a")
    engine.driver.add("b", 150, 2, priority=-1)
    engine.driver.run()

    assert "evicted" not in engine.causes("a")


def test_a_sliding_window_needs_not_every_block_below() -> None:
    """So nothing is claimed of its blocks; of a model's group of full attention it is."""
    engine = Watched(groups=HYBRID, blocks=24)
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))

    account = engine.accounts()["c"]

    assert len(account.lost) == len({lost.start for lost in account.lost})
    assert causes(account)["evicted"] == BLOCK * len(account.lost)


def test_the_causes_still_sum_to_all_that_was_no_hit() -> None:
    engine = Watched()
    engine.run("a", 50)
    engine.run("b", 150)
    engine.run("c", 50, shares=("a", 50))
    engine.run("d", 80, shares=("b", 80))
    tally = Tally()
    for account in engine.accounts().values():
        tally.add(account, BLOCK)

    found = explained(tally)

    assert found.no_hit == sum(row.tokens for row in found.causes)
    assert "evicted" in {row.cause for row in found.causes}
    assert found.no_hit + found.hit == found.prompt_tokens


# --- histories, event by event ----------------------------------------------------------------------

ADMITTED = 10


def history(*, taken_at: int, back_at: int = -1, whole: int = 2, resumable: bool = False) -> Account:
    """Block 1 is hashed h0 for request 0 in step 1, and taken from it by request 1.

    Perhaps request 3 fills another for h0. Request 2, of 20 tokens, is admitted in step 10 with no hit,
    and fills one more in step 20. A step of number n is at n microseconds.
    """
    seen: list[Event] = [
        PoolSeen(0, 0, 0, 8, 0, 7, 0, [0, BLOCK, whole]),
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


def test_taken_before_the_admission() -> None:
    assert EVICTED == causes(history(taken_at=5))


def test_taken_after_the_admission() -> None:
    """It was in the cache then, and why it was no hit is not told."""
    assert NOT_KNOWN == causes(history(taken_at=15))


def test_taken_in_the_step_of_the_admission() -> None:
    """Before the look-up or after it: the events of one step do not tell."""
    assert NOT_KNOWN == causes(history(taken_at=ADMITTED))


def test_back_before_the_admission() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, back_at=7))


def test_back_after_the_admission() -> None:
    assert EVICTED == causes(history(taken_at=5, back_at=15))


def test_a_group_that_needs_not_every_block() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, whole=1))


def test_a_session_whose_later_chunks_nobody_looks_up() -> None:
    assert NOT_KNOWN == causes(history(taken_at=5, resumable=True))
