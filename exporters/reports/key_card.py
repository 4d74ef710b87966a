"""What ``kvledger conformance --keys`` prints: the partition card as text, Markdown or JSON.

The differences and their cells are made in ``audit/conformance/key_card.py``.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...audit.conformance.connector_classes import find_connector
from ...audit.conformance.key_card import EVENTS, KeyCard, KeyRow, key_card
from .conformance import options_of
from .terminal import blocks, counted, plain_table, show

STYLES = {"parts": "green", "shares": "red", "broke": "red", "no control": "yellow", "not here": "dim"}


def run(connector: str, module: Path | None, options: str | None, format: str) -> str:
    """Make a partition card, print it, and return its verdict."""
    driven = find_connector(connector, module, options_of(options)) if connector else None
    card = key_card(driven)
    if format == "json":
        print(msgspec.json.encode({"verdict": card.verdict, **msgspec.to_builtins(card)}).decode())
    elif format == "markdown":
        print(markdown(card), end="")
    else:
        show(render(card))
    return card.verdict


def render(card: KeyCard) -> Group:
    """The verdict, the table, and what each word says."""
    shares = [row for row in card.rows if "shares" in row.cells.values()]
    answer = f"{card.verdict}: {counted(len(shares), 'difference')} of {len(card.rows)} shared somewhere."
    problems = [Text(f"{row.difference}: {row.problem}") for row in card.rows if row.problem]
    return blocks(
        Group(Text(answer), Text(f"{' and '.join(card.places)} of {card.engine}.")),
        _table(card),
        Group(*problems) if problems else None,
        Text(_says(card), style="dim"),
    )


def _table(card: KeyCard) -> Table:
    table = plain_table(header=True)
    table.add_column("two requests differ in", no_wrap=True)
    for place in card.places:
        table.add_column(place, no_wrap=True)
    for row in card.rows:
        cells = (Text(_cell(row, place), style=STYLES[row.cells[place]]) for place in card.places)
        table.add_row(row.difference, *cells)
    return table


def _cell(row: KeyRow, place: str) -> str:
    cell = row.cells[place]
    tokens = f" {row.shared} tokens" if cell == "shares" and place != EVENTS else ""
    return cell + tokens


def _says(card: KeyCard) -> str:
    says = (
        "parts: the second request gets nothing of the first one's KV from where they differ. shares: it "
        "does, and runs over KV that was made for another request. no control: an equal request gets "
        "nothing either."
    )
    if EVENTS in card.places:
        says += (
            f" {EVENTS}: whether an event tells the difference beside the block's hash, which a router needs "
            "that hashes the tokens itself."
        )
    return says


def markdown(card: KeyCard) -> str:
    """The card as a section of a page."""
    lines = [f"### {' and '.join(card.places)}", "", f"On {card.engine}.", ""]
    lines += [
        f"| two requests differ in | {' | '.join(card.places)} |",
        "|---" * (1 + len(card.places)) + "|",
    ]
    for row in card.rows:
        cells = [_cell(row, place) for place in card.places]
        lines.append(f"| {row.difference} | {' | '.join(cells)} |")
    lines += ["", *(f"- {row.difference}: {row.problem}" for row in card.rows if row.problem)]
    return "\n".join(lines).rstrip() + "\n"
