"""The faults that `kvledger repro` is proved on: their releases, and the histories that lead to them.

A history calls only what a client, a connector or the engine core of a real deployment would. Preemptions
come from a full pool, so a history may miss; the recorder repeats it until the audit has the finding.

This file does not import vLLM: `proofs/repro.py` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.repro.crowd import Crowd, Traffic

from kvledger.audit.faults.catalogue import catalogue

History = Callable[[Crowd], None]


@dataclass(frozen=True)
class Fault:
    """A fault of a released engine, with the history that leads to it; the catalogue has the rest.

    ``release`` has the fault; ``fixed`` is the first release of the matrix without it, "" if it is not fixed.
    Both are names of `scripts/releases.py`. ``level``: the lowest level at which the audit finds it.
    """

    name: str
    finding: str
    release: str
    fixed: str
    history: History
    setup: Mapping[str, Any]
    traffic: Traffic
    start: str
    """How the engine is started: "v1", "v0" or "lmcache"."""
    level: str


CATALOGUE = catalogue().values()
FAULTS: dict[str, Fault] = {}
POOL: dict[str, Any] = {"blocks": 40, "max_running": 6, "max_batched_tokens": 96}
"""A pool too small for the traffic."""
SCRIPTED = POOL | {"connector": "scripted"}
ORDINARY = Traffic()
LOADING = Traffic(external=0.3)


def fault(
    name: str,
    *,
    setup: Mapping[str, Any] = SCRIPTED,
    traffic: Traffic = ORDINARY,
    start: str = "v1",
    level: str = "tokens",
) -> Callable[[History], History]:
    def register(history: History) -> History:
        known, proof = next((known, known.proofs[name]) for known in CATALOGUE if name in known.proofs)
        fixed = known.in_matrix(known.releases.fixed)
        FAULTS[name] = Fault(name, proof.finding, proof.release, fixed, history, setup, traffic, start, level)
        return history

    return register


# --- reports ----------------------------------------------------------------------------------------------

CALM_V0 = Traffic(prompt=(1, 120), output=(1, 40), steps=(2, 8), open_requests=5)


@fault(
    "stale-lookup",
    setup={"blocks": 64},
    traffic=CALM_V0,
    start="v0",
)
def stale_lookup(crowd: Crowd) -> None:
    """Too few blocks are free for `r`; the request that holds them evicts its hit before more are free."""
    family = crowd.new_id()
    crowd.finish(crowd.add(65, 1, shares=(family, 65)))
    crowd.add(16 * (crowd.free_blocks - 5), 70)
    for _ in range(4):
        crowd.step()
    crowd.finish(crowd.add(112, 3, shares=(family, 64)))


@fault("negative-local-hit")
def negative_local_hit(crowd: Crowd) -> None:
    """The pool is exhausted while `r` prefills; the connector has more of `r` when it resumes."""
    crowd.fill_pool(9, 4)
    request_id = crowd.new_id()
    crowd.driver.connector.store(request_id, 32, asynchronous=True)
    crowd.add(200, 3, request_id=request_id)
    crowd.step_until(lambda: crowd.is_running(request_id))
    crowd.driver.connector.store(request_id, 192, asynchronous=True)
    crowd.finish(request_id)


@fault(
    "double-allocation",
    setup=SCRIPTED | {"groups": ("full", "sliding"), "sliding_window": 128, "blocks": 60},
    level="blocks",
)
def double_allocation(crowd: Crowd) -> None:
    """`r` hits the blocks that are freed for the longest time, and the connector promises more."""
    family = crowd.new_id()
    crowd.finish(crowd.add(96, 1, shares=(family, 96)))
    for _ in range(crowd.dice.randint(0, 4)):
        crowd.arrive()
    crowd.step_until(lambda: crowd.waiting == 0 and crowd.free_blocks >= 30)
    request_id = crowd.new_id()
    crowd.driver.connector.store(request_id, 160)
    crowd.finish(crowd.add(200, 3, request_id=request_id, shares=(family, 96)))


@fault(
    "promise-not-loaded",
    setup=POOL,
    start="lmcache",
)
def promise_not_loaded(crowd: Crowd) -> None:
    """`r` is preempted in decode and loses its local KV; LMCache has saved 64 tokens of it by then."""
    crowd.fill_pool(7, 5)
    request_id = crowd.new_id()
    crowd.store.answers[request_id] = [0, 64]
    crowd.finish(crowd.add(70, 60, request_id=request_id))


@fault(
    "promise-not-loaded-bundled",
    setup=POOL | {"adapter": "bundled"},
    start="lmcache",
)
def promise_not_loaded_bundled(crowd: Crowd) -> None:
    """The same in the adapter that vLLM bundles."""
    promise_not_loaded(crowd)


SHORT = Traffic(prompt=(1, 16), output=(1, 10), open_requests=6, families=0)
"""Requests with fewer tokens than LMCache's chunk of 32."""


