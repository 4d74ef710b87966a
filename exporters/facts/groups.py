"""The groups of requests that ``--by`` names, and the condition of ``--where``, as SQL over ``requests``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from ...audit.errors import LedgerError
from ...audit.figures.figure import GROUPED, Label, is_number
from ..trace.groups import NO_MATCH, NO_TIER, TIMES, check, time_name
from .hours import HOUR_LABELS
from .schema import REQUESTS


def as_text(column: str) -> str:
    """A column as text, a null as a word."""
    return f"coalesce(CAST({column} AS VARCHAR), 'null')"


COLUMNS = tuple(column.name for column in REQUESTS)


def _label_expression(label: Label) -> str:
    if is_number(label):
        return f"CAST({label.column} AS VARCHAR)"
    return f"coalesce({label.column}, '{label.none}')"


KEYS = {
    "engine": "engine",
    "model": "coalesce(model, '')",
    "rank": "CAST(data_parallel_rank AS VARCHAR)",
    "outcome": "coalesce(outcome, CASE WHEN closed_time IS NULL THEN 'open' ELSE 'unknown' END)",
    **{label.name: _label_expression(label) for label in GROUPED},
    "tiers": f"coalesce(tiers, '{NO_TIER}')",
    **{name: f"epoch_us(added_time) // {length * 1_000_000}" for name, length in TIMES.items()},
}
"""The words of ``--by`` that are not the name of a column, or show a null as words."""

HOUR_EXPRESSIONS = frozenset(
    [
        *(KEYS[word] for word in ("engine", "model", "rank", "outcome", "hour", "day")),
        *(KEYS[label.name] for label in GROUPED if label.hourly),
        *(as_text(column) for column in ("engine", "journal", *HOUR_LABELS)),
    ]
)
"""The groups of which there are sums by the hour."""

_WORD = re.compile(r"[A-Za-z0-9_]+")


def group_columns(by: str) -> list[str]:
    """The SQL expressions of the groups that ``by`` names: columns or keys with commas between them, or a
    regular expression over request ids. Raises LedgerError for a word that is neither.
    """
    if not by:
        return []
    words = [word.strip() for word in by.split(",")]
    if all(map(_WORD.fullmatch, words)):
        return [_column(word) for word in words]
    check(by)
    pattern = "'" + by.replace("'", "''") + "'"
    place = 1 if re.compile(by).groups else 0
    found = f"regexp_extract(request_id, {pattern}, {place})"
    return [f"CASE WHEN regexp_matches(request_id, {pattern}) THEN {found} ELSE '{NO_MATCH}' END"]


def group_names(by: str, group: Sequence[str]) -> str:
    """What a group is called whose columns have these values; a time by its beginning."""
    words = [word.strip() for word in by.split(",")]
    if len(words) != len(group):
        return ", ".join(group)
    return ", ".join(
        time_name(int(value), TIMES[word]) if word in TIMES else value
        for word, value in zip(words, group, strict=True)
    )


def percentile_columns(words: str) -> list[str]:
    """The columns that ``--percentiles`` names. Raises LedgerError for one that is none."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    for name in names:
        if name not in NUMBERS:
            raise LedgerError(f"{name!r} is no column of numbers of requests.{_hint(name, NUMBERS)}")
    return names


NUMBERS = tuple(column.name for column in REQUESTS if column.kind in ("count", "seconds"))


def _hint(word: str, known: Sequence[str]) -> str:
    close = get_close_matches(word, known, n=3)
    return f" Did you mean {', '.join(close)}?" if close else ""


def _column(word: str) -> str:
    if word in KEYS:
        return KEYS[word]
    if word in COLUMNS:
        return as_text(word)
    raise LedgerError(
        f"{word!r} is no column of requests and none of {', '.join(KEYS)}.{_hint(word, (*KEYS, *COLUMNS))} "
        "A regular expression over request ids has a character that no column name has: (user-[0-9]+)."
    )
