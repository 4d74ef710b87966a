"""Workloads in which engines count a figure by a rule of their own.

As in `tests.scenarios.workloads`, each workload leaves its engine idle, and an audit finds no violation.
`kvledger.audit.checks.figures` has the figures and the rules.
"""

from typing import Any

from tests.scenarios.driving import Attach, Driver, start
from tests.scenarios.registry import BOTH, workload

EXTERNAL: dict[str, dict[str, Any]] = {
    name: {"connector": "scripted"} | setup for name, setup in BOTH.items()
}


@workload(**EXTERNAL, uncached={"connector": "scripted", "prefix_caching": False})
def prompt_logprobs(attach: Attach = id, **setup: Any) -> Driver:
    """A request with prompt logprobs may not read a cache; others read both."""
    driver = start(attach, **setup)
    driver.connector.store("r", 96)
    driver.connector.store("exempt", 96)
    driver.add("r", 150, 3)
    driver.run()
    driver.add("exempt", 150, 3, shares=("r", 64), prompt_logprobs=True)
    driver.run()
    return driver


@workload(sync={"drafts": 3}, **{"async": {"asynchronous": True, "drafts": 3}})
def padded_decode(attach: Attach = id, **setup: Any) -> Driver:
    """A request with one token to compute joins running decodes with drafts."""
    driver = start(attach, **setup)
    driver.add("long", 100, 30)
    for _ in range(4):
        driver.step()
    driver.add("hit", 97, 6, shares=("long", 96))
    driver.run()
    return driver


@workload()
def stop_within_drafts(attach: Attach = id, **setup: Any) -> Driver:
    """The model accepts three drafts; the second one is the stop token."""
    driver = start(attach, drafts=3, **setup)
    driver.add("r", 50, 20, stop_at=3)
    driver.step()
    driver.step(accepted=3)
    driver.run()
    return driver


@workload(**BOTH)
def samples_of_one_request(attach: Attach = id, **setup: Any) -> Driver:
    """Two samples, with ids as vLLM's front end makes them."""
    driver = start(attach, **setup)
    for sample in range(2):
        driver.add(f"{sample}_cmpl-r-0-1a2b3c4d", 60, 3, shares=("r", 60))
    driver.run()
    return driver


@workload(sync={"connector": "scripted", "kv_role": "kv_consumer"})
def handed_over(attach: Attach = id, **setup: Any) -> Driver:
    """A decode engine gets the KV of a whole prompt from a prefill engine."""
    driver = start(attach, **setup)
    driver.connector.store("r", 160, asynchronous=True)
    driver.add("r", 170, 3, transfer={"do_remote_prefill": True, "do_remote_decode": False})
    driver.run()
    return driver


@workload(**EXTERNAL)
def local_hit_fails(attach: Attach = id, **setup: Any) -> Driver:
    """A synchronous load fails, and half of the local hit below it is reported as invalid too."""
    driver = start(attach, **setup)
    driver.add("warm", 64, 1)
    driver.run()
    driver.connector.answer_lookups("r", 96)
    driver.add("r", 200, 3, shares=("warm", 64))
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[2:10])
    driver.run()
    return driver


@workload(**EXTERNAL)
def abort_before_output(attach: Attach = id, **setup: Any) -> Driver:
    """Requests are aborted in mid-prefill and while they wait for remote KV."""
    driver = start(attach, max_batched_tokens=64, **setup)
    driver.add("prefill", 200, 3)
    driver.step()
    driver.abort("prefill")
    driver.drain()
    driver.connector.store("waits", 96, asynchronous=True)
    driver.add("waits", 150, 3)
    driver.step()
    driver.abort("waits")
    driver.run()
    return driver


@workload(**BOTH)
def preempted_in_prefill(attach: Attach = id, **setup: Any) -> Driver:
    """A request loses its first chunk, and computes it again before its first output."""
    driver = start(attach, max_batched_tokens=64, **setup)
    driver.add("r", 150, 3)
    driver.step()
    driver.drain()
    driver.preempt("r")
    driver.reset_prefix_cache()
    driver.run()
    return driver


@workload(**BOTH)
def attempts_before_admission(attach: Attach = id, **setup: Any) -> Driver:
    """A request is looked up in every step until the blocks for it are free."""
    driver = start(attach, blocks=9, **setup)
    driver.add("first", 64, 40)
    driver.step()
    driver.add("second", 100, 3, shares=("first", 32))
    driver.run()
    return driver