@fault(
    "tracker-lag",
    setup=POOL | {"asynchronous": True, "decode": True},
    traffic=SHORT,
    start="lmcache",
)
def tracker_lag(crowd: Crowd) -> None:
    """`r` decodes several chunks, which LMCache should save."""
    crowd.finish(crowd.add(70, 60), arrivals=True)


# --- findings ---------------------------------------------------------------------------------------------

ASYNC = SCRIPTED | {"asynchronous": True}


@fault("placeholder-leak", setup=ASYNC, traffic=LOADING)
def placeholder_leak(crowd: Crowd) -> None:
    """The synchronous load of `r` fails in its third block. `r` shares a block with other requests."""
    request_id = crowd.new_id()
    crowd.driver.connector.store(request_id, 112)
    crowd.driver.fails[request_id] = 2
    crowd.finish(crowd.add(140, 5, request_id=request_id, shares=("family 0", 16)), arrivals=True)


@fault("failed-load-counted", traffic=LOADING)
def failed_load_counted(crowd: Crowd) -> None:
    """The synchronous load of `r` fails in its third block."""
    placeholder_leak(crowd)


@fault("failed-load-as-local-hit")
def failed_load_as_local_hit(crowd: Crowd) -> None:
    """The same in a release that counts the failed tokens as a local hit."""
    placeholder_leak(crowd)


FAIL = SCRIPTED | {"load_failure_policy": "fail"}


@fault("ended-before-it-ran", setup=FAIL)
def ended_before_it_ran(crowd: Crowd) -> None:
    """The asynchronous load of `r` fails, which ends `r` before its first step."""
    request_id = crowd.new_id()
    crowd.driver.connector.store(request_id, 96, asynchronous=True)
    crowd.driver.fails[request_id] = 2
    crowd.finish(crowd.add(200, 5, request_id=request_id), arrivals=True)


@fault("ended-before-it-ran-clamped", setup=FAIL)
def ended_before_it_ran_clamped(crowd: Crowd) -> None:
    """The same in the release that clamps the negative figure."""
    ended_before_it_ran(crowd)


@fault("reset-drops-valid-token", setup=POOL | {"asynchronous": True})
def reset_drops_valid_token(crowd: Crowd) -> None:
    """The prefix cache is reset while `r` is in prefill."""
    request_id = crowd.add(220, 8)

    def in_prefill() -> bool:
        computed: int = crowd.driver.scheduler.requests[request_id].num_computed_tokens
        return 0 < computed < 200

    crowd.step_until(lambda: not crowd.is_open(request_id) or in_prefill())
    if crowd.is_open(request_id):
        crowd.driver.reset_prefix_cache(running=True)
        crowd.finish(request_id, arrivals=True)


@fault(
    "rejection-of-a-past-life",
    setup=POOL | {"asynchronous": True, "drafts": 2},
)
def rejection_of_a_past_life(crowd: Crowd) -> None:
    """The prefix cache is reset while a step with drafts of `r` is in flight."""
    request_id = crowd.add(40, 20)
    crowd.step_until(lambda: not crowd.is_open(request_id) or crowd.is_running(request_id))
    for _ in range(4):
        crowd.step()
    crowd.driver.reset_prefix_cache(running=True)
    crowd.finish(request_id, arrivals=True)


@fault("load-rounded-up")
def load_rounded_up(crowd: Crowd) -> None:
    """The connector promises tokens that end within a block."""
    request_id = crowd.new_id()
    crowd.driver.connector.answer_lookups(request_id, *[(42, True)] * 100)
    crowd.add(100, 5, request_id=request_id)
    crowd.step_until(lambda: crowd.is_running(request_id))
    crowd.driver.connector.script.answers.clear()
    crowd.finish(request_id, arrivals=True)


@fault(
    "never-fits-again",
    setup={"blocks": 24, "preemption_mode": "swap"},
    traffic=Traffic(prompt=(1, 60), output=(1, 20), steps=(2, 8), open_requests=3, families=0),
    start="v0",
)
def never_fits_again(crowd: Crowd) -> None:
    """`r` is swapped out for lack of a block, and is longer than the whole pool by then."""
    crowd.finish(crowd.add(64, 600))


@fault("failed-load-stays-cached", traffic=LOADING, level="blocks")
def failed_load_stays_cached(crowd: Crowd) -> None:
    """The client of `r` disconnects after its load failed; another client sends the same prompt."""
    request_id = crowd.new_id()
    driver = crowd.driver
    driver.connector.store(request_id, 112)
    driver.fails[request_id] = 2
    crowd.add(200, 5, request_id=request_id)
    crowd.step_until(lambda: request_id not in driver.fails or not crowd.is_open(request_id))
    if crowd.is_open(request_id):
        driver.abort(request_id)
    crowd.finish(crowd.add(200, 5, shares=(request_id, 200)), arrivals=True)
