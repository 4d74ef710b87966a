"""Engines' own metrics: what is read of a scrape, whose it is, and a real engine's against its journal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals

from kvledger.audit.analysis.reconciliation import Compared
from kvledger.audit.causes import UNEXPLAINED
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Event, Snapshot
from kvledger.audit.journal.folder import find_journals, read
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.exporters.sidecar import scrape_engine
from kvledger.exporters.sidecar.reconcile import SETTLE_SECONDS, WINDOW_SECONDS, CounterComparison, Scrape
from kvledger.exporters.sidecar.scrape_engine import Engine, Reconciler, counters, match

ROOT = Path(__file__).parents[3]
URL = "http://127.0.0.1:8000/metrics"
TEXT = """
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_total{engine="1",model_name="m"} 7.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 64.0
# TYPE vllm:prompt_tokens_cached_by_source counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 64.0
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
# TYPE process_open_fds gauge
process_open_fds 7.0
"""


def test_counters_are_read_by_engine() -> None:
    assert {
        Engine(URL, "0", "m"): {"prompt_tokens": 100.0, "local_tokens": 64.0, "requests": 7.0},
        Engine(URL, "1", "m"): {"prompt_tokens": 7.0},
    } == counters(TEXT, URL)


@pytest.fixture
def live(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., EngineAudit]:
    """Books of engines whose writers live."""

    def make(index: int, model: str = "m") -> EngineAudit:
        path = tmp_path / f"engine-{len(list(tmp_path.iterdir()))}"
        writer = JournalWriter(path)
        request.addfinalizer(writer.close)
        writer.rotate()
        started = replace(journals.STARTED, configuration={"engine_index": index, "model": model})
        book = EngineAudit(path)
        for number, event in enumerate((started, Snapshot(0, 0, [], 0))):
            book.feed(number, event)
        return book

    return make


def test_an_engine_is_matched_by_its_index(live: Callable[..., EngineAudit]) -> None:
    books = [live(0), live(1)]
    first, second = Engine(URL, "0", "/models/m"), Engine(URL, "1", "/models/m")

    assert {first: books[0], second: books[1]} == match([first, second], books)


def test_of_several_of_one_index_the_model_tells(live: Callable[..., EngineAudit]) -> None:
    """vLLM names a model that it was given as a path by the whole path."""
    books = [live(0, "one"), live(0, "two")]

    assert books[1] is match([Engine(URL, "0", "/models/two/")], books)[Engine(URL, "0", "/models/two/")]


def test_where_there_is_a_doubt_nothing_is_compared(live: Callable[..., EngineAudit]) -> None:
    books = [live(0), live(0)]
    assert {} == match([Engine(URL, "0", "m")], books)
    assert {} == match([Engine(URL, "0", "m"), Engine("http://other/metrics", "0", "m")], books[:1])
    assert {} == match([Engine(URL, "5", "m")], books)


def test_what_is_gone_is_not_compared(tmp_path: Path) -> None:
    book = EngineAudit(tmp_path)
    book.feed(0, journals.STARTED)

    assert {} == match([Engine(URL, "0", "m")], [book])


def test_an_engine_is_scraped_and_compared(live: Callable[..., EngineAudit]) -> None:
    book, clock = live(0), [1_000.0]
    answers = [
        'vllm:request_success_total{engine="0",finished_reason="stop"} 0.0\n',
        "no scrape at all {",
    ]
    reconciler = Reconciler(
        [URL], lambda: [book], threading.Lock(), ask=lambda url: answers[0], clock=lambda: clock[0]
    )
    for second in range(1_000, 1_030):
        clock[0] = book.read_seconds = float(second)
        reconciler.turn()
    assert book.engine_counters is not None and book.engine_counters.answered
    assert (Compared("requests", 0.0, 0.0, {UNEXPLAINED: 0.0}),) == book.engine_counters.rows

    answers.pop(0)
    for second in range(1_030, 1_050):
        clock[0] = book.read_seconds = float(second)
        reconciler.turn()
    assert not book.engine_counters.answered
    assert book.engine_counters.rows


def test_an_endless_answer_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless = tmp_path / "metrics"
    endless.write_text("#" * 100)
    monkeypatch.setattr(scrape_engine, "MOST_BYTES", 99)

    with pytest.raises(ValueError, match="more than 99 bytes"):
        scrape_engine.fetch(endless.as_uri())


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(LedgerError, match="is no URL of an engine's metrics"):
        Reconciler([url], list, threading.Lock())


# --- a real engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, Event]], list[Scrape]]:
    """What the real engine's journal and its own metrics said, of one run under pressure."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("engine")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVLEDGER", "VLLM"))}
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.exporters.sidecar.scraped_engine", str(folder)],
        env=inherited | {"PYTHONPATH": paths, "KVLEDGER_DIR": str(folder / "journal")},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    (journal,) = find_journals([folder / "journal"])
    lines = (folder / "scrapes.jsonl").read_text().splitlines()
    scrapes = []
    for began, ended, text in map(json.loads, lines):
        (figures,) = counters(text).values()
        scrapes.append(Scrape(began, ended, figures))
    return list(read(journal)), scrapes


