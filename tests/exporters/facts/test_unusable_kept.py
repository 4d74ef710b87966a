"""What held figures and can't be used is never ignored silently."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.command_line import runner
from tests.exporters.facts.test_kept_blocks import Engine

from kvledger.audit.journal.format import segment_name, segments
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.dataset import facts
from kvledger.exporters.facts.replayed import Wanted


def _session(journal: Path) -> Path:
    return kept.place(journal)


def _rows(journal: Path) -> Path:
    return min(kept.folder_of(journal).glob("requests/*/*/*.parquet"))


def _of_another_layout(journal: Path) -> None:
    session = kept.load(_session(journal))
    assert session is not None
    session.layout = "another"
    kept.save(journal, session)


def _is_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOIL: dict[str, Callable[[Path], object]] = {
    "session cut": lambda journal: _cut(_session(journal)),
    "session flipped": lambda journal: _flipped(_session(journal)),
    "session empty": lambda journal: _session(journal).write_bytes(b""),
    "session is a folder": lambda journal: _folder(_session(journal)),
    "session is a link": lambda journal: _is_link(_session(journal)),
    "session is a fifo": lambda journal: (_session(journal).unlink(), os.mkfifo(_session(journal))),
    "session of another layout": _of_another_layout,
    "rows gone": lambda journal: _rows(journal).unlink(),
    "rows cut": lambda journal: _cut(_rows(journal)),
    "rows are a link": lambda journal: _is_link(_rows(journal)),
}


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of an engine that runs, in several segments, compacted."""
    engine = Engine(tmp_path_factory.mktemp("compacted"))
    engine.run(1_500)
    assert 2 < len(segments(engine.path))
    assert "" == compact(engine.path).problem
    return engine.path


@pytest.fixture
def journal(compacted: Path, tmp_path: Path) -> Path:
    """A copy of the journal and of what was kept of it."""
    return shutil.copytree(compacted.parent, tmp_path / "journals") / compacted.name


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
@pytest.mark.parametrize(
    "command", ["summary {} --format json", "why {}", "query {} QUERY", "journals compact {}"]
)
def test_it_is_said_and_the_code_is_3(
    spoil: Callable[[Path], object], command: str, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(capsys)
    words = command.replace("{}", str(journal.parent)).split()
    words = [word.replace("QUERY", "select count(*) from requests") for word in words]
    (journal / segment_name(1)).unlink()
    before = run(*words)
    spoil(journal)
    kept_files = {path: path.lstat().st_mtime_ns for path in kept.folder_of(journal).rglob("*.parquet")}
    after = run(*words)

    assert (0, "") == (before.code, before.err)
    assert 3 == after.code
    assert "the only record of requests" in after.err
    assert kept_files == {
        path: path.lstat().st_mtime_ns for path in kept.folder_of(journal).rglob("*.parquet")
    }


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_the_verdict_of_a_page_is_unknown(spoil: Callable[[Path], object], journal: Path) -> None:
    (journal / segment_name(1)).unlink()
    spoil(journal)
    with facts([journal.parent], wanted=Wanted(audit=True)) as found:
        (audit,) = found.audits

    assert any("the only record of requests" in doubt for doubt in audit.doubts)
    assert "clean" != audit.verdict


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_nothing_is_said_while_the_journal_has_all_of_it(
    spoil: Callable[[Path], object], journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(capsys, "summary", str(journal.parent))
    before = run("--format", "json")
    spoil(journal)
    after = run("--format", "json")

    assert (0, "", before.out) == (after.code, after.err, after.out)
