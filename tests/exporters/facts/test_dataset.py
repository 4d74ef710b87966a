"""Kept rows are plain Hive-partitioned Parquet: other programs read them unchanged and get the same sums."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from tests.exporters.facts.test_compact import Engine

from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.kept import FOLDER
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.summary import summarize

FIGURES = ["prompt_tokens", "local", "external", "computed", "scheduled", "rework", "preemptions"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engines, of which one was compacted several times."""
    path = tmp_path_factory.mktemp("journals")
    first, second = Engine(path, 150), Engine(path, 90, seed=8, name="engine-01")
    first.write(40)
    compact(first.path)
    for engine in (first, second):
        engine.stop()
        compact(engine.path)
    return path


@pytest.fixture(scope="module")
def sums(folder: Path) -> dict[str, int]:
    total = summarize([folder])[-1]
    return {"requests": total.requests, **{name: getattr(total, name) for name in FIGURES}}


def of_frame(frame: pd.DataFrame) -> dict[str, int]:
    return {"requests": len(frame), **{name: int(frame[name].sum()) for name in FIGURES}}


def test_duckdb_reads_the_files(folder: Path, sums: dict[str, int]) -> None:
    import duckdb

    columns = ", ".join(f"sum({name})" for name in FIGURES)
    files = f"{folder / FOLDER}/requests/*/*/*.parquet"
    ((*found,),) = duckdb.sql(
        f"select count(*), {columns} from read_parquet('{files}', hive_partitioning = true)"
    ).fetchall()
    assert list(sums.values()) == found


def test_pandas_reads_the_folder(folder: Path, sums: dict[str, int]) -> None:
    frame = pd.read_parquet(folder / FOLDER / "requests")

    assert sums == of_frame(frame)
    assert {"engine", "ended_hour"} <= set(frame.columns)


def test_dask_reads_the_folder(folder: Path, sums: dict[str, int]) -> None:
    dask = pytest.importorskip("dask.dataframe")

    assert sums == of_frame(dask.read_parquet(folder / FOLDER / "requests").compute())


def test_an_object_store_is_read_through_fsspec(folder: Path, sums: dict[str, int]) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.put(str(folder / FOLDER / "requests"), "/bucket/requests", recursive=True)

    frame = pd.read_parquet("/bucket/requests", filesystem=store)

    assert sums == of_frame(frame)


def test_partitions_are_the_hours_in_which_requests_ended(folder: Path) -> None:
    asked = "select distinct strftime(closed_time, '%Y-%m-%dT%H') from requests where closed_time is not null"
    ended = {hour for (hour,) in ask([folder], asked).rows}
    assert ended == {path.name.partition("=")[2] for path in (folder / FOLDER).glob("requests/*/*")}
