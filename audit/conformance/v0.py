"""Courses of vLLM's v0 scheduler, and a command that audits them all.

``CLEAN`` are ordinary workloads in which every look-up is made by the attempt that admits.
``STALE`` are one course for each branch of v0's scheduler that leaves without an admission after it
has looked up (vLLM PR #18957): 0.9.1 keeps the answer, 0.9.2 forgets it. In each the cache changes
before request ``r`` is admitted, or ``r`` ends. ``CROWDED`` are random, with failed attempts among
them.

``python -m kvledger.audit.conformance.v0`` prints one JSON line a course: what was found, whether
all accounts balance and are closed, and doubts. It needs vLLM 0.9 and exits 1 for a course that
could not be run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from kvledger.audit.conformance.v0_driver import Attach, Driver, start

Course = Callable[..., Driver]

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


class Register(dict[str, Course]):
    """Courses by name; each ``variants`` of an engine is a course of its own."""

    def __call__(self, **variants: dict[str, Any]) -> Callable[[Course], Course]:
        def register(course: Course) -> Course:
            for suffix, setup in (variants or {"": {}}).items():
                self[course.__name__ + suffix] = _variant(course, setup)
            return course

        return register


def _variant(course: Course, setup: dict[str, Any]) -> Course:
    def run(attach: Attach = id, **more: Any) -> Driver:
        return course(attach, **{**setup, **more})

    return run


CLEAN, STALE, CROWDED = Register(), Register(), Register()


# --- clean ------------------------------------------------------------------------------------------


@CLEAN(**VARIANTS, _uncached={"prefix_caching": False})
def plain(attach: Attach, **setup: Any) -> Driver:
    driver = start(attach, **setup)
    for number in range(4):
        driver.add(f"r{number}", 30 + 17 * number, 5 + number)
    driver.run()
    return driver


@CLEAN(**VARIANTS)
def shared_prefix(attach: Attach, **setup: Any) -> Driver:
    """Alone, at the same time, in full, and by one token less than a block."""
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
def together(attach: Attach, **setup: Any) -> Driver:
    """The same prompt twice in one step: the second shares blocks that are still to be computed."""
    driver = start(attach, **setup)
    driver.add("a", 32, 4, shares=("f", 32))
    driver.add("b", 32, 4, shares=("f", 32))
    driver.run()
    return driver


@CLEAN(
    **VARIANTS,
    _swapped={"preemption_mode": "swap"},
    _swapped_asynchronous={"preemption_mode": "swap", "asynchronous": True},
    _uncached={"prefix_caching": False},
)
def too_few_blocks(attach: Attach, **setup: Any) -> Driver:
    """Both grow until one is preempted; nothing of what it had is found again by an attempt that fails."""
    driver = start(attach, blocks=13, **setup)
    driver.add("early", 64, 60)
    driver.add("late", 64, 60)
    driver.run()
    return driver


@CLEAN(**VARIANTS)
def aborted(attach: Attach, **setup: Any) -> Driver:
    """Before a step, in prefill and in decode."""
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
def capped(attach: Attach, **setup: Any) -> Driver:
    """A sequence that reaches the model's limit."""
    driver = start(attach, max_model_len=64, **setup)
    driver.add("r", 50, 100)
    driver.run()
    return driver


@CLEAN()
def pooling(attach: Attach, **setup: Any) -> Driver:
    driver = start(attach, pooling=True, **setup)
    driver.add("a", 100)
    driver.add("b", 30)
    driver.run()
    return driver


@CLEAN(**VARIANTS)
def partial_prefills(attach: Attach, **setup: Any) -> Driver:
    """Two prompts in chunks side by side, where chunks are on."""
    driver = start(attach, partial_prefills=2 if "chunked_prefill" in setup else 1, **setup)
    driver.add("a", 150, 4)
    driver.step()
    driver.add("b", 120, 4)
    driver.run()
    driver.add("c", 150, 4, shares=("own a", 0))
    driver.run()
    return driver


# --- a look-up that is kept -----------------------------------------------------------------------------


def _warm(driver: Driver, **how: Any) -> None:
    """Leave 64 tokens of the family "warm" in the cache."""
    driver.add("warm", 65, 1, shares=("warm", 65), **how)
    driver.run()


