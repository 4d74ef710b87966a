"""Ordinary workloads on the real scheduler, on which an audit must find nothing.

Each workload starts an engine, passes its scheduler to `attach`, drives the engine into the state that the
workload is named for, and leaves it idle. Workloads with an external cache are in `tests.scenarios.external`.
"""

import random
from typing import Any

from tests.scenarios.driving import Attach, Driver, start
from tests.scenarios.registry import BOTH, HYBRID, workload


@workload(**BOTH)
def plain(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, **setup)
    for number in range(4):
        driver.add(f"r{number}", 30 + 17 * number, 5 + number, stop_at=3 if number == 2 else None)
    driver.run()
    return driver


@workload(**BOTH, uncached={"prefix_caching": False}, eagle={"drafts": 2, "drafter": "eagle"})
def shared_prefix(attach: Attach = id, **setup: Any) -> Driver:
    """Prompts that share a prefix: one alone, then several at a time, one of them a full hit."""
    driver = start(attach, **setup)
    driver.add("first", 100, 4)
    driver.run()
    driver.add("second", 100, 4, shares=("first", 64))
    driver.add("third", 90, 4, shares=("first", 40))
    driver.add("same", 96, 4, shares=("first", 96))
    driver.run()
    return driver


@workload(**BOTH, whole={"chunked_prefill": False, "max_model_len": 64})
def chunked(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, max_batched_tokens=64, **setup)
    longest = 60 if "max_model_len" in setup else 200
    driver.add("long", longest, 3)
    driver.add("short", 20, 3)
    driver.run()
    return driver


@workload(
    **BOTH,
    external={"connector": "scripted"},
    consumer={"connector": "scripted", "asynchronous": True, "kv_role": "kv_consumer"},
)
def preempt_prefill(attach: Attach = id, **setup: Any) -> Driver:
    """No block is free for the second chunk of `late`, so `late` is preempted and loses its first chunk."""
    driver = start(attach, blocks=12, max_batched_tokens=64, **setup)
    driver.add("early", 96, 30)
    driver.add("late", 96, 4)
    driver.run()
    return driver


@workload(
    **BOTH,
    uncached={"prefix_caching": False},
    speculative={"drafts": 3},
    async_speculative={"asynchronous": True, "drafts": 3},
)
def preempt_decode(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, blocks=13, **setup)
    for name in ("early", "late"):
        driver.add(name, 64, 60)
    driver.run()
    return driver


@workload(**BOTH)
def preempt_forced(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, max_batched_tokens=64, **setup)
    driver.add("a", 100, 8)
    driver.add("b", 50, 8)
    for turn in range(1, 40):
        driver.step()
        if turn % 4 == 0 and driver.scheduler.running:
            driver.preempt(driver.scheduler.running[-1].request_id)
    driver.run()
    return driver


@workload(producer={"asynchronous": True, "connector": "scripted", "kv_role": "kv_producer"})
def resumed_with_chunks_in_flight(attach: Attach = id, **setup: Any) -> Driver:
    """With three batches in flight, `r` resumes and hits the blocks that its chunks in flight still fill."""
    driver = start(attach, max_batched_tokens=64, **setup)
    driver.add("r", 200, 3)
    driver.schedule()
    driver.schedule()
    driver.preempt("r")
    driver.schedule()
    driver.run()
    return driver


@workload(
    sync={},
    eagle={"drafter": "eagle"},
    **{"async": {"asynchronous": True, "drafts": 3}},
    async_eagle={"asynchronous": True, "drafts": 3, "drafter": "eagle"},
)
def speculative(attach: Attach = id, *, drafts: int = 3, **setup: Any) -> Driver:
    driver = start(attach, drafts=drafts, max_batched_tokens=64, **setup)
    driver.add("a", 100, 20)
    driver.add("b", 30, 20, stop_at=7)
    driver.run()
    driver.add("c", 130, 11, shares=("a", 96))
    driver.run()
    return driver


