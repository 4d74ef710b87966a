"""What the release matrix expects: what the files of ``audit/faults/data`` say of each scenario.

A release has its name in scripts/releases.py. A drift may show in any scenario; every other finding only in
the scenarios that its fault names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from releases import MATRIX

from kvledger.audit.checks.registry import catalogue as invariants
from kvledger.audit.faults.catalogue import Fault, Scenarios, catalogue
from kvledger.audit.release_semantics import CONTRACTS, release

DRIFTS = frozenset(row.id for row in invariants().values() if row.severity == "drift")
IN_VENV = next(name for name, release in MATRIX.items() if not release.wheel)
"""The release of vLLM under a release of LMCache whose name has none."""


class Expected(NamedTuple):
    """Scenarios that show a fault."""

    fault: Fault
    scenarios: Scenarios

    @property
    def ids(self) -> tuple[str, ...]:
        """What the audit finds in them."""
        return self.fault.findings if self.scenarios.findings is None else self.scenarios.findings

    def covers(self, name: str) -> bool:
        """Whether they show it in a release of the matrix; v0 and LMCache have scenarios of their own."""
        if self.scenarios.releases:
            return name in self.scenarios.releases
        of_lmcache = name.startswith("lmcache-")
        if of_lmcache != (self.fault.product == "lmcache") or not has(self.fault, name):
            return False
        if name.endswith("-v0") and "v0" not in self.fault.conditions:
            return False
        version = versions(name)[self.fault.product]
        first, last = (release(each) for each in (self.scenarios.first, self.scenarios.last))
        return first <= release(version) and (not last or release(version) <= last)

    @property
    def span(self) -> str:
        """The releases of the matrix in which they show it: ``0.17.0, 0.27.1 to 0.30.0``."""
        releases = CONTRACTS[self.fault.product].examined
        examined = [each for each in releases if self.fault.in_matrix(each) in MATRIX]
        spans = groupby(examined, lambda each: self.covers(self.fault.in_matrix(each)))
        runs = [list(names) for covered, names in spans if covered]
        return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def versions(name: str) -> dict[str, str]:
    """The version of each product in a release of the matrix."""
    beside, _, over = name.partition("/vllm-")
    if beside.startswith("lmcache-"):
        return {"lmcache": beside.removeprefix("lmcache-"), "vllm": over or IN_VENV}
    return {"vllm": name.removesuffix("-v0")}


def has(fault: Fault, name: str) -> bool:
    """Whether a release of the matrix has the fault."""
    version = versions(name).get(fault.product)
    if version is None or ("v0" in fault.conditions and not name.endswith("-v0")):
        return False
    return fault.releases.state(fault.product, version) == "has"


def _in_order(fault: Fault) -> tuple[bool, tuple[int, ...], str]:
    return fault.product != "vllm", release(fault.releases.first), fault.id


EXPECTED = tuple(
    Expected(fault, scenarios)
    for fault in sorted(catalogue().values(), key=_in_order)
    for scenarios in fault.scenarios
)
OF_DRIFTS = tuple(each for each in EXPECTED if DRIFTS.intersection(each.ids))
COLUMNS = tuple(each for each in EXPECTED if each.scenarios.always and each not in OF_DRIFTS)
"""A column of the grid each: every scenario shows the fault where a release has it."""
OTHERS = tuple(each for each in EXPECTED if not each.scenarios.always and each.span)
"""What scenarios may show besides."""


def _of(scenario: str, name: str) -> Iterator[Expected]:
    return (each for each in EXPECTED if each.scenarios.drive(scenario) and each.covers(name))


def ids(scenario: str, name: str) -> set[str]:
    """What the audit may find in a scenario of a release, without the drifts."""
    return {id for each in _of(scenario, name) for id in each.ids} - DRIFTS


def excused(scenario: str, name: str) -> bool:
    """Whether the engine itself is known to fail in this scenario."""
    return any(each.scenarios.engine_fails for each in _of(scenario, name))


def drifts(name: str) -> set[str]:
    """The drifts that a release has."""
    return {id for fault in catalogue().values() if has(fault, name) for id in fault.findings}


def drifts_due(scenario: str, name: str) -> set[str]:
    """The drifts that the audit must find in a scenario of a release."""
    return {id for each in _of(scenario, name) if each in OF_DRIFTS for id in each.ids}


def harmed(scenario: str, name: str) -> Iterator[list[str | int | None]]:
    """The findings in a scenario of a release, each with the request and the tokens that it must name."""
    for each in _of(scenario, name):
        yield from map(list, each.scenarios.harmed.get(scenario, ()))


def settled(scenario: str) -> dict[str, list[list[int]]] | None:
    """The sources of each prompt in a scenario where they are known, the same in every release."""
    of_fault = (each.scenarios.settled.get(scenario) for each in EXPECTED)
    return next((dict(rows) for rows in of_fault if rows is not None), None)
