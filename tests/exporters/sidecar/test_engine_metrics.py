"""Scrapes of engines: parsing, matching with journals, and a real engine's scrape against its journal."""

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
from tests.time_limits import RUN_HANGS

from kvledger.audit.analysis.source_differences import ComparedCounter
from kvledger.audit.causes import UNEXPLAINED
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Event, Snapshot
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.exporters.sidecar.engine_metrics import (
    SETTLE_SECONDS,
    WINDOW_SECONDS,
    CounterComparison,
    Reconciler,
    Scrape,
    ScrapedEngine,
    compared_counters,
    match,
)

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
        ScrapedEngine(URL, "0", "m"): {
            "prompt_tokens": 100.0,
            "local_tokens": 64.0,
            "device_hit_tokens": 64.0,
            "requests": 7.0,
        },
        ScrapedEngine(URL, "1", "m"): {"prompt_tokens": 7.0},
    } == compared_counters(TEXT, URL)


@pytest.fixture
def live(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., FollowedAudit]:
    """Audits of engines whose writers are alive."""

    def make(index: int, model: str = "m") -> FollowedAudit:
        path = tmp_path / f"engine-{len(list(tmp_path.iterdir()))}"
        writer = JournalWriter(path)
        request.addfinalizer(writer.close)
        writer.rotate()
        started = replace(journals.STARTED, configuration={"engine_index": index, "model": model})
        engine_audit = FollowedAudit(path)
        for number, event in enumerate((started, Snapshot(0, 0, [], 0))):
            engine_audit.feed(number, event)
        return engine_audit

    return make


def test_an_engine_is_matched_by_its_index(live: Callable[..., FollowedAudit]) -> None:
    audits = [live(0), live(1)]
    first, second = ScrapedEngine(URL, "0", "/models/m"), ScrapedEngine(URL, "1", "/models/m")

    assert {first: audits[0], second: audits[1]} == match([first, second], audits)


def test_engines_with_one_index_are_matched_by_model(live: Callable[..., FollowedAudit]) -> None:
    """vLLM names a model that was given as a path by the whole path."""
    audits = [live(0, "one"), live(0, "two")]

    assert (
        audits[1]
        is match([ScrapedEngine(URL, "0", "/models/two/")], audits)[ScrapedEngine(URL, "0", "/models/two/")]
    )


def test_an_ambiguous_match_is_not_compared(live: Callable[..., FollowedAudit]) -> None:
    audits = [live(0), live(0)]
    assert {} == match([ScrapedEngine(URL, "0", "m")], audits)
    assert {} == match(
        [ScrapedEngine(URL, "0", "m"), ScrapedEngine("http://other/metrics", "0", "m")], audits[:1]
    )
    assert {} == match([ScrapedEngine(URL, "5", "m")], audits)


def test_an_ended_engine_is_not_compared(tmp_path: Path) -> None:
    engine_audit = FollowedAudit(tmp_path)
    engine_audit.feed(0, journals.STARTED)

    assert {} == match([ScrapedEngine(URL, "0", "m")], [engine_audit])


def test_an_engine_is_scraped_and_compared(live: Callable[..., FollowedAudit]) -> None:
    engine_audit, clock = live(0), [1_000.0]
    answers = [
        'vllm:request_success_total{engine="0",finished_reason="stop"} 0.0\n',
        "no scrape at all {",
    ]
    reconciler = Reconciler(
        [URL], lambda: [engine_audit], threading.Lock(), ask=lambda url: answers[0], clock=lambda: clock[0]
    )
    for second in range(1_000, 1_030):
        clock[0] = engine_audit.read_seconds = float(second)
        reconciler.turn()
    assert engine_audit.engine_counters is not None and engine_audit.engine_counters.answered
    assert (ComparedCounter("requests", 0.0, 0.0, {UNEXPLAINED: 0.0}),) == engine_audit.engine_counters.rows

    answers.pop(0)
    for second in range(1_030, 1_050):
        clock[0] = engine_audit.read_seconds = float(second)
        reconciler.turn()
    assert not engine_audit.engine_counters.answered
    assert engine_audit.engine_counters.rows


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", ""])
def test_a_malformed_url_is_an_error(url: str) -> None:
    with pytest.raises(LedgerError, match="is no URL of an engine's metrics"):
        Reconciler([url], list, threading.Lock())


