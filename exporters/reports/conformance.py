"""A connector's score card for a terminal, a page or a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...audit.conformance.scorecard import ScoreCard, SituationResult, score
from ...audit.errors import LedgerError

WRONG_SHOWN = 5
"""On a page; a terminal and a machine get all."""
STYLES = {"clean": "green", "not reached": "dim", "unknown": "yellow", "violated": "red", "broke": "red"}


def run(
    connector: str, module: Path | None, options: str | None, format: str, disaggregated: bool | None = None
) -> str:
    """Make a card and print it; its verdict."""
    from . import terminal

    card = score(connector, module, _options(options), disaggregated=disaggregated)
    if format == "json":
        print(msgspec.json.encode({"verdict": card.verdict, **msgspec.to_builtins(card)}).decode())
    elif format == "markdown":
        print(markdown(card), end="")
    else:
        terminal.show(drawn(card))
    return card.verdict


def _options(said: str | None) -> dict[str, Any] | None:
    if said is None:
        return None
    try:
        options = json.loads(said)
    except ValueError as error:
        raise LedgerError(f"the options are no JSON: {error}") from error
    if not isinstance(options, dict):
        raise LedgerError("the options are no JSON object")
    return options


def _head(card: ScoreCard) -> str:
    read = card.connector_metadata == "read"
    metadata = "read" if read else "opaque: kvledger takes promised loads as ordered"
    between = ", between two engines" if card.disaggregated else ""
    return f"{card.connector} on {card.engine}{between}; its connector metadata is {metadata}"


def _pairs(card: ScoreCard) -> list[tuple[str, list[SituationResult]]]:
    """Rows by situation."""
    pairs: dict[str, list[SituationResult]] = {}
    for row in card.rows:
        pairs.setdefault(row.situation, []).append(row)
    return list(pairs.items())


def drawn(card: ScoreCard) -> Group:
    """A row a situation, a column a scheduler, and what broke below."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(*(Text(word, style="bold") for word in ("situation", "sync", "async", "from the store")))
    for situation, rows in _pairs(card):
        cells = [Text(row.outcome, style=STYLES[row.outcome]) for row in rows]
        table.add_row(Text(situation), *cells, Text(f"{rows[0].external_tokens:,}"))
    parts: list[Any] = [Text(_head(card), style="bold"), "", table]
    for said, names in _wrong(card).items():
        parts += ["", Text(", ".join(names)), Padding(Text(said), (0, 0, 0, 2))]
    return Group(*parts, "", Text(f"{card.verdict}: {_count(card)}", style=STYLES[card.verdict]))


def _wrong(card: ScoreCard) -> dict[str, list[str]]:
    """What broke, each with the rows that it broke in."""
    wrong: dict[str, list[str]] = {}
    for situation, rows in _pairs(card):
        for said in dict.fromkeys(said for row in rows for said in row.problems):
            broken = [row.scheduler for row in rows if said in row.problems]
            name = situation if len(broken) == len(rows) else f"{situation} ({', '.join(broken)})"
            wrong.setdefault(said, []).append(name)
    return wrong


def _count(card: ScoreCard) -> str:
    outcomes: list[str] = [row.outcome for row in card.rows]
    counted = {word: outcomes.count(word) for word in STYLES}
    return ", ".join(f"{count} {word}" for word, count in counted.items() if count)


def markdown(card: ScoreCard) -> str:
    """The same for a page."""
    lines = [
        f"### {card.connector}",
        "",
        f"{_head(card)}. **{card.verdict}**: {_count(card)}.",
        "",
        "| situation | sync | async | tokens from the store |",
        "|---|---|---|---|",
    ]
    for situation, rows in _pairs(card):
        outcomes: list[str] = [row.outcome for row in rows]
        lines.append(f"| {situation} | {' | '.join(outcomes)} | {rows[0].external_tokens:,} |")
    wrong = [f"- {', '.join(names)}: {said}" for said, names in _wrong(card).items()]
    if wrong:
        more = [f"- and {len(wrong) - WRONG_SHOWN} more"] if len(wrong) > WRONG_SHOWN else []
        lines += ["", *wrong[:WRONG_SHOWN], *more]
    return "\n".join(lines) + "\n"