@workload(sync={}, **{"async": {"asynchronous": True}})
def stopped_within_drafts(attach: Attach = id, **setup: Any) -> Driver:
    """`r` computes positions 50 to 53 in a step whose three drafts are accepted, and stops within them."""
    driver = start(attach, drafts=3, **setup)
    driver.add("r", 50, 16, stop_at=3)
    for _ in range(4):
        driver.step(accepted=3)
    driver.run()
    return driver


@workload(**BOTH, speculative={"asynchronous": True, "drafts": 2})
def reset_running(attach: Attach = id, **setup: Any) -> Driver:
    """The prefix cache is reset under running requests, in prefill and in decode."""
    driver = start(attach, max_batched_tokens=64, **setup)
    driver.add("a", 50, 12)
    driver.add("b", 150, 12)
    for turn in range(1, 9):
        driver.step()
        if turn % 2 == 0:
            driver.reset_prefix_cache(running=True)
    driver.run()
    return driver


@workload(
    **BOTH,
    speculative={"drafts": 3},
    async_speculative={"asynchronous": True, "drafts": 3},
)
def session(attach: Attach = id, **setup: Any) -> Driver:
    """A later chunk arrives while the session waits for it, and one arrives before the session waits."""
    driver = start(attach, max_batched_tokens=64, **setup)
    driver.add("s", 40, 4, resumable=True)
    driver.add("other", 70, 12)
    driver.run()
    driver.add("s", 90, 4, resumable=True)
    driver.step()
    driver.add("s", 20, 4, resumable=True)
    driver.run()
    driver.close("s")
    driver.run()
    return driver


@workload("session hashes")
def session_token_replaced(attach: Attach = id, **setup: Any) -> Driver:
    """The last sampled token of a turn fills a block, and the next chunk replaces it.

    Then another request has the tokens of the first turn.
    """
    driver = start(attach, **setup)
    session = driver.add("s", 29, 3, resumable=True)
    driver.run()
    said = list(session.all_token_ids)
    driver.add("s", [7, 8, 9, 10], 2, resumable=True)
    driver.run()
    driver.close("s")
    driver.run()
    driver.add("reader", [*said, *driver.prompt("tail", 8, None)], 3)
    driver.run()
    return driver


@workload("partial entries")
def prompt_ends_within_a_block(attach: Attach = id, **setup: Any) -> Driver:
    """A prompt ends within a block of 64 tokens, its output fills the block, and a prompt goes on there."""
    driver = start(attach, groups=("full", "mamba"), group_tokens=(64, 64), blocks=128, **setup)
    driver.add("first", 120, 20)
    driver.run()
    driver.add("second", 150, 4, shares=("first", 112))
    driver.run()
    return driver


@workload("full report", full={}, window={"groups": HYBRID, "sliding_window": 32})
def hits_reported(attach: Attach = id, **setup: Any) -> Driver:
    """A client asks that the blocks that its request hits are announced as KV events, too.

    With a window, `other` takes blocks of `first` that lie below its window.
    """
    driver = start(attach, blocks=22, **setup)
    driver.add("first", 100, 4)
    driver.run()
    driver.add("other", 90, 1)
    driver.run()
    driver.add("second", 120, 4, shares=("first", 96)).kv_cache_report_mode = "full"
    driver.run()
    return driver


@workload(**BOTH)
def session_of_states(attach: Attach = id, **setup: Any) -> Driver:
    """A turn of a model with states stops by a token, and a step may be in flight then."""
    driver = start(attach, groups=("full", "mamba"), blocks=128, **setup)
    driver.add("s", 40, 8, stop_at=3, resumable=True)
    driver.run()
    driver.add("s", 20, 4, resumable=True)
    driver.run()
    driver.close("s")
    driver.run()
    return driver


