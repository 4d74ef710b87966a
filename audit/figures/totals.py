"""Sums of all figures over accounts. The fields are the figures of ``declared.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..ledger.account import Account
from .declared import FIGURES
from .figure import Figure
from .sums import Sums, merge_tokens


class _Totals(Sums):
    """The sums of accounts. A figure that is counted by cause is a table of tokens by cause."""

    if TYPE_CHECKING:

        def __getattr__(self, figure: str) -> Any: ...

    def add(self, account: Account) -> None:
        """Add an account. An unknown account adds only to the figures that count unknown ones."""
        for name, read in _OF_UNKNOWN if account.unknown is not None else _READERS:
            value = read(account)
            if not value:
                continue
            if type(value) is dict:
                merge_tokens(getattr(self, name), value)
            else:
                setattr(self, name, getattr(self, name) + value)

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


_READERS = [(figure.name, figure.read) for figure in FIGURES]
_OF_UNKNOWN = [(figure.name, figure.read) for figure in FIGURES if figure.of_unknown]

if TYPE_CHECKING:
    Totals = _Totals
else:
    Totals = msgspec.defstruct("Totals", map(_field, FIGURES), bases=(_Totals,), module=__name__)
    Totals.__doc__ = _Totals.__doc__
