"""What ``kvledger conformance`` prints: a connector's score card as text, Markdown or JSON.

The scenario and its judgement are in ``audit/conformance``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...audit.conformance.scorecard import ScoreCard, SituationResult, score
from ...audit.errors import LedgerError
from .terminal import blocks, counted, indented, show

WRONG_SHOWN = 5
"""Failures on a Markdown page; text and JSON have all."""
STYLES = {"clean": "green", "inherited": "dim", "not reached": "dim", "unknown": "yellow"}
STYLES |= {"violated": "red", "broke": "red"}


def run(
    connector: str,
    module: Path | None,
    options: str | None,
    format: str,
    disaggregated: bool | None = None,
    *,
    verbose: bool = False,
) -> str:
    """Make a score card, print it, and return its verdict."""
    card = score(connector, module, options_of(options), disaggregated=disaggregated)
    if format == "json":
        print(msgspec.json.encode({"verdict": card.verdict, **msgspec.to_builtins(card)}).decode())
    elif format == "markdown":
        print(markdown(card), end="")
    else:
        show(render(card, verbose=verbose))
    return card.verdict


def options_of(text: str | None) -> dict[str, Any] | None:
    """The options of a connector, from JSON. Raises LedgerError."""
    if text is None:
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise LedgerError(f"--options is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise LedgerError("--options is not a JSON object")
    return options


def _head(card: ScoreCard) -> str:
    """Which connector was driven on what, and whether kvledger reads its metadata."""
    read = card.connector_metadata == "read"
    metadata = "read" if read else "opaque: kvledger assumes that promised loads are ordered"
    between = ", between two engines" if card.disaggregated else ""
    return f"{card.connector} on {card.engine}{between}; its connector metadata is {metadata}"


def _pairs(card: ScoreCard) -> list[tuple[str, list[SituationResult]]]:
    """The rows of each situation."""
    pairs: dict[str, list[SituationResult]] = {}
    for row in card.rows:
        pairs.setdefault(row.situation, []).append(row)
    return list(pairs.items())


def render(card: ScoreCard, *, verbose: bool = False) -> Group:
    """The verdict, then what failed and why, then the situations; ``verbose`` lists the clean ones too."""
    answer = Group(
        Text(f"{card.verdict}: {_count(card)}", style=STYLES[card.verdict]), Text(f"{_head(card)}.")
    )
    failures = [
        Group(Text(", ".join(names), style="bold"), indented(Text(message)))
        for message, names in _wrong(card).items()
    ]
    return blocks(answer, *failures, _situations(card, verbose), _hint(card, verbose))


def _situations(card: ScoreCard, verbose: bool) -> Table | None:
    """One row per situation, one column per scheduler. Without ``verbose``, only rows not clean."""
    pairs = [
        (situation, rows)
        for situation, rows in _pairs(card)
        if verbose or any(row.outcome != "clean" for row in rows)
    ]
    if not pairs:
        return None
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    headings = ("situation", "sync", "async", "tokens from the store")
    table.add_row(*(Text(heading, style="bold") for heading in headings))
    for situation, rows in pairs:
        cells = [Text(row.outcome, style=STYLES[row.outcome]) for row in rows]
        table.add_row(Text(situation), *cells, Text(f"{rows[0].external_tokens:,}"))
    return table


def _hint(card: ScoreCard, verbose: bool) -> Text | None:
    """How many situations are not listed because they are clean."""
    clean = sum(all(row.outcome == "clean" for row in rows) for _, rows in _pairs(card))
    if verbose or not clean:
        return None
    return Text(f"Clean under both schedulers: {counted(clean, 'situation')}; -v lists them.", style="dim")


def _wrong(card: ScoreCard) -> dict[str, list[str]]:
    """Each failure, with the situations in which it happened."""
    wrong: dict[str, list[str]] = {}
    for situation, rows in _pairs(card):
        for message in dict.fromkeys(message for row in rows for message in row.problems):
            schedulers = [row.scheduler for row in rows if message in row.problems]
            all_of_them = len(schedulers) == len(rows)
            name = situation if all_of_them else f"{situation} ({', '.join(schedulers)})"
            wrong.setdefault(message, []).append(name)
    return wrong


def _count(card: ScoreCard) -> str:
    outcomes: list[str] = [row.outcome for row in card.rows]
    counts = {word: outcomes.count(word) for word in STYLES}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def markdown(card: ScoreCard) -> str:
    """The score card as a section of a Markdown page."""
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
    wrong = [f"- {', '.join(names)}: {message}" for message, names in _wrong(card).items()]
    if wrong:
        more = [f"- and {len(wrong) - WRONG_SHOWN} more"] if len(wrong) > WRONG_SHOWN else []
        lines += ["", *wrong[:WRONG_SHOWN], *more]
    return "\n".join(lines) + "\n"
