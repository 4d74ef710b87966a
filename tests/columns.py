"""The columns of the golden table: of a golden row, of a model's figures and of an account statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.positions import SOURCES, SUMS

if TYPE_CHECKING:
    from tests.histories import Golden

SAME = (
    "scheduled",
    "first_prompt",
    "first_output",
    "rejected",
    "overrun",
    "hit_again",
    "loaded_again",
    "plan",
)
"""Columns with the same name and form in a row, in figures and in a statement."""
CAUSES = ("rework", "discarded", "voided")
"""Figures that are kept by cause."""


def by_title(row: Any) -> str:
    """The title of a row, as the name of its test."""
    title: str = row.title
    return title


def row_columns(row: Golden) -> dict[str, Any]:
    """The columns of a row, ``settled`` with one entry for each chunk of a session."""
    same = {name: getattr(row, name) for name in SAME}
    return {**same, "rework": row.rework, "settled": [row.settled, *row.later]}


def columns(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The same columns of a model's figures, or of :func:`statement_figures`."""
    rework = figures["rework"]
    return {
        **{name: figures[name] for name in SAME},
        "rework": rework if isinstance(rework, int) else sum(rework.values()),
        "settled": [tuple(chunk[source] for source in SOURCES) for chunk in figures["settlements"]],
    }


def by_cause(figure: Any) -> dict[str, int]:
    """Tokens by cause, without the causes that have none."""
    return {cause: tokens for cause, tokens in dict(figure).items() if tokens}


def statement_figures(statement: Any) -> dict[str, Any]:
    """The figures of an account statement, named as in the models."""
    settled = (*SOURCES, "carried", "prompt_tokens")
    return {
        **{name: getattr(statement, name) for name in (*SUMS, "computed", "in_flight")},
        **{name: by_cause(getattr(statement, name)) for name in CAUSES},
        "plan": statement.plan and tuple(statement.plan),
        "settlements": [{name: getattr(one, name) for name in settled} for one in statement.settlements],
    }


def expect_row(row: Golden, figures: Mapping[str, Any]) -> None:
    """Every column of one golden row, and its causes if the row has them."""
    assert row_columns(row) == columns(figures)
    if row.rework_by_cause is not None:
        assert row.rework_by_cause == figures["rework"]
    if row.voided is not None:
        assert row.voided == figures["voided"]
