"""The labels of a request, each declared once: whom the request is for, and how urgent it is.

To add a label, add a line here. Every output has it then: the columns of ``requests``, the groups of
``--by``, the sums by the hour, the metrics of labelled requests and the page of tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..events import RequestLabels
from ..ledger.account import Account
from ..text import salt_name, session_of

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