# --- a real engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, Event]], list[Scrape]]:
    """The journal and the scrapes of one real run under memory pressure."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("engine")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVLEDGER", "VLLM"))}
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.exporters.sidecar.scraped_engine", str(folder)],
        env=inherited | {"PYTHONPATH": paths, "KVLEDGER_DIR": str(folder / "journal")},
        capture_output=True,
        text=True,
        timeout=RUN_HANGS,
    )
    assert done.returncode == 0, done.stderr
    (journal,) = find_journals([folder / "journal"])
    lines = (folder / "scrapes.jsonl").read_text().splitlines()
    scrapes = []
    for began, ended, text in map(json.loads, lines):
        (figures,) = compared_counters(text, URL).values()
        scrapes.append(Scrape(began, ended, figures))
    return list(read(journal)), scrapes


def replayed(
    events: list[tuple[int, Event]], scrapes: list[Scrape], tamper: dict[str, float]
) -> tuple[FollowedAudit, list[ComparedCounter]]:
    """Replay journal and scrapes by the wall clock, then some idle time."""
    engine_audit = FollowedAudit(Path("nowhere"))
    started, snapshot, *rest = events
    engine_audit.feed(*started)
    engine_audit.feed(*snapshot)
    comparison = CounterComparison(engine_audit, zero=engine_audit.metrics.from_start)
    feed = iter([*rest, None])
    event = next(feed)
    waiting, rows = list(scrapes), []
    seconds = scrapes[0].began - 1
    until = scrapes[-1].ended + 3 * WINDOW_SECONDS
    while seconds < until:
        while event is not None and engine_audit.metrics.seconds(event[1].at) <= seconds:
            engine_audit.feed(*event)
            event = next(feed)
        engine_audit.read_seconds = seconds
        while waiting and waiting[0].ended <= seconds:
            comparison.scraped(waiting.pop(0))
        if not waiting:
            last = {f: n + tamper.get(f, 0) for f, n in scrapes[-1].counters.items()}
            comparison.scraped(Scrape(seconds, seconds, last))
        comparison.note(seconds)
        rows += engine_audit.engine_counters.rows if engine_audit.engine_counters else ()
        seconds += 0.5 if waiting else 3.0
    return engine_audit, rows


@pytest.mark.whole_engine
def test_a_real_engine_under_pressure_has_no_unexplained_figure(
    run: tuple[list[tuple[int, Event]], list[Scrape]],
) -> None:
    """With preemptions, loads and disconnected clients, every difference has a cause, to the token."""
    events, scrapes = run
    engine_audit, rows = replayed(events, scrapes, {})

    assert engine_audit.metrics.from_start and engine_audit.closed.preemptions and len(scrapes) > 20
    assert {0.0} == {row.drift[UNEXPLAINED] for row in rows}
    assert engine_audit.engine_counters is not None
    last = {row.figure: row for row in engine_audit.engine_counters.rows}
    assert 17 == len(last)
    for row in last.values():
        assert row.counted == row.ledger + sum(row.drift.values())
        assert "window" not in row.drift, row
    assert last["local_queried_tokens"].drift["resumed"] < 0
    assert set(last["external_tokens"].drift) - {UNEXPLAINED}
    assert 0 < last["unspecified_hit_tokens"].counted == last["unspecified_hit_tokens"].ledger


@pytest.mark.whole_engine
def test_a_real_engine_that_overcounts_a_block_is_unexplained(
    run: tuple[list[tuple[int, Event]], list[Scrape]],
) -> None:
    events, scrapes = run
    engine_audit, _ = replayed(events, scrapes, {"local_hit_tokens": 32.0})

    assert engine_audit.engine_counters is not None
    assert {"local_hit_tokens": 32.0} == {
        row.figure: row.drift[UNEXPLAINED]
        for row in engine_audit.engine_counters.rows
        if row.drift[UNEXPLAINED]
    }


def test_nothing_is_unexplained_before_the_window_has_passed(live: Callable[..., FollowedAudit]) -> None:
    """One figure outside the range may be a slow disk; a whole window of them is not."""
    engine_audit = live(0)
    comparison = CounterComparison(engine_audit, zero=True)
    amounts = []
    for second in range(1_000, 1_000 + int(2 * WINDOW_SECONDS)):
        engine_audit.read_seconds = float(second)
        comparison.scraped(Scrape(second, second, {"requests": 5.0}))
        comparison.note(second)
        if engine_audit.engine_counters is not None:
            amounts.append((second, engine_audit.engine_counters.rows[0].drift[UNEXPLAINED]))
    first = next(second for second, amount in amounts if amount)

    assert WINDOW_SECONDS <= first - 1_000 <= WINDOW_SECONDS + 2 * SETTLE_SECONDS
    assert 5.0 == amounts[-1][1]
