"""Diffusion models: a step schedules a whole canvas as drafts and samples no token beside it.

The tests use vLLM's DiffusionScheduler. If a step accepts nothing, the scheduler takes the whole canvas off
the count. With a model that samples one token beside its drafts, the scheduler takes nothing off after a step
without a sampled token.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.diffusion_scheduler")

from tests.audit.checks.watched import Watched
from tests.engines.observed import audited, observe
from tests.scenarios.driving import start

from kvledger.audit.events import EngineStarted
from kvledger.audit.traffic.driver import Driver

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

CANVAS = 8
PROMPT = 40

sync_and_async = pytest.mark.parametrize("asynchronous", [False, True])


@pytest.fixture
def watched() -> Watched:
    return Watched()


def denoised(attach: Any, rejecting_steps: int = 3, **setup: Any) -> Driver:
    """Run a request of two canvases; before each is accepted, ``rejecting_steps`` steps accept nothing."""
    driver = start(attach, canvas=CANVAS, **setup)
    driver.add("a", PROMPT, 2 * CANVAS)
    step = 0
    while driver.in_flight or driver.scheduler.has_requests():
        turn = (step - 1) % (rejecting_steps + 1)
        if driver.step(accepted=CANVAS if turn == rejecting_steps else 0):
            step += 1
    return driver


def test_the_configuration_has_0_tokens_sampled_beside_a_canvas() -> None:
    _, events = observe(denoised)
    (started,) = [event for event in events if isinstance(event, EngineStarted)]

    assert 0 == started.configuration["sampled_beside_drafts"]


@sync_and_async
def test_each_step_that_accepts_nothing_rejects_a_whole_canvas(asynchronous: bool) -> None:
    _, events = observe(denoised, asynchronous=asynchronous)
    account = audited(events).ledger.account("a")

    assert account is not None
    assert 2 * 3 * CANVAS == account.rejected


@near_miss("tokens/balance")
@near_miss("tokens/unexplained-drop")
@near_miss("tokens/in-flight")
@sync_and_async
@pytest.mark.parametrize("rejecting_steps", [0, 1, 20])
def test_canvases_accepted_after_rejections_are_clean(
    watched: Watched, asynchronous: bool, rejecting_steps: int
) -> None:
    denoised(watched.attach, rejecting_steps, asynchronous=asynchronous)

    assert [] == watched.violation_ids()


@near_miss("tokens/reset-on-preemption")
@near_miss("tokens/balance")
@sync_and_async
def test_a_preemption_in_the_middle_of_a_canvas_is_clean(watched: Watched, asynchronous: bool) -> None:
    driver = watched.start(canvas=CANVAS, asynchronous=asynchronous)
    for name in ("a", "b"):
        driver.add(name, PROMPT, 2 * CANVAS)
    for _ in range(4):
        driver.step(accepted=0)
    driver.preempt("b")
    driver.run()

    assert [] == watched.violation_ids()


@violates("tokens/balance")
@sync_and_async
def test_a_rejected_canvas_that_stays_counted_is_found(watched: Watched, asynchronous: bool) -> None:
    """The engine keeps rejected tokens, as with a model that samples a token beside its drafts."""
    driver = watched.start(canvas=CANVAS, asynchronous=asynchronous)
    driver.add("a", PROMPT, 2 * CANVAS)
    for _ in range(3):
        driver.step(accepted=0)
    driver.scheduler.num_sampled_tokens_per_step = 1
    for _ in range(2):
        driver.step(accepted=0)
    driver.abort("a")  # the synchronous scheduler has nothing more to schedule

    assert "tokens/balance" in watched.violation_ids()
