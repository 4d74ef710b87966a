"""Workloads with an external cache: hits, waits, failures, aborts and delayed frees.

As in `tests.scenarios.workloads`, each workload leaves its engine idle. A script gives the answers of the
external cache, and the workload names the blocks whose load fails.
"""

from typing import Any

from tests.scenarios.driving import Attach, Driver, start
from tests.scenarios.registry import BOTH, HYBRID, REPLAY, workload


@workload(**BOTH)
def abort_everywhere(attach: Attach = id, **setup: Any) -> Driver:
    """Aborts while waiting, in prefill, in decode, in flight, when preempted, and waiting for remote KV."""
    driver = start(attach, connector="scripted", max_batched_tokens=64, max_running=4, **setup)
    driver.add("waiting", 50)
    driver.abort("waiting")
    driver.add("prefill", 200)
    driver.step()
    driver.abort("prefill")
    for name in ("decode", "flying", "preempted"):
        driver.add(name, 20)
    for _ in range(3):
        driver.step()
    driver.abort("decode")
    driver.preempt("preempted")
    driver.abort("preempted")
    driver.schedule()
    driver.abort("flying")
    driver.drain()
    for name in ("remote", "arrived"):
        driver.connector.answer_lookups(name, (96, True))
        driver.add(name, 150)
    while "arrived" not in driver.runner.loading:
        driver.step()
    driver.abort("remote")
    driver.schedule()
    driver.drain()
    driver.schedule()
    while driver.in_flight:
        driver.output(finished_recving=driver.runner.loading & {"arrived"})
    driver.abort("arrived")
    driver.run()
    return driver


@workload(**BOTH)
def external_sync(attach: Attach = id, **setup: Any) -> Driver:
    """An external hit, a deferred lookup, and a prompt whose external part is a local hit."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.store("a", 96)
    driver.connector.answer_lookups("b", None, None, 64)
    driver.connector.store("c", 96)
    driver.add("a", 150, 3)
    driver.add("b", 100, 3)
    driver.run()
    driver.add("c", 150, 3, shares=("a", 128))
    driver.run()
    return driver


@workload(**BOTH, consumer={"asynchronous": True, "kv_role": "kv_consumer"})
def external_async(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, connector="scripted", **setup)
    driver.connector.store("a", 96, asynchronous=True)
    driver.connector.store("b", 160, asynchronous=True)
    driver.connector.store("full", 96, asynchronous=True)
    driver.add("a", 150, 3)
    driver.add("other", 40, 9)
    for _ in range(3):
        driver.step()
    driver.add("b", 200, 3, shares=("a", 64))
    driver.add("full", 96, 3)
    driver.run()
    return driver


@workload(**BOTH)
def states_cut(attach: Attach = id, **setup: Any) -> Driver:
    """The connector cuts the last token off a prompt, whose states it could not hand over."""
    driver = start(
        attach, connector="scripted", groups=("full", "mamba"), max_batched_tokens=32, blocks=128, **setup
    )
    driver.connector.script.cut.add("r")
    driver.add("r", 64, 1)
    driver.run()
    return driver


@workload(**BOTH)
def states_hit_between_checkpoints(attach: Attach = id, **setup: Any) -> Driver:
    """A prompt shares a prefix that ends where no state was kept, and the connector has nothing more."""
    driver = start(attach, connector="scripted", groups=("full", "mamba"), blocks=128, **setup)
    driver.add("warm", 96, 1)
    driver.run()
    driver.add("r", 96, 3, shares=("warm", 48))
    driver.run()
    return driver


@workload("replayed window", **BOTH)
def replayed_window(attach: Attach = id, **setup: Any) -> Driver:
    """Hits within the replayed window of 64 tokens, which are given up, and longer ones.

    The connector is asked before the engine gives a hit up.
    """
    driver = start(attach, connector="scripted", groups=REPLAY, blocks=160, **setup)
    driver.add("warm", 96, 1)
    driver.run()
    for name, local, external in (
        ("short", 48, 0),
        ("short together", 16, 32),
        ("short to load", 16, (32, True)),
        ("long", 96, 0),
        ("long together", 48, 96),
        ("long to load", 48, (96, True)),
    ):
        driver.connector.answer_lookups(name, external)
        driver.add(name, 200, 3, shares=("warm", local))
        driver.run()
    return driver


@workload(**BOTH)
def external_preempted(attach: Attach = id, **setup: Any) -> Driver:
    """Preempt a request with external tokens; later lookups hit more, fewer and no external tokens."""
    driver = start(attach, connector="scripted", max_batched_tokens=64, **setup)
    driver.connector.answer_lookups("r", 64, (96, True), 32, 0)
    driver.add("r", 200, 6)
    for _ in range(3):
        driver.step()
        driver.drain()
        driver.preempt("r")
        driver.reset_prefix_cache()
        while not driver.scheduler.running:
            driver.step(finished_recving="all")
    driver.run()
    return driver


@workload("dropped output", **BOTH)
def resumed_beside_a_finished_load(attach: Attach = id, **setup: Any) -> Driver:
    """`a` is preempted between two steps. In the next one it resumes, and `b`, loaded, runs one token."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.answer_lookups("b", (96, True))
    driver.add("a", 40, 9)
    driver.step()
    driver.step()
    driver.add("b", 96, 4)
    driver.step()
    driver.step(finished_recving="all")
    driver.preempt("a", drop=True)
    driver.run()
    return driver


