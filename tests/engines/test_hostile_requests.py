"""What a client may ask for costs no event: an id that no encoding has, a priority beyond 64 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals

from kvledger.audit.events import RequestAdded, Snapshot
from kvledger.audit.journal.folder import read
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.journals import audit_paths

HUGE = 1 << 64
SURROGATE = "tenant-\ud800-\udfff"


def test_text_that_no_encoding_has_costs_no_event(tmp_path: Path) -> None:
    """A name in the environment may hold any bytes."""
    writer = JournalWriter(tmp_path / "engine-1-1-0")
    writer.rotate()
    started = replace(journals.STARTED, configuration={"instance": "\udcff", SURROGATE: 1})
    writer.write([started, Snapshot(0, 0, [], 0)])
    writer.close()
    (first, _) = (event for _, event in read(tmp_path / "engine-1-1-0"))

    assert 0 == writer.lost_events
    assert replace(started, configuration={"instance": r"\udcff", r"tenant-\ud800-\udfff": 1}) == first


@pytest.mark.parametrize("priority", [HUGE, -HUGE, 7])
@pytest.mark.parametrize("request_id", [SURROGATE, SURROGATE * 100, "été"])
def test_a_hostile_request_leaves_its_engine_clean(request_id: str, priority: int, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from tests.engines.observed import observe
    from tests.scenarios.driving import start

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
