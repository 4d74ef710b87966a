"""Real engines observed at level ``blocks``, and access to their pools, managers and block tables."""

from __future__ import annotations

from typing import Any

from tests.scenarios.driving import start

import kvledger
from kvledger.audit.entry.attach import LiveAudit
from kvledger.audit.traffic.driver import Driver


class Watched:
    """Engines observed at level ``blocks``."""

    def __init__(self) -> None:
        self.audits: list[LiveAudit] = []

    def attach(self, scheduler: Any) -> None:
        self.audits.append(kvledger.attach(scheduler, level="blocks"))

    def start(self, **setup: Any) -> Driver:
        return start(self.attach, **setup)

    def violation_ids(self) -> list[str]:
        for audit in self.audits:
            audit.detach()
        violations = [v for audit in self.audits for v in audit.violations]
        assert not any(audit._auditor.doubts for audit in self.audits)
        return [violation.id for violation in violations]

    def finding(self, id: str) -> Any:
        self.violation_ids()
        return next(v for audit in self.audits for v in audit.violations if v.id == id)


def pool(driver: Driver) -> Any:
    return driver.scheduler.kv_cache_manager.block_pool


def manager(driver: Driver, group: int = 0) -> Any:
    return driver.scheduler.kv_cache_manager.coordinator.single_type_managers[group]


def table(driver: Driver, request: str, group: int = 0) -> Any:
    return manager(driver, group).req_to_blocks[request]


def running(watched: Watched, *names: str, tokens: int = 40, **setup: Any) -> Driver:
    """An engine in which these requests have had their first output."""
    driver = watched.start(**setup)
    for name in names:
        driver.add(name, tokens, 30)
    driver.step()
    return driver