def _fail_load(driver: Driver, first_failed: int, asynchronous: bool) -> Driver:
    """Fail the load of the external blocks of `r` from index `first_failed` on; `r` has 10 such blocks."""
    driver.connector.answer_lookups("r", (160, asynchronous))
    driver.add("r", 200, 3)
    driver.add("other", 40, 6)
    driver.schedule()
    failed = driver.blocks("r")[first_failed:10]
    driver.output(invalid_blocks=failed, finished_recving=["r"] if asynchronous else ())
    driver.run()
    return driver


@workload(**BOTH)
def load_failure_sync(attach: Attach = id, **setup: Any) -> Driver:
    return _fail_load(start(attach, connector="scripted", **setup), 4, False)


@workload(**BOTH)
def load_failure_sync_policy_fail(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, connector="scripted", load_failure_policy="fail", **setup)
    return _fail_load(driver, 4, False)


@workload(**BOTH)
def load_failure_async_partial(attach: Attach = id, **setup: Any) -> Driver:
    return _fail_load(start(attach, connector="scripted", **setup), 4, True)


@workload(sync={}, loads_async={"asynchronous_load": True})
def load_failure_in_a_window(attach: Attach = id, asynchronous_load: bool = False, **setup: Any) -> Driver:
    """Block 8 fails, and the load of ten blocks filled the last two only: the others lie below the window."""
    driver = start(attach, connector="scripted", groups=("sliding",), sliding_window=32, **setup)
    return _fail_load(driver, 8, asynchronous_load)


@workload(**BOTH)
def load_failure_async_total(attach: Attach = id, **setup: Any) -> Driver:
    return _fail_load(start(attach, connector="scripted", **setup), 0, True)


@workload(**{"async": {"asynchronous": True}})
def load_failure_sync_before_next_output(attach: Attach = id, **setup: Any) -> Driver:
    """The output of a step in flight at the failure is delivered before `r` computes the tokens again."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 3)
    driver.schedule()
    failed = driver.blocks("r")[4:10]
    driver.schedule()
    driver.output(invalid_blocks=failed)
    driver.run()
    return driver


@workload(**{"async": {"asynchronous": True}})
def load_failure_of_a_shared_block(attach: Attach = id, **setup: Any) -> Driver:
    """`waits` and `r` share a block, which the asynchronous load of `waits` reports as invalid."""
    driver = start(attach, connector="scripted", **setup)
    driver.add("warm", 16, 1)
    driver.run()
    driver.connector.answer_lookups("waits", (64, True))
    driver.add("waits", 100, 2, shares=("warm", 16))
    driver.schedule()
    driver.add("r", 70, 3, shares=("warm", 16))
    driver.schedule()
    driver.schedule()
    driver.output()
    driver.output(invalid_blocks=driver.blocks("waits")[:1], finished_recving=["waits"])
    driver.run()
    return driver


@workload(**BOTH)
def load_failure_recomputed_in_chunks(attach: Attach = id, **setup: Any) -> Driver:
    """A synchronous load fails; equal steps compute its tokens again, and the last one ends `r`."""
    driver = start(attach, connector="scripted", max_batched_tokens=32, **setup)
    driver.connector.answer_lookups("r", 112)
    driver.add("r", 160, 1)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[2:7])
    driver.run()
    return driver


@workload()
def load_failure_read_by_a_neighbour(attach: Attach = id, **setup: Any) -> Driver:
    """Request `b` shares blocks of `r` whose load fails, and runs on while `r` computes them in chunks."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.answer_lookups("r", 112)
    driver.connector.answer_lookups("b", 0)
    driver.add("r", 120, 8)
    driver.add("b", 120, 8, shares=("r", 112))
    driver.schedule()
    scheduler = driver.scheduler
    for config in (scheduler, scheduler.scheduler_config):
        config.max_num_scheduled_tokens = config.max_num_batched_tokens = 64
    scheduler.scheduler_config.long_prefill_token_threshold = 32
    driver.output(invalid_blocks=driver.blocks("r")[2:7])
    driver.run()
    return driver


