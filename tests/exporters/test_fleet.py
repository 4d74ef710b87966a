"""A real Dask scheduler and two worker processes on loopback: the figures are those of one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.time_limits import HANGS

from kvledger.audit.errors import LedgerError
from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.inputs import reading
from kvledger.exporters.reports.audit import report
from kvledger.exporters.reports.diff import compare
from kvledger.exporters.reports.page import gather
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.why import why

distributed = pytest.importorskip("distributed")
fsspec = pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    return journals.golden(folder)


def _told(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        result = re.search(pattern, line)
        if result:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return result[1]
    raise AssertionError("it ended before it said so")


class Cluster:
    """A scheduler and two workers, each a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        words = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        self.address = _told(self._start(*words), r"Scheduler at:\s+(tcp://\S+)")
        for _ in range(2):
            worker = self._start("worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard")
            _told(worker, r"(Registered to)")

    def _start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *words],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        """The workers first."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all; the test that kills a worker comes last of those that need both."""
    started = Cluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.stop()


def figures(paths: Sequence[Path], scheduler: str = "", run: Any = None) -> tuple[Any, Any]:
    """An audit's report without where it was read, and a summary by outcome."""
    with reading(paths, dask=scheduler) as (places, usual):
        result = report(audit_paths(places, run=run or usual))
        rows = summarize(places, "outcome", run=run or usual)
    return [getattr(result, name) for name in result.__struct_fields__ if name != "journals"], rows


@pytest.mark.serving
def test_a_fleet_gives_the_figures_of_one_process(golden: Path, cluster: Cluster) -> None:
    assert figures([golden]) == figures([golden], cluster.address)


@pytest.mark.serving
def test_an_address_elsewhere_gives_the_same_on_a_fleet(golden: Path, cluster: Cluster) -> None:
    assert figures([golden]) == figures([Path(f"file://{golden}")], cluster.address)


@pytest.mark.serving
def test_a_fleet_gives_the_same_causes_pages_and_comparisons(golden: Path, cluster: Cluster) -> None:
    with reading([golden], dask=cluster.address) as (places, run):
        assert why([golden]) == why(places, run=run)
        assert gather([golden]) == gather(places, run=run)
        assert compare([golden], [golden]) == compare(places, places, run=run)


def slow(work: Callable[[Path], Any], began: Path, path: Path) -> Any:
    """As ``work``, so late that a worker can be killed over it."""
    (began / f"{path.name}.{os.getpid()}").write_text("")
    time.sleep(0.2)
    return work(path)


@pytest.mark.serving
def test_a_killed_worker_changes_no_figure(golden: Path, cluster: Cluster, tmp_path: Path) -> None:
    began = tmp_path / "began"
    began.mkdir()
    victim = cluster.processes[1]

    def kill() -> None:
        while len(list(began.glob(f"*.{victim.pid}"))) < 2:
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)

    with reading([golden], dask=cluster.address) as (_, usual):

        def run(work: Any, places: Any) -> Any:
            return usual(partial(slow, work, began), places)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        result = figures([golden], run=run)

    killer.join(HANGS)
    assert -signal.SIGKILL == victim.wait(HANGS)
    assert figures([golden]) == result


def test_an_address_without_a_scheduler_is_refused() -> None:
    from kvledger.exporters.fleet import Fleet

    with pytest.raises(LedgerError, match=r"No Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        Fleet("tcp://127.0.0.1:9", timeout_seconds=0.5)


@pytest.mark.parametrize("address", ["nowhere", "tcp://nowhere", "foo://x:1", ""])
def test_a_malformed_address_is_refused(address: str) -> None:
    from kvledger.exporters.fleet import Fleet

    with pytest.raises(LedgerError, match="No Dask scheduler answers at"):
        Fleet(address)


def test_a_local_reader_gets_copies(golden: Path) -> None:
    with reading([Path(f"file://{golden}")], local=True) as (places, _):
        assert all(place.is_dir() for place in places)
        assert audit_paths([golden]).totals == audit_paths(places).totals
    assert not any(place.exists() for place in places)


def test_data_frames_are_made_from_an_address(golden: Path) -> None:
    frames = pytest.importorskip("kvledger.exporters.trace.frames")

    assert frames.requests(golden).equals(frames.requests(f"file://{golden}"))


def test_journals_in_memory_are_read_through_a_copy(golden: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(golden), "/traces/fleet", recursive=True)

    assert figures([golden]) == figures([Path("memory://traces/fleet")])


def test_a_journal_keeps_its_address(golden: Path) -> None:
    with reading([Path(f"file://{golden}/engine-00")]) as (places, run):
        (book,) = audit_paths(places, run=run).engines

    assert f"file:{golden}/engine-00" == str(book.path)


def test_an_address_without_a_journal_is_refused() -> None:
    with (
        pytest.raises(LedgerError, match="memory://nothing holds no kvledger journal"),
        reading([Path("memory://nothing")]),
    ):
        pass


def test_an_unknown_kind_of_address_is_refused() -> None:
    with pytest.raises(LedgerError, match="can't be read"), reading([Path("nowhere://x")]):
        pass
