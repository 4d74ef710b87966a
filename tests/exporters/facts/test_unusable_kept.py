"""What held figures and can't be used is never ignored silently."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.command_line import runner
from tests.exporters.facts.test_kept_blocks import Engine

from kvledger.audit.journal.format import segment_name, segments
from kvledger.audit.replay.atomic_files import FOLDER
from kvledger.audit.replay.windows import Window
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.dataset import facts
from kvledger.exporters.facts.replayed import Wanted
from kvledger.exporters.facts.sums import by_group


def _session(journal: Path) -> Path:
    return kept.place(journal)


def _rows(journal: Path) -> Path:
    return min(kept.folder_of(journal).glob("requests/*/*/*.parquet"))


def _sums(journal: Path) -> Path:
    return min(kept.folder_of(journal).glob("hours/*/*/*.parquet"))


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


def _exchanged(path: Path) -> None:
    """Give the file and one of another table each other's contents."""
    other = max(path.parents[3].glob("*/*/*/*.parquet"))
    assert other != path
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


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
    "rows gone": lambda journal: _rows(journal).unlink(),
    "rows cut": lambda journal: _cut(_rows(journal)),
    "rows are a link": lambda journal: _is_link(_rows(journal)),
    "rows flipped": lambda journal: _flipped(_rows(journal)),
    "rows exchanged": lambda journal: _exchanged(_rows(journal)),
    "sums flipped": lambda journal: _flipped(_sums(journal)),
}


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of an engine that runs, in several segments, compacted."""
    engine = Engine(tmp_path_factory.mktemp("compacted"))
    engine.run(800)
    assert 2 < len(segments(engine.path))
    assert "" == compact(engine.path).problem
    return engine.path


@pytest.fixture
def journal(compacted: Path, tmp_path: Path) -> Path:
    """A copy of the journal and of what was kept of it."""
    return shutil.copytree(compacted.parent, tmp_path / "journals") / compacted.name


COMMANDS = ("summary {} --format json", "why {}", "query {} QUERY", "journals compact {}")


@pytest.mark.parametrize(
    ("damage", "command"),
    [*zip(SPOIL, itertools.cycle(COMMANDS), strict=False), *itertools.product(["rows flipped"], COMMANDS)],
)
def test_it_is_said_and_the_code_is_3(
    damage: str, command: str, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each damage with a command, and one damage with each."""
    spoil, run = SPOIL[damage], runner(capsys)
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


def _counts(journal: Path) -> tuple[list[tuple[str, int, str | None]], int]:
    """The rows of requests, and the prompt tokens of all by the sums."""
    with facts([journal.parent]) as found:
        rows = found.rows("select request_id, prompt_tokens, outcome from requests order by 1, 2, 3")
        return rows, by_group(found, ())[()].figures["prompt_tokens"]