@STALE(**VARIANTS)
def too_few_blocks_at_first(attach: Attach, **setup: Any) -> Driver:
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
def no_budget_of_requests(attach: Attach, **setup: Any) -> Driver:
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
def no_budget_of_tokens(attach: Attach, **setup: Any) -> Driver:
    """The prompt before it takes the step's tokens, and the blocks of the hit."""
    driver = start(attach, blocks=19, max_batched_tokens=256, **setup)
    _warm(driver)
    driver.add("hog", 250, 20)
    driver.add("r", 100, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(_sync={"chunked_prefill": True}, _asynchronous={"chunked_prefill": True, "asynchronous": True})
def no_budget_of_chunks(attach: Attach, **setup: Any) -> Driver:
    """Less than a block of the step's tokens is left: nothing of its prompt can be scheduled."""
    driver = start(attach, blocks=20, max_batched_tokens=64, **setup)
    _warm(driver)
    driver.add("hog", 184, 40)
    driver.add("r", 100, 3, shares=("warm", 64))
    driver.run()
    return driver


@STALE(**VARIANTS)
def no_room_for_its_lora(attach: Attach, **setup: Any) -> Driver:
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
def no_embeds_beside_tokens(attach: Attach, **setup: Any) -> Driver:
    """A step takes token prompts or embedded ones; the next prompt of tokens evicts the hit."""
    driver = start(attach, blocks=24, **setup)
    _warm(driver, embeds=True)
    driver.add("a", 40, 2)
    driver.add("r", 100, 3, embeds=True)
    driver.add("flood", 300, 2)
    driver.run()
    return driver


@STALE(_sync={}, _asynchronous={"asynchronous": True})
def preempts_by_priority(attach: Attach, **setup: Any) -> Driver:
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
def preempts_by_priority_past_swapped(attach: Attach, **setup: Any) -> Driver:
    """While anybody is swapped out no prefill is tried: only the preemption looks up."""
    driver = start(attach, policy="priority", preemption_mode="swap", blocks=16, max_running=2, **setup)
    _warm(driver)
    driver.add("low", 100, 90, priority=9)
    driver.add("lower", 100, 90, priority=10)
    while not driver.scheduler.swapped:
        driver.step()
    driver.add("r", 112, 3, shares=("warm", 64), priority=1)
    driver.run()
    return driver


@STALE(_sync={}, _chunked={"chunked_prefill": True})
def ignored_too_long(attach: Attach, **setup: Any) -> Driver:
    """Longer than the model's limit: its look-up is left behind."""
    driver = start(attach, max_batched_tokens=256, max_model_len=256, **setup)
    driver.add("r", 300)
    driver.add("other", 50, 3)
    driver.run()
    return driver


@STALE(**VARIANTS)
def ignored_never_fits(attach: Attach, **setup: Any) -> Driver:
    """More blocks than there are."""
    driver = start(attach, blocks=8, **setup)
    driver.add("r", 200)
    driver.add("other", 50, 3)
    driver.run()
    return driver


@STALE(**VARIANTS)
def aborted_after_an_attempt(attach: Attach, **setup: Any) -> Driver:
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


# --- by chance ------------------------------------------------------------------------------------------


@CROWDED(
    **VARIANTS,
    _priority={"policy": "priority"},
    _priority_asynchronous={"policy": "priority", "asynchronous": True},
    _swapped={"preemption_mode": "swap"},
    _lora={"max_loras": 1},
)
def crowd(attach: Attach, *, seed: int = 0, requests: int = 60, **setup: Any) -> Driver:
    """Requests of all lengths in a pool too small for them, some aborted."""
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


COURSES: dict[str, Course] = {**CLEAN, **STALE, **CROWDED}


# --- the command ------------------------------------------------------------------------------------------


class Report(msgspec.Struct):
    """One course, audited. ``balanced``: accounts are closed and every identity of theirs holds."""

    course: str
    findings: list[tuple[str, str | None]]
    balanced: bool
    doubts: list[str]


def audited(name: str, **more: Any) -> Report:
    """Run a course under observation and audit what was seen."""
    from kvledger.audit.auditor import Auditor
    from kvledger.audit.engines import host_version
    from kvledger.audit.engines.v0 import V0Observer
    from kvledger.audit.recorder import MemoryRecorder

    sink, observers = MemoryRecorder(), []

    def attach(scheduler: Any) -> None:
        observer = V0Observer(scheduler, sink, version=host_version())
        observer.start()
        observers.append(observer)

    COURSES[name](attach, **more)
    for observer in observers:
        observer.stop("exit")
    auditor = Auditor(keep_closed=True, debug=True)
    auditor.feed_all(sink.take())
    findings = sorted({(found.id, found.request) for found in auditor.violations}, key=str)
    return Report(name, findings, _balanced(auditor.ledger), auditor.doubts)


def _balanced(ledger: Any) -> bool:
    if ledger.open:
        return False
    for account in ledger.accounts():
        one = account.freeze()
        work = one.first_prompt + one.first_output + sum(one.rework.values())
        if one.scheduled != work + one.rejected + one.overrun or one.suspense:
            return False
        for settled in one.settlements:
            sources = settled.local + settled.external + settled.computed + settled.unattained
            if sources != settled.prompt_tokens - settled.carried:
                return False
    return True


def main() -> int:
    """One JSON line a course."""
    import logging

    logging.disable(logging.WARNING)
    for name in COURSES:
        print(msgspec.json.encode(audited(name)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
