"""What a figure is: how it is read off an account, what it means, and where it shows.

The figures themselves are in ``declared.py``. The sums of :class:`~.totals.Totals`, the columns of tables,
the cells of JSON and CSV, the rows of ``diff`` and the counters of the metric table are derived from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ..events import RequestLabels
from ..ledger.account import Account
from ..text import salt_name, session_of

Read = Callable[[Account], Any]
"""Reads a count, or counts by cause, off an account; None: the account has none."""

TOKENS = "tokens"
MICROSECONDS = "microseconds"


class Counter(NamedTuple):
    """A counter of the metric table that one figure or several are exposed as.

    ``label`` tells several figures apart; their names are its values. With ``by_cause`` the values are
    the causes of the one figure. ``group``: the section of the metric table.
    """

    name: str
    group: str
    help: str
    label: str = ""
    by_cause: bool = False


class Histogram(NamedTuple):
    """A histogram of the metric table over the requests of one figure or several, in seconds.

    ``bounds``: the upper bounds of its buckets, without infinity. With a ``label`` it has a series for each
    figure, of the requests for which the figure is not 0.
    """

    name: str
    group: str
    help: str
    bounds: tuple[float, ...]
    label: str = ""


class Figure(NamedTuple):
    """One figure of a request, in ``unit``.

    ``causes``: the words of a figure that is counted by cause. ``part_of``: the figure that this one is a
    part of; ``diff`` shows it as a share of that. ``per``: the figure by which a mean divides it.
    ``of_unknown``: also counted for requests whose account is unknown. ``counters``: where the metric table
    shows it. ``histogram``: where it shows the figure by request, divided by the figure ``per``.
    """

    name: str
    text: str
    read: Read
    unit: str = TOKENS
    causes: Sequence[str] = ()
    part_of: str = ""
    per: str = ""
    of_unknown: bool = False
    counters: tuple[Counter, ...] = ()
    histogram: Histogram | None = None
    sql: str = ""
    """How SQL finds the sum over rows of ``requests``, for a figure that counts requests and is no column of
    them; "": the sum of its column."""

    @property
    def words(self) -> str:
        """The name as a person reads it; of tokens that are no part of another figure, with the unit."""
        words = self.name.replace("_", " ")
        if self.unit == MICROSECONDS:
            time = words.removesuffix(f" {MICROSECONDS}")
            return time if self.part_of else f"time to {time}"
        return words if self.part_of or self.unit != TOKENS or TOKENS in words else f"{words} {TOKENS}"


class Slot(msgspec.Struct, frozen=True):
    """Reads an attribute of the account, a number or a table by cause.

    ``when``: another attribute without which the table is empty.
    """

    name: str
    when: str = ""

    def __call__(self, account: Account) -> Any:
        return getattr(account, self.name)


class Settled(msgspec.Struct, frozen=True):
    """Reads an attribute of all settlements of the account, summed; None before the first."""

    name: str

    def __call__(self, account: Account) -> int | None:
        found = [getattr(settlement, self.name) for settlement in account.settlements]
        return sum(found) if found else None


class Unknown(msgspec.Struct, frozen=True):
    """Whether the account is unknown, for this reason if there is one."""

    reason: str = ""

    def __call__(self, account: Account) -> bool:
        return account.unknown is not None and self.reason in ("", account.unknown)


class Known(msgspec.Struct, frozen=True):
    """Whether the account has a tuple."""

    name: str

    def __call__(self, account: Account) -> bool:
        return getattr(account, self.name) is not None


class Whole(msgspec.Struct, frozen=True):
    """Reads the sum of a tuple that the account may have; None if it has none."""

    name: str

    def __call__(self, account: Account) -> int | None:
        found = getattr(account, self.name)
        return None if found is None else int(sum(found))


class Item(msgspec.Struct, frozen=True):
    """Reads an item of a tuple that the account may have; None if it has none."""

    name: str
    place: int

    def __call__(self, account: Account) -> int | None:
        found = getattr(account, self.name)
        return None if found is None else int(found[self.place])


# --- The labels of a request, each declared once: whom the request is for, and how urgent it is.
#
# To add a label, add a line here. Every output has it then: the columns of ``requests``, the groups of
# ``--by``, the sums by the hour, the metrics of labelled requests and the page of tables.

NO_LABELS = RequestLabels()


class Label(NamedTuple):
    """One label. ``read`` gives its value for a request; None: the request has none, or it was not recorded.

    ``name``: the word of ``--by`` and the value of the metric label ``label``. ``column``: its column of
    ``requests``. ``none``: what a group without the label is called; "" of a label that is a number, which
    every request has. ``grouped``: whether ``--by`` and metrics know it. ``hourly``: whether the sums by the
    hour keep it apart; each value of it is a row of an hour.
    """

    name: str
    column: str
    text: str
    read: Callable[[Account], str | int | None]
    none: str = ""
    grouped: bool = True
    hourly: bool = False


LABELS: tuple[Label, ...] = (
    Label(
        "priority",
        "priority",
        "the request's priority; a lower number is more urgent",
        lambda account: account.priority,
    ),
    Label(
        "lora",
        "lora",
        "name of the LoRA adapter; null: none, or not recorded",
        lambda account: (account.labels or NO_LABELS).lora or None,
        "no adapter",
        hourly=True,
    ),
    Label(
        "salt",
        "salt",
        "keyed hash of the cache salt; null: none, or not recorded",
        lambda account: salt_name(account.labels or NO_LABELS) or None,
        "no salt",
    ),
    Label(
        "group",
        "request_group",
        "what KVLEDGER_GROUP found in the request id; null: nothing",
        lambda account: (account.labels or NO_LABELS).group or None,
        "no group",
        hourly=True,
    ),
    Label(
        "session",
        "session",
        "vLLM's session id, else what KVLEDGER_SESSION found in the request id; null: none",
        lambda account: session_of(account.labels) or None,
        "no session",
        grouped=False,
    ),
)
GROUPED = tuple(label for label in LABELS if label.grouped)
BY_NAME = {label.name: label for label in LABELS}


def is_number(label: Label) -> bool:
    """Whether every request has the label, as a number."""
    return not label.none


def value_of(label: Label, account: Account) -> str:
    """The value of a label as text; "": the request has none, or the number 0."""
    return str(label.read(account) or "")
