"""Sums of all figures over accounts. The fields are the figures of ``declared.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..ledger.account import Account
from .declared import FIGURES
from .figure import Figure, Item, Settled, Slot
from .sums import Sums, merge_tokens


class _Totals(Sums):
    """The sums of accounts. A figure that is counted by cause is a table of tokens by cause."""

    if TYPE_CHECKING:

        def __getattr__(self, figure: str) -> Any: ...

    def add(self, account: Account) -> None:
        """Add an account. An unknown account adds only to the figures that count unknown ones."""
        if account.unknown is not None:
            for name, read in _OF_UNKNOWN:
                setattr(self, name, getattr(self, name) + read(account))
            return
        _add_numbers(self, account)
        for name in _BY_CAUSE:
            if tokens := getattr(account, name):
                merge_tokens(getattr(self, name), tokens)

    def of(self, figure: str) -> int:
        """The sum of a figure, over all causes of one that is counted by cause."""
        value = getattr(self, figure)
        return sum(value.values()) if isinstance(value, dict) else int(value)

    @property
    def doubtful_requests(self) -> int:
        """Unknown requests that make a verdict unknown."""
        return int(self.unknown_requests - self.began_before)


def _field(figure: Figure) -> tuple[str, type, object]:
    return (figure.name, dict[str, int], {}) if figure.causes else (figure.name, int, 0)


_OF_UNKNOWN = [(figure.name, figure.read) for figure in FIGURES if figure.of_unknown]
_BY_CAUSE = [figure.name for figure in FIGURES if figure.causes]
_NUMBERS = [figure for figure in FIGURES if not figure.causes]


def _number_adder() -> Callable[[_Totals, Account], None]:
    """A function that adds the numbers of an account, written out figure by figure, as dataclasses do.

    Called for each account of a replay, it takes half the time of a loop over the figures.
    """
    lines, of_settlement = [], []
    items: dict[str, list[str]] = {}
    names: dict[str, Any] = {}
    for figure in _NUMBERS:
        match figure.read:
            case Slot(name=name):
                lines.append(f"    sums.{figure.name} += account.{name}")
            case Item(name=name, place=place):
                items.setdefault(name, []).append(f"        sums.{figure.name} += found[{place}]")
            case Settled(name=name):
                of_settlement.append(f"        sums.{figure.name} += settlement.{name}")
            case read:
                names[f"read_{figure.name}"] = read
                lines.append(f"    sums.{figure.name} += read_{figure.name}(account) or 0")
    for name, adding in items.items():
        lines += [f"    found = account.{name}", "    if found is not None:", *adding]
    body = [*lines, "    for settlement in account.settlements:", *of_settlement]
    exec("\n".join(["def add(sums, account):", *body]), names)
    adder: Callable[[_Totals, Account], None] = names["add"]
    return adder


_add_numbers = _number_adder()

if TYPE_CHECKING:
    Totals = _Totals
else:
    Totals = msgspec.defstruct("Totals", map(_field, FIGURES), bases=(_Totals,), module=__name__)
    Totals.__doc__ = _Totals.__doc__
