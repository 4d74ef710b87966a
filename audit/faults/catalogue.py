"""One known fault, and all of them as the files of ``data/`` hold them.

A file's name is the fault's id. A file that has an unknown field, or a value of a wrong type, is not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import resources
from typing import Literal

import msgspec

from ..errors import LedgerError
from ..release_semantics import CONTRACTS, Product, contract, release
from . import conditions
from .conditions import Settings, sentence, unmet

# --- Which releases were examined, and whether one of them has a fault.

State = Literal["has", "may have", "free"]
"""``may have``: the release lies between one with the fault and one without, and was not examined."""


class Affected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The releases that have a fault.

    ``first`` and ``last`` are known to have it; no ``last``: the newest examined release has it. ``fixed``:
    the first release known to be without it. ``also``: single releases before ``first`` that have it.
    ``read``: those of these releases that are not in the matrix; their sources were read. ``note``: what
    the numbers do not say.
    """

    first: str
    last: str = ""
    fixed: str = ""
    also: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    note: str = ""

    def state(self, product: Product, version: str) -> State:
        """Whether a release of the examined range has the fault."""
        order = partial(_order, product)
        number, first = order(version), order(self.first)
        if version in self.also or number in map(order, self.also):
            return "has"
        if number < first:
            older = [each for each in map(order, CONTRACTS[product].examined) if each < first]
            is_sharp = self.first in self.read or not older or number <= older[-1]
            return "free" if is_sharp else "may have"
        if not self.last or number <= order(self.last):
            return "has"
        return "may have" if self.fixed and number < order(self.fixed) else "free"

    @property
    def span(self) -> str:
        """``0.12.0 to 0.20.0``."""
        if not self.last:
            return f"{self.first} and later"
        return f"{self.first} to {self.last}" if self.last != self.first else self.first

    @property
    def words(self) -> str:
        """``0.12.0 to 0.20.0, fixed in 0.22.1``."""
        return f"{self.span}, fixed in {self.fixed}" if self.fixed else self.span


def _order(product: Product, version: str) -> tuple[int, ...]:
    """What orders the releases of a product: ``(0, 5, 3, 3)`` for SGLang's 0.5.3.post3."""
    post = re.search(r"\.post([0-9]{1,9})", version) if CONTRACTS[product].posts else None
    return (*release(version), *([int(post[1])] if post else ()))


def checked(product: Product, version: str) -> str:
    """The release itself; raises :class:`LedgerError` if it is none, or if nothing is known of it."""
    if not re.fullmatch(r"\d+(\.\d+)+([-._]?[a-z]+\d*)*(\+[a-z0-9.]+)?", version):
        name, examined = CONTRACTS[product][:2]
        raise LedgerError(f"{version!r} is no release of {name}; write it as in {examined[-1]}")
    if why := outside(product, version):
        raise LedgerError(why)
    return version


def outside(product: Product, version: str) -> str:
    """Why nothing is known of a release; empty if it lies in the range of the examined ones."""
    name, (oldest, *_, newest) = CONTRACTS[product][:2]
    order = partial(_order, product)
    if order(oldest) <= order(version) <= order(newest):
        return ""
    return f"Nothing is known of {name} {version}: releases from {oldest} to {newest} were examined"


def neighbours(product: Product, version: str) -> tuple[str, str] | None:
    """The examined releases around one that was not examined itself."""
    order = partial(_order, product)
    number = order(version)
    examined = CONTRACTS[product].examined
    if number in map(order, examined):
        return None
    older = [each for each in examined if order(each) < number]
    newer = [each for each in examined if order(each) > number]
    return older[-1], newer[0]


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
        newest = CONTRACTS[self.product].examined[-1]
        return self.releases.words + ("" if self.releases.last else f", not fixed in {newest}")

    @property
    def project(self) -> str:
        """The product, as it writes its name."""
        return CONTRACTS[self.product].name

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
    return f"{contract(repository.lower()).name}#{number}"


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


# --- What pages, reproductions and the terminal say of one fault, in the same words.

UNTRACED = "not traced to a place in the code"
UNCOVERED = "none; no invariant covers it"


