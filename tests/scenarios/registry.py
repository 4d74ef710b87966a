"""The register of workloads: one scenario for each variant of a workload."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.scenarios.driving import Attach, Driver

from kvledger.audit.traffic import engine_setup

Drive = Callable[..., Driver]


@dataclass(frozen=True)
class Scenario:
    """Drives an engine and leaves it idle. The engine's scheduler is passed to `attach` first."""

    name: str
    drive: Drive
    setup: Mapping[str, Any] = field(default_factory=dict)
    requires: frozenset[str] = frozenset()
    """Names in `release.CAPABILITIES` that the installed vLLM needs."""

    def __call__(self, attach: Attach = id, **setup: Any) -> Driver:
        return self.drive(attach, **{**self.setup, **setup})

    def lacking(self) -> list[str]:
        """The reasons why this scenario can't run on the installed vLLM; empty if it can."""
        return engine_setup.lacking(sorted(self.requires))


WORKLOADS: dict[str, Scenario] = {}
BOTH: dict[str, dict[str, Any]] = {"sync": {}, "async": {"asynchronous": True}}
HYBRID = ("full", "sliding")
REPLAY = ("full", "replay")


def workload(*requires: str, **variants: dict[str, Any]) -> Callable[[Drive], Drive]:
    """Register a workload under `name_variant` for each variant of its engine."""

    def register(drive: Drive) -> Drive:
        for suffix, setup in (variants or {"": {}}).items():
            name = f"{drive.__name__}_{suffix}".rstrip("_")
            WORKLOADS[name] = Scenario(name, drive, setup, frozenset(requires))
        return drive

    return register
