"""Diffusion models: a step schedules a whole canvas as drafts and samples nothing beside it.

On the real DiffusionScheduler of vLLM. Where a step accepts nothing the whole canvas is taken back; with
a model that samples one token beside its drafts, a step that samples nothing takes nothing back.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.diffusion_scheduler")

from tests.audit.checks.watched import Watched
from tests.engines.observed import audited, observe
from tests.scenarios.driving import start

from kvledger.audit.conformance.driver import Driver
from kvledger.audit.events import EngineStarted

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

CANVAS = 8
PROMPT = 40

sync_and_async = pytest.mark.parametrize("asynchronous", [False, True])


@pytest.fixture
def watched() -> Watched:
    return Watched()


def denoised(attach: Any, steps_in_vain: int = 3, **setup: Any) -> Driver:
    """Two canvases of one request, each accepted by the step after so many that accept nothing."""
    driver = start(attach, canvas=CANVAS, **setup)
    driver.add("a", PROMPT, 2 * CANVAS)
    step = 0
    while driver.in_flight or driver.scheduler.has_requests():
        turn = (step - 1) % (steps_in_vain + 1)
        if driver.step(accepted=CANVAS if turn == steps_in_vain else 0):
            step += 1
    return driver


def test_an_engine_says_that_it_samples_nothing_beside_its_canvas() -> None:
    _, events = observe(denoised)
    (started,) = [event for event in events if isinstance(event, EngineStarted)]

    assert 0 == started.configuration["sampled_beside_drafts"]


@sync_and_async
def test_each_step_in_vain_is_a_whole_canvas_rejected(asynchronous: bool) -> None:
    _, events = observe(denoised, asynchronous=asynchronous)
    account = audited(events).ledger.account("a")

    assert account is not None
    assert 2 * 3 * CANVAS == account.rejected


@near_miss("tokens/balance")
@near_miss("tokens/unexplained-drop")
@near_miss("tokens/in-flight")
@sync_and_async
@pytest.mark.parametrize("steps_in_vain", [0, 1, 20])
def test_canvases_that_are_accepted_at_last(watched: Watched, asynchronous: bool, steps_in_vain: int) -> None:
    denoised(watched.attach, steps_in_vain, asynchronous=asynchronous)

    assert [] == watched.found()


@near_miss("tokens/reset-on-preemption")
@near_miss("tokens/balance")
@sync_and_async
def test_preempted_in_the_middle_of_a_canvas(watched: Watched, asynchronous: bool) -> None:
    driver = watched.start(canvas=CANVAS, asynchronous=asynchronous)
    for name in ("a", "b"):
        driver.add(name, PROMPT, 2 * CANVAS)
    for _ in range(4):
        driver.step(accepted=0)
    driver.preempt("b")
    driver.run()

    assert [] == watched.found()


@violates("tokens/balance")
@sync_and_async
def test_a_canvas_that_is_not_taken_back(watched: Watched, asynchronous: bool) -> None:
    """As a model with a token of its own would do it: the engine keeps what nobody accepted."""
    driver = watched.start(canvas=CANVAS, asynchronous=asynchronous)
    driver.add("a", PROMPT, 2 * CANVAS)
    for _ in range(3):
        driver.step(accepted=0)
    driver.scheduler.num_sampled_tokens_per_step = 1
    for _ in range(2):
        driver.step(accepted=0)
    driver.abort("a")  # one that is not async has nothing more to schedule

    assert "tokens/balance" in watched.found()
