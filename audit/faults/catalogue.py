"""One known fault, and all of them as the files of ``data/`` hold them.

A file's name is the fault's id. A file that has an unknown field, or a value of a wrong type, is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from . import conditions
from .releases import EXAMINED, NAMES, Affected, Product

Kind = Literal["fault", "drift"]
"""``fault``: the engine is wrong. ``drift``: it deliberately counts by a rule that misleads."""

HARMS: dict[str, str] = {
    "output": "wrong output",
    "isolation": "one client's KV read by another",
    "engine": "the engine raises, or a request never runs again",
    "capacity": "cache or memory lost until the engine restarts",
    "work": "tokens computed again, or never saved",
    "figures": "wrong figures",
}
"""What a fault harms, the worst first."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whatever a file may not say is an error."""


class Scenarios(Strict, frozen=True):
    """Scenarios of ``tests/scenarios`` in which the audit may find the fault.

    ``names`` are names or patterns such as ``crowd_*``. ``findings``, ``first`` and ``last`` are those of
    the fault where they are not given; ``releases`` names releases of the matrix instead. ``always``: every
    such scenario shows the fault in each release that has it. ``engine_fails``: the engine itself ends the
    scenario early, so its accounts are not checked. ``settled``: by scenario and request, the local,
    external, computed and unattained tokens of its prompt, which are equal in every release. ``harmed``: by
    scenario, each finding with the request that it names and the tokens that it is about (None: it says no
    number), in every release that shows the fault there.
    """

    names: tuple[str, ...]
    findings: tuple[str, ...] | None = None
    first: str = ""
    last: str = ""
    releases: tuple[str, ...] = ()
    always: bool = False
    engine_fails: bool = False
    settled: Mapping[str, Mapping[str, list[list[int]]]] = {}
    harmed: Mapping[str, tuple[tuple[str, str | None, int | None], ...]] = {}
    note: str = ""

    def drive(self, scenario: str) -> bool:
        """Whether a scenario is one of these."""
        return any(fnmatchcase(scenario, name) for name in self.names)


class Run(Strict, frozen=True):
    """Releases in which ``scripts/findings.py`` shows the fault, and the engine's wrong figures there."""

    releases: tuple[str, ...]
    engine: str
    findings: tuple[str, ...] | None = None


class Proof(Strict, frozen=True):
    """A finding in a release of the matrix from which ``make proof NAME=repro`` makes a reproduction."""

    finding: str
    release: str


class Fault(Strict, frozen=True, kw_only=True):
    """One known fault. ``id`` is the name of its file.

    ``title``: one line with the engine as its subject. ``says``: one sentence each. ``where``: the code at
    fault; empty if the cause is not known. ``conditions``: words of :mod:`.conditions`, all of which must
    hold. ``findings``: the invariants that it violates; none if no invariant covers it. ``links``: upstream's
    reports and fixes. ``proofs``: by the name of its history in ``tests/repro/faults.py``.
    """

    id: str = ""
    title: str
    says: tuple[str, ...]
    where: str = ""
    product: Product = "vllm"
    kind: Kind = "fault"
    harms: str
    releases: Affected
    conditions: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    scenarios: tuple[Scenarios, ...] = ()
    runs: tuple[Run, ...] = ()
    proofs: Mapping[str, Proof] = {}

    @property
    def text(self) -> str:
        """All sentences, as one paragraph."""
        return " ".join(self.says)

    @property
    def condition(self) -> str:
        """``if ...``; empty if the fault always shows."""
        return conditions.sentence(self.conditions)

    @property
    def span(self) -> str:
        """The releases that have it, and whether one without it is known."""
        newest = EXAMINED[self.product][-1]
        return self.releases.words + ("" if self.releases.last else f", not fixed in {newest}")

    @property
    def project(self) -> str:
        """The product, as it writes its name."""
        return NAMES[self.product]

    @property
    def named_links(self) -> list[tuple[str, str]]:
        """Each link with its short name, such as ``vLLM#36752``."""
        return [(short_name(link), link) for link in self.links]

    def in_matrix(self, version: str) -> str:
        """The name of a release in ``scripts/releases.py``."""
        prefix = "" if self.product == "vllm" else f"{self.product}-"
        return f"{prefix}{version}{'-v0' if 'v0' in self.conditions else ''}" if version else ""


def short_name(link: str) -> str:
    """``vLLM#36752`` for the address of that issue or pull request."""
    _, repository, _, number = link.rsplit("/", 3)
    return f"{NAMES[repository.lower()]}#{number}"


def files_by_id(folder: str) -> list[tuple[str, bytes]]:
    """The JSON files of a folder beside this file, by their names without the ending, in order."""
    files = resources.files(__package__).joinpath(folder).iterdir()
    return sorted(
        (file.name.removesuffix(".json"), file.read_bytes()) for file in files if file.name.endswith(".json")
    )


@cache
def catalogue() -> dict[str, Fault]:
    """Every known fault by its id, in the order of the ids."""
    return {id: msgspec.structs.replace(read(file), id=id) for id, file in files_by_id("data")}


def read(file: bytes) -> Fault:
    """The fault in a file; raises :class:`msgspec.ValidationError` if it is not valid."""
    return msgspec.json.decode(file, type=Fault)


def shown_by(finding: str) -> list[Fault]:
    """The faults that an invariant finds."""
    return [fault for fault in catalogue().values() if finding in fault.findings]


def known(finding: str, version: str, traits: Collection[str], engine: Product = "vllm") -> Fault | None:
    """The fault behind a finding of an engine's release ``version``; None if none is known.

    ``traits`` is what the workload contains. Of several faults that fit, the one that needs most of it, then
    one that upstream knows. A journal does not tell LMCache's release, so a fault of LMCache fits any.
    """

    def fits(fault: Fault) -> bool:
        beside = fault.product == "lmcache" and engine == "vllm"
        has = beside or (fault.product == engine and fault.releases.state(engine, version) != "free")
        return has and conditions.traits(fault.conditions) <= set(traits)

    def needs(fault: Fault) -> tuple[int, bool]:
        return len(conditions.traits(fault.conditions)), bool(fault.links)

    return max(filter(fits, shown_by(finding)), key=needs, default=None)
