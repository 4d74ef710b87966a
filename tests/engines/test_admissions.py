"""Which hook reads the local hit of an admission."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

from kvledger.audit.engines import choose, host_version
from kvledger.audit.journal.memory_recorder import MemoryRecorder

USED = "kv_cache_manager.record_prefix_cache_stats"


@pytest.mark.parametrize(("setup", "hooked"), [({}, False), ({"connector": "scripted"}, True)])
def test_the_hit_used_is_read_only_where_it_may_differ_from_the_lookup(
    setup: dict[str, Any], hooked: bool
) -> None:
    """Without a connector the hit used equals the lookup's result, so one hook less runs per request."""
    live: list[str] = []

    def attach(scheduler: Any) -> None:
        observer = choose(scheduler)(scheduler, MemoryRecorder(), version=host_version())
        observer.start()
        live.extend(observer.hooks.live)
        observer.stop("exit")

    start(attach, **setup)

    assert hooked == (USED in live)
