"""The register of workloads: a name for each variant of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.scenarios.driving import Attach, Driver

from kvledger.audit.conformance import release

Drive = Callable[..., Driver]


@dataclass(frozen=True)
class Scenario:
    """Called with `attach`, or with nothing; leaves the engine idle."""

    name: str
    drive: Drive
    setup: Mapping[str, Any] = field(default_factory=dict)
    requires: frozenset[str] = frozenset()
    """Of `release.CAPABILITIES`."""

    def __call__(self, attach: Attach = id, **setup: Any) -> Driver:
        return self.drive(attach, **{**self.setup, **setup})

    def lacking(self) -> list[str]:
        """Why the host can't be driven through this; empty if it can."""
        return release.lacking(sorted(self.requires))


WORKLOADS: dict[str, Scenario] = {}
BOTH: dict[str, dict[str, Any]] = {"sync": {}, "async": {"asynchronous": True}}
HYBRID = ("full", "sliding")


def workload(*requires: str, **variants: dict[str, Any]) -> Callable[[Drive], Drive]:
    """Register a workload, as `name_variant` once for each variant of its engine."""

    def register(drive: Drive) -> Drive:
        for suffix, setup in (variants or {"": {}}).items():
            name = f"{drive.__name__}_{suffix}".rstrip("_")
            WORKLOADS[name] = Scenario(name, drive, setup, implied(setup).union(requires))
        return drive

    return register


def implied(setup: Mapping[str, Any]) -> frozenset[str]:
    """What an engine's setup alone requires of the host."""
    needed = set()
    if setup.get("asynchronous"):
        needed.add("async drafts" if setup.get("drafts") else "async")
    if len(setup.get("groups", ())) > 1 and setup.get("connector"):
        needed.add("hybrid connector")
    return frozenset(needed)
