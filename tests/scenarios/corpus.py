"""Histories that the real scheduler is driven into, to the token.

One function for each golden history, under the history's own name. Each starts an engine, shows its
scheduler to `attach`, drives request `r` through the history and leaves the engine idle. Requests
with other names only prepare the pool. Blocks hold 16 tokens.

`SCENARIOS` also holds every workload of the modules named in `REGISTERED`. As a program, this lists
them, and says of each that the installed vLLM can't be driven through what it lacks.
"""

from collections.abc import Callable

from tests.scenarios import blocks, external, workloads
from tests.scenarios.driving import Attach, Driver, start
from tests.scenarios.registry import WORKLOADS, Drive, Scenario

REGISTERED = (workloads, external, blocks)
HISTORIES: dict[str, Scenario] = {}
"""Scenario by the name of the golden history."""


def _history(title: str, *requires: str) -> Callable[[Drive], Drive]:
    def register(drive: Drive) -> Drive:
        HISTORIES[title] = Scenario(drive.__name__, drive, requires=frozenset(requires))
        return drive

    return register


def _warm(driver: Driver, tokens: int) -> None:
    """Leave the first `tokens` of the family "warm" in the prefix cache."""
    driver.add("warm", tokens, 1)
    driver.run()


@_history("cold prompt, three tokens out")
def cold(attach: Attach = id) -> Driver:
    driver = start(attach)
    driver.add("r", 100, 3)
    driver.run()
    return driver


@_history("local prefix hit")
def local_hit(attach: Attach = id) -> Driver:
    driver = start(attach)
    _warm(driver, 64)
    driver.add("r", 100, 2, shares=("warm", 64))
    driver.run()
    return driver


@_history("chunked prefill")
def chunked_prefill(attach: Attach = id) -> Driver:
    driver = start(attach, max_batched_tokens=128)
    driver.add("r", 200, 2)
    driver.run()
    return driver


@_history("external, synchronous, loaded")
def external_synchronous(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    driver.connector.say("r", 160)
    driver.add("r", 200, 1)
    driver.run()
    return driver


@_history("external, asynchronous, loaded before it runs")
def external_asynchronous(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    _warm(driver, 32)
    driver.connector.say("r", (128, True))
    driver.add("r", 200, 1, shares=("warm", 32))
    driver.run()
    return driver


@_history("full external hit, last token executed again")
def full_external_hit(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    driver.connector.say("r", (96, True))
    driver.add("r", 96, 1)
    driver.run()
    return driver


@_history("vLLM#36752: preempted in mid-prefill, asked again")
def asked_again_after_preemption(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted", max_batched_tokens=56)
    driver.connector.say("r", (32, True), (160, True))
    driver.add("r", 200, 1)
    driver.step(finished_recving=["r"])
    driver.step()
    driver.preempt("r")
    driver.reset_prefix_cache()
    driver.run()
    return driver


@_history("preempted in decode, resumed from the cache")
def resumed_from_cache(attach: Attach = id) -> Driver:
    driver = start(attach)
    driver.add("r", 64, 5)
    for _ in range(3):
        driver.step()
    driver.preempt("r")
    driver.run()
    return driver


@_history("preempted in decode, resumed cold")
def resumed_cold(attach: Attach = id) -> Driver:
    driver = start(attach)
    driver.add("r", 64, 3)
    for _ in range(2):
        driver.step()
    driver.preempt("r")
    driver.reset_prefix_cache()
    driver.run()
    return driver


@_history("LMCache#1969: resumed, local then external", "deferred lookup")
def resumed_local_then_external(attach: Attach = id) -> Driver:
    """While `r` is deferred, a filler takes all of the pool but the first block that `r` left."""
    driver = start(attach, connector="scripted", blocks=6)
    driver.connector.say("r", 0, None, (18, True))
    driver.add("r", 34, 16)
    for _ in range(15):
        driver.step()
    driver.preempt("r")
    driver.add("filler", 64, 1)
    driver.run()
    return driver


@_history("asynchronous load fails in part, recomputed", "failed load")
def asynchronous_load_fails_in_part(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    driver.connector.say("r", (160, True))
    driver.add("r", 200, 1)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:], finished_recving=["r"])
    driver.run()
    return driver


@_history("asynchronous load fails wholly, looked up anew", "failed load")
def asynchronous_load_fails_wholly(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    driver.connector.say("r", (160, True))
    driver.add("r", 200, 1)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r"), finished_recving=["r"])
    driver.run()
    return driver


@_history("speculative: 3 drafts, 1 accepted")
def three_drafts(attach: Attach = id) -> Driver:
    driver = start(attach, drafts=3)
    driver.add("r", 50, 7)
    driver.step()
    driver.step(accepted=1)
    driver.step(accepted=3)
    driver.run()
    return driver


@_history("async scheduling, one step ahead, overrun at stop", "async")
def overrun_at_stop(attach: Attach = id) -> Driver:
    driver = start(attach, asynchronous=True)
    driver.add("r", 40, stop_at=2)
    driver.run()
    return driver


@_history("async, preempted with a step in flight, delivered", "async")
def preempted_in_flight_delivered(attach: Attach = id) -> Driver:
    driver = start(attach, asynchronous=True)
    driver.add("r", 40, 3)
    driver.schedule()
    driver.output()
    driver.schedule()
    driver.preempt("r")
    driver.output()
    driver.run()
    return driver


@_history("async, preempted with a step in flight, dropped", "async", "dropped output")
def preempted_in_flight_dropped(attach: Attach = id) -> Driver:
    driver = start(attach, asynchronous=True)
    driver.add("r", 40, 2)
    driver.schedule()
    driver.output()
    driver.schedule()
    driver.preempt("r", drop=True)
    driver.output()
    driver.run()
    return driver


@_history("aborted in mid-prefill")
def aborted_in_prefill(attach: Attach = id) -> Driver:
    driver = start(attach, max_batched_tokens=128)
    driver.add("r", 300)
    driver.step()
    driver.abort("r")
    driver.run()
    return driver


@_history("aborted while waiting for remote KV")
def aborted_in_remote_wait(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    _warm(driver, 64)
    driver.connector.say("r", (128, True))
    driver.add("r", 300, shares=("warm", 64))
    driver.step()
    driver.abort("r")
    driver.run()
    return driver


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in HISTORIES.values()} | WORKLOADS
"""Every scenario by the name of its function."""


def runnable() -> dict[str, Scenario]:
    """The scenarios that this host can be driven through."""
    return {name: scenario for name, scenario in SCENARIOS.items() if not scenario.lacking()}


if __name__ == "__main__":
    for name, scenario in SCENARIOS.items():
        print(f"{name:44}{'; '.join(scenario.lacking()) or 'runs here'}")
