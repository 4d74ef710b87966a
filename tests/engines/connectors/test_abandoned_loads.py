"""An aborted load whose end nobody reports, on the real scheduler and a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import Driver, start

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.traffic.observation import Observation

STEP_NANOSECONDS = 20_000_000_000


class Watch:
    """Observes one scheduler by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0
        self.observation = Observation("blocks", clock=lambda: self.now)

    def __call__(self, scheduler: Any) -> None:
        self.observation(scheduler)

    def run_on(self, driver: Driver, steps: int) -> None:
        """Another request decodes; a step takes 20 seconds."""
        driver.add("other", 40, steps)
        for _ in range(steps):
            self.now += STEP_NANOSECONDS
            driver.step()

    def audited(self) -> Auditor:
        auditor = Auditor(keep_closed=True)
        auditor.feed_all(self.observation.stop())
        return auditor


def aborted_in_its_load(watch: Watch) -> Driver:
    driver = start(watch, connector="scripted")
    driver.connector.store("r", 96, asynchronous=True)
    driver.add("r", 150, 3)
    for _ in range(3):
        driver.schedule()
        driver.output()
    driver.abort("r")
    return driver


def test_blocks_that_nothing_frees_are_a_leak_after_ten_minutes() -> None:
    """vLLM#46283: the prefill engine was aborted too."""
    watch = Watch()
    driver = aborted_in_its_load(watch)
    watch.run_on(driver, 60)

    (leak,) = [each for each in watch.audited().violations if each.id == "blocks/leak"]

    assert "Request r ended" in leak.message
    assert "still holds 6 blocks" in leak.message


def test_blocks_are_freed_when_the_load_is_reported_after_all() -> None:
    watch = Watch()
    driver = aborted_in_its_load(watch)
    driver.schedule()
    driver.output(finished_recving={"r"})
    watch.run_on(driver, 60)

    assert "clean" == watch.audited().verdict