def replayed(
    events: list[tuple[int, Event]], scrapes: list[Scrape], tamper: dict[str, float]
) -> tuple[EngineAudit, list[Compared]]:
    """Both followed by the wall clock, and then a while of silence."""
    book = EngineAudit(Path("nowhere"))
    started, snapshot, *rest = events
    book.feed(*started)
    book.feed(*snapshot)
    comparison = CounterComparison(book, zero=book.metrics.from_start)
    feed = iter([*rest, None])
    event = next(feed)
    waiting, rows = list(scrapes), []
    seconds = scrapes[0].began - 1
    until = scrapes[-1].ended + 3 * WINDOW_SECONDS
    while seconds < until:
        while event is not None and book.metrics.seconds(event[1].at) <= seconds:
            book.feed(*event)
            event = next(feed)
        book.read_seconds = seconds
        while waiting and waiting[0].ended <= seconds:
            comparison.scraped(waiting.pop(0))
        if not waiting:
            last = {f: n + tamper.get(f, 0) for f, n in scrapes[-1].counters.items()}
            comparison.scraped(Scrape(seconds, seconds, last))
        comparison.note(seconds)
        rows += book.engine_counters.rows if book.engine_counters else ()
        seconds += 0.5 if waiting else 3.0
    return book, rows


@pytest.mark.whole_engine
def test_a_real_engine_under_pressure_has_no_unexplained_figure(
    run: tuple[list[tuple[int, Event]], list[Scrape]],
) -> None:
    """Preemptions, loads, clients that go away: every difference ends with its name, to the token."""
    events, scrapes = run
    book, rows = replayed(events, scrapes, {})

    assert book.metrics.from_start and book.closed.preemptions and len(scrapes) > 20
    assert {0.0} == {row.drift[UNEXPLAINED] for row in rows}
    assert book.engine_counters is not None
    last = {row.figure: row for row in book.engine_counters.rows}
    assert 11 == len(last)
    for row in last.values():
        assert row.counted == row.ledger + sum(row.drift.values())
        assert "window" not in row.drift, row
    assert last["local_queried_tokens"].drift["resumed"] < 0
    assert set(last["external_tokens"].drift) - {UNEXPLAINED}


@pytest.mark.whole_engine
def test_a_real_engine_that_counts_a_block_too_much_is_found(
    run: tuple[list[tuple[int, Event]], list[Scrape]],
) -> None:
    events, scrapes = run
    book, _ = replayed(events, scrapes, {"local_hit_tokens": 32.0})

    assert book.engine_counters is not None
    assert {"local_hit_tokens": 32.0} == {
        row.figure: row.drift[UNEXPLAINED] for row in book.engine_counters.rows if row.drift[UNEXPLAINED]
    }


def test_before_the_window_has_passed_nothing_is_said(live: Callable[..., EngineAudit]) -> None:
    """A figure outside the range once may be a slow disk; in every scrape of a window it is not."""
    book = live(0)
    comparison = CounterComparison(book, zero=True)
    told = []
    for second in range(1_000, 1_000 + int(2 * WINDOW_SECONDS)):
        book.read_seconds = float(second)
        comparison.scraped(Scrape(second, second, {"requests": 5.0}))
        comparison.note(second)
        if book.engine_counters is not None:
            told.append((second, book.engine_counters.rows[0].drift[UNEXPLAINED]))
    first = next(second for second, amount in told if amount)

    assert WINDOW_SECONDS <= first - 1_000 <= WINDOW_SECONDS + 2 * SETTLE_SECONDS
    assert 5.0 == told[-1][1]
