"""The answers of ``kvledger conformance``: a connector's score card, and with ``--keys`` the partition card.

The scenario, the differences and their judgement are in ``audit/conformance``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...audit.conformance.connector_classes import find_connector
from ...audit.conformance.key_card import EVENTS, KeyCard, KeyRow, key_card
from ...audit.conformance.scorecard import DRAWN, ScoreCard, SituationResult, score
from ...audit.errors import LedgerError
from ...audit.foreign import Unreadable, parsed
from ..answer import DIM, TONES, Answer, Lines, Table, Words, counted

OUTCOMES = ("clean", "inherited", "not reached", "unknown", "violated", "broke")
SCHEDULERS = ("sync", "async")
CODES = {"clean": 0, "violated": 1, "unknown": 3}


def run(
    connector: str,
    module: Path | None,
    options: str | None,
    disaggregated: bool | None = None,
    drawn: int | None = None,
    *,
    verbose: bool = False,
) -> Answer:
    """Make a score card."""
    given = options_of(options)
    drawn = DRAWN if drawn is None else drawn
    return answer(score(connector, module, given, disaggregated=disaggregated, drawn=drawn), verbose=verbose)


def run_keys(connector: str, module: Path | None, options: str | None) -> Answer:
    """Make a partition card."""
    return answer_of_keys(
        key_card(find_connector(connector, module, options_of(options)) if connector else None)
    )


def options_of(text: str | None) -> dict[str, Any] | None:
    """The options of a connector, from JSON. Raises LedgerError."""
    if text is None:
        return None
    try:
        return parsed(text, dict[str, Any])
    except Unreadable as error:
        raise LedgerError(f"--options {error}: it takes a JSON object") from None


def _head(card: ScoreCard) -> str:
    """Which connector was driven on what, and whether kvledger reads its metadata."""
    read = card.connector_metadata == "read"
    metadata = "read" if read else "opaque: kvledger assumes that promised loads are ordered"
    between = ", between two engines" if card.disaggregated else ""
    return f"{card.connector} on {card.engine}{between}; its connector metadata is {metadata}"


def _pairs(card: ScoreCard) -> list[tuple[str, list[SituationResult]]]:
    """The rows of each situation. Of random histories a scheduler may have its own: the first that fails."""
    pairs: dict[str, list[SituationResult]] = {}
    for row in card.rows:
        pairs.setdefault(row.situation, []).append(row)
    return list(pairs.items())


def answer(card: ScoreCard, *, verbose: bool = False) -> Answer:
    """The verdict, then what failed and why, then the situations; ``verbose`` lists the clean ones too."""
    lines = [f"- {', '.join(names)}: {message}" for message, names in _wrong(card).items()]
    pairs = _pairs(card)
    outcomes = [{row.scheduler: row.outcome for row in rows} for _, rows in pairs]
    every = [
        (situation, *(of.get(scheduler, "-") for scheduler in SCHEDULERS), results[0].external_tokens)
        for (situation, results), of in zip(pairs, outcomes, strict=True)
    ]
    rows = [row for row in every if verbose or set(row[1:-1]) != {"clean"}]
    clean = sum(set(row[1:-1]) == {"clean"} for row in every)
    hint = f"Clean under both schedulers: {counted(clean, 'situation')}; -v lists them."
    return Answer(
        card,
        [f"{card.verdict}: {_count(card)}.", f"{_head(card)}."],
        [
            Lines(lines),
            Table(rows, ["situation", *SCHEDULERS, "tokens from the store"]),
            Lines(_unreached(card)),
            Lines([Words(hint, DIM)] if clean and not verbose else []),
        ],
        plain=lambda: {"verdict": card.verdict, **msgspec.to_builtins(card)},
        code=CODES[card.verdict],
    )


def _unreached(card: ScoreCard) -> list[str]:
    """Why situations were not reached, as far as it is known."""
    unreached = sum(row.outcome == "not reached" for row in card.rows)
    stored = any(row.external_tokens for row in card.rows)
    reasons = [card.limits] if card.limits else []
    if unreached and not stored:
        reasons.append(
            f"{unreached} not reached: the connector loaded no token in any situation. The longest prompt "
            "has 200 tokens: a store with chunks of 256 tokens keeps none of them."
        )
    return reasons


def _wrong(card: ScoreCard) -> dict[str, list[str]]:
    """Each failure, with the situations in which it happened."""
    wrong: dict[str, list[str]] = {}
    for situation, rows in _pairs(card):
        for message in dict.fromkeys(message for row in rows for message in row.problems):
            schedulers = [row.scheduler for row in rows if message in row.problems]
            all_of_them = len(schedulers) == len(SCHEDULERS)
            name = situation if all_of_them else f"{situation} ({', '.join(schedulers)})"
            wrong.setdefault(message, []).append(name)
    return wrong


def _count(card: ScoreCard) -> str:
    outcomes: list[str] = [row.outcome for row in card.rows]
    return ", ".join(f"{outcomes.count(word)} {word}" for word in OUTCOMES if word in outcomes)


# --- the partition card ---------------------------------------------------------------------------------


def answer_of_keys(card: KeyCard) -> Answer:
    """The verdict, the table, and what each word says."""
    shares = [row for row in card.rows if "shares" in row.cells.values()]
    rows = [(row.difference, *(_cell(row, place) for place in card.places)) for row in card.rows]
    return Answer(
        card,
        [
            f"{card.verdict}: {counted(len(shares), 'difference')} of {len(card.rows)} shared somewhere.",
            f"{' and '.join(card.places)} of {card.engine}.",
        ],
        [
            Table(rows, ["two requests differ in", *card.places]),
            Lines([f"- {row.difference}: {row.problem}" for row in card.rows if row.problem]),
            Lines([Words(_says(card), DIM)]),
        ],
        plain=lambda: {"verdict": card.verdict, **msgspec.to_builtins(card)},
        code=CODES[card.verdict],
    )


def _cell(row: KeyRow, place: str) -> str:
    cell = row.cells[place]
    tokens = f" {row.shared} tokens" if cell == "shares" and place != EVENTS else ""
    return Words(cell + tokens, TONES[cell])


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
