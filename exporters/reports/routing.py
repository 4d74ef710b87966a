"""``kvledger check routing``: what a router's index promises of a request, and what the engine then had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...audit.analysis.routing import LACKS, MISSED, SURPLUS, Index, Routing, Row, TokensIndex, UncountedIndex
from ...audit.errors import LedgerError
from ...audit.foreign import Unreadable, lines_of, parsed
from ...audit.replay.recorded_events import routing
from ...audit.text import utc
from ..answer import DIM, DOUBT, Answer, Lines, Records, Sum, Table, Words, counted

SHOWN = 20
"""Requests that differ and are printed without ``-v``."""

COLUMNS = ("request", "engine", "prompt", "predicted", "predicted_here", "found", "missed", "surplus")


class Prediction(msgspec.Struct):
    """What a router predicted of one request: an id of it, and tokens by the port of each engine's events."""

    request: str
    predicted: dict[int, int]


def predictions(path: Path) -> dict[str, dict[int, int]]:
    """A router's predictions, a line of JSON for each. Raises LedgerError for anything else."""
    found: dict[str, dict[int, int]] = {}
    for number, line in lines_of(path):
        try:
            each = parsed(line, Prediction, strict=False)
        except Unreadable as error:
            raise LedgerError(f"Line {number} of {path} {error}, so it is no prediction.") from None
        found[each.request] = each.predicted
    return found


def measured(journals: Sequence[Path], index: str, predicted: Path | None = None) -> Routing:
    """The routing table of these journals, by the index of this name. Raises LedgerError."""
    if predicted is not None:
        return routing(journals, predicted=predictions(predicted))
    if index == "tokens":
        return routing(journals, _by_tokens)
    if index == "uncounted":
        return routing(journals, UncountedIndex)
    if index.startswith("dynamo"):
        from ..dynamo_index import DynamoIndex

        return routing(journals, partial(DynamoIndex, counts=index == "dynamo"))
    return routing(journals)


def _by_tokens(contents: Mapping[int, int]) -> Index:
    """An index without salts and adapters. Raises LedgerError if the tokens were not recorded."""
    if not contents:
        raise LedgerError(
            "--index tokens needs KV events that this release of kvledger recorded, with blocks in them."
        )
    return TokensIndex(contents)


def answer(result: Routing, *, verbose: bool = False) -> Answer:
    """The sums, the causes, then the requests that differ. CSV has causes as ``cause=tokens``."""
    predicted, found = _sum(result, "predicted"), _sum(result, "found")
    differ = [row for row in result.rows if row.missed or row.surplus]
    shown = differ if verbose else differ[:SHOWN]
    requests, engines = counted(len(result.rows), "request"), counted(len(result.engines), "engine")
    figures = f"{predicted:,} tokens predicted, {found:,} found"
    sentences = [f"{requests} on {engines}: {figures}; {len(differ):,} requests differ."]
    if result.gaps:
        sentences.append(Words(f"{counted(result.gaps, 'gap')} in the KV events.", DOUBT))
    if result.left_out:
        left_out = counted(result.left_out, "request")
        sentences.append(
            f"{left_out} left out: without an admission in the journals, or without a prediction."
        )
    causes: list[tuple[object, ...]] = []
    for (side, cause), (many, tokens) in sorted(result.causes().items(), key=lambda row: -row[1][1]):
        words, sign = (MISSED, 1) if side == "missed" else (SURPLUS, -1)
        causes.append((words[cause], many, sign * tokens, cause))
    causes.append(Sum(("predicted less found", "", predicted - found, "sum")))
    left = Words(f"{len(differ) - len(shown)} more; -v prints them.", DIM)
    return Answer(
        result,
        sentences,
        [
            Table(causes, " | requests | tokens | cause"),
            Table(list(map(_shown, shown)), "request | engine | prompt | predicted | there | found | causes"),
            Lines([left] if len(differ) > len(shown) else []),
            Lines(list(_indexes(result)), "What an index of these KV events is worth"),
        ],
        Records(COLUMNS, map(_record, result.rows)),
        lambda: data(result),
    )


def _indexes(result: Routing) -> Iterator[str]:
    for engine, state in zip(result.engines, result.indexes, strict=False):
        since = state.exact_since
        if since is not None:
            began = "last reset" if state.lost else "first KV event"
            yield f"{engine}: exact since its {began}, {utc(since)}"
        elif state.first:
            why = "the batches before that were lost"
            yield f"{engine}: not exact since {utc(state.lost)}: {why}. The next reset of its cache mends it."
        else:
            yield f"{engine}: no KV events"
        yield from (f"- {blocks:,} {LACKS[what]}" for what, blocks in state.lacks.items())


def _sum(result: Routing, name: str) -> int:
    return sum(getattr(row, name) for row in result.rows)


def _shown(row: Row) -> tuple[object, ...]:
    causes = [f"{tokens:,} {cause}" for cause, tokens in row.missed.items()]
    causes += [f"-{tokens:,} {cause}" for cause, tokens in row.surplus.items()]
    figures = (row.request.prompt_tokens, row.predicted, row.predicted_here, row.found)
    return (row.request.request_id, row.request.engine + 1, *figures, ", ".join(causes))


def _record(row: Row) -> list[object]:
    plain = _plain(row)
    causes = [";".join(f"{cause}={n}" for cause, n in plain[name].items()) for name in COLUMNS[-2:]]
    return [*(plain[name] for name in COLUMNS[:-2]), *causes]


def data(result: Routing) -> dict[str, Any]:
    """The same as plain data. Engines are numbered from 0."""
    return {
        "engines": result.engines,
        "requests": len(result.rows),
        "left_out": result.left_out,
        "gaps": result.gaps,
        "indexes": [
            {"engine": engine, "exact_since": state.exact_since, "lacks": state.lacks}
            for engine, state in zip(result.engines, result.indexes, strict=False)
        ],
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
