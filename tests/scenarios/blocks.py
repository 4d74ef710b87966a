"""Workloads for the ledger of blocks: hybrid pools, external hits, and the order of the free queue.

As in `tests.scenarios.workloads`, each workload leaves its engine idle. In each `double_allocation` workload
request `r` hits six cached blocks per group, and the connector promises four more. A filler used every other
block later, so the six hit blocks are at the head of the free queue. An engine that allocates the four blocks
of one group before it touches the six hit blocks of another group allocates these hit blocks (vLLM#44409).
"""

from typing import Any

from tests.scenarios.driving import Attach, Driver, lora, start
from tests.scenarios.registry import BOTH, HYBRID, workload

WINDOW_TOKENS = 128
LOCAL_TOKENS = 96
EXTERNAL_TOKENS = 64
FILLER_BLOCKS = 14
"""Blocks of the filler, in each group."""

THREE = ("full", "sliding", "sliding")
EXTERNAL: dict[str, Any] = {"connector": "scripted", "groups": HYBRID}


def _start(attach: Attach, groups: tuple[str, ...], **setup: Any) -> Driver:
    blocks = 1 + len(groups) * (LOCAL_TOKENS // 16 + FILLER_BLOCKS)
    return start(attach, groups=groups, blocks=blocks, sliding_window=WINDOW_TOKENS, **setup)


@workload(two_groups=EXTERNAL, three_groups=EXTERNAL | {"groups": THREE})
def double_allocation(attach: Attach = id, *, groups: Any = HYBRID, **setup: Any) -> Driver:
    driver = _start(attach, groups, **setup)
    driver.add("warm", LOCAL_TOKENS, 1)
    driver.run()
    driver.add("filler", 16 * FILLER_BLOCKS, 1)
    driver.run()
    driver.connector.answer_lookups("r", EXTERNAL_TOKENS)
    driver.add("r", 200, 3, shares=("warm", LOCAL_TOKENS))
    driver.run()
    return driver


@workload(two_groups=EXTERNAL)
def double_allocation_after_preemption(attach: Attach = id, *, groups: Any = HYBRID, **setup: Any) -> Driver:
    """`r` hits blocks that it computed itself before it was preempted."""
    driver = _start(attach, groups, max_batched_tokens=16 * FILLER_BLOCKS, **setup)
    driver.connector.answer_lookups("r", 0, None, None, EXTERNAL_TOKENS)
    driver.add("r", 250, 3)
    driver.scheduler.scheduler_config.long_prefill_token_threshold = LOCAL_TOKENS
    driver.step()
    driver.scheduler.scheduler_config.long_prefill_token_threshold = 0
    driver.preempt("r")
    driver.add("filler", 16 * FILLER_BLOCKS, 1)
    driver.run()
    return driver


@workload(**BOTH)
def shared_while_running(attach: Attach = id, **setup: Any) -> Driver:
    """Several requests hold one block, in the step that fills it and later; then all of them finish."""
    driver = start(attach, max_batched_tokens=256, **setup)
    for name in ("one", "two", "three"):
        driver.add(name, 100, 6, shares=("family", 80))
    driver.step()
    driver.add("four", 120, 2, shares=("family", 80))
    driver.run()
    driver.reset_prefix_cache()
    driver.add("five", 100, 2, shares=("family", 80))
    driver.run()
    return driver


@workload(two_groups={"groups": HYBRID}, three_groups={"groups": THREE})
def window_leaves_blocks(attach: Attach = id, *, groups: Any = HYBRID, **setup: Any) -> Driver:
    """Blocks leave the window of a long decode: null blocks replace them; other requests get them."""
    driver = start(attach, groups=groups, blocks=160, max_batched_tokens=64, sliding_window=32, **setup)
    driver.add("long", 150, 60)
    driver.add("other", 90, 40)
    for _ in range(30):
        driver.step()
    driver.add("late", 200, 10, shares=("long", 144))
    driver.run()
    return driver


@workload()
def chunks_leave_blocks(attach: Attach = id, **setup: Any) -> Driver:
    """The same with local attention in chunks: all blocks of a chunk leave when the next begins."""
    return window_leaves_blocks(attach, groups=("full", "chunked"), **setup)


@workload(**BOTH)
def drafts_rejected_at_the_window(attach: Attach = id, *, groups: Any = HYBRID, **setup: Any) -> Driver:
    """A request whose drafts are all rejected, while blocks leave its window one by one."""
    driver = start(attach, groups=groups, drafts=3, blocks=160, sliding_window=32, **setup)
    driver.add("r", 70, 80)
    while driver.in_flight or driver.scheduler.has_requests():
        driver.step(accepted=0)
    return driver


@workload("hybrid load", sliding={"groups": HYBRID}, chunks={"groups": ("full", "chunked")})
def whole_prompt_is_loaded(attach: Attach = id, **setup: Any) -> Driver:
    """The last token of a prompt that was loaded as a whole begins a window one token lower than the next."""
    driver = start(attach, connector="scripted", blocks=160, sliding_window=32, **setup)
    for name, prompt in (("r", 63), ("s", 64)):
        driver.connector.answer_lookups(name, (prompt, True))
        driver.add(name, prompt, 3)
        driver.run()
    return driver


def _one_after_another(attach: Attach, setup: dict[str, Any], *requests: dict[str, Any]) -> Driver:
    """Requests with the same first 64 tokens."""
    driver = start(attach, **setup)
    for place, of_request in enumerate(requests):
        driver.add(f"r{place}", 100, 3, shares=("family", 64), of_request=of_request)
        driver.run()
    return driver


@workload()
def classes_kept_apart(attach: Attach = id, **setup: Any) -> Driver:
    """Cache salts and LoRA adapters that differ, then the same once more, which hit their own KV."""
    classes = [{}, {"cache_salt": "alice"}, {"cache_salt": "bob"}, lora("sql", 1), lora("law", 2)]
    return _one_after_another(attach, setup, *classes, *classes)


@workload()
def adapter_named_like_a_salt(attach: Attach = id, **setup: Any) -> Driver:
    """vLLM#44701: the block hashes of a LoRA adapter and of a cache salt of the same name are equal."""
    return _one_after_another(attach, setup, lora("same", 1), {"cache_salt": "same"})


@workload()
def adapter_from_another_path(attach: Attach = id, **setup: Any) -> Driver:
    """vLLM#30931: two LoRA adapters of one name, with other weights, have equal block hashes."""
    return _one_after_another(attach, setup, lora("sql", 1, "/old"), lora("sql", 2, "/new"))


@workload(**BOTH)
def hit_beside_a_resumed_request(attach: Attach = id, **setup: Any) -> Driver:
    """In the step that resumes `resumed`, `second` hits the block just allocated for `first`."""
    driver = start(attach, **setup)
    driver.add("resumed", 20, 3)
    driver.schedule()
    driver.drain()
    driver.preempt("resumed")
    driver.add("first", 16, 1, shares=("family", 16))
    driver.add("second", 32, 3, shares=("family", 32))
    driver.run()
    return driver
