"""A round of the benchmark counts only if its journal is complete and audits clean."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import run, scheduler
from benchmarks.scheduler import BLOCK_STEPS, BY_KEY, Effort
from benchmarks.validity import InvalidRound, require_complete
from tests import journals
from tests.histories import events

from kvledger.audit import events as ev
from kvledger.audit.hooks import Hooks
from kvledger.audit.journal.writer import JournalWriter

real_engine = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="steps a real vLLM")

CLEAN = events(200, journals.CLEAN)
REQUEST_ID = next(event.request_id for event in CLEAN if isinstance(event, ev.RequestAdded))
LAST = CLEAN[-1].at


def test_a_complete_journal_counts(tmp_path: Path) -> None:
    steps = sum(isinstance(event, ev.Stepped) for event in CLEAN)

    require_complete(journals.clean(tmp_path / "journal"), {REQUEST_ID}, steps)


def test_a_request_that_ran_before_observation_began_is_no_reason(tmp_path: Path) -> None:
    row = ev.SnapshotRow(0, "early", 200, False, 200, 0, 0, 204, 0)
    writer = JournalWriter(tmp_path / "journal")
    writer.rotate()
    writer.write([journals.STARTED, ev.Snapshot(0, 0, [row], 0)])
    writer.close()

    require_complete(writer.folder, {"early"}, 0)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (CLEAN, "1 of 2 requests are not in the journal$"),
        ([*CLEAN, ev.Gap(LAST, 3, "the queue was full")], "the journal lost events 1 times"),
        (
            [*CLEAN, ev.HookFailed(LAST, "schedule", "KeyError()", True)],
            r"hooks failed 1 times, first schedule: Key",
        ),
        (CLEAN[1:], "1 requests that arrived under observation are unknown"),
        (
            journals.reported(CLEAN, local=-128, external=160, computed=168),
            "the audit found [12] violations, first",
        ),
    ],
    ids=["a request is missing", "a gap", "a failed hook", "an unknown request", "a violation"],
)
def test_an_incomplete_journal_does_not_count(tmp_path: Path, stream: list[ev.Event], reason: str) -> None:
    with pytest.raises(InvalidRound, match=reason):
        require_complete(journals.write(tmp_path / "journal", stream), {REQUEST_ID, "another"})


def test_a_journal_without_some_steps_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(InvalidRound, match=r"the journal has [0-9]+ of 1000 steps"):
        require_complete(journals.clean(tmp_path / "journal"), {REQUEST_ID}, 1000)


def test_a_journal_without_events_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(InvalidRound, match="journal can't be read: There is no"):
        require_complete(tmp_path / "nothing", {REQUEST_ID})


class Failing:
    """An observer whose hooks, and those of its parts, all raise."""

    def __getattr__(self, name: str) -> Failing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Failing()

    def __call__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("a failing hook")


@pytest.fixture
def failing_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    install = Hooks.__init__

    def install_failing(
        self: Hooks, table: Any, root: Any, observer: object, *rest: Any, **named: Any
    ) -> None:
        install(self, table, root, Failing(), *rest, **named)

    monkeypatch.setattr(Hooks, "__init__", install_failing)


@real_engine
@pytest.mark.parametrize("key", ["churn-short", "steady-256", "blocks-churn"])
def test_a_round_with_failing_hooks_does_not_count(key: str, tmp_path: Path, failing_hooks: None) -> None:
    workload = replace(BY_KEY[key], running=8)

    with pytest.raises(InvalidRound, match=r"hooks failed [0-9]+ times, first"):
        scheduler.measure(workload, Effort(1, BLOCK_STEPS), tmp_path, lambda _: None)


@real_engine
def test_the_benchmark_fails_with_the_reason_if_hooks_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing_hooks: None
) -> None:
    monkeypatch.setattr(sys, "argv", ["make bench", "--quick", "churn-short"])
    monkeypatch.setattr(run, "settle", lambda: None)

    assert 1 == run.main()
    printed = capsys.readouterr()
    assert "The benchmark failed: this round does not count: hooks failed" in printed.err
    assert "" == printed.out