@pytest.mark.parametrize("ends", [False, True])
def test_rows_of_another_version_count_and_compact_goes_on(
    ends: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each request once, in each figure, although its first segments are gone."""
    run = runner(capsys)
    engine = Engine(tmp_path / "journals", rotates=True, segment_bytes=5_000)
    for _ in range(8):  # no segment goes before it was compacted
        engine.run(50)
        assert "" == compact(engine.path).problem
    assert 1 not in segments(engine.path)
    if ends:
        engine.stop()
        assert "" == compact(engine.path).problem
    expected = _counts(engine.path)
    _of_another_layout(engine.path)
    summary = run("summary", engine.path.parent, "--format", "json")

    assert expected == _counts(engine.path)
    assert 3 == summary.code
    assert "is of another version of kvledger: its rows count" in summary.err

    with facts([engine.path.parent], wanted=Wanted(audit=True)) as found:
        (audit,) = found.audits
        assert any("another version" in doubt for doubt in audit.doubts)
        assert expected[1] == audit.totals().prompt_tokens

    run("journals", "compact", engine.path.parent)
    again = run("journals", "compact", engine.path.parent)
    after = run("summary", engine.path.parent, "--format", "json")

    assert (0, "") == (again.code, again.err)
    assert (0, "", summary.out) == (after.code, after.err, after.out)
    assert expected == _counts(engine.path)
    if not ends:
        engine.run(100)
        control = _counts(engine.path)
        assert len(expected[0]) < len(control[0])
        assert "" == compact(engine.path).problem
        assert control == _counts(engine.path)
    with facts([engine.path.parent]) as found:
        ((rows, years),) = found.rows("select count(*), count(distinct year(time)) from block_use")
        assert rows > 1 and years == 1
    assert 0 == run("whatif", engine.path.parent).code


ONE_OF_EACH = ("session is a fifo", "rows cut", "sums flipped")
"""What is wrong with a file is told by the test above, and each kind of file is left out in one way."""


@pytest.mark.parametrize("damage", ONE_OF_EACH)
def test_the_verdict_of_a_page_is_unknown(damage: str, journal: Path) -> None:
    (journal / segment_name(1)).unlink()
    SPOIL[damage](journal)
    with facts([journal.parent], wanted=Wanted(audit=True)) as found:
        (audit,) = found.audits

    assert any("the only record of requests" in doubt for doubt in audit.doubts)
    assert "clean" != audit.verdict


@pytest.mark.parametrize("damage", ONE_OF_EACH)
def test_nothing_is_said_while_the_journal_has_all_of_it(
    damage: str, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(capsys, "summary", str(journal.parent))
    before = run("--format", "json")
    SPOIL[damage](journal)
    after = run("--format", "json")

    assert (0, "", before.out) == (after.code, after.err, after.out)


def test_every_flipped_bit_of_every_kept_file_is_noticed(compacted: Path) -> None:
    """Also each truncation: rows are read only if they are those that were written."""
    rng = random.Random(1)
    session = kept.load(_session(compacted))
    assert session is not None
    for file in kept.every_file(session) * 3:
        path = kept.readable(kept.folder_of(compacted), file)
        data = path.read_bytes()
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        for wrong in (bytes(changed), data[: rng.randrange(len(data))]):
            path.write_bytes(wrong)
            assert kept.find(compacted) is None, path
        path.write_bytes(data)

    assert kept.find(compacted) is not None


def test_one_engine_with_changed_sums_stops_no_other_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its journal is whole, so its rows are written again."""
    run = runner(capsys)
    folder = tmp_path / "journals"
    for seed, name in enumerate(("engine-00", "engine-01")):
        engine = Engine(tmp_path / name, seed)
        engine.run(300)
        shutil.copytree(engine.path, folder / name)
        assert "" == compact(folder / name).problem
    before = run("summary", folder, "--format", "json")
    _flipped(_sums(folder / "engine-00"))
    changed = run("summary", folder, "--format", "json")
    again = run("journals", "compact", folder)
    after = run("summary", folder, "--format", "json")

    assert (0, "", before.out) == (changed.code, changed.err, changed.out)
    assert (0, "") == (again.code, again.err)
    assert (0, "", before.out) == (after.code, after.err, after.out)
    assert kept.find(folder / "engine-00") is not None


def test_a_window_reads_no_file_of_another_hour(compacted: Path, tmp_path: Path) -> None:
    """So a file that no request of the window can be in may be changed."""
    journal = shutil.copytree(compacted.parent, tmp_path / "journals") / compacted.name
    session = kept.load(_session(journal))
    assert session is not None
    _flipped(_rows(journal))
    later = max(file.ends for file in session.files if file.table == "requests")

    assert kept.find(journal) is None
    assert kept.usable(journal, kept.files_of([Window(later + 60, None)]))[0] is not None


def test_files_of_a_version_without_digests_get_them(journal: Path) -> None:
    session = kept.load(_session(journal))
    assert session is not None
    session.files = [replace(file, digest=b"") for file in session.files]
    kept.save(journal, session)
    assert kept.find(journal) is not None
    assert "" == compact(journal).problem

    found = kept.find(journal)
    assert found is not None
    assert all(file.digest for file in kept.every_file(found))


def test_a_folder_of_kept_files_that_may_not_be_read_is_said(
    journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner(capsys, "summary", str(journal.parent))
    listed = os.listdir

    def refuses(folder: Path) -> list[str]:
        if str(folder).endswith(FOLDER):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "listdir", refuses)
    found = run("--format", "json")

    assert 3 == found.code
    assert f"{kept.folder_of(journal)} can't be read (Permission denied)" in found.err
