"""What a client may ask for costs no event: an id that no encoding has, a priority beyond 64 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe
from tests.scenarios.driving import start

from kvledger.audit.events import RequestAdded
from kvledger.audit.journal.folder import read
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.journals import audit_paths

HUGE = 1 << 64
SURROGATE = "tenant-\ud800-\udfff"


@pytest.mark.parametrize("priority", [HUGE, -HUGE, 7])
@pytest.mark.parametrize("request_id", [SURROGATE, SURROGATE * 100, "été"])
def test_a_hostile_request_leaves_its_engine_clean(request_id: str, priority: int, tmp_path: Path) -> None:
    def scenario(attach: object, **setup: object) -> object:
        driver = start(attach, **setup)
        transfer = {"do_remote_prefill": False, "remote_request_id": SURROGATE}
        driver.add(request_id, range(1, 41), max_tokens=2, priority=priority, transfer=transfer)
        driver.run()
        return driver

    _, stream = observe(scenario)
    writer = JournalWriter(tmp_path / "engine-1-1-0")
    writer.rotate()
    writer.write(stream)
    writer.close()

    assert 0 == writer.lost_events
    audit = audit_paths([tmp_path])
    assert "clean" == audit.verdict
    (added,) = (event for _, event in read(tmp_path / "engine-1-1-0") if isinstance(event, RequestAdded))
    assert priority == added.priority or abs(added.priority) == (1 << 63) - 1
