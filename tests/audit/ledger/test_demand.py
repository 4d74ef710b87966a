"""How many more blocks would have let preempted requests run on."""

from __future__ import annotations

from kvledger.audit.ledger.blocks.holdings import MOST_PERCENT, BlockDemand

POOL = 10


def preempted(*, free: int, shared: int = 0) -> BlockDemand:
    """Request 1 gives up ``free`` blocks for good and ``shared`` blocks that another request holds."""
    demand = BlockDemand()
    blocks = range(free + shared)
    demand.free(1, 5, blocks, [int(block >= free) for block in blocks])
    demand.preempt(1)
    return demand


def test_the_need_is_the_largest_until_the_request_is_admitted_again() -> None:
    demand = preempted(free=4)
    for used in (6, 8, 7):
        demand.see(used)
    demand.hold(1, 3)
    demand.see(POOL)

    assert 20 == demand.end(1, POOL)
    assert not demand.known(1)


def test_a_pool_that_was_never_too_small_lacked_one_block() -> None:
    demand = preempted(free=2)
    demand.see(8)

    assert 10 == demand.end(1, POOL)


def test_a_shared_block_counts_once_its_other_holder_gives_it_up() -> None:
    demand = preempted(free=3, shared=2)
    demand.see(9)
    demand.free(2, 6, [3, 4, 9], [0, 0, 0])
    demand.see(7)

    assert 20 == demand.end(1, POOL)


def test_blocks_given_up_in_an_earlier_step_are_not_kept() -> None:
    demand = BlockDemand()
    demand.free(1, 4, [7, 8, 9], [0, 0, 0])
    demand.free(1, 5, [1], [0])
    demand.preempt(1)
    demand.see(POOL)

    assert 10 == demand.end(1, POOL)


def test_several_preempted_requests_count_together() -> None:
    demand = preempted(free=4)
    demand.free(2, 6, [5, 6], [0, 0])
    demand.preempt(2)
    demand.see(8)

    assert [40, 40] == [demand.end(1, POOL), demand.end(2, POOL)]


def test_a_need_is_not_known_without_a_preemption_or_after_a_loss_or_beyond_the_bound() -> None:
    assert -1 == BlockDemand().end(1, POOL)
    lost = preempted(free=4)
    lost.forget()
    assert -1 == lost.end(1, POOL)
    far = preempted(free=4)
    far.see(POOL + POOL * MOST_PERCENT)
    assert -1 == far.end(1, POOL)
