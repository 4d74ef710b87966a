"""Scenarios that drive the real scheduler through the golden histories, token by token.

There is one function per golden history, registered under the history's name. It starts an engine, passes
the scheduler to `attach`, drives request `r` through the history and leaves the engine idle. Requests with
other names only prepare the pool. A block holds 16 tokens.

`SCENARIOS` also has every workload of the modules in `REGISTERED`. `python -m tests.scenarios.corpus` lists
all scenarios, with the reasons why a scenario can't run on the installed vLLM.
"""

from collections.abc import Callable

from tests.scenarios import blocks, encoder, external, figures, withdrawn, workloads
from tests.scenarios.driving import Attach, Driver, start
from tests.scenarios.registry import WORKLOADS, Drive, Scenario

REGISTERED = (workloads, external, blocks, encoder, figures, withdrawn)
HISTORIES: dict[str, Scenario] = {}
"""Scenarios by the name of the golden history."""


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
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 1)
    driver.run()
    return driver


@_history("external, asynchronous, loaded before it runs")
def external_asynchronous(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    _warm(driver, 32)
    driver.connector.answer_lookups("r", (128, True))
    driver.add("r", 200, 1, shares=("warm", 32))
    driver.run()
    return driver


@_history("full external hit, last token executed again")
def full_external_hit(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    driver.connector.answer_lookups("r", (96, True))
    driver.add("r", 96, 1)
    driver.run()
    return driver


@_history("vLLM#36752: preempted in mid-prefill, asked again")
def asked_again_after_preemption(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted", max_batched_tokens=56)
    driver.connector.answer_lookups("r", (32, True), (160, True))
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


@_history("LMCache#1969: resumed, local then external")
def resumed_local_then_external(attach: Attach = id) -> Driver:
    """While the lookup of `r` is deferred, a filler gets every block except the first that `r` had."""
    driver = start(attach, connector="scripted", blocks=6)
    driver.connector.answer_lookups("r", 0, None, (18, True))
    driver.add("r", 34, 16)
    for _ in range(15):
        driver.step()
    driver.preempt("r")
    driver.add("filler", 64, 1)
    driver.run()
    return driver


@_history("asynchronous load fails in part, recomputed")
def asynchronous_load_fails_in_part(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    driver.connector.answer_lookups("r", (160, True))
    driver.add("r", 200, 1)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:], finished_recving=["r"])
    driver.run()
    return driver


@_history("asynchronous load fails wholly, looked up anew")
def asynchronous_load_fails_wholly(attach: Attach = id) -> Driver:
    driver = start(attach, connector="scripted")
    driver.connector.answer_lookups("r", (160, True))
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


@_history("async scheduling, one step ahead, overrun at stop")
def overrun_at_stop(attach: Attach = id) -> Driver:
    driver = start(attach, asynchronous=True)
    driver.add("r", 40, stop_at=2)
    driver.run()
    return driver


@_history("async, preempted with a step in flight, delivered")
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


@_history("async, preempted with a step in flight, dropped", "dropped output")
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
    driver.connector.answer_lookups("r", (128, True))
    driver.add("r", 300, shares=("warm", 64))
    driver.step()
    driver.abort("r")
    driver.run()
    return driver


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in HISTORIES.values()} | WORKLOADS
"""Every scenario by the name of its function."""


def runnable() -> dict[str, Scenario]:
    """The scenarios that can run on the installed vLLM."""
    return {name: scenario for name, scenario in SCENARIOS.items() if not scenario.lacking()}


if __name__ == "__main__":
    for name, scenario in SCENARIOS.items():
        print(f"{name:44}{'; '.join(scenario.lacking()) or 'runs here'}")