@workload()
def session_with_three_batches(attach: Attach = id, **setup: Any) -> Driver:
    """The next chunk is there when a turn stops, and two steps are in flight then."""
    driver = start(attach, asynchronous=True, **setup)
    driver.add("s", 16, 5, resumable=True)
    driver.add("s", 3, 4, resumable=True)
    for _ in range(20):
        while len(driver.in_flight) < 3 and driver.scheduler.has_requests():
            driver.schedule()
        if driver.in_flight:
            driver.output()
    driver.close("s")
    driver.run()
    return driver


@workload(sync={}, **{"async": {"asynchronous": True}})
def session_closed(attach: Attach = id, **setup: Any) -> Driver:
    """The session's end arrives before its turn stops, with as many steps in flight as the engine lets."""
    driver = start(attach, **setup)
    driver.add("s", 40, 3, resumable=True)
    driver.step()
    driver.close("s")
    for _ in range(3):
        driver.schedule()
    driver.run()
    return driver


@workload(**BOTH)
def pooling(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, pooling=True, max_batched_tokens=64, **setup)
    driver.add("a", 100)
    driver.add("b", 30)
    driver.run()
    driver.add("c", 100, shares=("a", 64))
    driver.run()
    return driver


@workload(**BOTH, external={"connector": "scripted", "groups": HYBRID})
def hybrid(attach: Attach = id, *, groups: Any = HYBRID, **setup: Any) -> Driver:
    """One pool with a full-attention and a sliding-window group: blocks outside the window are freed."""
    driver = start(attach, groups=groups, blocks=128, max_batched_tokens=64, **setup)
    if "connector" in setup:
        driver.connector.store("a", 96)
    driver.add("a", 200, 40)
    driver.add("b", 40, 20)
    driver.run()
    driver.add("c", 220, 8, shares=("a", 192))
    driver.run()
    return driver


@workload(**BOTH)
def oversized_prompt(attach: Attach = id, **setup: Any) -> Driver:
    """A prompt that no pool of this engine holds, and one behind it, until the client gives up."""
    driver = start(attach, blocks=12, **setup)
    driver.add("ordinary", 40, 4)
    driver.run()
    driver.add("oversized", 400, 4)
    driver.add("behind", 40, 4)
    for _ in range(2_100):
        driver.step()
    driver.abort("oversized")
    driver.run()
    return driver


@workload(**BOTH)
def priority(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, policy="priority", blocks=13, max_running=2, **setup)
    driver.add("low", 64, 60, priority=9)
    driver.step()
    driver.add("high", 64, 60, priority=0)
    driver.add("middle", 20, 5, priority=5)
    driver.run()
    return driver


@workload(
    **BOTH,
    external={"connector": "scripted"},
    async_external={"connector": "scripted", "asynchronous": True},
    async_consumer={"connector": "scripted", "asynchronous": True, "kv_role": "kv_consumer"},
    async_speculative={"asynchronous": True, "drafts": 2},
    hybrid={"groups": HYBRID},
)
def crowd(attach: Attach = id, *, seed: int = 0, requests: int = 60, **setup: Any) -> Driver:
    """Requests of all lengths in a pool too small for them, some aborted."""
    dice = random.Random(seed)
    driver = start(attach, blocks=40, max_running=6, max_batched_tokens=96, **setup)
    for number in range(requests):
        name = f"r{number}"
        length = dice.randint(1, 250)
        if driver.connector is not None and dice.random() < 0.5:
            driver.connector.store(name, dice.randint(0, 250), asynchronous=dice.random() < 0.5)
        shares = (f"family {dice.randrange(4)}", dice.randint(0, length))
        driver.add(name, length, dice.randint(1, 60), shares=shares)
        for _ in range(dice.randint(0, 4)):
            driver.step(finished_recving="all")
        if dice.random() < 0.1:
            driver.abort(f"r{dice.randint(0, number)}")
    driver.run()
    return driver
