"""Sums of all figures over accounts. The fields are the figures of ``declared.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..ledger.account import Account
from .declared import FIGURES
from .figure import Figure, Item, Known, Settled, Slot, Unknown, Whole
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
        _add_known(self, account)

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


def _adder() -> Callable[[_Totals, Account], None]:
    """A function that adds a known account, written out figure by figure, as dataclasses do.

    Called for each account of a replay, it takes a sixth of the time of a loop over the figures. Half of an
    account's figures are 0, and to look at a number takes a third of the time of adding it.
    """
    lines: list[str] = []
    of_slots: dict[str, list[str]] = {}
    of_settlement: list[str] = []
    names: dict[str, Any] = {"merge": merge_tokens}
    for figure in FIGURES:
        name, add = figure.name, f"if it := {{}}: sums.{figure.name} += it"
        if figure.causes:
            add = f"if it := {{}}: merge(sums.{figure.name}, it)"
        match figure.read:
            case Slot(name=slot, when=""):
                lines.append(add.format(f"account.{slot}"))
            case Slot(name=slot, when=when):
                of_slots.setdefault(when, []).append(add.format(f"account.{slot}"))
            case Known(name=slot):
                of_slots.setdefault(slot, []).append(f"sums.{name} += 1")
            case Whole(name=slot):
                of_slots.setdefault(slot, []).append(f"sums.{name} += sum(found)")
            case Item(name=slot, place=place):
                of_slots.setdefault(slot, []).append(add.format(f"found[{place}]"))
            case Settled(name=slot):
                of_settlement.append(f"    {add.format(f'settlement.{slot}')}")
            case Unknown():
                pass  # this account is known
            case read:
                names[f"read_{name}"] = read
                lines.append(add.format(f"read_{name}(account)"))
    for slot, adding in of_slots.items():  # what is None or False has none of these
        lines += [f"if found := account.{slot}:", *(f"    {line}" for line in adding)]
    lines += ["for settlement in account.settlements:", *of_settlement]
    exec("\n    ".join(["def add(sums, account):", *lines]), names)
    adder: Callable[[_Totals, Account], None] = names["add"]
    return adder


_add_known = _adder()

if TYPE_CHECKING:
    Totals = _Totals
else:
    Totals = msgspec.defstruct("Totals", map(_field, FIGURES), bases=(_Totals,), module=__name__)
    Totals.__doc__ = _Totals.__doc__
