"""What is known of a release, or of all: the faults that it has, the worst first."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .catalogue import HARMS, Fault, Kind, catalogue
from .conditions import Settings, sentence, unmet
from .releases import NAMES, Product, State, neighbours, outside


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
        return f"{NAMES[self.product]} {self.release}".rstrip()

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
        f"{NAMES[product]} {version} itself was not examined. It is assumed to have what {around[0]} and "
        f"{around[1]} have, and may have what one of them has."
    )
