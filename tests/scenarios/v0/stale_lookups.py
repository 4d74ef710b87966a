"""Scenarios of vLLM's v0 scheduler in which a lookup outlives its failed attempt (vLLM PR #18957).

There is one scenario for each branch that looks up and then does not admit. 0.9.1 keeps the result of such a
lookup, 0.9.2 releases it. In each scenario the cache changes, or at least one step passes, before request
``r`` is admitted with the kept result; or ``r`` ends and its result is never released. ``UNFIXED`` has the
scenario in which 0.9.2 keeps the result as well.
"""

from __future__ import annotations

from typing import Any

from tests.scenarios.v0.driver import Attach, V0Driver, start
from tests.scenarios.v0.scenarios import VARIANTS, Register

STALE, UNFIXED = Register(), Register()


def _warm(driver: V0Driver, **options: Any) -> None:
    """Leave 64 tokens of the family "warm" in the cache."""
    driver.add("warm", 65, 1, shares=("warm", 65), **options)
    driver.run()


@STALE(**VARIANTS)
def too_few_blocks_at_first(attach: Attach, **setup: Any) -> V0Driver:
    """``can_allocate`` returns LATER; the running request evicts the hit before enough blocks are free."""
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
    """``budget.can_schedule`` is false while another request runs, which evicts the hit."""
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
    """The prompt before `r` uses up the step's token budget and evicts the hit."""
    driver = start(attach, blocks=19, max_batched_tokens=256, max_model_len=256, **setup)
    _warm(driver)
    driver.add("hog", 250, 20)
    driver.add("r", 100, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(_sync={"chunked_prefill": True}, _asynchronous={"chunked_prefill": True, "asynchronous": True})
def no_budget_of_chunks(attach: Attach, **setup: Any) -> V0Driver:
    """Less than one block of the step's token budget is left, so no chunk of `r` can be scheduled."""
    driver = start(attach, blocks=20, max_batched_tokens=64, **setup)
    _warm(driver)
    driver.add("hog", 184, 40)
    driver.add("r", 100, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(**VARIANTS)
def no_room_for_its_lora(attach: Attach, **setup: Any) -> V0Driver:
    """`r` waits for a LoRA slot; a request without an adapter is admitted before it and evicts the hit."""
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
    """A step prefills token prompts or embeddings, not both; the next token prompt evicts the hit."""
    driver = start(attach, blocks=24, **setup)
    _warm(driver, embeds=True)
    driver.add("a", 40, 2)
    driver.add("r", 100, 3, embeds=True)
    driver.add("flood", 300, 2)
    driver.run()
    return driver


@STALE(_sync={}, _asynchronous={"asynchronous": True})
def preempts_by_priority(attach: Attach, **setup: Any) -> V0Driver:
    """The scheduler looks `r` up to preempt others for it; a later step admits `r` with that count."""
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
    """No prefill is scheduled while a request is swapped out. The scheduler still looks up the first waiting
    request, to decide whether to preempt others for it."""
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
    """`r` hits its own blocks; its attempts fail until the other request, which evicts some of them, ends."""
    driver = start(attach, blocks=13, **setup)
    driver.add("early", 64, 90)
    driver.add("r", 64, 60)
    driver.run()
    return driver


@STALE()
def ignored_too_long(attach: Attach, **setup: Any) -> V0Driver:
    """`r` is longer than the model's limit and is ignored; its lookup is never released."""
    driver = start(attach, max_batched_tokens=256, max_model_len=256, **setup)
    driver.add("r", 300)
    driver.add("other", 50, 3)
    driver.run()
    return driver


@STALE(**VARIANTS)
def ignored_never_fits(attach: Attach, **setup: Any) -> V0Driver:
    """`r` needs more blocks than the pool has and is ignored."""
    driver = start(attach, blocks=8, **setup)
    driver.add("r", 200)
    driver.add("other", 50, 3)
    driver.run()
    return driver


@STALE(**VARIANTS)
def aborted_after_an_attempt(attach: Attach, **setup: Any) -> V0Driver:
    """The client aborts `r` after a failed attempt."""
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
    """`r` is swapped out for lack of a block and never fits again; it keeps its lookup and its CPU blocks."""
    driver = start(attach, blocks=8, preemption_mode="swap", **setup)
    driver.add("r", 64, 200)
    driver.run()
    return driver