@workload(**BOTH)
def load_failure_after_a_preemption(attach: Attach = id, **setup: Any) -> Driver:
    """Request `r` is preempted while the step that loads for it is in flight, and the load fails.

    Request `r` resumes with a hit on the failed blocks, and `next` has the same hit.
    """
    driver = start(attach, connector="scripted", **setup)
    driver.connector.answer_lookups("r", 112, 0)
    driver.connector.answer_lookups("next", 0)
    driver.add("r", 120, 3)
    driver.schedule()
    failed = driver.blocks("r")[2:7]
    driver.preempt("r")
    driver.output(invalid_blocks=failed)
    driver.run()
    driver.add("next", 160, 3, shares=("r", 112))
    driver.run()
    return driver


@workload()
def load_failure_then_reset(attach: Attach = id, **setup: Any) -> Driver:
    """A synchronous load fails, and the cache is reset before the tokens are computed again."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.answer_lookups("r", 112)
    driver.add("r", 160, 1)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[2:7])
    driver.reset_prefix_cache(running=True)
    driver.run()
    return driver


@workload(**BOTH)
def load_failure_async_policy_fail(attach: Attach = id, **setup: Any) -> Driver:
    driver = start(attach, connector="scripted", load_failure_policy="fail", **setup)
    return _fail_load(driver, 4, True)


@workload("failed load as a whole", **BOTH, groups={"groups": HYBRID, "blocks": 128})
def load_failure_as_a_whole(attach: Attach = id, **setup: Any) -> Driver:
    """The worker reports a failed request instead of failed blocks."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.answer_lookups("r", (160, True))
    driver.add("r", 200, 3)
    driver.schedule()
    driver.output(failed_recving=["r"])
    driver.run()
    return driver


@workload(**BOTH)
def delayed_free(attach: Attach = id, **setup: Any) -> Driver:
    """The connector keeps a finished request's blocks until its transfer ends."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.script.delay_free.update(["a", "b"])
    driver.add("a", 100, 2)
    driver.add("b", 50, 9)
    for _ in range(5):
        driver.step()
    driver.abort("b")
    driver.run()
    return driver


@workload("deferred free", **{"async": {"asynchronous": True}})
def load_after_an_abort(
    attach: Attach = id, *, loads: bool = True, ends: str = "abort", **setup: Any
) -> Driver:
    """Request w has two steps in flight when its life ends. Request r needs its blocks for a load.

    The first step computes the prompt and the second one a token in the seventh block.
    """
    driver = start(attach, connector="scripted", blocks=10, **setup)
    if loads:
        driver.connector.store("r", 96, asynchronous=True)
    driver.add("w", 100, 20)
    driver.schedule()
    driver.schedule()
    getattr(driver, ends)("w")
    if ends == "preempt":
        driver.abort("w")
    driver.output()
    driver.add("r", 120, 1)
    driver.run()
    return driver


@workload(**BOTH)
def session_delayed_free(attach: Attach = id, **setup: Any) -> Driver:
    """A session ends while it waits for its next chunk, and the connector keeps its blocks for a while."""
    driver = start(attach, connector="scripted", **setup)
    driver.connector.script.delay_free.add("s")
    driver.add("s", 40, 3, resumable=True)
    driver.add("other", 30, 12)
    for _ in range(6):
        driver.step()
    driver.close("s")
    driver.step()
    driver.run()
    return driver
