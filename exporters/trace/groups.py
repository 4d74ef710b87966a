"""The groups that reports and tables can be broken down by.

A group is chosen by one of :data:`KEYS`, or by a regular expression over request ids whose first group, else
the whole match, names the group.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from math import floor

from ...audit.errors import LedgerError
from ...audit.figures.figure import GROUPED, Label
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit

TIMES = {"hour": 3600, "day": 86_400, "5m": 300}
"""Keys that group by arrival, and the length of a group in seconds."""

KEYS = ("engine", "model", "outcome", "rank", *TIMES, *(label.name for label in GROUPED), "tiers")
NO_MATCH = "no match"
NO_TIER = "no tier reported"
"""Requests of whose external tokens the connector reported no tier."""

Key = Callable[[Account], str]


def check(by: str) -> None:
    """Raise :class:`LedgerError` if ``by`` names no groups."""
    if by and by not in KEYS:
        _pattern(by)


def group_key(by: str, engine_audit: EngineAudit) -> Key:
    """A function from an account of this engine to the name of its group; "": one group of that name."""
    if by in TIMES:
        return lambda account: arrival(engine_audit.began_seconds, account.added_at / 1e6, TIMES[by])
    keys: dict[str, Key] = {
        "": lambda _: "",
        "engine": lambda _: engine_audit.name,
        "model": lambda _: engine_audit.model,
        "rank": lambda _: str(engine_audit.rank),
        "outcome": lambda account: account.outcome or ("open" if account.closed_at < 0 else "unknown"),
        **{label.name: partial(_shown, label) for label in GROUPED},
        "tiers": lambda account: tier_names(account) or NO_TIER,
    }
    if by in keys:
        return keys[by]
    name = named_by(by)
    return lambda account: name(account.request_id)


def tier_names(account: Account) -> str:
    """The tiers that the connector reported for the request's external tokens, with commas between them."""
    return ", ".join(sorted(account.promised_by_tier))


def _shown(label: Label, account: Account) -> str:
    found = label.read(account)
    return label.none if found is None else str(found)


def arrival(began_seconds: float | None, added_seconds: float, length: int) -> str:
    """The name of the time in which a request arrived, such as ``2026-01-31T12:05Z``."""
    return time_name(floor(((began_seconds or 0.0) + added_seconds) / length), length)


def time_name(place: int, length: int) -> str:
    """The beginning of a group of ``length`` seconds; ``place`` counts such groups since 1970."""
    return datetime.fromtimestamp(place * length, timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


def named_by(pattern_text: str) -> Callable[[str], str]:
    """A function from a request id to its group, by a regular expression."""
    pattern = _pattern(pattern_text)

    def name(request_id: str) -> str:
        match = pattern.search(request_id)
        if match is None:
            return NO_MATCH
        return match[1] or "" if pattern.groups else match[0]

    return name


def _pattern(by: str) -> re.Pattern[str]:
    try:
        return re.compile(by)
    except re.error as error:
        raise LedgerError(
            f"{by!r} is none of {', '.join(KEYS)}, and no regular expression: {error}."
        ) from error
