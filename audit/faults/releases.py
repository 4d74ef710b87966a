"""Which releases were examined, and whether one of them has a fault."""

from __future__ import annotations

import re
from functools import partial
from typing import Literal

import msgspec

from ..errors import LedgerError
from ..release_semantics import release

Product = Literal["vllm", "lmcache", "sglang"]
NAMES: dict[str, str] = {"vllm": "vLLM", "lmcache": "LMCache", "sglang": "SGLang"}

EXAMINED: dict[str, tuple[str, ...]] = {
    "vllm": (
        *("0.9.1", "0.9.2", "0.10.2", "0.12.0", "0.17.0", "0.18.1", "0.19.1", "0.20.0", "0.21.0", "0.22.1"),
        *("0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
        "0.33.0",
    ),
    "lmcache": ("0.3.9", "0.3.11", "0.4.2", "0.4.3", "0.5.4", "0.5.6", "0.5.7rc2"),
    "sglang": (
        *("0.5.3", "0.5.3.post3", "0.5.5.post3", "0.5.6", "0.5.7", "0.5.10", "0.5.12.post1", "0.5.13"),
        *("0.5.20", "0.5.23"),
    ),
}
"""The releases whose scheduler was driven, oldest first: those of the matrix (``scripts/releases.py``), and
earlier ones that are no longer observed."""

POSTS = ("sglang",)
"""Products whose post-releases are releases of their own. Those of vLLM's builds have the same scheduler."""

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
            older = [each for each in map(order, EXAMINED[product]) if each < first]
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
    post = re.search(r"\.post([0-9]{1,9})", version) if product in POSTS else None
    return (*release(version), *([int(post[1])] if post else ()))


def checked(product: Product, version: str) -> str:
    """The release itself; raises :class:`LedgerError` if it is none, or if nothing is known of it."""
    if not re.fullmatch(r"\d+(\.\d+)+([-._]?[a-z]+\d*)*(\+[a-z0-9.]+)?", version):
        example = EXAMINED[product][-1]
        raise LedgerError(f"{version!r} is no release of {NAMES[product]}; write it as in {example}")
    if why := outside(product, version):
        raise LedgerError(why)
    return version


def outside(product: Product, version: str) -> str:
    """Why nothing is known of a release; empty if it lies in the range of the examined ones."""
    oldest, newest = EXAMINED[product][0], EXAMINED[product][-1]
    order = partial(_order, product)
    if order(oldest) <= order(version) <= order(newest):
        return ""
    return f"Nothing is known of {NAMES[product]} {version}: releases from {oldest} to {newest} were examined"


def neighbours(product: Product, version: str) -> tuple[str, str] | None:
    """The examined releases around one that was not examined itself."""
    order = partial(_order, product)
    number = order(version)
    if number in map(order, EXAMINED[product]):
        return None
    older = [each for each in EXAMINED[product] if order(each) < number]
    newer = [each for each in EXAMINED[product] if order(each) > number]
    return older[-1], newer[0]
