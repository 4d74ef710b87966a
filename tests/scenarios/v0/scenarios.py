"""Workloads of vLLM's v0 scheduler, on which an audit must find nothing.

In each ``CLEAN`` workload every lookup is made by the attempt that admits the request. ``CROWDED`` workloads
are random and some of their attempts fail; they are clean in 0.9.2, which releases the lookup of a failed
attempt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.scenarios.v0.driver import Attach, V0Driver, start

V0Scenario = Callable[..., V0Driver]

VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "_asynchronous": {"asynchronous": True},
    "_chunked": {"chunked_prefill": True, "max_batched_tokens": 64},
    "_chunked_asynchronous": {
        "chunked_prefill": True,
        "max_batched_tokens": 64,
        "asynchronous": True,
    },
}


class Register(dict[str, V0Scenario]):
    """Scenarios by name; each variant of an engine's setup is a scenario of its own."""

    def __call__(self, **variants: dict[str, Any]) -> Callable[[V0Scenario], V0Scenario]:
        def register(scenario: V0Scenario) -> V0Scenario:
            for suffix, setup in (variants or {"": {}}).items():
                self[scenario.__name__ + suffix] = _variant(scenario, setup)
            return scenario

        return register


def _variant(scenario: V0Scenario, setup: dict[str, Any]) -> V0Scenario:
    def run(attach: Attach = id, **more: Any) -> V0Driver:
        return scenario(attach, **{**setup, **more})

    return run


CLEAN, CROWDED = Register(), Register()


# --- clean ------------------------------------------------------------------------------------------


@CLEAN(**VARIANTS, _uncached={"prefix_caching": False})
def plain(attach: Attach, **setup: Any) -> V0Driver:
    driver = start(attach, **setup)
    for number in range(4):
        driver.add(f"r{number}", 30 + 17 * number, 5 + number)
    driver.run()
    return driver


@CLEAN(**VARIANTS)
def shared_prefix(attach: Attach, **setup: Any) -> V0Driver:
    """Prompts that share a prefix: in part, in full, and in one token less than full blocks."""
    driver = start(attach, **setup)
    driver.add("first", 100, 4, shares=("f", 100))
    driver.run()
    driver.add("second", 100, 4, shares=("f", 64))
    driver.run()
    driver.add("same", 96, 4, shares=("f", 96))
    driver.run()
    driver.add("shorter", 95, 4, shares=("f", 95))
    driver.run()
    return driver


@CLEAN(**VARIANTS)
def together(attach: Attach, **setup: Any) -> V0Driver:
    """Two requests with the same prompt in one step: the second shares blocks that are not computed yet."""
    driver = start(attach, **setup)
    driver.add("a", 32, 4, shares=("f", 32))
    driver.add("b", 32, 4, shares=("f", 32))
    driver.run()
    return driver


@CLEAN(**VARIANTS, _uncached={"prefix_caching": False})
def preempted_once(attach: Attach, **setup: Any) -> V0Driver:
    """Both requests grow until one is preempted; its first attempt to resume finds enough blocks."""
    driver = start(attach, blocks=13, **setup)
    driver.add("early", 64, 60)
    driver.add("late", 64, 60)
    while not driver.scheduler.num_cumulative_preemption:
        driver.step()
    driver.abort("early")
    driver.run()
    return driver


@CLEAN(
    _swapped={"preemption_mode": "swap"},
    _swapped_asynchronous={"preemption_mode": "swap", "asynchronous": True},
    _swapped_uncached={"preemption_mode": "swap", "prefix_caching": False},
    _uncached={"prefix_caching": False},
)
def too_few_blocks(attach: Attach, **setup: Any) -> V0Driver:
    """Both requests grow until one is preempted; while it waits, nothing can be looked up for it."""
    driver = start(attach, blocks=13, **setup)
    driver.add("early", 64, 60)
    driver.add("late", 64, 60)
    driver.run()
    return driver


@CLEAN(**VARIANTS)
def aborted(attach: Attach, **setup: Any) -> V0Driver:
    """Requests aborted before their first step, in prefill and in decode."""
    driver = start(attach, **setup)
    driver.add("at once", 50)
    driver.abort("at once")
    driver.add("early", 150)
    driver.step()
    driver.abort("early")
    driver.add("late", 40)
    for _ in range(4):
        driver.step()
    driver.abort("late")
    driver.run()
    return driver


@CLEAN(_sync={}, _asynchronous={"asynchronous": True})
def capped(attach: Attach, **setup: Any) -> V0Driver:
    """A sequence that reaches the model's maximum length."""
    driver = start(attach, max_model_len=64, **setup)
    driver.add("r", 50, 100)
    driver.run()
    return driver


@CLEAN()
def pooling(attach: Attach, **setup: Any) -> V0Driver:
    driver = start(attach, pooling=True, **setup)
    driver.add("a", 100)
    driver.add("b", 30)
    driver.run()
    return driver


@CLEAN(**VARIANTS)
def partial_prefills(attach: Attach, **setup: Any) -> V0Driver:
    """Two chunked prompts in the same steps, where chunked prefill is on."""
    driver = start(attach, partial_prefills=2 if "chunked_prefill" in setup else 1, **setup)
    driver.add("a", 150, 4)
    driver.step()
    driver.add("b", 120, 4)
    driver.run()
    driver.add("c", 150, 4, shares=("own a", 0))
    driver.run()
    return driver


# --- random ---------------------------------------------------------------------------------------------


@CROWDED(
    **VARIANTS,
    _priority={"policy": "priority"},
    _swapped_uncached={"preemption_mode": "swap", "prefix_caching": False},
    _lora={"max_loras": 1},
)
def crowd(attach: Attach, *, seed: int = 0, requests: int = 60, **setup: Any) -> V0Driver:
    """Requests of all lengths in a pool too small for them, some aborted.

    Some setups are left out, because in them an assertion of 0.9.1 and 0.9.2 fails: when priorities preempt a
    request whose stop the asynchronous output processor has not processed yet, when a prompt is swapped out
    between two of its chunks, and when shared prefixes are swapped out and in.
    """
    dice = random.Random(seed)
    driver = start(attach, blocks=40, max_running=6, **setup)
    for number in range(requests):
        length = dice.randint(1, 250)
        driver.add(
            f"r{number}",
            length,
            dice.randint(1, 60),
            shares=(f"family {dice.randrange(4)}", dice.randint(0, length)),
            priority=dice.randrange(3),
            lora=dice.randrange(3) if "max_loras" in setup else 0,
        )
        for _ in range(dice.randint(0, 12)):
            driver.step()
        if dice.random() < 0.1:
            driver.abort(f"r{dice.randint(0, number)}")
    driver.run()
    return driver
