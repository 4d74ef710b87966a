"""Scenarios of vLLM's v0 scheduler in which a look-up outlives its attempt (vLLM PR #18957).

One for each branch that leaves without an admission after it has looked up. 0.9.1 keeps the
answer, 0.9.2 forgets it. In each the cache changes, or at least a step passes, before request ``r``
is admitted by that answer; or ``r`` ends and leaves it behind. In ``UNFIXED`` 0.9.2 does so too.
"""

from __future__ import annotations

from typing import Any

from tests.scenarios.v0.driver import Attach, V0Driver, start
from tests.scenarios.v0.scenarios import VARIANTS, Register

STALE, UNFIXED = Register(), Register()


def _warm(driver: V0Driver, **how: Any) -> None:
    """Leave 64 tokens of the family "warm" in the cache."""
    driver.add("warm", 65, 1, shares=("warm", 65), **how)
    driver.run()


@STALE(**VARIANTS)
def too_few_blocks_at_first(attach: Attach, **setup: Any) -> V0Driver:
    """``can_allocate`` says later; the one that runs evicts the hit before there is room."""
    driver = start(attach, blocks=16, **setup)
    _warm(driver)
    driver.add("hog", 160, 90)
    for _ in range(4):
        driver.step()
    driver.add("r", 112, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(**VARIANTS)
def no_budget_of_requests(attach: Attach, **setup: Any) -> V0Driver:
    """``budget.can_schedule`` says no while another runs, which evicts the hit."""
    driver = start(attach, blocks=20, max_running=1, **setup)
    _warm(driver)
    driver.add("hog", 160, 150)
    for _ in range(4):
        driver.step()
    driver.add("r", 100, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(_sync={}, _asynchronous={"asynchronous": True})
def no_budget_of_tokens(attach: Attach, **setup: Any) -> V0Driver:
    """The prompt before it takes the step's tokens, and the blocks of the hit."""
    driver = start(attach, blocks=19, max_batched_tokens=256, max_model_len=256, **setup)
    _warm(driver)
    driver.add("hog", 250, 20)
    driver.add("r", 100, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(_sync={"chunked_prefill": True}, _asynchronous={"chunked_prefill": True, "asynchronous": True})
def no_budget_of_chunks(attach: Attach, **setup: Any) -> V0Driver:
    """Less than a block of the step's tokens is left: nothing of its prompt can be scheduled."""
    driver = start(attach, blocks=20, max_batched_tokens=64, **setup)
    _warm(driver)
    driver.add("hog", 184, 40)
    driver.add("r", 100, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(**VARIANTS)
def no_room_for_its_lora(attach: Attach, **setup: Any) -> V0Driver:
    """Its adapter has to wait; one without an adapter is admitted past it and evicts the hit."""
    driver = start(attach, blocks=24, max_loras=1, **setup)
    _warm(driver, lora=2)
    driver.add("hog", 40, 60, lora=1)
    for _ in range(2):
        driver.step()
    driver.add("r", 100, 3, shares=("warm", 64), lora=2)
    driver.add("flood", 300, 2)
    driver.run()
    return driver


@STALE(_sync={}, _asynchronous={"asynchronous": True})
def no_embeds_beside_tokens(attach: Attach, **setup: Any) -> V0Driver:
    """A step takes token prompts or embedded ones; the next prompt of tokens evicts the hit."""
    driver = start(attach, blocks=24, **setup)
    _warm(driver, embeds=True)
    driver.add("a", 40, 2)
    driver.add("r", 100, 3, embeds=True)
    driver.add("flood", 300, 2)
    driver.run()
    return driver


@STALE(_sync={}, _asynchronous={"asynchronous": True})
def preempts_by_priority(attach: Attach, **setup: Any) -> V0Driver:
    """Looked up in order to preempt for it; the count is not that of the step that admits it."""
    driver = start(attach, policy="priority", blocks=16, **setup)
    _warm(driver)
    driver.add("low", 160, 90, priority=9)
    for _ in range(60):
        driver.step()
    driver.add("r", 112, 3, shares=("warm", 64), priority=1)
    driver.run()
    return driver


@STALE()
def behind_the_swapped(attach: Attach, **setup: Any) -> V0Driver:
    """While anybody is swapped out no prefill is tried: the first that waits is looked up all the
    same, to see whether others should be preempted for it."""
    driver = start(attach, policy="priority", preemption_mode="swap", blocks=16, **setup)
    driver.add("low", 100, 90, shares=("warm", 100), priority=9)
    driver.add("lower", 100, 90, priority=10)
    while not driver.scheduler.swapped:
        driver.step()
    driver.add("r", 160, 3, shares=("warm", 64), priority=20)
    driver.run()
    return driver


@STALE(**VARIANTS)
def preempted_and_tried_again(attach: Attach, **setup: Any) -> V0Driver:
    """Its own blocks are the hit; it fails until the other ends, which has evicted some of them."""
    driver = start(attach, blocks=13, **setup)
    driver.add("early", 64, 90)
    driver.add("r", 64, 60)
    driver.run()
    return driver


@STALE()
def ignored_too_long(attach: Attach, **setup: Any) -> V0Driver:
    """Longer than the model's limit: its look-up is left behind."""
    driver = start(attach, max_batched_tokens=256, max_model_len=256, **setup)
    driver.add("r", 300)
    driver.add("other", 50, 3)
    driver.run()
    return driver


@STALE(**VARIANTS)
def ignored_never_fits(attach: Attach, **setup: Any) -> V0Driver:
    """More blocks than there are."""
    driver = start(attach, blocks=8, **setup)
    driver.add("r", 200)
    driver.add("other", 50, 3)
    driver.run()
    return driver


@STALE(**VARIANTS)
def aborted_after_an_attempt(attach: Attach, **setup: Any) -> V0Driver:
    """The client leaves after an attempt that failed."""
    driver = start(attach, blocks=16, **setup)
    _warm(driver)
    driver.add("hog", 160, 30)
    for _ in range(4):
        driver.step()
    driver.add("r", 112, 3, shares=("warm", 64))
    driver.step()
    driver.abort("r")
    driver.run()
    return driver


@UNFIXED(_sync={}, _asynchronous={"asynchronous": True})
def never_fits_again(attach: Attach, **setup: Any) -> V0Driver:
    """Swapped out for want of a block, it fits no more: ignored, with its look-up and CPU blocks."""
    driver = start(attach, blocks=8, preemption_mode="swap", **setup)
    driver.add("r", 64, 200)
    driver.run()
    return driver
