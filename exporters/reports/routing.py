"""``kvledger check routing``: what a router's index promises of a request, and what the engine then had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...audit.analysis.router_index import Index, TokensIndex, UncountedIndex
from ...audit.analysis.routing import MISSED, SURPLUS, Routing, Row
from ...audit.errors import LedgerError
from ...audit.replay.recorded_events import routing
from ..csv_cells import csv_of
from . import terminal

SHOWN = 20
"""Requests that differ and are printed without ``-v``."""

COLUMNS = ("request", "engine", "prompt", "predicted", "predicted_here", "found", "missed", "surplus")


class Prediction(msgspec.Struct):
    """What a router predicted of one request: an id of it, and tokens by the port of each engine's events."""

    request: str
    predicted: dict[int, int]


def predictions(path: Path) -> dict[str, dict[int, int]]:
    """A router's predictions, a line of JSON for each. Raises LedgerError for anything else."""
    try:
        lines = path.read_bytes().splitlines()
        found = [msgspec.json.decode(line, type=Prediction, strict=False) for line in lines if line.strip()]
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise LedgerError(f"{path} has a line that is no prediction: {error}.") from None
    return {each.request: each.predicted for each in found}


def measured(journals: Sequence[Path], index: str, predicted: Path | None = None) -> Routing:
    """The routing table of these journals, by the index of this name. Raises LedgerError."""
    if predicted is not None:
        return routing(journals, predicted=predictions(predicted))
    if index == "tokens":
        return routing(journals, _by_tokens)
    if index == "uncounted":
        return routing(journals, UncountedIndex)
    if index == "dynamo":
        from ..dynamo_index import DynamoIndex

        return routing(journals, DynamoIndex)
    return routing(journals)


def _by_tokens(contents: Mapping[int, int]) -> Index:
    """An index without salts and adapters. Raises LedgerError if the tokens were not recorded."""
    if not contents:
        raise LedgerError(
            "--index tokens needs KV events that this release of kvledger recorded, with blocks in them."
        )
    return TokensIndex(contents)


def render(result: Routing, *, verbose: bool = False) -> Group:
    """The sums, the causes, then the requests that differ."""
    differ = [row for row in result.rows if row.missed or row.surplus]
    shown = differ if verbose else differ[:SHOWN]
    left = len(differ) - len(shown)
    return terminal.blocks(
        Group(*_head(result, differ)),
        _causes(result),
        _requests(result, shown) if shown else None,
        Text(f"{left} more; -v prints them.", style="dim") if left else None,
    )


def _head(result: Routing, differ: Sequence[Row]) -> Iterator[Text]:
    predicted, found = _sum(result, "predicted"), _sum(result, "found")
    requests = terminal.counted(len(result.rows), "request")
    yield Text(
        f"{requests} on {terminal.counted(len(result.engines), 'engine')}: {predicted:,} tokens predicted, "
        f"{found:,} found; {len(differ):,} requests differ."
    )
    if result.gaps:
        yield Text(f"{terminal.counted(result.gaps, 'gap')} in the KV events.", style="yellow")
    if result.left_out:
        left_out = terminal.counted(result.left_out, "request")
        yield Text(f"{left_out} left out: without an admission in the journals, or without a prediction.")


def _sum(result: Routing, name: str) -> int:
    return sum(getattr(row, name) for row in result.rows)


def _causes(result: Routing) -> Table:
    table = terminal.plain_table(header=True)
    for name in ("requests", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("cause", no_wrap=True)
    table.add_column("")
    for (side, cause), (requests, tokens) in sorted(result.causes().items(), key=lambda row: -row[1][1]):
        words, sign = (MISSED, "") if side == "missed" else (SURPLUS, "-")
        table.add_row(f"{requests:,}", f"{sign}{tokens:,}", cause, words[cause])
    difference = _sum(result, "predicted") - _sum(result, "found")
    table.add_row("", f"{difference:,}", "sum", "predicted less found")
    return table


def _requests(result: Routing, rows: Sequence[Row]) -> Table:
    table = terminal.plain_table(header=True)
    for name in ("request", "engine"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "predicted", "there", "found"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("causes")
    for row in rows:
        causes = [f"{tokens:,} {cause}" for cause, tokens in row.missed.items()]
        causes += [f"-{tokens:,} {cause}" for cause, tokens in row.surplus.items()]
        figures = (row.request.prompt_tokens, row.predicted, row.predicted_here, row.found)
        table.add_row(
            row.request.request_id,
            str(row.request.engine + 1),
            *(f"{figure:,}" for figure in figures),
            ", ".join(causes),
        )
    return table


def data(result: Routing) -> dict[str, Any]:
    """The same as plain data. Engines are numbered from 0."""
    return {
        "engines": result.engines,
        "requests": len(result.rows),
        "left_out": result.left_out,
        "gaps": result.gaps,
        "predicted": _sum(result, "predicted"),
        "found": _sum(result, "found"),
        "causes": [
            {"side": side, "cause": cause, "requests": requests, "tokens": tokens}
            for (side, cause), (requests, tokens) in result.causes().items()
        ],
        "rows": [_plain(row) for row in result.rows],
    }


def _plain(row: Row) -> dict[str, Any]:
    return {
        "request": row.request.request_id,
        "engine": row.request.engine,
        "prompt": row.request.prompt_tokens,
        "predicted": row.predicted,
        "best": row.best,
        "predicted_here": row.predicted_here,
        "found": row.found,
        "missed": row.missed,
        "surplus": row.surplus,
    }


def as_csv(result: Routing) -> str:
    """One line per request; causes as ``cause=tokens``, separated by semicolons."""
    lines = []
    for row in result.rows:
        plain = _plain(row)
        causes = [";".join(f"{cause}={n}" for cause, n in plain[name].items()) for name in COLUMNS[-2:]]
        lines.append([*(plain[name] for name in COLUMNS[:-2]), *causes])
    return csv_of(COLUMNS, lines)
