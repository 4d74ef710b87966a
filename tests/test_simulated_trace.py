"""The trace of many requests: clean, the same for the same seed, and of the whole vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.simulated import Mix
from tests.simulated_trace import main, write_journal, write_trace

from kvledger.audit import events as ev
from kvledger.audit.journal.host_folders import read
from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.reports.why import why

RICH = Mix(running=16, load_fails=0.2, deferred=0.2, aborted=0.1, session=0.1, speculative=0.2, reset=2e-3)
FIRST_OF_BLOCKS = 25
"""Tags from here on are of level blocks, and of what connectors count themselves."""

NOT_MADE = {ev.Gap, ev.HookFailed, ev.LookupKept}


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rich") / "engine"
    write_journal(folder, 3_000, seed=7, mix=RICH)
    return folder


def test_every_statement_of_it_is_right(rich: Path) -> None:
    audit = audit_paths([rich])

    assert "clean" == audit.verdict
    requests = {found.id for found in audit.violations if not found.id.startswith("metrics/")}
    assert {"connector/failed-load-counted"} == requests
    assert 3_000 == audit.totals.requests
    assert 0 == audit.totals.unknown_requests


def test_it_has_the_whole_vocabulary(rich: Path) -> None:
    of_tokens = {kind for kind in ev.AnyEvent.__args__ if kind.__struct_config__.tag < FIRST_OF_BLOCKS}
    assert of_tokens - NOT_MADE == {type(event) for _, event in read(rich)}


def test_every_cause_that_can_be_proved_is_in_it(rich: Path) -> None:
    causes = {row.cause for row in why([rich]).causes}

    assert {"below_block", "preempted", "load_failed", "cache_reset", "last_token", "not_knowable"} <= causes


def test_the_same_seed_is_the_same_journal(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_trace(tmp_path / name, 200, engines=2, seed=3)
    first, second = (
        [file.read_bytes() for file in sorted((tmp_path / name).rglob("*.kvl"))] for name in ("one", "two")
    )

    assert first == second


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["100", "-o", str(tmp_path / "trace")])
    assert capsys.readouterr().out.startswith("100 requests, ")
