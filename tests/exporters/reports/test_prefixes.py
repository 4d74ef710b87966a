"""`kvledger summary prefixes`: what it prints of the prefixes of small histories."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.audit.analysis.test_blocks import A, B, C, D, Recording
from tests.command_line import exit_code

from kvledger.audit.journal.writer import JournalWriter


def test_last_losses_are_by_time_and_have_wall_clock_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B is lost first, and A with C, of more tokens, later."""
    recording = Recording(blocks=5)
    recording.request([], [(1, B)])
    recording.request([], [(1, A), (2, C)])
    recording.request([], [(3, B)])
    recording.request([], [(1, D), (2, D + 1)])
    recording.request([], [(1, A), (2, C)])
    folder = journals.write(tmp_path / "blocks", recording.events, level="blocks")

    assert 0 == exit_code("summary", "prefixes", folder)

    text = " ".join(capsys.readouterr().out.partition("Last losses")[2].split())
    first, second = text.index("r2 computed 16 tokens"), text.index("r4 computed 32 tokens")
    assert first < second
    assert text.startswith("2023-11-14 22:13:22.000 UTC: r2 computed")
    assert "evicted at 2023-11-14 22:13:21.000 UTC for r1" in text


def test_a_loss_has_no_date_if_no_engine_was_seen_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = Recording(blocks=3)
    for hash_id in (B, A, B):
        recording.request([], [(1, hash_id)])
    writer = JournalWriter(tmp_path / "blocks")
    writer.rotate()
    writer.write(recording.events)
    writer.close()

    exit_code("summary", "prefixes", tmp_path / "blocks")

    text = " ".join(capsys.readouterr().out.partition("Last losses")[2].split())
    assert "1970" not in text
    assert "an unknown time: r2 computed 16 tokens" in text.lower()
