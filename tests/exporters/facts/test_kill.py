"""``kvledger journals compact`` is killed at each call that changes a file: nothing is lost or twice."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from tests.exporters.facts.test_compact import HOUR, Engine
from tests.exporters.facts.test_kept_blocks import SECOND
from tests.exporters.facts.test_kept_blocks import Engine as EngineOfBlocks
from tests.simulated_trace import WALL_SECONDS

from kvledger.exporters.facts.compact import Retention, compact
from kvledger.exporters.facts.kept import FOLDER
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.summary import summarize

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.truncate"}
"""Audit events of calls that change a file; so does ``open`` for writing."""

MOST_CHANGES = 400


def running(folder: Path) -> None:
    """Write a journal that was compacted, and went on."""
    engine = Engine(folder, 120)
    engine.write(30)
    assert "" == compact(engine.path).problem
    engine.write(30)


def ended_with_blocks(folder: Path) -> None:
    """The same at level blocks, of an engine that has ended."""
    engine = EngineOfBlocks(folder, 1, blocks=16, step=120 * SECOND)
    engine.run(20)
    assert "" == compact(engine.path).problem
    engine.run(10)
    engine.stop()


KEEP = Retention(WALL_SECONDS + HOUR, 0.0)
"""Removes the rows of the first hour."""


def killed(journal: Path, at: int, keep: Retention | None) -> bool:
    """Compact in a process that kills itself at its change number ``at``; False if it ended before."""
    child = os.fork()
    if not child:
        changes = 0

        def count(event: str, args: tuple[Any, ...]) -> None:
            nonlocal changes
            writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or writes:
                changes += 1
                if changes == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            compact(journal, keep)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


OF_BLOCKS = """SELECT
    (SELECT list(row ORDER BY number) FROM (SELECT * EXCLUDE (engine) FROM block_operations) row),
    (SELECT list(row ORDER BY life) FROM (SELECT life, request, closed_time FROM admissions) row),
    (SELECT [sum(allocated), sum(hits), sum(evicted)] FROM block_use)
"""


def figures(folder: Path) -> Any:
    """Sums of requests, and all rows about blocks."""
    return msgspec.to_builtins(summarize([folder], "outcome")), ask([folder], OF_BLOCKS).rows


def requests_in_the_dataset(folder: Path) -> int:
    """What anyone who reads the Parquet files below the folder counts."""
    files = f"{folder / FOLDER}/requests/*/*/*.parquet"
    query = f"SELECT count(*) FROM read_parquet('{files}', hive_partitioning = true)"
    ((requests,),) = duckdb.sql(query).fetchall()
    return int(requests)


def requests_in_sums(folder: Path) -> int:
    """What anyone who reads the sums by the hour counts."""
    query = f"SELECT sum(requests) FROM read_parquet('{folder / FOLDER}/hours/*/*/*.parquet')"
    ((requests,),) = duckdb.sql(query).fetchall()
    return int(requests)


@pytest.mark.crash
@pytest.mark.parametrize(("write", "keep"), [(running, KEEP), (ended_with_blocks, None)])
def test_a_killed_compact_changes_no_figure(
    write: Callable[[Path], None], tmp_path: Path, keep: Retention | None
) -> None:
    before = tmp_path / "before"
    write(before)
    expected = figures(before)
    kills, ended, counted = 0, 0, set[tuple[int, int]]()
    for at in range(1, MOST_CHANGES):
        folder = tmp_path / str(at)
        shutil.copytree(before, folder)
        if not killed(folder / "engine-00", at, keep):
            ended = requests_in_sums(folder)
            break
        kills += 1

        assert expected == figures(folder), f"killed at change {at}"
        assert "" == compact(folder / "engine-00", keep).problem
        assert expected == figures(folder), f"compacted again after a kill at change {at}"
        assert [] == [*(folder / FOLDER).rglob("*.new")]
        counted.add((requests_in_the_dataset(folder) if keep is None else 0, requests_in_sums(folder)))
        shutil.rmtree(folder)
    else:
        pytest.fail("there are more changes than were tried")
    assert kills > 10
    assert 1 == len(counted), "the files have the same requests after every kill"
    assert ended == counted.pop()[1]


def test_the_dataset_has_each_ended_request_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 120)
    for batches in (10, 0, 25, 3):
        engine.write(batches)
        compact(engine.path)
    engine.stop()
    compact(engine.path)

    assert 120 == requests_in_the_dataset(tmp_path) == summarize([tmp_path])[-1].requests


def test_two_compacts_at_once_write_nothing_twice(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 120)
    engine.stop()
    child = os.fork()
    if not child:
        try:
            compact(engine.path)
        finally:
            os._exit(0)
    compact(engine.path)
    os.waitpid(child, 0)
    compact(engine.path)

    assert 120 == requests_in_the_dataset(tmp_path)
