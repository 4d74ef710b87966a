"""The prefixes of real schedulers with several KV cache groups."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engines.conftest import Recorded
from tests.scenarios.corpus import SCENARIOS

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.block_traces import block_prefixes
from kvledger.exporters.facts.kept_blocks import recorded_blocks

NAMES = [name for name in SCENARIOS if "hybrid" in name or "crowd" in name or "states_cut" in name]


@pytest.mark.parametrize("name", NAMES)
def test_what_prefixes_saved_are_the_local_hits(name: str, recorded: Recorded, tmp_path: Path) -> None:
    if SCENARIOS[name].lacking():
        pytest.skip("; ".join(SCENARIOS[name].lacking()))
    events = recorded(name, "blocks")
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(events)
    hits = sum(max(0, life.local) for account in auditor.ledger.accounts() for life in account.lives)

    with closing(JournalWriter(tmp_path)) as journal:
        journal.write(events)
    found, _ = block_prefixes(recorded_blocks(tmp_path, groups=True))

    assert hits == sum(each.saved_tokens for each in found)