def facts(fault: Fault) -> Iterator[tuple[str, str]]:
    """What is known of a fault besides its sentences: the fact's name, and what it is."""
    note = f" ({fault.releases.note})" if fault.releases.note else ""
    yield f"Releases of {fault.project}", fault.span + note
    if fault.condition:
        yield "Condition", fault.condition.removeprefix("if ")
    yield "Harm", HARMS[fault.harms]
    yield "Where", fault.where or UNTRACED
    found = " or ".join(f"`{each}`" for each in fault.findings)
    yield "Finding", (found + " (a drift)" if fault.kind == "drift" else found) if found else UNCOVERED


def level_of(finding: str) -> str:
    """The lowest level of observation at which an invariant is checked: tokens, blocks or content."""
    family = finding.partition("/")[0]
    return family if family in ("blocks", "content") else "tokens"


# --- What is known of a release, or of all: the faults that it has, the worst first.


class KnownFault(msgspec.Struct, frozen=True):
    """A fault of a release. ``condition``: what must hold besides the engine's known settings.

    ``state``: ``has``, or ``may have`` where the release was not examined and its neighbours differ.
    ``links``: upstream's reports and fixes.
    """

    product: Product
    id: str
    kind: Kind
    title: str
    state: State
    condition: str
    harms: str
    releases: str
    first: str
    last: str
    fixed: str
    findings: tuple[str, ...]
    links: tuple[str, ...]


class KnownOfRelease(msgspec.Struct, frozen=True):
    """What is known of one release of a product; of all releases where ``release`` is empty.

    ``says``: why nothing is known, or how sure it is; empty if the release itself was examined.
    """

    product: Product
    release: str
    says: str
    faults: list[KnownFault]

    @property
    def name(self) -> str:
        """``vLLM 0.18.1``."""
        return f"{CONTRACTS[self.product].name} {self.release}".rstrip()

    @property
    def is_examined(self) -> bool:
        """Whether anything is known of the release."""
        return not self.release or not outside(self.product, self.release)

    def of_kind(self, kind: Kind) -> list[KnownFault]:
        """Its faults, or its drifts."""
        return [fault for fault in self.faults if fault.kind == kind]


def of_release(product: Product, version: str, settings: Settings | None = None) -> KnownOfRelease:
    """The faults of a release, without those that an engine's settings rule out."""
    if why := outside(product, version):
        return KnownOfRelease(product, version, f"{why}.", [])
    rows = []
    for fault in _worst_first(product):
        state, left = fault.releases.state(product, version), unmet(fault.conditions, settings or {})
        if state != "free" and left is not None:
            rows.append(_row(fault, state, sentence(left)))
    return KnownOfRelease(product, version, _how_sure(product, version), rows)


def of_all(product: Product) -> KnownOfRelease:
    """The faults of every release."""
    rows = [_row(fault, "has", fault.condition) for fault in _worst_first(product)]
    return KnownOfRelease(product, "", "", rows)


def _worst_first(product: Product) -> Iterable[Fault]:
    of_product = (fault for fault in catalogue().values() if fault.product == product)
    harms = list(HARMS)
    return sorted(of_product, key=lambda fault: (fault.kind == "drift", harms.index(fault.harms), fault.id))


def _row(fault: Fault, state: State, condition: str) -> KnownFault:
    spans = fault.releases
    return KnownFault(
        product=fault.product,
        id=fault.id,
        kind=fault.kind,
        title=fault.title,
        state=state,
        condition=condition,
        harms=fault.harms,
        releases=fault.span,
        first=spans.first,
        last=spans.last,
        fixed=spans.fixed,
        findings=fault.findings,
        links=fault.links,
    )


def _how_sure(product: Product, version: str) -> str:
    around = neighbours(product, version)
    if around is None:
        return ""
    return (
        f"{CONTRACTS[product].name} {version} itself was not examined. It is assumed to have what "
        f"{around[0]} and {around[1]} have, and may have what one of them has."
    )


# --- Rules of the scheduler that differ from release to release, one file of ``rules/`` each.
#
# A rule is no fault: the engine does what it is meant to do, and its figures change with it. A file's name
# is the rule's id. A file that has an unknown field, or a value of a wrong type, is not read.


