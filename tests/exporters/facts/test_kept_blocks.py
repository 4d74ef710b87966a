"""Kept rows about blocks: from them `whatif` has the trace of the whole journal, and reads its end only."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals

from kvledger.audit import causes
from kvledger.audit import events as ev
from kvledger.audit.analysis.block_states import BlockStates, BlockUse
from kvledger.audit.analysis.trace_reader import ADMIT, DROP, RESET, BlockTrace, NoBlockTrace
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.format import segments
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.ledger.blocks.contents import UNNAMED, Contents
from kvledger.audit.replay.atomic_files import FOLDER
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.request_traces import RecordedBlocks, block_prefixes, block_trace
from kvledger.audit.replay.windows import EVERYTHING, Window
from kvledger.exporters.facts import compact as compacting
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.kept import KeptFile, load, place
from kvledger.exporters.facts.kept_blocks import block_use, recorded_blocks, traces_at
from kvledger.exporters.reports.listing import prune

SIZE = 16
SECOND = 1_000_000
STARTED = replace(
    journals.STARTED, level="blocks", configuration={"model": "tiny", "block_bytes": 64, "workers": 1}
)
BEGAN = STARTED.began_seconds


class Engine:
    """Writes the block events of an engine with concurrent requests, as much of them as a test wants."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        *,
        blocks: int = 40,
        rotates: bool = False,
        segment_bytes: int = 20_000,
        step: int = SECOND,
    ) -> None:
        self.path = folder / "engine-00"
        self.step = step
        """The most microseconds between two events."""
        self.rng = random.Random(seed)
        self.at = self.requests = 0
        self.cached: dict[int, int] = {}
        """By block: its hash id."""
        self.free = list(range(1, blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.waiting: list[int] = []
        self.admitted: set[int] = set()
        self.batch: list[ev.Event] = []
        limits = Limits(segment_bytes, folder_bytes=3 * segment_bytes if rotates else Limits().folder_bytes)
        self.writer = JournalWriter(self.path, limits)
        self.blocks = blocks
        self.started = replace(STARTED, process_id=seed)
        self.begin_segment()

    def begin_segment(self) -> None:
        self.writer.rotate()
        rows = [
            ev.SnapshotRow(number, f"r{number}", length * SIZE + 1, False, 0, 0, 0, length * SIZE + 1, 0)
            for number, length in self.lengths.items()
        ]
        self.writer.write([self.started, ev.Snapshot(self.at, 0, rows, 0)])
        self.writer.write([self.pool()])

    def pool(self) -> ev.PoolSeen:
        return ev.PoolSeen(self.at, 0, 0, self.blocks, 0, len(self.free), 0, [0, SIZE, 2])

    def emit(self, *events: ev.Event) -> None:
        self.batch += events

    def flush(self) -> None:
        if self.batch:
            self.writer.write(self.batch)
        self.batch = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.at += self.rng.randrange(1, self.step)
            self.rng.choices(
                [self.add, self.admit, self.admit, self.finish, self.preempt, self.rare], [6, 6, 6, 6, 2, 1]
            )[0]()
            if self.rng.random() < 0.3:
                self.flush()
                if self.writer.wants_rotation:
                    self.begin_segment()
        self.flush()

    def stop(self) -> None:
        self.emit(ev.EngineStopped(self.at, "shutdown"))
        self.flush()
        self.writer.close()

    # --- what requests do ---------------------------------------------------------------------------

    def add(self) -> None:
        number, length = self.requests, self.rng.randrange(1, 6)
        self.requests += 1
        self.lengths[number] = length
        self.waiting.append(number)
        labels = ev.RequestLabels(group="night") if number % 3 else None
        self.emit(
            ev.RequestAdded(
                self.at, number, f"r{number}", length * SIZE + 1, priority=number % 2, labels=labels
            )
        )

    def admit(self) -> None:
        if not self.waiting:
            return
        number = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        family, length = number % 5, self.lengths[number]
        hashes = [hash((family, place, place > 2 and number)) for place in range(length)]
        block_of = {hash_id: block for block, hash_id in self.cached.items()}
        hit = []
        for hash_id in hashes:
            if hash_id not in block_of:
                break
            hit.append(block_of[hash_id])
        fresh = [block for block in self.free if block not in hit][: length - len(hit)]
        if len(fresh) < length - len(hit):
            self.waiting.append(number)
            return
        early = self.rng.random() < 0.5
        admitted = ev.Admitted(self.at, number, 1, False, len(hit) * SIZE, 0, False, len(hit) * SIZE)
        if early:
            self.emit(admitted)
        if hit:
            touched = ev.BlocksTouched(self.at, 1, 0, number, 0, "touch", hit, [1] * len(hit))
            self.emit(touched)
        if fresh:
            rows = [number, 0, len(fresh), *fresh]
            self.emit(ev.BlocksAllocated(self.at, 1, 0, "allocate", rows))
            row = [number, 0, -1, len(fresh)]
            for index, block in enumerate(fresh, len(hit)):
                row += [block, hashes[index], (index + 1) * SIZE]
                self.cached[block] = hashes[index]
            self.emit(ev.BlocksCached(self.at, 1, 0, row))
        if not early:
            self.emit(admitted)
        self.admitted.add(number)
        self.tables[number] = [*hit, *fresh]
        self.free = [block for block in self.free if block not in self.tables[number]]

    def _release(self, number: int) -> None:
        table = self.tables.pop(number)
        freed = table[::-1]
        self.emit(ev.BlocksFreed(self.at, 1, 0, number, 0, "free", freed, [0] * len(freed)))
        held = {block for other in self.tables.values() for block in other}
        self.free += [block for block in freed if block not in held]

    def finish(self) -> None:
        if self.tables:
            number = self.rng.choice(list(self.tables))
            if self.rng.random() < 0.2:
                self.emit(ev.Extended(self.at, number, self.lengths[number] * SIZE + 9, 0))
            self.emit(ev.Finished(self.at, number, "stop", 0, 0, 0, 0, 0))
            self._release(number)
            self.emit(ev.TablesRemoved(self.at, [number]))
            del self.lengths[number]

    def preempt(self) -> None:
        if self.tables:
            number = self.rng.choice(list(self.tables))
            before = self.lengths[number] * SIZE
            self.emit(ev.Preempted(self.at, number, 1, causes.BLOCKS, before, 0, 0, 0, 1, True))
            self._release(number)
            self.waiting.append(number)

    def rare(self) -> None:
        kind = self.rng.randrange(4)
        if kind == 0:
            self.emit(ev.PoolReset(self.at, 1, 0, True))
            self.cached.clear()
        elif kind == 1 and self.cached:
            block = self.rng.choice(list(self.cached))
            self.cached.pop(block)
            self.emit(ev.BlocksEvicted(self.at, 1, 0, 0, 0, "evict", [block]))
        elif kind == 2:
            self.emit(ev.Gap(self.at, 3, "buffer full"), self.pool())
        else:  # blocks that were cached while events were lost
            self.cached.update((block, 77 + block) for block in self.free[:2])


def from_journal(path: Path) -> RecordedBlocks:
    """What the journal alone gives."""
    recorded = RecordedBlocks(path)
    recorded.read()
    return recorded


def whole(path: Path, chosen: Window = EVERYTHING) -> BlockTrace:
    """The trace that the journal alone gives."""
    return block_trace(from_journal(path), chosen)


def journal_trace(path: Path, chosen: Window = EVERYTHING) -> BlockTrace:
    """The trace from kept rows and the end of the journal."""
    return block_trace(recorded_blocks(path), chosen)


JOURNALS = Path(__file__).parents[2] / "audit/replay/journals"
WINDOWS = [EVERYTHING, Window(BEGAN + 40), Window(BEGAN + 10, BEGAN + 60), Window(BEGAN + 1e6)]


@pytest.mark.parametrize(("seed", "step"), [(0, SECOND), (1, 120 * SECOND)], ids=["one hour", "many hours"])
def test_kept_rows_that_are_continued_give_the_trace_of_the_journal(
    tmp_path: Path, seed: int, step: int
) -> None:
    engine = Engine(tmp_path, seed, step=step)
    for steps in (1, 0, 300, 200):
        engine.run(steps)
        assert "" == compact(engine.path).problem or not steps
        for chosen in WINDOWS:
            assert whole(engine.path, chosen) == journal_trace(engine.path, chosen)
    engine.stop()
    assert whole(engine.path) == journal_trace(engine.path), "the end came after the trace was kept"
    compact(engine.path)
    found = journal_trace(engine.path)
    assert whole(engine.path) == found
    kinds = {operation[0] for operation in found.operations}
    assert {ADMIT, RESET, DROP} <= kinds and any(life.preempted for life in found.lives) and found.doubts
    unnamed = range(UNNAMED, UNNAMED + 1000)
    assert any(hash_id in unnamed for one in found.requests for hash_id in one.hashes)


def test_kept_rows_have_the_prefixes_and_the_block_use_of_the_journal(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1, step=20 * SECOND, blocks=16)
    for steps in (200, 300, 20, 0):
        engine.run(steps)
        assert "" == compact(engine.path).problem
        engine.run(30)
        expected = sorted(map(repr, block_prefixes(from_journal(engine.path))[0]))
        assert expected == sorted(map(repr, block_prefixes(recorded_blocks(engine.path))[0]))
        assert _use_of_journal(engine.path) == block_use(engine.path)
    assert any("losses=1" in prefix for prefix in expected)
    engine.stop()
    compact(engine.path)
    expected_use = _use_of_journal(engine.path)
    shutil.rmtree(engine.path)
    assert expected_use == block_use(place(engine.path))
    assert expected_use is not None and expected_use.evicted and expected_use.lifetimes.counts


def _use_of_journal(path: Path) -> BlockUse:
    states, contents = BlockStates(), Contents()
    for _, event in read(path):
        states.feed(event, contents.read(event))
    return states.use


def ended(folder: Path, steps: int = 300, seed: int = 0, **setup: Any) -> Engine:
    engine = Engine(folder, seed, **setup)
    engine.run(steps)
    engine.stop()
    return engine


def test_only_the_newest_batches_are_read_beside_kept_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    engine.run(300)
    compact(engine.path)
    read = _count_batches(monkeypatch)
    journal_trace(engine.path)
    assert 1 == len(read), "the last batch of a live engine"
    compact(engine.path)
    assert 2 == len(read)
    engine.stop()
    compact(engine.path)
    read.clear()
    journal_trace(engine.path)
    assert [] == read, "everything of an engine that has ended is kept"


def _count_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from kvledger.audit.journal import reader

    read: list[int] = []
    original = reader.decode_batch

    def decode_batch(data: memoryview) -> Any:
        read.append(len(data))
        return original(data)

    monkeypatch.setattr(reader, "decode_batch", decode_batch)
    return read


def test_kept_rows_outlive_their_journal(tmp_path: Path) -> None:
    engine = ended(tmp_path)
    compact(engine.path)
    expected = whole(engine.path)
    shutil.rmtree(engine.path)
    [path] = traces_at([tmp_path])
    assert expected == journal_trace(path)
    assert [path] == traces_at([tmp_path], Window(BEGAN + 1))
    with pytest.raises(LedgerError):
        traces_at([tmp_path], Window(BEGAN + 1e6))


def test_kept_rows_have_the_segments_that_rotation_removed(tmp_path: Path) -> None:
    engine = Engine(tmp_path, rotates=True)
    for _ in range(5):
        engine.run(500)
        compact(engine.path)
    assert 1 not in segments(engine.path)
    numbers = [int(one.request_id[1:]) for one in journal_trace(engine.path).requests]
    assert sorted(engine.admitted) == numbers
    assert len(whole(engine.path).requests) < engine.requests
    engine.stop()


def test_the_oldest_operations_are_dropped_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ended(tmp_path, step=120 * SECOND)
    compact(engine.path)
    expected, everything = whole(engine.path), _operation_bytes(engine.path)
    shutil.rmtree(tmp_path / FOLDER)
    monkeypatch.setattr(compacting, "MOST_BYTES", everything // 2)
    compact(engine.path)

    assert everything // 4 < _operation_bytes(engine.path) <= everything // 2
    found = journal_trace(engine.path)
    dropped = len(expected.lives) - len(found.lives)
    assert f"the {dropped:,} oldest admissions are not kept any more" == found.doubts[-1] and dropped > 9
    assert all(life.request < len(found.requests) for life in found.lives)
    lives = {operation[1] for operation in found.operations if operation[0] not in (RESET, DROP)}
    assert set(range(len(found.lives))) == lives
    again = [found.requests[life.request].request_id for life in found.lives]
    assert [expected.requests[life.request].request_id for life in expected.lives][dropped:] == again
    files = [*(tmp_path / FOLDER).glob("block_operations/*/*/*")]
    assert len(files) == len(_operation_files(engine.path))
    assert block_prefixes(recorded_blocks(engine.path))


def _operation_files(path: Path) -> list[KeptFile]:
    session = load(place(path))
    assert session is not None
    return [one for one in (*session.files, *session.tail) if one.table == "block_operations"]


def _operation_bytes(path: Path) -> int:
    return sum(one.bytes for one in _operation_files(path))


def test_kept_rows_of_another_version_are_not_used_while_the_journal_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ended(tmp_path)
    compact(engine.path)
    monkeypatch.setattr(kept, "blocks_layout", lambda: "another")
    assert whole(engine.path) == journal_trace(engine.path)
    shutil.rmtree(engine.path)
    with pytest.raises(LedgerError, match="compacted by another version"):
        journal_trace(place(engine.path))


def test_the_kept_rows_of_another_journal_with_the_same_name_are_not_used(tmp_path: Path) -> None:
    compact(ended(tmp_path).path)
    (tmp_path / "engine-00").rename(tmp_path / "before")
    engine = ended(tmp_path, seed=1)
    assert whole(engine.path) == journal_trace(engine.path) != whole(tmp_path / "before")


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(
            path, marks=() if "0.32.0-blocks" in path.name else pytest.mark.golden, id=path.name[:-7]
        )
        for path in sorted(JOURNALS.glob("*blocks.tar.xz"))
    ],
)
def test_kept_rows_of_real_engines_give_the_trace_of_the_journal(tmp_path: Path, archive: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    compared = 0
    for journal in journals_at([tmp_path]):
        assert "" == compact(journal).problem
        try:
            expected = whole(journal)
        except NoBlockTrace as error:
            with pytest.raises(NoBlockTrace, match=re.escape(str(error))):
                journal_trace(journal)
            continue
        assert expected == journal_trace(journal)
        assert repr(block_prefixes(from_journal(journal))) == repr(block_prefixes(recorded_blocks(journal)))
        assert _use_of_journal(journal) == block_use(journal)
        compared += len(expected.lives)
    assert compared > 5


@pytest.mark.parametrize("where", ["torn tail", "in the middle", "whole segment"])
def test_damage_in_a_journal_is_lost_once(tmp_path: Path, where: str) -> None:
    engine = Engine(tmp_path)
    engine.run(250)
    compact(engine.path)
    before = len(segments(engine.path))
    while len(segments(engine.path)) < before + 3:
        engine.run(50)
    engine.writer.close()
    files = list(segments(engine.path).values())
    damaged = files[-1] if where == "torn tail" else files[-2]
    data = bytearray(damaged.read_bytes())
    if where == "torn tail":
        damaged.write_bytes(data[:-5])
    elif where == "in the middle":
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
    else:
        damaged.unlink()
    expected = whole(engine.path)
    assert "events were lost" in expected.doubts[-1] and expected == journal_trace(engine.path)
    for _ in range(2):
        compact(engine.path)
        assert expected == journal_trace(engine.path)


def test_prune_leaves_the_kept_rows(tmp_path: Path) -> None:
    engine = ended(tmp_path)
    compact(engine.path)
    expected = whole(engine.path)
    assert 1 == len(prune(tmp_path, before_seconds=None, most_bytes=0, remove=True).journals)
    assert [place(engine.path)] == traces_at([tmp_path]) and not engine.path.exists()
    assert expected == journal_trace(place(engine.path))


def test_journals_without_a_block_trace_say_why(tmp_path: Path) -> None:
    path = journals.clean(tmp_path / "engine-01")
    groups = [0, SIZE, 2, 1, SIZE, 2]
    several = journals.write(
        tmp_path / "engine-02", [ev.PoolSeen(0, 0, 0, 9, 0, 8, 0, groups)], level="blocks"
    )
    for journal, why in ((path, "KVLEDGER_LEVEL=blocks"), (several, "2 groups")):
        for _ in range(2):
            with pytest.raises(NoBlockTrace, match=why):
                journal_trace(journal)
            assert "" == compact(journal).problem
    assert [] == [*(tmp_path / FOLDER).glob("block_operations")]


@pytest.mark.parametrize("level", ["tokens", "worker", "blocks", "content"])
def test_the_levels_above_blocks_have_block_traces(tmp_path: Path, level: str) -> None:
    path = journals.write(
        tmp_path / "engine-03", [ev.PoolSeen(0, 0, 0, 9, 0, 8, 0, [0, SIZE, 2])], level=level
    )
    compact(path)
    if level in ("blocks", "content"):
        assert 8 == journal_trace(path).blocks
    else:
        with pytest.raises(NoBlockTrace):
            journal_trace(path)


def test_kept_rows_name_the_folder_of_its_host(tmp_path: Path) -> None:
    engine = ended(tmp_path / "rack-7")
    [journal] = traces_at([tmp_path])
    compact(journal)
    name = journal_trace(journal).engine
    assert name.endswith(" in rack-7") and journal_trace(engine.path).engine == name.removesuffix(
        " in rack-7"
    )
    shutil.rmtree(engine.path)
    [path] = traces_at([tmp_path])
    assert name == journal_trace(path).engine


def test_a_journal_that_was_not_compacted_is_read_without_the_analysis_extra(tmp_path: Path) -> None:
    """Both views in one process, of a journal and of one with kept rows."""
    plain = ended(tmp_path, 40).path
    kept = shutil.copytree(plain, tmp_path / "kept" / plain.name)
    compact(kept)
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('pyarrow', 'duckdb', 'pandas')))\n"
        "from kvledger import cli\n"
        "for words in [(view, path) for path in sys.argv[1:] for view in ('prefixes', 'blocks')]:\n"
        "    sys.argv = ['kvledger', 'summary', *words, '--format', 'json']\n"
        "    try: cli.main()\n"
        "    except SystemExit as exited: print('exit', exited.code)\n"
    )
    run = [sys.executable, "-c", program, str(plain), str(kept)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    answers = re.split(r"exit (\d)\n", done.stdout)
    assert ["0", "0", "2", "2"] == answers[1::2]
    assert [True, True, False, False] == [text.startswith("{") for text in answers[:-1:2]]
    assert ["", ""] == answers[4:-1:2]
    assert 2 == len(done.stderr.splitlines()) == done.stderr.count("pip install duckdb pandas pyarrow")
