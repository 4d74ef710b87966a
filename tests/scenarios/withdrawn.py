"""Workloads in which a cached block is hit before the step that writes it, or although this step never ran.

Under the policy priority, `schedule()` may preempt a request that it has put into the step already. The
blocks that the step was to fill are cached by then. `high` takes the last of them; the others stay cached.
"""

from typing import Any

from tests.scenarios.driving import Attach, Driver, start
from tests.scenarios.registry import BOTH, workload

from kvledger.audit.traffic.driver import tokens

STATES = ("full", "mamba")


def _withdraw(attach: Attach, low: int, **setup: Any) -> Driver:
    """An engine in which `high` has preempted `low` in the step that was to compute its third chunk."""
    options = (("long_prefill_token_threshold", 32),)
    driver = start(attach, policy="priority", scheduler_options=options, **setup)
    driver.add("first", 3, 8, priority=0)  # one prefill alone would have no threshold
    driver.add("low", low, 4, priority=9)
    driver.step()
    driver.add("high", 16, 2, priority=0)
    while driver.scheduler.requests["low"] in driver.scheduler.running:
        driver.step()
    return driver


@workload(**BOTH)
def withdrawn_step(attach: Attach = id, **setup: Any) -> Driver:
    """`low` is preempted in the step that was to compute its third chunk; resumed, it hits a block of it."""
    driver = _withdraw(attach, 96, blocks=9, **setup)
    driver.run()
    return driver


@workload(**BOTH)
def withdrawn_step_then_abort(attach: Attach = id, **setup: Any) -> Driver:
    """`low` is aborted after its step was withdrawn, and its client tries again with the same prompt."""
    driver = _withdraw(attach, 96, blocks=9, **setup)
    driver.abort("low")
    driver.add("retry", 96, 4, shares=("low", 96), priority=9)
    driver.run()
    return driver


@workload(sync={}, **{"async": {"asynchronous": True}})
def withdrawn_state(attach: Attach = id, **setup: Any) -> Driver:
    """The withdrawn step was to compute the last token below a checkpoint; the next turn hits the checkpoint.

    The blocks for drafts above it are the ones that `high` takes.
    """
    driver = start(attach, groups=STATES, policy="priority", blocks=20, drafts=3, **setup)
    low = driver.add("low", 92, 30, priority=9)
    driver.step(accepted=0)
    driver.add("high", 27, 30, priority=0)
    while low in driver.scheduler.running:
        driver.step(accepted=0)
    driver.abort("high")
    driver.add("turn", [*low.all_token_ids, *tokens(16, "turn")], 2, priority=0)
    driver.run()
    return driver


@workload(**BOTH)
def abort_in_flight(attach: Attach = id, **setup: Any) -> Driver:
    """A prefill is aborted while its step is in flight, and its client tries again with the same prompt."""
    driver = start(attach, groups=STATES, blocks=128, max_batched_tokens=32, **setup)
    driver.add("r", 100, 4)
    driver.schedule()
    driver.output()
    driver.schedule()
    driver.abort("r")
    driver.add("retry", 100, 4, shares=("r", 100))
    driver.run()
    return driver


@workload(**BOTH)
def states_in_one_step(attach: Attach = id, **setup: Any) -> Driver:
    """Two requests with the same prompt arrive together, in a model with states."""
    driver = start(attach, groups=STATES, blocks=128, **setup)
    driver.add("a", 70, 4)
    driver.add("b", 90, 4, shares=("a", 64))
    driver.run()
    return driver
