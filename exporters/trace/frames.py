"""Tables of a trace as pandas DataFrames, for notebooks. Needs the analysis extra.

    from kvledger.exporters.trace import frames

    requests = frames.requests("/var/lib/kvledger")
    requests.groupby("outcome")[["prompt_tokens", "local", "external"]].sum()

Columns and their meaning are in :data:`~kvledger.exporters.trace.columns.TABLES`. Text is ``string``, a count
``Int64``, seconds ``Float64`` and a time ``datetime64[us, UTC]``; a null is ``<NA>`` or ``NaT``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from ...audit.errors import LedgerError
from ...audit.replay.windows import EVERYTHING, Window
from ..facts.schema import Rows
from ..inputs import reading
from .columns import TABLES, rows

DTYPES = {"text": "string", "count": "Int64", "seconds": "Float64", "time": "datetime64[us, UTC]"}

Paths = str | Path | Iterable[str | Path]


def requests(paths: Paths) -> pd.DataFrame:
    """A row per request: the sources of its prompt tokens, and its work."""
    return table("requests", paths)


def lives(paths: Paths) -> pd.DataFrame:
    """A row per life, from an admission to a preemption or the end."""
    return table("lives", paths)


def entries(paths: Paths) -> pd.DataFrame:
    """A row per posting, as on an account statement."""
    return table("entries", paths)


def causes(paths: Paths) -> pd.DataFrame:
    """A row per request, figure and cause: rework, discarded, voided and missed tokens."""
    return table("causes", paths)


def findings(paths: Paths) -> pd.DataFrame:
    """A row per finding, drifts included."""
    return table("findings", paths)


def steps(paths: Paths) -> pd.DataFrame:
    """A row per run of equal steps: what was scheduled."""
    return table("steps", paths)


def stays(paths: Paths) -> pd.DataFrame:
    """A row per stay of content in a block, from its caching to its eviction. Level blocks only."""
    return table("stays", paths)


def occupancy(paths: Paths) -> pd.DataFrame:
    """A row per second: how many blocks were running, cached and empty. Level blocks only."""
    return table("occupancy", paths)


def table(name: str, paths: Paths) -> pd.DataFrame:
    """One of :data:`~kvledger.exporters.trace.columns.TABLES`.

    Raises LedgerError for a path that holds no journal.
    """
    return tables(paths, (name,))[name]


def tables(paths: Paths, names: Iterable[str], window: Window = EVERYTHING) -> dict[str, pd.DataFrame]:
    """The tables of these names, from one reading of the journals.

    The ``window`` is as for :func:`~.tables.rows`. Raises LedgerError for a path that holds no journal, and
    for a name that is no table.
    """
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    data: dict[str, Rows] = {name: [] for name in names}
    for name in data.keys() - TABLES.keys():
        raise LedgerError(f"{name!r} is no table: there are {', '.join(TABLES)}.")
    with reading(given, local=True) as (places, _):
        for name, some in rows(places, tuple(data), window):
            data[name] += some
    return {name: _frame(name, some) for name, some in data.items()}


def _frame(name: str, data: Rows) -> pd.DataFrame:
    columns = TABLES[name]
    frame = pd.DataFrame.from_records(data, columns=[column.name for column in columns])
    for column in columns:
        if column.kind == "time":
            frame[column.name] = pd.to_datetime(frame[column.name].astype("Int64"), unit="us", utc=True)
    return frame.astype({column.name: DTYPES[column.kind] for column in columns})