class Switch(Strict, frozen=True, kw_only=True):
    """The setting that turns a rule off, by vLLM's name; its default in releases with the rule; and the value
    with which the rule does nothing."""

    setting: str
    default: bool | int | float | str | None
    off: bool | int | float | str | None


class ReleaseRule(Strict, frozen=True, kw_only=True):
    """One rule. ``id`` is the name of its file.

    ``title``: what the scheduler does, in one line. ``says``: one sentence each. ``where``: the code.
    ``conditions``: words of :mod:`.conditions`, all of which must hold. ``settings``: the settings that it
    depends on, by vLLM's names. ``switch``: None: no setting turns it off.
    """

    id: str = ""
    title: str
    says: tuple[str, ...]
    where: str
    releases: Affected
    conditions: tuple[str, ...] = ()
    settings: tuple[str, ...]
    switch: Switch | None = None
    links: tuple[str, ...]

    def holds_in(self, version: str) -> bool:
        """Whether a release is known to have it; one that was not examined is not, if its neighbours
        differ."""
        return self.releases.state("vllm", version) == "has"

    @property
    def named_links(self) -> list[tuple[str, str]]:
        """Each link with its short name, such as ``vLLM#42656``."""
        return [(short_name(link), link) for link in self.links]

    @property
    def span(self) -> str:
        """The releases that have it."""
        if self.releases.first == CONTRACTS["vllm"].examined[0] and not self.releases.last:
            return f"all releases since {self.releases.first}"
        return self.releases.span


@cache
def release_rules() -> dict[str, ReleaseRule]:
    """Every rule by its id, in the order of the ids."""
    return {id: msgspec.structs.replace(read_rules(file), id=id) for id, file in files_by_id("rules")}


def read_rules(file: bytes) -> ReleaseRule:
    """The rule in a file; raises :class:`msgspec.ValidationError` if it is not valid."""
    return msgspec.json.decode(file, type=ReleaseRule)


def begun(before: str, after: str, settings: Mapping[str, object]) -> list[ReleaseRule]:
    """The rules that ``after`` has and ``before`` does not, without those that an engine's settings rule
    out."""
    return [rule for rule in _possible(settings) if rule.holds_in(after) and not rule.holds_in(before)]


def _possible(settings: Mapping[str, object]) -> Iterable[ReleaseRule]:
    for rule in release_rules().values():
        if conditions.unmet(rule.conditions, settings) is not None:
            yield rule


def by_switch() -> dict[str, ReleaseRule]:
    """The rules that a setting turns off, by the setting."""
    return {rule.switch.setting: rule for rule in release_rules().values() if rule.switch is not None}


# --- the page -------------------------------------------------------------------------------------------

HEADING = "## Rules of the releases\n"
_PROSE = """
Each is a file of `audit/faults/rules/`, read in the code of the released versions. *Since* is the first
release of the matrix that has the rule. A setting turns it off where one is named.
"""


def replaced(page: str) -> str:
    """``page`` with the table of the rules below its prose."""
    rows = sorted(release_rules().values(), key=lambda rule: (release(rule.releases.first), rule.id))
    parts = [_described(rule) for rule in rows]
    return page.partition(HEADING)[0] + HEADING + _PROSE + "\n" + "\n\n".join(parts) + "\n"


def _described(rule: ReleaseRule) -> str:
    off = rule.switch and f"`{rule.switch.setting}={rule.switch.off}`"
    facts = [
        ("Since", rule.releases.first + (f", until {rule.releases.last}" if rule.releases.last else "")),
        ("Where", rule.where),
        ("Condition", conditions.sentence(rule.conditions).removeprefix("if ")),
        ("Depends on", ", ".join(f"`{name}`" for name in rule.settings)),
        ("Turned off by", off or "no setting"),
        ("Sources", ", ".join(f"[{name}]({link})" for name, link in rule.named_links)),
    ]
    lines = [f"- {name}: {fact}" for name, fact in facts if fact]
    title = rule.title[0].upper() + rule.title[1:]
    return "\n".join((f"### {rule.id}", "", f"{title}. {' '.join(rule.says)}", "", *lines))
